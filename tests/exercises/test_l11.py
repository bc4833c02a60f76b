"""Checks of lesson 11's exercises. Each exists because it rejects a named wrong answer
(wrong/l11.py). Those of 11.4 are in a file of their own.
"""

import itertools
import random

import torch

from lessons.l11_cuda_graphs.simulator import SimulatedGraph
from solutions.l11_cuda_graphs import State, noise
from tests.exercises.checking import assert_equal, call, check
from tests.exercises.checks_l11_runner import (  # noqa: F401 (pytest finds them here)
    test_captures_and_replays,
    test_capturing_changes_no_row,
    test_keeps_what_its_graphs_read,
    test_logits_and_pool,
    test_refuses,
)

# ---------------------------------------------------------------- 11.1 predict

STEP_CASES = {  # name: (arguments, the answer, why)
    "example": ((1000, 9.6e9, 1e5, 4800, 10, 4.8e12), (6000.0, 3000.0, 40), "the docstring's"),
    "llama_3_8b": (
        (970, 15.0e9, 131072, 4096, 1, 4.8e12),
        (5820.0, 3236.848106666667, 25),
        "one sequence: launch-bound; from 25 on the bytes take longer",
    ),
    "bandwidth_bound": (
        (970, 15.0e9, 131072, 4096, 64, 4.8e12),
        (10283.278826666667, 10283.278826666667, 25),
        "at 64 sequences a graph gains nothing",
    ),
    "tiny": (
        (190, 2.4e7, 6144, 512, 1, 4.8e12),
        (1140.0, 12.0, 1732),
        "both are bound by launches",
    ),
    "already_bound": (
        (10, 4.8e9, 1e5, 100, 3, 4.8e12),
        (1006.25, 1006.25, 1),
        "the weights alone take longer: from batch 1 on",
    ),
    "exactly": ((1000, 0.0, 4.8e5, 100, 60, 4.8e12), (6000.0, 600.0, 600), "equal is enough"),
    "slow_launch": (
        (100, 4.8e8, 4.8e4, 100, 10, 4.8e12, 20.0, 300.0),
        (2000.0, 300.0, 1900),
        "costs come from the caller",
    ),
}


@check("11.1", {case: why for case, (*_, why) in STEP_CASES.items()}, seconds=5)
def test_step_us(impl, case, seed):
    numbers, want, _ = STEP_CASES[case]
    names = (
        "num_launches",
        "weight_bytes",
        "kv_bytes_per_token",
        "context",
        "batch",
        "memory_bytes_per_s",
        "launch_us",
        "graph_us",
    )
    got = call(impl, dict(zip(names, numbers)))
    assert isinstance(got, tuple) and len(got) == 3, (
        f"your result is {got!r}, expected a tuple of three numbers"
    )
    for what, mine, right in zip(("µs launched one by one", "µs as a graph"), got, want):
        assert_equal(mine, right, rtol=1e-9, label=what)
    assert_equal(got[2], want[2], label="the batch from which on a graph gains nothing")


# ---------------------------------------------------------------- 11.2 which batch sizes to capture


def padded_rows(steps, buckets):
    """Rows of padding over all steps, each in the smallest bucket that holds it."""
    return sum(
        count * (min(b for b in buckets if b >= size) - size) for size, count in steps.items()
    )


def assert_fewest_rows(impl, steps, num_graphs, fewest=None):
    """The buckets serve every step, are few enough, and pad no more rows than the best choice."""
    got = call(impl, dict(steps=steps, num_graphs=num_graphs))
    assert isinstance(got, list) and all(isinstance(b, int) for b in got), (
        f"your result is {got!r}, expected a list of integers"
    )
    assert got == sorted(set(got)), f"your buckets {got} are not ascending, or one comes twice"
    assert len(got) <= num_graphs, (
        f"your buckets {got} are {len(got)} graphs, {num_graphs} are allowed"
    )
    assert got and got[-1] >= max(steps), (
        f"your buckets {got} hold no batch of {max(steps)}, which was observed"
    )
    if fewest is None:
        choices = itertools.combinations(sorted(steps), min(num_graphs, len(steps)))
        fewest = min(padded_rows(steps, choice) for choice in choices if choice[-1] == max(steps))
    assert_equal(padded_rows(steps, got), fewest, label=f"rows of padding with your buckets {got}")


BUCKET_CASES = {  # name: (steps, num_graphs, why)
    "example": ({1: 50, 3: 10, 4: 10, 7: 1}, 2, "the docstring's"),
    "one_graph": ({2: 5, 9: 1}, 1, "a single graph must hold the largest batch"),
    "enough_graphs": ({1: 5, 6: 2, 11: 3}, 5, "as many graphs as sizes: no padding at all"),
    "no_powers_of_two": (
        {3: 100, 6: 100, 12: 100, 16: 1},
        3,
        "sizes are what the server sees, not powers of two",
    ),
    "a_rare_large_batch": (
        {1: 1000, 2: 900, 3: 800, 4: 700, 64: 1},
        3,
        "one rare batch needs a graph, no more",
    ),
    "counts_decide": (
        {1: 1, 2: 500, 3: 1, 4: 500, 8: 1},
        3,
        "a size that is frequent deserves its own graph",
    ),
    "greedy_fails": (
        {1: 4, 2: 5, 3: 6, 4: 5, 5: 4},
        2,
        "the best single cut is not among the ends",
    ),
}


