"""What the compiler says of the kernels, for five GPU generations and without a GPU."""

import pytest

from lessons.l12_paged_kv.lab.specs import KERNELS
from lessons.toolbox.proof.compiled import Bounds, of_16_bits, reports_of

# Bytes that a program may spill. float32 is here for proofs. Latents of 128 heads fill all
# registers of an A100: Triton 3.6 spills 48 bytes there, 3.7 fewer.
SPILLS = {"fp32": 64, "paged_mla_bf16_128_sm80": 48, "paged_mla_bf16_128_sm89": 16}
SPILLS |= {"paged_mla_listed_bf16_128_sm80": 48, "paged_mla_listed_bf16_128_sm89": 16}
BOUNDS = {
    kernel: Bounds(kernel, spill_bytes=SPILLS, loads_128bit=1, matrix=of_16_bits)
    for kernel in ("decode", "prefill", "mla")
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", BOUNDS)
def test_the_compiler_keeps_the_bounds(name):
    BOUNDS[name].check(KERNELS)


@pytest.mark.compiler
def test_a_table_costs_no_wide_load_and_no_stage():
    """A tile through the table loads K and V in pieces as wide as a contiguous one, and two tiles
    are under way.
    """
    by_name = {r.name: r for r in reports_of(KERNELS, "decode_bf16_4x128", [90])}
    paged, contiguous = (by_name[f"decode_bf16_4x128_{w}_16"] for w in ("paged", "contiguous"))
    assert paged.loads_128bit >= 48 and contiguous.loads_128bit >= 48
    # K and V of two tiles: 4 · 64 keys · 128 values · 2 bytes
    assert paged.shared_bytes >= 64 * 1024 and paged.registers <= 128


@pytest.mark.compiler
def test_latents_through_a_table_keep_two_tiles_under_way_and_two_programs_an_sm():
    """As latents in one piece do: with fewer stages the compiler keeps one tile of 32 rows."""
    for report in reports_of(KERNELS, "grouped_mla.*bf16_16_sm90", [90]):
        tile = 32 * 576 * 2
        assert 2 * tile < report.shared_bytes <= 3 * tile
        # 1 KiB is the system's, and 4 warps share 65,536 registers with another program's.
        assert 2 * (report.shared_bytes + 1024) <= 228 * 1024 and report.registers <= 255
