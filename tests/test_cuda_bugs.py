"""Bugs planted in the lessons' .cu files: a Fault names them, or the numbers come out wrong.

A bug is a replacement of text in the source. Beside it is what has to catch it: words of the
fault's sentence, or WRONG for the rules of `numerics.prove`.
"""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lessons.l08_online_softmax import cuda_softmax, naive
from lessons.l09_flash_attention.naive import attention
from lessons.l09_flash_attention.worklog import cuda_flash
from lessons.l12_paged_kv.kernels import cuda_paged
from lessons.l12_paged_kv.lab.testing import decoded, paged
from lessons.l18_weight_quantization.kernels import cuda_w4a16
from lessons.l18_weight_quantization.lab.testing import matrix, problem
from lessons.toolbox.gpu import nvrtc
from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.proof.numerics import NotEquivalent, draw, prove

pytestmark = pytest.mark.skipif(
    bool(nvrtc.why_not_here()), reason=f"NOT RUN: {nvrtc.why_not_here()}"
)
WRONG = "wrong numbers"
# Which of the two depends on what is beside the data.
BEYOND = r"bytes at \d+ of argument|bytes, \d+ before the first|shared memory at \d+"
OR_BEYOND = f"{WRONG}|{BEYOND}|in no buffer"
RACE = "race in shared memory"
TWO = "two threads store different values at one place"
LANES = "threads of the warp that must take part are elsewhere"
PARTS = "a barrier is for whole warps"
UNNAMED = "a thread takes part that the mask does not name"


def planted(
    right: str, wrong: str, module, kernels: dict, folder, monkeypatch, without: str = "(?!)"
) -> None:
    """Launch the module's kernels from a copy of its .cu file with a bug in it. without: lines that
    the copy lacks, because they take long to compile and do not run.
    """
    source = module.SOURCE.read_text(encoding="utf-8")
    assert right in source, f"the source no longer holds {right!r}"
    copy = folder / module.SOURCE.name
    copy.write_text(re.sub(without, "", source.replace(right, wrong, 1)), encoding="utf-8")
    for kernel in kernels.values():
        monkeypatch.setattr(kernel, "file", copy)


def assert_caught(by: str, check) -> None:
    """by: a pattern that the fault's sentence holds, or WRONG; "|" where either may come
    first.
    """
    with pytest.raises(NotEquivalent) as error:
        check()
    said = str(error.value) if isinstance(error.value, Fault) else WRONG
    assert re.search(by, said), error.value


# ---------------------------------------------------------------- lesson 8


def three_passes(scores):
    return naive.softmax_three_passes(scores), naive.log_sum_exp(scores)


SOFTMAX_BUGS = {
    "no barrier": ("    __syncthreads();\n", "", RACE),
    "a warp's barrier for the block's": (
        "__syncthreads()",
        "__syncwarp()",
        RACE,
    ),
    "first distance 8": ("distance = 16", "distance = 8", WRONG),
    "last distance 2": ("distance > 0; distance /= 2", "distance > 1; distance /= 2", WRONG),
    "distance 32": ("distance = 16", "distance = 32", WRONG),
    "maximum starts at 0": ("Seen seen = {LOWEST, 0.0f}", "Seen seen = {0.0f, 0.0f}", WRONG),
    "sum not rescaled": ("        seen.l *= __expf(seen.m - m);\n", "", WRONG),
    "one side of a merge not rescaled": ("__fmul_rn(b.l, __expf(b.m - m))", "b.l", WRONG),
    "one column too many": ("i < num_packs", "i <= num_packs", OR_BEYOND),
    "last column left out": ("num_packs - 1 - threadIdx.x", "num_packs - 2 - threadIdx.x", WRONG),
    "store one further": ("(probs)[i] = pack", "(probs)[i + 1] = pack", BEYOND),
    "row stride of a dense matrix": ("* stride_row", "* num_columns", WRONG),
    "one slot for all warps": ("of_warp[warp] = mine", "of_warp[0] = mine", TWO),
    "slot 0 never written": (
        "if (lane == 0) of",
        "if (lane == 0 && warp) of",
        WRONG,
    ),
    "slots from 1": ("of_warp[warp] = mine", "of_warp[warp + 1] = mine", BEYOND),
    "barrier for lane 0 alone": (
        "of_warp[warp] = mine;\n    __syncthreads();",
        "{ of_warp[warp] = mine; __syncthreads(); }",
        PARTS,
    ),
    "only lanes with a column shuffle": (
        "for (int distance = 16;",
        "if (mine.l > 0) for (int distance = 16;",
        LANES,
    ),
    "only half of the lanes are named": ("ALL_LANES, mine.l", "0xffffu, mine.l", UNNAMED),
    "16 bytes from anywhere": (
        "+= blockIdx.x * stride_row",
        "+= 1 + blockIdx.x * stride_row",
        "is not a multiple of 16",
    ),
}


