"""Exercises of lesson 15: a long prompt in chunks counted, a step with bugs, preemption."""

from bisect import insort

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.sequence import Chunk, Sequence, Step
from lessons.toolbox.exercises.exercise import exercise


@exercise("15.1", "Predict: a prompt in chunks", minutes=15, difficulty=1)
def count_chunks(prompt_len: int, num_decodes: int, budget: int) -> tuple[int, int, int, int]:
    """What a prompt costs that runs in chunks beside decodes: (tokens of its first chunk, steps
    until its first token, query-key pairs, tokens read from the cache).

    Each step has a budget of `budget` tokens. num_decodes requests run during all of these steps,
    one token each, and they go first; num_decodes < budget. The prompt gets the rest. query-key
    pairs: of the prompt alone, over all chunks; a token sees itself and all before it. tokens read:
    each chunk reads K and V of all tokens of the prompt up to its own last one, its own among them.
    Sum them over the chunks. Errors: none to raise.

    Example: 10 tokens beside 2 decodes, budget 6: chunks of 4, 4 and 2
        pairs 1 + 2 + … + 10 = 55, read 4 + 8 + 10 = 22       -> (4, 3, 55, 22)
    Write down your guess first: 16384 tokens beside 64 decodes, budget 1024.
    """
    # SOLUTION
    chunk = budget - num_decodes
    ends = [*range(chunk, prompt_len, chunk), prompt_len]
    return min(chunk, prompt_len), len(ends), prompt_len * (prompt_len + 1) // 2, sum(ends)
    # END


@exercise("15.2", "Find the bugs: one step", minutes=25, difficulty=2)
def plan_step(
    running: list[tuple[int, int]], waiting: list[tuple[int, int]], budget: int, max_num_seqs: int
) -> list[tuple[int, int, bool]]:
    """Which tokens run in one step of chunked prefill: (id, tokens, is sampled) of each request in
    it, in the order in which they get their tokens.

    running, waiting: (id, tokens that the request has and that are not in the cache), one or more
    tokens each, in the order of service. A running request with one such token decodes.

    First those who decode, in their order. Then the other running requests, in their order: each
    gets what it lacks, or what is left of the budget. Then those who wait, in their order, in the
    same way, while a place is free: at most max_num_seqs requests run, those of `running` included.
    No request overtakes another. A request is sampled if its newest token runs in this step.
    Requests that get no token are not in the list. max_num_seqs is at least len(running), and
    budget is at least max_num_seqs. Errors: none to raise. The arguments are not changed.

    Example: running [(0, 7), (1, 1)], waiting [(2, 3), (3, 9)], budget 10, 3 places
        -> [(1, 1, True), (0, 7, True), (2, 2, False)]; no place is left for request 3

    The code below is right for a step that is one decode. It has four bugs. Delete the first
    line and find them.
    """
    # SOLUTION
    step = []
    decodes = [request for request in running if request[1] == 1]
    prompts = [request for request in running if request[1] > 1]
    places = max_num_seqs - len(running)
    for id, lacking in [*decodes, *prompts, *waiting[:places]]:
        count = min(lacking, budget)
        if count:
            step.append((id, count, count == lacking))
            budget -= count
    return step
    # STUB
    # step = []
    # for id, lacking in [*running, *waiting]:
    #     if len(step) > max_num_seqs:
    #         break
    #     count = min(lacking, budget)
    #     if count:
    #         step.append((id, count, True))
    #         if lacking > 1:
    #             budget -= count
    # return step
    # END


