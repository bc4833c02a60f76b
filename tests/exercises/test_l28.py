"""Checks of lesson 28's exercises. Each exists because it rejects a named wrong answer
(wrong/l28.py).
"""

import heapq
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.exercises.checking import (
    assert_close,
    assert_entries,
    assert_equal,
    assert_largest_tensor,
    call,
    check,
    compare,
    note,
)
from tests.exercises.kernel_work import kernel_does_it

# ---------------------------------------------------------------- 28.1 the index score


def index_inputs(seed, tokens, heads, dim, keys, positions=None):
    g = torch.Generator().manual_seed(seed)
    return dict(
        q=torch.randn(tokens, heads, dim, generator=g),
        weights=torch.randn(tokens, heads, generator=g),
        k=torch.randn(keys, dim, generator=g),
        positions=torch.tensor(positions or range(keys - tokens, keys)),
    )


def by_definition(q, weights, k, positions):
    products = torch.einsum("thd,nd->thn", q.double(), k.double()).relu()
    scores = (products * weights.double()[:, :, None]).sum(1)
    unseen = torch.arange(len(k)) > positions[:, None]
    return scores.masked_fill(unseen, -math.inf).float()


INDEX_CASES = {  # name: (arguments of index_inputs, why)
    "one_head": (dict(tokens=4, heads=1, dim=8, keys=4), "a product, ReLU and a weight"),
    "heads": (dict(tokens=5, heads=6, dim=8, keys=5), "heads are added up after ReLU"),
    "decode": (dict(tokens=1, heads=4, dim=16, keys=23), "one query at the end of its context"),
    "own_positions": (
        dict(tokens=3, heads=3, dim=4, keys=9, positions=[8, 0, 4]),
        "positions are given, and in any order",
    ),
    "all_unseen": (
        dict(tokens=2, heads=2, dim=4, keys=5, positions=[0, 4]),
        "the first query sees one key, itself",
    ),
}


@check("28.1", {case: why for case, (_, why) in INDEX_CASES.items()}, seconds=5)
def test_index_scores(impl, case, seed):
    inputs = index_inputs(seed, **INDEX_CASES[case][0])
    compare(impl, inputs, want=by_definition(**inputs), atol=1e-5, dtype=torch.float32)


@check("28.1", seconds=5)
def test_index_example(impl, seed):
    inputs = dict(
        q=torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]),
        weights=torch.tensor([[2.0, 1.0]]),
        k=torch.tensor([[3.0, -4.0], [-1.0, 5.0], [9.0, 9.0]]),
        positions=torch.tensor([1]),
    )
    compare(impl, inputs, want=torch.tensor([[6.0, 5.0, -math.inf]]), atol=0.0)


@check("28.1", seconds=5)
def test_no_tensor_of_all_heads(impl, seed):
    inputs = index_inputs(seed, tokens=60, heads=12, dim=4, keys=60)
    got = assert_largest_tensor(3601, "take one head after the other", impl, **inputs)
    assert_close(got, by_definition(**inputs), atol=1e-5)


# ---------------------------------------------------------------- 28.2 the top k


