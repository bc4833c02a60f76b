"""The texts of lesson 18 quote what its code says."""

import json
from pathlib import Path

import pytest
import torch

from lessons.l01_roofline.planner.models import find_model
from lessons.l18_weight_quantization.gguf.gguf_blocks import FORMATS as BLOCKS
from lessons.l18_weight_quantization.lab import examples, floors
from lessons.l18_weight_quantization.methods.gptq import inverse_factor
from lessons.l18_weight_quantization.naive import per_tensor, round_to_nearest
from lessons.toolbox.measure.hardware import CHIPS
from tests.excerpts import plain_readme, stray_excerpts
from tests.markdown import section

ROOM = Path(__file__).parents[1] / "lessons/l18_weight_quantization"
README = plain_readme(ROOM)
REPOSITORY = ROOM.parents[1]
NOTEBOOK = (REPOSITORY / "notebooks/18_weight_quantization.ipynb").read_text(encoding="utf-8")
GUIDES = (ROOM.parent / "GUIDES.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows():
    """{format: its bits and error on the matrix of the figure}."""
    return {row.name: row for row in examples.formats_of(examples.weight_with_an_outlier())}


def test_the_texts_quote_the_matrix(rows):
    """The errors of the figure, in the README and in GUIDES.md."""
    shared = {
        "the whole matrix": "INT4, one scale in all",
        "a row of 1024": "INT4, one scale a row",
        "128 neighbours": "INT4, groups of 128",
        "32 neighbours": "INT4, groups of 32",
    }
    for who, name in shared.items():
        assert f"| {who} | {rows[name].error:.1%} |" in README
    whole, row, q4_k, group = (
        f"{rows[name].error:.1%}"
        for name in (
            "INT4, one scale in all",
            "INT8, one scale a row",
            "Q4_K",
            "INT4, groups of 32",
        )
    )
    assert (
        f"INT8 has an error of {row} here and E4M3 {rows['E4M3, one scale a row'].error:.1%}"
        in README
    )
    assert f"smaller error ({q4_k} against {group})" in README
    assert f"{whole} error" in GUIDES and group in GUIDES
    weight = examples.weight_with_an_outlier()
    absmax = (per_tensor(weight, 4).dequantize() - weight).norm() / weight.norm()
    assert f"no zero point: {absmax:.1%} error" in README
    assert f"so the picture says {rows['INT4, groups of 128'].bits:.2f}" in README
    assert f"4 + 24 / 128 = {rows['INT4, groups of 128'].bits:.2f}" in README
    ratio = rows["INT4, one scale in all"].error / rows["INT4, groups of 128"].error
    assert round(ratio) == 5, "the README says: nearly five times as large"
    outlier = round(float(weight.abs().max() / weight.std()))
    assert f"one weight of {outlier} standard deviations" in README
    assert f"largest weight is {outlier} standard deviations" in NOTEBOOK


def test_the_readme_rounds_as_the_code_does():
    """The four weights of steps 1 and 2."""
    weight = torch.tensor([[0.88, -0.2, 0.35, -1.4]])
    for symmetric, codes, zero in ((True, (4, -1, 2, -7), 8), (False, (15, 8, 11, 0), 9)):
        found = round_to_nearest(weight, 4, 4, symmetric)
        means = torch.tensor([codes]) - (0 if symmetric else zero)
        assert torch.allclose(found.dequantize(), means * found.scales.float())
        assert f"codes ({', '.join(map(str, codes))})".replace("-", "−") in README
    case = examples.rounded_with_feedback((2.4, 1.35), 0.8)
    assert f"moves from 1.35 to {case.moved[1]:.2f} *before*" in README
    errors = f"from {case.nearest_error:.2f} to {case.feedback_error:.2f}"
    assert f"falls {errors}, because" in README


def said(matrix: torch.Tensor) -> str:
    """[2, 2] as the README writes it."""
    rows = (", ".join(f"{x:.2f}".removesuffix(".00") for x in row) for row in matrix.tolist())
    return f"(({'), ('.join(rows)}))".replace("-", "−")


def test_the_examples_of_gptq_and_awq():
    """Steps 8 and 9: the factor gives the ratio of the picture, and a scale protects a column."""
    hessian = torch.tensor([[1, 0.8], [0.8, 1]], dtype=torch.float64)
    inverse = torch.linalg.inv(hessian)
    factor = inverse_factor(hessian, damping=0)
    assert f"H⁻¹ = {said(inverse)},   U = {said(factor)}\n" in README
    ratio = float(factor[0, 1] / factor[0, 0])
    assert ratio == pytest.approx(float(inverse[0, 1] / inverse[0, 0]))
    moved = f"1.35 − (2.4 − 2) · −{-ratio:g} = {1.35 - 0.4 * ratio:.2f}\n"
    assert f"= −{-ratio:g},       so the second weight becomes {moved}" in README
    weight, x = torch.tensor([[0.33, 1.4]]), torch.tensor([10.0, 1.0])
    for s, codes in (((1, 1), (2, 7)), ((4, 1), (7, 7))):
        scaled = weight * torch.tensor(s)
        found = round_to_nearest(scaled, 4, 2, symmetric=True)
        assert float(found.scales) == pytest.approx(0.2, rel=1e-3)
        means = found.dequantize()
        assert torch.allclose(means, torch.tensor([codes]) * found.scales.float())
        error = float(((means / torch.tensor(s) - weight) @ x).abs())
        line = next(line for line in README.splitlines() if f"codes {codes}, ŵ =" in line)
        assert line.endswith(f"off by {error:.1f}"), (line, error)


# {a row of the table of formats: its bits}
TRUE_BITS = {
    "FP32": 32,
    "BF16": 16,
    "FP16": 16,
    "E5M2, one scale a tensor": 8,
    "E4M3, one scale a tensor": 8,
    "Q8_0": BLOCKS["Q8_0"].bits_per_weight,
    "Q6_K": BLOCKS["Q6_K"].bits_per_weight,
    "Q5_K": BLOCKS["Q5_K"].bits_per_weight,
    "NF4": 4 + 32 / 64,
    "Q4_0, Q4_K": BLOCKS["Q4_K"].bits_per_weight,
    "MXFP4": 4 + 8 / 32,
    "INT4, groups of 128": floors.FORMATS["INT4"].bits,
    "NF4, double quantization": 4 + 8 / 64 + 32 / (64 * 256),
    "Q2_K": BLOCKS["Q2_K"].bits_per_weight,
}


def test_the_table_of_formats():
    lines = section(README, "Formats in numbers").splitlines()
    tables = {
        line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in lines if line.count("|") == 7
    }
    limits = {
        "FP32": torch.float32,
        "BF16": torch.bfloat16,
        "FP16": torch.float16,
        "E5M2, one scale a tensor": torch.float8_e5m2,
        "E4M3, one scale a tensor": torch.float8_e4m3fn,
    }
    for name, bits in TRUE_BITS.items():
        largest, smallest, said, than_fp16, than_fp32 = tables[name]
        assert float(said) == pytest.approx(bits, abs=0.0051), name
        assert than_fp16 == f"{16 / bits:.2f}×" and than_fp32 == f"{32 / bits:.2f}× |", name
        if name in limits:
            info = torch.finfo(limits[name])
            assert float(largest) == pytest.approx(info.max, rel=0.01), name
            # the smallest of all has a mantissa of one bit
            assert float(smallest) == pytest.approx(info.smallest_normal * info.eps, rel=0.03), name


def test_the_texts_quote_the_floors():
    bf16, int4, meet = (
        round(number)
        for number in (
            floors.turning_batch("BF16"),
            floors.turning_batch("INT4"),
            floors.meeting_batch(),
        )
    )
    assert f"BF16 turns at B = {bf16},  INT4 of 4.16 bits at B = {int4}" in README
    assert f"meet at B = {meet}" in README and f"a batch of {meet}" in README
    gain = floors.floor_s("FP8", 1) / floors.floor_s("INT4", 1)
    assert f"INT4 can be {gain:.1f} times as fast as FP8" in README
    assert f"INT4 is {gain:.1f}× as fast" in GUIDES
    large = floors.floor_s("INT4", 256) / floors.floor_s("FP8", 256)
    assert f"FP8 is {large:.1f}× as fast" in GUIDES and round(large, 1) == 2
    assert f"a batch of {meet}." in GUIDES
    bits = (4 + 20 / 128, 4 + 16 / 128, 4.5, TRUE_BITS["NF4, double quantization"])
    for number in bits:
        assert f"{number + 1e-9:.2f}" in GUIDES  # 4.125 is printed as 4.13


@pytest.mark.parametrize("chip, four_bits_until, bfloat16_from", [("h200", 32, 48), ("cpu", 8, 16)])
def test_which_product_is_fastest_up_to_how_many_rows(chip, four_bits_until, bfloat16_from):
    """Of the series that are drawn, as the texts beside the two figures say."""
    path = REPOSITORY / f"results/{chip}/l18_batch.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    drawn = {
        name: {point["x"]: point["median_s"] for point in series["points"]}
        for name, series in record["series"].items()
        if name not in record["not_drawn"]
    }
    for rows_of_x in record["x"]:
        order = sorted(drawn, key=lambda name: drawn[name][rows_of_x])
        assert order[-1] == "dequantize, then multiply"
        assert (order[0] == "4 bits") == (rows_of_x <= four_bits_until)
        assert (order[0] == "bfloat16 (PyTorch)") == (rows_of_x >= bfloat16_from)
        if chip == "cpu" and rows_of_x <= four_bits_until:
            assert order[1] == "8 bits"
    assert f"bfloat16 from {bfloat16_from}" in README and f"up to {four_bits_until} rows" in README


def test_the_quiz():
    """Every number of the answers."""
    bits, chip = 4 + 20 / 64, CHIPS["l40s"]
    ridge = chip.bf16_flops_per_s / chip.memory_bytes_per_s
    q6_k = BLOCKS["Q6_K"].bits_per_weight
    params = find_model("llama-3-8b").params
    assert f"{bits:.2f} bits, so {7 * bits / 8:.2f} GB" in README
    assert (
        f"The ridge is {ridge:.0f}, so 4.16 / 16 · {ridge:.0f} = {4.16 / 16 * ridge:.0f}." in README
    )
    assert f"{params / 1e9:.2f} billion" in README
    assert f"{q6_k:.2f} bits, so {params * q6_k / 8e9:.2f} GB" in README


def test_the_excerpts_stand_in_the_sources():
    assert not stray_excerpts(ROOM)
