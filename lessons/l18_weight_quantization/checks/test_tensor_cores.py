"""Proves kernels/tensor_cores.cu, on a CPU in the machine: the order of the codes, and the product.

tests/test_cuda_bugs_l18.py plants bugs in it.
"""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from lessons.l18_weight_quantization.kernels.cuda_tensor_cores import (
    MOST_WARPS,
    SOURCE,
    Warps,
    pieces_for,
    w4a16_tensor_cores,
    warps_for,
)
from lessons.l18_weight_quantization.kernels.fragments import to_fragments, to_grouped
from lessons.l18_weight_quantization.lab.tensor_cores import (
    COPY_RATE,
    RECORD,
    SHAPES,
    granted_s,
    least_bytes,
    loops,
)
from lessons.l18_weight_quantization.lab.testing import DEVICE, matrix, problem
from lessons.l18_weight_quantization.naive import round_to_nearest
from lessons.l18_weight_quantization.weights import GroupedInt, unpack
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.kernels.compile_check import check_cuda
from lessons.toolbox.proof.numerics import assert_same_bits, draw, prove
from lessons.toolbox.proof.refusals import assert_message

RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))
TYPES = [torch.bfloat16, torch.float16]


def of_grouped(x, weight: GroupedInt, bias=None, warps=None):
    return w4a16_tensor_cores(x, to_fragments(weight), bias, warps)


def weights(name: str, outputs: int, columns: int, seed: int) -> GroupedInt:
    """As lab/testing.py's `matrix`, with two more kinds of groups."""
    more = {"int4, groups of 256": (256, True), "int4, zeros, groups of 128": (128, False)}
    if name not in more:
        return matrix(name, outputs, columns, seed)
    numbers = draw("normal", (outputs, columns), seed=seed)
    return round_to_nearest(numbers, 4, *more[name]).to(DEVICE)


@pytest.mark.parametrize("outputs, columns", [(16, 256), (35, 320)])
def test_the_order_of_the_codes_is_a_plain_loop(outputs, columns, seed):
    """Word s of lane 4g + t: inputs 16t + 4s and so on of outputs g and g + 8, as the comment of
    tensor_cores.cu draws it; and the inverse.
    """
    weight = matrix("int4, zeros", outputs, columns, seed).to("cpu")
    found = to_fragments(weight)
    codes = unpack(weight.codes, 4, weight.group_size).flatten(1).tolist()
    bits = {(0, 0): 0, (8, 0): 4, (0, 2): 8, (8, 2): 12, (0, 1): 16, (8, 1): 20, (0, 3): 24}
    bits[8, 3] = 28
    for tile, unit, lane, s in torch.cartesian_prod(*map(torch.arange, found.codes.shape)).tolist():
        word = int(found.codes[tile, unit, lane, s]) & 0xFFFFFFFF
        for (lower, i), bit in bits.items():
            n, k = 16 * tile + lane // 4 + lower, 64 * unit + lane % 4 * 16 + 4 * s + i
            code = codes[n][k] if n < outputs and k < columns else 0
            assert word >> bit & 15 == code, (tile, unit, lane, s, bit)
    for n in range(outputs):
        at = n // 16, slice(None, columns // 64), n % 8, n % 16 // 8
        assert torch.equal(found.scales[at], weight.scales[n])
        assert torch.equal(found.zeros[at], weight.zeros[n])
    back = to_grouped(found)
    for name, tensor in weight.tensors().items():
        assert torch.equal(getattr(back, name), tensor), name


