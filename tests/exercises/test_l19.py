"""Checks of lesson 19's exercises. Each exists because it rejects a named wrong answer
(wrong/l19.py).
"""

import copy
import itertools
from functools import cache

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lessons.l02_naive_attention.naive import attention
from lessons.toolbox.kernels.triton_ import tl, triton
from solutions.l19_kv_quantization import Pages
from tests.exercises.checking import (
    assert_entries,
    assert_equal,
    assert_largest_tensor,
    assert_same_work,
    call,
    check,
    compare,
    note,
)
from tests.exercises.kernel_work import kernel_does_it

# ---------------------------------------------------------------- 19.1 predict

PLAN_NAMES = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "context",
    "bits",
    "group",
    "weight_bytes",
    "memory_bytes",
)
GB = 10**9
PLAN_CASES = {  # name: (arguments, the answer, why)
    "example": ((2, 1, 4, 10, 8, 4, 1000, 2000), (320, 240, 3, 4, 4 / 3), "the docstring's"),
    "llama_2_70b": (
        (80, 8, 128, 4096, 8, 128, 138 * GB, 160 * GB),
        (1342177280, 681574400, 16, 32, (32 / 159.8103808) / (16 / 159.47483648)),
        "1.34 GB a sequence become 0.68",
    ),
    "four_bits": (
        (32, 8, 128, 8192, 4, 32, 16 * GB, 80 * GB),
        (1073741824, 301989888, 59, 211, (211 / 79.719866368) / (59 / 79.350767616)),
        "a scale of 16 bits for 32 values of 4 bits is an eighth more",
    ),
    "one_user": (
        (32, 8, 128, 131072, 8, 128, 16 * GB, 40 * GB),
        (17179869184, 8724152320, 1, 2, (2 / 33.44830464) / (1 / 33.179869184)),
        "one long sequence fits, then two",
    ),
    "the_rest_is_too_small": (
        (1, 1, 8, 100, 8, 8, 1000, 4300),
        (3200, 2000, 1, 1, 4200 / 3000),
        "as many sequences as before, and fewer bytes",
    ),
}
LABELS = (
    "the bytes of a sequence in 16 bits",
    "the bytes of a quantized sequence",
    "how many sequences of 16 bits fit",
    "how many quantized sequences fit",
    "how many times as many tokens a second",
)


@check("19.1", {case: why for case, (*_, why) in PLAN_CASES.items()}, seconds=5)
def test_plan(impl, case, seed):
    numbers, want, _ = PLAN_CASES[case]
    got = call(impl, dict(zip(PLAN_NAMES, numbers)))
    assert isinstance(got, tuple) and len(got) == 5, (
        f"your result is {got!r}, expected a tuple of five"
    )
    assert_entries(got, want, LABELS, rtol=1e-9)


# ---------------------------------------------------------------- 19.2 SmoothQuant

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def rounded(values, dtype):
    """The definition of a code, in float64: nearest, never beyond the largest."""
    values = values.clamp(-LARGEST[dtype], LARGEST[dtype])
    return values.round() if dtype == torch.int8 else values.float().to(dtype).double()


def is_clear(values, dtype):
    """Whether no value is so near to the middle of two codes that float32 might decide it."""
    return torch.equal(rounded(values * 1.00001, dtype), rounded(values * 0.99999, dtype))


def smoothed(x, weight, act_max, alpha, dtype, x_scale=None):
    """The six results by the definition, in float64, and the values that were rounded."""
    x, weight, act_max = x.double(), weight.double(), act_max.double()
    s = torch.ones_like(act_max)
    for channel, most in enumerate(act_max):
        of_weight = weight[:, channel].abs().max()
        if most > 0 and of_weight > 0:
            s[channel] = most**alpha / of_weight ** (1 - alpha)
    results, values = [s], []
    for rows, scale in ((x / s, x_scale), (weight * s, None)):
        if scale is None:
            most = rows.abs().amax(1, keepdim=True)
            scale = torch.where(most > 0, most / LARGEST[dtype], 1.0)
        values.append(rows / scale.double())
        results += [rounded(values[-1], dtype), scale.double()]
    product = (results[1] * results[2]) @ (results[3] * results[4]).T
    return [*results, product], values


