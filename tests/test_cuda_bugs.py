"""Bugs planted in the lessons' .cu files: the emulator names them, or the numbers come out wrong.

A bug is a replacement of text in the source. Beside it stands what has to catch it: words of the
emulator's message, or WRONG for the rules of `numerics.prove`.
"""

import re
from functools import partial

import pytest
import torch

from lessons.l08_online_softmax import cuda_softmax, naive
from lessons.l09_flash_attention import cuda_flash
from lessons.l09_flash_attention.naive import attention
from lessons.toolbox.cuda_cpu import compiling
from lessons.toolbox.cuda_cpu.emulator import CudaError
from lessons.toolbox.proof.numerics import NotEquivalent, draw, prove

pytestmark = pytest.mark.skipif(
    bool(compiling.why_not_here()), reason=f"NOT RUN: {compiling.why_not_here()}"
)
WRONG = "wrong numbers"


def planted(right: str, wrong: str, module, kernels: dict, folder, monkeypatch) -> None:
    """Launch the module's kernels from a copy of its .cu file with a bug in it."""
    source = module.SOURCE.read_text(encoding="utf-8")
    assert right in source, f"the source no longer holds {right!r}"
    copy = folder / module.SOURCE.name
    copy.write_text(source.replace(right, wrong, 1), encoding="utf-8")
    for kernel in kernels.values():
        monkeypatch.setattr(kernel, "file", copy)


def assert_caught(by: str, check) -> None:
    with pytest.raises(NotEquivalent if by == WRONG else CudaError) as error:
        check()
    assert by == WRONG or re.search(by, str(error.value)), error.value


# ---------------------------------------------------------------- lesson 8


def three_passes(scores):
    return naive.softmax_three_passes(scores), naive.log_sum_exp(scores)


SOFTMAX_BUGS = {
    "no barrier": ("    __syncthreads();\n", "", r":6\d: (data race|uninitialised)"),
    "a warp's barrier for the block's": (
        "__syncthreads()",
        "__syncwarp()",
        r":6\d: (data race|uninitialised)",
    ),
    "first distance 8": ("distance = 16", "distance = 8", WRONG),
    "last distance 2": ("distance > 0; distance /= 2", "distance > 1; distance /= 2", WRONG),
    "distance 32": ("distance = 16", "distance = 32", WRONG),
    "maximum starts at 0": ("Seen seen = {LOWEST, 0.0f}", "Seen seen = {0.0f, 0.0f}", WRONG),
    "sum not rescaled": ("        seen.l *= __expf(seen.m - m);\n", "", WRONG),
    "one side of a merge not rescaled": ("__fmul_rn(b.l, __expf(b.m - m))", "b.l", WRONG),
    "one column too many": ("i < num_packs", "i <= num_packs", f"{WRONG}|:80: out of bounds"),
    "last column left out": ("num_packs - 1 - threadIdx.x", "num_packs - 2 - threadIdx.x", WRONG),
    "store one further": ("(probs)[i] = pack", "(probs)[i + 1] = pack", r":95: (data race|out of)"),
    "row stride of a dense matrix": ("* stride_row", "* num_columns", WRONG),
    "one slot for all warps": ("of_warp[warp] = mine", "of_warp[0] = mine", r":63: data race"),
    "slot 0 never written": (
        "if (lane == 0) of",
        "if (lane == 0 && warp) of",
        ":65: uninitialised",
    ),
    "slots from 1": ("of_warp[warp] = mine", "of_warp[warp + 1] = mine", ":63: out of bounds"),
    "barrier for lane 0 alone": (
        "of_warp[warp] = mine;\n    __syncthreads();",
        "{ of_warp[warp] = mine; __syncthreads(); }",
        "(uninitialised|deadlock, lanes of the mask are missing: .*wait at __syncthreads .line 63)",
    ),
    "only lanes with a column shuffle": (
        "for (int distance = 16;",
        "if (mine.l > 0) for (int distance = 16;",
        "deadlock, lanes of the mask are missing",
    ),
    "only half of the lanes are named": ("ALL_LANES, mine.l", "0xffffu, mine.l", "wrong mask"),
    "every thread stores the sum": ("if (threadIdx.x == 0) lse", "lse", ":88: data race"),
    "16 bytes from anywhere": (
        "+= blockIdx.x * stride_row",
        "+= 1 + blockIdx.x * stride_row",
        ":80: ",
    ),
}


@pytest.mark.parametrize("bug", SOFTMAX_BUGS)
def test_a_bug_in_the_softmax_is_caught(bug, tmp_path, monkeypatch, seed):
    """Rows apart, scores far below 0; 16 bytes at once for some threads alone, 4 for all twice."""
    right, wrong, by = SOFTMAX_BUGS[bug]
    planted(right, wrong, cuda_softmax, cuda_softmax.SOFTMAX, tmp_path, monkeypatch)
    wide, odd = (draw("normal", (3, n), seed=seed) * 8 - 400 for n in (1404, 2500))

    def check():
        for scores in (wide[:, :1004], odd[:, :2051]):
            prove(cuda_softmax.softmax, three_passes, [scores], floor=2e-5)

    if by.startswith(f"{WRONG}|"):  # which of the two depends on what lies behind the row
        with pytest.raises((NotEquivalent, CudaError)):
            check()
    else:
        assert_caught(by, check)


