"""What the compiler says of the kernels, for five GPU generations and without a GPU."""

import pytest

from lessons.l23_experts.lab.specs import KERNELS
from lessons.toolbox.kernels.compile_check import check_all


def reports_of(*names: str):
    """The reports of all specs whose names begin so; skips where nothing can be compiled."""
    reports = check_all([spec for spec in KERNELS if spec.name.startswith(names)])
    for report in reports:
        if not report.was_run:
            pytest.skip(report.error)
    return reports


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", ["gate_up", "down"])
def test_every_product_compiles(kernel):
    """Nothing is spilled; 16 bits run on matrix units, float32 and a T4 have none."""
    for report in reports_of(kernel):
        assert report.fits and not report.local_memory_instructions, report
        has_units = report.chip >= 80 and "fp32" not in report.name
        assert bool(report.matrix_instruction) == has_units, report


@pytest.mark.compiler
def test_what_sorts_and_sums_compiles():
    for report in reports_of("align", "sum"):
        assert report.fits and not report.local_memory_instructions, report


@pytest.mark.compiler
def test_one_expert_and_one_column_compile():
    """Triton makes constants of arguments that equal 1, and a constant can do less than a
    number.
    """
    for report in reports_of("one"):
        assert report.fits, report


@pytest.mark.compiler
def test_weights_are_loaded_16_bytes_at_once():
    """Rows run along the sum's direction, so neighbouring threads read neighbouring numbers."""
    for report in reports_of("gate_up_bf16", "down_bf16", "sum_bf16"):
        assert report.loads_128bit >= 8, report


@pytest.mark.compiler
def test_tall_tiles_run_on_hoppers_warpgroup_instructions():
    """From 64 rows on; tiles of 16 rows are too low for them, and memory decides there."""
    for report in reports_of("gate_up_bf16", "down_bf16"):
        if report.chip == 90:
            is_tall = not report.name.endswith("m16")
            assert (report.matrix_instruction == "HGMMA") == is_tall, report


@pytest.mark.compiler
def test_two_programs_of_a_decode_step_share_a_processor():
    """Two fit at once in an H200's registers and shared memory, so that one loads while another
    begins or ends.
    """
    for report in reports_of("gate_up_bf16_m16", "down_bf16_m16"):
        if report.chip == 90:
            assert 2 * report.shared_bytes <= 227 * 1024 and report.registers <= 128, report
