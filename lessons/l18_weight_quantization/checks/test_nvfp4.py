"""NVFP4's two levels of scales: every code and every scale is the nearest, wrong versions show."""

import pytest
import torch

from lessons.l18_weight_quantization import naive
from lessons.l18_weight_quantization.lab import four_bit_scales
from lessons.l18_weight_quantization.lab.cases import numbers
from lessons.l18_weight_quantization.lab.examples import weight_with_an_outlier
from lessons.l18_weight_quantization.methods import nvfp4
from lessons.l18_weight_quantization.weights import E2M1_VALUES
from lessons.toolbox.proof.planted import with_bug

E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # from 0 to 448


def check_scales(module) -> None:
    """The largest block's scale is E4M3's largest number, every other is the nearest to largest /
    6; none is 0.
    """
    matrix = numbers(5, 64) * torch.logspace(-6, 0, 5)[:, None]
    found = module.to_nvfp4(matrix)
    whole = found.tensor_scale.double()
    blocks = matrix.view(5, 4, 16).double()
    wanted = blocks.abs().amax(-1) / 6 / whole
    assert float(found.scales.float().max()) == 448 and found.tensor_scale.dtype == torch.float32
    error = (found.scales.double() - wanted).abs()
    nearest = (E4M3[1:, None, None] - wanted).abs().amin(0)
    torch.testing.assert_close(error, nearest, rtol=1e-5, atol=1e-5)
    assert bool((found.scales.float() > 0).all())


def check_codes(module) -> None:
    """Of all 16 numbers the nearest, by the scales as they are stored."""
    matrix = numbers(5, 64) * torch.logspace(-3, 3, 5)[:, None]
    found = module.to_nvfp4(matrix)
    steps = found.scales.double() * found.tensor_scale.double()
    levels = torch.tensor(E2M1_VALUES).double()[:, None, None, None] * steps[..., None]
    blocks = matrix.view(5, 4, 16).double()
    best = (levels - blocks).abs().amin(0)
    error = (found.dequantize().double().view_as(blocks) - blocks).abs()
    torch.testing.assert_close(error, best, rtol=1e-5, atol=1e-6 * float(matrix.abs().max()))


def check_extremes(module) -> None:
    """Zeros stay zeros, also beside a large block; nothing becomes infinite or NaN."""
    assert not module.to_nvfp4(torch.zeros(2, 32)).dequantize().any()
    matrix = torch.zeros(2, 32)
    matrix[0, 0], matrix[1, 16] = 1e30, 1e-30
    found = module.to_nvfp4(matrix).dequantize()
    assert found[0, 0] == pytest.approx(1e30) and not found[1].any()
    for size in (1e-38, 1e-44, 3e38):
        found = module.to_nvfp4(torch.full((1, 16), size)).dequantize()
        assert bool(found.isfinite().all())


CHECKS = (check_scales, check_codes, check_extremes)


@pytest.mark.parametrize("check", CHECKS)
def test_nvfp4(check):
    check(nvfp4)


BUGS = {
    "codes by the scale before it was rounded": (
        "(scales.float() * tensor_scale)[..., None]",
        "(blocks.abs().amax(-1) / LARGEST_CODE)[..., None]",
    ),
    "no scale of the matrix": (
        "return 1 / divisor.clamp(max=torch.finfo(torch.float32).max)",
        "return torch.ones_like(divisor)",
    ),
    "the largest scale is 1": ("LARGEST_CODE * LARGEST_SCALE /", "LARGEST_CODE /"),
    "a scale that makes the largest number 4": ("LARGEST_CODE / tensor_scale", "4 / tensor_scale"),
    "scales of 0": ("wanted.clamp(min=SMALLEST_SCALE)", "wanted"),
}


@pytest.mark.parametrize("name", BUGS)
def test_wrong_versions_are_rejected(name, tmp_path):
    wrong = with_bug(nvfp4, tmp_path, *BUGS[name])
    with pytest.raises(AssertionError):
        for check in CHECKS:
            check(wrong)


def test_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert naive.to_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert naive.to_e2m1(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]
    near = torch.nextafter(ties, torch.zeros(())), torch.nextafter(ties, torch.full((), 9.0))
    assert [naive.to_e2m1(x).tolist() for x in near] == [list(range(7)), list(range(1, 8))]
    assert naive.to_e2m1(torch.tensor([6.0, 7.9, 1e9])).tolist() == [7, 7, 7]


def test_another_width_is_refused():
    with pytest.raises(ValueError, match=r"got \(4, 40\); accepted: .* multiple of 16"):
        nvfp4.to_nvfp4(numbers(4, 40))


def test_the_example_by_hand():
    """MORE.md's: the largest weight 13.44, a block with 0.9 and 0.5."""
    matrix = torch.zeros(1, 32)
    matrix[0, 3], matrix[0, 20], matrix[0, 21] = 13.44, -0.9, 0.5
    found = nvfp4.to_nvfp4(matrix)
    assert float(found.tensor_scale) == pytest.approx(0.005) and float(found.scales[0, 1]) == 30
    assert found.dequantize()[0, [20, 21]].tolist() == pytest.approx([-0.9, 0.45])
    text = four_bit_scales.README.read_text(encoding="utf-8")
    assert "0.9 / 6 / 0.005 = 30" in text and "4): 0.45" in text


def test_which_scale_costs_what():
    """The table of MORE.md: shorter blocks and finer scales each lessen the error, and E4M3 costs
    next to nothing against scales that are not rounded.
    """
    rows = {(row.scales, row.block): row for row in four_bit_scales.table(weight_with_an_outlier())}
    text = four_bit_scales.README.read_text(encoding="utf-8")
    for row in rows.values():
        assert four_bit_scales.line(row) in text, four_bit_scales.line(row)
    powers, e4m3, exact = four_bit_scales.KINDS
    for block in four_bit_scales.BLOCKS:
        assert rows[exact, block].error <= rows[e4m3, block].error < rows[powers, block].error
    assert rows[e4m3, 16].error < rows[e4m3, 32].error
    stored = nvfp4.to_nvfp4(weight_with_an_outlier())
    mxfp4 = naive.to_mxfp4(weight_with_an_outlier())
    for weight, row in ((stored, rows[e4m3, 16]), (mxfp4, rows[powers, 32])):
        error = float((weight.dequantize() - weight_with_an_outlier()).norm())
        assert row.error == pytest.approx(error / float(weight_with_an_outlier().norm()), rel=1e-6)
        assert row.bits == pytest.approx(weight.bits_per_weight, abs=1e-3)
