"""Proves that attention through a block table equals attention in one piece, wherever pages lie."""

from functools import partial

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l09_flash_attention.tiles import Tiles
from lessons.l12_paged_kv import latents
from lessons.l12_paged_kv.hooks import contiguous_row
from lessons.l12_paged_kv.kernels import decode_kernel, prefill_kernel
from lessons.l12_paged_kv.lab.testing import DEVICE, NO_BLOCK, paged
from lessons.l12_paged_kv.latents import paged_mla_decode, paged_mla_kernel
from lessons.l12_paged_kv.naive import gathered, gathered_attention
from lessons.l12_paged_kv.optimized import paged_decode, paged_prefill
from lessons.l12_paged_kv.stand_ins import WorkList, read_blocks
from lessons.toolbox.proof.numerics import (
    ATTENTION_INPUTS,
    NotEquivalent,
    assert_same_bits,
    floor_for,
    prove,
    with_canaries,
)
from lessons.toolbox.proof.refusals import KINDS, assert_refused

# NumPy, the interpreter's engine, warns of what is meant: log2(0) of an empty split is −inf.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
]
SMALL = Tiles(16, 16)
BLOCK_SIZES = [1, 5, 16, 48, 256]


def decoded(q, k_cache, v_cache, block_table, context_lens, **options):
    """The definition of paged_decode: gather, then lesson 2's attention."""
    starts = torch.arange(len(q) + 1)
    return gathered_attention(q, k_cache, v_cache, block_table, starts, context_lens, **options)


# ---------------------------------------------------------------- the definition itself


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_gathering_gives_the_rows_in_order(block_size, seed):
    inputs = paged([1, 37], block_size=block_size, seed=seed)
    in_order = paged([1, 37], block_size=block_size, seed=seed, order="ascending")
    for b, length in enumerate([1, 37]):
        for cache, same in zip(inputs[1:3], in_order[1:3]):
            rows = gathered(cache, inputs.block_table[b], length)
            assert_same_bits(rows, gathered(same, in_order.block_table[b], length))
            assert rows.isfinite().all()
    first = in_order.block_table[1, 0]
    flat = in_order.k_cache[first:].flatten(0, 1)[:37]
    assert_same_bits(flat, gathered(in_order.k_cache, in_order.block_table[1], 37))


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_decode_kernel_for_any_block_size(block_size, seed, proof):
    """Lengths around a page; an empty sequence; splits whose ends are no page's."""
    around = {block_size - 1, block_size, block_size + 1}
    lengths = [n for n in around if n <= 50] + [0, 41]
    inputs = paged(lengths, block_size=block_size, heads=(3, 1, 16, 16), seed=seed).decode
    for options in (dict(num_splits=1), dict(num_splits=3), dict(split_size=20)):
        fast = partial(paged_decode, **options)
        proof.record(decode_kernel, prove(fast, decoded, inputs))


@pytest.mark.parametrize(
    "heads, dtype",
    [
        ((2, 2, 64, 64), torch.float32),
        ((6, 1, 24, 40), torch.float32),
        ((4, 2, 80, 80), torch.bfloat16),
        ((8, 1, 128, 64), torch.float16),
        ((2, 1, 192, 128), torch.bfloat16),
    ],
)
def test_decode_kernel_for_any_heads(heads, dtype, seed, proof):
    """K and V of different widths and strides; with and without a window."""
    inputs = paged([17, 50], block_size=16, heads=heads, dtype=dtype, seed=seed).decode
    for window in (None, 20):
        fast, plain = partial(paged_decode, window=window), partial(decoded, window=window)
        proof.record(decode_kernel, prove(fast, plain, inputs))


@pytest.mark.parametrize("kind", ATTENTION_INPUTS)
def test_hard_inputs(kind, seed, proof):
    floor = floor_for(torch.float32, kind)
    inputs = paged([2, 40], block_size=7, kind=kind, seed=seed).decode
    fast = partial(paged_decode, num_splits=3)
    proof.record(decode_kernel, prove(fast, decoded, inputs, floor=floor))
    inputs = paged([40, 30], [40, 9], block_size=7, kind=kind, seed=seed)
    if kind != "one_row":
        fast = partial(paged_prefill, tiles=SMALL)
        proof.record(prefill_kernel, prove(fast, gathered_attention, inputs, floor=floor))


