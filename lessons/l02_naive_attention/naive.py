"""Attention in three steps of the same mathematics, and the textbook generation loop: every step
runs the whole sequence again.

Read `attention_loops`, then `attention_per_head`, then `attention`, then `generate`.

Source: Attention Is All You Need (Vaswani et al. 2017, section 3.2.1); GQA (Ainslie et al. 2023,
section 2.2); sliding window (Mistral 7B, Jiang et al. 2023, section 2).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l02_naive_attention.request import (
    OnToken,
    check_all_attend,
    check_call,
    read_requests,
    take_next_tokens,
)
from lessons.l02_naive_attention.rope import rotation
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l02_naive_attention.variants.score_rules import attention_for, sinks_of


def causal_mask(
    num_queries: int, num_keys: int, window: int | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Which key each query sees: [Tq, Tk] bool, True = sees. Bottom-right aligned; a window counts
    the query itself.
    """
    # The last query belongs to the last key: fewer queries than keys means that the first keys came
    # from earlier calls.
    query = torch.arange(num_queries, device=device)[:, None] + num_keys - num_queries
    key = torch.arange(num_keys, device=device)[None, :]
    sees = key <= query
    return sees if window is None else sees & (key > query - window)


def attention_loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """One number at a time: for each head, each query, each key. Shapes and masks as in
    `attention`.
    """
    scale, sees = check_inputs(q, k, v, softmax_scale, causal, window)
    # wide, because a sum of thousands in bfloat16 stops growing
    out = q.new_zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]  # how many query heads share a KV head
    for head in range(q.shape[1]):
        for i in range(len(q)):
            scores = {
                j: float(q[i, head] @ k[j, head // group]) * scale
                for j in range(len(k))
                if sees[i, j]
            }
            # exp(score - top) <= 1: without it exp overflows
            top = max(scores.values(), default=0.0)
            weights = {j: math.exp(score - top) for j, score in scores.items()}
            total = sum(weights.values())
            for j, weight in weights.items():
                out[i, head] += weight / total * v[j, head // group]
    return out.to(q.dtype)


def attention_per_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """One head at a time, each in two matrix products. Shapes and masks as in `attention`."""
    scale, sees = check_inputs(q, k, v, softmax_scale, causal, window)
    group = q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * scale  # [Tq, Tk]
        heads.append(masked_softmax(scores, sees) @ v[:, head // group])  # [Tq, D]
    return torch.stack(heads, dim=1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """softmax(q kᵀ · softmax_scale + mask) v for all heads at once. q: [Tq, Hq, D]; k, v: [Tk, Hkv,
    D] -> [Tq, Hq, D].

    v may have heads of another width (lesson 6), which is then the output's: [Tk, Hkv, Dv] -> [Tq,
    Hq, Dv]. softmax_scale: 1 / √D unless given. causal: bottom-right aligned. window: a query sees
    that many keys, itself included. A query that sees no key gets zeros. Every [Hq, Tq, Tk]
    intermediate exists in memory: that is what lesson 9 removes. Raises ValueError for shapes that
    do not fit together.
    """
    scale, sees = check_inputs(q, k, v, softmax_scale, causal, window)
    group = q.shape[1] // k.shape[1]
    # heads 0 … group-1 read KV head 0
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", masked_softmax(scores, sees), v)


def masked_softmax(scores: Tensor, sees: Tensor) -> Tensor:
    """Softmax over the keys that a query sees, in float32 at least. scores: [..., Tq, Tk], sees:
    [Tq, Tk] -> like scores.
    """
    wide = scores if scores.dtype == torch.float64 else scores.float()
    probs = torch.softmax(wide.masked_fill(~sees, -torch.inf), dim=-1)
    # Masked again, because a query that sees nothing divides 0 by 0 (and a NaN among the scores
    # must stay visible).
    return probs.masked_fill(~sees, 0).to(scores.dtype)


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, window: int | None
) -> tuple[float, Tensor]:
    """The scale and the mask [Tq, Tk] to use, once the shapes are known to fit. Raises
    ValueError.
    """
    check_shapes(q, k, v, causal, window)
    sees = (
        causal_mask(len(q), len(k), window, q.device)
        if causal
        else q.new_ones(len(q), len(k), dtype=torch.bool)
    )
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, sees


def check_shapes(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> None:
    """Raise ValueError unless q: [Tq, Hq, D], k: [Tk, Hkv, D], v: [Tk, Hkv, Dv], Hq a multiple of
    Hkv, one dtype and device.
    """
    got = ", ".join(
        f"{name} {tuple(x.shape)} {x.dtype} {x.device}"
        for name, x in (("q", q), ("k", k), ("v", v))
    )
    if (
        {q.ndim, k.ndim, v.ndim} != {3}
        or k.shape[:2] != v.shape[:2]
        or q.shape[2] != k.shape[2]
        or q.shape[1] % k.shape[1]
    ):
        raise ValueError(
            f"q, k, v: got {got}; accepted: [Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv] with Hq a "
            f"multiple of Hkv"
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1 or len({q.device, k.device, v.device}) > 1:
        raise ValueError(f"q, k, v: got {got}; accepted: one dtype and one device for all three")
    if window is not None and (window < 1 or not causal):
        raise ValueError(
            f"window: got {window} with causal={causal}; accepted: None, or 1 or more with "
            f"causal=True"
        )


# ---------------------------------------------------------------- generation


def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """The generated token ids of each prompt (prompt excluded, a stop token included), one prompt
    after the other.

    max_new_tokens: for all prompts, or one per prompt. sampling: None is greedy; one for all, or
    one per prompt. on_token(row, token) is called for each generated token. Raises ValueError for
    bad arguments.
    """
    return recompute_loop(attention, model, prompts, max_new_tokens, sampling, on_token)


@torch.inference_mode()
def recompute_loop(
    attention: Callable,
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """`generate` without a memory: n tokens in, one token out, n + 1 tokens in, … with `attention`
    inside the decoder.
    """
    check_call(model, on_token)
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    for request in requests:
        while not request.finished:
            tokens = torch.tensor(request.tokens, device=model.device)
            hidden = model(tokens, whole_sequence(model, len(tokens), attention))
            take_next_tokens(model.logits(hidden[-1:]), [request], on_token)
    return [request.output for request in requests]


def whole_sequence(model: Decoder, num_tokens: int, attention: Callable = attention) -> Attend:
    """The simplest `attend`: q, k, v: [num_tokens, H, D] are one sequence from its first token on.

    It rotates q and k to their positions and remembers nothing. Raises ValueError for a model with
    states.
    """
    config = model.config
    check_all_attend(config)
    sinks = sinks_of(model)
    positions = torch.arange(num_tokens, device=model.device)
    everywhere = rotation(config, positions, model.dtype)
    local = everywhere
    if config.has_two_ropes:
        local = rotation(config.local_rope, positions, model.dtype)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rotate = local if config.has_local_rope(layer) else everywhere
        q, k = rotate(q), rotate(k)
        attend_to = attention_for(config, attention, sinks[layer])
        return attend_to(q, k, v, config.softmax_scale, window=config.sliding_window(layer))

    return attend
