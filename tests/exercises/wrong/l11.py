"""Wrong answers to lesson 11's exercises: real slips, each with a hint."""

import itertools
import math

import torch

from lessons.l11_cuda_graphs.optimized import GraphRunner as LessonsRunner
from solutions.l11_cuda_graphs import noise
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 11.1 predict


answers.slips(
    "11.1",
    """
    adds: Launches and bytes overlap: the longer of the two counts, not their sum.
    - max(launches_us, bytes_us), max(graph_us, bytes_us)
    + launches_us + bytes_us, graph_us + bytes_us

    shorter: The longer of the two counts, not the shorter.
    - max(launches_us, bytes_us), max(graph_us, bytes_us)
    + min(launches_us, bytes_us), min(graph_us, bytes_us)

    no_cache: The cache is read as well, not the weights alone.
    - weights_us + batch * cache_us
    + weights_us

    cache_of_one: Each sequence has its own cache: times batch.
    - weights_us + batch * cache_us
    + weights_us + cache_us

    weights_for_each: The weights are read once for the whole batch.
    - weights_us + batch * cache_us
    + batch * (weights_us + cache_us)

    milliseconds: Bytes over bytes per second are seconds; a second is a million µs, not a thousand.
    - weights_us = weight_bytes / memory_bytes_per_s * 1e6
    - cache_us = context * kv_bytes_per_token / memory_bytes_per_s * 1e6
    + weights_us = weight_bytes / memory_bytes_per_s * 1e3
    + cache_us = context * kv_bytes_per_token / memory_bytes_per_s * 1e3

    graph_per_kernel: A graph is launched once, however many kernels it holds.
    - max(graph_us, bytes_us)
    + max(num_launches * graph_us, bytes_us)

    rounds_down: At the batch below, the bytes do not yet take as long: round up.
    - max(1, -int(-(launches_us - weights_us) // cache_us))
    + max(1, int((launches_us - weights_us) // cache_us))

    one_more_when_equal: When the bytes take exactly as long, the graph gains nothing already.
    - max(1, -int(-(launches_us - weights_us) // cache_us))
    + max(1, int((launches_us - weights_us) // cache_us) + 1)

    below_one: A batch is 1 at least.
    - max(1, -int(-(launches_us - weights_us) // cache_us))
    + -int(-(launches_us - weights_us) // cache_us)

    own_costs: launch_us and graph_us come from the caller.
    - launches_us = num_launches * launch_us
    + launches_us, graph_us = num_launches * 6.0, 12.0

    batch_without_weights: The third number forgets the weights, which are read as well.
    - -int(-(launches_us - weights_us) // cache_us)
    + -int(-launches_us // cache_us)
    """,
)


@answers.alternative("11.1")
def by_search(
    num_launches,
    weight_bytes,
    kv_bytes_per_token,
    context,
    batch,
    memory_bytes_per_s,
    launch_us=6.0,
    graph_us=12.0,
):
    def bytes_us(sequences):
        return 1e6 * (weight_bytes + sequences * context * kv_bytes_per_token) / memory_bytes_per_s

    first = 1
    while bytes_us(first) < num_launches * launch_us * (1 - 1e-12):
        first += 1
    return max(num_launches * launch_us, bytes_us(batch)), max(graph_us, bytes_us(batch)), first


# ---------------------------------------------------------------- 11.2 which batch sizes to capture

answers.slips(
    "11.2",
    """
    one_too_many: One graph too many: the largest batch needs one of the num_graphs.
    - for _ in range(num_graphs):
    + for _ in range(num_graphs + 1):

    one_too_few: One graph too few: you hold one back.
    - for _ in range(num_graphs):
    + for _ in range(max(num_graphs - 1, 1)):

    descending: The best buckets, in descending order. Ascending is asked for.
    - return best[len(sizes)][1]
    + return best[len(sizes)][1][::-1]

    largest_alone: One bucket for all: every small step pays for the largest.
    - return best[len(sizes)][1]
    + return best[len(sizes)][1][-1:]

    ignores_counts: Every size counts once in yours. How many steps had it?
    - count += steps[sizes[last]]
    + count += 1

    relative_waste: You minimise shares of the buckets; asked are padded rows.
    - count = 0  # steps that the bucket sizes[last] pads
    + count = waste = 0
    - rows += count * (sizes[last] - sizes[last - 1])
    + waste += count * (sizes[last] - sizes[last - 1])
    - if last + 1 not in extended or rows < extended[last + 1][0]:
    -     extended[last + 1] = rows, [*buckets, sizes[last]]
    + shares = rows + waste / sizes[last]
    + if last + 1 not in extended or shares < extended[last + 1][0]:
    +     extended[last + 1] = shares, [*buckets, sizes[last]]
    """,
)


