"""Bugs planted in lesson 18's tensor_cores.cu: each is caught, by a Fault or by wrong numbers."""

import pytest
import torch

from lessons.l18_weight_quantization.kernels import cuda_tensor_cores as module
from lessons.l18_weight_quantization.kernels.fragments import to_fragments
from lessons.l18_weight_quantization.lab.testing import matrix, problem
from lessons.toolbox.gpu import nvrtc
from lessons.toolbox.proof.numerics import assert_same_bits, draw, prove
from tests.test_cuda_bugs import BEYOND, OR_BEYOND, RACE, WRONG, assert_caught, planted

pytestmark = pytest.mark.skipif(
    bool(nvrtc.why_not_here()), reason=f"NOT RUN: {nvrtc.why_not_here()}"
)
IN_A_BLOCK, IN_BLOCKS = module.Warps(2, 3), module.Warps(2, 1, 3)
BUGS = {
    "no barrier before x is read": ("        __syncthreads();  // x of these", "//", RACE),
    "copies not waited for": (
        'asm volatile("cp.async.wait_group 0;" ::: "memory");',
        "",
        "asynchronous copy",
    ),
    "a copy after the last stretch": (
        "if (first + pieces < num_stretches) start_copy",
        "start_copy",
        f"asynchronous copy|{OR_BEYOND}",
    ),
    "one buffer": (
        "start_copy(stretch + pieces, buffer ^ 1)",
        "start_copy(stretch + pieces, 0)",
        RACE,
    ),
    "sums handed over without a barrier": (
        "        __syncthreads();\n        if (split)",
        "        if (split)",
        RACE,
    ),
    "sums handed over while x is read": (
        "        __syncthreads();\n        for (int i = 0; i < TILES; i++) store_shared",
        "        for (int i = 0; i < TILES; i++) store_shared",
        RACE,
        3 * 256 - 64,
    ),
    "sums of the third warp lost": ("if (k < pieces) sums", "if (k < 2) sums", WRONG),
    "first sum counted twice": (
        "k ? sums[i][j] + found[k][j] : found[0][j]",
        "sums[i][j] + found[k][j]",
        WRONG,
    ),
    "sums of a neighbour's tile": ("(k * wn * TILES + i)", "((k * wn ^ 1) * TILES + i)", WRONG),
    "buffers of two splits overlap": (
        "(split * 2 * BUFFER + warp",
        "(split * BUFFER + warp",
        f"{RACE}|{OR_BEYOND}",
    ),
    "x of another split": (
        "from = warp * stride_x + piece",
        "from = warp * stride_x + first",
        f"{WRONG}|{OR_BEYOND}",
    ),
    "a row of x left out": ("row_from += wn * stride_x", "row_from += (wn + 1) * stride_x",
                            OR_BEYOND),
    "x after the last column": ("lane * CHUNK < size ? 16 : 0", "lane * CHUNK < size ? 16 : 16",
                                OR_BEYOND),
    "upper and lower outputs swapped": ("minus[i % 2])", "minus[(i + 1) % 2])", WRONG),
    "scales swapped": ("scale[j / 2]", "scale[1 - j / 2]", WRONG),
    "scale of the first unit": ("my_scales, u, 4)", "my_scales, 0, 4)", WRONG),
    "scale of the stretch before": (
        "scale_words = load_word(scales + group_of(stretch + pieces));",
        "scale_words = load_word(scales + group_of(stretch));",
        WRONG,
    ),
    "zero points of the first unit": ("my_zeros, u, 4)", "my_zeros, 0, 4)", WRONG),
    "sum of a group kept": ("part[i][j] = 0.0f;", "", WRONG),
    "shifted by 3": ("word >> 4 * i", "word >> 3 * i", WRONG),
    "exponent of 64": ("EXPONENT = 0x43004300u", "EXPONENT = 0x42804280u", WRONG),
    "second half of x": ("s / 2 * CHUNK", "0 * CHUNK", WRONG),
    "codes of the same stretch again": ("codes += pieces * (UNITS * LANES);", "", WRONG),
    "rows stored after the last": ("if (row < num_rows) out", "out", BEYOND),
    "outputs stored after the last": ("if (n >= num_outputs) break;", "", BEYOND),
    "tiles after the last": ("own = min(tile, num_tiles - 1)", "own = tile + 1", OR_BEYOND),
    "one output's bias for all": ("bias[n].wide()", "bias[0].wide()", WRONG),
}  # fmt: skip


