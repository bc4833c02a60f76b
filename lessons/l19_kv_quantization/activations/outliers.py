"""Outliers: how large the largest channel is beside the others, and models that have some on
request.

Both changes below leave the model's function exactly as it was: what one matrix multiplies, the
next one divides by. Only what is between the two matrices gets outlier channels, as in models of 7B
parameters and more, whose outlier channels training has made.

Sources: Dettmers et al. 2022, LLM.int8(), section 4 (outliers in activations); Liu et al. 2024,
KIVI, section 3.1 (in K).
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.toolbox.model.arguments import refuse

Change = Callable[[nn.Module], None]  # changes a copied decoder layer in place


def channel_ratio(largest: Tensor) -> float:
    """The largest channel over the one in the middle. largest: [..., channels], the largest
    magnitude of each.
    """
    return float((largest.amax(-1) / largest.median(-1).values).max())


def with_layers(model: Decoder, change: Change) -> Decoder:
    """A twin whose layers are copies that `change` has changed; everything else is shared."""
    twin = copy.copy(model)
    layers = nn.ModuleList(copy.deepcopy(layer) for layer in model.layers)
    with torch.no_grad():
        for layer in layers:
            change(layer)
    twin._modules = {**model._modules, "layers": layers}
    return twin


def with_loud_activations(model: Decoder, channels: list[int], factor: float) -> Decoder:
    """Multiply these channels after both norms of each layer, and divide the matrices that read
    them. The opposite of smoothquant.py.
    """

    def change(layer: nn.Module) -> None:
        for norm, readers in norms_of(layer):
            scales = torch.ones_like(norm.weight)
            scales[channels] = factor
            fold(norm, readers, 1 / scales)

    return with_layers(model, change)


def with_loud_keys(model: Decoder, channels: list[int], factor: float) -> Decoder:
    """Multiply these channels of every K head, and divide the same of the query heads. A channel
    comes with its partner half a head away, because RoPE turns the two together.
    """
    config = model.config
    half = config.head_dim // 2
    if config.mla is not None or config.qk_norm or not all(0 <= c < half for c in channels):
        refuse(
            "channels", channels, f"0 to {half - 1}, in a model of heads without norms of q and k"
        )
    scales = torch.ones(config.head_dim, dtype=model.dtype, device=model.device)
    scales[[*channels, *(c + half for c in channels)]] = factor

    def change(layer: nn.Module) -> None:
        attention = layer.self_attn
        for linear, by in ((attention.k_proj, scales), (attention.q_proj, 1 / scales)):
            rows = by.repeat(linear.out_features // len(by))
            linear.weight.mul_(rows[:, None])
            if linear.bias is not None:
                linear.bias.mul_(rows)

    return with_layers(model, change)


def norms_of(layer: nn.Module) -> list[tuple[nn.Module, list[nn.Linear]]]:
    """Each norm of a decoder layer with the matrices that read its output."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        (layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]),
        (layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]),
    ]


def fold(norm: nn.Module, readers: list[nn.Linear], scales: Tensor) -> None:
    """Divide the output of a norm by scales: [K], and multiply the columns of its readers by
    them.
    """
    norm.weight.div_(scales)
    for linear in readers:
        linear.weight.mul_(scales)