@pytest.mark.parametrize("window", [1, 5, 16, 33, 100])
@pytest.mark.parametrize("options", [dict(num_splits=2), dict(split_size=3)])
def test_a_window_hides_whole_splits(window, options, seed, proof):
    """A split may hold nothing but keys that the window hides; it weighs nothing."""
    inputs = paged([3, 50], block_size=4, seed=seed).decode
    fast = partial(paged_decode, window=window, **options)
    proof.record(decode_kernel, prove(fast, partial(decoded, window=window), inputs))


# ---------------------------------------------------------------- prompts and chunks


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prefill_kernel_for_any_block_size(block_size, seed, proof):
    """A fresh prompt, a chunk behind a context, a single token and a sequence that runs nothing."""
    lengths, new = [block_size + 1, 50, 33, 20], [block_size + 1, 17, 1, 0]
    lengths, new = [min(n, 60) for n in lengths], [min(n, 60) for n in new]
    inputs = paged(lengths, new, block_size=block_size, seed=seed)
    fast = partial(paged_prefill, tiles=SMALL)
    proof.record(prefill_kernel, prove(fast, gathered_attention, inputs))


@pytest.mark.parametrize(
    "heads, dtype",
    [
        ((2, 2, 64, 64), torch.float32),
        ((6, 1, 24, 40), torch.float32),
        ((4, 2, 80, 80), torch.bfloat16),
        ((2, 1, 192, 128), torch.bfloat16),
    ],
)
def test_prefill_kernel_for_any_heads(heads, dtype, seed, proof):
    inputs = paged([17, 50], [17, 9], block_size=16, heads=heads, dtype=dtype, seed=seed)
    for window in (None, 12):
        fast = partial(paged_prefill, tiles=SMALL, window=window)
        plain = partial(gathered_attention, window=window)
        proof.record(prefill_kernel, prove(fast, plain, inputs))


@pytest.mark.parametrize("tiles", [Tiles(16, 16), Tiles(32, 16), Tiles(16, 64)])
def test_tiles_change_nothing(tiles, seed, proof):
    inputs = paged([40, 70], [40, 33], block_size=10, seed=seed)
    fast = partial(paged_prefill, tiles=tiles, max_seqlen_q=40)
    proof.record(prefill_kernel, prove(fast, gathered_attention, inputs))


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("block_size", [3, 16])
def test_where_pages_lie_changes_no_bit(block_size, seed):
    """Ascending pages, pages in random order, and one page as long as a sequence."""
    lengths, new = [33, 47], [20, 47]
    shuffled, ascending = (
        paged(lengths, new, block_size=block_size, seed=seed, order=order)
        for order in ("random", "ascending")
    )
    caches = []
    for cache in ascending[1:3]:
        rows = [gathered(cache, ascending.block_table[b], n) for b, n in enumerate(lengths)]
        caches.append(
            torch.stack([torch.cat([x, x[:1].expand(47 - len(x), -1, -1)]) for x in rows])
        )
    table = ascending.block_table
    starts, lens = ascending.cu_seqlens_q, ascending.context_lens
    prefill = partial(paged_prefill, tiles=SMALL)
    whole = prefill(shuffled.q, *caches, table, starts, lens, row_of=contiguous_row)
    for inputs in (shuffled, ascending):
        assert_same_bits(prefill(*inputs), whole)
    steps = [x._replace(q=x.q[-2:]) for x in (shuffled, ascending)]
    decode = partial(paged_decode, num_splits=2)
    whole = decode(steps[0].q, *caches, table, lens, row_of=contiguous_row)
    for inputs in steps:
        assert_same_bits(decode(*inputs.decode), whole)


def test_a_fixed_split_size_makes_bits_independent_of_the_batch(seed):
    inputs = paged([50, 3, 64], block_size=8, seed=seed).decode
    together = paged_decode(*inputs, split_size=16)
    q, k_cache, v_cache, table, lens = inputs
    alone = paged_decode(q[:1], k_cache, v_cache, table[:1], lens[:1], split_size=16)
    assert_same_bits(together[:1], alone)


