"""Preemption by swapping: K and V of a preempted request wait in host memory, and come back into
other blocks. Nothing is computed twice; instead the bytes travel twice.

    swap = HostSwap(Lender(pool, blocks))
    scheduler = ChunkedScheduler(blocks, host=Host(swap), max_num_batched_tokens=512)

lab/costs.py tells when this is cheaper than computing again. Lesson 12's HostSwap does the copying.

Source: Kwon et al. 2023, PagedAttention, section 4.5.
"""

from lessons.l03_kv_cache.cache import KVPool
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l12_paged_kv.more.swap import HostSwap
from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.l15_chunked_prefill.preemption import Nowhere


class Lender:
    """What HostSwap asks of a runner, for a pool whose blocks a scheduler gives and frees.

    held: tokens in the cache of each sequence that comes or goes.
    """

    def __init__(self, pool: KVPool, blocks: BlockManager):
        self.pool = pool
        self.blocks = blocks
        self.held: dict[int, int] = {}

    def free(self, sequence: int) -> None:
        """The scheduler frees the blocks."""
        del self.held[sequence]


class Host(Nowhere):
    """Host memory, where K and V of preempted requests wait.

    swap: copies the blocks. host_blocks: how many there is room for; a request that finds no room
    computes again. None: as many as come. While `schedule` runs, blocks are copied to and from the
    host: the pass before must have ended.
    """

    def __init__(self, swap: HostSwap, host_blocks: int | None = None):
        self.swap = swap
        self.blocks: BlockManager = swap.runner.blocks
        self.host_blocks = host_blocks

    def keep(self, sequence: Sequence, step: Step) -> None:
        """Copy a sequence's blocks to the host."""
        table = self.blocks.tables[sequence.row]
        # A block that this step has yet to copy holds nothing: then it is computed again.
        is_complete = not any(target in table for _, target in step.copies)
        used = self.blocks.blocks_held(sequence.computed)
        if sequence.computed and is_complete and self.has_room(used):
            # Those that it got in this step hold nothing yet.
            self.blocks.cut(sequence.row, sequence.computed)
            self.swap.runner.held[sequence.row] = sequence.computed
            self.swap.swap_out(sequence.row)

    def has_room(self, blocks: int) -> bool:
        """Whether so many blocks more may wait here."""
        taken = sum(map(self.swap.blocks_of, self.swap.away))
        return self.host_blocks is None or taken + blocks <= self.host_blocks

    def has(self, sequence: Sequence) -> bool:
        return sequence.row in self.swap.away

    def bring_back(self, sequence: Sequence) -> bool:
        if self.blocks.blocks_for(len(sequence.tokens)) > self.blocks.num_free:
            return False
        self.swap.swap_in(sequence.row)
        sequence.computed = self.swap.runner.held.pop(sequence.row)
        return True

    def forget(self, sequence: Sequence) -> None:
        self.swap.forget(sequence.row)
