"""SmoothQuant: move the outliers of activations into the weights, which bear it better.

An int8 product has one scale for a whole token, so an outlier channel takes the bits of all
others. For any s > 0 the product is the same:

    x Wᵀ = (x / s) · (W s)ᵀ        s[k] = max |x[:, k]|^α / max |W[:, k]|^(1 − α)

With α = 0 the weights are evened out, with α = 1 the activations, and between them each bears a
part. A norm comes before the matrices, so dividing by s costs nothing: it is folded into the
norm's weight.

Source: Xiao et al. 2022, SmoothQuant, sections 4 (equation 4) and 5.
"""

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.methods.calibration import collect
from lessons.l19_kv_quantization.activations.outliers import fold, norms_of, with_layers
from lessons.toolbox.model.arguments import is_number, refuse


def smoothing_scales(act_max: Tensor, weights: list[Tensor], alpha: float) -> Tensor:
    """s: [K]. act_max: [K], the largest |x| of each channel; weights: [N, K] each, all matrices
    that read x. 1 where a channel is never used.
    """
    weight_max = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    scales = act_max.to(weight_max.dtype) ** alpha / weight_max ** (1 - alpha)
    return torch.where((act_max > 0) & (weight_max > 0), scales, 1.0)


def activation_maxima(model: Decoder, run) -> dict[str, Tensor]:
    """The largest |x| of each channel that each linear layer receives while run() runs: [K] by
    name.
    """
    return {name: found.max_abs for name, found in collect(model, run).items()}


def smoothed(model: Decoder, maxima: dict[str, Tensor], alpha: float) -> Decoder:
    """A twin with the same function whose norms and matrices have taken in s. maxima: from
    `activation_maxima`. Raises ValueError for an alpha outside 0 to 1.

    Only the matrices after norms, as in the paper. o_proj and down_proj read a product of the
    model, into which nothing can be folded so simply.
    """
    if not is_number(alpha, 0, 1):
        refuse("alpha", alpha, "0 to 1")
    names = {id(module): name for name, module in model.named_modules()}
    originals = iter(model.layers)

    def change(layer: nn.Module) -> None:
        for (norm, readers), (_, before) in zip(norms_of(layer), norms_of(next(originals))):
            act_max = maxima[names[id(before[0])]]
            fold(norm, readers, smoothing_scales(act_max, [x.weight for x in readers], alpha))

    return with_layers(model, change)
