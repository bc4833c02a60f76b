"""AWQ: protect the columns that meet large inputs, by scaling them up before they are rounded.

A column of W that always meets large inputs matters more than the others, but giving it more bits
would make the format irregular. So it is multiplied by s > 1, and its input is divided by s:

    (W · diag(s)) · (diag(s)⁻¹ · x) = W · x

Nothing changes until W · diag(s) is rounded. Then the error of column k, about half a step of its
group, is divided by s[k] on its way to the output. The price is paid by its neighbours when the
group's step grows, so s is searched: s = mean|x|^α, with α from 0 (round to nearest) to 0.95.
Dividing the input costs nothing at run time, because 1/s is folded into what comes before: into the
norm's weight, or into the rows of the matrix before.

Source: Lin et al. 2023, AWQ, section 3.2 and equations 4 and 5; its clipping is in the published
code.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Attention, Decoder, DecoderLayer, RMSNorm
from lessons.l02_naive_attention.variants.gemma import GemmaRMSNorm
from lessons.l18_weight_quantization.linear import Multiply, quantized
from lessons.l18_weight_quantization.methods.calibration import (
    InputStatistics,
    layer_by_layer,
    output_error,
)
from lessons.l18_weight_quantization.naive import check_groups, dequantize_matmul, round_to_nearest
from lessons.l18_weight_quantization.weights import GroupedInt

ALPHAS = tuple(step / 20 for step in range(20))  # as in the published code
SHRINKS = tuple(1 - step / 20 for step in range(10))  # of a group's largest weight: 1 … 0.55


class Fold(NamedTuple):
    """Linear layers that share one input, and what that input comes from. Names within a layer."""

    before: str  # a norm or a linear layer
    after: tuple[str, ...]


FOLDS = (
    Fold("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Fold("self_attn.v_proj", ("self_attn.o_proj",)),
    Fold("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    Fold("mlp.up_proj", ("mlp.down_proj",)),
)


def awq(
    model: Decoder,
    windows: Tensor,
    bits: int = 4,
    group_size: int | None = 128,
    symmetric: bool = False,
    multiply: Multiply = dequantize_matmul,
) -> Decoder:
    """A twin of the model, the linear layers of its decoder layers quantized one layer after the
    other; norms and matrices before them hold the folded scales.

    windows: [count, length] int64, the calibration tokens. bits, group_size, symmetric: as in
    `round_to_nearest`. Layers of other kinds than FOLDS (experts, latent attention) are clipped and
    rounded without scales.
    """

    def replace(layer: nn.Module, statistics: dict[str, InputStatistics]) -> nn.Module:
        grams = {name: found.gram for name, found in statistics.items()}
        layer = copy.deepcopy(layer)
        for fold in folds_of(layer):
            parts = [layer.get_submodule(name) for name in fold.after]
            found = statistics[fold.after[0]]
            repeats = repeats_of(layer, fold)
            scales = search(
                [part.weight for part in parts],
                grams[fold.after[0]],
                shared(found.mean_abs, repeats),
                bits,
                group_size,
                symmetric,
            )
            fold_scales(layer.get_submodule(fold.before), parts, scales, repeats)
            for name in fold.after:
                grams[name] = grams[name] / torch.outer(scales, scales).to(found.gram.dtype)

        def quantize(name: str, linear: nn.Linear) -> GroupedInt:
            weight = clipped(linear.weight, grams[name], bits, group_size, symmetric)
            return round_to_nearest(weight, bits, group_size, symmetric)

        return quantized(layer, quantize, multiply)

    return layer_by_layer(model, windows, replace)


# ---------------------------------------------------------------- scales


def search(
    weights: list[Tensor],
    gram: Tensor,
    mean_abs: Tensor,
    bits: int,
    group_size: int | None,
    symmetric: bool = False,
) -> Tensor:
    """The scales that change the outputs least, [K] float32. weights: [N, K] each, all of which
    read this input; gram: [K, K], mean_abs: [K], of that input.
    """

    def error(scales: Tensor) -> float:
        changes = [
            round_to_nearest(weight * scales, bits, group_size, symmetric).dequantize() / scales
            - weight.float()
            for weight in weights
        ]
        return float(output_error(torch.cat(changes), gram))

    return min((scales_for(mean_abs, alpha) for alpha in ALPHAS), key=error)


def scales_for(mean_abs: Tensor, alpha: float) -> Tensor:
    """mean|x|^α: [K] float32, spread around 1, so that folding keeps the size of what comes before.
    An input that never came gets the smallest scale that another one has.
    """
    seen = mean_abs[mean_abs > 0]
    if not len(seen):
        return torch.ones_like(mean_abs)
    scales = mean_abs.clamp(min=seen.min()) ** alpha
    return scales / (scales.max() * scales.min()).sqrt()


def shared(mean_abs: Tensor, repeats: tuple[int, int]) -> Tensor:
    """mean_abs: [K] of an input whose heads are copies of fewer heads: the mean over the copies, in
    the place of each. repeats: (copies of a head, size of a head).
    """
    copies, size = repeats
    heads = mean_abs.view(-1, copies, size)
    return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)


# ---------------------------------------------------------------- folding


def folds_of(layer: nn.Module) -> Iterator[Fold]:
    """Those of FOLDS that this layer has. Only parts whose output reaches nothing but `after`, and
    reaches it in proportion, may be scaled.
    """
    if not isinstance(layer, DecoderLayer) or not isinstance(layer.self_attn, Attention):
        return
    for fold in FOLDS:
        try:
            before, *after = (layer.get_submodule(name) for name in (fold.before, *fold.after))
        except AttributeError:  # experts in place of an MLP
            continue
        foldable = isinstance(before, RMSNorm) or type(before) is nn.Linear
        if foldable and all(type(part) is nn.Linear for part in after):
            yield fold


def repeats_of(layer: DecoderLayer, fold: Fold) -> tuple[int, int]:
    """(copies, size): each run of `size` outputs of `before` is `copies` times in the input of
    `after`. With GQA a head of v serves a group of query heads.
    """
    if fold.before != "self_attn.v_proj":
        return 1, 1
    size = layer.self_attn.head_dim
    return layer.self_attn.o_proj.in_features // layer.self_attn.v_proj.out_features, size


@torch.no_grad()
def fold_scales(
    before: nn.Module, after: list[nn.Linear], scales: Tensor, repeats: tuple[int, int] = (1, 1)
) -> None:
    """Multiply the columns of `after` by scales, [K], and divide what comes before by them, in
    place. The outputs of `after` stay what they were, up to rounding.
    """
    for linear in after:
        linear.weight *= scales.to(linear.weight.dtype)
    copies, size = repeats
    once = scales.view(-1, copies, size)[:, 0].reshape(-1)  # [outputs of before]
    if isinstance(before, GemmaRMSNorm):  # it stores the difference from 1
        before.weight.copy_((1 + before.weight.float()) / once - 1)
    elif isinstance(before, RMSNorm):
        before.weight /= once.to(before.weight.dtype)
    else:
        before.weight /= once[:, None].to(before.weight.dtype)
        if before.bias is not None:
            before.bias /= once.to(before.bias.dtype)


# ---------------------------------------------------------------- clipping


def clipped(
    weight: Tensor, gram: Tensor, bits: int, group_size: int | None, symmetric: bool = False
) -> Tensor:
    """weight: [N, K], its largest values cut where that changes the output least: each group of
    each row chooses one of SHRINKS. A cut value is wrong by more, and all others get a finer step.

    The error of a group is judged alone, as if other groups had none.
    """
    size = check_groups(weight, bits, group_size)
    groups = weight.detach().float().unflatten(1, (-1, size))  # [N, groups, size]
    blocks = gram.unflatten(0, (-1, size)).unflatten(2, (-1, size))
    blocks = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).float()  # [groups, size, size]
    largest = groups.abs().amax(-1, keepdim=True)
    best, least = groups, torch.full_like(largest, torch.inf)
    for shrink in SHRINKS:
        cut = groups.clamp(-shrink * largest, shrink * largest)
        rounded = round_to_nearest(cut.flatten(1), bits, size, symmetric).dequantize()
        change = rounded.view_as(groups) - groups
        error = (torch.einsum("ngi,gij->ngj", change, blocks) * change).sum(-1, keepdim=True)
        best = torch.where(error < least, cut, best)
        least = torch.minimum(error, least)
    return best.flatten(1)
