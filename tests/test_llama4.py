"""Llama 4: whether the comparison of random models in tests/test_more_families.py would notice a
slip, where its context ends, and what the loader reads and refuses.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Llama4TextConfig

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.deepseek import load_decoder
from lessons.l06_mla.moe import MoE
from lessons.l06_mla.variants import llama4
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l20_parallelism.lab.testing import links_of
from lessons.l20_parallelism.optimized import shard
from lessons.l20_parallelism.processes.mesh import Mesh
from lessons.l20_parallelism.shards.loading import load_sharded
from lessons.l23_experts.grouped import grouped
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.model.config_parts import MoEConfig
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.engine.packed import packed
from reference.features.states.generate import whole_sequence
from reference.ladder.rungs import rungs_of
from tests.random_families import (
    NEW_TOKENS,
    allowed,
    check_16_bits,
    check_logits,
    choosing_all_experts,
    logits_of,
    prompts_of,
    random_shape,
    saved_and_loaded,
)
from tests.test_more_families import refusal

pytestmark = pytest.mark.usefixtures("seed")


def telling_config(**changes) -> Llama4TextConfig:
    """A random one in which every part counts: a layer that rotates and one that does not, one with
    experts and one without.
    """
    parts = dict(no_rope_layers=[1, 0, 1], interleave_moe_layer_step=2, num_local_experts=5)
    parts |= dict(num_experts_per_tok=2, intermediate_size_mlp=50, head_dim=16)
    parts |= dict(attention_chunk_size=80, floor_scale=90, attn_scale=5.0)
    parts |= dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=2)
    shape = random_shape(num_hidden_layers=3, rms_norm_eps=1e-3)
    return Llama4TextConfig(**shape | parts | changes)


# ---------------------------------------------------------------- would these tests notice?


def by_scores(self, x):
    """The slip: weights that sum to one."""
    best = self.logits(x).topk(self.config.num_experts_per_tok, dim=-1)
    return best.values.softmax(-1), best.indices


SLIPS = {
    "the output weighed in place of the input": (llama4.InputWeighedMoE, "forward", MoE.forward),
    "weights that sum to one": (llama4.LogitRouter, "forward", by_scores),
    "no norm of q and k": (llama4.L2Norm, "forward", lambda self, x: x),
    "every layer rotates": (
        "lessons.toolbox.model.config.ModelConfig.has_local_rope",
        lambda self, layer: False,
    ),
    "pairs taken for halves": (
        "lessons.toolbox.model.checkpoint.turning_last",
        lambda name, tensor, config: tensor,
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_noticed(slip, tmp_path, monkeypatch):
    theirs, ours = saved_and_loaded(telling_config(), tmp_path)
    prompts = prompts_of(ours, lengths=(30,))
    check_logits(theirs, ours, prompts)
    monkeypatch.setattr(*SLIPS[slip])
    wrong = load_decoder(tmp_path, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(theirs, wrong, prompts)


def test_a_router_tells_saturated_sigmoids_apart():
    """Logits of 20 and 30 have the same sigmoid in float32."""
    router = llama4.LogitRouter(1, MoEConfig(3, 1, 8))
    router.weight.data[:, 0] = torch.tensor([20.0, 30.0, 25.0])
    weights, chosen = router(torch.ones(1, 1))
    assert chosen.tolist() == [[1]] and weights.tolist() == [[1.0]]


def test_the_engine_generates_the_likeliest_tokens_of_transformers(tmp_path):
    theirs, ours = saved_and_loaded(telling_config(), tmp_path)
    prompts = prompts_of(ours, lengths=(1, 9, 40))
    answers = rungs_of(ours.config)[-1].run(ours, prompts, NEW_TOKENS)
    for prompt, answer in zip(prompts, answers):
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            tokens.append(int(logits_of(theirs, torch.tensor(tokens))[-1].argmax()))
        assert answer == tokens[len(prompt) :]


def test_a_fused_and_packed_model_computes_the_same(tmp_path):
    """As the engine runs it on a GPU, and on a CPU. Its experts stay a loop, because the kernels
    weigh outputs.
    """
    _, ours = saved_and_loaded(telling_config(), tmp_path)
    tokens = torch.tensor(prompts_of(ours, lengths=(20,))[0])
    with torch.inference_mode():
        expected = ours(tokens, whole_sequence(ours, 20)).float()
        model = load_decoder(tmp_path)
        for twin in (grouped(fused(model)), packed(fused(model))):
            assert any(isinstance(part, llama4.InputWeighedMoE) for part in twin.modules())
            got = twin(tokens, whole_sequence(twin, 20))
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_16_bits_lose_no_more_than_in_transformers(tmp_path):
    theirs, ours = saved_and_loaded(choosing_all_experts(telling_config()), tmp_path)
    check_16_bits(theirs, prompts_of(ours, lengths=(40,))[0], tmp_path)


# ---------------------------------------------------------------- where a context ends


@pytest.mark.parametrize(
    "changes, longest",
    [
        (dict(attention_chunk_size=8), 8),
        (dict(floor_scale=8), 7),
        (dict(floor_scale=8, attn_temperature_tuning=False), 80),
        (dict(floor_scale=8, no_rope_layers=[1, 1, 1]), 80),
        (dict(max_position_embeddings=12), 12),
    ],
)
def test_a_context_ends_where_attention_would_differ(changes, longest, tmp_path):
    """One token further the logits of transformers are others, where it has a rule for them."""
    theirs, ours = saved_and_loaded(telling_config(**changes), tmp_path)
    assert ours.config.max_position_embeddings == longest
    if longest < 12:
        tokens = torch.tensor(prompts_of(ours, lengths=(longest + 1,))[0])
        expected = logits_of(theirs, tokens)
        with torch.inference_mode():
            got = ours.logits(ours(tokens, whole_sequence(ours, len(tokens))))
        close = (got - expected).abs().amax(-1) <= allowed(expected, theirs)
        assert close.tolist() == [True] * longest + [False]
    accepted = f"max_model_len: got {longest + 1}; accepted: at most {longest}, the model's"
    with pytest.raises(ValueError, match=accepted):
        engine_over(ours, None, EngineArgs(device="cpu", max_model_len=longest + 1))


# ---------------------------------------------------------------- files

SCOUT = dict(  # in the words of meta-llama/Llama-4-Scout-17B-16E
    model_type="llama4",
    architectures=["Llama4ForConditionalGeneration"],
    boi_token_index=200080,
    eoi_token_index=200081,
    image_token_index=200092,
    vision_config=dict(model_type="llama4_vision_model"),
    text_config=dict(
        attention_bias=False,
        attention_chunk_size=8192,
        attention_dropout=0.0,
        bos_token_id=200000,
        eos_token_id=[200001, 200007, 200008],
        for_llm_compressor=False,
        head_dim=128,
        hidden_act="silu",
        hidden_size=5120,
        initializer_range=0.02,
        interleave_moe_layer_step=1,
        intermediate_size=8192,
        intermediate_size_mlp=16384,
        max_position_embeddings=262144,
        model_type="llama4_text",
        no_rope_layers=[],
        num_attention_heads=40,
        num_experts_per_tok=1,
        num_hidden_layers=48,
        num_key_value_heads=8,
        num_local_experts=16,
        output_router_logits=False,
        pad_token_id=200018,
        rms_norm_eps=1e-05,
        rope_scaling=dict(
            factor=16.0,
            high_freq_factor=1.0,
            low_freq_factor=1.0,
            original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
        rope_theta=500000.0,
        router_aux_loss_coef=0.001,
        router_jitter_noise=0.0,
        tie_word_embeddings=False,
        use_cache=True,
        use_qk_norm=True,
        vocab_size=202048,
    ),
)


def test_the_published_config(tmp_path):
    """Every fourth layer does not rotate, and its queries grow from token 8191 on."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SCOUT))
    config = load_config(tmp_path)
    assert config.no_rope_layers == tuple(range(3, 48, 4)) and config.qk_norm
    assert config.max_position_embeddings == 8191 and config.intermediate_size == 16384
    assert config.eos_token_ids == (200001, 200007, 200008)
    assert config.moe.shared_width == 8192 and not config.moe.dense_layers
    file.write_text(json.dumps(SCOUT | dict(quantization_config=dict(quant_method="fbgemm_fp8"))))
    assert load_config(tmp_path).quantization_config == dict(quant_method="fbgemm_fp8")


