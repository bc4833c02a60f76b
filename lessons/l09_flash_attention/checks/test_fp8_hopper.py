"""The 8-bit Hopper kernel equals its twin on a CPU that runs its code and on a Hopper GPU."""

import json

import pytest
import torch

from lessons.l09_flash_attention.checks.fp8_cases import KERNEL, of_different_sizes, proved
from lessons.l09_flash_attention.checks.gluon_cases import LENGTHS, LONG, inputs
from lessons.l09_flash_attention.hopper import rings
from lessons.l09_flash_attention.hopper.gluon_fp8 import flash_fp8_hopper_kernel
from lessons.l09_flash_attention.hopper.launch import tiles_of
from lessons.l09_flash_attention.hopper.transpose import gl, gluon, turn
from lessons.l09_flash_attention.lab import eight_bits, specs
from lessons.l09_flash_attention.naive import attention
from lessons.toolbox.gpu.gluon import on_the_machine
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.kernels.kernel_hash import kernel_hash
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.profile.replay import CONSTANTS
from lessons.toolbox.proof.numerics import (
    ATTENTION_INPUTS,
    assert_same_bits,
)

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
def test_fp8_hopper_is_aligned_bottom_right(num_queries, num_keys, seed, proof, hopper_or_cpu):
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
    """Byte by byte: rows 0, 2, 4, …, then 1, 3, 5, …; keys 0 1 8 9 2 3 10 11 … of each 16."""
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


# ---------------------------------------------------------------- what is predicted


def test_the_predictions_are_of_these_kernels():
    record = json.loads(eight_bits.RECORD.read_text(encoding="utf-8"))
    for name, (_, kernel) in eight_bits.KERNELS.items():
        assert record["kernels"][name]["hash"] == kernel_hash(kernel), (
            f"{name}: python -m lessons.l09_flash_attention.lab.eight_bits"
        )


def test_programs_are_continued_to_a_prompt():
    """A program of n tiles takes 1000 + 100 n clocks: 64 of 64 tiles, or of 1 to 64, for each of 32
    heads. The busiest of the SMs has no more than its share and one program more.
    """
    runs = {
        keys: dict.fromkeys(("issued", "passes"), 0) | {"clocks": 1000 + 100 * keys / 128}
        | {"busy": {}, "limit": ""}
        for keys in eight_bits.KEYS
    }  # fmt: skip
    for causal, tiles in ((False, 64 * 64), (True, 64 * 65 / 2)):
        found = eight_bits.continued(runs, causal)["8192"]["predicted_s"]
        chip = lookup("h200")
        clocks = found * chip.clock_hz - CONSTANTS.launch
        share = 32 * (64 * 1000 + tiles * 100) / chip.sm_count
        assert share < clocks < share + 1000 + 64 * 100
        assert causal or clocks == pytest.approx(16 * (1000 + 64 * 100))  # 2048 on 132 SMs
