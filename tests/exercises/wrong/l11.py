"""Wrong answers to lesson 11's exercises: real slips, and the hint for whoever made them."""

import itertools
import math
from functools import partial

from tests.exercises.wrong import Answers, l11_runner, l11_step

answers = Answers()
l11_step.add_to(answers)
l11_runner.add_to(answers)

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
