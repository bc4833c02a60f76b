"""Blocks of several pools on the host: what a preempted request has in the target and in its
draft.
"""

from torch import Tensor

from lessons.l03_kv_cache.cache import KVPool
from lessons.l12_paged_kv.more.swap import HostSwap
from lessons.l15_chunked_prefill.swap import Lender


class PoolsSwap(HostSwap):
    """Lesson 12's HostSwap for several pools whose blocks have the same numbers."""

    def __init__(self, runner: Lender, pools: list[KVPool]):
        super().__init__(runner)
        self.pools = pools

    @property
    def slots(self) -> list[Tensor]:
        return [slots for pool in self.pools for slots in pool.tensors]
