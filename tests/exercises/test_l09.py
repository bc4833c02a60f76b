"""Checks of lesson 09's exercises. Each exists because it rejects a named wrong answer
(wrong/l09.py).
"""

import random

import torch

from lessons.l02_naive_attention.naive import causal_mask
from lessons.l09_flash_attention import naive
from lessons.l09_flash_attention.tiles import Tiles
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.proof.traps import poison_, poisoned_empty
from tests.exercises.checking import (
    assert_equal,
    assert_largest_tensor,
    call,
    check,
    compare,
    in_wider_memory,
)
from tests.exercises.kernel_work import kernel_does_it

# ---------------------------------------------------------------- 9.1 tiles in PyTorch


def tile_inputs(
    seed, queries=16, keys=16, heads=2, kv_heads=2, dim=8, v_dim=8, kind="normal", **options
):
    """Random q, k, v and options; kind "ascending": every tile holds a larger score than the one
    before; "far_below": all scores are near -20480 · √dim, exact in float32.
    """
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, heads, dim, generator=g)
    k, v = (
        torch.randn(keys, kv_heads, dim, generator=g),
        torch.randn(keys, kv_heads, v_dim, generator=g),
    )
    if kind == "ascending":
        q, k = q.abs(), k.abs() * torch.linspace(0, 3, keys)[:, None, None]
    elif kind == "all_negative":
        q, k = q.abs(), -k.abs()
    elif kind == "large_logits":
        q, k = 8 * q, 8 * k
    elif kind == "far_below":
        q, k = (4 * q).round() / 8, (4 * k).round() / 8
        q[..., 0], k[..., 0] = 128 * dim**0.5, -160
    elif kind == "slices":
        q, k, v = map(in_wider_memory, (q, k, v))
    return dict(q=q, k=k, v=v, tiles=Tiles(8, 4), **options)


def at_once(q, k, v, softmax_scale=None, causal=True, window=None, tiles=None):
    return naive.attention(q.double(), k.double(), v.double(), softmax_scale, causal, window)


TILE_CASES = {
    "one_tile": (dict(queries=4, keys=4), "everything fits one tile: the diagonal"),
    "many_tiles": (
        dict(kind="ascending"),
        "the maximum grows in every tile: l and acc are rescaled",
    ),
    "large_logits": (dict(kind="large_logits"), "exp overflows without the maximum"),
    "tail": (dict(queries=11, keys=14), "no length is a multiple of its tile"),
    "tail_not_causal": (
        dict(queries=11, keys=14, causal=False, kind="all_negative"),
        "padding that scores 0 would win",
    ),
    "chunk": (dict(queries=5, keys=19), "fewer queries than keys: aligned bottom right"),
    "more_queries": (dict(queries=19, keys=6), "the first queries see nothing: 0 and −inf"),
    "window": (dict(queries=30, keys=30, window=6), "each query's window counts its own key"),
    "window_of_one": (dict(queries=12, keys=12, window=1), "a query sees itself alone"),
    "grouped_heads": (dict(heads=6, kv_heads=2), "query heads 0, 1, 2 read KV head 0"),
    "other_v": (dict(v_dim=5), "v may be narrower than q and k"),
    "slices": (dict(kind="slices"), "q, k and v are slices of wider tensors"),
    "far_below": (dict(kind="far_below", dim=16), "all scores are near -20000: no maximum is 0"),
    "given_scale": (dict(softmax_scale=0.7), "softmax_scale comes from the caller"),
    "scale_of_zero": (dict(softmax_scale=0.0), "0 is a scale too: all weights are equal"),
}


@check("9.1", {case: why for case, (_, why) in TILE_CASES.items()})
def test_tiles(impl, case, seed):
    inputs = tile_inputs(seed, **TILE_CASES[case][0])
    (out, lse), (want, want_lse) = call(impl, inputs), at_once(**inputs)
    # one float32 rounding of such a score
    atol = 2e-2 if case == "far_below" else 5e-5
    assert_equal(out, want, atol=atol, dtype=torch.float32, label="out")
    hidden = want_lse.isneginf()
    count = int(lse.isneginf().sum())
    assert torch.equal(lse.isneginf(), hidden), (
        f"lse is -inf for {count} entries, expected {int(hidden.sum())}"
    )
    assert_equal(
        lse.masked_fill(hidden, 0),
        want_lse.masked_fill(hidden, 0),
        atol=1e-4,
        rtol=3e-7,
        dtype=torch.float32,
        label="lse",
    )


