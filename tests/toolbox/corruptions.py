"""Valid config.json files of every family that loads, wrong values for them, and the one question
that is asked of each: does the loader do what transformers does, or refuse in one line?
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import copy
import json
import random
import resource
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.deepseek import decoder_class, load_decoder
from lessons.toolbox.model.checkpoint import CheckpointError, load_config
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.places import places_of
from reference.features.states.generate import whole_sequence
from tests.test_deepseek import random_model
from tests.test_families import assert_same_logits, theirs_of

disable_progress_bar()  # of saving, thousands of times
MOST_SECONDS, MOST_BYTES = 2.0, 500e6  # of processor and of memory, for one file
LONGEST_LINE = 300  # characters of a refusal
PROMPT = torch.tensor([0, 5, 3, 0, 30, 7, 7, 2, 19, 4, 11, 1])

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
LINEAR = dict(type="linear", factor=2.0)
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
    mscale_all_dim=0.9,
)
LONGROPE = dict(type="longrope", short_factor=[1.0, 1.5], long_factor=[2.0, 4.0])
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
OLMO3_YARN = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.2
)


def but(raw: dict, *keys: str) -> dict:
    return {key: value for key, value in raw.items() if key not in keys}


LAYER_TYPES = ["sliding_attention", "full_attention"]
CONFIGS = {
    "llama": BASE | dict(rope_scaling=LLAMA3, attention_bias=False, mlp_bias=False, head_dim=4),
    "mistral": BASE | dict(sliding_window=8),
    "ministral": BASE | dict(head_dim=4, sliding_window=5, layer_types=LAYER_TYPES),
    "qwen2": BASE | dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": BASE | dict(head_dim=8, layer_types=["full_attention"] * 2, rope_parameters={}),
    "mixtral": BASE | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": BASE
    | dict(
        head_dim=8,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "qwen3_next": BASE
    | dict(
        head_dim=8,
        partial_rotary_factor=0.5,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=5,
        linear_conv_kernel_dim=4,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=9,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "lfm2": {key: BASE[key] for key in BASE if key not in ("rms_norm_eps", "hidden_act")}
    | dict(
        norm_eps=1e-5,
        conv_L_cache=3,
        conv_bias=False,
        block_auto_adjust_ff_dim=True,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.0,
        layer_types=["conv", "full_attention"],
    ),
    "phi3": BASE
    | dict(
        rope_scaling=LONGROPE, original_max_position_embeddings=8, sliding_window=7, pad_token_id=0
    ),
    "gpt_oss": BASE
    | dict(
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        attention_bias=True,
        rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "gemma2": {key: BASE[key] for key in BASE if key not in ("hidden_act", "eos_token_id")}
    | dict(
        head_dim=8,
        query_pre_attn_scalar=5,
        sliding_window=4,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3_text": {key: BASE[key] for key in BASE if key not in ("hidden_act", "eos_token_id")}
    | dict(
        head_dim=8,
        query_pre_attn_scalar=5,
        sliding_window=4,
        sliding_window_pattern=2,
        rope_local_base_freq=100.0,
        final_logit_softcapping=3.0,
        rope_scaling=dict(rope_type="linear", factor=2.0),
    ),
    "deepseek_v2": DEEPSEEK | dict(topk_method="greedy", norm_topk_prob=False),
    "deepseek_v3": DEEPSEEK | dict(scoring_func="sigmoid", norm_topk_prob=True, q_lora_rank=8),
    "cohere2": but(BASE, "rms_norm_eps")
    | dict(layer_norm_eps=1e-3, logit_scale=0.5, sliding_window=4, layer_types=LAYER_TYPES),
    "cohere": but(BASE, "rms_norm_eps") | dict(layer_norm_eps=1e-3, logit_scale=0.5),
    "glm": BASE
    | dict(head_dim=8, partial_rotary_factor=0.5, attention_bias=True, pad_token_id=None),
    "gemma": but(BASE, "hidden_act", "eos_token_id") | dict(head_dim=8),
    "phi": but(BASE, "rms_norm_eps", "hidden_act")
    | dict(layer_norm_eps=1e-3, hidden_size=48, partial_rotary_factor=0.5),
    "starcoder2": but(BASE, "rms_norm_eps", "hidden_act")
    | dict(norm_epsilon=1e-3, use_bias=True, sliding_window=8),
    "glm4": BASE
    | dict(head_dim=8, partial_rotary_factor=0.5, attention_bias=True, pad_token_id=None),
    "glm4_moe": BASE
    | dict(
        head_dim=8,
        partial_rotary_factor=0.5,
        attention_bias=True,
        use_qk_norm=True,
        moe_intermediate_size=8,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
    ),
    "granite": BASE
    | dict(
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.4,
        logits_scaling=2.0,
    ),
    "granitemoehybrid": BASE
    | dict(
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.4,
        logits_scaling=2.0,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=12,
        position_embedding_type="nope",
        layer_types=["linear_attention", "full_attention"],
        mamba_n_heads=4,
        mamba_n_groups=2,
        mamba_d_state=6,
        mamba_d_head=12,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
        time_step_limit=[0.0, 2.0],
        attention_bias=False,
    ),
    "bamba": BASE
    | dict(
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_n_groups=2,
        mamba_d_state=6,
        mamba_d_head=12,
        mamba_d_conv=4,
        mamba_expand=2,
        attention_bias=True,
        mlp_bias=False,
    ),
    "nemotron_h": but(BASE, "rms_norm_eps", "hidden_act", "num_hidden_layers")
    | dict(
        layer_norm_epsilon=1e-3,
        head_dim=8,
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe"],
        ssm_state_size=6,
        mamba_num_heads=4,
        mamba_head_dim=5,
        n_groups=2,
        conv_kernel=4,
        use_conv_bias=True,
        use_bias=False,
        mlp_bias=False,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        moe_shared_expert_intermediate_size=12,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
    ),
    "olmo2": BASE | dict(attention_bias=False),
    "olmo3": BASE | dict(sliding_window=4, layer_types=LAYER_TYPES, rope_scaling=OLMO3_YARN),
    "qwen2_moe": BASE
    | dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=12,
        norm_topk_prob=False,
        use_sliding_window=False,
        sliding_window=16,
        max_window_layers=1,
    ),
    "smollm3": BASE
    | dict(
        no_rope_layers=[1, 0],
        no_rope_layer_interval=2,
        use_sliding_window=False,
        mlp_bias=False,
        pad_token_id=None,
    ),
}
CONFIGS = {name: raw | dict(model_type=name) for name, raw in CONFIGS.items()}

WRONG_KIND = [None, True, False, "", "4", "yarn", [], [1], [None], ["a"] * 1000, [[[[]]]], {}]
WRONG_KIND += [
    {"a": 1},
    {"rope_type": "yarn"},
    "x" * 10**6,
    "\x1b[2J\ud800",
    {"full_attention": {}},
]
WRONG_NUMBER = [0, -1, 1, 3, 64, 1.5, -0.5, 4.0, 1e-300, 1e300, 2**31, 2**70, 10**400, 100_000]
WRONG_NUMBER += [10**12, float("inf"), float("-inf"), float("nan")]
# Not num_labels, because transformers lists the names of 2³¹ labels.
NEW_KEYS = """is_causal quantization_config auto_map layer_types head_dim id2label
    to_dict __class__ self cls dtype per_layer_config validate_rope num_experts rope_scaling
    rope_parameters partial_rotary_factor sliding_window use_sliding_window logit_scale
    attention_bias mlp_bias use_cache pad_token_id chunk_size_feed_forward is_encoder_decoder
    attn_implementation rope_interleave num_local_experts experts_implementation return_dict"""
ROPE_KEYS = """attention_factor mscale_all_dim truncate rope_type type rope_theta beta_fast foo
    partial_rotary_factor factor low_freq_factor short_factor finetuned"""
ROPES = [LINEAR, LLAMA3, YARN, YARN | dict(attention_factor=1.3), dict(type="dynamic", factor=2.0)]
ROPES += [dict(rope_type="default", rope_theta=500.0), YARN | dict(rope_type="llama3"), {}, None]


# ---------------------------------------------------------------- wrong configs


def corrupted(raw: dict) -> dict:
    """A copy with one to three values replaced, added or removed. What was done is printed, which
    pytest shows when a test fails.
    """
    raw = copy.deepcopy(raw)
    if random.random() < 0.3:
        raw[random.choice(["rope_scaling", "rope_parameters"])] = random.choice(ROPES)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        _change(raw)
    return raw


def _change(raw: dict) -> None:
    target, new_keys = raw, NEW_KEYS
    ropes = [key for key in ("rope_scaling", "rope_parameters") if isinstance(raw.get(key), dict)]
    if ropes and random.random() < 0.35:
        # a copy, because the objects above are shared
        name = random.choice(ropes)
        target = raw[name] = dict(raw[name])
        new_keys = ROPE_KEYS
    key = random.choice([*target, *target, *new_keys.split()])
    value = target.get(key)
    kinds = [WRONG_KIND, WRONG_NUMBER, _nearby(value), _nearby(value)]
    if random.random() < 0.1:
        target.pop(key, None)
        print("without", key)
    else:
        target[key] = random.choice(random.choice(kinds))
        print(key, repr(target[key])[:60])


def _nearby(value) -> list:
    """What may well be right in another model."""
    if isinstance(value, bool) or value is None:
        return [not value]
    if isinstance(value, (int, float)) and not abs(value) < 2**53:
        return [-value]
    if isinstance(value, int):
        return [value + 1, 2 * value, value // 2, float(value), str(value)]
    if isinstance(value, float):
        return [2 * value, value / 2, value + 1, int(value), str(value)]
    if isinstance(value, list):
        return [value[:1], value * 2, value[::-1]]
    return ["gelu", "full_attention", "group_limited_greedy", "softmax", "sigmoid", "linear"]


# ---------------------------------------------------------------- what must come of them


def write_config(folder: Path, raw: dict) -> None:
    (folder / "config.json").write_text(json.dumps(raw))


@torch.no_grad()
def logits_of(model: Decoder) -> torch.Tensor:
    tokens = PROMPT % model.config.vocab_size
    return model.logits(model(tokens, whole_sequence(model, len(tokens))))


def save_weights(config: ModelConfig, folder: Path) -> None:
    """Random weights of the shape that the course's decoder has."""
    model = decoder_class(config)(config)
    state, places = model.state_dict(), places_of(model)
    parts: dict[str, list] = {}  # those that are in one stored tensor, one below the other
    for name, place in places.items():
        parts.setdefault(place.key, []).append(state[name])
    shapes = {place.key: place.stored_shape for place in places.values()}
    prefixed = {f"model.{key}": torch.cat(parts[key]).view(shapes[key]) for key in parts}
    for name in [name for name in prefixed if name.startswith("model.lm_head.")]:
        prefixed[name.removeprefix("model.")] = prefixed.pop(name)
    save_file(prefixed, folder / "model.safetensors")


