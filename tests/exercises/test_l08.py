"""Checks of lesson 08's exercises. Each exists because it rejects a named wrong answer
(wrong/l08.py).
"""

import itertools
import math
from functools import reduce

import torch

from lessons.l08_online_softmax.naive import Partial, finish, from_scores, identity
from tests.exercises.checking import assert_equal, assert_largest_tensor, call, check, compare

# ---------------------------------------------------------------- 8.1 two parts become one


def parts_of(case, seed):
    """Partials of a row's pieces, float32, and the scores [5, N] and values [N, 6] that they are
    of.
    """
    g = torch.Generator().manual_seed(seed)
    scores, v = torch.randn(5, 40, generator=g), torch.randn(40, 6, generator=g)
    cuts = [0, 16, 32, 40]
    if case == "two":
        cuts = [0, 25, 40]
    elif case == "ascending":
        scores = scores.sort(-1).values * 4
    elif case == "descending":
        scores = scores.sort(-1, descending=True).values * 4
    elif case == "overflow":
        scores = scores * 40
        scores[:, -1] = 400
    elif case == "far_below":
        scores = scores - 1000
    elif case == "a_masked_part":
        scores[:3, :16] = scores[2:, 16:32] = -torch.inf
    elif case == "a_masked_row":
        scores[1], scores[3, :32] = -torch.inf, -torch.inf
    elif case == "empty_parts":
        cuts = [0, 0, 16, 16, 40, 40]
    elif case == "one_by_one":
        cuts = list(range(41))
    return [from_scores(scores[:, a:b], v[a:b]) for a, b in itertools.pairwise(cuts)], scores, v


MERGE_CASES = {
    "two": "two parts, neither larger",
    "chain": "three parts, one after the other",
    "ascending": "the largest score comes last: what was summed before has to shrink",
    "descending": "the largest comes first: what comes later has to shrink",
    "overflow": "scores of 400: exp alone is inf",
    "far_below": "scores of -1000: exp alone is 0",
    "a_masked_part": "a part in which some rows see nothing",
    "a_masked_row": "a row that sees nothing at all: nothing again, not NaN",
    "empty_parts": "parts without any column",
    "one_by_one": "40 parts of one score",
}


@check("8.1", MERGE_CASES)
def test_merged_parts_are_the_row(impl, case, seed):
    parts, scores, v = parts_of(case, seed)
    got = reduce(lambda a, b: as_partial(call(impl, dict(a=a, b=b))), parts)
    want = from_scores(scores.double(), v.double())
    # log l, added to a maximum near -1000, is rounded by 6e-5
    tolerance = 2e-4 if case == "far_below" else 2e-5
    for name, mine, right in zip(Partial._fields, got, want):
        assert_equal(
            mine, right, atol=tolerance, rtol=tolerance, dtype=torch.float32, label=f"your {name}"
        )


def as_partial(result):
    assert isinstance(result, Partial), (
        f"your result is {type(result).__name__}, expected a Partial"
    )
    return result


@check(
    "8.1",
    {
        "left": "nothing, then a part",
        "right": "a part, then nothing",
        "both": "nothing and nothing",
    },
)
def test_nothing_changes_nothing(impl, case, seed):
    part, nothing = parts_of("two", seed)[0][0], identity((5,), 6)
    a, b, want = {
        "left": (nothing, part, part),
        "right": (part, nothing, part),
        "both": (nothing, nothing, nothing),
    }[case]
    compare(impl, dict(a=a, b=b), want=want)


@check("8.1")
def test_order_does_not_matter(impl, seed):
    """A chain from the left, one from the right, and a tree."""
    (a, b, c), scores, v = parts_of("ascending", seed)
    both = lambda x, y: as_partial(impl(x, y))
    want = finish(from_scores(scores.double(), v.double()))
    for merged in (both(both(a, b), c), both(c, both(b, a)), both(both(c, a), b)):
        assert_equal(
            finish(merged),
            want,
            atol=1e-5,
            dtype=torch.float32,
            label="out and lse after another order",
        )


@check("8.1")
def test_example(impl, seed):
    logs = torch.tensor([1.0, 2.0, 4.0]).double().log()
    a, b = (
        Partial(m, torch.tensor(l).double(), torch.tensor([acc]).double())
        for m, l, acc in ((logs[1], 1.5, 9.0), (logs[2], 1.25, 2.0))
    )
    compare(
        impl,
        dict(a=a, b=b),
        want=Partial(logs[2], torch.tensor(2.0).double(), torch.tensor([6.5]).double()),
        atol=1e-12,
    )


