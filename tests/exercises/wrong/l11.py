"""Wrong answers to lesson 11's exercises: real slips, and the hint for whoever made them."""

import copy
import itertools
import math
from functools import partial

import torch

from lessons.l11_cuda_graphs.naive import decode_batch, decode_logits
from lessons.l11_cuda_graphs.optimized import GraphRunner as LessonsRunner
from solutions.l11_cuda_graphs import noise
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 11.1 which batch sizes to capture


def tried(steps, num_graphs, cost, sizes=None):
    """The choice of least `cost(buckets)` among all of at most num_graphs sizes that hold the
    largest batch.
    """
    sizes = sizes or sorted(steps)
    choices = [
        c
        for n in range(1, num_graphs + 1)
        for c in itertools.combinations(sizes[-9:], n)
        if c[-1] >= max(steps)
    ]
    return list(min(choices, key=cost))


def padding(steps, buckets, weight=lambda size, count, bucket: count * (bucket - size)):
    """The sum of `weight` over the observed sizes, each with its bucket."""
    return sum(
        weight(size, count, min(b for b in buckets if b >= size)) for size, count in steps.items()
    )


@answers.wrong("11.1", "These are powers of two. What does the server see?")
def powers_of_two(steps, num_graphs):
    top = max(steps)
    return sorted({top, *(1 << n for n in range(top.bit_length()) if 1 << n < top)})[-num_graphs:]


@answers.wrong("11.1", "Evenly spaced buckets. The counts say where the steps are.")
def evenly_spaced(steps, num_graphs):
    top = max(steps)
    return sorted({math.ceil(top * (i + 1) / num_graphs) for i in range(num_graphs)})


@answers.wrong("11.1", "The most frequent sizes alone: the largest batch finds no bucket.")
def most_frequent(steps, num_graphs):
    return sorted(sorted(steps, key=lambda size: -steps[size])[:num_graphs])


@answers.wrong(
    "11.1", "The largest and the most frequent others: a size that is rarer may save more rows."
)
def most_frequent_and_largest(steps, num_graphs):
    top = max(steps)
    others = sorted((size for size in steps if size != top), key=lambda size: -steps[size])[
        : num_graphs - 1
    ]
    return sorted([top, *others])