@pytest.mark.parametrize("bug", SOFTMAX_BUGS)
@pytest.mark.sample(4)
def test_a_bug_in_the_softmax_is_caught(bug, tmp_path, monkeypatch, seed):
    """Rows apart, scores far below 0; 16 bytes at once for some threads alone, 4 for all twice."""
    right, wrong, by = SOFTMAX_BUGS[bug]
    planted(right, wrong, cuda_softmax, cuda_softmax.SOFTMAX, tmp_path, monkeypatch)
    wide, odd = (draw("normal", (3, n), seed=seed) * 8 - 400 for n in (1404, 2500))
    wide[:, 1004:] = odd[:, 2051:] = float("nan")  # what comes after a row is not to be read

    def check():
        for scores in (wide[:, :1004], odd[:, :2051]):
            prove(cuda_softmax.softmax, three_passes, [scores], floor=2e-5)

    assert_caught(by, check)


# ---------------------------------------------------------------- lesson 9

FLASH_BUGS = {
    "no barrier before the tile": (
        "        __syncthreads();  // no warp reads",
        "//",
        RACE,
    ),
    "no barrier after the tile": (
        "        __syncthreads();  // the new tile",
        "//",
        RACE,
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
        LANES,
    ),
    "keys after the last one count": ("key < num_keys &&", "", WRONG),
    "rows after the last one are read": ("start + row < count ?", "true ?", BEYOND),
    "rows after the last one are stored": (
        "if (row >= num_queries) continue;",
        "",
        BEYOND,
    ),
    "warps without a query return": (
        "    for (long long start_n = 0;",
        "    if (start_m + my_row >= num_queries) return;\n    for (long long start_n = 0;",
        RACE,
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
        BEYOND,
    ),
    "the other KV head": ("v + kv_head * D", "v", WRONG),
    "one value further": ("v_tile[j][lane", "v_tile[j + 1][lane", BEYOND),
    "half of the queries loaded": (
        "start_m, BLOCK_M, num",
        "start_m, BLOCK_M / 2, num",
        WRONG,
    ),
    "two warps on one row": ("/ LANES * ROWS;", "/ LANES;", WRONG),
}


@pytest.mark.parametrize("bug", FLASH_BUGS)
@pytest.mark.sample(4)
def test_a_bug_in_flash_attention_is_caught(bug, tmp_path, monkeypatch, seed):
    """21 queries of 4 heads on 45 keys of 2 heads: two tiles of each, and neither is full. The
    scores grow with the key and are far below 0.
    """
    right, wrong, by = FLASH_BUGS[bug]
    planted(right, wrong, cuda_flash, cuda_flash.FLASH["tiled"], tmp_path, monkeypatch)
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


# ---------------------------------------------------------------- lesson 9's worklog

TENSOR_BUGS = {
    "copies are not waited for": ("wait_for_all_groups_but<BUFFERS - 1>();", "", "cp.async|copy"),
    "one group too many in flight": ("<BUFFERS - 1>();", "<BUFFERS>();", "cp.async|copy"),
    "no barrier before a tile is read": (
        "__syncthreads();  // every thread's part of tile n has arrived",
        "",
        RACE,
    ),
    "no barrier after a tile was read": (
        "__syncthreads();  // no warp reads tile n any more",
        "",
        RACE,
    ),
    "K takes the queries' place at once": (
        "__syncthreads();  // K and V take its place",
        "",
        RACE,
    ),
    "the next tile in the same buffer": (
        "shared_address(memory[n % BUFFERS][1]), v + kv_head",
        "shared_address(memory[(n + 1) % BUFFERS][1]), v + kv_head",
        f"cp.async|copy|{RACE}|{WRONG}",
    ),
    "two rows in one place": ("(chunk ^ row % 8)", "(chunk | row % 8)", f"two|race|{WRONG}"),
    "rows after the last one are read": (
        "bool there = start + row < count;",
        "bool there = true;",
        OR_BEYOND,
    ),
    "the other operand's order": ("keys[0], keys[1]", "keys[0], keys[2]", WRONG),
    "V not transposed": ("load_transposed(values", "load_matrices(values", WRONG),
    "keys by the rows of V": (
        "chunks_first<D, Layout>(k_tile",
        "rows_first<D, Layout>(k_tile",
        WRONG,
    ),
    "halves of a pair swapped": ('"f"(high), "f"(low)', '"f"(low), "f"(high)', WRONG),
    "a quad's maximum of two lanes": (
        "distance < 4; distance *= 2) m_new",
        "distance < 2; distance *= 2) m_new",
        WRONG,
    ),
    "a lane's sum alone": (
        "distance < 4; distance *= 2) l_i",
        "distance < 1; distance *= 2) l_i",
        WRONG,
    ),
    "sum not rescaled": ("l_i[r] *= alpha;", "", WRONG),
    "half of the output not rescaled": ("acc[d][2 * r + 1] *= alpha;", "", WRONG),
    "causal one too few": ("key > query", "key >= query", WRONG),
    "the diagonal is not masked": ("if (start_n + BLOCK_N > full_end)", "if (false)", WRONG),
    "the ragged end is not masked": ("key >= num_keys ||", "", WRONG),
    "rows after the last one are stored": ("if (row >= num_queries) continue;", "", OR_BEYOND),
    "scale forgotten": ("softmax_scale * LOG2_E", "LOG2_E", WRONG),
    "the other KV head": ("v + kv_head * D", "v", WRONG),
    "logarithm in base 2": ("m_i[r] * LN_2", "m_i[r]", WRONG),
    "rows g and g + 8 swapped": ("lane / 4 + 8 * r;", "lane / 4 + 8 * (1 - r);", WRONG),
}


