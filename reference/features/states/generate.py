"""Two rungs for a model with states: without a memory, and with K and V and a state a sequence.

generate(model, prompts, max_new_tokens)           # each step runs the whole sequence again
generate_held(model, prompts, max_new_tokens)      # each step runs one token
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l02_naive_attention import naive
from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l02_naive_attention.request import (
    OnToken,
    check_call,
    read_requests,
    take_next_tokens,
)
from lessons.l02_naive_attention.rope import rotation
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.generate import Rung, run_request
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.l27_states.naive import causal_conv, decayed_linear_attention, gated_delta_rule
from reference.features.states.layers import conv_weights
from reference.features.states.pool import HybridPool
from reference.features.states.rules import after_convolution

TOKEN_BY_TOKEN = {"gated_delta": gated_delta_rule, "decayed": decayed_linear_attention}


def whole_sequence(
    model: Decoder, num_tokens: int, attention: Callable = naive.attention
) -> Attend:
    """Lesson 2's `whole_sequence`, for a model with states too: every state begins at zero, and is
    forgotten.
    """
    config = model.config
    if config.state is None:
        return naive.whole_sequence(model, num_tokens, attention)
    weights = conv_weights(model)
    rotate = rotation(config, torch.arange(num_tokens, device=model.device), model.dtype)

    def attend(layer: int, *inputs: Tensor) -> Tensor:
        if layer not in weights:
            q, k, v = inputs
            return attention(rotate(q), rotate(k), v, config.softmax_scale)
        mixed, *others = inputs
        y, _ = causal_conv(mixed, weights[layer])
        return after_convolution(config.state, y, from_beginning, *others).to(mixed.dtype)

    return attend


def from_beginning(rule: str, *each: Tensor) -> Tensor:
    """A rule of lesson 27, token by token, over one sequence whose state begins at zero. each: q,
    k: [T, H, Dk], v: [T, H, Dv], and what the rule has beside them: [T, H] -> [T, H, Dv].
    """
    out, _ = TOKEN_BY_TOKEN[rule](*each)
    return out


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Every step over the whole sequence. Arguments, result and errors as in lesson 2's
    `generate`.
    """
    check_call(model, on_token, may_have_states=True)
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    for request in requests:
        while not request.finished:
            tokens = torch.tensor(request.tokens, device=model.device)
            hidden = model(tokens, whole_sequence(model, len(tokens)))
            take_next_tokens(model.logits(hidden[-1:]), [request], on_token)
    return [request.output for request in requests]


HELD = Rung("KV cache and states", LESSON_03_TORCH, LESSON_03_TORCH, cache=HybridPool)


@torch.inference_mode()
def generate_held(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Lesson 3's loop: the prompt once, and then one token a step, over a HybridPool for each
    request. Arguments, result and errors as in lesson 2's `generate`.
    """
    check_call(model, on_token, may_have_states=True)
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    for request in requests:
        if not request.finished:
            cache = HELD.new_cache(model, 1, request.most_cached)
            run_request(model, cache, request, on_token)
    return [request.output for request in requests]