@exercise(
    "15.3",
    "Preemption",
    minutes=45,
    difficulty=3,
    replaces="lessons.l15_chunked_prefill.generate:new_scheduler",
)
class PreemptingScheduler:
    """Decodes first, prompts in chunks, and blocks that are taken back when they run out.

    All but `run` and `preempt` is done. The loop calls schedule, runs the step, calls finish,
    appends a token to each sequence, and calls leave. What you need of others:
        sequence.row                        its number, by which `blocks` knows it
        sequence.to_compute                 tokens that it has and that are not in the cache
        sequence.computed                   tokens that are in the cache
        sequence.preemptions                how often it was sent away
        blocks.can_grow(row, held, tokens)  whether a sequence that holds `held` tokens can have
                                            blocks for `tokens` in all
        blocks.grow(row, held, tokens)      gives them
        blocks.free(row)                    takes back all of them
        insort(list, sequence, key=self.order)  keeps a list sorted

    Example: 4 blocks of 2 tokens, two requests of 3 tokens, answers of 4 tokens
        steps run {0: 3, 1: 3}, {0: 1, 1: 1}, {0: 1}: request 0 needs a third block for its fifth
        token, so request 1 gives back two. When 0 has left, 1 runs {1: 5}: its prompt, and the two
        tokens that it had generated.
    """

    def __init__(
        self, blocks: BlockManager, max_num_seqs: int = 32, max_num_batched_tokens: int = 2048
    ):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        # Both in the order of service.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def order(self, sequence: Sequence) -> int:
        """The smallest number is served first. It may come later than others: then it is urgent."""
        return sequence.row

    def add(self, sequence: Sequence) -> None:
        """Put a request into the queue. Raises ValueError for one that can never fit."""
        if self.blocks.blocks_for(sequence.most_cached) > self.blocks.num_blocks:
            raise ValueError(f"request {sequence.row}; accepted: what fits the whole pool")
        insort(self.waiting, sequence, key=self.order)

    def schedule(self) -> Step:
        """What runs next: decodes, prompts that have begun, then those who wait."""
        step, waited = Step([], []), len(self.waiting)
        for sequence in sorted(self.running, key=lambda s: not s.is_decoding):
            room = self.max_num_batched_tokens - step.num_tokens
            if sequence in self.running and room:
                self.run(sequence, room, step)
        while (
            self.waiting and len(self.waiting) <= waited and len(self.running) < self.max_num_seqs
        ):
            first, room = self.waiting[0], self.max_num_batched_tokens - step.num_tokens
            if not room or not self.blocks.can_grow(first.row, 0, len(first.tokens)):
                break
            insort(self.running, self.waiting.pop(0), key=self.order)
            self.run(first, room, step)
        return step

    def run(self, sequence: Sequence, most: int, step: Step) -> None:
        """Give a running sequence blocks for its next tokens, at most `most`, and add
        Chunk(sequence, count) to step.chunks.

        While there are too few blocks, preempt the last of `running`. If that was `sequence`
        itself, no chunk of it is added.
        """
        # SOLUTION
        count, held = min(sequence.to_compute, most), sequence.computed
        while not self.blocks.can_grow(sequence.row, held, held + count):
            last = self.running[-1]
            self.preempt(last, step)
            if last is sequence:
                return
        self.blocks.grow(sequence.row, held, held + count)
        step.chunks.append(Chunk(sequence, count))
        # END

    def preempt(self, sequence: Sequence, step: Step) -> None:
        """Take back all blocks of a running sequence. It waits again, in the order of service, and
        computes its tokens anew, those that it has generated too. Count it in
        sequence.preemptions. It may be in the step already: then take its chunk out
        (`step.chunks[:] = …`, because a Step's list cannot be replaced).
        """
        # SOLUTION
        self.running.remove(sequence)
        step.chunks[:] = [chunk for chunk in step.chunks if chunk.sequence is not sequence]
        self.blocks.free(sequence.row)
        sequence.computed = 0
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=self.order)
        # END

    def finish(self, step: Step) -> list[Sequence]:
        """Count what has run. Returns the sequences that get a token now."""
        sampled = [chunk.sequence for chunk in step.chunks if chunk.is_sampled]
        for sequence, count in step.chunks:
            sequence.computed += count
        return sampled

    def leave(self) -> list[Sequence]:
        """Finished requests give back place and blocks. Returns them."""
        done = [sequence for sequence in self.running if sequence.finished]
        for sequence in done:
            self.running.remove(sequence)
            self.blocks.free(sequence.row)
        return done