# ---------------------------------------------------------------- lesson 9

FLASH_BUGS = {
    "no barrier before the tile": (
        "        __syncthreads();  // no warp reads",
        "//",
        r":3\d: data race",
    ),
    "no barrier behind the tile": (
        "        __syncthreads();  // the new tile",
        "//",
        r":\d\d: (data race|uninitialised)",
    ),
    "first distance 8": (
        "LANES / 2; distance > 0; distance /= 2) x +=",
        "LANES / 4; distance > 0; distance /= 2) x +=",
        WRONG,
    ),
    "maximum of half a warp": (
        "distance > 0; distance /= 2) x = f",
        "distance > 1; distance /= 2) x = f",
        WRONG,
    ),
    "the neighbour's weight": (
        "__shfl_sync(ALL_LANES, p, j)",
        "__shfl_sync(ALL_LANES, p, j ^ 1)",
        WRONG,
    ),
    "weights of the first lanes alone": (
        "for (int j = 0; j < BLOCK_N; j++) {",
        "for (int j = 0; j <= lane; j++) {",
        "divergent warp: .*in __shfl",
    ),
    "keys behind the last one count": ("key < num_keys &&", "", WRONG),
    "rows behind the last one are read": ("start + row < count ?", "true ?", ":37: out of bounds"),
    "rows behind the last one are stored": (
        "if (row >= num_queries) continue;",
        "",
        ":16: out of bounds",
    ),
    "warps without a query return": (
        "    for (long long start_n = 0;",
        "    if (start_m + my_row >= num_queries) return;\n    for (long long start_n = 0;",
        "divergent barrier: .*have returned",
    ),
    "causal one too few": ("key <= first", "key < first", WRONG),
    "maximum starts at 0": ("m_i[r] = minus_infinity();", "m_i[r] = 0.0f;", WRONG),
    "output not rescaled": ("acc[r][c] *= alpha", "acc[r][c] *= 1.0f", WRONG),
    "sum not rescaled": ("l_i[r] * alpha", "l_i[r]", WRONG),
    "scale forgotten": ("score * softmax_scale", "score", WRONG),
    "query's row stride of one head": ("num_queries, num_heads * D", "num_queries, D", WRONG),
    "value's row stride of all heads": (
        "load_rows<T, D, D>(v_tile, v + kv_head * D, start_n, BLOCK_N, num_keys, num_kv_heads * D)",
        "load_rows<T, D, D>(v_tile, v + kv_head * D, start_n, BLOCK_N, num_keys, num_heads * D)",
        ":37: out of bounds",
    ),
    "the other KV head": ("v + kv_head * D", "v", WRONG),
    "one value further": ("v_tile[j][lane", "v_tile[j + 1][lane", ":79: out of bounds"),
    "half of the queries loaded": (
        "start_m, BLOCK_M, num",
        "start_m, BLOCK_M / 2, num",
        ":68: uninit",
    ),
    "every lane stores the sum": ("if (lane == 0) lse", "lse", ":89: data race"),
    "two warps on one row": ("/ LANES * ROWS;", "/ LANES;", ":16: data race"),
}


@pytest.mark.parametrize("bug", FLASH_BUGS)
def test_a_bug_in_flash_attention_is_caught(bug, tmp_path, monkeypatch, seed):
    """21 queries of 4 heads on 45 keys of 2 heads: two tiles of each, and neither is full. The
    scores grow with the key and lie far below 0.
    """
    right, wrong, by = FLASH_BUGS[bug]
    planted(right, wrong, cuda_flash, cuda_flash.FLASH, tmp_path, monkeypatch)
    shapes = (21, 4, 64), (45, 2, 64), (45, 2, 64)
    q, k, v = (draw("normal", shape, seed=seed + i) for i, shape in enumerate(shapes))
    k = k.abs() * torch.linspace(-4, -1, 45)[:, None, None] - 18

    def check():
        for causal in (True, False):
            prove(
                partial(cuda_flash.flash_attention_cuda, causal=causal),
                partial(attention, causal=causal),
                [q.abs(), k, v],
                floor=2e-5,
            )

    assert_caught(by, check)


@pytest.mark.parametrize("module", [cuda_softmax, cuda_flash])
def test_without_a_bug_the_same_checks_pass(module, tmp_path, monkeypatch, seed):
    """Else a bug would be caught by a check that rejects everything."""
    tests, bugs = {
        cuda_softmax: (test_a_bug_in_the_softmax_is_caught, SOFTMAX_BUGS),
        cuda_flash: (test_a_bug_in_flash_attention_is_caught, FLASH_BUGS),
    }[module]
    monkeypatch.setitem(bugs, "none", ("long long", "long long", WRONG))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        tests("none", tmp_path, monkeypatch, seed)
