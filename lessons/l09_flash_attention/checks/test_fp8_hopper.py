"""The 8-bit Hopper kernel equals its twin on a CPU that runs its code and on a Hopper GPU; planted
bugs are caught.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lessons.l09_flash_attention.checks.gluon_cases import DEVICE, inputs, with_bug
from lessons.l09_flash_attention.hopper import gluon_fp8, rings, transpose, weights
from lessons.l09_flash_attention.hopper.fp8 import attention_fp8_by_tiles
from lessons.l09_flash_attention.hopper.gluon_fp8 import flash_fp8_hopper_kernel
from lessons.l09_flash_attention.hopper.launch import tiles_of
from lessons.l09_flash_attention.hopper.transpose import gl, gluon, turn
from lessons.l09_flash_attention.lab import specs
from lessons.l09_flash_attention.naive import attention
from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.gpu.gluon import on_the_machine
from lessons.toolbox.gpu.instructions.tensor_cores import product_in_14_bits
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.device import machine_chip
from lessons.toolbox.proof.numerics import (
    ATTENTION_INPUTS,
    NotEquivalent,
    assert_close_to_oracle,
    assert_same_bits,
)

LENGTHS = [1, 63, 64, 65, 127, 128, 129, 200]
LONG = [1000, 4097] if DEVICE.type == "cuda" else []  # a CPU takes a second for 10 tiles
KERNEL = gluon_fp8.flash_attention_fp8_hopper
# A weight whose exp differs in the last bit may get another code of E4M3, 6 % away.
FLOOR = 2e-3


def in_14_bits(a, b):
    """Products of codes, added as Hopper adds them: 32 in an instruction. [H, M, K], [H, K, N] ->
    [H, M, N].
    """
    a, b = (x.float().cpu().numpy() for x in (a, b))
    total = np.zeros((*a.shape[:2], b.shape[2]), dtype=np.float32)
    for k in range(0, a.shape[2], 32):
        part = a[..., k : k + 32], b[:, k : k + 32]
        total = product_in_14_bits(*part, total, ("e4m3", "e4m3"))
    return torch.from_numpy(total).double().to(DEVICE)


def proved(q, k, v, causal, kernel=KERNEL):
    """The errors against the twin that has the same codes and adds their products in as many bits.
    Two calls give the same bits; the log-sum-exp is held to 1e-5 · max(1, |lse|).
    """
    out, lse = kernel(q, k, v, causal=causal)
    twin, exact = attention_fp8_by_tiles(q, k, v, causal=causal, multiply=in_14_bits)
    errors = assert_close_to_oracle(out, twin.bfloat16(), twin, floor=FLOOR)
    if not torch.equal(lse.isneginf(), exact.isneginf()):
        raise NotEquivalent("E0", "the log-sum-exps differ in being -inf")
    gap = ((lse - exact).abs() / exact.abs().clamp(min=1)).masked_fill(exact.isneginf(), 0).max()
    if not gap <= 1e-5:
        raise NotEquivalent("E2", f"log-sum-exp off by {gap:.2g}")
    for again, first in zip(kernel(q, k, v, causal=causal), (out, lse)):
        assert_same_bits(again, first)
    return errors


@pytest.fixture
def hopper_or_cpu():
    on_gpu = DEVICE.type == "cuda"
    if (10 * torch.cuda.get_device_capability()[0] if on_gpu else machine_chip()) != 90:
        pytest.skip("NOT RUN: needs a GPU of compute capability 9.0, or none")


@pytest.fixture
def compiled_on_cpu(hopper_or_cpu):
    if DEVICE.type == "cuda":
        pytest.skip("NOT RUN: needs a process without a GPU")


# ---------------------------------------------------------------- equal to the twin


@pytest.mark.parametrize("length", LENGTHS + LONG)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.sample(1, of="the 8-bit Hopper kernel")
def test_fp8_hopper_kernel(length, head_dim, seed, proof, hopper_or_cpu):
    for causal in (True, False):
        given = inputs(length, length + 5, 2, 1, head_dim, seed=seed)
        proof.record(flash_fp8_hopper_kernel, proved(*given, causal))


@pytest.mark.parametrize("num_queries, num_keys", [(1, 1), (1, 700), (5, 129), (200, 70), (300, 1)])
@pytest.mark.sample(1, of="the 8-bit Hopper kernel")
def test_fp8_hopper_kernel_is_aligned_bottom_right(num_queries, num_keys, seed, proof, hopper_or_cpu):  # fmt: skip
    """With more queries than keys the first ones see no key: 0 and -inf, whole programs of them."""
    given = inputs(num_queries, num_keys, seed=seed)
    proof.record(flash_fp8_hopper_kernel, proved(*given, True))


@pytest.mark.parametrize("name", ATTENTION_INPUTS)
@pytest.mark.sample(1, of="the 8-bit Hopper kernel")
def test_fp8_hopper_kernel_on_hard_inputs(name, seed, proof, hopper_or_cpu):
    given = inputs(150, 280, 2, 1, 64, seed=seed, name=name)
    proof.record(flash_fp8_hopper_kernel, proved(*given, True))


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.sample(1, of="the 8-bit Hopper kernel")
def test_fp8_hopper_kernel_with_grouped_heads(kv_heads, seed, proof, hopper_or_cpu):
    given = of_different_sizes(inputs(20, 140, 8, kv_heads, 64, seed=seed))
    proof.record(flash_fp8_hopper_kernel, proved(*given, True))


def of_different_sizes(given):
    """Heads whose largest values, and so whose scales, are 1, 1/3, 1/9, … of the first's."""
    return [x * (3.0 ** -torch.arange(x.shape[1], device=x.device))[:, None].bfloat16() for x in given]  # fmt: skip


