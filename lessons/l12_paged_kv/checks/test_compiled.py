"""What the compiler says of the kernels, for five GPU generations and without a GPU."""

import pytest

from lessons.l12_paged_kv.lab.specs import KERNELS
from lessons.toolbox.kernels.compile_check import check_all

# Bytes that a program may spill. float32 is here for proofs. Latents of 128 heads fill all registers
# of an A100: Triton 3.6 spills 48 bytes there, 3.7 fewer.
MAX_SPILL = {"fp32": 32, "16 bits": 0, "paged_mla_bf16_128_sm80": 48, "paged_mla_bf16_128_sm89": 16}


def reports_of(part: str):
    """The reports of all specs with `part` in their names; skips where nothing can be compiled."""
    reports = check_all([spec for spec in KERNELS if part in spec.name])
    for report in reports:
        if not report.was_run:
            pytest.skip(report.error)
    return reports


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", ["decode", "prefill", "mla"])
def test_every_configuration_compiles(kernel):
    for report in reports_of(kernel):
        bits = "fp32" if "fp32" in report.name else "16 bits"
        allowed = MAX_SPILL.get(report.name, MAX_SPILL[bits])
        assert not report.error and report.spill_bytes <= allowed, report
        assert report.shared_bytes <= report.shared_limit_bytes, report
        assert report.loads_128bit, report
        matrix = bits == "16 bits" and report.chip >= 80
        assert bool(report.matrix_instruction) == matrix, report
        assert not report.serialized_wgmma, report


@pytest.mark.compiler
def test_a_table_costs_no_wide_load_and_no_stage():
    """A tile through the table loads K and V in pieces as wide as a contiguous one, and two tiles
    are under way.
    """
    by_name = {r.name: r for r in reports_of("decode_bf16_4x128") if r.chip == 90}
    paged, contiguous = (by_name[f"decode_bf16_4x128_{w}_16"] for w in ("paged", "contiguous"))
    assert paged.loads_128bit >= 48 and contiguous.loads_128bit >= 48
    # K and V of two tiles: 4 · 64 keys · 128 values · 2 bytes
    assert paged.shared_bytes >= 64 * 1024 and paged.registers <= 128