@pytest.mark.cuda_cpp
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "name, shape, warps",
    [
        ("int4, zeros", (1, 13, 192), None),  # rows shorter than a stretch
        ("int4, groups of 128", (16, 49, 640), Warps(3, 2)),  # three stretches for two warps
        ("int4, a scale a row", (9, 16, 320), None),
        ("int4, ordered", (3, 40, 256), Warps(2, 1)),
        ("int4, groups of 256", (8, 17, 1280), None),
        ("int4, groups of 128", (9, 33, 2048 + 128), Warps(2, 8)),  # eight warps share the inputs
        ("int4, zeros", (2, 16, 1088), Warps(1, 3)),
        ("int4, zeros, groups of 128", (3, 17, 640), None),  # as most checkpoints have them
        # pieces of several blocks: the last one shorter, and more blocks than stretches
        ("int4, groups of 128", (16, 49, 1920), Warps(3, 1, 3)),
        ("int4, zeros", (5, 33, 320), Warps(2, 1, 8)),
    ],
)
def test_product(name, shape, warps, dtype, seed):
    """Outputs and rows that fill no tile, each length of a group, with and without zeros."""
    rows, outputs, columns = shape
    weight = weights(name, outputs, columns, seed)
    x = draw("normal", (rows, columns), dtype=dtype, seed=seed + 1, device=DEVICE)
    bias = draw("normal", (outputs,), dtype=dtype, seed=seed + 2, device=DEVICE)
    fast, plain, tensors = problem(weight, partial(of_grouped, warps=warps))
    for given in (None, bias):
        prove(fast, plain, (x, tensors, given))


@pytest.mark.cuda_cpp
@pytest.mark.parametrize("dtype", TYPES)
def test_every_code_becomes_its_number_exactly(dtype, seed):
    """One column at a time is 1 and the others 0, with every code and every zero point."""
    codes = torch.randint(0, 256, (16, 32), dtype=torch.uint8)
    codes[:, :8] = torch.arange(128, dtype=torch.uint8).view(16, 8)
    zeros = torch.arange(16, dtype=torch.uint8)[:, None]
    weight = GroupedInt(codes, torch.ones(16, 1, dtype=torch.float16), zeros, 4, 64).to(DEVICE)
    one_hot = torch.eye(64, dtype=dtype, device=DEVICE)
    for without in (weight, replace(weight, zeros=None)):
        for first in range(0, 64, 16):
            found = of_grouped(one_hot[first : first + 16], without)
            assert torch.equal(found, without.dequantize().T[first : first + 16].to(dtype))