@check("11.2", {case: why for case, (*_, why) in BUCKET_CASES.items()}, seconds=5)
def test_fewest_rows(impl, case, seed):
    steps, num_graphs, _ = BUCKET_CASES[case]
    assert_fewest_rows(impl, steps, num_graphs)


@check("11.2", seconds=10)
def test_random_counts(impl, seed):
    """Held against trying all choices."""
    draw = random.Random(seed)
    for num_graphs in (1, 2, 3, 4):
        steps = {size: draw.randint(1, 60) for size in draw.sample(range(1, 40), 8)}
        assert_fewest_rows(impl, steps, num_graphs)


@check("11.2", seconds=10)
def test_many_sizes(impl, seed):
    """150 sizes, 20 graphs: trying all choices would take longer than the universe is old."""
    assert_fewest_rows(impl, dict.fromkeys(range(1, 151), 3), 20, fewest=3 * (10 * 28 + 10 * 21))


# ---------------------------------------------------------------- 11.3 no graph can replay it


def toy_state(seed, rows, capacity=6, dim=4, vocab_size=50):
    g = torch.Generator().manual_seed(seed)
    return State(
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
        torch.randn(rows, capacity, dim, generator=g),
        torch.zeros((), dtype=torch.int64),
        torch.randn(vocab_size, dim, generator=g),
    )


def by_loops(state):
    """The step, row by row: the tokens, None for padding."""
    state.seed += 1
    drawn, tokens = noise(state.seed, len(state.embedding), torch.device("cpu")), []
    for row, length in enumerate(state.lengths.tolist()):
        if not length:
            tokens.append(None)
            continue
        state.memory[row, length - 1] = state.embedding[state.tokens[row]]
        average = state.memory[row, :length].mean(0)
        tokens.append(int((state.embedding @ average + drawn).argmax()))
    return tokens


SCHEDULES = {  # name: (lengths of each step, why)
    "one_row": ([[1], [2], [3], [4]], "one sequence that grows"),
    "batch": (
        [[1, 3], [2, 4], [3, 5], [4, 6]],
        "two sequences of different lengths, up to the last row of the memory",
    ),
    "padding": (
        [[2, 0, 3], [3, 0, 4], [0, 2, 5]],
        "rows of padding, first in the middle, then elsewhere",
    ),
    "longer_than_at_capture": ([[1, 1], [6, 2], [5, 6]], "lengths that the capture did not see"),
    "shorter_than_at_capture": (
        [[6, 6], [1, 2], [2, 1]],
        "a new sequence in an old row: what is left there does not count",
    ),
}


@check("11.3", {case: why for case, (_, why) in SCHEDULES.items()}, seconds=10)
def test_replayed_tokens(impl, case, seed):
    schedule, draw = SCHEDULES[case][0], random.Random(seed)
    mine, reference = (toy_state(seed, len(schedule[0])) for _ in range(2))
    mine.lengths.copy_(torch.tensor(schedule[0]))
    graph, memory = SimulatedGraph(), mine.memory
    out = graph.record(lambda: impl(mine))
    assert isinstance(out, torch.Tensor) and out.shape == mine.tokens.shape, (
        f"your step returned {out!r}, expected a tensor [B]"
    )
    assert out.dtype == torch.int64, f"your step returned {out.dtype}, expected torch.int64"
    for turn, lengths in enumerate(schedule):
        tokens = torch.tensor([draw.randrange(50) for _ in lengths])
        for state in (mine, reference):
            state.tokens.copy_(tokens)
            state.lengths.copy_(torch.tensor(lengths))
        want, _ = by_loops(reference), graph.replay()
        got = [None if token is None else int(x) for x, token in zip(out, want)]
        assert_equal(got, want, label=f"the tokens of replay {turn + 1}")
    assert_equal(memory, reference.memory, atol=1e-6, label="the memory that the caller holds")
    assert_equal(mine.seed, reference.seed, label="the seed after all replays")


@check("11.3", seconds=10)
def test_nothing_is_replaced(impl, seed):
    """The tensors of `state` are the same objects afterwards, and the caller's inputs hold what
    they held.
    """
    state = toy_state(seed, 2)
    state.lengths.copy_(torch.tensor([2, 0]))
    before = dict(vars(state))
    SimulatedGraph().record(lambda: impl(state))
    for name, tensor in before.items():
        assert getattr(state, name) is tensor, (
            f"your step put another tensor into state.{name}: the graph keeps the old one"
        )
    impl(state)
    assert_equal(
        (state.lengths.tolist(), state.tokens.tolist()),
        ([2, 0], [0, 0]),
        label="lengths and tokens after the step",
    )
