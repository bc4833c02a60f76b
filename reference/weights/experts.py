"""gpt-oss' experts as the engine runs them on a GPU: their codes stay codes, and a layer is three
launches.

    model = with_grouped_codes(model)     # layers of experts in MXFP4, in bfloat16
"""

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder, swap
from lessons.l06_mla.gpt_oss import StackedMoE
from lessons.l18_weight_quantization.weights import Mxfp4Weight
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
    weights[:] = [Mxfp4Weight(*parts) for parts in zip(stack.codes, stack.exponents)]
    return stack
