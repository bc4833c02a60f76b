"""Random models of odd shapes, one function a family, and what is asked of each: transformers'
logits, as loaded, on every rung of the ladder and from the engine.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import random
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Llama4TextConfig,
    MixtralConfig,
    NemotronHConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.deepseek import load_decoder
from reference.features.states.generate import whole_sequence
from reference.ladder.rungs import rungs_of
from tests import exact_peer
from tests.test_deepseek import PLAIN, random_model
from tests.test_families import theirs_of

TOLERANCE = 2e-4  # of the logits' spread, float32
EXACT = 1e-8  # in float64
ROTATED_FIRST = 1e-5  # so, too
LENGTHS = (1, 7, 33, 65)
NEW_TOKENS = 3


def random_shape(**changes) -> dict:
    """What every family's config has: 2 or 3 layers, odd sizes."""
    kv_heads, group = random.choice([1, 2, 3]), random.choice([1, 2, 3])
    head_dim = 2 * random.randint(3, 9)
    return (
        dict(
            vocab_size=random.randint(50, 99),
            hidden_size=kv_heads * group * head_dim,
            intermediate_size=random.randint(17, 70),
            num_hidden_layers=random.choice([2, 2, 3]),
            num_attention_heads=kv_heads * group,
            num_key_value_heads=kv_heads,
            max_position_embeddings=128,
            rms_norm_eps=random.choice([1e-6, 1e-5, 1e-3]),
            rope_parameters=dict(rope_type="default", rope_theta=random.choice([500.0, 1e4, 1e6])),
            tie_word_embeddings=random.random() < 0.3,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
        | changes
    )


def random_experts(chosen: int | None = None) -> tuple[int, int]:
    """How many experts there are, and how many a token goes to."""
    experts = random.randint(3, 9)
    return experts, chosen or random.randint(1, 3)


def mixtral(chosen: int | None = None) -> MixtralConfig:
    experts, chosen = random_experts(chosen)
    return MixtralConfig(
        **random_shape(),
        head_dim=random.choice([None, 12]),
        num_local_experts=experts,
        num_experts_per_tok=chosen,
        sliding_window=random.choice([None, None, 5]),
    )


def qwen3_moe(chosen: int | None = None) -> Qwen3MoeConfig:
    experts, chosen = random_experts(chosen)
    return Qwen3MoeConfig(
        **random_shape(),
        head_dim=random.choice([10, 16]),
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=random.randint(5, 30),
        norm_topk_prob=random.random() < 0.5,
        attention_bias=random.random() < 0.3,
        decoder_sparse_step=random.choice([1, 1, 2]),
        mlp_only_layers=random.choice([None, [0], [1]]),
        use_sliding_window=random.random() < 0.3,
        sliding_window=6,
    )


def qwen3_next(chosen: int | None = None) -> Qwen3NextConfig:
    experts, chosen = random_experts(chosen)
    shape, heads = random_shape(), random.choice([1, 2, 3])
    layers, kinds = shape["num_hidden_layers"], ["linear_attention", "full_attention"]
    rope = dict(rope_theta=500.0, partial_rotary_factor=random.choice([0.25, 0.5, 1.0]))
    yarn = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16)
    shape["rope_parameters"] = rope | random.choice([dict(rope_type="default"), yarn])
    return Qwen3NextConfig(
        **shape,
        head_dim=random.choice([8, 16]),
        linear_num_key_heads=heads,
        linear_num_value_heads=heads * random.choice([1, 2, 3]),
        linear_key_head_dim=random.randint(2, 9),
        linear_value_head_dim=random.randint(2, 9),
        linear_conv_kernel_dim=random.choice([2, 3, 4]),
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=random.randint(5, 30),
        shared_expert_intermediate_size=random.randint(5, 30),
        norm_topk_prob=random.random() < 0.5,
        attention_bias=random.random() < 0.3,
        decoder_sparse_step=random.choice([1, 1, 2]),
        mlp_only_layers=random.choice([None, [0], [1]]),
        layer_types=random.sample(kinds, 2) + random.choices(kinds, k=layers - 2),
    )


def lfm2() -> Lfm2Config:
    shape = random_shape()
    layers, kinds = shape["num_hidden_layers"], ["conv", "full_attention"]
    return Lfm2Config(
        norm_eps=shape.pop("rms_norm_eps"),
        **shape,
        conv_L_cache=random.choice([2, 3, 4]),
        block_auto_adjust_ff_dim=random.random() < 0.5,
        block_multiple_of=random.choice([1, 7, 16]),
        block_ffn_dim_multiplier=random.choice([1.0, 1.3]),
        layer_types=random.sample(kinds, 2) + random.choices(kinds, k=layers - 2),
    )