@answers.wrong(
    "11.1",
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


for name, weight, hint in [
    (
        "ignores_counts",
        lambda size, count, bucket: bucket - size,
        "Every size counts once in yours. How many steps had it?",
    ),
    (
        "relative_waste",
        lambda size, count, bucket: count * (bucket - size) / bucket,
        "You minimise shares of the buckets; asked are padded rows.",
    ),
    (
        "counts_steps",
        lambda size, count, bucket: count * (bucket != size),
        "You count padded steps; a step may pad many rows.",
    ),
]:
    answers.wrong("11.1", hint, name)(
        lambda steps, num_graphs, weight=weight: tried(
            steps, num_graphs, lambda buckets: padding(steps, buckets, weight)
        )
    )


@answers.wrong("11.1", "One graph too many: the largest batch needs one of the num_graphs.")
def one_too_many(steps, num_graphs):
    return tried(steps, num_graphs + 1, lambda buckets: padding(steps, buckets))


@answers.wrong("11.1", "One graph too few: you hold one back.")
def one_too_few(steps, num_graphs):
    return tried(steps, max(num_graphs - 1, 1), lambda buckets: padding(steps, buckets))


@answers.wrong("11.1", "The best buckets, in descending order. Ascending is asked for.")
def descending(steps, num_graphs):
    return tried(steps, num_graphs, lambda buckets: padding(steps, buckets))[::-1]


@answers.wrong("11.1", "One bucket for all: every small step pays for the largest.")
def largest_alone(steps, num_graphs):
    return [max(steps)]


@answers.wrong(
    "11.1", "You try every choice. With 150 sizes and 20 graphs there are 10^24 of them."
)
def tries_everything(steps, num_graphs):
    choices = (
        c
        for n in range(1, num_graphs + 1)
        for c in itertools.combinations(sorted(steps), n)
        if c[-1] == max(steps)
    )
    return list(min(choices, key=lambda buckets: padding(steps, buckets)))


@answers.alternative("11.1")
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


# ---------------------------------------------------------------- 11.2 predict


def slipped_step(
    num_launches,
    weight_bytes,
    kv_bytes_per_token,
    context,
    batch,
    memory_bytes_per_s,
    launch_us=6.0,
    graph_us=12.0,
    *,
    join=max,
    kv=True,
    kv_batch=True,
    weight_batch=False,
    unit=1e6,
    per_kernel=False,
    rounding="up",
    least=1,
    own_costs=True,
    order=1,
    strict=False,
    weights_first=True,
):
    """The three numbers with one slip, spelled by a switch."""
    launch_us, graph_us = (launch_us, graph_us) if own_costs else (6.0, 12.0)
    weights = weight_bytes / memory_bytes_per_s * unit
    cache = context * kv_bytes_per_token / memory_bytes_per_s * unit
    total = weights * (batch if weight_batch else 1) + (
        cache * (batch if kv_batch else 1) if kv else 0
    )
    launches = num_launches * launch_us
    exact = (launches - (weights if weights_first else 0)) / cache
    first = {"up": math.ceil(exact), "down": math.floor(exact), "next": math.floor(exact) + 1}[
        rounding
    ]
    return (
        join(launches, total),
        join(graph_us * (num_launches if per_kernel else 1), total),
        max(least, first),
    )[::order]


for name, slip, hint in [
    (
        "adds",
        dict(join=lambda a, b: a + b),
        "Launches and bytes overlap: the longer of the two counts, not their sum.",
    ),
    ("shorter", dict(join=min), "The longer of the two counts, not the shorter."),
    ("no_cache", dict(kv=False), "The cache is read as well, not the weights alone."),
    ("cache_of_one", dict(kv_batch=False), "Each sequence has its own cache: times batch."),
    ("weights_for_each", dict(weight_batch=True), "The weights are read once for the whole batch."),
    (
        "milliseconds",
        dict(unit=1e3),
        "Bytes over bytes per second are seconds; a second is a million µs, not a thousand.",
    ),
    (
        "graph_per_kernel",
        dict(per_kernel=True),
        "A graph is launched once, however many kernels it holds.",
    ),
    (
        "rounds_down",
        dict(rounding="down"),
        "At the batch below, the bytes do not yet take as long: round up.",
    ),
    (
        "one_more_when_equal",
        dict(rounding="next"),
        "When the bytes take exactly as long, the graph gains nothing already.",
    ),
    ("below_one", dict(least=-(10**9)), "A batch is 1 at least."),
    ("own_costs", dict(own_costs=False), "launch_us and graph_us come from the caller."),
    (
        "batch_without_weights",
        dict(weights_first=False),
        "The third number forgets the weights, which are read as well.",
    ),
]:
    answers.wrong("11.2", hint, name)(partial(slipped_step, **slip))


@answers.alternative("11.2")
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


# ---------------------------------------------------------------- 11.3 no graph can replay it


def slipped_capture(
    state,
    *,
    seed="in place",
    memory="in place",
    write="where",
    longest=None,
    noise_of="tensor",
    own_row=True,
    scale="length",
    read="masked",
):
    """The toy step with some slips, spelled by switches."""
    if seed == "in place":
        state.seed.add_(1)
    elif seed == "rebound":
        state.seed = state.seed + 1
    rows, live = torch.arange(len(state.tokens)), state.lengths > 0
    place = (state.lengths - (1 if own_row else 0)).clamp(min=0, max=state.memory.shape[1] - 1)
    kept = state.memory if memory == "in place" else state.memory.clone()
    new = state.embedding[state.tokens]
    if write == "where":
        kept.index_put_((rows, place), torch.where(live[:, None], new, kept[rows, place]))
    elif write == "mask":
        kept[rows[live], place[live]] = new[live]
    elif write == "always":
        kept.index_put_((rows, place), new)
    elif write == "negative":
        kept.index_put_((rows, state.lengths - 1), new)
    elif write == "branch":
        for row in range(len(rows)):
            if state.lengths[row] > 0:
                kept[row, place[row]] = new[row]
    if memory == "rebound":
        state.memory = kept
    capacity = {
        None: lambda: kept.shape[1],
        "item": lambda: int(state.lengths.max()),
        "list": lambda: max(state.lengths.tolist()),
    }
    seen = torch.arange(capacity[longest]()) < state.lengths[:, None]
    seen = torch.ones_like(seen) if read == "all" else seen
    total = torch.where(seen[:, :, None], kept[:, : seen.shape[1]], 0.0).sum(1)
    average = total / (state.lengths.clamp(min=1)[:, None] if scale == "length" else kept.shape[1])
    drawn = {
        "tensor": lambda: noise(state.seed, len(state.embedding), rows.device),
        "number": lambda: noise(int(state.seed), len(state.embedding), rows.device),
        "frozen": lambda: noise(1, len(state.embedding), rows.device),
        "none": lambda: 0,
    }[noise_of]()
    return (average @ state.embedding.T + drawn).argmax(-1)


as_given = dict(seed="rebound", memory="rebound", write="mask", longest="item")
for name, slip, hint in [
    ("as_given", as_given, "Which line does the error name? More bugs may stand behind it."),
    (
        "length_left",
        dict(longest="item"),
        "int(...) waits for the GPU, and the slice would stay as captured: mask instead.",
    ),
    ("length_as_a_list", dict(longest="list"), "tolist() waits for the GPU just as int(...) does."),
    (
        "mask_left",
        dict(write="mask"),
        "Indexing with a mask gives a shape that depends on values: torch.where keeps the shape.",
    ),
    (
        "memory_left",
        dict(memory="rebound"),
        "state.memory is another tensor after a step; the graph goes on with the old one.",
    ),
    (
        "seed_left",
        dict(seed="rebound"),
        "state.seed + 1 is a new tensor; the graph goes on reading the old one: add in place.",
    ),
    (
        "two_left_inside",
        dict(write="mask", longest="item"),
        "Where do values decide a shape? Perhaps in more than one line.",
    ),
    (
        "two_left_outside",
        dict(memory="rebound", seed="rebound"),
        "A tensor of the graph is replaced, and perhaps not one alone.",
    ),
    (
        "three_left",
        dict(seed="rebound", memory="rebound", longest="item"),
        "The error names the first line that cannot be captured, and perhaps not the last.",
    ),
    (
        "branch",
        dict(write="branch"),
        "`if` on a tensor waits for the GPU; torch.where decides there.",
    ),
    (
        "seed_as_number",
        dict(noise_of="number"),
        "int(seed) waits for the GPU; noise takes the tensor.",
    ),
    (
        "frozen_noise",
        dict(noise_of="frozen"),
        "A seed that Python knows is part of the recording: every replay draws the same.",
    ),
    ("no_noise", dict(noise_of="none"), "Where is the noise?"),
    ("seed_stays", dict(seed="none"), "The seed never moves: every step draws the same numbers."),
    (
        "writes_padding",
        dict(write="always"),
        "A row of padding writes its token into row 0 of a memory that may be in use.",
    ),
    (
        "writes_at_minus_one",
        dict(write="negative"),
        "lengths - 1 of padding is -1: the last row, a row like any other.",
    ),
    (
        "works_on_a_copy",
        dict(memory="copy"),
        "You write into a copy, and the next step finds nothing.",
    ),
    ("one_row_too_far", dict(own_row=False), "The newest of n tokens stands at row n - 1."),
    ("averages_all", dict(read="all"), "You average rows that are not in use."),
    (
        "divides_by_capacity",
        dict(scale="capacity"),
        "Divide by the number of tokens, not by the room.",
    ),
]:
    answers.wrong("11.3", hint, name)(partial(slipped_capture, **slip))


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


class SlippedRunner:
    """The runner with one slip: the attributes named in `slip` differ from what the class says
    here.
    """

    # which rows of the inputs reach the buffers; "rebind": none, the attribute is replaced
    copy = "all"
    pads = True  # the columns behind the batch become padding
    padding = (0, 0, -1, 0)
    smallest_first = recapture = own_pool = whole = lazy = False
    clones = cuts = checks = checks_batch = replays = warm = keeps = True
    pick = "smallest"

    def __init__(self, model, pool, graphs, buckets=None, **slip):
        vars(self).update(slip)
        most = pool.num_blocks
        self.buckets = sorted(buckets or {*(1 << n for n in range((most - 1).bit_length())), most})
        if self.checks and not 1 <= self.buckets[0] <= self.buckets[-1] <= most:
            raise ValueError(f"buckets: got {self.buckets}")
        if self.own_pool:
            pool = copy.copy(pool)
            pool.k_slots, pool.v_slots = pool.k_slots.clone(), pool.v_slots.clone()
        self.model, self.pool, self.api, self.captured = model, pool, graphs, {}
        order = self.buckets if self.smallest_first else self.buckets[::-1]
        for bucket in () if self.lazy else order:
            self.capture(bucket)
        if not self.keeps:
            del self.model, self.pool

    def capture(self, bucket):
        buffer = torch.tensor(self.padding)[:, None].repeat(1, bucket)

        def step():
            batch = decode_batch(buffer, self.slots_seen(buffer))
            return decode_logits(self.model, self.pool, batch)

        with torch.inference_mode():
            self.captured[bucket] = [buffer, *self.api.capture(step)]

    def slots_seen(self, buffer):
        return self.pool.block_size

    def __call__(self, inputs):
        batch = inputs.shape[1]
        fitting = [b for b in self.buckets if b >= batch]
        if not fitting and self.checks_batch:
            raise ValueError(f"inputs: got {batch}")
        bucket = {
            "smallest": fitting[0] if fitting else self.buckets[-1],
            "largest": self.buckets[-1],
            "too small": max([b for b in self.buckets if b <= batch], default=self.buckets[0]),
        }[self.pick]
        if self.recapture or bucket not in self.captured:
            self.capture(bucket)
        buffer, graph, logits = self.captured[bucket]
        fresh = buffer.clone()
        if self.pads:
            fresh[:, batch:] = torch.tensor(self.padding)[:, None]
        fresh[:, :batch] = inputs[:, :bucket]
        if self.copy == "rebind":
            self.captured[bucket][0] = fresh
        else:
            rows = (
                [0, 1, 2, 3]
                if self.copy == "all"
                else [row for row in range(4) if row != self.copy]
            )
            buffer[rows] = fresh[rows]
        for _ in range({True: 1, False: 0, "twice": 2}[self.replays]):
            graph.replay()
        logits = logits[:batch] if self.cuts else logits
        return logits.clone() if self.clones else logits


class PythonLength(SlippedRunner):
    def slots_seen(self, buffer):
        return int(buffer[3].max()) + 1


class OneLength(SlippedRunner):
    def slots_seen(self, buffer):
        return self.pool.block_size // 2


for name, kind, slip, hint in [
    (
        "rebinds_inputs",
        SlippedRunner,
        dict(copy="rebind"),
        "The graph reads the buffer that it was captured with. Copy into it; a new tensor it never "
        "sees.",
    ),
    (
        "stale_tokens",
        SlippedRunner,
        dict(copy=0),
        "The tokens in the buffer are those of the capture.",
    ),
    (
        "stale_positions",
        SlippedRunner,
        dict(copy=1),
        "The positions in the buffer stay as captured: every token stands at 0.",
    ),
    (
        "stale_slots",
        SlippedRunner,
        dict(copy=2),
        "slot_mapping stays as captured: no new K and V is ever written.",
    ),
    (
        "stale_lengths",
        SlippedRunner,
        dict(copy=3),
        "context_lens stays as captured: every query sees nothing.",
    ),
    (
        "no_padding",
        SlippedRunner,
        dict(pads=False),
        "Columns behind the batch keep an older step's values and write into a row that is "
        "another's by now.",
    ),
    (
        "padding_into_slot_0",
        SlippedRunner,
        dict(padding=(0, 0, 0, 1)),
        "Your padding writes into slot 0, a neighbour's.",
    ),
    (
        "padding_into_its_row",
        SlippedRunner,
        dict(padding=(0, 0, 8, 1)),
        "Your padding writes into a slot; -1 writes nowhere.",
    ),
    (
        "not_cloned",
        SlippedRunner,
        dict(clones=False),
        "You return the graph's own output. The next replay overwrites it: clone.",
    ),
    ("whole_bucket", SlippedRunner, dict(cuts=False), "You return the rows of padding as well."),
    (
        "bucket_too_small",
        SlippedRunner,
        dict(pick="too small"),
        "Your bucket is not larger than the batch: who finds no place?",
    ),
    (
        "always_the_largest",
        SlippedRunner,
        dict(pick="largest"),
        "As slow as the largest batch: take the smallest that fits.",
    ),
    (
        "captures_each_time",
        SlippedRunner,
        dict(recapture=True),
        "You capture at every step: that costs more than launching it.",
    ),
    (
        "captures_late",
        SlippedRunner,
        dict(lazy=True),
        "You capture in the middle of serving. Do it in __init__.",
    ),
    (
        "smallest_first",
        SlippedRunner,
        dict(smallest_first=True),
        "Small graphs first: the memory that they took is too small for the large ones. Begin with "
        "the largest.",
    ),
    (
        "own_pool",
        SlippedRunner,
        dict(own_pool=True),
        "Your graphs run on a pool of their own: the caller's never changes.",
    ),
    (
        "forgets_the_pool",
        SlippedRunner,
        dict(keeps=False),
        "A graph owns no memory that it reads. Keep model and pool in an attribute.",
    ),
    (
        "never_replays",
        SlippedRunner,
        dict(replays=False),
        "You copy the inputs and read the output. Who ran the graph?",
    ),
    ("replays_twice", SlippedRunner, dict(replays="twice"), "You replay twice for each step."),
    (
        "accepts_any_bucket",
        SlippedRunner,
        dict(checks=False),
        "A bucket above pool.num_blocks or below 1 is an error: ValueError.",
    ),
    (
        "accepts_any_batch",
        SlippedRunner,
        dict(checks_batch=False),
        "More sequences than the largest bucket: ValueError.",
    ),
    (
        "length_of_python",
        PythonLength,
        {},
        "max_context_len from int(...) waits for the GPU while capturing; it is refused.",
    ),
    (
        "half_the_rows",
        OneLength,
        {},
        "max_context_len is a shape: it stays as captured, so it must be the whole block.",
    ),
]:
    answers.wrong("11.4", hint, name)(partial(kind, **slip))

answers.alternative("11.4")(LessonsRunner)
