"""The library beside which the benchmark stands: transformers' attention of DeepSeek-V3, which
decompresses at every step.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from lessons.l06_mla.lab.workload import CONFIG, OneLayer


def step(model: OneLayer, x: Tensor, c_kv: Tensor, k_pe: Tensor) -> Callable[[], Tensor]:
    """A function that runs the last token over cached latents, as often as wanted: x: [1,
    hidden_size] -> [1, hidden_size].

    c_kv: [cached, 1, rank], k_pe: [cached, 1, rope].
    """
    mla = CONFIG.mla
    config = DeepseekV3Config(
        hidden_size=CONFIG.hidden_size,
        num_attention_heads=CONFIG.num_attention_heads,
        num_hidden_layers=1,
        num_key_value_heads=CONFIG.num_attention_heads,
        q_lora_rank=None,
        kv_lora_rank=mla.kv_lora_rank,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        qk_nope_head_dim=mla.qk_nope_head_dim,
        v_head_dim=mla.v_head_dim,
        rope_interleave=mla.rope_interleave,  # the cached k_pe lie as `latents` leaves them
        attn_implementation="sdpa",
    )
    layer = (
        DeepseekV3Attention(config, 0).to(model.device, model.dtype).eval().requires_grad_(False)
    )
    layer.load_state_dict(model.attention.state_dict())
    # [1, 1, cached, …]
    cache, past = (
        DynamicCache(config=config),
        (c_kv.transpose(0, 1)[None], k_pe.transpose(0, 1)[None]),
    )
    cache.update(*past, 0)
    # cos 1, sin 0: as in workload.pool_of
    angles = torch.ones(1, 1, mla.qk_rope_head_dim, dtype=x.dtype, device=x.device)

    def run() -> Tensor:
        cache.layers[0].keys, cache.layers[0].values = past  # takes the step before back
        with torch.inference_mode():
            return layer(x[None], (angles, 0 * angles), None, past_key_values=cache)[0][0]

    return run