@pytest.mark.cuda_cpp
def test_rows_apart_and_rows_around_x(seed):
    """x is a slice of a larger tensor whose other numbers are NaN, and so is what a row of shared
    memory holds for rows that x does not have.
    """
    weight = matrix("int4, zeros", 20, 320, seed)
    wide = torch.full((6, 400), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wide[:3, 8:328] = draw("normal", (3, 320), dtype=torch.bfloat16, seed=seed, device=DEVICE)
    x = wide[:3, 8:328]
    assert_same_bits(of_grouped(x, weight), of_grouped(x.clone(), weight))
    assert torch.isfinite(of_grouped(x, weight)).all()


@pytest.mark.cuda_cpp
def test_bits_do_not_depend_on_the_other_rows(seed):
    """A row alone, among 5 and among 13: two kernels, pieces in one block and in several, the same
    sums in the same order.
    """
    weight = matrix("int4, groups of 128", 18, 768, seed)
    x = draw("normal", (13, 768), dtype=torch.bfloat16, seed=seed, device=DEVICE)
    alone = of_grouped(x[2:3], weight)
    for rows in (5, 13):
        chosen = warps_for(rows, 18, 768, 132)
        assert chosen.blocks == (3 if rows > 2 else 1)
        assert_same_bits(of_grouped(x[:rows], weight)[2:3], alone)


@pytest.mark.cuda_cpp
def test_the_last_block_leaves_the_counts_as_they_were(seed):
    """Launch after launch with the same matrix, whichever block comes last: the same bits, and a
    count of 0.
    """
    weight = to_fragments(matrix("int4, zeros", 40, 1344, seed))
    x = draw("normal", (9, 1344), dtype=torch.float16, seed=seed, device=DEVICE)
    expected = w4a16_tensor_cores(x, weight, None, Warps(1, 3))
    for warps in (Warps(2, 1, 3), Warps(3, 1, 3), Warps(2, 1, 3)):
        assert_same_bits(w4a16_tensor_cores(x, weight, None, warps), expected)
        assert not weight.arrived.any()


def test_the_warps_of_a_block():
    """Matrices of Llama-3-8B and Qwen3-32B on an H200's 132 SMs: the busiest has 1 to 25 tiles."""
    assert warps_for(1, 28672, 4096, 132) == (14, 2, 1)  # 128 blocks
    assert warps_for(1, 4096, 4096, 132) == (2, 8, 1)
    assert warps_for(1, 6144, 4096, 132) == (3, 8, 1)
    assert warps_for(1, 4096, 14336, 132) == (2, 8, 1)
    assert warps_for(16, 51200, 5120, 132) == (25, 1, 1)  # 128 blocks
    assert warps_for(1, 16, 256, 132) == (1, 1, 1)  # one stretch is not shared
    # With more rows than twice the tiles of an SM pieces go to blocks, and bits stay.
    assert warps_for(16, 28672, 4096, 132) == (14, 2, 1)
    assert warps_for(4, 4096, 4096, 132).blocks == 1
    assert warps_for(5, 4096, 4096, 132) == (16, 1, 8)
    assert warps_for(16, 5120, 8192, 132) == (20, 1, 8)  # 128 blocks, where 24 tiles gave 112
    assert warps_for(16, 16, 256, 132) == (1, 1, 1)
    for outputs in (1, 999, 128256):
        pieces = pieces_for(outputs, 4096, 132)[1]
        for rows in (1, 16):
            of_outputs, splits, blocks = warps_for(rows, outputs, 4096, 132)
            assert of_outputs * splits <= MOST_WARPS and splits * blocks == pieces


@pytest.mark.compiler
@pytest.mark.parametrize("chip", [80, 89, 90, 100])
def test_it_compiles(chip):
    """From an A100 on. Nothing is spilled but for a B200, codes come 16 bytes at once, no code
    is converted by a conversion instruction, and 28 warps fit on an SM.
    """
    (report,) = check_cuda(SOURCE.read_text(encoding="utf-8"), [chip], SOURCE.name)
    if (report.error or "").startswith("not run"):
        pytest.skip(report.error)
    # 16 rows: one to four registers too many for a B200, in each of four kernels
    assert report.spill_bytes <= (112 if chip == 100 else 0) and report.registers <= 72, report
    assert report.matrix_instruction == "HMMA" and report.shared_bytes < 48 * 1024, report
    kernels = 8
    assert report.loads_128bit >= kernels * 8, report  # of the first stretch, and of a next one
    # for a B200 the compiler divides to find out how often the loop that copies x goes round
    conversions = sum(n for name, n in report.census.items() if name.startswith("I2F"))
    assert conversions <= (2 * kernels if chip == 100 else 0), report


@pytest.mark.compiler
@pytest.mark.parametrize(
    "name, matrix",
    [
        ("Triton", "gate, up"),
        ("tensor cores", "gate, up"),
        ("tensor cores, zeros", "gate, up"),
        ("tensor cores", "o"),
    ],
)
@pytest.mark.sample(0)  # up to a minute each
def test_the_record_is_counted_again(name, matrix):
    """16 rows: time and instructions within 5 %, because another assembler moves them a little."""
    asked = {"name": name, "matrix": matrix, "rows": 16}
    kept = next(row for row in RECORDED["calls"] if asked.items() <= row.items())
    path = "lessons.l18_weight_quantization.lab.tensor_cores:predicted"
    found = call(path, *asked.values(), chip=90)
    for key in ("predicted_s", "ptx_a_weight"):
        assert found[key] == pytest.approx(kept[key], rel=0.05), key


def test_what_the_page_says_of_the_record():
    """Of the largest matrices about 80 % of the floor or more without zero points; of all more than
    two thirds of what a launch is granted, and less than half of the time of Triton's kernel where
    matrices are small; fewer than 3 machine instructions a weight up to 8 rows.
    """
    calls = {(c["name"], c["matrix"], c["rows"]): c for c in RECORDED["calls"]}
    for (name, shape, rows), found in calls.items():
        assert found["spill_bytes"] == 0
        if name == "tensor cores":
            assert found["floor_share"] > (0.81 if "gate" in shape else 0.33), (shape, rows)
            assert found["granted_share"] > 0.67, (shape, rows)
        if name == "Triton" and shape != "gate, up":
            assert calls["tensor cores", shape, rows]["predicted_s"] < 0.55 * found["predicted_s"]
    n, k = SHAPES["o"]
    least = least_bytes(1, n, k)
    assert round(least / COPY_RATE * 1e6, 1) == 2.0
    assert round((granted_s(1, n, k) - least / 4.8e12 / 0.92) * 1e6, 1) == 2.3
    n, k = SHAPES["down"]
    of_outputs, pieces = pieces_for(n, k, 132)
    blocks = -(-n // (16 * of_outputs))
    assert (blocks, round(blocks * 16 * k * 2 / 1e6), round(n * k / 2e6)) == (128, 59, 29)
    assert round(blocks * 16 * k * 2 / pieces / 1e6) == 7
    assert round(n * 16 * 4 * pieces / 1e6) == 2  # partial sums, written once and read once
    by_kernel = RECORDED["machine_instructions_a_weight"]
    assert all(many < 3 for name, many in by_kernel.items() if "_8" in name)
    assert max(by_kernel.values()) < 3.3


@pytest.mark.compiler
def test_the_loop_has_as_many_machine_instructions():
    if check_cuda(SOURCE.read_text(encoding="utf-8"), [90], SOURCE.name)[0].error:
        pytest.skip("NOT RUN: NVRTC is missing")
    for name, many in loops().items():
        assert many == pytest.approx(RECORDED["machine_instructions_a_weight"][name], rel=0.05)


REFUSED = [
    ("int8, zeros", 64, "weight: got GroupedInt of 8 bits; accepted: GroupedInt of 4 bits"),
    ("mxfp4", 64, "weight: got Mxfp4Weight; accepted: GroupedInt of 4 bits"),
    ("int4, groups of 32", 64, "weight: got 64 columns in groups of 32; accepted: multiples of 64"),
    ("int4, a scale a row", 96, "weight: got 96 columns in groups of 96; accepted: multiples"),
]


@pytest.mark.parametrize("name, columns, message", REFUSED)
def test_matrices_that_are_refused(name, columns, message):
    weight = matrix(name, 8, columns).to("cpu")
    assert_message(to_fragments, dict(weight=weight), message)


def test_arguments_that_are_refused():
    weight = matrix("int4, zeros", 8, 64).to("cpu")
    good = dict(x=torch.zeros(1, 64).half(), weight=to_fragments(weight))
    assert_message(to_fragments, dict(weight=replace(weight, scales=weight.scales.float())), "scal")
    for change, message in (
        (dict(x=torch.zeros(1, 64)), r"x: got torch.float32 \(1, 64\); accepted: up to 16 rows"),
        (
            dict(x=torch.zeros(17, 64).half()),
            r"x: got torch.float16 \(17, 64\); accepted: up to 16",
        ),
        (dict(x=torch.zeros(1, 65).half()), r"x: got torch.float16 \(1, 65\); accepted: up to 16"),
        (dict(bias=torch.zeros(7).half()), r"bias: got torch.float16 \(7,\); accepted: None, or"),
        (dict(weight=weight), "weight: got GroupedInt; accepted: Fragments"),
    ):
        assert_message(w4a16_tensor_cores, good | change, message)


def test_an_empty_batch_gives_an_empty_result():
    weight = to_fragments(matrix("int4, zeros", 8, 64).to("cpu"))
    assert w4a16_tensor_cores(torch.zeros(0, 64).half(), weight).shape == (0, 8)
