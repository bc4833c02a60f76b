"""Triton's tl.dot_scaled beside the block-scaled product in Gluon, what the compiler makes of both,
and what is predicted of it.
"""

import json

import pytest
import torch

from lessons.l09_flash_attention.checks.gluon_cases import need_chip, need_no_gpu
from lessons.l19_kv_quantization.activations.block_scaled.dot_scaled import dot_scaled_kernel
from lessons.l19_kv_quantization.activations.block_scaled.operands import BlockScaled
from lessons.l19_kv_quantization.checks.block_scaled_cases import (
    MXFP4,
    NVFP4,
    hold,
    random_operand,
)
from lessons.l19_kv_quantization.lab import block_scaled as lab
from lessons.l19_kv_quantization.lab import block_scaled_specs
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.kernels.compile_check import check_all


@pytest.fixture
def compiled_on_cpu():
    need_chip(100)
    need_no_gpu()


def by_dot_scaled(a: BlockScaled, b: BlockScaled, block_n: int, num_stages: int) -> torch.Tensor:
    """In a process that compiles for sm_100."""
    sides = [(x.codes, x.atoms.view(torch.uint8), x.row_scale) for x in (a, b)]
    options = a.atoms.dtype == NVFP4, block_n, num_stages
    return call(f"{lab.__name__}:dot_scaled", *sides, *options, chip=100)


@pytest.mark.sample(1, of="the product by tl.dot_scaled")
@pytest.mark.parametrize("scale_type", [NVFP4, MXFP4])
@pytest.mark.parametrize("block_n", [128, 256])
def test_dot_scaled_with_a_wait_for_each_product(scale_type, block_n, seed, proof, compiled_on_cpu):
    a = random_operand(130, 800, scale_type, seed)
    b = random_operand(264, 800, scale_type, seed + 1)
    hold(by_dot_scaled(a, b, block_n, 1), a, b)
    proof.record(dot_scaled_kernel, chip=100)


def test_dot_scaled_copies_scales_over_those_in_use(seed, compiled_on_cpu):
    """Two steps in flight and one place for scales: what the manual does not promise is a fault. A
    single step has no such neighbour.
    """
    a, b = (random_operand(128, 256, NVFP4, seed + k) for k in range(2))
    hold(by_dot_scaled(a, b, 128, 3), a, b)
    a, b = (random_operand(128, 1024, NVFP4, seed + k) for k in range(2))
    said = "race in tensor memory: it (writes what the tensor core reads|overwrites what)"
    with pytest.raises(RuntimeError, match=said):
        by_dot_scaled(a, b, 128, 3)


# ---------------------------------------------------------------- the compiler

# name: registers, KiB of shared memory; README.md has the table
SAID = {
    "block_scaled_nvfp4_128": (255, 144),
    "dot_scaled_nvfp4_128": (182, 108),
    "block_scaled_nvfp4_256": (255, 216),
    "dot_scaled_nvfp4_256": (182, 162),
}


@pytest.mark.compiler
def test_the_compiler_keeps_scales_and_products_on_the_tensor_core():
    """No spills, no number made by a warp: the products are of 4 bits (OMMA), four a step; scales
    are copied by UTCCP, an atom each. tl.dot_scaled has its first step outside of the loop.
    """
    specs = [spec for spec in block_scaled_specs.KERNELS if "scaled" in spec.name]
    for report in check_all(specs):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits, report
        assert report.matrix_instruction == "UTCOMMA" and report.tma_instructions, report
        steps = 2 if report.name.startswith("dot") else 1
        assert report.census["UTCOMMA"] == 4 * steps, report
        atoms = (4 if "nvfp4" in report.name else 2) * (1 + int(report.name[-3:]) // 128)
        assert report.census["UTCCP"] == atoms * steps, report
        found = report.registers, report.shared_bytes // 1024
        assert found == SAID.get(report.name, found), report


def test_what_is_predicted_follows_from_counts(compiled_on_cpu):
    """Each byte of a step is written once and read once; what README.md says in round numbers."""
    for name, block_n, scales in (("nvfp4", 128, 16), ("mxfp4", 256, 8)):
        moved = 2 * (128 + block_n) * (128 + scales)
        assert lab.counted(name, block_n)["passes"] == moved // 128
        assert lab.counted(name, block_n)["flops"] == 2 * 128 * block_n * 256
    recorded = json.loads(lab.OUT.read_text(encoding="utf-8"))
    few = {name: x["seconds"] for name, x in recorded["predicted"]["16 of 28672 x 4096"].items()}
    assert (
        round(few["fp8"] / few["nvfp4"], 1) == 1.6 and round(few["bf16"] / few["nvfp4"], 1) == 3.1
    )
    wide = recorded["predicted"]["8192 of 8192 x 8192"]
    for name, share in (("nvfp4", 0.63), ("fp8", 0.71)):
        step = lab.step_s(name, 256)
        assert round(step["tensor core"] / step["shared memory"], 2) == share
    assert wide["nvfp4"] == lab.best("nvfp4", 8192, 8192, 8192)
    assert all(each["limit"] == "shared memory" for each in wide.values())
