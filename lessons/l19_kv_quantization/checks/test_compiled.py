"""What the compiler says of the kernels, for five GPU generations and without a GPU."""

import pytest

from lessons.l12_paged_kv.lab.specs import KERNELS as LESSON_12
from lessons.l19_kv_quantization.lab.specs import KERNELS
from lessons.toolbox.proof.compiled import Bounds, reports_of

# Bytes. A tile of 4 bits is held to 128 registers, so that four programs fit on an SM.
MAX_SPILL = {
    "int4_decode_bf16_4x128_paged_16_sm100": 16,
    "int4_decode_bf16_8x128_paged_16_sm100": 8,
    "int4_decode_bf16_4x128_paged_listed_16_sm100": 24,
    "kivi_decode_bf16_3x64_paged_32_sm100": 24,
}
# Bytes. Three programs of DeepSeek's rows fit on an SM, with 168 registers a thread.
SPILLS_OF_ROWS = {90: 112, 100: 384}
# FP8 attention of heads of 128: 16 numbers a thread.
SPILLS_OF_PRODUCTS = {"fp8_attention_128_paged": 64}
NARROW = "int4_decode_bf16_3x64_paged_16"  # rows of 32 bytes: two loads of 16 bytes


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", ["_decode_", "_prefill_", "quantize_", "w8a8_"])
@pytest.mark.sample(1, of="compiler")
def test_every_configuration_compiles(kernel):
    """No spills, tensor cores, and loads of 16 bytes, although a number has 8 or 4 bits."""
    for report in reports_of(KERNELS, kernel):
        allowed = MAX_SPILL.get(f"{report.name}_sm{report.chip}", 0)
        assert not report.error and report.spill_bytes <= allowed, report
        assert report.shared_bytes <= report.shared_limit_bytes, report
        assert not report.serialized_wgmma, report
        if kernel != "quantize_":
            assert report.matrix_instruction, report
            assert report.loads_128bit >= (6 if report.name == NARROW else 12), report


@pytest.mark.compiler
def test_codes_need_no_wider_memory_than_numbers():
    """A tile of 128 keys of codes takes what lesson 12's tile of 64 keys takes, or half: no number
    ever goes to shared memory. The rest are scales and places of the table.
    """
    (plain,) = (r for r in reports_of(LESSON_12, "decode_bf16_4x128_paged_16") if r.chip == 90)
    for name, share in (("fp8", 1), ("int8", 1), ("int4", 0.5)):
        (coded,) = (
            r for r in reports_of(KERNELS, f"{name}_decode_bf16_4x128_paged_16") if r.chip == 90
        )
        assert coded.shared_bytes < share * plain.shared_bytes + 10 * 1024, coded


@pytest.mark.compiler
def test_the_products_of_8_bits_are_8_bit_products():
    found = {(r.name, r.chip): r.matrix_instruction for r in reports_of(KERNELS, "w8a8_")}
    assert found["w8a8_int8_4096", 90] == "IGMMA" and found["w8a8_fp8_4096", 90] == "QGMMA"
    assert found["w8a8_int8_4096", 80] == "IMMA"
    # 16 rows are too few for a warpgroup, and Triton then multiplies E4M3 as 16-bit numbers.
    assert found["w8a8_fp8_16", 90] == "HMMA"


@pytest.mark.compiler
def test_4_bits_meet_8_in_products_of_8_bits():
    """Codes of 4 bits become 8 in registers, for the same matrix units."""
    reports = reports_of(KERNELS, "w4a8_")
    for report in reports:
        assert not report.error and not report.spill_bytes, report
        assert report.shared_bytes <= report.shared_limit_bytes, report
        assert not report.serialized_wgmma, report
    found = {(r.name, r.chip): r.matrix_instruction for r in reports}
    assert found["w4a8_int8_4096_zeros", 90] == "IGMMA" and found["w4a8_int8_16", 80] == "IMMA"
    assert found["w4a8_fp8_4096_zeros", 90] == "QGMMA" and found["w4a8_fp8_16", 90] == "HMMA"


@pytest.mark.compiler
def test_fp8_attention_multiplies_codes():
    """Both products in 8 bits, and V is turned in registers: no byte is stored by itself."""
    instruction = {89: "QMMA", 90: "QGMMA", 100: "UTCQMMA"}
    Bounds(
        "fp8_attention", spill_bytes=SPILLS_OF_PRODUCTS, loads_128bit=6, matrix=instruction
    ).check(KERNELS)
    (report,) = reports_of(KERNELS, "fp8_attention_128_paged_16", [90])
    # A tile of V is 64 bytes a thread, 16 words, in each of the two loops; by bytes 128 stores.
    assert report.census["STS"] <= 80, report.census


@pytest.mark.compiler
def test_rotations_run_on_matrix_units():
    """In 16 bits: both products. float32 keeps its bits, so it has none."""
    for report in reports_of(KERNELS, "rotate_"):
        assert not report.error and not report.spill_bytes, report
        assert report.shared_bytes <= report.shared_limit_bytes, report
        assert bool(report.matrix_instruction) == ("fp32" not in report.name), report


@pytest.mark.compiler
def test_rows_of_latents_are_read_by_copies_that_wait_for_nothing():
    """Loads of 16 bytes, tensor cores, and where there is room two tiles under way."""
    for report in reports_of(KERNELS, "coded_mla_"):
        allowed = SPILLS_OF_ROWS.get(report.chip, 0)
        assert not report.error and report.spill_bytes <= allowed, report
        programs = 3 if report.chip in SPILLS_OF_ROWS else 1
        assert programs * report.shared_bytes <= report.shared_limit_bytes, report
        assert report.matrix_instruction == "HMMA" and report.loads_128bit >= 20, report
        assert (report.shared_bytes >= 2 * 32 * 656) == (report.chip != 89), report
    for report in reports_of(KERNELS, "write_rows"):
        assert not report.error and not report.spill_bytes, report
