"""Proves products and attention of a fixed order equal to the naive ones, and that a row has the
same bits in any company: alone, in a batch, in a chunk of another length.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lessons.l03_kv_cache.batch import new_batch
from lessons.l12_paged_kv.lab.testing import paged
from lessons.l12_paged_kv.naive import gathered_attention
from lessons.l25_one_step_ahead.lab.specs import KERNELS
from lessons.l25_one_step_ahead.same_bits.attention import KEYS, one_walk, same_bits_kernels
from lessons.l25_one_step_ahead.same_bits.linear import (
    ROWS,
    InTiles,
    KernelLinear,
    linear,
    linear_kernel,
)
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.proof.numerics import NotEquivalent, draw, prove

DEVICE = default_device()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (R, I, K): one value, tails on every side, more than one tile on every side
SHAPES = [(1, 1, 1), (3, 70, 33), (65, 64, 32), (70, 130, 97)]
COMPANY = ((0, 1), (0, 2), (1, 2), (5, 9), (3, 20), (0, 40), (17, 40))  # rows of 40


# ---------------------------------------------------------------- products


def matrices(shape, seed, dtype):
    """x: [R, K] and a weight [I, K], whose rows have gaps of poison between them."""
    rows, columns, size = shape
    found = [
        draw("non_contiguous", one, dtype=dtype, seed=seed + n, device=DEVICE)
        for n, one in enumerate([(rows, size), (columns, size)])
    ]
    return [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in found]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_kernel(shape, dtype, seed, proof):
    proof.record(linear_kernel, prove(linear, F.linear, matrices(shape, seed, dtype)))


def test_a_product_that_forgets_its_last_columns_is_rejected(seed):
    x, weight = matrices((5, 40, 70), seed, torch.float32)
    with pytest.raises(NotEquivalent):
        prove(lambda x, w: linear(x[:, :64], w[:, :64]), F.linear, (x, weight))


@pytest.mark.parametrize("rows", (1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5))
@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize("kind", (InTiles, KernelLinear))
def test_a_layer_of_a_fixed_order_is_the_layer(kind, has_bias, rows, seed):
    torch.manual_seed(seed)
    layer = nn.Linear(24, 40, bias=has_bias, device=DEVICE)
    x = torch.randn(rows, 24, device=DEVICE)
    torch.testing.assert_close(kind(layer)(x), layer(x))


class MoreSplitsForFewRows(nn.Module):
    """Cuts the long dimension in two where few rows would leave cores idle, as libraries do."""

    def __init__(self, layer):
        super().__init__()
        self.weight = layer.weight

    def forward(self, x):
        if len(x) > 4:
            return x @ self.weight.T
        half = x.shape[1] // 2
        return x[:, :half] @ self.weight[:, :half].T + x[:, half:] @ self.weight[:, half:].T


def rows_that_differ(layer, x) -> list[tuple[int, int]]:
    """Of COMPANY, those in which a row of x: [40, K] has other bits than among all 40."""
    whole = layer(x)
    return [(a, b) for a, b in COMPANY if not torch.equal(layer(x[a:b]), whole[a:b])]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_has_the_same_bits_in_any_company(dtype, seed):
    torch.manual_seed(seed)
    for size in (384, 1000):
        layer = nn.Linear(size, 40, bias=False, device=DEVICE, dtype=dtype)
        x = torch.randn(40, size, device=DEVICE, dtype=dtype)
        assert rows_that_differ(InTiles(layer), x) == [], size
        found = rows_that_differ(MoreSplitsForFewRows(layer), x)
        assert found and all(b - a <= 4 for a, b in found), "a planted slip was not found"


def kernel_rows_that_differ(dtype: torch.dtype, seed: int) -> list[tuple[int, int]]:
    torch.manual_seed(seed)
    layer = nn.Linear(100, 40, bias=False, device=DEVICE, dtype=dtype)
    return rows_that_differ(KernelLinear(layer), torch.randn(40, 100, device=DEVICE, dtype=dtype))


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_the_kernel_has_the_same_bits_in_any_company(dtype, seed):
    """Compiled, because the interpreter multiplies a tile by NumPy, whose sums have another order
    for another row of it on some CPUs.
    """
    assert compiled(kernel_rows_that_differ, dtype, seed) == []


def compiled(function, *arguments):
    """What a function of this file returns where kernels are compiled."""
    if DEVICE.type == "cuda":
        return function(*arguments)
    return call(f"{__name__}:{function.__name__}", *arguments, chip=90)


def test_the_kernel_compiles():
    for report in check_all(KERNELS):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits, f"{report.name} on sm_{report.chip}: {report}"
        assert report.loads_128bit > 0 or report.census.get("LDGSTS"), report


# ---------------------------------------------------------------- attention


def by_table(attend, inputs, window=None):
    """An operation of AttentionOps over what `paged` made."""
    new = inputs.cu_seqlens_q.diff().tolist()
    held = [length - count for length, count in zip(inputs.context_lens.tolist(), new)]
    counts = [-(-length // inputs.k_cache.shape[1]) for length in inputs.context_lens.tolist()]
    tables = [row[:count].tolist() for row, count in zip(inputs.block_table, counts)]
    chunks = [([0] * count, before) for count, before in zip(new, held)]
    batch = new_batch(chunks, inputs.k_cache.shape[1], inputs.q.device, tables)
    return attend(*inputs[:3], batch, inputs.q.shape[-1] ** -0.5, window)


LENGTHS, NEW = [1, KEYS, 2 * KEYS + 3, 17, KEYS + 1, 40], [1, 1, 3, 17, 1, 9]


@pytest.mark.parametrize("window", (None, 1, 7, KEYS + 9))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_one_walk(dtype, window, seed):
    """Over pages of which all that no query sees is NaN."""
    inputs = paged(LENGTHS, NEW, block_size=8, dtype=dtype, seed=seed)

    def tiles(*tensors):
        return by_table(one_walk, inputs._replace(**dict(zip(inputs._fields, tensors))), window)

    def naive(*tensors):
        return gathered_attention(*tensors, window=window)

    prove(tiles, naive, inputs)


def parts_of(inputs, first: int, count: int):
    """Sequences first … of the same pool, the last `count` queries of each."""
    starts = inputs.cu_seqlens_q.tolist()
    last = first + 2
    rows = [
        inputs.q[max(a, b - count) : b] for a, b in zip(starts[first:last], starts[first + 1 :])
    ]
    new = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int32)
    return inputs._replace(
        q=torch.cat(rows),
        block_table=inputs.block_table[first:last],
        cu_seqlens_q=new.cumsum(0, dtype=torch.int32),
        context_lens=inputs.context_lens[first:last],
    )


def queries_that_differ(attend, inputs, window) -> list[tuple[int, int]]:
    """Parts (first sequence, queries of each) in which a query has other bits than in the whole
    step.
    """
    whole, starts = by_table(attend, inputs, window), inputs.cu_seqlens_q.tolist()
    found = []
    for first in range(len(starts) - 2):
        for count in (1, 5):
            ends = zip(starts[first : first + 2], starts[first + 1 :])
            want = torch.cat([whole[max(a, b - count) : b] for a, b in ends])
            got = by_table(attend, parts_of(inputs, first, count), window)
            if not torch.equal(got, want):
                found.append((first, count))
    return found


def of_a_step(attend, window: int | None, seed: int) -> list[tuple[int, int]]:
    return queries_that_differ(attend, paged(LENGTHS, NEW, block_size=8, seed=seed), window)


def of_the_kernel(window: int | None, seed: int) -> list[tuple[int, int]]:
    """By lesson 12's kernel."""
    return of_a_step(same_bits_kernels().decode, window, seed)


