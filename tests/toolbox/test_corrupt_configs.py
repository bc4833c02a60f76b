"""A config.json with one wrong value gives a model that computes, or one short line."""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import copy
import json
import random

import pytest
import torch
from safetensors.torch import save_file

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l06_mla.deepseek import DeepseekDecoder, load_decoder
from lessons.toolbox.model.checkpoint import CheckpointError, load_config

CORRUPTIONS = 60  # of each family; 1800 were tried by hand

BASE = dict(
    vocab_size=31,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    hidden_act="silu",
    tie_word_embeddings=False,
    eos_token_id=2,
    attention_dropout=0.0,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(
    type="yarn",
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=32,
    beta_slow=1,
    mscale=0.7,
    mscale_all_dim=0.7,
)
DEEPSEEK = BASE | dict(
    num_key_value_heads=6,
    moe_intermediate_size=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=None,
    qk_rope_head_dim=8,
    qk_nope_head_dim=4,
    v_head_dim=4,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.0,
    rope_scaling=YARN,
    attention_bias=False,
)
CONFIGS = {
    "llama": BASE | dict(rope_scaling=LLAMA3, attention_bias=False, mlp_bias=False, head_dim=4),
    "mistral": BASE | dict(sliding_window=8),
    "qwen2": BASE | dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": BASE | dict(head_dim=8, layer_types=["full_attention"] * 2, rope_parameters={}),
    "deepseek_v2": DEEPSEEK | dict(topk_method="greedy", norm_topk_prob=False),
    "deepseek_v3": DEEPSEEK | dict(scoring_func="sigmoid", norm_topk_prob=True, q_lora_rank=8),
}
VALUES = [None, True, False, 0, -1, 1, 3, 64, 1.5, -0.5, float("inf"), float("nan"), 1e-300, 1e300]
VALUES += [2**31, 2**70, 10**400, 100_000, 10**12, "", "4", "yarn", "x" * 10**6, "\x1b[2J\ud800"]
VALUES += [[], [1], [None], ["a"] * 1000, [[[[]]]], {}, {"a": 1}, {"rope_type": "yarn"}]
NEW_KEYS = """is_causal quantization_config auto_map layer_types head_dim num_labels id2label
    to_dict __class__ self cls dtype per_layer_config validate_rope num_experts rope_scaling"""
NEW_ROPE_KEYS = "attention_factor mscale_all_dim truncate rope_type type rope_theta beta_fast foo"

pytestmark = pytest.mark.usefixtures("seed")


@torch.no_grad()
def logits_of(model: Decoder) -> torch.Tensor:
    return model.logits(model(torch.tensor([0, 1, 0]), whole_sequence(model, 3)))


def write_config(folder, raw: dict) -> None:
    (folder / "config.json").write_text(json.dumps(raw))


def corrupted(raw: dict) -> tuple[dict, str]:
    """A copy with one value replaced, added or removed, and the name of its key."""
    raw = copy.deepcopy(raw)
    target, keys = raw, [*raw, *NEW_KEYS.split()]
    ropes = [key for key in ("rope_scaling", "rope_parameters") if key in raw]
    if ropes and random.random() < 0.3:
        target = raw[ropes[0]]
        keys = [*target, *NEW_ROPE_KEYS.split()]
    key = random.choice(keys)
    target[key] = random.choice(VALUES)
    if random.random() < 0.1:
        del target[key]
    return raw, key


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_one_wrong_value_gives_a_model_or_one_line(model_type, tmp_path):
    raw = CONFIGS[model_type] | dict(model_type=model_type)
    write_config(tmp_path, raw)
    config = load_config(tmp_path)
    model = (DeepseekDecoder if config.mla else Decoder)(config)
    prefixed = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    prefixed["lm_head.weight"] = prefixed.pop("model.lm_head.weight")
    save_file(prefixed, tmp_path / "model.safetensors")
    outcomes = {True: 0, False: 0}
    for _ in range(CORRUPTIONS):
        wrong, key = corrupted(raw)
        print(key, repr(wrong.get(key))[:60])  # shown by pytest when the test fails
        write_config(tmp_path, wrong)
        try:
            assert logits_of(load_decoder(tmp_path)).shape == (3, 31)
            outcomes[True] += 1
        except CheckpointError as error:
            message = str(error)
            assert message.isprintable() and 20 < len(message) <= 400
            outcomes[False] += 1
    assert min(outcomes.values()) > 0, "both must happen, or nothing was tried"