def padding(steps, buckets):
    """The rows of padding in all: each observed size runs in the smallest bucket that holds it."""
    return sum(
        count * (min(b for b in buckets if b >= size) - size) for size, count in steps.items()
    )


@answers.wrong("11.2", "These are powers of two. What does the server see?")
def powers_of_two(steps, num_graphs):
    top = max(steps)
    return sorted({top, *(1 << n for n in range(top.bit_length()) if 1 << n < top)})[-num_graphs:]


@answers.wrong("11.2", "Evenly spaced buckets. The counts say where the steps are.")
def evenly_spaced(steps, num_graphs):
    top = max(steps)
    return sorted({math.ceil(top * (i + 1) / num_graphs) for i in range(num_graphs)})


@answers.wrong("11.2", "The most frequent sizes alone: the largest batch finds no bucket.")
def most_frequent(steps, num_graphs):
    return sorted(sorted(steps, key=lambda size: -steps[size])[:num_graphs])


@answers.wrong(
    "11.2", "The largest and the most frequent others: a size that is rarer may save more rows."
)
def most_frequent_and_largest(steps, num_graphs):
    top = max(steps)
    others = sorted((size for size in steps if size != top), key=lambda size: -steps[size])[
        : num_graphs - 1
    ]
    return sorted([top, *others])


@answers.wrong(
    "11.2",
    "You add one bucket after the other, each the best then. The best pair need not hold the best "
    "single one.",
)
def greedy(steps, num_graphs):
    chosen = [max(steps)]
    while len(chosen) < min(num_graphs, len(steps)):
        chosen.append(
            min((s for s in steps if s not in chosen), key=lambda s: padding(steps, [*chosen, s]))
        )
    return sorted(chosen)


@answers.wrong("11.2", "You count padded steps; a step may pad many rows.")
def counts_steps(steps, num_graphs):
    sizes = sorted(steps)[-9:]
    choices = (
        c
        for n in range(1, num_graphs + 1)
        for c in itertools.combinations(sizes, n)
        if c[-1] == sizes[-1]
    )
    return list(min(choices, key=lambda c: sum(steps[s] for s in steps if s not in c)))


@answers.wrong(
    "11.2", "You try every choice. With 150 sizes and 20 graphs there are 10^24 of them."
)
def tries_everything(steps, num_graphs):
    choices = (
        c
        for n in range(1, num_graphs + 1)
        for c in itertools.combinations(sorted(steps), n)
        if c[-1] == max(steps)
    )
    return list(min(choices, key=lambda buckets: padding(steps, buckets)))


@answers.alternative("11.2")
def from_the_largest_down(steps, num_graphs):
    """Recursion over what is left, with a memory."""
    sizes, known = sorted(steps), {}

    # sizes[:upto + 1] in at most `graphs` buckets, the largest of them sizes[upto]
    def best(upto, graphs):
        if upto < 0:
            return 0, ()
        if graphs == 0:
            return math.inf, ()
        if (upto, graphs) not in known:
            found, rows = (math.inf, ()), 0
            for first in range(upto, -1, -1):
                rows += steps[sizes[first]] * (sizes[upto] - sizes[first])
                below, buckets = best(first - 1, graphs - 1)
                found = min(found, (rows + below, (*buckets, sizes[upto])))
            known[upto, graphs] = found
        return known[upto, graphs]

    return list(best(len(sizes) - 1, num_graphs)[1])


# ---------------------------------------------------------------- 11.3 a step that no graph can replay

