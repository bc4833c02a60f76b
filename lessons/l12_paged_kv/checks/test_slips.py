"""Proves the paged kernel of latents and the work list; that wrong walks through a table are
rejected; and what the wrappers refuse.
"""

import random
from functools import partial

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l12_paged_kv.kernels import latents, stand_ins
from lessons.l12_paged_kv.kernels.hooks import contiguous_row
from lessons.l12_paged_kv.kernels.latents import paged_mla_decode, paged_mla_kernel
from lessons.l12_paged_kv.kernels.stand_ins import read_blocks, work_list
from lessons.l12_paged_kv.lab.testing import DEVICE, NO_BLOCK, decoded, paged
from lessons.l12_paged_kv.naive import gathered, gathered_attention
from lessons.l12_paged_kv.optimized import paged_decode, paged_prefill
from lessons.toolbox.proof.numerics import NotEquivalent, prove
from lessons.toolbox.proof.refusals import KINDS, assert_refused

# ---------------------------------------------------------------- latents


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
@pytest.mark.parametrize("options", [dict(num_splits=1), dict(num_splits=3), dict(split_size=10)])
@pytest.mark.sample(4)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 6])
def test_the_work_list_reads_what_gathering_reads(window, dtype, seed, monkeypatch):
    """Blocks of all sequences together, a shared one twice, copied in pieces of any size."""
    monkeypatch.setattr(stand_ins, "PIECE", random.choice([1, 7, 4096]))
    inputs = [x.cpu() for x in paged([9, 30, 1], block_size=4, seed=seed).decode]
    inputs[:3] = [x.to(dtype) for x in inputs[:3]]
    q, k_cache, v_cache, table, _ = inputs
    table[0, :2] = table[1, :2]  # two sequences that share their first blocks
    chunks = [([7], length - 1) for length in (9, 30, 1)]
    work = work_list(chunks, 4, table.tolist())
    out = read_blocks(q, k_cache, v_cache, work, 16**-0.5, window)
    assert out.dtype == dtype
    truth = decoded(*(x.double() for x in inputs[:3]), *inputs[3:], window=window)
    allowed = max(1e-5, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(out.double(), truth, atol=allowed, rtol=allowed)


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