# ---------------------------------------------------------------- 8.2 attention in splits

SPLIT_CASES = {  # name: (splits, block, why)
    "one_tile": ([(0, 40)], 64, "everything at once"),
    "tiles": ([(0, 40)], 16, "one split, a tail of 8 columns"),
    "splits": ([(0, 13), (13, 40)], 16, "two splits of different lengths"),
    "many_splits": ([(n, n + 1) for n in range(40)], 4, "a split for each column"),
    "an_empty_split": (
        [(0, 0), (0, 20), (20, 20), (20, 40)],
        8,
        "a split without columns has no weight",
    ),
    "ascending": ([(0, 20), (20, 40)], 4, "the max grows in every tile"),
    "overflow": ([(0, 20), (20, 40)], 8, "scores up to 400: exp alone is inf"),
    "far_below": ([(0, 20), (20, 40)], 8, "scores around -20000: relative to 0 all of them vanish"),
    "masked": ([(0, 20), (20, 40)], 8, "tiles, splits and rows that see nothing"),
}


def split_inputs(case, seed):
    g = torch.Generator().manual_seed(seed)
    scores, v = torch.randn(5, 40, generator=g) * 2, torch.randn(40, 6, generator=g)
    if case == "ascending":
        scores = scores.sort(-1).values * 60
    elif case == "overflow":
        scores = scores.clamp(-2, 2) * 200
    elif case == "far_below":
        scores = scores - 20000
    elif case == "masked":
        scores[0], scores[1, :20], scores[2, 20:], scores[3, 4:12] = (-torch.inf,) * 4
    return dict(scores=scores, v=v, splits=SPLIT_CASES[case][0], block=SPLIT_CASES[case][1])


@check("8.2", {case: why for case, (*_, why) in SPLIT_CASES.items()})
def test_splits(impl, case, seed):
    inputs = split_inputs(case, seed)
    out, lse = finish(from_scores(inputs["scores"].double(), inputs["v"].double()))
    got = call(impl, inputs)
    assert isinstance(got, tuple) and len(got) == 2, (
        f"your result is {type(got).__name__}, expected (out, lse2)"
    )
    # Around -20000, in powers of two -28854, float32 rounds a score by up to 1e-3, and its weight
    # by as much of itself.
    atol = 1e-2 if case == "far_below" else 1e-4
    assert_equal(got[0], out, atol=atol, dtype=torch.float32, label="your out")
    assert_equal(
        got[1], lse / math.log(2), atol=atol, rtol=1e-6, dtype=torch.float32, label="your lse2"
    )


@check("8.2")
def test_no_more_than_a_tile_at_once(impl, seed):
    g = torch.Generator().manual_seed(seed)
    scores, v = torch.randn(64, 64, generator=g), torch.randn(64, 1, generator=g)
    inputs = dict(scores=scores, v=v, splits=[(0, 32), (32, 64)], block=4)
    assert_largest_tensor(64 * 16, "a tile has 64 · 4 scores", impl, **inputs)


# ---------------------------------------------------------------- 8.3 predict

NUMBERS_CASES = {  # name: (arguments, the answer, why)
    "example": (
        (64, 100000, torch.bfloat16, 4000.0, 32768),
        (0.0128, 0.0096, 89),
        "the docstring's",
    ),
    "short_rows": (
        (64, 32000, torch.float16, 4000.0, 32768),
        (0.004096, 0.002048, 12),
        "a row that fits is read once",
    ),
    "just_fits": (
        (1000, 4096, torch.float32, 800.0, 4096),
        (0.08192, 0.04096, 89),
        "max_block columns fit",
    ),
    "one_more": (
        (1000, 4097, torch.float32, 800.0, 4096),
        (0.08194, 0.061455, 89),
        "one column more does not",
    ),
    "float64": (
        (10, 1000, torch.float64, 100.0, 100),
        (0.0032, 0.0024, 710),
        "8 bytes a score, and a far larger limit",
    ),
}


@check("8.3", {case: why for case, (*_, why) in NUMBERS_CASES.items()}, seconds=5)
def test_numbers(impl, case, seed):
    arguments, want, _ = NUMBERS_CASES[case]
    got = call(
        impl, dict(zip(("num_rows", "num_columns", "dtype", "gb_per_s", "max_block"), arguments))
    )
    assert isinstance(got, tuple) and len(got) == 3, (
        f"your result is {got!r}, expected a tuple of three numbers"
    )
    for what, mine, right in zip(("ms of three passes", "ms of the lesson's kernel"), got, want):
        assert_equal(mine, right, rtol=1e-6, label=f"the {what}")
    assert_equal(got[2], want[2], label="the smallest whole score whose exp is inf")