@pytest.mark.sample(1, of="the 8-bit Hopper kernel")
def test_fp8_hopper_kernel_does_not_depend_on_the_layout(seed, hopper_or_cpu):
    """Heads first, gaps between rows, every second row."""
    q, k, v = inputs(70, 200, 2, 1, 64, seed=seed)
    padded = torch.nn.functional.pad(v, (0, 24))[:, :, :64]
    strided = k.repeat_interleave(2, dim=0)[::2]
    hostile = q.transpose(0, 1).contiguous().transpose(0, 1), strided, padded
    for out, want in zip(KERNEL(*hostile), KERNEL(q, k, v)):
        assert_same_bits(out, want)


@pytest.mark.sample(1, of="the 8-bit Hopper kernel")
def test_every_order_of_events_gives_the_same_bits(seed, compiled_on_cpu):
    """Programs, and the ends of copies, in four drawn orders."""
    given = inputs(200, 400, seed=seed)
    first, *others = [KERNEL(*given) for _ in range(4)]
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other))


@pytest.mark.sample(1, of="the 8-bit Hopper kernel")
def test_the_result_is_near_attention_without_codes(seed, hopper_or_cpu):
    """What 8 bits cost is 4 to 6 % on normal inputs, as fp8.py's other kernel has it."""
    given = inputs(130, 300, 2, 1, 128, seed=seed)
    exact, _ = attention(*(x.double() for x in given))
    error = float((KERNEL(*given)[0] - exact).norm() / exact.norm())
    assert 0.03 < error < 0.07


def test_the_8_bit_kernel_refuses_what_it_does_not_do():
    with pytest.raises(ValueError, match="64 or 128 for all"):
        KERNEL(*inputs(4, 4, head_dim=32, on="cpu"))
    with pytest.raises(ValueError, match="float32"):
        KERNEL(*(x.float() for x in inputs(4, 4, on="cpu")))
    q, k, v = inputs(4, 4, on="cpu")
    with pytest.raises(ValueError, match="one key or more"):
        KERNEL(q, k[:0], v[:0])


# ---------------------------------------------------------------- V turned around


@gluon.jit
def turn_kernel(v_desc, out_desc, TURNED: gl.constexpr, num_warps: gl.constexpr):
    """One tile of V, [BLOCK_N, D], turned around, to out: [D, BLOCK_N]."""
    v = rings.allocate_ring(v_desc, 1, 1)
    BLOCK_N: gl.constexpr = v_desc.block_type.shape[0]
    HEAD_DIM: gl.constexpr = v_desc.block_type.shape[1]
    v_t = rings.allocate_written_ring(v_desc.dtype, HEAD_DIM, BLOCK_N, TURNED, 1, 1)
    rings.fill(v, 0, v_desc, 0, 0)
    turn(rings.wait_for(v, 0), rings.claim(v_t, 0), 32)
    rings.hand_over(v_t, 0)
    rings.tma.async_copy_shared_to_global(out_desc, [0, 0], rings.wait_for(v_t, 0))
    rings.tma.store_wait(pendings=0)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_tile_is_turned_around(head_dim, seed, compiled_on_cpu):
    """Byte by byte: rows 0, 2, 4, … and then 1, 3, 5, … of D; keys 0 1 8 9 2 3 10 11 … of each
    16.
    """
    draw = torch.Generator().manual_seed(seed)
    bytes_ = torch.randint(256, (128, 1, head_dim), generator=draw, dtype=torch.uint8)
    out = torch.zeros(head_dim, 1, 128, dtype=torch.uint8)
    fp8 = torch.float8_e4m3fn
    layout = gl.NVMMASharedLayout.get_default_for([head_dim, 128], gl.float8e4nv)
    with on_the_machine(90):
        turn_kernel[(1,)](tiles_of(bytes_.view(fp8), 128), tiles_of(out.view(fp8), head_dim),
                          TURNED=layout, num_warps=4)  # fmt: skip
    keys = [16 * i + 8 * a + 2 * j + b for i in range(8) for j in range(4) for a in range(2)
            for b in range(2)]  # fmt: skip
    rows = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    assert torch.equal(out[:, 0], bytes_[:, 0].T[rows][:, keys])


