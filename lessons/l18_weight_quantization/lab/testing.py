"""What the tests of this lesson's kernels share: matrices of every format, and their definition in
float64.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lessons.l18_weight_quantization.methods.nvfp4 import to_nvfp4
from lessons.l18_weight_quantization.naive import (
    dequantize_matmul,
    round_to_nearest,
    to_float8,
    to_mxfp4,
    to_nf4,
)
from lessons.l18_weight_quantization.weights import (
    E2M1_VALUES,
    NF4_VALUES,
    Float8Weight,
    GroupedInt,
    Mxfp4Weight,
    Nf4Weight,
    Nvfp4Weight,
    QuantizedWeight,
)
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.proof.numerics import draw

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter


def ordered(weight: GroupedInt, seed: int) -> GroupedInt:
    """The same codes with the columns in another order, as GPTQ's act-order leaves them."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    return replace(weight, order=order)


FORMATS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int4, groups of 32": lambda w: round_to_nearest(w, 4, 32, symmetric=True),
    "int4, groups of 128": lambda w: round_to_nearest(w, 4, 128, symmetric=True),
    "int4, zeros": lambda w: round_to_nearest(w, 4, 64),
    "int4, zeros, groups of 16": lambda w: round_to_nearest(w, 4, 16),
    "int4, a scale a row": lambda w: round_to_nearest(w, 4, None),
    "int4, ordered": lambda w: ordered(round_to_nearest(w, 4, 64), 5),
    "int8, a scale a row": lambda w: round_to_nearest(w, 8, None, symmetric=True),
    "int8, zeros": lambda w: round_to_nearest(w, 8, 32),
    "e4m3, a scale a row": lambda w: to_float8(w),
    "e4m3, one scale": lambda w: to_float8(w, per="tensor"),
    "e4m3, tiles": lambda w: to_float8(w, per="block"),
    "e5m2": lambda w: to_float8(w, torch.float8_e5m2),
    "nf4": lambda w: to_nf4(w, double_quantization=False),
    "nf4, double": to_nf4,
    "mxfp4": to_mxfp4,
    "nvfp4": to_nvfp4,
}


def matrix(
    name: str, rows: int, columns: int, seed: int = 0, scale_dtype: torch.dtype | None = None
) -> QuantizedWeight:
    """A quantized matrix, [rows, columns], whose rows differ in size, so that no scale can do for
    another's. scale_dtype: of the scales of whole numbers, because a product that rounds them to
    x's type is proved with scales that it need not round.
    """
    weight = draw("normal", (rows, columns), seed=seed) * torch.linspace(0.1, 2, rows)[:, None]
    weight = FORMATS[name](weight).to(DEVICE)
    if scale_dtype is not None and isinstance(weight, GroupedInt):
        return replace(weight, scales=weight.scales.to(scale_dtype))
    return weight


def numbers(weight: QuantizedWeight) -> Tensor:
    """[N, K] float64: what the codes mean, number by number from the formats' definitions, so that
    nothing is shared with the code under test.
    """
    rows, columns = weight.shape
    found = torch.empty(rows, columns, dtype=torch.float64)
    read = {GroupedInt: whole, Float8Weight: float8, Nf4Weight: nf4, Mxfp4Weight: mxfp4}
    read[Nvfp4Weight] = nvfp4
    for n in range(rows):
        for column, value in enumerate(read[type(weight)](weight.to("cpu"), n)):
            found[n, column if getattr(weight, "order", None) is None else weight.order[column]] = (
                value
            )
    return found.to(weight.tensors().popitem()[1].device)


def whole(weight: GroupedInt, n: int) -> list[float]:
    """Row n of GroupedInt, in the order in which it is stored."""
    codes, scales = weight.codes[n].tolist(), weight.scales[n].double().tolist()
    zeros = [2 ** (weight.bits - 1)] * len(scales)
    if weight.zeros is not None:
        zeros = weight.zeros[n].tolist()
    size, row = weight.group_size, []
    for group, (scale, zero) in enumerate(zip(scales, zeros)):
        for i in range(size):
            if weight.bits == 8:
                code = codes[group * size + i]
            else:
                code = (
                    codes[group * size // 2 + i % (size // 2)] >> (4 if i >= size // 2 else 0) & 15
                )
            row.append((code - zero) * scale)
    return row


def float8(weight: Float8Weight, n: int) -> list[float]:
    values, scales = weight.values[n].double().tolist(), weight.scales.double().tolist()
    tall = len(scales) not in (1, len(weight.values))
    tiled = tall or len(scales[0]) > 1
    row = scales[n // 128 if tiled else n if len(scales) > 1 else 0]
    return [value * row[k // 128 if tiled else 0] for k, value in enumerate(values)]


def nf4(weight: Nf4Weight, n: int) -> list[float]:
    columns, absmax = weight.shape[1], weight.block_absmax().double().tolist()
    row = []
    for i in range(n * columns, (n + 1) * columns):
        code = int(weight.codes[i // 2]) >> (0 if i % 2 else 4) & 15
        row.append(NF4_VALUES[code] * absmax[i // 64])
    return row


def mxfp4(weight: Mxfp4Weight, n: int) -> list[float]:
    codes, exponents = weight.codes[n].tolist(), weight.exponents[n].tolist()
    return [
        E2M1_VALUES[codes[k // 2] >> (4 if k % 2 else 0) & 15] * 2.0 ** (exponents[k // 32] - 127)
        for k in range(weight.shape[1])
    ]


def nvfp4(weight: Nvfp4Weight, n: int) -> list[float]:
    codes, scales = weight.codes[n].tolist(), weight.scales[n].double().tolist()
    whole = weight.tensor_scale.double().item()
    return [
        E2M1_VALUES[codes[k // 2] >> (4 if k % 2 else 0) & 15] * scales[k // 16] * whole
        for k in range(weight.shape[1])
    ]


def problem(weight: QuantizedWeight, multiply: Callable) -> tuple[Callable, Callable, dict]:
    """(fast, plain, tensors) for `prove(fast, plain, (x, tensors, bias))`: the product as a
    function of x: [M, K], the tensors that the matrix consists of, and a bias.

    fast: `multiply`. plain: in float64 the sum of products of `numbers`, which are exact; in other
    types `dequantize_matmul`.
    """
    exact = numbers(weight)

    def fast(x: Tensor, tensors: dict, bias: Tensor | None) -> Tensor:
        return multiply(x, replace(weight, **tensors), bias)

    def plain(x: Tensor, tensors: dict, bias: Tensor | None) -> Tensor:
        if x.dtype != torch.float64:
            return dequantize_matmul(x, weight, bias)
        return x @ exact.T + (0 if bias is None else bias)

    return fast, plain, weight.tensors()