def granitemoehybrid(chosen: int | None = None) -> GraniteMoeHybridConfig:
    shape, groups = random_shape(num_hidden_layers=3), random.choice([1, 2, 3])
    experts, chosen = random_experts(chosen)
    is_dense = random.random() < 0.3
    heads, expand = groups * random.choice([1, 2, 3]), random.choice([1, 2, 3])
    kinds = ["linear_attention", "full_attention"]
    shape["hidden_size"] *= heads  # which share expand times as many channels
    low = random.choice([0.0, 0.0, 0.3])
    return GraniteMoeHybridConfig(
        **shape,
        embedding_multiplier=random.choice([0.7, 3.0]),
        residual_multiplier=random.choice([0.4, 1.5]),
        attention_multiplier=random.choice([0.1, 0.5]),
        logits_scaling=random.choice([0.5, 2.0]),
        num_local_experts=0 if is_dense else experts,
        num_experts_per_tok=0 if is_dense else chosen,
        shared_intermediate_size=random.randint(5, 30),
        position_embedding_type=random.choice([None, "nope", "rope"]),
        attention_bias=random.random() < 0.3,
        mamba_n_heads=heads,
        mamba_n_groups=groups,
        mamba_d_state=random.randint(2, 9),
        mamba_d_head="auto",
        mamba_d_conv=random.choice([2, 3, 4]),
        mamba_expand=expand,
        mamba_chunk_size=random.choice([3, 16, 256]),
        mamba_conv_bias=random.random() < 0.7,
        mamba_proj_bias=random.random() < 0.3,
        time_step_limit=(low, random.choice([float("inf"), 1.0])),
        layer_types=random.sample(kinds, 2) + random.choices(kinds, k=1),
    )


def bamba() -> BambaConfig:
    shape, groups = random_shape(num_hidden_layers=3), random.choice([1, 2, 3])
    heads, attending = groups * random.choice([1, 2, 3]), random.choice([[0], [2], [0, 1]])
    shape["hidden_size"] = 8 * heads * shape["num_attention_heads"]
    return BambaConfig(
        **shape,
        attn_layer_indices=attending,
        attention_bias=random.random() < 0.3,
        mlp_bias=random.random() < 0.3,
        mamba_n_heads=heads,
        mamba_n_groups=groups,
        mamba_d_state=random.randint(2, 9),
        mamba_d_conv=random.choice([2, 3, 4]),
        mamba_expand=random.choice([1, 2]),
        mamba_chunk_size=random.choice([3, 16, 256]),
        mamba_conv_bias=random.random() < 0.7,
        mamba_proj_bias=random.random() < 0.3,
        time_step_limit=(random.choice([0.0, 0.3]), random.choice([float("inf"), 1.0])),
    )


def nemotron_h(chosen: int | None = None) -> NemotronHConfig:
    shape, groups = random_shape(), random.choice([1, 2, 3])
    experts, experts_of = random.choice([(4, 1), (6, 2), (8, 2)])
    kinds = ["linear_attention", "full_attention", "mlp", "moe"]
    kinds = random.sample(kinds, 4) + random.choices(kinds, k=random.choice([0, 1, 2]))
    for key in ("num_hidden_layers", "rope_parameters", "tie_word_embeddings"):
        del shape[key]
    low = random.choice([0.0, 0.0, 0.3])
    return NemotronHConfig(
        layer_norm_epsilon=shape.pop("rms_norm_eps"),
        **shape,
        head_dim=2 * random.randint(3, 9),
        layers_block_type=kinds,
        ssm_state_size=random.randint(2, 9),
        mamba_num_heads=groups * random.choice([1, 2, 3]),
        mamba_head_dim=random.randint(2, 9),
        n_groups=groups,
        conv_kernel=random.choice([2, 3, 4]),
        chunk_size=random.choice([3, 16, 128]),
        # transformers limits the dt of prompts by time_step_min, and NVIDIA's code by the other
        time_step_min=low or 1e-30,
        time_step_limit=(low, float("inf")),
        use_conv_bias=random.random() < 0.7,
        use_bias=random.random() < 0.3,
        mlp_bias=random.random() < 0.3,
        n_routed_experts=experts,
        num_experts_per_tok=chosen or random.randint(1, 3),
        n_group=experts_of,
        topk_group=experts_of if chosen else random.randint(1, experts_of),
        norm_topk_prob=random.random() < 0.5,
        routed_scaling_factor=random.choice([1.0, 2.5]),
        moe_intermediate_size=random.randint(5, 30),
        moe_shared_expert_intermediate_size=random.randint(5, 30),
    )