# ---------------------------------------------------------------- two levels

TILES = 10  # of keys: one level's loss grows with them


def mean_of_many(kernel) -> float:
    """By how much the mean of positive numbers comes out too small, relative. All weights are 1 and
    all numbers are codes, so nothing is rounded but sums, and bfloat16 at the end, both ways.
    """
    draw = torch.Generator().manual_seed(9)
    v = 2 ** torch.randint(3, 9, (128 * TILES, 1, 128), generator=draw).float()
    v = v * (1 + torch.randint(8, v.shape, generator=draw) / 8)
    v = v.clamp(max=448).bfloat16()
    q, k = torch.zeros(64, 1, 128).bfloat16(), torch.zeros_like(v)
    out, _ = kernel(*(x.to(DEVICE) for x in (q, k, v)))
    exact, _ = attention(q.double(), k.double(), v.double())
    return float(1 - (out.double().cpu() * exact).sum() / (exact * exact).sum())


def test_sums_are_added_in_two_levels(tmp_path, hopper_or_cpu):
    """A tile's sum loses little. One sum for all tiles loses more with each: 0.66 % of the mean of
    1280 numbers.
    """
    two = mean_of_many(KERNEL)
    one = mean_of_many(planted("one level of sums", tmp_path))
    assert abs(two) < 1e-4 and 0.0061 < one < 0.0071, (two, one)


# ---------------------------------------------------------------- planted bugs

# What is told first depends on the drawn order of events.
RACE = r"race in shared memory|deadlock|more arrivals|is read while"
WAITS = r"deadlock in program .* at the mbarrier of "
TURNED = (
    "    turn(v_tile, claim(v_t, i), KEYS)\n",
    "    release(v, i)\n",
    "    hand_over(v_t, i)\n",
)
ADDED = "            acc += warpgroup_mma_wait(0, deps=(adding,))\n"
FREED = "            release(v_t, i - 1)\n"
RESCALED = "            acc = acc * column(alpha, OUT)\n"
ONE_LEVEL = re.compile(
    r"            adding = start_output\(weights, tile_of\(v_t, i - 1\), OUT\)\n(.*?)"
    + re.escape(RESCALED),
    re.DOTALL,
)
# name: (the text, what it becomes, what the error says; "" where only the numbers show it)
BUGS = {
    "keys of v in the order of their arrival": ("sort_keys(rows).to(", "rows.to(", r""),
    "weights in another order than v's keys": ("[p0, p1, p2, p3]", "[p0, p2, p1, p3]", r""),
    "neighbours of v's keys swapped": ("0x6420", "0x4602", r""),
    "even and odd columns swapped": ("gl.join(even, odd)", "gl.join(odd, even)", r""),
    "columns in the order of v's rows": ("out = columns_in_order(", "out = (", r""),
    "weights of a pair swapped": ("low, $2, $1", "low, $1, $2", r""),
    "l without the shift": ("+ sums_of_threads(p)", "+ sums_of_threads(p) * 0.00390625", r""),
    "log-sum-exp with the shift": ("gl.log2(l_i) - SHIFT)", "gl.log2(l_i))", r""),
    "weights without the shift": ("m_safe - SHIFT", "m_safe", r""),
    "q's scale of another head": ("gl.load(q_scale_ptr + head)", "gl.load(q_scale_ptr)", r""),
    "k's scale of another head": ("gl.load(k_scale_ptr + head // GROUP)",
                                  "gl.load(k_scale_ptr + head % GROUP)", r""),
    "v's scale of another head": ("gl.load(v_scale_ptr + head // GROUP)",
                                  "gl.load(v_scale_ptr + head % GROUP)", r""),
    "no scale of v": ("column(v_scale / l_safe, OUT)", "column(1 / l_safe, OUT)", r""),
    "acc is not rescaled": (RESCALED, "", r""),
    "acc is rescaled too early": (re.compile(re.escape(RESCALED) + r"(.*?)" + re.escape(ADDED),
                                             re.DOTALL), None, r""),
    "acc is not rescaled at the end": ("acc = acc * column(alpha, OUT) + warp",
                                       "acc = acc + warp", r""),
    "l is not rescaled": ("rescaled(l_i, alpha) +", "l_i +", r""),
    "v_t handed over before it is written": ("".join(TURNED),
        "    claim(v_t, i)\n    hand_over(v_t, i)\n    turn(v_tile, tile_of(v_t, i), KEYS)\n"
        "    release(v, i)\n", RACE),
    "v_t written before it is free": (TURNED[0], "    turn(v_tile, tile_of(v_t, i), KEYS)\n", RACE),
    "wrong phase of a written buffer": ("mbarrier.wait(free.index(i % STAGES), ((i // STAGES) & 1)"
                                        " ^ 1)", "mbarrier.wait(free.index(i % STAGES), (i // "
                                        "STAGES) & 1)", WAITS),
    "wrong phase of ready": ("mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1)",
                             "mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1 ^ 1)", r""),
    "v never given back": (TURNED[1], "", WAITS),
    "v_t never given back": (FREED, "", WAITS),
    "v_t given back before its product has ended": (ADDED + FREED, FREED + ADDED, RACE),
    "wait for v_t forgotten": (re.compile(r"            wait_for\(v_t, i\) .*\n"), "", r""),
    "p · v of the tile that is not there yet": ("tile_of(v_t, i - 1)", "tile_of(v_t, i)", r""),
    "half of a tile is turned": ("gl.static_range(BLOCK_N // KEYS)",
                                 "gl.static_range(BLOCK_N // KEYS // 2)", r""),
    "keys beyond the last are seen": ("key < num_keys,", "key < num_keys + BLOCK_N,", r""),
    "the diagonal is not seen": ("expand_dims(key, 0) <= gl", "expand_dims(key, 0) < gl", r""),
    "queries that see no key get NaN": ('gl.where(m_new == float("-inf"), 0.0, m_new)', "m_new",
                                        r""),
    "division by zero where no key is seen": ("gl.where(l_i == 0.0, 1.0, l_i)", "l_i", r""),
    "one level of sums": (ONE_LEVEL, None, r""),
}  # fmt: skip


