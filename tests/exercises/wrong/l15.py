"""Wrong answers to lesson 15's exercises: real slips, and the hint for whoever made them."""

from bisect import insort
from functools import partial
from itertools import pairwise

from lessons.l14_continuous_batching.sequence import Chunk
from solutions.l15_chunked_prefill import PreemptingScheduler
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 15.1 a prompt in chunks


def slipped_chunks(
    prompt_len,
    num_decodes,
    budget,
    *,
    decodes_count=True,
    steps="up",
    pairs="causal",
    reads="up to the end",
    first="cut",
):
    """The four numbers with some slips, spelled by switches."""
    chunk = budget - num_decodes if decodes_count else budget
    ends = [*range(chunk, prompt_len, chunk), prompt_len]
    sizes = [end - begin for begin, end in pairwise([0, *ends])]
    count = {
        "up": len(ends),
        "down": max(1, prompt_len // chunk),
        "one more": prompt_len // chunk + 1,
    }
    causal = prompt_len * (prompt_len + 1) // 2
    found_pairs = {
        "causal": causal,
        "square": prompt_len**2,
        "own chunk": sum(size * (size + 1) // 2 for size in sizes),
        "whole chunk sees": sum(size * end for size, end in zip(sizes, ends)),
        "overhead": causal + causal * chunk // prompt_len,
    }
    found_reads = {
        "up to the end": sum(ends),
        "before the chunk": sum(ends[:-1]),
        "once": prompt_len,
        "every time all": prompt_len * len(ends),
    }
    first_chunk = chunk if first == "whole" else min(chunk, prompt_len)
    return first_chunk, count[steps], found_pairs[pairs], found_reads[reads]


for name, slip, hint in [
    (
        "decodes_are_free",
        dict(decodes_count=False),
        "The decodes' tokens come out of the same budget: the prompt gets what they leave.",
    ),
    ("steps_rounded_down", dict(steps="down"), "The rest of the prompt needs a step of its own."),
    (
        "always_one_step_more",
        dict(steps="one more"),
        "If the chunks fill the prompt exactly, no step comes behind them.",
    ),
    ("not_causal", dict(pairs="square"), "A token sees itself and those before it: n (n + 1) / 2."),
    (
        "only_its_own_chunk",
        dict(pairs="own chunk"),
        "A later chunk also sees the earlier ones: their K and V are in the cache.",
    ),
    (
        "a_chunk_sees_itself_whole",
        dict(pairs="whole chunk sees"),
        "Within its chunk a token sees only those before it.",
    ),
    (
        "chunks_cost_pairs",
        dict(pairs="overhead"),
        "Chunks add no query-key pairs. What they add is reading the earlier K and V again.",
    ),
    (
        "own_tokens_not_read",
        dict(reads="before the chunk"),
        "A chunk also reads its own K and V: count up to its end.",
    ),
    ("read_once", dict(reads="once"), "Every chunk reads K and V of all chunks before it again."),
    (
        "reads_what_is_not_there",
        dict(reads="every time all"),
        "The first chunk cannot read the whole prompt: most of it is not in the cache yet.",
    ),
    ("a_chunk_longer_than_the_prompt", dict(first="whole"), "A short prompt is one short chunk."),
]:
    answers.wrong("15.1", hint, name)(partial(slipped_chunks, **slip))


@answers.alternative("15.1")
def by_formula(prompt_len, num_decodes, budget):
    chunk = budget - num_decodes
    steps = -(-prompt_len // chunk)
    read = chunk * steps * (steps - 1) // 2 + prompt_len
    return min(chunk, prompt_len), steps, sum(range(prompt_len + 1)), read


@answers.alternative("15.1")
def by_a_loop(prompt_len, num_decodes, budget):
    counts, left = [], prompt_len
    while left:
        counts.append(min(left, budget - num_decodes))
        left -= counts[-1]
    read = [sum(counts[: at + 1]) for at in range(len(counts))]
    return counts[0], len(counts), (prompt_len**2 + prompt_len) // 2, sum(read)


# ---------------------------------------------------------------- 15.2 one step


def slipped_step(
    running,
    waiting,
    budget,
    max_num_seqs,
    *,
    decodes_first=True,
    places="right",
    sampled="newest",
    decodes_cost=True,
    empty=False,
    skip=False,
    whole=False,
    waiting_first=False,
    share=False,
):
    """A step with some slips, spelled by switches."""
    queue = sorted(running, key=lambda request: request[1] > 1) if decodes_first else list(running)
    free = {"right": max_num_seqs - len(running), "none": len(waiting), "one more": None}[places]
    free = max_num_seqs - len(running) + 1 if free is None else free
    come = waiting[: max(0, free)]
    queue = [*come, *queue] if waiting_first else [*queue, *come]
    step = []
    for at, (id, lacking) in enumerate(queue):
        count = min(lacking, budget)
        if share and lacking > 1:
            count = min(count, -(-budget // (len(queue) - at)))
        if whole and count < lacking:
            break
        if skip and count < lacking and (id, lacking) in waiting:
            continue
        if count or empty:
            step.append((id, count, count == lacking if sampled == "newest" else True))
            budget -= count if decodes_cost or lacking > 1 else 0
    return step


@answers.wrong("15.2", "More than one bug is left. Work the docstring's example by hand first.")
def as_given(running, waiting, budget, max_num_seqs):
    step = []
    for id, lacking in [*running, *waiting]:
        if len(step) > max_num_seqs:
            break
        count = min(lacking, budget)
        if count:
            step.append((id, count, True))
            if lacking > 1:
                budget -= count
    return step


for name, slip, hint in [
    (
        "prompts_before_decodes",
        dict(decodes_first=False),
        "A prompt takes the budget, and a decode behind it waits. Decodes go first.",
    ),
    (
        "one_place_too_many",
        dict(places="one more"),
        "More requests come in than places are left beside those that run.",
    ),
    (
        "places_ignored",
        dict(places="none"),
        "More requests come in than places are left beside those that run.",
    ),
    (
        "every_chunk_is_sampled",
        dict(sampled="always"),
        "A chunk from the middle of a prompt gives no token: its newest token has not run.",
    ),
    (
        "decodes_are_free",
        dict(decodes_cost=False),
        "A decode takes a token of the budget, too.",
    ),
    ("empty_chunks", dict(empty=True), "Requests without a token in this step are not in it."),
    (
        "who_fits_overtakes",
        dict(skip=True),
        "A short prompt passes the first that waits. That one takes the rest as a chunk.",
    ),
    (
        "whole_prompts",
        dict(whole=True),
        "You run prompts only as a whole. A chunk fills what is left.",
    ),
    (
        "newcomers_first",
        dict(waiting_first=True),
        "Those who run come before those who wait.",
    ),
    (
        "equal_shares",
        dict(share=True),
        "You share the budget among prompts. Then none ends early: first come, first served.",
    ),
]:
    answers.wrong("15.2", hint, name)(partial(slipped_step, **slip))


@answers.alternative("15.2")
def in_three_loops(running, waiting, budget, max_num_seqs):
    step, left = [], budget

    def put(id, lacking):
        nonlocal left
        count = lacking if lacking < left else left
        left -= count
        if count > 0:
            step.append((id, count, lacking == count))

    for id, lacking in running:
        if lacking == 1:
            put(id, lacking)
    for id, lacking in running:
        if lacking != 1:
            put(id, lacking)
    for at, (id, lacking) in enumerate(waiting):
        if len(running) + at < max_num_seqs:
            put(id, lacking)
    return step


@answers.alternative("15.2")
def by_sorting(running, waiting, budget, max_num_seqs):
    queue = sorted(running, key=lambda request: request[1] != 1)
    queue += waiting[: max_num_seqs - len(running)]
    ends = [0]
    for _, lacking in queue:
        ends.append(min(budget, ends[-1] + lacking))
    counts = [end - begin for begin, end in pairwise(ends)]
    return [(id, n, n == lacking) for (id, lacking), n in zip(queue, counts) if n]


# ---------------------------------------------------------------- 15.3 preemption


@answers.wrong("15.3", "Blocks may run out here: ask can_grow, and preempt until it says yes.")
class Raises(PreemptingScheduler):
    def run(self, sequence, most, step):
        count, held = min(sequence.to_compute, most), sequence.computed
        self.blocks.grow(sequence.row, held, held + count)
        step.chunks.append(Chunk(sequence, count))


@answers.wrong("15.3", "One preemption may not be enough: ask again until there are blocks.")
class PreemptsOnce(PreemptingScheduler):
    def run(self, sequence, most, step):
        count, held = min(sequence.to_compute, most), sequence.computed
        if not self.blocks.can_grow(sequence.row, held, held + count):
            last = self.running[-1]
            self.preempt(last, step)
            if last is sequence:
                return
        self.blocks.grow(sequence.row, held, held + count)
        step.chunks.append(Chunk(sequence, count))


class Chooses(PreemptingScheduler):
    """Preempts whom `victim` names."""

    def run(self, sequence, most, step):
        count, held = min(sequence.to_compute, most), sequence.computed
        while not self.blocks.can_grow(sequence.row, held, held + count):
            victim = self.victim(sequence)
            self.preempt(victim, step)
            if victim is sequence:
                return
        self.blocks.grow(sequence.row, held, held + count)
        step.chunks.append(Chunk(sequence, count))


@answers.wrong(
    "15.3",
    "The last of `running` goes. If you send away who is served first, nobody is sure to end.",
)
class PreemptsTheFirst(Chooses):
    def victim(self, sequence):
        return self.running[0]


@answers.wrong(
    "15.3",
    "You give a chunk of what the free blocks hold. While they are too few, preempt the last.",
)
class ShrinksTheChunk(PreemptingScheduler):
    def run(self, sequence, most, step):
        held = sequence.computed
        while most > 1 and not self.blocks.can_grow(sequence.row, held, held + most):
            most -= 1
        super().run(sequence, most, step)


@answers.wrong("15.3", "You send away who lacks a block, the first too. It is the last who goes.")
class PreemptsItself(Chooses):
    def victim(self, sequence):
        return sequence


@answers.wrong("15.3", "You send away the largest. It may be the first, and then nobody ends.")
class PreemptsTheLargest(Chooses):
    def victim(self, sequence):
        return max(self.running, key=lambda other: len(self.blocks.tables.get(other.row, ())))


@answers.wrong("15.3", "If the last is the sequence itself, nothing of it runs in this step.")
class RunsAfterAll(PreemptingScheduler):
    def run(self, sequence, most, step):
        count, held = min(sequence.to_compute, most), sequence.computed
        while not self.blocks.can_grow(sequence.row, held, held + count):
            self.preempt(self.running[-1], step)
        self.blocks.grow(sequence.row, held, held + count)
        step.chunks.append(Chunk(sequence, count))


@answers.wrong("15.3", "Its blocks are gone, and with them its K and V: computed is 0 again.")
class KeepsComputed(PreemptingScheduler):
    def preempt(self, sequence, step):
        computed = sequence.computed
        super().preempt(sequence, step)
        sequence.computed = computed


@answers.wrong("15.3", "The step may hold its chunk already. Its blocks are somebody else's now.")
class KeepsChunk(PreemptingScheduler):
    def preempt(self, sequence, step):
        chunks = list(step.chunks)
        super().preempt(sequence, step)
        step.chunks[:] = chunks


@answers.wrong("15.3", "You keep its blocks: then preempting it makes no room.")
class KeepsBlocks(PreemptingScheduler):
    def preempt(self, sequence, step):
        self.running.remove(sequence)
        step.chunks[:] = [chunk for chunk in step.chunks if chunk.sequence is not sequence]
        sequence.computed = 0
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=self.order)


@answers.wrong("15.3", "It came before all who wait, so it goes to the front, in its order.")
class BackOfTheQueue(PreemptingScheduler):
    def preempt(self, sequence, step):
        super().preempt(sequence, step)
        self.waiting.remove(sequence)
        self.waiting.append(sequence)


@answers.wrong("15.3", "The tokens that it has generated were sent to the user: keep them.")
class ForgetsOutput(PreemptingScheduler):
    def preempt(self, sequence, step):
        super().preempt(sequence, step)
        del sequence.all_tokens[len(sequence.prompt) :]


@answers.wrong("15.3", "Right, but nobody counts: sequence.preemptions stays 0.")
class CountsNothing(PreemptingScheduler):
    def preempt(self, sequence, step):
        super().preempt(sequence, step)
        sequence.preemptions -= 1


@answers.wrong("15.3", "At most `most` tokens: the rest of the budget is somebody else's.")
class WholePrompts(PreemptingScheduler):
    def run(self, sequence, most, step):
        super().run(sequence, sequence.to_compute, step)


@answers.alternative("15.3")
class FirstCountsThenPreempts(PreemptingScheduler):
    def run(self, sequence, most, step):
        count = min(most, sequence.to_compute)
        total = sequence.computed + count
        while sequence in self.running:
            if self.blocks.needs(sequence.row, sequence.computed, total) <= self.blocks.num_free:
                self.blocks.grow(sequence.row, sequence.computed, total)
                step.chunks.append(Chunk(sequence, count))
                return
            self.preempt(self.running[-1], step)

    def preempt(self, sequence, step):
        for at in reversed(range(len(step.chunks))):
            if step.chunks[at].sequence.row == sequence.row:
                del step.chunks[at]
        if sequence.row in self.blocks.tables:
            self.blocks.free(sequence.row)
        self.running = [other for other in self.running if other is not sequence]
        self.waiting = sorted([*self.waiting, sequence], key=self.order)
        sequence.computed, sequence.preemptions = 0, sequence.preemptions + 1


@answers.alternative("15.3")
class CallsItselfAgain(PreemptingScheduler):
    def run(self, sequence, most, step):
        count, held = min(sequence.to_compute, most), sequence.computed
        if self.blocks.can_grow(sequence.row, held, held + count):
            self.blocks.grow(sequence.row, held, held + count)
            step.chunks.append(Chunk(sequence, count))
            return
        last = self.running[-1]
        self.preempt(last, step)
        if last is not sequence:
            self.run(sequence, most, step)
