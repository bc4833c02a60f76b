"""Quantized experts as the engine runs them on a GPU: their codes stay codes, and a layer is a few
launches.

    model = with_grouped_codes(model)     # layers of experts in MXFP4, in bfloat16
    model = with_grouped_fp8(model)       # experts in FP8 whose checkpoint asks for FP8 inputs
"""

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder, swap
from lessons.l06_mla.gpt_oss import StackedMoE
from lessons.l06_mla.moe import MoE
from lessons.l18_weight_quantization.weights import TILE, Float8Weight, Mxfp4Weight
from lessons.l23_experts.grouped import PROJECTIONS
from lessons.l23_experts.more import fp8
from lessons.l23_experts.more.mxfp4 import GroupedMxfp4, Stack, stack_of
from reference.checkpoints.quantized_experts import QuantizedExperts


def with_grouped_codes(model: Decoder) -> Decoder:
    """A twin whose layers of experts in MXFP4 are lesson 23's; other layers are shared."""
    if model.dtype != torch.bfloat16:
        return model  # the kernel unpacks codes into bfloat16
    return swap(model, {StackedMoE: grouped_where_possible})


def grouped_where_possible(moe: StackedMoE) -> nn.Module:
    """A GroupedMxfp4 of a layer whose experts are in MXFP4, else the layer itself."""
    experts = moe.experts
    if type(experts) is not QuantizedExperts:
        return moe
    if any(type(weight) is not Mxfp4Weight for weight in (*experts.gate_up, *experts.down)):
        return moe
    gate_up = stacked(experts.gate_up, experts.gate_up_proj_bias)
    down = stacked(experts.down, experts.down_proj_bias)
    return GroupedMxfp4(moe.router, gate_up, down)


def stacked(weights: list[Mxfp4Weight], bias: Tensor) -> Stack:
    """The matrices of all experts, [E, N, K], in one stack, of which they become views, so that
    none is held twice. bias: [E, N].
    """
    stack = stack_of(weights, bias)
    weights[:] = [Mxfp4Weight(*parts) for parts in zip(stack.codes, stack.exponents.mT)]
    return stack


def asks_for_fp8_inputs(model: Decoder) -> bool:
    """Whether the checkpoint is DeepSeek's FP8, whose layers round their inputs as they come."""
    said = model.config.quantization_config or {}
    return said.get("quant_method") == "fp8" and said.get("activation_scheme") == "dynamic"


def with_grouped_fp8(model: Decoder) -> Decoder:
    """A twin whose layers of experts in FP8 multiply FP8 by FP8; other layers are shared, and keep
    their inputs in 16 bits. A model whose checkpoint does not ask for it is returned as it is.
    """
    if not asks_for_fp8_inputs(model) or model.dtype not in fp8.DECODE_DTYPES:
        return model
    return swap(model, {MoE: grouped_fp8_where_possible})


def grouped_fp8_where_possible(moe: MoE) -> nn.Module:
    """A GroupedFp8 of a layer whose experts are E4M3 with a scale for each 128 × 128, else the
    layer itself.
    """
    parts = [[getattr(e, name, None) for e in moe.experts] for name in PROJECTIONS]
    if not all(has_tiles(linear) for part in parts for linear in part):
        return moe
    gate, up, down = ([linear.quantized for linear in part] for part in parts)
    stacks = fp8.stack_of(gate, up), fp8.stack_of(down)
    for part, stack, half in zip(parts, (*stacks[:1] * 2, stacks[1]), (0, 1, None)):
        for linear, values, scales in zip(part, *stack):
            if half is not None:
                values, scales = values.chunk(2)[half], scales.chunk(2)[half]
            linear.quantized = Float8Weight(values, scales)  # a view, so that none is held twice
    return fp8.GroupedFp8(moe.gate, moe.shared_experts, *stacks)


def has_tiles(linear: nn.Module | None) -> bool:
    """Whether a layer is E4M3 without a bias, with a scale for each tile."""
    weight = getattr(linear, "quantized", None)
    if type(weight) is not Float8Weight or linear.bias is not None:
        return False
    tiles = tuple(-(-size // TILE) for size in weight.shape)
    return weight.values.dtype == torch.float8_e4m3fn and tuple(weight.scales.shape) == tiles
