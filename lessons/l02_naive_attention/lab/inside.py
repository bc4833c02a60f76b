"""A look into the heads of a real model: the weights of every head, and two heads drawn.

The decoder calls `attend(layer, q, k, v)` and knows nothing else. So the author of `attend` sees
everything: the one below keeps what it computed.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention, causal_mask, masked_softmax
from lessons.l02_naive_attention.rope import rotation
from lessons.toolbox.draw.figure import ClassFigure
from lessons.toolbox.draw.plotting import mask_image


@torch.inference_mode()
def weights_of(model: Decoder, prompt: list[int]) -> Tensor:
    """What each query of each head looks at. prompt: T token ids -> [L, Hq, T, T], rows sum to
    1.
    """
    rotate, seen = rotation(model.config, torch.arange(len(prompt)), model.dtype), []
    sees = causal_mask(len(prompt), len(prompt))
    scale = model.config.softmax_scale

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = rotate(q), rotate(k)
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        seen.append(masked_softmax(torch.einsum("qhd,khd->hqk", q, keys) * scale, sees))
        return attention(q, k, v, scale)

    model(torch.tensor(prompt), attend)
    return torch.stack(seen)


def one_back(weights: Tensor) -> tuple[int, int, float]:
    """The head that looks most at the token before. weights: [L, Hq, T, T] -> layer, head,
    share.
    """
    before = weights.diagonal(-1, dim1=-2, dim2=-1).mean(-1)
    layer, head = divmod(int(before.argmax()), weights.shape[1])
    return layer, head, float(before.max())


def most_spread(weights: Tensor) -> tuple[int, int]:
    """The head whose weights have the largest entropy. weights: [L, Hq, T, T] -> layer, head."""
    spread = torch.special.entr(weights).sum(-1).mean(-1)
    return divmod(int(spread.argmax()), weights.shape[1])


def draw_head(weights: Tensor, layer: int, head: int, names: list[str], title: str) -> ClassFigure:
    """One head as an image, dark where the weight is large. weights: [L, Hq, T, T]; names: T
    tokens.
    """
    return mask_image(
        weights[layer, head].numpy(),
        row_labels=names,
        col_labels=names,
        title=title,
        caption="models/tiny · weights of one head, each row sums to 1, dark = more",
    )
