"""W8A8: both sides of a product in 8 bits, so that the matrix units multiply twice as fast.

Lesson 18 keeps the activations as they are and saves bytes, which is what a decode step lacks. A
prompt lacks FLOPs. There the activations become codes too, each token with a scale of its own,
found when the token arrives ("dynamic"), or all with one that calibration found beforehand
("static", x_scale). The scales are outside of the sum over k, so they are applied once at its end:

    out[m, n] = x_scale[m] · w_scale[n] · Σ_k x_code[m, k] · w_code[n, k]

Naive: `w8a8_by_numbers`, codes made and undone before an ordinary product. Optimized:
`w8a8_matmul`, codes multiplied as they are: whole numbers added up in int32 without any rounding,
E4M3 in float32.

Source: Xiao et al. 2022, SmoothQuant, section 2 and figure 3 (which scales a product can take).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from lessons.l09_flash_attention.tiles import has_e4m3
from lessons.l18_weight_quantization.naive import to_float8
from lessons.l18_weight_quantization.weights import Float8Weight, QuantizedWeight
from lessons.l19_kv_quantization.formats import FORMATS, wide
from lessons.l19_kv_quantization.optimized import quantize_rows, writes_e4m3
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.model.arguments import refuse


@dataclass(frozen=True)
class Int8Weight(QuantizedWeight):
    """Whole numbers with a sign, as matrix units multiply them: values: [N, K] int8, scales: [N,
    1].
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.values.shape)

    def dequantize(self) -> Tensor:
        return self.values * self.scales


EightBits = Int8Weight | Float8Weight


def to_eight_bits(weight: Tensor, name: str) -> EightBits:
    """weight: [N, K] -> a scale for each output. name: "int8" or "fp8". Raises ValueError."""
    if name == "fp8":
        return to_float8(weight, per="row")
    if name != "int8":
        refuse("name", name, "int8 or fp8")
    codes, scales = FORMATS["int8"].quantize(weight.detach().float())
    return Int8Weight(codes.view(torch.int8), scales)


