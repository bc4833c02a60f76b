"""Wrong answers to lesson 15's exercises: real slips, each with a hint."""

from itertools import pairwise

from lessons.l14_continuous_batching.sequence import Chunk
from solutions.l15_chunked_prefill import PreemptingScheduler
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 15.1 a prompt in chunks

answers.slips(
    "15.1",
    """
    decodes_are_free: The decodes' tokens come out of the same budget: the prompt gets what they
        leave.
    - budget - num_decodes
    + budget

    steps_rounded_down: The rest of the prompt needs a step of its own.
    - len(ends)
    + max(1, prompt_len // chunk)

    always_one_step_more: If the chunks fill the prompt exactly, no step follows them.
    - len(ends)
    + prompt_len // chunk + 1

    not_causal: A token sees itself and those before it: n (n + 1) / 2.
    - prompt_len * (prompt_len + 1) // 2
    + prompt_len**2

    only_its_own_chunk: A later chunk also sees the earlier ones: their K and V are in the cache.
    - return min(chunk, prompt_len), len(ends), prompt_len * (prompt_len + 1) // 2, sum(ends)
    + sizes = [end - begin for begin, end in zip([0, *ends], ends)]
    + pairs = sum(size * (size + 1) // 2 for size in sizes)
    + return min(chunk, prompt_len), len(ends), pairs, sum(ends)

    a_chunk_sees_itself_whole: Within its chunk a token sees only those before it.
    - return min(chunk, prompt_len), len(ends), prompt_len * (prompt_len + 1) // 2, sum(ends)
    + pairs = sum((end - begin) * end for begin, end in zip([0, *ends], ends))
    + return min(chunk, prompt_len), len(ends), pairs, sum(ends)

    chunks_cost_pairs: Chunks add no query-key pairs. What they add is reading the earlier K and V
        again.
    - return min(chunk, prompt_len), len(ends), prompt_len * (prompt_len + 1) // 2, sum(ends)
    + pairs = prompt_len * (prompt_len + 1) // 2
    + return min(chunk, prompt_len), len(ends), pairs + pairs * chunk // prompt_len, sum(ends)

    own_tokens_not_read: A chunk also reads its own K and V: count up to its end.
    - sum(ends)
    + sum(ends[:-1])

    read_once: Every chunk reads K and V of all chunks before it again.
    - sum(ends)
    + prompt_len

    reads_what_is_not_there: The first chunk cannot read the whole prompt: most of it is not in the
        cache yet.
    - sum(ends)
    + prompt_len * len(ends)

    a_chunk_longer_than_the_prompt: A short prompt is one short chunk.
    - min(chunk, prompt_len)
    + chunk
    """,
)


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

answers.slips(
    "15.2",
    """
    two_tokens_decode: A request that lacks two tokens does not decode: those with one go first.
    - request[1] == 1]
    - prompts = [request for request in running if request[1] > 1]
    + request[1] <= 2]
    + prompts = [request for request in running if request[1] > 2]

    as_given: More than one bug is left. Work the docstring's example by hand first.
    - decodes = [request for request in running if request[1] == 1]
    - prompts = [request for request in running if request[1] > 1]
    - places = max_num_seqs - len(running)
    - for id, lacking in [*decodes, *prompts, *waiting[:places]]:
    + for id, lacking in [*running, *waiting]:
    +     if len(step) > max_num_seqs:
    +         break
    - step.append((id, count, count == lacking))
    - budget -= count
    + step.append((id, count, True))
    + budget -= count if lacking > 1 else 0

    prompts_before_decodes: A prompt takes the budget, and a decode after it waits. Decodes go
        first.
    - [*decodes, *prompts, *waiting[:places]]
    + [*running, *waiting[:places]]

    one_place_too_many: More requests come in than places are left beside those that run.
    - max_num_seqs - len(running)
    + max_num_seqs - len(running) + 1

    places_ignored: More requests come in than places are left beside those that run.
    - [*decodes, *prompts, *waiting[:places]]
    + [*decodes, *prompts, *waiting]

    every_chunk_is_sampled: A chunk from the middle of a prompt gives no token: its newest token has
        not run.
    - (id, count, count == lacking)
    + (id, count, True)

    decodes_are_free: A decode takes a token of the budget, too.
    - budget -= count
    + budget -= count if lacking > 1 else 0

    empty_chunks: Requests without a token in this step are not in it.
    - if count:
    + if True:

    who_fits_overtakes: A short prompt passes the first that waits. That one takes the rest as a
        chunk.
    - if count:
    + if count == lacking or count and (id, lacking) in running:

    whole_prompts: You run prompts only as a whole. A chunk fills what is left.
    - if count:
    + if count < lacking:
    +     break
    + if count:

    newcomers_first: Running requests come before waiting ones.
    - [*decodes, *prompts, *waiting[:places]]
    + [*waiting[:places], *decodes, *prompts]

    equal_shares: You share the budget among prompts. Then none ends early: first come, first
        served.
    - for id, lacking in [*decodes, *prompts, *waiting[:places]]:
    -     count = min(lacking, budget)
    + queue = [*decodes, *prompts, *waiting[:places]]
    + for at, (id, lacking) in enumerate(queue):
    +     share = -(-budget // (len(queue) - at)) if lacking > 1 else budget
    +     count = min(lacking, budget, share)
    """,
)


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

