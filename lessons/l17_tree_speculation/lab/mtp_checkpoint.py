"""A checkpoint as DeepSeek-V3's, with random weights and an MTP layer, for tests: real ones have
671 billion parameters.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lessons.l06_mla.deepseek import DeepseekDecoder
from lessons.toolbox.model.config_json import read_config

LAYERS = 2
CONFIG = dict(
    model_type="deepseek_v3",
    vocab_size=61,
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=LAYERS,
    num_nextn_predict_layers=1,
    num_attention_heads=3,
    num_key_value_heads=3,
    max_position_embeddings=96,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    hidden_act="silu",
    tie_word_embeddings=False,
    attention_bias=False,
    eos_token_id=60,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=10,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    moe_layer_freq=1,
)


def write_checkpoint(folder: Path, **changes) -> dict[str, Tensor]:
    """Write config.json and model.safetensors in float32; returns the tensors by their names.
    changes: of CONFIG.
    """
    config = CONFIG | changes
    folder.mkdir(exist_ok=True)
    # A decoder of one layer more has all tensors of the MTP layer but the four of its own.
    write_config(folder, config | dict(num_hidden_layers=config["num_hidden_layers"] + 1))
    decoder = DeepseekDecoder(read_config(folder))
    tensors = dict(decoder.state_dict())
    further = f"layers.{config['num_hidden_layers']}."
    size = config["hidden_size"]
    tensors[f"{further}enorm.weight"] = torch.empty(size)
    tensors[f"{further}hnorm.weight"] = torch.empty(size)
    tensors[f"{further}shared_head.norm.weight"] = torch.empty(size)
    tensors[f"{further}eh_proj.weight"] = torch.empty(size, 2 * size)
    for name, tensor in tensors.items():
        is_norm = tensor.ndim == 1 and not name.endswith("bias")
        tensor.normal_(1.0 if is_norm else 0.0, 0.3 if tensor.ndim == 1 else size**-0.5)
    tensors["embed_tokens.weight"].normal_()
    tensors["lm_head.weight"].normal_(std=0.4)
    tensors[f"{further}embed_tokens.weight"] = tensors["embed_tokens.weight"].clone()
    tensors[f"{further}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    named = {
        name if name == "lm_head.weight" else f"model.{name}": tensor.detach().clone()
        for name, tensor in tensors.items()
    }
    save_file(named, folder / "model.safetensors")
    write_config(folder, config)
    return named


def write_config(folder: Path, config: dict) -> None:
    """config.json alone."""
    (folder / "config.json").write_text(json.dumps(config))