answers.slips(
    "11.3",
    """
    as_given: Which line does the error name? More bugs may follow it.
    - state.seed.add_(1)
    + state.seed = state.seed + 1
    - # A row of padding gets what was there.
    - old, new = state.memory[rows, place], state.embedding[state.tokens]
    - state.memory.index_put_((rows, place), torch.where(live[:, None], new, old))
    - capacity = state.memory.shape[1]
    + state.memory = state.memory.clone()
    + state.memory[rows[live], place[live]] = state.embedding[state.tokens][live]
    + capacity = int(state.lengths.max())
    - state.memory, 0.0
    + state.memory[:, :capacity], 0.0

    length_left: int(...) waits for the GPU, and the slice would stay as captured: mask instead.
    - capacity = state.memory.shape[1]
    + capacity = int(state.lengths.max())
    - state.memory, 0.0
    + state.memory[:, :capacity], 0.0

    length_as_a_list: tolist() waits for the GPU just as int(...) does.
    - capacity = state.memory.shape[1]
    + capacity = max(state.lengths.tolist())
    - state.memory, 0.0
    + state.memory[:, :capacity], 0.0

    mask_left: Indexing with a mask gives a shape that depends on values: torch.where keeps the
        shape.
    - # A row of padding gets what was there.
    - old, new = state.memory[rows, place], state.embedding[state.tokens]
    - state.memory.index_put_((rows, place), torch.where(live[:, None], new, old))
    + state.memory[rows[live], place[live]] = state.embedding[state.tokens][live]

    memory_left: state.memory is another tensor after a step; the graph goes on with the old one.
    - # A row of padding gets what was there.
    + state.memory = state.memory.clone()

    seed_left: state.seed + 1 is a new tensor; the graph goes on reading the old one: add in place.
    - state.seed.add_(1)
    + state.seed = state.seed + 1

    two_left_inside: Where do values decide a shape? Perhaps in more than one line.
    - # A row of padding gets what was there.
    - old, new = state.memory[rows, place], state.embedding[state.tokens]
    - state.memory.index_put_((rows, place), torch.where(live[:, None], new, old))
    - capacity = state.memory.shape[1]
    + state.memory[rows[live], place[live]] = state.embedding[state.tokens][live]
    + capacity = int(state.lengths.max())
    - state.memory, 0.0
    + state.memory[:, :capacity], 0.0

    two_left_outside: A tensor of the graph is replaced, and perhaps not one alone.
    = memory_left, seed_left

    three_left: The error names the first line that cannot be captured, and perhaps not the last.
    = length_left, memory_left, seed_left

    branch: `if` on a tensor waits for the GPU; torch.where decides there.
    - # A row of padding gets what was there.
    - old, new = state.memory[rows, place], state.embedding[state.tokens]
    - state.memory.index_put_((rows, place), torch.where(live[:, None], new, old))
    + for row in range(len(rows)):
    +     if state.lengths[row] > 0:
    +         state.memory[row, place[row]] = state.embedding[state.tokens[row]]

    seed_as_number: int(seed) waits for the GPU; noise takes the tensor.
    - noise(state.seed,
    + noise(int(state.seed),

    frozen_noise: A seed that Python knows is part of the recording: every replay draws the same.
    - noise(state.seed,
    + noise(1,

    no_noise: Where is the noise?
    - state.embedding.T + drawn
    + state.embedding.T

    seed_stays: You draw before the seed has moved: add 1 to state.seed first.
    - state.seed.add_(1)

    writes_padding: A row of padding writes its token into row 0 of a memory that may be in use.
    - torch.where(live[:, None], new, old)
    + new

    writes_at_minus_one: lengths - 1 of padding is -1: the last row, a row like any other.
    - state.memory.index_put_((rows, place), torch.where(live[:, None], new, old))
    + state.memory.index_put_((rows, state.lengths - 1), new)

    works_on_a_copy: You write into a copy, and the next step finds nothing.
    - state.memory.index_put_((rows, place), torch.where(live[:, None], new, old))
    + memory = state.memory.index_put((rows, place), torch.where(live[:, None], new, old))
    - state.memory, 0.0
    + memory, 0.0

    one_row_too_far: The newest of n tokens is at row n - 1.
    - place = (state.lengths - 1).clamp(min=0)
    + place = state.lengths.clamp(max=state.memory.shape[1] - 1)

    averages_all: You average rows that are not in use.
    - torch.where(seen[:, :, None], state.memory, 0.0).sum(1)
    + state.memory.sum(1)

    divides_by_capacity: Divide by the number of tokens, not by the room.
    - state.lengths.clamp(min=1)[:, None]
    + capacity
    """,
)