def planted(bug: str, folder):
    """The wrapper of a kernel with the bug."""
    old, new, _ = BUGS[bug]
    if bug == "one level of sums":
        new = (
            RESCALED
            + "            codes = one_by_one(weights)\n"
            + "            codes = gl.convert_layout(codes, gl.DotOperandLayout(0, OUT, 4))\n"
            + "            tile = tile_of(v_t, i - 1).permute((1, 0))\n"
            + "            adding = warpgroup_mma(codes, tile, acc, is_async=True)\n"
            + "            scores = warpgroup_mma_wait(1, deps=(pending,))\n"
            + "            release(k, i)\n"
            + "            acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUT)\n"
        )
    if bug == "acc is rescaled too early":
        source = Path(gluon_fp8.__file__).read_text(encoding="utf-8")
        new = old.search(source)[1] + RESCALED + ADDED
    module = with_bug(gluon_fp8, (rings, transpose, weights), old, new, folder)
    return module.flash_attention_fp8_hopper


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug != "one level of sums"])
@pytest.mark.sample(1)
def test_a_planted_bug_is_caught(bug, tmp_path, seed, compiled_on_cpu):
    kernel = planted(bug, tmp_path)
    with pytest.raises(NotEquivalent) as caught:
        for num_queries, num_keys, causal in [(200, 600, True), (300, 100, True), (70, 300, False)]:
            given = of_different_sizes(inputs(num_queries, num_keys, 4, 2, seed=seed))
            proved(*given, causal, kernel)
    said = BUGS[bug][2]
    assert re.search(said, str(caught.value)), caught.value
    assert not said or isinstance(caught.value, Fault)


# ---------------------------------------------------------------- the compiler


@pytest.mark.compiler
def test_the_compiler_keeps_weights_in_their_registers():
    """No spills, TMA and WGMMA of 8 bits; in all loops a thread's 64 exps are where p · v is in
    flight; bytes are sorted for V alone.
    """
    reports = check_all(spec for spec in specs.KERNELS if spec.name.startswith("gluon_fp8"))
    for report in reports:
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits and report.registers <= 168, report
        assert report.matrix_instruction == "QGMMA" and report.tma_instructions, report
        causal = report.name.endswith("causal")
        assert report.exp_beside_wgmma >= (4 if causal else 2) * 64, report
        assert report.census["PRMT"] <= 64 and report.census["STSM"] >= 8, report