def is_small(config: ModelConfig) -> bool:
    """Whether a model of these sizes is built within milliseconds."""
    widths = [config.hidden_size, config.intermediate_size, config.vocab_size, 1]
    widths += [config.num_attention_heads * max(config.head_dim, config.v_head_dim)]
    experts = 1
    if config.mla:
        widths += [config.mla.kv_lora_rank, config.mla.q_lora_rank or 1]
    if config.moe:
        widths += [config.moe.moe_intermediate_size * max(1, config.moe.n_shared_experts)]
        experts = config.moe.n_routed_experts
    if config.state:
        widths += config.state.conv_shape
        widths += config.state.matrix_shape or ()
    if config.moe:
        widths += [config.moe.shared_width]
    return max(widths) <= 1024 and config.num_hidden_layers * experts <= 128


def outcome(raw: dict, folder: Path) -> str:
    """ "refused" in one line, "equal" to transformers, or "ours alone": transformers does not read
    this file. Fails for anything else. folder: it holds the weights of a valid config.
    """
    write_config(folder, raw)
    try:
        with Limits():
            config = load_config(folder)
            if not is_small(config):
                load_decoder(folder)
                raise AssertionError("weights of other shapes were loaded")
    except CheckpointError as error:
        check_line(str(error))
        return "refused"
    theirs = random_theirs(folder)
    if theirs is None:
        save_weights(config, folder)
        assert torch.isfinite(logits_of(load_decoder(folder))).all()
        return "ours alone"
    save_theirs(theirs, folder)
    write_config(folder, raw)
    ours, wanted = logits_of(load_decoder(folder)), theirs_of(theirs, PROMPT % config.vocab_size)
    if not (wanted.isnan().all() and ours.isnan().all()):  # as both are for a rope factor of 1e-300
        assert_same_logits(ours, wanted)
    return "equal"


