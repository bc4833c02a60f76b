"""Blocks that wait in host memory: a sequence gives up its blocks and gets others later.

A request that decodes needs a new block now and then. If none is free, another request has to make
room. Its K and V can be thrown away and computed again (lesson 15), or be copied to the host and
back. The copy is cheaper for a long sequence on a fast link, because it costs bytes and no FLOPs.

Source: Kwon et al. 2023, PagedAttention, section 4.5.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lessons.l03_kv_cache.cache import KVPool
from lessons.l12_paged_kv.runner import PagedRunner


class HostSwap:
    """K and V of sequences that have no blocks now: {sequence: (tokens, [K, V])} on the host.

    K: [layers, blocks, block_size, Hkv, D]. swapped_bytes counts both directions.
    """

    def __init__(self, runner: PagedRunner):
        self.runner = runner
        self.away: dict[int, tuple[int, list[Tensor]]] = {}
        self.swapped_bytes = 0

    @torch.inference_mode()
    def swap_out(self, sequence: int) -> None:
        """Copy a sequence's blocks to the host, then free them."""
        runner = self.runner
        kept = read_blocks(runner.pool, self.slots, runner.blocks.pages(sequence))
        self.away[sequence] = runner.held[sequence], kept
        self.swapped_bytes += sum(x.nbytes for x in kept)
        runner.free(sequence)

    @torch.inference_mode()
    def swap_in(self, sequence: int) -> None:
        """Give a sequence blocks again, whichever are free, and what it had in the old ones.

        Raises OutOfBlocks; then it is still away.
        """
        runner = self.runner
        held, kept = self.away[sequence]
        runner.blocks.receive(sequence, held)
        del self.away[sequence]
        runner.held[sequence] = held
        write_blocks(runner.pool, self.slots, runner.blocks.pages(sequence), kept)
        self.swapped_bytes += sum(x.nbytes for x in kept)

    def forget(self, sequence: int) -> None:
        """A sequence will not come back. One that is not away: nothing."""
        self.away.pop(sequence, None)

    def blocks_of(self, sequence: int) -> int:
        """How many blocks it takes to bring a sequence back."""
        return self.runner.blocks.blocks_held(self.away[sequence][0])

    @property
    def slots(self) -> tuple[Tensor, ...]:
        return self.runner.pool.tensors


def read_blocks(pool: KVPool, tensors: Iterable[Tensor], table: Sequence[int]) -> list[Tensor]:
    """Copies on the host of these blocks: [layers, len(table), block_size, Hkv, …] of each tensor:
    [layers, slots + 1, Hkv, …].
    """
    blocks = torch.tensor(table, device=pool.k_slots.device)
    return [on_host(pool.blocks(slots)[:, blocks]) for slots in tensors]


def on_host(x: Tensor) -> Tensor:
    """A copy in host memory, [...]. A GPU's goes to pinned memory, which the GPU itself can write
    and read, several times as fast as what the system may move.
    """
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x)


def write_blocks(
    pool: KVPool, tensors: Iterable[Tensor], table: Sequence[int], kept: list[Tensor]
) -> None:
    """What `read_blocks` returned, into these blocks."""
    blocks = torch.tensor(table, device=pool.k_slots.device)
    for slots, x in zip(tensors, kept):
        pool.blocks(slots)[:, blocks] = x.to(slots.device)
