"""DeepSeek's latents in FP8: what a row holds, the kernels beside PyTorch, and wrong versions that
are found.
"""

import json
from functools import partial

import pytest
import torch

from lessons.l06_mla.optimized import Tiles
from lessons.l09_flash_attention.tiles import has_e4m3
from lessons.l10_flash_decoding.splits import work_items
from lessons.l12_paged_kv.lab.testing import DEVICE, paged
from lessons.l19_kv_quantization.kernels import launch
from lessons.l19_kv_quantization.kernels.latents import kernel, naive, optimized
from lessons.l19_kv_quantization.kernels.latents.kernel import coded_mla_kernel, write_rows_kernel
from lessons.l19_kv_quantization.kernels.latents.naive import LatentRows, dequantized_mla_decode
from lessons.l19_kv_quantization.kernels.latents.optimized import coded_mla_decode, write_rows
from lessons.l19_kv_quantization.lab import latent_rows
from lessons.l19_kv_quantization.lab.testing import skip_where
from lessons.l19_kv_quantization.optimized import writes_e4m3
from lessons.toolbox.proof.inputs import apart
from lessons.toolbox.proof.numerics import Errors, NotEquivalent, prove
from lessons.toolbox.proof.planted import with_bug

DEEPSEEK = LatentRows(512, 64, torch.bfloat16)
SCALE = 0.2


def coded(lengths, *, rank, rope, dtype, block_size, seed, heads=5, factors=(1.0,)):
    """(q, rows, table, lens) and their format, pages in random order. Each group of a latent is as
    large as `factors` say in turn. Rows that hold no token have NaN codes, scales and values. Every
    tensor has gaps of its own.
    """
    sizes = heads, 1, rank + rope, 1
    inputs = paged(lengths, block_size=block_size, heads=sizes, dtype=dtype, seed=seed).decode
    q, latents, _, table, lens = inputs
    format, latents = LatentRows(rank, rope, dtype), latents[:, :, 0]
    for g in range(format.groups):
        columns = slice(g * format.group, (g + 1) * format.group)
        latents[..., columns] *= factors[g % len(factors)]
        q[..., columns] /= factors[g % len(factors)]
    written = latents.isfinite().all(-1, keepdim=True)
    rows = format.quantize(torch.where(written, latents, 0.0))
    rows[~written[..., 0]] = 0xFF
    q, rows, table = apart(q, rows, table)  # rows by 16 bytes
    return (q, rows, table, lens), format


def fast(format, decode=coded_mla_decode, **options):
    tiles = Tiles(16, 16, 4, 1)
    return partial(decode, format=format, softmax_scale=SCALE, tiles=tiles, **options)


def slow(format):
    return partial(dequantized_mla_decode, format=format, softmax_scale=SCALE)


# ---------------------------------------------------------------- the rows


