"""What the compiler says of the kernels, for five GPU generations and without a GPU."""

import pytest

from lessons.l23_experts.lab.specs import KERNELS
from lessons.toolbox.proof.compiled import Bounds, of_16_bits, reports_of

BOUNDS = {
    # Nothing is spilled; 16 bits run on matrix units, float32 and a T4 have none.
    "gate and up": Bounds("^gate_up", local_memory=0, matrix=of_16_bits),
    "down": Bounds("^down", local_memory=0, matrix=of_16_bits),
    "what sorts and sums": Bounds("^(align|sum)", local_memory=0),
    # Triton makes constants of arguments that equal 1, and a constant can do less than a number.
    "one expert and one column": Bounds("^one"),
    # Rows run along the sum's direction, so neighbouring threads read neighbouring numbers.
    "wide loads": Bounds("^(gate_up|down|sum)_bf16", loads_128bit=8),
    # Tiles of 16 rows are too low for Hopper's warpgroup instructions, and memory decides there.
    "tall tiles": Bounds("^(gate_up|down)_bf16_m(64|128)$", [90], matrix="HGMMA"),
    "wide tiles": Bounds("^wide", [90], matrix="HGMMA", local_memory=0, loads_128bit=8),
    "codes of 4 bits": Bounds("^mxfp4", local_memory=0, matrix=of_16_bits),
    "codes of 4 bits, tall tiles": Bounds("^mxfp4_.*_m(64|128)$", [90], matrix="HGMMA"),
    # On Blackwell its compiler spills 8 bytes of the taller tiles of gate and up.
    "FP8": Bounds("^(fp8|quantize_groups)", [89, 90], local_memory=0),
    "FP8, tall tiles": Bounds("^fp8_.*_m64$", [90], matrix="QGMMA"),
    "low tiles": Bounds("^(gate_up|down)_bf16_m16$", [90], without=("HGMMA",)),
    # Rows of whole 16 bytes are copied by wide loads; few registers, so all programs run at once.
    "rows into windows": Bounds(
        "^(dispatch|combine)", local_memory=0, registers=64, loads_128bit=1
    ),
    # Two programs of a decode step fit at once in an H200's registers and shared memory, so that
    # one loads while another begins or ends.
    "two at once": Bounds(
        "^(gate_up|down)_bf16_m16$", [90], registers=128, shared_bytes=227 * 1024 // 2
    ),
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", BOUNDS)
def test_the_compiler_keeps_the_bounds(name):
    BOUNDS[name].check(KERNELS)


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", ["dispatch", "combine"])
def test_windows_have_one_barrier_of_the_system(kernel):
    """A compare-and-swap of a flag of each rank, to set and to reset."""
    for report in reports_of(KERNELS, f"^{kernel}_8_ranks", chips=(80, 90)):
        assert report.census.get("ATOMG", 0) + report.census.get("ATOM", 0) == 2 * 8, report
        assert report.census.get("MEMBAR", 0) >= 1, report.census