@pytest.mark.parametrize("window", (None, 7))
def test_a_query_has_the_same_bits_in_any_company(window, seed):
    assert of_a_step(one_walk, window, seed) == []


@pytest.mark.compiler
@pytest.mark.parametrize("window", (None, 7))
def test_a_query_of_the_kernel_has_the_same_bits_in_any_company(window, seed):
    assert compiled(of_the_kernel, window, seed) == []


def test_a_walk_from_the_end_is_found(seed):
    """Tiles that end at the newest key instead of beginning at the first one, and PyTorch's own
    attention for chunks: both add in an order that depends on the neighbours.
    """
    inputs = paged(LENGTHS, NEW, block_size=8, seed=seed)

    def all_at_once(q, k_cache, v_cache, batch, scale, window):
        longest = batch.max_context_len  # a neighbour's length decides the tiles
        size = max(1, longest // 3)
        outs = []
        for b, (a, end) in enumerate(zip(batch.cu_seqlens_q.tolist(), batch.cu_seqlens_q[1:])):
            length = int(batch.context_lens[b])
            blocks = batch.block_table[b, : -(-length // k_cache.shape[1])].long()
            k, v = (cache[blocks].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            outs.append(in_pieces(q[a:end], k, v, scale, size))
        return torch.cat(outs)

    assert queries_that_differ(all_at_once, inputs, None)


def in_pieces(q, k, v, scale, size):
    """Attention of the last tokens of a text, its sums in pieces of `size` keys. q: [Tq, Hq, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    p = scores.masked_fill(~hidden.tril(len(k) - len(q)), -torch.inf).softmax(-1)
    parts = zip(p.split(size, -1), v.split(size))
    return sum(torch.einsum("hqk,khd->qhd", p, v) for p, v in parts)