def test_a_row_is_that_of_vllm():
    """656 bytes of DeepSeek-V3: codes, scales, rotary values, made here by hand."""
    torch.manual_seed(0)
    x = torch.randn(3, 576).bfloat16()
    x[1, 130] = 900.0
    x[2, 256:384] = 0.0
    rows = DEEPSEEK.quantize(x)
    assert rows.shape == (3, 656) and rows.dtype == torch.uint8
    for row, latent in zip(rows, x.float()):
        for g in range(4):
            part = latent[128 * g : 128 * (g + 1)]
            scale = max(float(part.abs().max() / torch.tensor(448.0)), 2.0**-126)
            code = (part / torch.tensor(scale)).to(torch.float8_e4m3fn)
            assert row[512 + 4 * g : 516 + 4 * g].view(torch.float32) == scale
            assert torch.equal(row[128 * g : 128 * (g + 1)], code.view(torch.uint8))
        assert torch.equal(row[528:].view(torch.bfloat16).float(), latent[512:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank, rope", [(8, 4), (32, 16), (256, 32), (512, 64)])
def test_what_a_row_means(rank, rope, dtype, seed):
    """A code is off by at most a sixteenth of its number, or of what 448 stands for / 2^14."""
    torch.manual_seed(seed)
    format = LatentRows(rank, rope, dtype)
    x = (torch.randn(2, 3, rank + rope) * torch.logspace(-2, 2, 3)[:, None]).to(dtype)
    again = format.dequantize(format.quantize(x))
    assert again.dtype == dtype and format.row_bytes % 16 == 0
    assert torch.equal(again[..., rank:], x[..., rank:])
    groups = x[..., :rank].double().unflatten(-1, (format.groups, -1))
    off = (again[..., :rank].double().unflatten(-1, (format.groups, -1)) - groups).abs()
    largest = groups.abs().amax(-1, keepdim=True)
    assert (off <= groups.abs() / 16 * 1.1 + largest * 2.0**-17).all()


def test_a_fault_stays_in_its_group():
    """An outlier takes digits from its own group only, and a NaN shows."""
    x = torch.ones(1, 576, dtype=torch.bfloat16)
    x[0, ::2] = 0.3
    x[0, 130] = 3e5
    again = DEEPSEEK.dequantize(DEEPSEEK.quantize(x))
    rest = torch.cat([again[0, :128], again[0, 256:]])
    assert (rest - torch.cat([x[0, :128], x[0, 256:]])).abs().max() < 0.02
    assert (again[0, 131:256:2] - 1).abs().max() > 0.1
    x[0, 300] = torch.nan
    again = DEEPSEEK.dequantize(DEEPSEEK.quantize(x))[0].isnan()
    assert again[256:384].all() and again.sum() == 128


def test_the_record_of_errors():
    """Is what is counted today, and four scales beside exact rotary values are best."""
    record = json.loads(latent_rows.OUT.read_text(encoding="utf-8"))
    counted = latent_rows.errors()
    for kind, ways in record["errors"].items():
        assert counted[kind] == pytest.approx(ways, rel=0.02)
        others = (ways["fp8"], ways["rotary values rounded, too"])
        assert ways["16 bits"] < ways["fp8_ds_mla"] < min(others)
    for heads, ways in record["predicted"].items():
        assert ways["fp8_ds_mla"]["bytes"] * 1152 == ways["16 bits"]["bytes"] * 656, heads
    few = record["predicted"]["16"]
    assert few["fp8_ds_mla"]["predicted_s"] < 0.85 * few["16 bits"]["predicted_s"]


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
@pytest.mark.parametrize("rank, rope", [(32, 16), (256, 32)])
@pytest.mark.sample(4)
def test_decode_over_rows(rank, rope, block_size, dtype, seed, proof):
    """Groups whose sizes are 2^20 apart, as their products with q are not."""
    sizes = dict(rank=rank, rope=rope, dtype=dtype, block_size=block_size, seed=seed)
    inputs, format = coded([0, 16, 50], **sizes, factors=(2.0**-12, 2.0**8))
    for options in (dict(num_splits=1), dict(num_splits=3), dict(split_size=10)):
        proof.record(coded_mla_kernel, prove(fast(format, **options), slow(format), inputs))


@pytest.mark.sample(1)
def test_decode_over_rows_of_deepseek(seed, proof):
    """Four groups, 16 heads, and the tiles that are launched."""
    sizes = dict(rank=512, rope=64, dtype=torch.bfloat16, block_size=64, heads=16)
    inputs, format = coded([40], **sizes, seed=seed)
    decode = partial(coded_mla_decode, format=format, softmax_scale=SCALE, num_splits=1)
    proof.record(coded_mla_kernel, prove(decode, slow(format), inputs))


def test_decode_over_rows_by_a_list(seed, proof):
    sizes = dict(rank=32, rope=16, dtype=torch.float32, block_size=16)
    inputs, format = coded([3, 90, 0, 50], **sizes, seed=seed)

    def by_list(q, rows, table, lens):
        items = work_items(lens, 1, 6, 16)
        return fast(format, items=items)(q, rows, table, lens)

    proof.record(coded_mla_kernel, prove(by_list, slow(format), inputs))


@pytest.mark.parametrize("small", [0, 1])
def test_a_query_whose_neighbours_differ(small, seed, proof):
    """Every other channel is 2^-10 of its neighbour: one power of two serves both."""
    sizes = dict(rank=32, rope=16, dtype=torch.float16, block_size=16)
    inputs, format = coded([40], **sizes, seed=seed)
    inputs[0][..., small:32:2] *= 2.0**-10
    proof.record(coded_mla_kernel, prove(fast(format), slow(format), inputs))


@pytest.mark.parametrize("power", [-70, 24])
def test_latents_of_any_size(power, seed, proof):
    """Beyond what float16 holds, in which their codes are multiplied."""
    sizes = dict(rank=32, rope=16, dtype=torch.bfloat16, block_size=16)
    inputs, format = coded([40], **sizes, seed=seed, factors=(2.0**power,))
    proof.record(coded_mla_kernel, prove(fast(format), slow(format), inputs))


def test_decode_on_a_chip_without_e4m3(seed, monkeypatch):
    """Its codes come apart by shifts, as numbers of which 256 are one."""
    monkeypatch.setattr(launch, "has_e4m3", lambda device: False)
    inputs, format = coded([40], rank=32, rope=16, dtype=torch.float16, block_size=16, seed=seed)
    prove(fast(format), slow(format), inputs)


def test_a_scale_of_nan_is_seen(seed):
    """In the columns of its group, or in all where it is a key's; in its own sequence."""
    sizes = dict(rank=32, rope=16, dtype=torch.float32, block_size=4)
    (q, rows, table, lens), format = coded([9, 20], **sizes, seed=seed)
    format.parts(rows)[1][table[1, 2], 1] = torch.nan
    out = fast(format)(q, rows, table, lens)
    assert out[1].isnan().all() and out[0].isfinite().all()


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.sample(2)
def test_rows_are_written_as_pytorch_writes_them(dtype, seed, proof):
    """Bit for bit, with zeros, NaN and infinity; what no slot is for is not touched."""
    skip_where("fp8", writes_e4m3)
    torch.manual_seed(seed)
    format = LatentRows(256, 24, dtype)
    x = torch.randn(7, 280, device=DEVICE).to(dtype)
    x[1], x[2, 3], x[3, 200] = 0, torch.nan, torch.inf
    rows = torch.full((9, format.row_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    (x,) = apart(x)
    slots = torch.tensor([8, 0, 3, 5, -1, 1, 2], device=DEVICE)
    write_rows(format, x, rows, slots)
    want = torch.full_like(rows, 0xFF)
    keeps = slots >= 0
    want[slots[keeps]] = format.quantize(x)[keeps]
    nan = [each[..., :256].view(torch.float8_e4m3fn).float().isnan() for each in (rows, want)]
    assert torch.equal(*nan)
    for each, where in zip((rows, want), nan):
        each[..., :256][where] = 0x7F  # a NaN has two codes
    for got, wanted in zip(format.parts(rows), format.parts(want)):
        assert torch.equal(got.float().nan_to_num(9.0), wanted.float().nan_to_num(9.0))
    proof.record(write_rows_kernel, Errors(*[0.0] * 8))


# ---------------------------------------------------------------- wrong versions

KERNEL_SLIPS = {
    "the scale of the next group": ("+ tl.arange(0, GROUPS)[:, None]\n    return", "+ (tl"
     ".arange(0, GROUPS)[:, None] + 1) % GROUPS\n    return"),
    "scores without a scale": ("(q_scale[:, :, None] * scales[:, None, :])", "q_scale[:, :, None]"),
    "weights without a scale": ("(scales * down)[:, None, :]", "down[:, None, :]"),
    "the rotary part twice": ("part += in_pe * scale", "part += 2 * in_pe * scale"),
    "the words of the next group": ("word = group * WORDS", "word = (group + 1) % GROUPS * WORDS"),
    "the rotary values of another": ("rope = group * PE + tl", "rope = 0 * group * PE + tl"),
    "a split's last tile, unmasked": ("tl.where(in_split[None, :], sum_of_groups(part), float("
     "\"-inf\"))", "sum_of_groups(part)"),
    "old sums are kept": ("acc[j] * alpha[:, :, None]", "acc[j]"),
    "old weights are kept": ("l_i * alpha + tl.sum", "l_i + tl.sum"),
    "weights count twice": ("* down[:, None, :], axis=2", ", axis=2"),
    "halves of a word change places": ("[None, None, :] * PARTS + j\n        out", "[None, None, :]"
     " * PARTS + 1 - j\n        out"),
    "one exponent for all heads": ("two_to(up)[:, :, None]", "two_to(up * 0)[:, :, None]"),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNEL_SLIPS)
@pytest.mark.sample(5)
def test_a_wrong_kernel_is_found(name, seed, tmp_path, monkeypatch):
    skip_where("fp8", has_e4m3)
    buggy = with_bug(kernel, tmp_path, *KERNEL_SLIPS[name])
    monkeypatch.setattr(optimized, "coded_mla_kernel", buggy.coded_mla_kernel)
    sizes = dict(rank=256, rope=32, dtype=torch.float32, block_size=16, seed=seed)
    inputs, format = coded([50, 37], **sizes, factors=(2.0**-3, 4.0))
    with pytest.raises((NotEquivalent, FloatingPointError)):
        prove(fast(format, num_splits=1), slow(format), inputs)


FORMAT_SLIPS = {
    "rotary values are rounded": ("rotary.copy_(k_pe)", "rotary.copy_(k_pe.float().to("
     "torch.float8_e4m3fn))"),
    "one scale for all groups": ("largest = groups.abs().amax(-1)", "largest = groups.abs().amax("
     "(-1, -2), keepdim=True)[..., 0].expand(*shape, self.groups)"),
    "scales of half": ("divided(largest, E4M3_MAX)", "divided(largest, 224.0)"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMAT_SLIPS)
def test_a_wrong_row_is_found(name, tmp_path, monkeypatch):
    """By its bytes, which are vLLM's."""
    buggy = with_bug(naive, tmp_path, *FORMAT_SLIPS[name])
    monkeypatch.setitem(globals(), "DEEPSEEK", buggy.LatentRows(512, 64, torch.bfloat16))
    with pytest.raises(AssertionError):
        test_a_row_is_that_of_vllm()


# ---------------------------------------------------------------- what is refused


def test_bad_rows_are_refused():
    (q, rows, table, lens), format = coded(
        [5], rank=32, rope=16, dtype=torch.float32, block_size=4, seed=0
    )
    good = dict(q=q, rows=rows, block_table=table, context_lens=lens, format=format)
    cases = [
        (dict(rows=rows.view(torch.int8)), "rows: got torch.int8"),
        (dict(rows=rows[..., :-16]), "rows: got torch.uint8"),
        (dict(rows=rows.repeat(1, 1, 2)[..., 8 : 8 + format.row_bytes]), "rows: got strides"),
        (dict(q=q.half()), "format: got 32"),
        (dict(format=LatentRows(32, 8, torch.float32)), "format: got 32"),
        (dict(num_splits=0), "num_splits: got 0"),
    ]
    for change, message in cases:
        call = partial(coded_mla_decode, **good | change, softmax_scale=SCALE)
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="kv_lora_rank: got 200; accepted: below 128"):
        LatentRows(200, 16, torch.float32)