UNORDERED = "race in global memory"
BUGS_OF_BLOCKS = {
    "a sum that is not waited for": ("return before == many - 1", "return true", UNORDERED),
    "the first that comes adds up": ("return before == many - 1", "return before == 0", UNORDERED),
    "nothing is released": ("atom.acq_rel.gpu", "atom.acquire.gpu", UNORDERED),
    "nothing is acquired": ("atom.acq_rel.gpu", "atom.release.gpu", UNORDERED),
    "only the block is told": ("atom.acq_rel.gpu", "atom.acq_rel.cta", UNORDERED),
    "counted before it is stored": (
        "        for (int i = 0; i < TILES; i++) store_sums",
        "        if (!is_last(arrived + tile, pieces, lane)) return;\n"
        "        for (int i = 0; i < TILES; i++) store_sums",
        f"{UNORDERED}|{WRONG}",
    ),
    "the count is left as it is": ("inc.u32 %0, [%1], %2", "add.u32 %0, [%1], 1", WRONG),
    "every lane counts": (
        "    if (lane == 0)\n        asm volatile(\"atom",
        '    asm volatile("atom',
        f"{UNORDERED}|{WRONG}",
    ),
    "one count for all tiles": (
        "is_last(arrived + tile",
        "is_last(arrived",
        f"{UNORDERED}|{WRONG}",
    ),
    "sums at the first piece's place": ("(piece * TILES + i)", "(0 * TILES + i)", UNORDERED),
    "sums at another tile's place": ("partials + (tile * pieces", "partials + (warp * pieces",
                                     f"{UNORDERED}|{WRONG}"),
    "one piece counted twice": (
        "(k * TILES + i) * SUMS",
        "((k ? 1 : 0) * TILES + i) * SUMS",
        WRONG,
    ),
    "the last piece left out": ("if (k < pieces) sums", "if (k < pieces - 1) sums", WRONG),
    "pieces added as they come": (
        "if (k < pieces) load(found[k], k, i);",
        "if (k < pieces) load(found[k], (k + blockIdx.x) % pieces, i);",
        WRONG,
    ),
    "tiles after the last count": ("    if (tile >= num_tiles) return;\n    if (gridDim",
                                   "    if (gridDim", f"{OR_BEYOND}|{UNORDERED}"),
}  # fmt: skip


def product(bug: tuple, tmp_path, monkeypatch, seed: int):
    """What a test needs of a problem with a bug planted: three tiles in two blocks, the last with
    one output; three stretches and a part of one in three pieces, unless the bug says how many
    columns; groups of 64 with zeros; a bias.
    """
    right, wrong, _, *columns = bug
    others = r"(?m)^W4A16\((?!w4a16_bf16_8_zeros).*$"
    planted(right, wrong, module, module.KERNELS, tmp_path, monkeypatch, others)
    weight = matrix("int4, zeros", 33, *(columns or [3 * 256 + 64]), seed).to("cpu")
    x, bias = (draw("normal", shape, dtype=torch.bfloat16, seed=seed + len(shape))
               for shape in ((3, weight.shape[1]), (33,)))  # fmt: skip
    return weight, x, bias


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.sample(4)
def test_a_bug_in_the_tensor_core_product_is_caught(bug, tmp_path, monkeypatch, seed):
    weight, x, bias = product(BUGS[bug], tmp_path, monkeypatch, seed)

    def multiply(x, weight, bias):
        return module.w4a16_tensor_cores(x, to_fragments(weight), bias, IN_A_BLOCK)

    fast, plain, tensors = problem(weight, multiply)
    assert_caught(BUGS[bug][2], lambda: prove(fast, plain, (x, tensors, bias)))


@pytest.mark.parametrize("bug", BUGS_OF_BLOCKS)
@pytest.mark.sample(4)
def test_a_bug_in_the_sum_of_blocks_is_caught(bug, tmp_path, monkeypatch, seed):
    """Two launches with one matrix, because the first leaves a count for the second; and the sums
    of three pieces that are large, its negative and small, which no other order adds alike.
    """
    weight, x, bias = product(BUGS_OF_BLOCKS[bug], tmp_path, monkeypatch, seed)
    for tensor in weight.tensors().values():  # the inputs of the first stretch once more
        a_stretch = tensor.shape[1] * 256 // weight.shape[1]
        tensor[:, a_stretch : 2 * a_stretch] = tensor[:, :a_stretch]
    fragments = to_fragments(weight)
    cancelling = torch.zeros_like(x)
    cancelling[:, [0, 256, 512]] = torch.tensor([2.0**20, -(2.0**20), 1.0], dtype=x.dtype)

    def multiply(x, _, bias):
        return module.w4a16_tensor_cores(x, fragments, bias, IN_BLOCKS)

    fast, plain, tensors = problem(weight, multiply)

    def check():
        for _ in range(2):
            prove(fast, plain, (x, tensors, bias))
        last = weight.dequantize()[:, 512].to(x.dtype)
        for _ in range(4):
            assert_same_bits(multiply(cancelling, None, None), last.expand(3, -1))

    assert_caught(BUGS_OF_BLOCKS[bug][2] + "|" + WRONG, check)


@pytest.mark.parametrize("bugs", [BUGS, BUGS_OF_BLOCKS], ids=["a block", "blocks"])
def test_without_a_bug_the_same_checks_pass(bugs, tmp_path, monkeypatch, seed):
    check = {
        id(BUGS): test_a_bug_in_the_tensor_core_product_is_caught,
        id(BUGS_OF_BLOCKS): test_a_bug_in_the_sum_of_blocks_is_caught,
    }[id(bugs)]
    monkeypatch.setitem(bugs, "none", ("long long", "long long", WRONG))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check("none", tmp_path, monkeypatch, seed)