def phi3() -> Phi3Config:
    share, original = random.choice([1.0, 0.5, 0.75]), random.choice([6, 20, 100])
    shape = random_shape()
    shape["hidden_size"] = shape["num_attention_heads"] * random.choice([8, 16, 24])
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    rope = shape.pop("rope_parameters") | dict(partial_rotary_factor=share)
    if random.random() < 0.6:
        short, long = (
            [random.uniform(low, high) for _ in range(int(head_dim * share) // 2)]
            for low, high in ((0.7, 1.3), (1.0, 9.0))
        )
        rope |= dict(rope_type="longrope", short_factor=short, long_factor=long)
        rope |= random.choice([{}, {}, dict(factor=3.0), dict(attention_factor=1.3)])
    return Phi3Config(
        **shape,
        rope_parameters=rope,
        original_max_position_embeddings=original,
        sliding_window=random.choice([None, None, 5]),
    )


def gpt_oss(chosen: int | None = None) -> GptOssConfig:
    experts, chosen = random_experts(chosen)
    kinds = ["sliding_attention", "full_attention"]
    shape = random_shape()
    yarn = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, truncate=False)
    theta = dict(rope_theta=random.choice([500.0, 150000.0]))
    shape["rope_parameters"] = theta | random.choice([dict(rope_type="default"), yarn])
    return GptOssConfig(
        **shape,
        head_dim=2 * random.randint(3, 9),
        num_local_experts=experts,
        num_experts_per_tok=chosen,
        attention_bias=random.random() < 0.7,
        sliding_window=random.choice([3, 6, 40]),
        layer_types=random.choice([None, random.choices(kinds, k=shape["num_hidden_layers"])]),
    )


def llama4_text(chosen: int | None = None) -> Llama4TextConfig:
    """Of a context in which chunks and temperatures do nothing."""
    experts, chosen = random_experts(chosen)
    shape = random_shape()
    layers = shape["num_hidden_layers"]
    if random.random() < 0.4:
        # as published: a blend of no width, so that both sides round alike
        band = dict(low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=16)
        shape["rope_parameters"] |= dict(rope_type="llama3", factor=8.0, **band)
    return Llama4TextConfig(
        **shape,
        head_dim=2 * random.randint(3, 9),
        intermediate_size_mlp=random.randint(17, 70),
        num_local_experts=experts,
        num_experts_per_tok=chosen,
        interleave_moe_layer_step=random.choice([1, 1, 2]),
        use_qk_norm=random.random() < 0.7,
        no_rope_layers=random.choice([None, random.choices([0, 1], k=layers)]),
        no_rope_layer_interval=random.choice([1, 2, 3, 4]),
        attention_chunk_size=random.choice([80, 8192]),
        attn_temperature_tuning=random.random() < 0.7,
        floor_scale=random.choice([100, 8192]),
        attention_bias=random.random() < 0.3,
    )


def gemma2() -> Gemma2Config:
    kinds = ["sliding_attention", "full_attention"]
    shape = random_shape()
    layers = shape["num_hidden_layers"]
    return Gemma2Config(
        **shape,
        head_dim=2 * random.randint(3, 9),
        query_pre_attn_scalar=random.randint(3, 40),
        sliding_window=random.choice([3, 6, 40]),
        layer_types=random.choice([None, random.choices(kinds, k=layers)]),
        attention_bias=random.random() < 0.3,
        attn_logit_softcapping=random.choice([None, 1.0, 5.0]),
        final_logit_softcapping=random.choice([None, 5.0]),
    )


def gemma3_text() -> Gemma3TextConfig:
    shape = random_shape()
    theta = shape.pop("rope_parameters")["rope_theta"]
    stretched = random.choice([{}, dict(rope_type="linear", factor=3.0)])
    return Gemma3TextConfig(
        **shape,
        head_dim=2 * random.randint(3, 9),
        query_pre_attn_scalar=random.randint(3, 40),
        sliding_window=random.choice([3, 6, 40]),
        sliding_window_pattern=random.choice([1, 2, 3]),
        attention_bias=random.random() < 0.3,
        final_logit_softcapping=random.choice([None, 5.0]),
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=theta) | stretched,
            sliding_attention=dict(rope_type="default", rope_theta=random.choice([100.0, 1e4])),
        ),
    )


FAMILIES = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "lfm2": lfm2,
    "granitemoehybrid": granitemoehybrid,
    "bamba": bamba,
    "nemotron_h": nemotron_h,
    "phi3": phi3,
    "gpt_oss": gpt_oss,
    "llama4_text": llama4_text,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
}


# ---------------------------------------------------------------- the two models


