"""Bugs planted in lesson 18's tensor_cores.cu: each is caught, by a Fault or by wrong numbers."""

import pytest
import torch

from lessons.l18_weight_quantization.kernels import cuda_tensor_cores as module
from lessons.l18_weight_quantization.kernels.fragments import to_fragments
from lessons.l18_weight_quantization.lab.testing import matrix, problem
from lessons.toolbox.gpu import nvrtc
from lessons.toolbox.proof.numerics import draw, prove
from tests.test_cuda_bugs import BEYOND, OR_BEYOND, RACE, WRONG, assert_caught, planted

pytestmark = pytest.mark.skipif(
    bool(nvrtc.why_not_here()), reason=f"NOT RUN: {nvrtc.why_not_here()}"
)
BUGS = {
    "no barrier before x is read": ("        __syncthreads();  // x of these", "//", RACE),
    "copies not waited for": (
        'asm volatile("cp.async.wait_group 0;" ::: "memory");',
        "",
        "asynchronous copy",
    ),
    "a copy after the last stretch": (
        "if (stretch - split + wk < num_stretches) start_copy",
        "start_copy",
        f"asynchronous copy|{OR_BEYOND}",
    ),
    "one buffer": ("start_copy(stretch + wk, buffer ^ 1)", "start_copy(stretch + wk, 0)", RACE),
    "sums handed over without a barrier": (
        "        __syncthreads();\n        if (!split)",
        "        if (!split)",
        RACE,
    ),
    "sums of the other warps lost": ("others[other * wn + warp][i][lane]", "0.0f", WRONG),
    "sums of the third warp lost": ("other < wk - 1", "other < 1", WRONG),
    "sums of a neighbour's tile": (
        "others[other * wn + warp]",
        "others[other * wn + (warp ^ 1)]",
        WRONG,
    ),
    "buffers of two splits overlap": (
        "(split * 2 * BUFFER + warp",
        "(split * BUFFER + warp",
        f"{RACE}|{OR_BEYOND}",
    ),
    "x after the last column": ("lane * CHUNK < size ? 16 : 0", "lane * CHUNK < size ? 16 : 16",
                                OR_BEYOND),
    "upper and lower outputs swapped": ("minus[i % 2])", "minus[(i + 1) % 2])", WRONG),
    "scales swapped": ("scale[j / 2]", "scale[1 - j / 2]", WRONG),
    "scale of the first unit": ("my_scales, u, 4)", "my_scales, 0, 4)", WRONG),
    "scale of the stretch before": (
        "scale_words = load_of_groups(scales, stretch + wk);",
        "scale_words = load_of_groups(scales, stretch);",
        WRONG,
    ),
    "zero points of the first unit": ("my_zeros, u, 4)", "my_zeros, 0, 4)", WRONG),
    "sum of a group kept": ("part[i][j] = 0.0f;", "", WRONG),
    "shifted by 3": ("word >> 4 * i", "word >> 3 * i", WRONG),
    "exponent of 64": ("EXPONENT = 0x43004300u", "EXPONENT = 0x42804280u", WRONG),
    "second half of x": ("s / 2 * CHUNK", "0 * CHUNK", WRONG),
    "codes of the same stretch again": ("codes += wk * (UNITS * LANES);", "", WRONG),
    "rows stored after the last": ("if (row < num_rows && n", "if (n", BEYOND),
    "outputs stored after the last": ("&& n < num_outputs)", ")", BEYOND),
    "tiles after the last": ("own = min(tile, num_tiles - 1)", "own = tile + 1", OR_BEYOND),
    "one output's bias for all": ("bias[n].wide()", "bias[0].wide()", WRONG),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.sample(4)
def test_a_bug_in_the_tensor_core_product_is_caught(bug, tmp_path, monkeypatch, seed):
    """Three tiles in two blocks, the last with one output; three stretches and a part of one for
    three warps a tile; groups of 64 with zeros; a bias.
    """
    right, wrong, by = BUGS[bug]
    others = r"(?m)^W4A16\((?!w4a16_bf16_8_zeros).*$"
    planted(right, wrong, module, module.KERNELS, tmp_path, monkeypatch, others)
    weight = matrix("int4, zeros", 33, 3 * 256 + 64, seed).to("cpu")

    def multiply(x, weight, bias):
        return module.w4a16_tensor_cores(x, to_fragments(weight), bias, module.Warps(2, 3))

    fast, plain, tensors = problem(weight, multiply)
    x, bias = (draw("normal", shape, dtype=torch.bfloat16, seed=seed + len(shape))
               for shape in ((3, weight.shape[1]), (33,)))  # fmt: skip
    assert_caught(by, lambda: prove(fast, plain, (x, tensors, bias)))


def test_without_a_bug_the_same_check_passes(tmp_path, monkeypatch, seed):
    monkeypatch.setitem(BUGS, "none", ("long long", "long long", WRONG))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_bug_in_the_tensor_core_product_is_caught("none", tmp_path, monkeypatch, seed)
