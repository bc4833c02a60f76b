"""The library beside which the benchmark stands: transformers' decode step.

It has both kinds of cache, one that grows and one that is preallocated.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from lessons.l02_naive_attention.decoder import Decoder


@lru_cache
def peer_of(model: Decoder) -> LlamaForCausalLM:
    """transformers' Llama with the weights of `model`, attention by PyTorch's SDPA."""
    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings,
        rope_theta=c.rope_theta,
        tie_word_embeddings=c.tie_word_embeddings,
        attn_implementation="sdpa",
    )
    peer = LlamaForCausalLM(config).to(model.device, model.dtype).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        peer.get_parameter(f"model.{name}" if name != "lm_head.weight" else name).copy_(weight)
    return peer


def step(
    model: Decoder, kind: str, tokens: Tensor, past: list[tuple[Tensor, Tensor]]
) -> Callable[[], Tensor]:
    """A function that runs the last token over a cache of the others and returns its logits: [1,
    V]; as often as wanted.

    kind: "dynamic" (concatenates) or "static" (preallocated, here without compilation). tokens:
    [T]; past: K and V of the first T - 1 tokens, layer by layer, each [T - 1, Hkv, D].
    """
    peer = peer_of(model)
    if kind == "dynamic":
        cache = DynamicCache(config=peer.config)
    else:
        cache = StaticCache(config=peer.config, max_cache_len=len(tokens))
    # [1, Hkv, T - 1, D]
    past = [(k.transpose(0, 1)[None], v.transpose(0, 1)[None]) for k, v in past]
    for index, (k, v) in enumerate(past):
        cache.update(k, v, index)

    def run() -> Tensor:
        for layer, (k, v) in zip(cache.layers, past):  # takes the step before back
            if kind == "dynamic":
                layer.keys, layer.values = k, v
            else:
                layer.cumulative_length.fill_(len(tokens) - 1)
        with torch.inference_mode():
            return peer(tokens[None, -1:], past_key_values=cache, use_cache=True).logits[0]

    return run