def test_the_decoder_of_a_model_with_eyes_is_read(tmp_path):
    theirs, ours = saved_and_loaded(telling_config(), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SCOUT | dict(text_config=json.loads(file.read_text()))))
    for number, weights in enumerate(sorted(tmp_path.glob("*.safetensors"))):
        own = {f"language_model.{name}": x for name, x in load_file(weights).items()}
        if number == 0:
            own |= {"vision_model.class_embedding": torch.zeros(2)}
            own |= {"multi_modal_projector.linear_1.weight": torch.zeros(2, 2)}
        save_file(own, weights, metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    if index.exists():
        raw = json.loads(index.read_text())
        named = {f"language_model.{name}": at for name, at in raw["weight_map"].items()}
        index.write_text(json.dumps(raw | dict(weight_map=named)))
    check_logits(theirs, load_decoder(tmp_path, dtype=torch.float64), prompts_of(ours))


def test_strips_of_experts_add_up(tmp_path):
    """Of two ranks, cut out of the file or out of the model."""
    sizes = dict(vocab_size=60, intermediate_size=12)
    _, ours = saved_and_loaded(telling_config(**sizes), tmp_path)
    x = torch.randn(7, ours.config.hidden_size).double()
    expected = ours.layers[1].mlp(x)
    links = [links_of(Mesh(tp=2), rank) for rank in range(2)]
    read = [load_sharded(tmp_path, one, dtype=torch.float64) for one in links]
    for parts in (read, [shard(ours, one) for one in links]):
        got = sum(part.layers[1].mlp.moe(x) for part in parts)
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)
    for one, other in zip(read, parts):
        assert all(torch.equal(x, other.state_dict()[name]) for name, x in one.state_dict().items())
    with pytest.raises(ValueError, match="expert_parallel: got True; accepted: False where the in"):
        load_sharded(tmp_path, links[0], expert_parallel=True)