@pytest.mark.parametrize("bug", TENSOR_BUGS)
@pytest.mark.sample(3)
def test_a_bug_in_the_pipelined_kernel_is_caught(bug, tmp_path, monkeypatch, seed):
    """Two blocks of queries, the second not full; three tiles of keys, the last not full, and
    masked by one query alone.
    """
    right, wrong, by = TENSOR_BUGS[bug]
    pipelined = cuda_flash.VERSIONS["pipelined"]
    others = r"(?m)^FLASH\((?!flash_pipelined_64).*$"
    kernels = cuda_flash.FLASH["pipelined"]
    source = SimpleNamespace(SOURCE=pipelined.source)
    planted(right, wrong, source, kernels, tmp_path, monkeypatch, others)
    shapes = (70, 4, 64), (141, 2, 64), (141, 2, 64)
    q, k, v = (draw("normal", shape, seed=seed + i) for i, shape in enumerate(shapes))
    k = k.abs() * torch.linspace(-4, -1, 141)[:, None, None] - 2
    given = [x.bfloat16() for x in (q.abs(), k, v)]

    def check():
        for causal in (True, False):
            prove(
                partial(cuda_flash.flash_attention_cuda, causal=causal, version="pipelined"),
                partial(attention, causal=causal),
                given,
                floor=2e-5,
            )

    assert_caught(by, check)


# ---------------------------------------------------------------- lesson 12

PAGED_BUGS = {
    "no barrier": ("    __syncthreads();", "//", RACE),
    "first distance too short": ("distance = TEAM / 2;", "distance = TEAM / 4;", WRONG),
    "last distance too long": (
        "distance > 0; distance /= 2) score",
        "distance > 1; distance /= 2) score",
        WRONG,
    ),
    "teams trade within a team": (
        "distance = TEAM; distance < LANES",
        "distance = TEAM / 2; distance < LANES / 2",
        WRONG,
    ),
    "the longest distance left out": (
        "distance < LANES; distance",
        "distance < LANES / 2; distance",
        WRONG,
    ),
    "only teams with a key add up": (
        "for (int distance = TEAM / 2;",
        "if (start + team < split.end) for (int distance = TEAM / 2;",
        LANES,
    ),
    "keys after the split count": ("split.end ? score", "split.end + 1 ? score", WRONG),
    "keys after the split are loaded": (
        "if (key < split.end)",
        "if (key <= split.end)",
        OR_BEYOND,
    ),
    "a table's row of one entry": ("sequence * stride_table", "sequence", OR_BEYOND),
    "the block of the next key": ("table[key /", "table[(key + 1) /", OR_BEYOND),
    "context of one more": ("_lens[sequence]", "_lens[sequence] + 1", OR_BEYOND),
    "context of one less": ("_lens[sequence]", "_lens[sequence] - 1", WRONG),
    "an empty split leaves what was there": (
        "    for (int start = split.begin;",
        "    if (split.begin >= split.end) return;\n    for (int start = split.begin;",
        WRONG,
    ),
    "the same split for all": ("static_cast<int>(blockIdx.y) * size", "0 * size", WRONG),
    "V by the strides of K": ("row * v_cache.stride_row", "row * k_cache.stride_row", OR_BEYOND),
    "sum not rescaled": ("seen[h].l *= alpha;", "", WRONG),
    "warps not rescaled": ("acc_of[w][h][d] * weight(m_of[w][h], m)", "acc_of[w][h][d]", WRONG),
    "all warps in one slot": ("acc_of[warp][h][column", "acc_of[0][h][column", TWO),
    "the last warp left out": ("w < WARPS; w++) {", "w < WARPS - 1; w++) {", WRONG),
    "heads of the neighbour": (
        "min(HEADS, group - first_head)",
        "HEADS",
        f"{TWO}|{BEYOND}|race in global memory",
    ),
    "logarithm in base 2": ("* 0.6931471805599453f", "", WRONG),
}