def test_nothing_is_written_beside_the_results(seed, monkeypatch):
    checks = []

    def guarded(*shape, dtype, device):
        tensor, check = with_canaries(shape, dtype, device, guard=4096)
        checks.append(check)
        return tensor

    step = paged([20, 33], block_size=5, heads=(6, 2, 20, 12), seed=seed).decode
    chunk = paged([20, 33], [20, 5], block_size=5, heads=(6, 2, 20, 12), seed=seed)
    monkeypatch.setattr(torch, "empty", guarded)
    results = [paged_decode(*step, num_splits=n) for n in (1, 3)]
    results.append(paged_prefill(*chunk, tiles=SMALL, max_seqlen_q=20))
    monkeypatch.undo()
    assert len(checks) == 2 + 4 + 1 and all(x.isfinite().all() for x in results)
    for check in checks:
        check()


def test_probes_with_known_answers(seed):
    inputs = paged([7, 33], [7, 4], block_size=4, seed=seed)
    q, k_cache, v_cache, table, starts, lens = inputs
    prefill = partial(paged_prefill, tiles=SMALL)
    ones = prefill(q, k_cache, torch.ones_like(v_cache), table, starts, lens)
    torch.testing.assert_close(ones, torch.ones_like(ones), atol=1e-6, rtol=0)
    v_cache[table[0, 1], 0] = float("nan")  # the key at position 4
    out = prefill(q, k_cache, v_cache, table, starts, lens)
    # Of the queries before it too, because they share its tile, and 0 · NaN is NaN.
    assert out[4:7].isnan().any() and out[7:].isfinite().all()


# ---------------------------------------------------------------- latents


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
@pytest.mark.parametrize("options", [dict(num_splits=1), dict(num_splits=3), dict(split_size=10)])
def test_paged_mla_kernel(block_size, options, seed, proof):
    inputs = paged([0, 16, 50], block_size=block_size, heads=(5, 1, 48, 1), seed=seed).decode
    q, rows, _, table, lens = inputs

    def plain(q, rows, table, lens):
        cache = rows[:, :, None]
        return decoded(q, cache, cache[..., :32], table, lens, softmax_scale=0.2)

    fast = partial(
        paged_mla_decode,
        softmax_scale=0.2,
        kv_lora_rank=32,
        tiles=latents.Tiles(16, 16, 4, 1),
        **options,
    )
    proof.record(paged_mla_kernel, prove(fast, plain, (q, rows[:, :, 0], table, lens)))


# ---------------------------------------------------------------- the PyTorch that stands in


