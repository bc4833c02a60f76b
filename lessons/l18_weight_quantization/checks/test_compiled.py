"""What the compiler says of the kernels, for five GPU generations and without a GPU."""

import pytest

from lessons.l18_weight_quantization.lab.specs import KERNELS
from lessons.toolbox.proof.compiled import of_16_bits, reports_of

HOPPER, BLACKWELL = 90, 100


@pytest.mark.compiler
@pytest.mark.parametrize("format_name", ["int4", "int8", "e4m3", "e5m2", "nf4", "mxfp4", "nvfp4"])
def test_every_configuration_compiles(format_name):
    """Nothing is spilled, and no integer is converted: codes become numbers by bit operations.
    float32 and a T4 have no matrix instruction.
    """
    for report in reports_of(KERNELS, format_name):
        assert report.fits and not report.local_memory_instructions, report
        assert not any(name.startswith("I2F") for name in report.census), report
        assert bool(report.matrix_instruction) == of_16_bits(report), report


@pytest.mark.compiler
def test_codes_and_x_are_loaded_16_bytes_at_once():
    """Of 4-bit codes a program of 16 rows loads 128 rows of 64 bytes a step, 4 loads a thread, and
    of x two halves of 16 rows of 128 bytes, 1 load each; the prologue loads 3 steps, the loop one.
    A step of NF4 is half as long, too short for that.
    """
    for report in reports_of(KERNELS, "bf16_16x") + reports_of(KERNELS, "fp16_16x"):
        if report.chip >= 80 and "fp32" not in report.name:
            assert report.loads_128bit >= (8 if "nf4" in report.name else 4 * (4 + 2)), report


@pytest.mark.compiler
def test_few_rows_leave_room_for_four_programs_of_an_sm():
    """4-bit codes, 16 rows: 128 threads of at most 128 registers, four times in 65536; and four
    times the shared memory in an H200's 227 KiB. NVFP4 holds eight scales a row, and there is room
    for three.
    """
    for report in reports_of(KERNELS, "bf16_16x128"):
        if report.chip in (HOPPER, BLACKWELL):
            programs, registers = (3, 168) if report.name.startswith("nvfp4") else (4, 128)
            assert report.registers <= registers, report
            assert programs * report.shared_bytes <= 227 * 1024, report


@pytest.mark.compiler
def test_more_rows_run_on_warpgroup_instructions():
    """From 64 rows on: WGMMA on Hopper, tcgen05 on Blackwell; below, mma.sync, whose tiles are 16
    rows tall.
    """
    expected = {HOPPER: "HGMMA", BLACKWELL: "UTCHMMA"}
    for rows in (64, 128):
        for report in reports_of(KERNELS, f"bf16_{rows}x64"):
            if report.chip in expected:
                assert report.matrix_instruction == expected[report.chip], report
    for report in reports_of(KERNELS, "bf16_16x") + reports_of(KERNELS, "bf16_32x"):
        if report.chip in expected and "fp32" not in report.name:
            assert report.matrix_instruction == "HMMA", report


@pytest.mark.compiler
def test_a_zero_point_costs_no_round_through_shared_memory():
    """The codes go from shared memory straight into the registers of the tensor core: with zeros
    the kernel stores to shared memory no more often than without.
    """
    plain, zeros = (
        {r.chip: r.census.get("STS", 0) for r in reports_of(KERNELS, name) if r.chip == HOPPER}
        for name in ("int4_g128_bf16_16x128", "int4_g128_zeros_bf16_16x128")
    )
    assert zeros[HOPPER] <= plain[HOPPER] + 2, (plain, zeros)


@pytest.mark.compiler
def test_the_sum_of_partials_compiles():
    for report in reports_of(KERNELS, "add_partials"):
        assert report.fits and report.loads_128bit, report


@pytest.mark.compiler
def test_fp8_is_multiplied_as_fp8():
    """With 128 rows by the FP8 instruction of each generation. With 16 rows there is none on Hopper
    and Blackwell: mma.sync converts to float16 first (HMMA), only WGMMA and tcgen05 multiply FP8.
    """
    tall = {89: "QMMA", 90: "QGMMA", 100: "UTCQMMA"}
    for report in reports_of(KERNELS, "scaled_fp8e4nv"):
        expected = (
            tall if report.name.endswith("128x128") else {89: "QMMA", 90: "HMMA", 100: "HMMA"}
        )
        assert report.fits and report.matrix_instruction == expected[report.chip], report
    for report in reports_of(KERNELS, "scaled_i8"):
        expected = "IGMMA" if report.name.endswith("128x128") and report.chip == HOPPER else "IMMA"
        assert report.fits and report.matrix_instruction == expected, report
    for report in reports_of(KERNELS, "quantize_rows"):
        assert report.fits and report.loads_128bit, report
