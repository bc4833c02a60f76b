"""Sums of 8-bit products as Hopper makes them: beside whole numbers and fractions, one sum at a
time.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch

from lessons.toolbox.gpu.instructions.tensor_cores import product_in_14_bits
from lessons.toolbox.gpu.ptx import Instruction, Line
from lessons.toolbox.profile.replay import CONSTANTS, cost_of

FORMATS = {"e4m3": (torch.float8_e4m3fn, -6), "e5m2": (torch.float8_e5m2, -14)}


def exponent(x: float, smallest: int) -> int:
    """e of 1.… · 2^e; subnormal numbers have the smallest."""
    return max(int(np.frexp(x)[1]) - 1, smallest)


def truncated(x: Fraction, unit: Fraction) -> Fraction:
    """Towards zero, to a multiple of a unit."""
    whole = abs(x) // unit * unit
    return whole if x >= 0 else -whole


def one_sum(a, b, c: float, types) -> float:
    """What product_in_14_bits says of a row of a and a column of b, with exact numbers."""
    smallest = [FORMATS[type_][1] for type_ in types]
    terms = [(Fraction(x) * Fraction(y), exponent(x, smallest[0]) + exponent(y, smallest[1]))
             for x, y in zip(a, b) if x and y]  # fmt: skip
    if c:
        terms.append((Fraction(c), exponent(c, -126)))
    if not terms:
        return 0.0
    unit = Fraction(2) ** (max(e for _, e in terms) - 13)
    total = sum(truncated(term, unit) for term, _ in terms)
    return float(truncated(total, Fraction(2) ** (exponent(float(total), -126) - 13)))


@pytest.mark.parametrize("types", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2")])
@pytest.mark.parametrize("spread", [0.5, 6])  # of the exponents: sums of like, of very unlike terms
@pytest.mark.parametrize("middle", [0, -8, -15])  # of them: below are the subnormal numbers
def test_a_sum_of_8_bit_products(types, spread, middle, seed):
    """Random codes, zeros and subnormal numbers among them, added to something and to nothing."""
    draw = np.random.default_rng(seed)

    def codes(shape, type_):
        x = draw.standard_normal(shape) * 2.0 ** (middle + draw.standard_normal(shape) * spread)
        x[draw.random(shape) < 0.1] = 0
        return torch.tensor(x).clamp(-448, 448).to(FORMATS[type_][0]).float().numpy()

    a, b = codes((2, 5, 32), types[0]), codes((2, 32, 3), types[1])
    c = (draw.standard_normal((2, 5, 3)) * 10.0 ** draw.integers(-13, 4, (2, 5, 3))).astype("f4")
    for start in (c, np.zeros_like(c)):
        found = product_in_14_bits(a, b, start, types)
        for g, m, n in np.ndindex(*found.shape):
            want = one_sum(a[g, m].tolist(), b[g, :, n].tolist(), float(start[g, m, n]), types)
            assert found[g, m, n] == want, (g, m, n)


def test_what_is_lost_beside_a_large_term():
    """DeepSeek-V3's example in small: 2^-14 of the largest term is lost each time, and so is any
    number of such terms.
    """
    a, b = np.ones((1, 1, 32), "f4"), np.full((1, 32, 1), 2.0**-6, "f4")
    large = np.full((1, 1, 1), 2.0**8, "f4")
    assert product_in_14_bits(a, b, large, ("e4m3", "e4m3")) == 2.0**8
    assert product_in_14_bits(a, b, large / 2, ("e4m3", "e4m3")) == 2.0**7 + 32 * 2.0**-6
    assert product_in_14_bits(a * 0, b, large * 0, ("e4m3", "e4m3")) == 0


def test_8_bits_have_twice_the_rate_and_tf32_half():
    """In the replay's clocks of one product."""

    def busy(depth: int, type_: str) -> float:
        text = f"wgmma.mma_async.sync.aligned.m64n128k{depth}.f32.{type_}.{type_}"
        op, *modifiers = text.split(".")
        instruction = Instruction(op, tuple(modifiers), (), None, False, Line(), text)
        return cost_of(instruction, {"passes": 0.0}, 90, CONSTANTS).busy

    assert busy(32, "e4m3") == busy(16, "bf16") == busy(8, "tf32")