@pytest.mark.parametrize("window", [None, 6])
def test_the_work_list_reads_what_gathering_reads(window, seed):
    """Blocks of all sequences together, a shared one twice."""
    inputs = [x.cpu() for x in paged([9, 30, 1], block_size=4, seed=seed).decode]
    q, k_cache, v_cache, table, lens = inputs
    table[0, :2] = table[1, :2]  # two sequences that share their first blocks
    pairs = [(b, i) for b, n in enumerate([9, 30, 1]) for i in range(-(-n // 4))]
    last = [max(w for w, (b, _) in enumerate(pairs) if b == reader) for reader in range(3)]
    work = WorkList(
        block=torch.tensor([int(table[b, i]) for b, i in pairs]),
        reader=torch.tensor([b for b, _ in pairs]),
        first=torch.tensor([4 * i for _, i in pairs]),
        rows=torch.arange(3),
        length=lens.long(),
        last=torch.tensor(last),
    )
    out = read_blocks(q, k_cache, v_cache, work, 16**-0.5, window)
    torch.testing.assert_close(out, decoded(*inputs, window=window), atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- wrong versions


def slipped(q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, slip, window=None):
    """gathered_attention with a slip."""
    outs, starts, size = [], cu_seqlens_q.tolist(), k_cache.shape[1]
    for b, length in enumerate(context_lens.tolist()):
        new, row = q[starts[b] : starts[b + 1]], block_table[b]
        if slip == "the neighbour's table":
            theirs = block_table[b - 1]
            row = torch.where(theirs < NO_BLOCK, theirs, row)
        if slip == "pages in the order of their numbers":
            row = row.sort().values
        if slip == "a sequence's number as its block":
            row = b + torch.arange(len(row), device=row.device)
        if slip == "the first page twice":
            row = torch.cat([row[:1], row[:-1]])
        k, v = (gathered(cache, row, length) for cache in (k_cache, v_cache))
        if slip == "rows backwards in a page":
            full = length // size * size
            v = torch.cat([v[:full].unflatten(0, (-1, size)).flip(1).flatten(0, 1), v[full:]])
        if slip == "the last page lost" and length > size:
            k, v = (x[: (length - 1) // size * size] for x in (k, v))
        if slip == "whole pages":
            k, v = (torch.cat([x, torch.zeros_like(x[: -length % size])]) for x in (k, v))
        causal = slip != "no mask"
        if slip == "top left":
            k, v = k[: len(new)], v[: len(new)]
        wide = None if window is None else window + (slip == "a window of one more")
        outs.append(attention(new, k.nan_to_num(), v.nan_to_num(), causal=causal, window=wide))
    return torch.cat(outs)


SLIPS = [
    "the neighbour's table",
    "pages in the order of their numbers",
    "a sequence's number as its block",
    "the first page twice",
    "rows backwards in a page",
    "the last page lost",
    "whole pages",
    "no mask",
    "top left",
    "a window of one more",
]


@pytest.mark.parametrize("slip", SLIPS)
def test_a_wrong_walk_is_rejected(slip, seed):
    window = 9 if "window" in slip else None
    inputs = paged([30, 45], [11, 20], block_size=4, seed=seed)
    plain = partial(gathered_attention, window=window)
    prove(partial(slipped, slip="none", window=window), plain, inputs)
    with pytest.raises(NotEquivalent):
        prove(partial(slipped, slip=slip, window=window), plain, inputs)


def test_a_kernel_that_ignores_the_table_is_rejected(seed):
    """The hook of lessons 3 to 11, over pages: it reads NaN, or others' keys."""
    inputs = paged([30, 45], block_size=4, seed=seed)
    wrong = partial(paged_decode, row_of=contiguous_row)
    with pytest.raises(NotEquivalent):
        prove(wrong, decoded, inputs.decode)


# ---------------------------------------------------------------- bad input


def arguments(**changes):
    integers = dict(dtype=torch.int32)
    return (
        dict(
            q=torch.zeros(2, 4, 8),
            k_cache=torch.zeros(9, 3, 2, 8),
            v_cache=torch.zeros(9, 3, 2, 8),
            block_table=torch.zeros(2, 4, **integers),
            context_lens=torch.ones(2, **integers),
        )
        | changes
    )


REFUSED = [
    (dict(num_splits=2, split_size=16), "num_splits, split_size: got 2 and 16; accepted: one of"),
    (dict(num_splits=0), "num_splits: got 0; accepted: None, or 1 to 65535"),
    (dict(split_size=0), "split_size: got 0; accepted: None, or 1 or more keys"),
    (dict(max_context_len=13), "max_context_len: got 13; accepted: None, or 0 to 12"),
    (dict(window=0), "window: got 0; accepted: None, or 1 or more"),
    (dict(q=torch.zeros(2, 3, 8)), "accepted: .* Hq a multiple of Hkv"),
    (dict(q=torch.zeros(1, 4, 8)), "q, context_lens: got 1 and 2; accepted: one query a sequence"),
    (
        dict(k_cache=torch.zeros(1, 257, 2, 8), v_cache=torch.zeros(1, 257, 2, 8)),
        "k_cache: got blocks of 257 tokens; accepted: 1 to 256",
    ),
]


@pytest.mark.parametrize("change, message", REFUSED)
def test_paged_decode_refuses(change, message):
    with pytest.raises(ValueError, match=message) as error:
        paged_decode(**arguments(**change))
    assert "\n" not in str(error.value)


OF_INTEGERS = ("dtype", "device")


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "block_table", "context_lens"])
def test_every_kind_of_wrong_tensor_is_refused(name):
    kinds = KINDS if name in ("q", "k_cache", "v_cache") else OF_INTEGERS
    # V may be of any width.
    kinds = [kind for kind in kinds if (name, kind) != ("v_cache", "shape")]
    assert_refused(paged_decode, arguments(), name, kinds)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    assert_refused(paged_prefill, arguments(cu_seqlens_q=starts), name, kinds)
    if name == "q":
        assert_refused(paged_prefill, arguments(cu_seqlens_q=starts), "cu_seqlens_q", KINDS[:3])


def test_no_sequence_is_no_work():
    nobody = torch.zeros(0, dtype=torch.int32)
    empty = arguments(
        q=torch.zeros(0, 4, 8),
        block_table=torch.zeros(0, 4, dtype=torch.int32),
        context_lens=nobody,
    )
    assert paged_decode(**empty).shape == (0, 4, 8)
    starts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    if DEVICE.type == "cpu":
        assert paged_prefill(**empty, cu_seqlens_q=starts).shape == (0, 4, 8)
