"""How llama.cpp chooses scales: it tries some twenty and keeps the best.

Rounding to the nearest code is the easy half of quantization. The choice is the scale. The largest
value does not have to become the largest code: a slightly smaller scale clips one value and serves
all others better. So the K formats try some twenty scales for each sub-block, round with each, fit
scale and minimum to the codes by least squares, and keep what has the smallest weighted error.
Large values weigh more: without activations at hand, nothing better is known about what matters.

Every product, sum and quotient is rounded where llama.cpp's C rounds it, so the results are those
of its functions, bit for bit, if they are compiled without fused multiply-add.

Source: ggml-quants.c of llama.cpp (make_qkx2_quants, make_qx_quants, make_q3_quants), as it
quantizes without an importance matrix.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NOTHING = 1e-15  # sub-blocks whose values are all smaller get the scale 0


class Fit(NamedTuple):
    """What a search found for sub-blocks of n values: value ≈ scale · code − minimum. scale,
    minimum: [...] float32; codes: [..., n] float32, whole.
    """

    scale: Tensor
    minimum: Tensor
    codes: Tensor


def fit_with_minimum(
    values: Tensor, weights: Tensor, top: int, first: float, count: int, error: Callable
) -> Fit:
    """The best scale and minimum of each sub-block, codes 0 to `top`. values, weights: [..., n].

    The starting point maps the lowest value to 0 and the highest to `top`. Then `count` candidates
    map the best minimum so far to 0 and the highest value to top + first, and each next one 0.1
    further. The minimum is at most 0, so 0 itself has a code in a sub-block of positive values.
    error: of a difference, |x| or x².
    """
    low, high = values.amin(-1).clamp(max=0), values.amax(-1)
    is_flat = high <= low  # all of them the same, and not positive: the minimum says it all
    sum_w, sum_x = in_order_sum(weights), in_order_sum(weights * values)

    def codes_at(highest: Tensor, low: Tensor) -> Tensor:
        inverse_scale = highest / torch.where(is_flat, 1, high - low)
        scaled = inverse_scale[..., None] * (values - low[..., None])
        return scaled.round().clamp(0, top)

    def error_of(scale: Tensor, minimum: Tensor, codes: Tensor) -> Tensor:
        difference = scale[..., None] * codes + minimum[..., None] - values
        return in_order_sum(weights * error(difference))

    width = torch.where(is_flat, 1, high - low)
    best = Fit(1 / ratio(top, width), low, codes_at(torch.tensor(float(top)), low))
    best_error = error_of(*best)
    for highest in steps(count) + first + top:
        codes = codes_at(highest, best.minimum)
        sum_l, sum_ll = in_order_sum(weights * codes), in_order_sum(weights * codes * codes)
        sum_xl = in_order_sum(weights * codes * values)
        # the normal equations of least squares, for scale and minimum
        determinant = sum_w * sum_ll - sum_l * sum_l
        solvable = determinant > 0
        divisor = torch.where(solvable, determinant, 1)
        scale = (sum_w * sum_xl - sum_x * sum_l) / divisor
        minimum = (sum_ll * sum_x - sum_l * sum_xl) / divisor
        # a minimum above 0 is not allowed, so the best scale without one
        scale = torch.where(minimum > 0, sum_xl / sum_ll, scale)
        minimum = minimum.clamp(max=0)
        candidate_error = error_of(scale, minimum, codes)
        better = solvable & (candidate_error < best_error)
        best_error = torch.where(better, candidate_error, best_error)
        best = _choose(better, Fit(scale, minimum, codes), best)
    flat = Fit(torch.zeros_like(low), low, torch.zeros_like(values))
    found = _choose(is_flat, flat, best)
    return found._replace(minimum=-found.minimum)


def fit_symmetric(values: Tensor, levels: int) -> Fit:
    """The best scale of each sub-block for codes −levels to levels − 1, and minimum 0. values:
    [..., n].

    Candidates map the value with the largest magnitude to −levels · (1 ± 0.1 · step / levels). With
    the scale fitted to the codes, the weighted error Σ w (x − scale · q)² is Σ w x² − (Σ w x q)² /
    Σ w q², so the candidate with the largest quotient is the best. Values weigh as their squares.
    """
    weights = values * values
    extreme = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    is_nothing = extreme.abs() < NOTHING
    extreme = torch.where(is_nothing, 1, extreme)
    best, best_gain = None, None
    for lowest in -(torch.cat([steps(1), steps(-9, 0), steps(1, 10)]) + levels):
        codes = (lowest / extreme * values).round().clamp(-levels, levels - 1)
        sum_xl = in_order_sum(weights * values * codes)
        sum_ll = in_order_sum(weights * codes * codes)
        scale = torch.where(sum_ll > 0, sum_xl / sum_ll, 0)
        candidate = Fit(scale, torch.zeros_like(scale), codes)
        if best is None:
            best, best_gain = candidate, scale * sum_xl
            continue
        better = (sum_ll > 0) & (sum_xl * sum_xl > best_gain * sum_ll)
        best = _choose(better, candidate, best)
        best_gain = torch.where(better, scale * sum_xl, best_gain)
    nothing = Fit(torch.zeros_like(best.scale), best.minimum, torch.full_like(values, -levels))
    return _choose(is_nothing[..., 0], nothing, best)


def fit_one_by_one(values: Tensor, levels: int) -> Fit:
    """As `fit_symmetric`, by coordinate descent: from the plain rounding, each code in turn becomes
    the best one for the scale that the others want, in five rounds. values: [..., n].
    """
    weights = values * values
    extreme = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    is_nothing = extreme.abs() < NOTHING
    inverse = torch.where(is_nothing, 0, ratio(-levels, extreme))
    codes = (inverse * values).round().clamp(-levels, levels - 1)
    sum_xl, sum_ll = in_order_sum(weights * values * codes), in_order_sum(weights * codes * codes)
    for _ in range(5):
        for at in range(values.shape[-1]):
            x, w, code = values[..., at], weights[..., at], codes[..., at]
            others_xl, others_ll = sum_xl - w * x * code, sum_ll - w * code * code
            wanted = (x * others_ll / others_xl).nan_to_num(0).round().clamp(-levels, levels - 1)
            new_xl, new_ll = others_xl + w * x * wanted, others_ll + w * wanted * wanted
            gains = new_xl * new_xl * sum_ll > sum_xl * sum_xl * new_ll
            changes = (others_xl > 0) & (wanted != code) & (new_ll > 0) & gains
            codes[..., at] = torch.where(changes, wanted, code)
            sum_xl = torch.where(changes, new_xl, sum_xl)
            sum_ll = torch.where(changes, new_ll, sum_ll)
    scale = torch.where(sum_ll > 0, sum_xl / sum_ll, 0)
    codes = torch.where(is_nothing, -levels, codes)
    return Fit(scale, torch.zeros_like(scale), codes)


def _choose(which: Tensor, one: Fit, other: Fit) -> Fit:
    """`one` in the sub-blocks where `which` [...] is true."""
    codes = torch.where(which[..., None], one.codes, other.codes)
    scale = torch.where(which, one.scale, other.scale)
    return Fit(scale, torch.where(which, one.minimum, other.minimum), codes)


def half_flat(parts: Tensor) -> Tensor:
    """What an error at each value costs: its magnitude, plus the sub-block's root mean square.
    parts: [..., n] -> [..., n].
    """
    # in float64, because PyTorch's float32 root may be off by a rounding
    root = (in_order_sum(parts.square()) / parts.shape[-1]).double().sqrt().float()
    return root[..., None] + parts.abs()


# ---------------------------------------------------------------- C's arithmetic


def ratio(number: float, d: Tensor) -> Tensor:
    """number / d, rounded once, because PyTorch computes a number over a tensor as 1 / d · number.
    d: [...] -> [...].
    """
    return torch.tensor(number, dtype=d.dtype, device=d.device) / d


def steps(*limits: int) -> Tensor:
    """Whole numbers as `range` gives them, times 0.1, in float32 as in C. -> [count]."""
    return torch.tensor(range(*limits), dtype=torch.float32) * 0.1


def in_order_sum(terms: Tensor) -> Tensor:
    """[..., n] -> [...], added from the first to the last as C does, because another order rounds
    differently, and then another candidate may win.
    """
    total, *rest = terms.movedim(-1, 0).contiguous()
    for term in rest:
        total = total + term
    return total