def random_theirs(folder: Path) -> PreTrainedModel | None:
    """transformers' model of this config.json; None if it does not read it, and says so by any
    exception.
    """
    try:
        model = random_model(AutoConfig.from_pretrained(folder))
        model.generation_config = GenerationConfig()  # else saving checks how one would sample
        theirs_of(model, PROMPT % model.config.vocab_size)
    except Exception as error:
        print("transformers:", repr(error)[:200])
        return None
    return model


def save_theirs(model: PreTrainedModel, folder: Path) -> None:
    """save_pretrained, with both dimensions of every expert's matrix. transformers (5.17) keeps the
    experts in one tensor and squeezes what it cuts out of it, so a matrix of one row or column
    would be stored as a vector, which transformers cannot read either.
    """
    model.save_pretrained(folder)
    file, config = folder / "model.safetensors", model.config
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name and name.endswith(".weight") and tensor.dim() < 2:
            is_last = name.endswith(("down_proj.weight", "w2.weight"))
            tensors[name] = tensor.view(config.hidden_size if is_last else width, -1)
    save_file(tensors, file, metadata=dict(format="pt"))


def check_line(message: str) -> None:
    assert message.isprintable() and 20 < len(message) <= LONGEST_LINE, message


class Limits:
    """A `with` block that fails if it took more time or memory than one file may."""

    def __enter__(self):
        self.start_s, self.start_bytes = time.process_time(), peak_bytes()

    def __exit__(self, kind, *rest):
        # a refusal too must come soon
        if kind is None or issubclass(kind, CheckpointError):
            assert time.process_time() - self.start_s < MOST_SECONDS
            assert peak_bytes() - self.start_bytes < MOST_BYTES


def peak_bytes() -> int:
    """The most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB
