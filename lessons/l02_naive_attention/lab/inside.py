"""A look into a real model: each tensor of its first layer, the weights of every head, and two
heads drawn.

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
def first_layer(model: Decoder, prompt: list[int]) -> list[tuple[str, Tensor]]:
    """What each line of layer 0 makes of a prompt of T token ids, in the order of the code:
    [(its name, [T, …] or, for scores and weights, [Hq, T, T])].
    """
    layer, places = model.layers[0], torch.arange(len(prompt))
    rotate, scale = rotation(model.config, places, model.dtype), model.config.softmax_scale
    qkv = {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qkv.update(q=q, k=k, v=v)
        return attention(rotate(q), rotate(k), v, scale)

    x = model.embed_tokens(torch.tensor(prompt))
    normed = layer.input_layernorm(x)
    mixed = layer.self_attn(normed, attend)
    keys = rotate(qkv["k"]).repeat_interleave(qkv["q"].shape[1] // qkv["k"].shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", rotate(qkv["q"]), keys) * scale
    weights = masked_softmax(scores, causal_mask(len(prompt), len(prompt)))
    middle = x + mixed
    normed_again = layer.post_attention_layernorm(middle)
    widened = layer.mlp(normed_again)
    return [
        ("x = embedding", x),
        ("norm(x)", normed),
        *qkv.items(),
        ("q, rotated", rotate(qkv["q"])),
        ("scores", scores),
        ("weights", weights),
        ("attention(norm(x))", mixed),
        ("x + attention", middle),
        ("norm of that", normed_again),
        ("MLP", widened),
        ("x + attention + MLP", middle + widened),
    ]


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