@pytest.mark.parametrize("bug", PAGED_BUGS)
@pytest.mark.sample(4)
def test_a_bug_in_paged_decode_is_caught(bug, tmp_path, monkeypatch, seed):
    """Blocks of 3 in random order, in two splits: an empty sequence, a single key, a split of three
    rounds that ends in the middle of one. Three heads of each of two KV heads. What no sequence
    owns is NaN.
    """
    right, wrong, by = PAGED_BUGS[bug]
    others = r"(?m)^PAGED_DECODE\((?!paged_decode_fp32_64).*$"
    planted(right, wrong, cuda_paged, cuda_paged.DECODE, tmp_path, monkeypatch, others)
    inputs = paged([0, 1, 75], block_size=3, heads=(6, 2, 64, 64), kind="ascending", seed=seed)

    def check():
        fast = partial(cuda_paged.paged_decode_cuda, num_splits=2)
        prove(fast, decoded, inputs.decode, floor=2e-5)

    assert_caught(by, check)


# ---------------------------------------------------------------- lesson 18

W4A16_BUGS = {
    "no barrier": ("    __syncthreads();", "//", RACE),
    "halves swapped": ("x_low[4 * w] * number<0>", "x_low[4 * w] * number<4>", WRONG),
    "not shifted down": ("? word : word >> 12)", "? word : word)", WRONG),
    "zero point of one more": ("number<28>(word, zero)", "number<28>(word, zero + 1)", WRONG),
    "scale of the first group": ("stride_scales + group]", "stride_scales]", WRONG),
    "a part of a warp left out": ("byte < row_bytes", "byte + BYTES < row_bytes", WRONG),
    "rows after the last output": (
        "min(first + o, num_outputs - 1)",
        "first + o",
        BEYOND,
    ),
    "stored after the last output": ("OUTPUTS && n < num_outputs", "OUTPUTS", BEYOND),
}


@pytest.mark.parametrize("bug", W4A16_BUGS)
def test_a_bug_in_w4a16_is_caught(bug, tmp_path, monkeypatch, seed):
    """Two blocks of outputs, the second with one; a row of more columns than a block takes at once,
    the rest a part of a warp; groups with zeros; a bias.
    """
    right, wrong, by = W4A16_BUGS[bug]
    others = r"(?m)^W4A16\((?!w4a16_fp32).*$"
    planted(right, wrong, cuda_w4a16, cuda_w4a16.W4A16, tmp_path, monkeypatch, others)
    weight = matrix("int4, zeros", 5, 4096 + 192, seed).to("cpu")
    fast, plain, tensors = problem(weight, cuda_w4a16.w4a16_cuda)
    x, bias = (draw("normal", shape, seed=seed) for shape in ((1, 4096 + 192), (5,)))
    assert_caught(by, lambda: prove(fast, plain, (x, tensors, bias)))


@pytest.mark.parametrize(
    "module", [cuda_softmax, cuda_flash, "pipelined", cuda_paged, cuda_w4a16], ids=str
)
def test_without_a_bug_the_same_checks_pass(module, tmp_path, monkeypatch, seed):
    """Else a bug would be caught by a check that rejects everything."""
    tests, bugs = {
        cuda_softmax: (test_a_bug_in_the_softmax_is_caught, SOFTMAX_BUGS),
        cuda_flash: (test_a_bug_in_flash_attention_is_caught, FLASH_BUGS),
        "pipelined": (test_a_bug_in_the_pipelined_kernel_is_caught, TENSOR_BUGS),
        cuda_paged: (test_a_bug_in_paged_decode_is_caught, PAGED_BUGS),
        cuda_w4a16: (test_a_bug_in_w4a16_is_caught, W4A16_BUGS),
    }[module]
    monkeypatch.setitem(bugs, "none", ("long long", "long long", WRONG))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        tests("none", tmp_path, monkeypatch, seed)
