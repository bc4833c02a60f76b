"""Preemption by swapping: K and V of who is sent away wait in host memory, and come back into other
blocks. Nothing is computed twice; instead the bytes travel twice.

    swap = HostSwap(Lender(pool, blocks))
    scheduler = SwappingScheduler(swap, max_num_batched_tokens=512)

lab/costs.py tells when this is cheaper than computing again. Lesson 12's HostSwap does the copying.

Source: Kwon et al. 2023, PagedAttention, section 4.5.
"""

from lessons.l03_kv_cache.cache import KVPool
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l12_paged_kv.more.swap import HostSwap
from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler


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


class SwappingScheduler(ChunkedScheduler):
    """A ChunkedScheduler that keeps what a preempted request has computed. Other arguments are its.

    host_blocks: how many the host has room for; who finds no room there computes again. None: as
    many as come. While `schedule` runs, blocks are copied to and from the host: the pass before must
    have ended.
    """

    def __init__(self, swap: HostSwap, host_blocks: int | None = None, **arguments):
        super().__init__(swap.runner.blocks, **arguments)
        self.swap = swap
        self.host_blocks = host_blocks

    def preempt(self, sequence: Sequence, step: Step) -> None:
        """Copy a sequence's blocks to the host, then take them back; it waits."""
        table = self.blocks.tables[sequence.row]
        # A block that this step has yet to copy holds nothing: then it is computed again.
        is_complete = not any(target in table for _, target in step.copies)
        used = self.blocks.blocks_for(sequence.computed)
        if sequence.computed and is_complete and self.host_has_room(used):
            # Those that it got in this step hold nothing yet.
            self.blocks.pool.release(reversed(table[used:]))
            del table[used:]
            self.swap.runner.held[sequence.row] = sequence.computed
            self.swap.swap_out(sequence.row)
        super().preempt(sequence, step)

    def host_has_room(self, blocks: int) -> bool:
        """Whether so many blocks more may wait on the host."""
        taken = sum(map(self.swap.blocks_of, self.swap.away))
        return self.host_blocks is None or taken + blocks <= self.host_blocks

    def take_blocks(self, sequence: Sequence) -> bool:
        """As in preemption.py, but who is on the host comes back from there."""
        if sequence.row not in self.swap.away:
            return super().take_blocks(sequence)
        if self.blocks.blocks_for(len(sequence.tokens)) > self.blocks.num_free:
            return False
        self.swap.swap_in(sequence.row)
        sequence.computed = self.swap.runner.held.pop(sequence.row)
        return True

    def abort(self, sequence: Sequence) -> None:
        """Forget a request, on the host too."""
        self.swap.forget(sequence.row)
        super().abort(sequence)