YARN = dict(rope_type="yarn", factor=2.0)


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(attention_chunk_size=None), "'attention_chunk_size' must be a whole number"),
        (dict(attention_chunk_size=0), "'attention_chunk_size' must be a positive number"),
        (dict(floor_scale=1), "max_position_embeddings: got 0"),
        (dict(no_rope_layers=[1, 0]), "'no_rope_layers' must hold 0 or 1 for each of 3 layers"),
        (dict(no_rope_layers=[1, 0, 2]), "'no_rope_layers' must hold 0 or 1"),
        (dict(layer_types=["sliding_attention"] * 3), "'layer_types' must list chunked"),
        (dict(rope_parameters=YARN), "'yarn' is not supported; supported: default, llama3"),
        (dict(num_experts_per_tok=9), "num_experts_per_tok (9) must be 1 to 5"),
        (dict(router_jitter_noise=0.5), "'router_jitter_noise' must be 0.0, not 0.5"),
        (dict(for_llm_compressor=True), "'for_llm_compressor' must be False, not True"),
        (dict(hidden_act="gelu"), "'hidden_act' must be 'silu'"),
    ],
)
def test_wrong_value_is_named(changes, named, tmp_path):
    telling_config().save_pretrained(tmp_path)
    load_config(tmp_path)
    assert named in refusal(tmp_path, **changes)


def test_decoders_name_what_they_accept(tmp_path):
    saved_and_loaded(telling_config(), tmp_path)
    with pytest.raises(CheckpointError, match="load it with load_decoder"):
        Decoder.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="accepted: one with variant llama4"):
        llama4.Llama4Decoder(ModelConfig("llama", 11, 8, 1, 1, 1, 4, 4, 16))
    with pytest.raises(CheckpointError, match="'llama4' is not supported"):
        (tmp_path / "config.json").write_text(json.dumps(SCOUT | dict(text_config=None)))
        load_config(tmp_path)