@answers.alternative("11.3")
def through_a_one_hot(state):
    state.seed += 1
    # nowhere for padding
    at = (torch.arange(state.memory.shape[1]) == (state.lengths - 1)[:, None])[:, :, None]
    state.memory.copy_(
        torch.where(at, state.embedding.index_select(0, state.tokens)[:, None], state.memory)
    )
    share = (torch.arange(state.memory.shape[1]) < state.lengths[:, None]) / state.lengths.clamp(
        min=1
    )[:, None]
    average = torch.einsum("bn,bnd->bd", share, state.memory)
    return torch.add(
        average @ state.embedding.T, noise(state.seed, len(state.embedding), state.seed.device)
    ).argmax(-1)


# ---------------------------------------------------------------- 11.4 the runner

answers.slips(
    "11.4",
    """
    rebinds_inputs: The graph reads the buffer that it was captured with. Copy into it; a new tensor
        it never sees.
    - buffer, graph, logits = self.captured[bucket]
    + buffer, graph, logits = self.captured[bucket]
    + buffer = buffer.clone()
    + self.captured[bucket] = buffer, graph, logits

    stale_tokens: The tokens in the buffer are those of the capture.
    - buffer[:, :batch] = inputs.to(buffer.device)
    - buffer[:, batch:] = torch.tensor([[0], [0], [-1], [0]], device=buffer.device)
    + buffer[1:, :batch] = inputs[1:].to(buffer.device)
    + buffer[:, batch:] = torch.tensor([[0], [0], [-1], [0]], device=buffer.device)

    stale_positions: The positions in the buffer stay as captured: every token is at 0.
    - buffer[:, :batch] = inputs.to(buffer.device)
    + others = [0, 2, 3]
    + buffer[others, :batch] = inputs[others].to(buffer.device)

    stale_slots: slot_mapping stays as captured: no new K and V is ever written.
    - buffer[:, :batch] = inputs.to(buffer.device)
    + others = [0, 1, 3]
    + buffer[others, :batch] = inputs[others].to(buffer.device)

    stale_lengths: context_lens stays as captured: every query sees nothing.
    - buffer[:, :batch] = inputs.to(buffer.device)
    + buffer[:3, :batch] = inputs[:3].to(buffer.device)

    no_padding: Columns after the batch keep an older step's values and write into a row that is
        another's by now.
    - buffer[:, batch:] = torch.tensor([[0], [0], [-1], [0]], device=buffer.device)

    padding_into_slot_0: Your padding writes into slot 0, a neighbour's.
    - torch.tensor([[0], [0], [-1], [0]], device=model.device)
    + torch.tensor([[0], [0], [0], [1]], device=model.device)
    - torch.tensor([[0], [0], [-1], [0]], device=buffer.device)
    + torch.tensor([[0], [0], [0], [1]], device=buffer.device)

    padding_into_its_row: Your padding writes into a slot; -1 writes nowhere.
    - torch.tensor([[0], [0], [-1], [0]], device=model.device)
    + torch.tensor([[0], [0], [8], [1]], device=model.device)
    - torch.tensor([[0], [0], [-1], [0]], device=buffer.device)
    + torch.tensor([[0], [0], [8], [1]], device=buffer.device)

    not_cloned: You return the graph's own output. The next replay overwrites it: clone.
    - logits[:batch].clone()
    + logits[:batch]

    whole_bucket: You return the rows of padding as well.
    - logits[:batch].clone()
    + logits.clone()

    bucket_too_small: Your bucket is not larger than the batch: which sequences find no place?
    - buffer, graph, logits = self.captured[bucket]
    + bucket = max([b for b in self.buckets if b <= batch], default=self.buckets[0])
    + buffer, graph, logits = self.captured[bucket]
    - buffer[:, :batch] = inputs.to(buffer.device)
    + buffer[:, :batch] = inputs[:, :bucket].to(buffer.device)

    always_the_largest: As slow as the largest batch: take the smallest that fits.
    - buffer, graph, logits = self.captured[bucket]
    + buffer, graph, logits = self.captured[self.buckets[-1]]

    captures_each_time: You capture at every step: that costs more than launching it.
    - self.captured = {}
    + self.captured, self.graphs = {}, graphs
    - buffer, graph, logits = self.captured[bucket]
    + buffer = torch.tensor([[0], [0], [-1], [0]]).repeat(1, bucket)
    + step_inputs = decode_batch(buffer, self.pool.block_size)
    + step = partial(decode_logits, self.model, self.pool, step_inputs)
    + with torch.inference_mode():
    +     self.captured[bucket] = buffer, *self.graphs.capture(step)
    + buffer, graph, logits = self.captured[bucket]

    captures_late: You capture in the middle of serving. Do it in __init__.
    - self.captured = {}
    + self.captured, self.graphs = {}, graphs
    - reversed(self.buckets)
    + ()
    - buffer, graph, logits = self.captured[bucket]
    + if bucket not in self.captured:
    +     buffer = torch.tensor([[0], [0], [-1], [0]]).repeat(1, bucket)
    +     step_inputs = decode_batch(buffer, self.pool.block_size)
    +     step = partial(decode_logits, self.model, self.pool, step_inputs)
    +     with torch.inference_mode():
    +         self.captured[bucket] = buffer, *self.graphs.capture(step)
    + buffer, graph, logits = self.captured[bucket]

    smallest_first: Small graphs first: the memory that they took is too small for the large ones.
        Begin with the largest.
    - reversed(self.buckets)
    + self.buckets

    own_pool: Your graphs run on a pool of their own: the caller's never changes.
    - self.model, self.pool = model, pool  # because the graphs go on reading them
    + own = object.__new__(type(pool))
    + vars(own).update(vars(pool))
    + own.k_slots, own.v_slots = pool.k_slots.clone(), pool.v_slots.clone()
    + self.model, self.pool = model, own
    + pool = own

    forgets_the_pool: A graph owns no memory that it reads. Keep model and pool in an attribute.
    - self.model, self.pool = model, pool  # because the graphs go on reading them

    never_replays: You copy the inputs and read the output. When does the graph run?
    - graph.replay()
    - return
    + return

    replays_twice: You replay twice for each step.
    - graph.replay()
    - return
    + graph.replay()
    + graph.replay()
    + return

    accepts_any_bucket: A bucket above pool.num_blocks or below 1 is an error: ValueError.
    - if self.buckets[0] < 1 or self.buckets[-1] > most:
    -     raise ValueError(f"buckets: got {self.buckets}; accepted: 1 to {most}")

    accepts_any_batch: More sequences than the largest bucket: ValueError.
    - if bucket is None:
    -     raise ValueError(f"inputs: got {batch} sequences; accepted: at most {self.buckets[-1]}")
    + if bucket is None:
    +     bucket = self.buckets[-1]
    - buffer[:, :batch] = inputs.to(buffer.device)
    + buffer[:, :batch] = inputs[:, :bucket].to(buffer.device)

    length_of_python: max_context_len from int(...) waits for the GPU while capturing; it is
        refused.
    - batch = decode_batch(buffer, pool.block_size)
    - graph, logits = graphs.capture(partial(decode_logits, model, pool, batch))
    + def step(buffer=buffer):
    +     return decode_logits(model, pool, decode_batch(buffer, int(buffer[3].max()) + 1))
    +
    + graph, logits = graphs.capture(step)

    half_the_rows: max_context_len is a shape: it stays as captured, so it must be the whole block.
    - decode_batch(buffer, pool.block_size)
    + decode_batch(buffer, pool.block_size // 2)
    """,
)
answers.alternative("11.4")(LessonsRunner)