@check("9.1")
def test_no_matrix_of_all_scores(impl, seed):
    inputs = tile_inputs(seed, 128, 128, 1, 1, dim=4, v_dim=4) | dict(tiles=Tiles(4, 64))
    assert_largest_tensor(64 * 64, "a tile has 4 · 64 scores", impl, **inputs)


@check("9.1")
def test_unseen_tiles_are_never_read(impl, seed):
    """With a window and a causal mask: the first tile of queries, at keys 16 to 23, sees the keys
    13 to 23. The others hold NaN.
    """
    inputs = tile_inputs(seed, 16, 32, window=4)
    want = at_once(**inputs)[0]
    for x in (inputs["k"], inputs["v"]):
        poison_(x[:12])
        poison_(x[24:])
    out = call(impl, inputs)[0]
    label = "out of the queries 0 to 7, which see the keys 13 to 23 of 32"
    assert_equal(out[:8], want[:8], atol=5e-5, dtype=torch.float32, label=label)


@check("9.1")
def test_tiles_of_bfloat16(impl, seed):
    """out keeps the dtype; sums are wide, or a long row loses them."""
    inputs = tile_inputs(seed, 8, 400, 1, 1, causal=False)
    inputs |= {name: inputs[name].bfloat16() for name in "qkv"} | {
        "v": inputs["v"].abs().bfloat16() + 4
    }
    out, lse = call(impl, inputs)
    want, want_lse = at_once(**inputs)
    assert_equal(out, want, atol=7e-2, dtype=torch.bfloat16, label="out")
    assert_equal(lse, want_lse, atol=2e-3, dtype=torch.float32, label="lse")


@check("9.1")
def test_example_tiles(impl, seed):
    column = lambda *x: torch.tensor(x, dtype=torch.float64).view(-1, 1, 1)
    out, lse = call(
        impl,
        dict(
            q=column(1, 1, 1),
            k=column(0, 0, 0.6931471805599453),
            v=column(3, 6, 12),
            softmax_scale=1.0,
            tiles=Tiles(1, 2),
        ),
    )
    assert_equal(out, column(3, 4.5, 8.25), atol=1e-9, label="out")
    assert_equal(lse[2, 0].item(), 1.3862943611198906, atol=1e-9, label="lse of query 2")


# ---------------------------------------------------------------- 9.2 the kernel

SINK_CASES = {
    "one_tile": (dict(), "16 queries, 16 keys, D 16, one tile of everything"),
    "two_tiles": (dict(keys=32, kind="ascending"), "the maximum grows: l and acc are rescaled"),
    "tail_of_keys": (
        dict(keys=21, kind="all_negative"),
        "a key beyond the last scores 0 and would win",
    ),
    "tail_of_queries": (dict(queries=19), "rows beyond the last are not written"),
    "head_of_20": (dict(dim=20, keys=5), "20 of 32 columns exist"),
    "large_scores": (
        dict(kind="large_logits"),
        "exp overflows unless the maximum leaves the sink's",
    ),
    "no_key": (dict(keys=0), "the sink takes all"),
    "far_below": (
        dict(keys=21, kind="far_below", sink=-20480.0),
        "all scores are near -20000: neither a maximum nor a mask is large enough there",
    ),
}


def sink_inputs(seed, queries=16, keys=16, heads=1, dim=16, kind="normal", sink=None):
    inputs = tile_inputs(seed, queries, keys, heads, heads, dim, dim, kind)
    q, k, v = (inputs[name].to(default_device()) for name in "qkv")
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed)).to(q.device)
    return dict(q=q, k=k, v=v, sinks=sinks if sink is None else torch.full_like(sinks, sink))


@check("9.2", {case: why for case, (_, why) in SINK_CASES.items()})
def test_sinks(impl, case, seed):
    inputs = sink_inputs(seed, **SINK_CASES[case][0])
    want = torch.zeros_like(inputs["q"], dtype=torch.float64)
    if len(inputs["k"]):
        want = naive.attention(
            *(inputs[name].double() for name in "qkv"), causal=False, sinks=inputs["sinks"].double()
        )[0]
    atol = 2e-2 if case == "far_below" else 1e-4  # log2(e) times such a score is rounded
    with poisoned_empty():
        compare(impl, inputs, want=want, atol=atol, dtype=torch.float32)


@check("9.2")
def test_each_head_has_its_sink(impl, seed):
    inputs = sink_inputs(seed, 3, 4, heads=3)
    inputs["sinks"] = torch.tensor([-20.0, 0.0, 3.0], device=inputs["q"].device)
    want = naive.attention(
        *(inputs[name].double() for name in "qkv"), causal=False, sinks=inputs["sinks"].double()
    )[0]
    compare(impl, inputs, want=want, atol=1e-4, dtype=torch.float32)