# ---------------------------------------------------------------- 8.4 the butterfly


class Warp:
    """Counts the exchanges; a lane outside the mask, or whose partner is outside it, gets NaN."""

    def __init__(self):
        self.exchanges = 0

    def shfl_xor_sync(self, mask, register, distance):
        assert isinstance(register, torch.Tensor) and register.shape == (32,), (
            "a register is a tensor of 32 numbers"
        )
        self.exchanges += 1
        lane = torch.arange(32)
        partner = lane ^ int(distance)
        assert int(partner.max()) < 32, (
            f"lane {int(partner.argmax())} xor {distance} is no lane: a warp has 32"
        )
        inside = torch.tensor([bool(mask >> int(n) & 1) for n in lane])
        return register[partner].masked_fill(~(inside & inside[partner]), float("nan"))


WARP_CASES = {
    "plain": "32 lanes, each with something",
    "the_largest_last": "the max sits in lane 31: every lane has to get it",
    "the_largest_first": "the max sits in lane 0",
    "neighbours": "lanes 2k and 2k + 1 differ most: they meet in one round alone",
    "halves": "the two halves of the warp differ most",
    "ten_lanes": "22 lanes have seen nothing",
    "one_lane": "31 lanes have seen nothing",
    "nothing": "no lane has seen anything: no NaN",
    "overflow": "maxima of hundreds",
}


def warp_inputs(case, seed):
    g = torch.Generator().manual_seed(seed)
    m, l = torch.randn(32, generator=g), torch.rand(32, generator=g) * 4 + 1
    if case == "the_largest_last":
        m[31] = 9
    elif case == "the_largest_first":
        m[0] = 9
    elif case == "neighbours":
        m[1::2] += 5
    elif case == "halves":
        m[16:] += 5
    elif case == "overflow":
        m = m * 300
    empty = {"ten_lanes": slice(10, 32), "one_lane": slice(0, 31), "nothing": slice(0, 32)}.get(
        case, slice(0)
    )
    m[empty], l[empty] = -torch.inf, 0
    return m, l


@check("8.4", WARP_CASES)
def test_every_lane_holds_the_warp(impl, case, seed):
    m, l = warp_inputs(case, seed)
    got = run_warp(impl, m, l, Warp())
    top = m.double().max()
    total = (l.double() * torch.exp(m.double() - top.masked_fill(top == -torch.inf, 0.0))).sum()
    assert_equal(
        got,
        (top.expand(32), total.expand(32)),
        atol=1e-5,
        rtol=1e-5,
        dtype=torch.float32,
        label="(m, l)",
    )


def run_warp(impl, m, l, warp):
    """(m, l) of all lanes."""
    got = call(impl, dict(m=m, l=l, shfl_xor_sync=warp.shfl_xor_sync))
    assert isinstance(got, tuple) and len(got) == 2, (
        f"your result is {type(got).__name__}, expected (m, l)"
    )
    return got


@check("8.4")
def test_every_lane_holds_the_same_bits(impl, seed):
    for n in range(20):
        m, l = warp_inputs("plain", 100 * seed + n)
        _, got = run_warp(impl, m / 4, l, Warp())
        different = len(set(got.tolist()))
        assert different == 1, (
            f"your lanes hold {different} different sums, from {got.min():.9g} to {got.max():.9g}"
        )


@check("8.4")
def test_ten_exchanges(impl, seed):
    warp = Warp()
    run_warp(impl, *warp_inputs("plain", seed), warp)
    assert warp.exchanges == 10, (
        f"your lanes exchanged {warp.exchanges} registers; five rounds of m and l are 10"
    )


@check("8.4")
def test_example_of_the_warp(impl, seed):
    m, l = torch.full((32,), -torch.inf), torch.zeros(32)
    m[:4], l[:4] = torch.tensor([1.0, 1.0, 2.0, 4.0]).log(), torch.tensor([1.0, 1.0, 3.0, 2.0])
    got = run_warp(impl, m, l, Warp())
    assert_equal(
        got, (torch.full((32,), math.log(4)), torch.full((32,), 4.0)), atol=1e-6, label="(m, l)"
    )
