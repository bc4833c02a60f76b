"""preemption_mode="swap": blocks of several pools on the host, what a preempted request has in the
target and in its draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lessons.l03_kv_cache.cache import KVPool
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l12_paged_kv.more.swap import HostSwap
from lessons.l15_chunked_prefill.swap import Host, Lender

if TYPE_CHECKING:  # the engine's runner imports this
    from reference.engine.engine_args import EngineArgs
    from reference.engine.model_runner import ModelRunner


class PoolsSwap(HostSwap):
    """Lesson 12's HostSwap for several pools whose blocks have the same numbers."""

    def __init__(self, runner: Lender, pools: list[KVPool]):
        super().__init__(runner)
        self.pools = pools

    @property
    def slots(self) -> list[Tensor]:
        return [slots for pool in self.pools for slots in pool.tensors]


def new_host(
    args: EngineArgs, runner: ModelRunner, blocks: BlockManager, others: list[KVPool]
) -> Host:
    """swap_space GiB of host memory, where what preempted requests have computed waits. others:
    pools whose blocks have the same numbers.
    """
    token_bytes = sum(pool.bytes_per_token for pool in [runner.pool, *others])
    block_bytes = token_bytes * args.tokens_per_block
    host_blocks = int(args.swap_space * 2**30 // block_bytes)
    if runner.model.config.state is not None:
        from reference.features.states.swap import state_host  # here: few models need it

        return state_host(runner.pool, blocks, others, block_bytes, host_blocks)
    return Host(runner.new_swap(blocks, others), host_blocks)