@check("9.2")
def test_columns_of_the_next_head(impl, seed):
    """HEAD_DIM is 20, BLOCK_D 32: after head 0's columns come those of head 1, NaN here."""
    inputs = sink_inputs(seed, 3, 4, heads=2, dim=20)
    one = {name: inputs[name][:, :1] for name in "qkv"}
    sinks = inputs["sinks"][:1].double()
    want = naive.attention(*(x.double() for x in one.values()), causal=False, sinks=sinks)[0]
    for name in "qkv":
        poison_(inputs[name][:, 1])
    got = call(impl, inputs)[:, :1]
    assert_equal(got, want, atol=1e-4, dtype=torch.float32, label="head 0 of your result")


@check("9.2")
def test_sums_are_wide(impl, seed):
    """bfloat16. Head 0: each key but the first weighs 1/4300 of it, so a narrow sum never grows.
    Head 1: three scores near 60, which bfloat16 would round by up to 0.125.
    """
    inputs = sink_inputs(seed, 1, 256, heads=2, sink=0.0)
    q, k, v = (inputs[name] for name in "qkv")
    q[:, 0], k[0, 0], k[1:, 0], v[:, 0] = 1.0, 0.0, -2.1, 1.0
    q[:, 1, 0], k[:3, 1, 0], k[3:, 1, 0] = 16.0, 15.0, -15.0
    v[:, 1] = v[:, 1].abs() + 1
    inputs |= {name: inputs[name].bfloat16() for name in "qkv"}
    want = naive.attention(
        *(inputs[name].double() for name in "qkv"), causal=False, sinks=inputs["sinks"].double()
    )[0]
    compare(impl, inputs, want=want, atol=0.0, rtol=2e-2, dtype=torch.bfloat16)


test_the_kernel_does_it = kernel_does_it("9.2", lambda seed: sink_inputs(seed, 17, 5, heads=2))


# ---------------------------------------------------------------- 9.3 predict

MANY = 2**33 + 3  # tiles: more than a loop can visit, and their square than a float can hold
TRAFFIC_CASES = {
    "example": ((4, 1, 8, 2, 2), (3, 1, 256, 128), "the docstring's"),
    "one_tile": (
        (16, 2, 32, 4, 16),
        (1, 0, 2 * (16 * 128 + 16 * 256), 4 * 2 * 256 * 4),
        "the diagonal alone",
    ),
    "prefill_8k": (
        (8192, 32, 128, 2, 128),
        (2080, 2016, 4429185024, 17179869184),
        "4.4 GB against 17 GB, and no cache helped",
    ),
    "a_trillion_tokens": (
        (128 * MANY, 1, 1, 1, 128),
        (
            MANY * (MANY + 1) // 2,
            MANY * (MANY - 1) // 2,
            128 * MANY + 128 * MANY * (MANY + 1),
            4 * (128 * MANY) ** 2,
        ),
        "a formula in whole numbers, no loop",
    ),
}


@check("9.3", {case: why for case, (*_, why) in TRAFFIC_CASES.items()}, seconds=5)
def test_predicted_traffic(impl, case, seed):
    numbers, want, _ = TRAFFIC_CASES[case]
    got = call(
        impl, dict(zip(("num_tokens", "num_heads", "head_dim", "itemsize", "block"), numbers))
    )
    assert isinstance(got, tuple) and len(got) == 4, (
        f"your result is {got!r}, expected a tuple of four numbers"
    )
    for what, mine, right in zip(
        ("tiles visited", "tiles without a mask", "bytes read", "bytes of naive scores"), got, want
    ):
        assert_equal(mine, right, label=what)


@check("9.3", seconds=5)
def test_traffic_by_counting(impl, seed):
    draw = random.Random(seed)
    block, heads, dim, itemsize = (
        draw.choice([8, 16]),
        draw.randint(2, 4),
        draw.choice([32, 64]),
        draw.choice([1, 2, 4]),
    )
    tokens = block * draw.randint(3, 6)
    sees = causal_mask(tokens, tokens).unflatten(0, (-1, block)).unflatten(2, (-1, block))
    visited, full = int(sees.any(3).any(1).sum()), int(sees.all(3).all(1).sum())
    read = heads * dim * itemsize * (tokens + visited * 2 * block)
    got = call(
        impl, dict(num_tokens=tokens, num_heads=heads, head_dim=dim, itemsize=itemsize, block=block)
    )
    assert_equal(
        tuple(got),
        (visited, full, read, 4 * heads * tokens * tokens * itemsize),
        label="your numbers",
    )


