"""What the compiler says of the kernels, for five GPU generations and without a GPU."""

import pytest

from lessons.l21_multi_lora.lab.specs import KERNELS
from lessons.toolbox.kernels.compile_check import check_all


def reports_of(part: str):
    """The reports of all specs with `part` in their names; skips where nothing can be compiled."""
    reports = check_all([spec for spec in KERNELS if part in spec.name])
    for report in reports:
        if not report.was_run:
            pytest.skip(report.error)
    return reports


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", ["shrink", "expand"])
def test_every_configuration_compiles(kernel):
    """Nothing is spilled; 16 bits run on matrix units, float32 and a T4 have none."""
    for report in reports_of(kernel):
        assert report.fits and not report.local_memory_instructions, report
        has_units = report.chip >= 80 and "fp32" not in report.name
        assert bool(report.matrix_instruction) == has_units, report


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", ["shrink_bf16", "expand_bf16"])
def test_adapters_are_loaded_16_bytes_at_once(kernel):
    """Rows of A and of B lie along K and N, so neighbouring threads read neighbouring numbers, at
    every rank.
    """
    for report in reports_of(kernel):
        assert report.loads_128bit >= 4, report


@pytest.mark.compiler
def test_many_programs_of_a_decode_step_share_a_processor():
    """Ranks up to 16: 128 threads of at most 64 registers, eight times in 65536; and eight times the
    shared memory in an H200's 227 KiB.
    """
    for report in reports_of("bf16_r16") + reports_of("bf16_r8"):
        if report.chip == 90:
            assert report.registers <= 64 and 8 * report.shared_bytes <= 227 * 1024, report