def quantize_tokens(x: Tensor, name: str, x_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x: [T, K] -> codes: [T, K], int8 or float8_e4m3fn, and the scale of each token: [T, 1]
    float32. x_scale: [1], that of all tokens, found beforehand; what it is too small for saturates.
    """
    dtype = torch.int8 if name == "int8" else torch.float8_e4m3fn
    if x_scale is None:
        codes, scales = FORMATS[name].quantize(wide(x))
        return codes.view(dtype), scales
    scales = x_scale.to(wide(x).dtype).expand(len(x), 1).contiguous()
    numbers = wide(x) / scales
    if name == "int8":
        numbers = numbers.round()
    limits = torch.iinfo(dtype) if name == "int8" else torch.finfo(dtype)
    return numbers.clamp(limits.min, limits.max).to(dtype), scales


def tokens_as_codes(x: Tensor, name: str, x_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """`quantize_tokens` by the kernel, where it finds the scales and writes the format exactly."""
    is_exact = name == "int8" or writes_e4m3(x.device)
    if x_scale is None and is_exact and x.is_cuda:
        return quantize_tokens_by_kernel(x, name)
    return quantize_tokens(x, name, x_scale)


def quantize_tokens_by_kernel(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """`quantize_tokens` in one pass over x, by the kernel that fills the cache."""
    count, width = x.shape
    codes = torch.empty(count, 1, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(count, 1, 1, dtype=torch.float32, device=x.device)
    every = torch.arange(count, device=x.device)
    quantize_rows(FORMATS[name], x[:, None], codes, scales, every)
    dtype = torch.int8 if name == "int8" else torch.float8_e4m3fn
    return codes[:, 0].view(dtype), scales[:, 0]


def format_of(weight: EightBits) -> str:
    """ "int8" or "fp8". Raises ValueError for any other weight, or another granularity than
    rows.
    """
    names = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
    if getattr(weight, "values", None) is None or weight.values.dtype not in names:
        refuse("weight", type(weight).__name__, "Int8Weight, or Float8Weight of E4M3")
    if weight.scales.shape != (weight.shape[0], 1):
        refuse("weight", tuple(weight.scales.shape), f"scales ({weight.shape[0]}, 1)")
    return names[weight.values.dtype]


def w8a8_by_numbers(
    x: Tensor, weight: EightBits, bias: Tensor | None = None, x_scale: Tensor | None = None
) -> Tensor:
    """Naive: x: [T, K] -> [T, N] in x's dtype, by a product of numbers. x_scale: [1], or None for
    each token's own.
    """
    codes, scales = quantize_tokens(x, format_of(weight), x_scale)
    numbers = codes.to(scales.dtype) * scales
    matrix = weight.dequantize().to(scales.dtype)
    out = linear(numbers, matrix, None if bias is None else bias.to(scales.dtype))
    return out.to(x.dtype)


def w8a8_matmul(
    x: Tensor, weight: EightBits, bias: Tensor | None = None, x_scale: Tensor | None = None
) -> Tensor:
    """Optimized: x: [T, K] -> [T, N] in x's dtype, the product taken over codes: by `w8a8_kernel`
    on a GPU that has the format, by PyTorch's int8 product on a CPU.
    """
    name = format_of(weight)
    if x.is_cuda and (name == "int8" or has_e4m3(x.device)):
        codes, scales = tokens_as_codes(x, name, x_scale)
        return scaled_product(codes, scales, weight, bias, x.dtype)
    if name == "fp8":  # no CPU multiplies E4M3: what is left is the naive way
        return w8a8_by_numbers(x, weight, bias, x_scale)
    codes, scales = quantize_tokens(x, name, x_scale)
    sums = torch._int_mm(codes, weight.values.T)  # int32, exact
    out = sums * scales * weight.scales.T
    return (out if bias is None else out + bias).to(x.dtype)


@triton.jit
def w8a8_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    num_tokens,
    num_outputs,
    num_inputs,
    stride_xt,
    stride_wn,
    stride_ot,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_FLOAT: tl.constexpr,
):
    """One program: BLOCK_M tokens by BLOCK_N outputs. The scales come after the sum."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_tokens, column < num_outputs
    x_row = x_ptr + row[:, None].to(tl.int64) * stride_xt
    w_row = w_ptr + column[:, None].to(tl.int64) * stride_wn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if IS_FLOAT else tl.int32)
    for start in range(0, num_inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_row + k, mask=is_row[:, None] & (k < num_inputs), other=0.0)
        w = tl.load(w_row + k, mask=is_column[:, None] & (k < num_inputs), other=0.0)
        if IS_FLOAT:
            # Hopper's matrix units keep 14 bits of a sum of E4M3 products. So the sum of each tile
            # is added to one in float32.
            acc = tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
    x_scale = tl.load(x_scale_ptr + row, mask=is_row, other=0.0)[:, None]
    w_scale = tl.load(w_scale_ptr + column, mask=is_column, other=0.0)[None, :]
    out = acc.to(tl.float32) * x_scale * w_scale
    if bias_ptr is not None:
        out += tl.load(bias_ptr + column, mask=is_column, other=0.0)[None, :].to(tl.float32)
    place = out_ptr + row[:, None].to(tl.int64) * stride_ot + column[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def blocks_of(num_tokens: int) -> dict[str, int]:
    """w8a8_kernel's tiles. Few tokens take few rows, 16 at least, as a matrix unit does."""
    block_m = min(128, max(16, triton.next_power_of_2(num_tokens)))
    return {"BLOCK_M": block_m, "BLOCK_N": 128, "BLOCK_K": 128}


def scaled_product(
    codes: Tensor,
    scales: Tensor,
    weight: EightBits,
    bias: Tensor | None,
    dtype: torch.dtype,
    blocks: dict[str, int] | None = None,
) -> Tensor:
    """codes: [T, K] and scales: [T, 1] float32 of the tokens -> [T, N] of dtype. blocks: None takes
    those of `blocks_of`. Raises ValueError.
    """
    (count, width), (outputs, inputs) = codes.shape, weight.shape
    if width != inputs or codes.dtype != weight.values.dtype:
        refuse(
            "codes",
            f"{codes.dtype} of {width} inputs",
            f"{weight.values.dtype} of {inputs}, the weight's",
        )
    if codes.stride(1) != 1 or weight.values.stride(1) != 1 or not scales.is_contiguous():
        refuse("codes, weight, scales", "other strides", "dense rows")
    out = torch.empty(count, outputs, dtype=dtype, device=codes.device)
    if out.numel():
        blocks = blocks or blocks_of(count)
        grid = triton.cdiv(count, blocks["BLOCK_M"]), triton.cdiv(outputs, blocks["BLOCK_N"])
        w8a8_kernel[grid](
            codes,
            weight.values,
            out,
            scales,
            weight.scales,
            bias,
            count,
            outputs,
            inputs,
            codes.stride(0),
            weight.values.stride(0),
            out.stride(0),
            **blocks,
            IS_FLOAT=format_of(weight) == "fp8",
            num_warps=8 if blocks["BLOCK_M"] >= 64 else 4,
            num_stages=3,
        )
    return out