class Unsorted(TorchDispatchMode):
    """Within it PyTorch sorts nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        sorts = ("sort", "topk", "argsort", "kthvalue", "msort", "quantile", "median")
        assert not name.startswith(sorts), f"torch.{name} {SORTS}"
        return func(*args, **(kwargs or {}))


SORTS = "sorts: find the threshold by its bits"


@contextmanager
def no_sort_of_scores(count: int) -> Iterator[None]:
    """Within it neither PyTorch nor NumPy nor Python sorts anything but positions below count."""

    def is_score(x) -> bool:
        if isinstance(x, (tuple, list)):
            return any(map(is_score, x))
        if isinstance(x, (float, np.floating, torch.Tensor)):
            return True
        return isinstance(x, (int, np.integer)) and not 0 <= x < count

    def watched(name: str, sort: Callable) -> Callable:
        def function(values, *args, key=None, **options):
            values = list(values)
            assert not any(map(is_score, map(key, values) if key else values)), f"{name} {SORTS}"
            return sort(values, *args, **options, **({"key": key} if key else {}))

        return function

    def refused(name: str) -> Callable:
        def function(*args, **options):
            raise AssertionError(f"{name} {SORTS}")

        return function

    def lists(frame, event, function):
        if event == "c_call" and function.__name__ == "sort":
            values = function.__self__
            assert not (isinstance(values, list) and is_score(values)), f"list.sort {SORTS}"

    with ExitStack() as stack:
        stack.enter_context(Unsorted())
        stack.enter_context(mock.patch("builtins.sorted", watched("sorted", sorted)))
        for name in ("sort", "argsort", "partition", "argpartition"):
            function = watched(f"np.{name}", getattr(np, name))
            stack.enter_context(mock.patch.object(np, name, function))
        for name in ("nlargest", "nsmallest", "heapify", "heappush"):
            stack.enter_context(mock.patch.object(heapq, name, refused(f"heapq.{name}")))
        before = sys.getprofile()
        sys.setprofile(lists)
        try:
            yield
        finally:
            sys.setprofile(before)


def turned(score):
    """The whole number of a score, by its bits in text."""
    bits = torch.tensor([score + 0.0]).view(torch.int32).item() & 0xFFFFFFFF
    text = f"{bits:032b}"
    text = "1" + text[1:] if text[0] == "0" else text.translate(str.maketrans("01", "10"))
    return int(text, 2)


def by_sorting(scores, k):
    there = [(i, x) for i, x in enumerate(scores.tolist()) if x != -math.inf]
    best = sorted(there, key=lambda pair: -pair[1])[:k]  # stable: the lowest position first
    threshold = turned(best[-1][1]) if len(there) >= k else 0
    return threshold, sorted(i for i, _ in best)


INF = math.inf
TOP_K_CASES = {  # name: (scores, k, why)
    "example": ([0.5, 2.0, 0.5, 0.5, -1.0], 2, "the docstring's"),
    "no_ties": ([0.1, 0.9, 0.4, 0.7, 0.2], 3, "all scores differ"),
    "negative": ([-1.0, -5.0, -2.0, -3.0], 2, "the smallest magnitude is highest"),
    "mixed": ([-1.0, 3.0, 0.0, -2.0, 0.5], 4, "both signs"),
    "all_equal": ([2.0] * 7, 3, "the lowest positions win"),
    "ties_at_the_end": ([5.0, 1.0, 4.0, 1.0, 1.0, 3.0], 4, "one of three equal scores is taken"),
    "two_zeros": ([-0.0, 0.0, -0.0, 0.0], 2, "-0.0 equals 0.0"),
    "last_bits": ([1.0, 1.0 + 2**-23, 1.0 - 2**-24, 1.0], 1, "they differ in the last of 32 bits"),
    "subnormal": ([1e-45, 0.0, 3e-45, -1e-45], 3, "nearly zero, and still in order"),
    "huge": ([3e38, -3e38, INF, 1.0], 2, "infinity is the highest"),
    "not_there": ([1.0, -INF, 3.0, -INF, 2.0], 3, "-inf is no key"),
    "fewer_than_k": ([1.0, -INF, 3.0], 5, "all that are there, and threshold 0"),
    "exactly_k": ([4.0, -2.0, -INF, 4.0], 3, "all that are there, and the threshold of the lowest"),
    "lowest_number": ([-3e38, -3.4e38, 1.0], 3, "the threshold is a large negative number"),
    "none_is_there": ([-INF, -INF], 1, "an empty list"),
    "one": ([7.0], 1, "one key"),
}  # fmt: skip


@check("28.2", {case: why for case, (_, _, why) in TOP_K_CASES.items()}, seconds=5)
def test_top_k(impl, case, seed):
    scores, k, _ = TOP_K_CASES[case]
    compare_choice(impl, torch.tensor(scores), k)


def compare_choice(impl, scores, k):
    got = call(impl, dict(scores=scores, k=k))
    note(got)
    assert isinstance(got, tuple) and len(got) == 2, f"your result is {got!r}, expected two"
    threshold, chosen = got
    right, want = by_sorting(scores, k)
    assert isinstance(chosen, list), f"the positions are a {type(chosen).__name__}, expected a list"
    assert_equal(chosen, want, label="the positions")
    assert_equal(threshold, right, label="the threshold")


@check("28.2", seconds=20)
def test_random_rows(impl, seed):
    draws = random.Random(seed)
    for _ in range(25):
        values = [draws.gauss(0, 1) for _ in range(5)] + [0.0, -0.0, -INF]
        scores = [draws.choice((draws.gauss(0, 1), *values)) for _ in range(draws.randint(1, 40))]
        compare_choice(impl, torch.tensor(scores), draws.randint(1, 45))


@check("28.2", seconds=5)
def test_nothing_is_sorted(impl, seed):
    scores = torch.randn(50, generator=torch.Generator().manual_seed(seed))
    with no_sort_of_scores(len(scores)):
        got = impl.bare(scores, 7)
    note(got)
    assert_equal(got, by_sorting(scores, 7))


# ---------------------------------------------------------------- 28.3 the rolling cache


def by_writing(seen, sinks, window):
    """A list in the order of the text, from which the oldest one that may go is taken."""
    slots, order = [None] * (sinks + window), []
    for token in range(seen):
        if token < len(slots):
            slot = token
        else:
            slot = slots.index(order.pop(sinks))
        slots[slot] = token
        order.append(token)
    rotary = [order.index(token) for token in slots if token is not None]
    return slots, rotary, len(order) - 1


ROLL_CASES = {  # name: ((seen, sinks, window), why)
    "example": ((7, 2, 3), "the docstring's"),
    "first": ((1, 4, 4), "one token, and empty slots"),
    "not_full": ((5, 2, 6), "nothing has left yet"),
    "just_full": ((5, 2, 3), "the last slot is filled"),
    "one_more": ((6, 2, 3), "the first token after the sinks leaves"),
    "round": ((11, 2, 3), "the window has been written over twice"),
    "no_sinks": ((8, 0, 3), "a plain window"),
    "window_of_one": ((9, 3, 1), "each token takes the slot of the one before"),
    "fewer_than_sinks": ((2, 4, 3), "all of them are sinks"),
    "long": ((1000, 4, 12), "positions stay below the size of the cache"),
}


@check("28.3", {case: why for case, (_, why) in ROLL_CASES.items()}, seconds=5)
def test_rolling(impl, case, seed):
    compare_rolling(impl, *ROLL_CASES[case][0])


def compare_rolling(impl, seen, sinks, window):
    got = call(impl, dict(seen=seen, sinks=sinks, window=window))
    note(got)
    assert isinstance(got, tuple) and len(got) == 3, f"your result is {got!r}, expected three"
    labels = "the token in each slot", "the rotary positions of the keys", "the query's position"
    assert_entries(got, by_writing(seen, sinks, window), labels)


@check("28.3", seconds=5)
def test_random_caches(impl, seed):
    draws = random.Random(seed)
    for _ in range(30):
        compare_rolling(impl, draws.randint(1, 60), draws.randint(0, 5), draws.randint(1, 9))


# ---------------------------------------------------------------- 28.4 the kernel


def chosen_inputs(seed, heads, dim, page, length, keys, block=16, holes=0, front=0):
    """A sequence of `length` tokens and `keys` of them in a list, with as many `holes`, after
    `front` empty places.
    """
    g = torch.Generator().manual_seed(seed)
    used = -(-length // page)
    num_blocks = used + 2
    table = torch.full((used + 2,), 2**30, dtype=torch.int32)
    table[:used] = torch.randperm(num_blocks, generator=g)[:used].int()
    listed = torch.randperm(length, generator=g)[:keys].sort().values
    k, v = (torch.full((num_blocks, page, dim), math.nan) for _ in range(2))
    for key in listed.tolist():
        place = table[key // page], key % page
        k[place], v[place] = torch.randn(2, dim, generator=g)
    needed = {key // page for key in listed.tolist()}
    for entry in range(len(table)):
        if entry not in needed:
            table[entry] = 2**30
    places = torch.randperm(keys + holes, generator=g)[:keys].sort().values
    indices = torch.full((keys + holes,), -1, dtype=torch.int32)
    indices[places] = listed.int()
    indices = torch.cat([torch.full((front,), -1, dtype=torch.int32), indices])
    q = torch.randn(heads, dim, generator=g)
    return dict(q=q, k=k, v=v, table=table, indices=indices, block=block)


def by_gathering(q, k, v, table, indices, block):
    keys = [key for key in indices.tolist() if key >= 0]
    if not keys:
        return torch.zeros_like(q)
    page = k.shape[1]
    rows = [(int(table[key // page]), key % page) for key in keys]
    k, v = (torch.stack([x[row] for row in rows]).double() for x in (k, v))
    weights = (q.double() @ k.T * q.shape[1] ** -0.5).softmax(-1)
    return (weights @ v).float()


CHOSEN_CASES = {  # name: (arguments of chosen_inputs, why)
    "one_key": (dict(heads=1, dim=16, page=4, length=5, keys=1), "its value is the result"),
    "one_tile": (dict(heads=2, dim=16, page=4, length=30, keys=16), "a list of one tile"),
    "tiles": (dict(heads=2, dim=16, page=4, length=70, keys=48), "three tiles, online"),
    "last_tile": (dict(heads=1, dim=16, page=8, length=60, keys=37), "the last tile is not full"),
    "short_list": (dict(heads=3, dim=32, page=4, length=9, keys=3), "less than a tile"),
    "holes": (dict(heads=2, dim=16, page=4, length=40, keys=20, holes=15), "-1 between keys"),
    "empty_tiles": (
        dict(heads=1, dim=16, page=4, length=9, keys=2, holes=30, front=20),
        "whole tiles without a key, also the first",
    ),
    "no_keys": (dict(heads=2, dim=16, page=4, length=9, keys=0, holes=5), "zeros"),
    "page_of_one": (dict(heads=2, dim=16, page=1, length=20, keys=11), "a block is a token"),
    "large_tile": (dict(heads=1, dim=16, page=4, length=30, keys=9, block=64), "one tile for all"),
}


@check("28.4", {case: why for case, (_, why) in CHOSEN_CASES.items()}, seconds=30)
def test_chosen_rows(impl, case, seed):
    inputs = chosen_inputs(seed, **CHOSEN_CASES[case][0])
    compare(impl, inputs, want=by_gathering(**inputs), atol=1e-5, dtype=torch.float32)


@check("28.4", seconds=30)
def test_chosen_example(impl, seed):
    k, v = (torch.full((4, 2, 2), math.nan) for _ in range(2))
    k[3, 0], k[0, 1] = torch.tensor([0.0, 0.0]), torch.tensor([math.log(3), 0.0])
    v[3, 0], v[0, 1] = torch.tensor([1.0, 0.0]), torch.tensor([5.0, 4.0])
    table, indices = (torch.tensor(x, dtype=torch.int32) for x in ([3, 0], [0, 3]))
    inputs = dict(q=torch.tensor([[2**0.5, 0.0]]), k=k, v=v, table=table, indices=indices, block=16)
    compare(impl, inputs, want=torch.tensor([[4.0, 3.0]]), atol=1e-5)


LARGE_CASES = {
    "both_signs": "scores of hundreds: exp of the largest overflows",
    "far_below_zero": "all scores are below -100: exp of the largest is 0, unless it is subtracted",
}


@check("28.4", LARGE_CASES, seconds=30)
def test_large_scores(impl, case, seed):
    """The largest is in another tile each time."""
    inputs = chosen_inputs(seed, heads=2, dim=16, page=4, length=70, keys=48)
    inputs["q"] *= 200
    if case == "far_below_zero":
        inputs["q"], inputs["k"] = -inputs["q"].abs() - 100, inputs["k"].abs() + 0.3
    compare(impl, inputs, want=by_gathering(**inputs), atol=1e-3, dtype=torch.float32)


@check("28.4", seconds=30)
def test_only_the_result_is_allocated(impl, seed):
    inputs = chosen_inputs(seed, heads=2, dim=16, page=4, length=70, keys=48)
    got = assert_largest_tensor(2 * 16 + 1, "read the rows where they are", impl, **inputs)
    assert_close(got, by_gathering(**inputs), atol=1e-5)


@check("28.4", {"far": "the third block is after value 2³¹ of the memory"}, seconds=30)
def test_chosen_rows_far_apart(impl, case, seed):
    """A cache of blocks of a great many rows, in a sparse file."""
    g = torch.Generator().manual_seed(seed)
    page = 2**27  # rows of 16 values: a block is 2³¹ values
    rows = [0, 5, page + 1]
    small = torch.randn(2, len(rows), 16, generator=g)
    q = torch.randn(1, 16, generator=g)
    with tempfile.TemporaryDirectory() as folder:
        k, v = (sparse_cache(Path(folder) / name, page) for name in "kv")
        for row, (one_k, one_v) in zip(rows, small.unbind(1)):
            k[row // page, row % page], v[row // page, row % page] = one_k, one_v
        table = torch.tensor([0, 1], dtype=torch.int32)
        indices = torch.tensor(rows, dtype=torch.int32)
        got = note(impl(q, k, v, table, indices, 16))
    weights = (q @ small[0].T * 16**-0.5).softmax(-1)
    assert_close(got, weights @ small[1], atol=1e-5)


def sparse_cache(path, page):
    """[2, page, 16] float32 in a file that takes no room until it is written."""
    with path.open("wb") as file:
        file.truncate(2 * page * 16 * 4)
    return torch.from_file(str(path), shared=True, size=2 * page * 16).view(2, page, 16)


test_the_kernel_does_it = kernel_does_it(
    "28.4",
    lambda seed: chosen_inputs(seed, 1, 16, 4, 20, 20),
    not_loaded=("k", "v", "table"),
)


# ---------------------------------------------------------------- 28.5 the crossing


def by_search(row_bytes, index_bytes, k, batch, bytes_per_s, fixed_s):
    """Double the context until it pays, then halve the gap."""
    if index_bytes >= row_bytes:
        return None

    def is_faster(context):
        full = batch * context * row_bytes
        chosen = batch * (context * index_bytes + min(k, context) * row_bytes)
        return full > chosen + fixed_s * bytes_per_s

    high = 1
    while not is_faster(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_faster(middle) else (middle, high)
    return high


PAY_CASES = {  # name: (arguments, why)
    "example": ((10, 2, 4, 1, 1.0, 0.0), "the docstring's"),
    "deepseek": ((1152, 156, 2048, 1, 3.35e12, 0.0), "no launches: a little more than k"),
    "launches": ((1152, 156, 2048, 1, 3.35e12, 1e-5), "one sequence pays for its launches alone"),
    "batch": ((1152, 156, 2048, 32, 3.35e12, 1e-5), "32 sequences share the launches"),
    "batch_without_launches": ((1152, 156, 2048, 64, 3.35e12, 0.0), "the batch does not matter"),
    "never": ((100, 100, 8, 4, 1e9, 0.0), "index rows as large as rows"),
    "never_larger": ((100, 120, 8, 4, 1e9, 0.0), "and larger"),
    "small_k": ((64, 60, 1, 2, 1e6, 0.0), "hardly any gain a key"),
    "right_after_k": ((1000, 1, 8, 1, 1e6, 0.0), "the first key that is left out pays for all"),
    "equal_is_not_faster": ((8, 4, 4, 1, 1.0, 0.0), "at 8 keys both take 64 s"),
    "slow_memory": ((16, 4, 10, 2, 3.0, 7.0), "bytes that a launch could have read"),
}
PAY_NAMES = ("row_bytes", "index_bytes", "k", "batch", "bytes_per_s", "fixed_s")


@check("28.5", {case: why for case, (_, why) in PAY_CASES.items()}, seconds=5)
def test_pays_from(impl, case, seed):
    compare_crossing(impl, PAY_CASES[case][0])


def compare_crossing(impl, arguments):
    got = note(call(impl, dict(zip(PAY_NAMES, arguments))))
    want = by_search(*arguments)
    assert got is None or type(got) is int, f"your result is {got!r}, expected an int or None"
    assert_equal(got, want)


@check("28.5", seconds=5)
def test_random_machines(impl, seed):
    draws = random.Random(seed)
    for _ in range(30):
        rows = draws.randint(8, 2000)
        index = draws.randint(1, rows - 1)
        fixed = draws.choice((0.0, draws.uniform(0, 50)))
        compare_crossing(
            impl, (rows, index, draws.randint(1, 4096), draws.randint(1, 64), 1000.0, fixed)
        )