def saved_and_loaded(config: PreTrainedConfig, folder: Path) -> tuple[PreTrainedModel, Decoder]:
    """A random model of transformers, and ours, loaded from what it saved: in one file or in
    shards, in 32 or 16 bits.
    """
    theirs, shards = random_model(config), dict(max_shard_size=random.choice(["20KB", "1GB"]))
    if random.random() < 0.3:
        theirs.bfloat16().save_pretrained(folder, **shards)
        # read again, because the model's frequencies were rounded with its weights
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **PLAIN).eval()
    else:
        theirs.save_pretrained(folder, **shards)
    if config.model_type in exact_peer.FAMILIES:
        return exact_peer.widened(theirs), load_decoder(folder, dtype=torch.float64)
    return theirs, load_decoder(folder)


def logits_of(theirs: PreTrainedModel, tokens: Tensor) -> Tensor:
    """transformers' logits after each of the tokens, in the dtype of its weights: [T, V]."""
    return (exact_peer.exact_logits if theirs.dtype == torch.float64 else theirs_of)(theirs, tokens)


def prompts_of(model: Decoder, lengths=LENGTHS) -> list[list[int]]:
    return [torch.randint(model.config.vocab_size, (length,)).tolist() for length in lengths]


def on_one_side(model: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    """The prompts whose answers do not cross the context at which LongRoPE takes other factors."""
    scaling = model.config.rope_scaling
    if scaling is None:
        return prompts
    sides = {False: [], True: []}
    for prompt in prompts:
        begin, end = (scaling.is_long(len(prompt) + more) for more in (0, NEW_TOKENS))
        if begin == end:
            sides[end].append(prompt)
    return max(sides.values(), key=len)


def check_logits(theirs: PreTrainedModel, ours: Decoder, prompts: list[list[int]]) -> None:
    """The logits of whole prompts."""
    for prompt in prompts:
        tokens = torch.tensor(prompt)
        expected = logits_of(theirs, tokens)
        with torch.inference_mode():
            got = ours.logits(ours(tokens, whole_sequence(ours, len(tokens))))
        assert 0.1 < expected.std() < 30, "the model under test must say something"
        torch.testing.assert_close(got, expected, atol=allowed(expected, theirs), rtol=0)


def choosing_all_experts(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config, changed: a token goes to every expert. Where it goes to a few, rounding to 16
    bits may choose others, in one of the models and not in the other, and one draw of about 150
    fails.
    """
    if hasattr(config, "n_routed_experts"):
        config.num_experts_per_tok, config.topk_group = config.n_routed_experts, config.n_group
    else:
        config.num_experts_per_tok = config.num_local_experts
    return config


def check_16_bits(theirs: PreTrainedModel, prompt: list[int], folder: Path) -> None:
    """Both in bfloat16, from the file, against `theirs` in float64: the mean error of our logits is
    at most twice that of transformers'.
    """
    tokens = torch.tensor(prompt)
    expected, errors = logits_of(theirs, tokens), []
    narrow = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **PLAIN).eval()
    model = load_decoder(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        for logits in (
            model.logits(model(tokens, whole_sequence(model, len(tokens)))),
            narrow(tokens[None]).logits[0],
        ):
            errors.append((logits.double() - expected).abs().mean())
    assert errors[0] <= 2 * errors[1] and errors[1] < 0.3 * expected.std()


def allowed(expected: Tensor, theirs: PreTrainedModel) -> float:
    """Llama 4 norms after a rotation, and ours before it, which is the same only up to rounding:
    cosines and sines of 32 bits change a length a little.
    """
    exact = ROTATED_FIRST if theirs.config.model_type == "llama4_text" else EXACT
    share = exact if expected.dtype == torch.float64 else TOLERANCE
    return share * float(expected.std())


# ---------------------------------------------------------------- the rungs


def check_rungs(theirs: PreTrainedModel, ours: Decoder, prompts: list[list[int]], patch) -> None:
    """Every rung computes transformers' logits for each token that it generates, from its cache and
    in its batch.

    Rows that were computed are recorded where hidden states become logits: each row of transformers
    must be one of them.
    """
    computed: list[Tensor] = []
    to_logits = Decoder.logits

    def recording(model: Decoder, hidden: Tensor) -> Tensor:
        logits = to_logits(model, hidden)
        computed.append(logits.to(torch.promote_types(logits.dtype, torch.float32)).clone())
        return logits

    patch.setattr(Decoder, "logits", recording)
    for step in rungs_of(ours.config):
        computed.clear()
        answers = step.run(ours, prompts, NEW_TOKENS)
        rows = torch.cat([logits.flatten(0, -2) for logits in computed])
        for prompt, answer in zip(prompts, answers):
            assert 1 <= len(answer) <= NEW_TOKENS  # fewer where a stop token was generated
            expected = logits_of(theirs, torch.tensor(prompt + answer[:-1]))
            for row in expected[len(prompt) - 1 :]:
                nearest = (rows - row).abs().amax(-1).min()
                assert nearest <= allowed(expected, theirs), f"{step.lesson} {step.name}: {nearest}"
    patch.undo()