def activations(seed, **options):
    """Inputs and the six results: copies, because an answer might write into them."""
    return copy.deepcopy(_activations(seed, **options))


@cache  # every wrong answer meets the same inputs
def _activations(
    seed, tokens, channels, outputs, dtype, alpha, dead=False, static=False, faint=False
):
    """Two loud channels, drawn again until no code is a matter of rounding. faint: a channel, a
    token and a row of the weight are nearly 0.
    """
    for draw in itertools.count():
        g = torch.Generator().manual_seed(1000 * seed + draw)
        loudness = torch.ones(channels)
        loudness[1], loudness[channels // 2] = 30.0, 8.0
        x = torch.randn(tokens, channels, generator=g) * loudness
        act_max = (torch.randn(16, channels, generator=g) * loudness).abs().amax(0)
        weight = torch.randn(outputs, channels, generator=g)
        weight = weight * torch.linspace(0.2, 3.0, outputs)[:, None]
        if dead:  # a channel without activations, one without weights, a token and a row of zeros
            act_max[0], x[:, 0], weight[:, 2], x[-1], weight[0] = 0.0, 0.0, 0.0, 0.0, 0.0
        if faint:
            act_max[0] *= 1e-14
            x[:, 0] *= 1e-14
            x[-1] *= 1e-13
            weight[0] *= 1e-13
        inputs = dict(x=x, weight=weight, act_max=act_max, alpha=alpha, dtype=dtype)
        if static:
            inputs["x_scale"] = torch.tensor([[0.9 / LARGEST[dtype]]])
        want, values = smoothed(**inputs)
        if all(is_clear(v, dtype) for v in values):
            return inputs, want


SMOOTH_CASES = {  # name: (options, why)
    "int8": (dict(dtype=torch.int8, alpha=0.5), "half of the trouble on each side"),
    "fp8": (dict(dtype=torch.float8_e4m3fn, alpha=0.5), "codes are float8, the largest 448"),
    "alpha_08": (dict(dtype=torch.int8, alpha=0.8), "most of the trouble goes to the weight"),
    "alpha_0": (dict(dtype=torch.int8, alpha=0.0), "every channel of the weight gets 1"),
    "one_token": (dict(dtype=torch.int8, alpha=0.5, tokens=1), "decoding"),
    "dead": (
        dict(dtype=torch.int8, alpha=0.5, dead=True),
        "channels and rows of zeros: no 0 / 0, and no s of 0",
    ),
    "faint": (
        dict(dtype=torch.int8, alpha=0.5, faint=True),
        "nearly 0 is not 0: the smallest s and scales have no lower bound",
    ),
    "static": (
        dict(dtype=torch.int8, alpha=0.5, static=True),
        "a given scale is too small for a large token, whose codes stop at 127",
    ),
    "static_fp8": (
        dict(dtype=torch.float8_e4m3fn, alpha=0.5, static=True),
        "the same at 448: E4M3 has no infinity, and what is beyond may become NaN",
    ),
}
SMOOTH_LABELS = (
    "s",
    "the codes of x",
    "the scale of x",
    "the codes of the weight",
    "the scale of the weight",
    "the product",
)


def assert_smoothed(got, want, dtype):
    assert isinstance(got, tuple) and len(got) == 6, (
        f"your result is {type(got).__name__}, expected a tuple of six"
    )
    for at, (label, mine, right) in enumerate(zip(SMOOTH_LABELS, got, want)):
        if at in (1, 3):
            is_tensor = isinstance(mine, torch.Tensor)
            kind = mine.dtype if is_tensor else type(mine).__name__
            assert kind == dtype, f"{label}: {kind}, expected {dtype}"
            assert_equal(mine.double(), right, label=label)
            continue
        size = float(right.abs().max()) if at == 5 else 0.0
        assert_equal(mine, right, rtol=1e-4, atol=1e-5 * size, dtype=torch.float32, label=label)


@check("19.2", {case: why for case, (_, why) in SMOOTH_CASES.items()}, seconds=10)
def test_smooth(impl, case, seed):
    options = dict(tokens=4, channels=12, outputs=5) | SMOOTH_CASES[case][0]
    inputs, want = activations(seed, **options)
    assert_smoothed(call(impl, inputs), want, options["dtype"])


@check("19.2", seconds=5)
def test_smooth_example(impl, seed):
    inputs = dict(
        x=torch.tensor([[127.0, 2.0]]),
        weight=torch.tensor([[1.0, 2.0]]),
        act_max=torch.tensor([127.0, 2.0]),
        alpha=0.5,
        dtype=torch.int8,
    )
    want = smoothed(**inputs)[0]
    assert abs(float(want[-1]) - 131.17) < 0.01
    assert_smoothed(call(impl, inputs), want, torch.int8)


@check("19.2", seconds=5)
def test_smooth_ties(impl, seed):
    """s and all scales are 1, and a half goes to the even code."""
    inputs = dict(
        x=torch.tensor([[127.0, 2.5, -3.5, 0.5]]),
        weight=torch.tensor([[127.0, 127, 127, 127], [2.5, -1.5, 0.5, 127]]),
        act_max=torch.full((4,), 127.0),
        alpha=0.5,
        dtype=torch.int8,
    )
    assert_smoothed(call(impl, inputs), smoothed(**inputs)[0], torch.int8)


@check("19.2", seconds=5)
def test_smooth_without_loops(impl, seed):
    common = dict(channels=8, dtype=torch.int8, alpha=0.5)
    few = activations(seed, tokens=2, outputs=3, **common)[0]
    many = activations(seed, tokens=6, outputs=9, **common)[0]
    assert_same_work("for more tokens and outputs", lambda: impl(**few), lambda: impl(**many))


# ---------------------------------------------------------------- 19.3 a larger token


def stale_pages(num_pages, page_size, num_heads, head_dim):
    """Pages of former owners: large scales in the even ones, NaN in the odd ones."""
    shape = (num_pages, page_size, num_heads, head_dim)
    k_scales = torch.full((num_pages, num_heads, head_dim), 50.0)
    k_scales[1::2] = float("nan")
    v_scales = torch.full((num_pages, page_size, num_heads), float("nan"))
    codes = torch.full(shape, 99, dtype=torch.int8)
    return Pages(codes.clone(), k_scales, codes.clone(), v_scales)


def written(tokens, page_size, slots):
    """What the pages hold after the tokens, in float64: {page: (codes and scales of its rows)}, and
    whether every code is clear. tokens: [(k, v)].
    """
    pages, clear = {}, True
    for (k, v), slot in zip(tokens, slots):
        page, row = divmod(slot, page_size)
        if row == 0:
            pages[page] = dict(k=[], scale=torch.zeros_like(k).double(), v=[], v_scale=[])
        own = pages[page]
        new = torch.maximum(own["scale"], k.double().abs() / 127)
        safe = torch.where(new > 0, new, 1.0)
        values = [codes * own["scale"] / safe for codes in own["k"]] + [k.double() / safe]
        v_scale = v.double().abs().amax(-1) / 127
        v_value = v.double() / torch.where(v_scale > 0, v_scale, 1.0)[:, None]
        clear &= all(is_clear(value, torch.int8) for value in [*values, v_value])
        own["k"], own["scale"] = [value.round() for value in values], new
        own["v"].append(v_value.round())
        own["v_scale"].append(v_scale)
    return pages, clear


@cache
def tokens_of(seed, slots, page_size, num_heads, head_dim, loudness, zeros=False, outlier=1.0):
    """Random (k, v) for the slots, token i as loud as loudness[i mod their number]; and
    `written`.
    """
    for draw in itertools.count():
        g = torch.Generator().manual_seed(1000 * seed + draw)
        tokens = []
        for i, _ in enumerate(slots):
            pair = torch.randn(2, num_heads, head_dim, generator=g) * loudness[i % len(loudness)]
            if zeros:
                pair[0, :, 0] = 0.0  # a channel of K
                pair[1, 0] = 0.0  # a head of V
            pair[0, :, -1] *= outlier
            tokens.append((pair[0], pair[1]))
        pages, is_clear_enough = written(tokens, page_size, slots)
        if is_clear_enough:
            return tokens, pages


PAGE_CASES = {  # name: (options, why)
    "one_token": (dict(slots=(8,), loudness=(1,)), "the first token of a page sets its scales"),
    "louder": (
        dict(slots=(8, 9, 10, 11), loudness=(1, 3, 9, 27)),
        "each token is larger, so the earlier codes are written again",
    ),
    "quieter": (
        dict(slots=(8, 9, 10), loudness=(27, 3, 1)),
        "the scale stays, and with it the codes that are there",
    ),
    "next_page": (
        dict(slots=(8, 9, 10, 11, 0, 1), loudness=(9, 1, 5, 2, 1, 3)),
        "a sequence goes on in another page, whose scales are its own",
    ),
    "taken_again": (
        dict(slots=(4, 5, 6, 4, 5), loudness=(40, 20, 30, 1, 2)),
        "a page that a sequence of large values has left: its scales are no longer true",
    ),
    "zeros": (
        dict(slots=(8, 9), loudness=(1, 2), zeros=True),
        "a channel and a head that are zero: scale 0, code 0, no NaN",
    ),
    "zeros_between": (
        dict(slots=(8, 9, 10), loudness=(3, 0, 2)),
        "a token of zeros after another one: K keeps its scale, V's is 0",
    ),
    "faint": (
        dict(slots=(8, 9, 10), loudness=(1e-12, 3e-12, 1e-12)),
        "nearly 0 is not 0: scales have no lower bound",
    ),
    "outlier": (
        dict(slots=(8, 9, 10), loudness=(1, 2, 1), outlier=200.0),
        "an outlier channel has its own scale, so the others keep their bits",
    ),
    "pages_of_one": (
        dict(slots=(3, 0, 2), loudness=(5, 1, 2), page_size=1),
        "every token is the first of its page",
    ),
    "one_head": (dict(slots=(8, 9), loudness=(1, 4), num_heads=1, head_dim=3), "of three values"),
}


@check("19.3", {case: why for case, (_, why) in PAGE_CASES.items()}, seconds=10)
def test_pages(impl, case, seed):
    options = dict(page_size=4, num_heads=2, head_dim=4) | PAGE_CASES[case][0]
    tokens, want = tokens_of(seed, **options)
    slots, page_size = options["slots"], options["page_size"]
    pages = stale_pages(4, page_size, options["num_heads"], options["head_dim"])
    for (k, v), slot in zip(tokens, slots):
        write_in_place(impl, pages, k, v, slot)
    assert_pages(pages, want, f"after slots {list(slots)}")


def write_in_place(impl, pages, k, v, slot):
    """Write a token; fail unless the tensors of the pages are what they were, and k and v too."""
    held, mine = copy.copy(pages), dict(k=k.clone(), v=v.clone())
    with NoCodeOfNaN():
        impl(pages, **mine, slot=slot)
    for name, given in (("k", k), ("v", v)):
        assert torch.equal(given, mine[name]), (
            f"your function changed its argument `{name}` in place; the caller still needs it"
        )
    for name, tensor in vars(held).items():
        assert getattr(pages, name) is tensor, (
            f"pages.{name} is another tensor now; write into the one that is there, because the "
            "cache belongs to all sequences"
        )


class NoCodeOfNaN(TorchDispatchMode):
    """Within it no NaN becomes an integer. What it becomes is another one on each processor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = args[1 if name == "copy_" else 0] if args else None
        if name in ("_to_copy", "copy_") and not out.is_floating_point():
            assert not given.is_floating_point() or not given.isnan().any(), (
                "a NaN becomes a code: it may be 0 on this processor and is another number on the "
                "next. Where does it come from?"
            )
        return out


def assert_pages(pages, want, when):
    """Codes and scales of the rows in use, and that other pages were left alone."""
    for page, own in want.items():
        rows = len(own["k"])
        for label, mine, right in (
            ("k_codes", pages.k_codes[page, :rows], torch.stack(own["k"])),
            ("v_codes", pages.v_codes[page, :rows], torch.stack(own["v"])),
        ):
            assert mine.dtype == torch.int8, f"{label} became {mine.dtype}"
            assert_equal(mine.double(), right, label=f"{label} of page {page} {when}")
        for label, mine, right in (
            ("k_scales", pages.k_scales[page], own["scale"]),
            ("v_scales", pages.v_scales[page, :rows], torch.stack(own["v_scale"])),
        ):
            name = f"{label} of page {page} {when}"
            assert_equal(mine, right, rtol=1e-5, dtype=torch.float32, label=name)
    fresh = stale_pages(*pages.k_codes.shape)
    for page in set(range(len(pages.k_codes))) - set(want):
        for label in ("k_codes", "k_scales", "v_codes", "v_scales"):
            mine, right = getattr(pages, label)[page], getattr(fresh, label)[page]
            same = torch.equal(mine.nan_to_num(7.0), right.nan_to_num(7.0))
            assert same, f"{label} of page {page} changed {when}; it belongs to another sequence"


@check("19.3", seconds=5)
def test_pages_example(impl, seed):
    pages = stale_pages(1, 2, 1, 2)
    zeros = torch.zeros(1, 2)
    impl(pages, torch.tensor([[12.7, 0.5]]), zeros, 0)
    want = torch.tensor([[0.1, 0.5 / 127]])
    assert_equal(pages.k_scales[0], want, rtol=1e-5, label="k_scales after row 0")
    impl(pages, torch.tensor([[25.4, 0.2]]), zeros, 1)
    want = torch.tensor([[0.2, 0.5 / 127]])
    assert_equal(pages.k_scales[0], want, rtol=1e-5, label="k_scales after row 1")
    codes = pages.k_codes[0, :, 0].tolist()
    assert_equal(codes[1], [127, 51], label="k_codes of row 1")
    assert codes[0] in ([64, 127], [63, 127]), (  # 63.5: float32 may round it either way
        f"k_codes of row 0 are {codes[0]}, expected [64, 127]: 127 · 0.1 / 0.2 = 63.5"
    )


@check("19.3", seconds=5)
def test_ties_go_to_the_even_code(impl, seed):
    """The scales of K are 1 and then 2, those of V 1."""
    pages = stale_pages(1, 4, 1, 3)
    tokens = [
        ([127.0, 127.0, 127.0], [127.0, 2.5, -3.5]),
        ([5.0, 2.5, -3.5], [0.5, -127.0, 4.5]),
        ([254.0, -5.0, 0.0], [-1.5, 5.5, 127.0]),
    ]
    for row, (k, v) in enumerate(tokens):
        impl(pages, torch.tensor([k]), torch.tensor([v]), row)
    k_codes = [[64, 127, 127], [2, 2, -4], [127, -5, 0]]
    v_codes = [[127, 2, -4], [0, -127, 4], [-2, 6, 127]]
    for label, want in (("k_codes", k_codes), ("v_codes", v_codes)):
        got = getattr(pages, label)[0, :3, 0].double()
        assert_equal(got, torch.tensor(want).double(), label=label)


@check("19.3", seconds=5)
def test_pages_without_loops(impl, seed):
    def write(page_size, num_heads, head_dim):
        pages = stale_pages(2, page_size, num_heads, head_dim)
        k = torch.ones(num_heads, head_dim)
        impl(pages, k, k, 0)
        for row in range(1, 3):
            impl(pages, k * (row + 1), k, row if page_size == 4 else row * (page_size // 4))

    assert_same_work(
        "for larger pages, more heads and more channels",
        lambda: write(4, 1, 2),
        lambda: write(16, 3, 8),
    )


# ---------------------------------------------------------------- 19.4 the hook


def four_bits(seed, lengths, block_size, heads=(2, 1), head_dim=8, gaps=False):
    """The arguments of int4_decode: blocks in random order, codes random, scales of unused slots
    NaN, a block that no sequence owns in the table after a sequence's blocks.
    """
    g = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    total = sum(counts) + 3
    order = torch.randperm(total, generator=g).tolist()
    unowned = order.pop()
    shape = (total, block_size, heads[1], head_dim // 2)
    caches = [torch.randint(0, 256, shape, generator=g, dtype=torch.uint8) for _ in range(2)]
    if gaps:  # rows of K and V are apart, V's further
        for at, extra in enumerate((2, 5)):
            wide = torch.full((total, block_size + 1, heads[1], head_dim // 2 + extra), 0xEE)
            wide = wide.to(torch.uint8)
            wide[:, :block_size, :, : head_dim // 2] = caches[at]
            caches[at] = wide[:, :block_size, :, : head_dim // 2]
    scales = [torch.full((heads[1], total, block_size, 2), float("nan")) for _ in range(2)]
    table = torch.full((len(lengths), max(counts) + 1), unowned, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for index in range(counts[b]):
            table[b, index] = block = order.pop()
            held = min(block_size, length - index * block_size)
            for scale in scales:
                pairs = torch.rand(heads[1], held, 2, generator=g)
                scale[:, block, :held, 0] = 0.05 + 0.3 * pairs[..., 0]
                scale[:, block, :held, 1] = 1.0 - 4.0 * pairs[..., 1]
    return dict(
        q=torch.randn(len(lengths), heads[0], head_dim, generator=g),
        k_cache=caches[0],
        v_cache=caches[1],
        k_scales=scales[0],
        v_scales=scales[1],
        block_table=table,
        context_lens=torch.tensor(lengths, dtype=torch.int32),
    )


def by_definition(q, k_cache, v_cache, k_scales, v_scales, block_table, context_lens):
    """Row by row in float64."""
    block_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    outs = []
    for b, length in enumerate(context_lens.tolist()):
        rows = []
        for stored, scales in ((k_cache, k_scales), (v_cache, v_scales)):
            held = []
            for key in range(length):
                block, row = int(block_table[b, key // block_size]), key % block_size
                halves = stored[block, row].int()
                codes = torch.stack([halves % 16, halves // 16], -1).flatten(1).double()
                scale, lowest = scales[:, block, row, :, None].double().unbind(1)
                held.append(codes * scale + lowest)
            rows.append(torch.stack(held) if held else q.new_zeros(0, k_cache.shape[2], 1).double())
        k, v = rows
        assert q.shape[1] == group * k_cache.shape[2]
        zero = torch.zeros_like(q[b]).double()
        outs.append(attention(q[b : b + 1].double(), k, v)[0] if length else zero)
    return torch.stack(outs)


LOAD_CASES = {  # name: (options, why)
    "one_key": (dict(lengths=[1], block_size=4), "the result is the row of V, whatever the score"),
    "pages_of_16": (dict(lengths=[20], block_size=16), "a tile of keys is a page"),
    "pages_of_5": (dict(lengths=[12], block_size=5), "a tile spans three pages"),
    "ragged": (dict(lengths=[7, 2], block_size=4), "unused slots of a page have scales of NaN"),
    "heads": (
        dict(lengths=[6], block_size=4, heads=(4, 2)),
        "offsets are bytes, so heads are D / 2 apart",
    ),
    "head_of_6": (
        dict(lengths=[9], block_size=4, head_dim=6),
        "a head is no power of two wide, so columns after it are masked",
    ),
    "empty": (dict(lengths=[0, 3], block_size=4), "a sequence without keys gives zeros"),
    "gaps": (
        dict(lengths=[9], block_size=4, heads=(2, 2), gaps=True),
        "rows are apart in memory: the offset counts bytes, not values",
    ),
}


@check("19.4", {case: why for case, (_, why) in LOAD_CASES.items()}, seconds=30)
def test_four_bits(impl, case, seed):
    inputs = four_bits(seed, **LOAD_CASES[case][0])
    want = by_definition(**inputs)
    compare(impl, inputs, want=want, atol=5e-5, rtol=1e-4, dtype=torch.float32)


@check("19.4", seconds=30)
def test_four_bits_example(impl, seed):
    inputs = four_bits(seed, [1], 1, heads=(1, 1), head_dim=2)
    block = int(inputs["block_table"][0, 0])
    inputs["v_cache"][block] = 0x4F
    inputs["v_scales"][:, block] = torch.tensor([0.5, -1.0])
    compare(impl, inputs, want=torch.tensor([[[6.5, 1.0]]]), atol=1e-5)


@check("19.4", seconds=30)
def test_nothing_is_unpacked_outside(impl, seed):
    """A dequantized copy of the cache would have as many values as the cache has."""
    inputs = four_bits(seed, [21], 4, heads=(1, 1), head_dim=16)
    values = 2 * inputs["k_cache"].numel()
    got = assert_largest_tensor(values, "unpack what a tile needs, in the hook", impl, **inputs)
    assert_equal(got, by_definition(**inputs), atol=5e-5, rtol=1e-4, dtype=torch.float32)


@triton.jit
def rows_kernel(ptr, scale_ptr, slot_ptr, out_ptr, rows, columns, LOAD: tl.constexpr):
    """What a hook gives for a tile of 16 rows and 16 columns, of which some are in use."""
    row, column = tl.arange(0, 16), tl.arange(0, 16)[None, :]
    slot = tl.load(slot_ptr + row, mask=row < rows, other=0).to(tl.int64)
    mask = (row < rows)[:, None] & (column < columns)
    offset = slot[:, None] * (columns // 2)
    tile = LOAD(ptr, offset, column, mask, scale_ptr, slot)
    tl.store(out_ptr + row[:, None] * 16 + column, tile + tl.zeros((16, 16), tl.float32))


@check("19.4", seconds=30)
def test_what_the_mask_leaves_out_is_0(impl, seed):
    hook = impl.__globals__.get("load_int4")
    if hook is None:  # an answer with a kernel of its own: what it stores is all that counts
        return
    inputs = four_bits(seed, [3], 4, heads=(1, 1), head_dim=6)
    first = int(inputs["block_table"][0, 0]) * 4
    slots, out = torch.arange(first, first + 3), torch.full((16, 16), 7.0)
    scales = inputs["k_scales"].nan_to_num(1.0)
    rows_kernel[(1,)](inputs["k_cache"], scales, slots, out, 3, 6, LOAD=hook)
    stored = inputs["k_cache"].flatten(0, 1)[slots, 0].int()
    codes = torch.stack([stored % 16, stored // 16], -1).flatten(1)
    scale, lowest = scales[0].flatten(0, 1)[slots].unsqueeze(1).unbind(-1)
    want = torch.zeros(16, 16)
    want[:3, :6] = codes * scale + lowest
    assert_equal(note(out), want, atol=1e-5, label="the tile, 3 rows and 6 columns of it in use")


test_the_kernel_does_it = kernel_does_it("19.4", lambda seed: four_bits(seed, [7, 2], 4))
