"""Attention whose scores follow a rule of the model's own, in PyTorch, for every cache of the
course.

- A soft cap (Gemma 2): a score s becomes cap · tanh(s / cap). Small ones stay, none passes the cap.
- Sinks (gpt-oss): each head has one more score, learnt and the same for every query, whose key has
  no value. It takes its share of the softmax, so a head may attend to nothing.

The kernels of the course know neither, so a model that asks for one never meets them:
`attention_for` puts this function in the place of theirs.

Sources: Gemma 2 (2024), section 2, "Logit soft-capping"; gpt-oss model card (2025), section 2.2;
Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lessons.toolbox.model.config import ModelConfig


def ruled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    window: int | None = None,
    *,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The last Tq tokens of a sequence over all of it, causal. q: [Tq, Hq, D]; k: [Tk, Hkv, D]; v:
    [Tk, Hkv, Dv]; sinks: [Hq] -> [Tq, Hq, Dv].
    """
    position = torch.arange(len(k), device=q.device)
    distance = position[len(k) - len(q) :, None] - position  # [Tq, Tk]
    sees = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if cap is not None:
        # before the mask, because tanh would make -cap of what is masked
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], dim=-1)  # [Hq, Tq, Tk + 1]
    probs = scores.softmax(-1)[..., : len(k)].to(v.dtype)
    return torch.einsum("hqk,khd->qhd", probs, v)


def attention_for(config: ModelConfig, attention: Callable, sinks: Tensor | None) -> Callable:
    """attention(q, k, v, softmax_scale, window=…), or the one above if the model has a rule. sinks:
    a layer's, [Hq].
    """
    if not config.has_score_rules:
        return attention
    return partial(ruled_attention, cap=config.attn_logit_softcapping, sinks=sinks)


def sinks_of(model: nn.Module) -> list[Tensor | None]:
    """Of each layer the sinks: [Hq], or None in a model without them and for layers that are not
    here.
    """
    sinks: list[Tensor | None] = [None] * model.config.num_hidden_layers
    if model.config.attention_sinks:
        for index in model.stage_layers:
            sinks[index] = model.layers[index].self_attn.sinks
    return sinks
