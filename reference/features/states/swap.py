"""preemption_mode="swap" for a model with states: a sequence's state waits on the host beside its
blocks, and comes back into whatever slot is free.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lessons.l03_kv_cache.cache import KVPool
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l12_paged_kv.more.swap import on_host
from lessons.l15_chunked_prefill.swap import Host, Lender
from reference.features.states.pool import HybridPool
from reference.features.swap import PoolsSwap


class StateSwap(PoolsSwap):
    """PoolsSwap, and the state of each sequence that is away: {sequence: [layers, …] of each
    tensor}.
    """

    def __init__(self, runner: Lender, pools: list[KVPool]):
        super().__init__(runner, pools)
        self.states: dict[int, list[Tensor]] = {}

    @torch.inference_mode()
    def swap_out(self, sequence: int) -> None:
        """Copy its state and its blocks to the host, then free them."""
        kept = self.runner.pool.states.read(self.runner.blocks.tables[sequence].slot)
        self.states[sequence] = [on_host(x) for x in kept]
        self.swapped_bytes += sum(x.nbytes for x in kept)
        super().swap_out(sequence)

    @torch.inference_mode()
    def swap_in(self, sequence: int) -> None:
        """Give a sequence blocks and a slot again, and what it had. Raises OutOfBlocks; then it is
        still away.
        """
        super().swap_in(sequence)
        kept = self.states.pop(sequence)
        self.runner.pool.states.write(self.runner.blocks.tables[sequence].slot, kept)
        self.swapped_bytes += sum(x.nbytes for x in kept)

    def forget(self, sequence: int) -> None:
        """A sequence will not come back. One that is not away: nothing."""
        super().forget(sequence)
        self.states.pop(sequence, None)


class StateHost(Host):
    """Lesson 15's Host, in which each request that waits takes room for its state, too.
    state_blocks: as many blocks as a state is large.
    """

    def __init__(self, swap: StateSwap, host_blocks: int | None, state_blocks: int):
        super().__init__(swap, host_blocks)
        self.state_blocks = state_blocks

    def has_room(self, blocks: int) -> bool:
        """Whether a request with so many blocks more may wait here."""
        states = (len(self.swap.away) + 1) * self.state_blocks
        return super().has_room(blocks + states)


def state_host(
    pool: HybridPool,
    blocks: BlockManager,
    others: Sequence[KVPool],
    block_bytes: int,
    host_blocks: int,
) -> StateHost:
    """Where K, V and states of preempted requests wait. others: pools whose blocks have the same
    numbers. block_bytes: of one block in all pools; host_blocks: room on the host.
    """
    swap = StateSwap(Lender(pool, blocks), [pool, *others])
    slot_bytes = pool.states.nbytes // pool.states.num_slots
    return StateHost(swap, host_blocks, -(-slot_bytes // block_bytes))