answers.slips(
    "15.3",
    """
    Raises: Blocks may run out here: ask can_grow, and preempt until it says yes.
    - while not self.blocks.can_grow(sequence.row, held, held + count):
    -     last = self.running[-1]
    -     self.preempt(last, step)
    -     if last is sequence:
    -         return

    PreemptsOnce: One preemption may not be enough: ask again until there are blocks.
    - while not self.blocks.can_grow(sequence.row, held, held + count):
    + if not self.blocks.can_grow(sequence.row, held, held + count):

    PreemptsTheFirst: The last of `running` goes. If you preempt the one that is served first, no
        request is sure to end.
    - last = self.running[-1]
    + last = self.running[0]

    PreemptsItself: You preempt the request that lacks a block, even the first. It is the last one
        that goes.
    - last = self.running[-1]
    + last = sequence

    PreemptsTheLargest: You preempt the largest. It may be the first, and then no request ends.
    - last = self.running[-1]
    + last = max(self.running, key=lambda other: len(self.blocks.tables.get(other.row, ())))

    RunsAfterAll: If the last is the sequence itself, nothing of it runs in this step.
    - last = self.running[-1]
    - self.preempt(last, step)
    - if last is sequence:
    -     return
    + self.preempt(self.running[-1], step)

    KeepsComputed: Its blocks are gone, and with them its K and V: computed is 0 again.
    - sequence.computed = 0

    KeepsChunk: The step may hold its chunk already. Its blocks are another request's now.
    - step.chunks[:] = [chunk for chunk in step.chunks if chunk.sequence is not sequence]

    KeepsBlocks: You keep its blocks: then preempting it makes no room.
    - self.blocks.free(sequence.row)
    - sequence.computed
    + sequence.computed

    BackOfTheQueue: It came before all that wait, so it goes to the front, in its order.
    - sequence.preemptions += 1
    - insort(self.waiting, sequence, key=self.order)
    + sequence.preemptions += 1
    + self.waiting.append(sequence)

    ForgetsOutput: The tokens that it has generated were sent to the user: keep them.
    - sequence.computed = 0
    + sequence.computed = 0
    + del sequence.all_tokens[len(sequence.prompt) :]

    CountsNothing: Right, but not counted: sequence.preemptions stays 0.
    - sequence.preemptions += 1

    WholePrompts: At most `most` tokens: the rest of the budget is for other requests.
    - min(sequence.to_compute, most)
    + sequence.to_compute

    ShrinksTheChunk: You give a chunk of what the free blocks hold. While they are too few, preempt
        the last.
    - count, held = min(sequence.to_compute, most), sequence.computed
    + held = sequence.computed
    + while most > 1 and not self.blocks.can_grow(sequence.row, held, held + most):
    +     most -= 1
    + count = min(sequence.to_compute, most)
    """,
)


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