# ---------------------------------------------------------------- 9.4 which keys

RANGE_CASES = {
    "square": (dict(), "as many queries as keys"),
    "chunk": (dict(queries=7, keys=23), "fewer queries than keys: aligned bottom right"),
    "more_queries": (dict(queries=23, keys=7), "the first tiles see nothing at all"),
    "full": (dict(queries=10, keys=21, causal=False), "no mask, but a last tile that is not whole"),
    "window": (
        dict(queries=29, keys=29, window=5),
        "the first query of a tile reaches furthest back",
    ),
    "window_into_a_tile": (
        dict(queries=29, keys=29, window=6),
        "it reaches back to the last key of a tile, and so to the tile",
    ),
    "window_of_one": (dict(queries=29, keys=29, window=1), "the diagonal alone"),
    "uneven_tiles": (
        dict(queries=30, keys=37, block_m=8, block_n=3),
        "tiles of queries and of keys differ",
    ),
}


def right_ranges(queries, keys, tiles, causal, window):
    """(begin, full_end, end) of every tile of queries, from the mask itself."""
    # the last tile is counted as if it were whole
    rows = -(-queries // tiles.block_m) * tiles.block_m
    at = torch.arange(rows)[:, None] + keys - queries
    key = torch.arange(keys)
    below = (key <= at) if causal else torch.ones(rows, keys, dtype=torch.bool)
    seen = below & (key > at - window) if window else below
    for start_m in range(0, queries, tiles.block_m):
        part = slice(start_m, start_m + tiles.block_m)
        visible = seen[part].any(0).nonzero().view(-1).tolist()
        whole = below[part].all(0).tolist()
        full_end = 0
        while full_end + tiles.block_n <= keys and all(whole[full_end : full_end + tiles.block_n]):
            full_end += tiles.block_n
        yield (
            start_m,
            (visible[0] // tiles.block_n * tiles.block_n if visible and window else 0),
            full_end,
            (min(visible[-1] + 1, keys) if visible else 0),
        )


@check("9.4", {case: why for case, (_, why) in RANGE_CASES.items()}, seconds=5)
def test_ranges(impl, case, seed):
    options = (
        dict(queries=18, keys=18, block_m=4, block_n=4, causal=True, window=None)
        | RANGE_CASES[case][0]
    )
    tiles = Tiles(options["block_m"], options["block_n"])
    arguments = options["queries"], options["keys"], tiles, options["causal"], options["window"]
    for start_m, begin, full_end, end in right_ranges(*arguments):
        got = call(
            impl,
            dict(
                start_m=start_m,
                num_queries=arguments[0],
                num_keys=arguments[1],
                tiles=tiles,
                causal=arguments[3],
                window=arguments[4],
            ),
        )
        want = (min(begin, full_end), full_end, end)
        which = f"queries {start_m} to {start_m + tiles.block_m - 1}"
        assert all(isinstance(number, int) for number in got), f"{which}: {got} are not all int"
        assert tuple(got) == want, f"{which}: your range is {tuple(got)}, expected {want}"


@check("9.4", seconds=10)
def test_attention_by_these_ranges(impl, seed):
    """Walked by your ranges: masks only from full_end on, as the kernel does."""
    draw = random.Random(seed)
    for _ in range(20):
        queries, keys = draw.randint(1, 30), draw.randint(1, 30)
        causal, tiles = draw.random() < 0.8, Tiles(draw.choice([2, 4, 8]), draw.choice([2, 4, 8]))
        window = draw.choice([None, 1, 4, 9]) if causal else None
        sees = (
            causal_mask(queries, keys, window)
            if causal
            else torch.ones(queries, keys, dtype=torch.bool)
        )
        walked = torch.zeros_like(sees)
        for start_m in range(0, queries, tiles.block_m):
            rows = slice(start_m, start_m + tiles.block_m)
            begin, full_end, end = impl(
                start_m=start_m,
                num_queries=queries,
                num_keys=keys,
                tiles=tiles,
                causal=causal,
                window=window,
            )
            for start_n in range(begin, end, tiles.block_n):
                tile = (rows, slice(start_n, start_n + tiles.block_n))
                walked[tile] = sees[tile] if start_n >= full_end or window else True
        assert torch.equal(walked, sees), (
            f"{queries} queries, {keys} keys, {tiles}, causal={causal}, window={window}: "
            f"{int((walked & ~sees).sum())} hidden pairs were seen, {int((sees & ~walked).sum())} "
            f"pairs were left out"
        )
