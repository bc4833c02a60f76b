"""What the tests and exercises of this lesson share: schedulers with one planted slip each."""

from lessons.l12_paged_kv.blocks import BlockManager, OutOfBlocks
from lessons.l12_paged_kv.more.swap import HostSwap
from lessons.l14_continuous_batching.sequence import Chunk
from lessons.l15_chunked_prefill.lab.virtual import VirtualModel
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l15_chunked_prefill.swap import Host, Lender


def new_scheduler(kind, blocks: BlockManager, max_num_seqs, max_num_batched_tokens, order):
    """A scheduler of this kind: a class, or a class with some of its arguments."""
    return kind(
        blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        order=order,
    )


def new_swapping(blocks: BlockManager, slip=ChunkedScheduler, host_blocks=None, **arguments):
    """(a scheduler that swaps, the virtual model whose memory it swaps). slip: a scheduler, or a
    host.
    """
    model = VirtualModel(blocks)
    scheduler, host = (ChunkedScheduler, slip) if issubclass(slip, Host) else (slip, Host)
    host = host(HostSwap(Lender(model.memory, blocks)), host_blocks)
    return scheduler(blocks, host=host, **arguments), model


# ---------------------------------------------------------------- planted slips


class Raises(ChunkedScheduler):
    """Asks for blocks without looking whether there are any."""

    def run(self, sequence, most, step):
        self.put(sequence, min(sequence.to_compute, most), step)


class PreemptsTheFirst(ChunkedScheduler):
    """Takes blocks from the request that has run for longest."""

    def run(self, sequence, most, step):
        count, held = min(sequence.to_compute, most), sequence.computed
        while not self.blocks.can_grow(sequence.row, held, held + count):
            first = self.running[0]
            self.preempt(first, step)
            if first is sequence:
                return
        self.put(sequence, count, step)


class KeepsCopies(ChunkedScheduler):
    """A preempted sequence's copy stays in the step."""

    def take_out(self, sequence, step):
        step.chunks[:] = [chunk for chunk in step.chunks if chunk.sequence is not sequence]


class KeepsChunks(ChunkedScheduler):
    """A preempted sequence's chunk stays in the step."""

    def take_out(self, sequence, step):
        pass


class KeepsComputed(ChunkedScheduler):
    """Takes the blocks back, and believes that their tokens are still there."""

    def preempt(self, sequence, step):
        computed = sequence.computed
        super().preempt(sequence, step)
        sequence.computed = computed


class ForgetsOutput(ChunkedScheduler):
    """A preempted request begins again with its prompt."""

    def preempt(self, sequence, step):
        super().preempt(sequence, step)
        del sequence.all_tokens[len(sequence.prompt) :]


class AdmitsByChunk(ChunkedScheduler):
    """Looks for the blocks of a first chunk, not of all tokens."""

    def take_blocks(self, sequence):
        count = min(len(sequence.tokens), self.max_num_batched_tokens)
        return self.blocks.needs(sequence.row, 0, count) <= self.blocks.num_free


class DecodesAreFree(ChunkedScheduler):
    """Counts only the tokens of prompts."""

    def room(self, step):
        prompts = [chunk.count for chunk in step.chunks if not chunk.sequence.is_decoding]
        return self.max_num_batched_tokens - sum(prompts)


class SamplesEveryChunk(ChunkedScheduler):
    """Takes a token from the middle of a prompt."""

    def finish(self, step):
        super().finish(step)
        return [chunk.sequence for chunk in step.chunks]


class BackOfTheQueue(ChunkedScheduler):
    """A preempted request waits after all that came later."""

    def preempt(self, sequence, step):
        super().preempt(sequence, step)
        self.waiting.remove(sequence)
        self.waiting.append(sequence)


class AbortLeaks(ChunkedScheduler):
    """An aborted request leaves, its blocks stay."""

    def abort(self, sequence):
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)


class OneSequenceOnePlace(ChunkedScheduler):
    """Forgets that a request may have several answers."""

    def has_place(self, sequence):
        return len(self.running) < self.max_num_seqs


class PromptsBeforeDecodes(ChunkedScheduler):
    """Fills the budget with the prompts that run, and decodes with the rest."""

    def schedule(self):
        step = super().schedule()
        prompts = [chunk for chunk in step.chunks if not chunk.sequence.is_decoding]
        if prompts:
            step.chunks[:] = [Chunk(*chunk) for chunk in prompts]
        return step


SLIPS = (
    Raises,
    PreemptsTheFirst,
    KeepsChunks,
    KeepsComputed,
    ForgetsOutput,
    AdmitsByChunk,
    DecodesAreFree,
    SamplesEveryChunk,
    BackOfTheQueue,
    AbortLeaks,
    OneSequenceOnePlace,
    PromptsBeforeDecodes,
)


class SwapsPromises(ChunkedScheduler):
    """Saves blocks that the step has yet to copy."""

    def preempt(self, sequence, step):
        copies, step.copies[:] = list(step.copies), []
        super().preempt(sequence, step)
        step.copies[:] = copies


class ForgetsTheHost(Host):
    """An aborted request stays in host memory."""

    def forget(self, sequence):
        pass


class ReadsOldBlocks(Host):
    """Comes back into blocks, and nothing is copied into them."""

    def bring_back(self, sequence):
        held, kept = self.swap.away[sequence.row]
        self.swap.away[sequence.row] = held, [x * 0 for x in kept]
        return super().bring_back(sequence)


SWAP_SLIPS = (ForgetsTheHost, ReadsOldBlocks)
# Too rare for random histories: test_schedule.py has one that finds them.
COPY_SLIPS = (KeepsCopies, SwapsPromises)
FOUND_BY = (AssertionError, OutOfBlocks, KeyError, ValueError, IndexError, RuntimeError)
