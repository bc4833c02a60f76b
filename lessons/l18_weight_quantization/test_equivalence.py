"""Proves the kernels: for every format the product equals the one with the numbers that the codes
mean, in float64.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lessons.l18_weight_quantization.kernels import unpack
from lessons.l18_weight_quantization.kernels.operands import operand_of
from lessons.l18_weight_quantization.kernels.products import (
    add_partials_kernel,
    quantized_matmul_kernel,
    scale_of,
)
from lessons.l18_weight_quantization.lab.testing import DEVICE, FORMATS, matrix, problem
from lessons.l18_weight_quantization.optimized import Tiles, matmul
from lessons.l18_weight_quantization.weights import E2M1_VALUES, NF4_VALUES
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.proof.numerics import (
    assert_same_bits,
    draw,
    floor_for,
    prove,
)
from lessons.toolbox.proof.traps import guarded_empty

SMALL = Tiles(16, 16, None, 4, 2)
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def proved(proof, weight, x, bias=None, floor=None, **options):
    """Hold `matmul` against float64, and record both kernels."""
    fast, plain, tensors = problem(weight, partial(matmul, **options))
    errors = prove(fast, plain, (x, tensors, bias), floor=floor)
    proof.record(quantized_matmul_kernel, errors)
    if options.get("num_splits", 1) > 1:
        proof.record(add_partials_kernel, errors)


# ---------------------------------------------------------------- every code of every format


@triton.jit
def numbers_kernel(words_ptr, table_ptr, out_ptr, PLACE: tl.constexpr, UNPACK: tl.constexpr):
    """What a hook makes of 256 words: out: [1, 512]."""
    words = tl.load(words_ptr + tl.arange(0, 256)[None, :])
    numbers = UNPACK(words, PLACE, out_ptr.dtype.element_ty, table_ptr)
    tl.store(out_ptr + tl.arange(0, 512)[None, :], numbers)


def of_bits(dtype: torch.dtype) -> list[float]:
    return torch.arange(256, dtype=torch.uint8).view(dtype).double().tolist()


MEANINGS = {
    unpack.int4: [code - 8.0 for code in range(16)],
    unpack.int8: [code - 128.0 for code in range(256)],
    unpack.e2m1: list(E2M1_VALUES),
    unpack.nf4: list(NF4_VALUES),
    unpack.e4m3: of_bits(torch.float8_e4m3fn),
    unpack.e5m2: of_bits(torch.float8_e5m2),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hook", MEANINGS, ids=lambda hook: hook.__name__)
def test_every_code_becomes_its_number_exactly(hook, dtype, seed):
    """Every byte at every place of a word, beside random neighbours. Codes of NaN and infinity are
    no numbers, and are left out.
    """
    meanings = MEANINGS[hook]
    bits = 4 if len(meanings) == 16 else 8
    words = torch.randint(0, 2**31, (256,), generator=torch.Generator().manual_seed(seed))
    table = torch.tensor(NF4_VALUES, dtype=dtype, device=DEVICE)
    for place in range(0, 16, bits):
        codes = torch.arange(256) % 2**bits
        word = words & ~(((2**bits - 1) << place) * 0x10001)
        # the lower half holds every code, the upper half them backwards
        word |= codes << place | codes.flip(0) << (place + 16)
        out = torch.empty(512, dtype=dtype, device=DEVICE)
        given = word.to(torch.uint32).to(DEVICE)
        numbers_kernel[(1,)](given, table, out, PLACE=place, UNPACK=hook)
        found = out.cpu().double().view(256, 2)
        want = torch.tensor(meanings, dtype=torch.float64)
        want = torch.stack([want[codes], want[codes.flip(0)]], dim=1)
        if hook is unpack.nf4:  # its values have more bits than the type
            want = want.to(dtype).double()
        real = want.isfinite()
        assert torch.equal(found[real], want[real]), (place, hook.__name__)


@triton.jit
def scales_kernel(stored_ptr, out_ptr):
    """What the kernel makes of 256 stored scales: out: [256] float32."""
    place = tl.arange(0, 256)
    tl.store(out_ptr + place, scale_of(tl.load(stored_ptr + place)))


def test_every_exponent_of_mxfp4_becomes_its_scale_exactly():
    """From 2^−127, which is subnormal, to 2^127; 255 is NaN."""
    stored = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(256, device=DEVICE)
    scales_kernel[(1,)](stored, out)
    want = torch.tensor([2.0 ** (e - 127) for e in range(255)] + [float("nan")])
    assert_same_bits(out.cpu()[:255], want[:255])
    assert out[255].isnan()


def test_every_e4m3_scale_of_nvfp4_becomes_its_number_exactly():
    """Subnormal ones, too, and negative ones, which no quantizer writes; NaN stays NaN."""
    stored = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(256, device=DEVICE)
    scales_kernel[(1,)](stored.view(torch.int8), out)
    want = stored.cpu().view(torch.float8_e4m3fn).float()
    assert torch.equal(out.cpu().isnan(), want.isnan()) and int(want.isnan().sum()) == 2
    assert_same_bits(out.cpu()[~want.isnan()], want[~want.isnan()])


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name, seed, proof, request):
    """An odd number of rows and of outputs; more than a step of columns, the last one short. Each
    format in one of the types in turn; in the long form in all.
    """
    columns = 192 if "128" not in name else 256
    turn = list(FORMATS).index(name) % len(TYPES)
    for dtype in TYPES if request.config.getoption("--all") else TYPES[turn : turn + 1]:
        weight = matrix(name, 37, columns, seed, scale_dtype=dtype)
        x = draw("normal", (3, columns), dtype=dtype, seed=seed + 1, device=DEVICE)
        proved(proof, weight, x)


@pytest.mark.parametrize(
    "name, num_splits", [("int4, zeros", 3), ("int4, zeros", 100), ("int8, a scale a row", 2)]
)
def test_splits_and_bias(name, num_splits, seed, proof):
    """Splits that do not divide the row, and more splits than there are steps."""
    weight = matrix(name, 21, 448, seed)
    x = draw("normal", (2, 448), dtype=torch.bfloat16, seed=seed + 1, device=DEVICE)
    bias = draw("normal", (21,), dtype=torch.bfloat16, seed=seed + 2, device=DEVICE)
    proved(proof, weight, x, bias, num_splits=num_splits)
    proved(proof, weight, x[:1], None, num_splits=num_splits)


@pytest.mark.parametrize("shape", [(1, 1, 64), (16, 16, 64), (17, 33, 96)])
@pytest.mark.parametrize("name", ["int4, a scale a row", "int8, zeros"])
def test_shapes_around_a_tile(name, shape, seed, proof):
    rows, outputs, columns = shape
    weight = matrix(name, outputs, columns, seed)
    x = draw("normal", (rows, columns), dtype=torch.float16, seed=seed + 1, device=DEVICE)
    proved(proof, weight, x, tiles=SMALL, num_splits=1)


@pytest.mark.parametrize("tiles", [SMALL, Tiles(32, 64, 32, 4, 2), Tiles(64, 16, 64, 4, 3)])
def test_tiles_change_nothing(tiles, seed, proof):
    weight = matrix("int4, zeros", 30, 128, seed)
    x = draw("normal", (34, 128), dtype=torch.bfloat16, seed=seed + 1, device=DEVICE)
    proved(proof, weight, x, tiles=tiles)


@pytest.mark.parametrize("kind", ["large", "all_negative", "tiny", "non_contiguous"])
def test_hard_inputs(kind, seed, proof):
    """All-negative rows, because a zero point that is off by one then adds up."""
    weight = matrix("int4, zeros", 19, 128, seed)
    x = draw(kind, (5, 128), seed=seed + 1, device=DEVICE)
    proved(proof, weight, x, floor=floor_for(torch.float32))


def test_scales_may_lie_by_columns(seed, proof):
    """Strides of scales and zeros are their own: the loads of neighbouring outputs are wide
    then.
    """
    weight = matrix("int4, zeros", 40, 256, seed)
    by_columns = {name: getattr(weight, name).T.contiguous().T for name in ("scales", "zeros")}
    x = draw("normal", (2, 256), dtype=torch.float16, seed=seed + 1, device=DEVICE)
    fast, plain, tensors = problem(weight, matmul)
    errors = prove(fast, plain, (x, tensors | by_columns, None))
    proof.record(quantized_matmul_kernel, errors)
    assert_same_bits(fast(x, tensors, None), fast(x, tensors | by_columns, None))


# ---------------------------------------------------------------- bits, and what lies beside


def test_the_same_call_gives_the_same_bits(seed):
    """Splits write partials of their own, and these are added in the order of their numbers."""
    weight = matrix("int4, groups of 128", 30, 512, seed)
    x = draw("normal", (4, 512), dtype=torch.bfloat16, seed=seed + 1, device=DEVICE)
    first = matmul(x, weight, num_splits=4)
    assert_same_bits(matmul(x, weight, num_splits=4), first)
    # A row's bits do not depend on the other rows, as long as tiles and splits are the same.
    assert_same_bits(matmul(x[:1], weight, num_splits=4), first[:1])


def test_whole_numbers_are_multiplied_without_an_error_of_their_own(seed):
    """With x of small whole numbers and scales that are powers of two every sum is exact, also in
    16 bits: what the naive version rounds, its dequantized weights, the kernel never forms.
    """
    weight = matrix("int8, zeros", 24, 128, seed)
    object.__setattr__(weight, "scales", torch.full_like(weight.scales, 2.0**-6))
    x = draw("normal", (4, 128), seed=seed, device=DEVICE).mul(3).round()
    truth = x @ weight.dequantize().T
    for dtype in TYPES:
        out = matmul(x.to(dtype), weight)
        assert torch.equal(out, truth.to(dtype)), dtype


def test_a_product_of_nvfp4_rounds_nothing_before_the_sum(seed):
    """A code times the scale of its block is exact in 16 bits. So with x of small whole numbers,
    and a scale of the matrix that is a power of two, every sum is exact.
    """
    weight = matrix("nvfp4", 24, 128, seed)
    weight = replace(weight, tensor_scale=torch.full_like(weight.tensor_scale, 2.0**-6))
    x = draw("normal", (4, 128), seed=seed, device=DEVICE).mul(3).round()
    truth = x.double() @ weight.dequantize().double().T
    for dtype in TYPES:
        assert torch.equal(matmul(x.to(dtype), weight), truth.to(dtype)), dtype


def test_nothing_is_written_beside_the_results(seed):
    weight = matrix("int4, groups of 32", 45, 256, seed)
    x = draw("normal", (19, 256), dtype=torch.float16, seed=seed, device=DEVICE)
    with guarded_empty() as checks:
        results = [matmul(x, weight, tiles=SMALL, num_splits=n) for n in (1, 2)]
    assert len(checks) == 3 and all(out.isfinite().all() for out in results)


def test_what_the_kernel_does_not_read_is_dequantized(seed):
    """Rows that are no whole words, blocks of NF4 that belong to two rows."""
    for name, columns in (("int8, a scale a row", 37), ("nf4", 96)):
        weight = matrix(name, 16, columns, seed)
        assert operand_of(weight) is None
        x = draw("normal", (3, columns), seed=seed, device=DEVICE)
        fast, plain, tensors = problem(weight, matmul)
        prove(fast, plain, (x, tensors, None))
