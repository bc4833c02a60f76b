"""Lesson 1's numbers against sources that do not share its code: publishers' counts, transformers'
models, arithmetic by hand.
"""

import dataclasses
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.planner.models import MODELS, ModelShape, find_model

SAME_NAMES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
FAMILIES = {"llama-2": "llama", "llama-3": "llama", "gpt-j": "gptj", "deepseek": "deepseek_v3"}
# What a family's configuration calls the fields of a ModelShape, where it has names of its own.
GPTJ = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings",
}
FALCON = {"num_kv_heads": "num_key_value_heads", "ffn_hidden_size": "intermediate_size"}
MIXTRAL = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok"}
QWEN3_MOE = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
}
DEEPSEEK = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}


def fields_of(shape: ModelShape, names: dict[str, str]) -> dict:
    return {theirs: getattr(shape, ours) for theirs, ours in names.items()}


def transformers_config(shape: ModelShape):
    """The same shape as a configuration of transformers."""
    from transformers import AutoConfig

    name = shape.name.rsplit("-", 1)[0]
    family = FAMILIES.get(name, name)
    sizes = {field: getattr(shape, field) for field in SAME_NAMES}
    if family == "gptj":
        assert not shape.tie_word_embeddings
        sizes = fields_of(shape, GPTJ)
    elif family == "falcon":
        sizes |= fields_of(shape, FALCON)
        sizes |= {"new_decoder_architecture": True, "bias": False}
    elif family == "mixtral":
        sizes |= fields_of(shape, MIXTRAL)
    elif family == "deepseek_v3":
        sizes |= fields_of(shape, DEEPSEEK)
        sizes["qk_nope_head_dim"] = shape.head_dim - shape.qk_rope_head_dim
    else:
        sizes["head_dim"] = shape.head_dim
        if shape.num_experts:
            family = "qwen3_moe"
            sizes |= fields_of(shape, QWEN3_MOE)
    return AutoConfig.for_model(family, **sizes)


def transformers_model(shape: ModelShape):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # shapes without memory: 671 billion parameters in a second
        return AutoModelForCausalLM.from_config(
            transformers_config(shape), dtype=torch.bfloat16
        ).eval()


@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_those_of_transformers(name):
    shape = MODELS[name]
    model = transformers_model(shape)
    built = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert shape.params == matrices, (
        f"{name}: formula {shape.params:,}, transformers' matrices {matrices:,}"
    )
    assert shape.params == pytest.approx(built, rel=1e-3)  # norms and biases are left out


@pytest.mark.parametrize("name", MODELS)
def test_parameters_match_the_published_count(name):
    published, billions = MODELS[name].published.removesuffix("B"), MODELS[name].params / 1e9
    digits = len(published.partition(".")[2])
    assert abs(billions / float(published) - 1) < 0.01 or round(billions, digits) == float(
        published
    )


# Published active parameters: Mixtral's paper says 13B, Qwen3's 3B and 22B, DeepSeek-V3's 37B.
@pytest.mark.parametrize(
    "name, billions",
    [("mixtral-8x7b", 13), ("qwen3-30b-a3b", 3), ("qwen3-235b-a22b", 22), ("deepseek-v3", 37)],
)
def test_active_parameters_match_the_published_count(name, billions):
    assert round(MODELS[name].active_params / 1e9) == billions


# ---------------------------------------------------------------- KV cache


@pytest.mark.parametrize("name", MODELS)
def test_kv_bytes_equal_the_cache_that_transformers_builds(name):
    layers = MODELS[name].num_dense_layers + 1
    shape = dataclasses.replace(MODELS[name], num_hidden_layers=layers, vocab_size=128)
    model, tokens = transformers_model(shape), 5
    cache = model(
        input_ids=torch.zeros(1, tokens, dtype=torch.long, device="meta"), use_cache=True
    ).past_key_values
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    # transformers' Falcon repeats each KV head for its 16 query heads before it caches them: 16
    # times what the model needs.
    waste = 16 if name == "falcon-40b" else 1
    assert stored == waste * tokens * calc.kv_bytes_per_token(shape)
    assert (
        calc.kv_bytes_per_token(MODELS[name]) * layers
        == calc.kv_bytes_per_token(shape) * MODELS[name].num_hidden_layers
    )


@pytest.mark.parametrize(
    "name, kib",
    [
        ("llama-2-7b", 512),
        ("llama-2-13b", 800),
        ("llama-2-70b", 320),
        ("llama-3-8b", 128),
        ("llama-3-405b", 504),
        ("mixtral-8x7b", 128),
        ("deepseek-v3", 68.625),
        ("gpt-j-6b", 448),
    ],
)
def test_kv_bytes_by_hand(name, kib):
    assert calc.kv_bytes_per_token(MODELS[name], bits_per_value=16) == kib * 1024
    assert calc.kv_bytes_per_token(MODELS[name], bits_per_value=8) == kib * 512


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made within it held at one time; works on the meta device."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._hold(x.untyped_storage())
        return out

    def _hold(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key, size):
        self.seen.discard(key)
        self.live -= size


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "qwen3-32b"])
def test_activations_are_what_a_layer_of_transformers_holds(name):
    """An eager library frees a little later, or earlier, than we count: within a quarter."""
    shape, tokens = dataclasses.replace(MODELS[name], num_hidden_layers=1, vocab_size=8), 2048
    layer = transformers_model(shape).model.layers[0]
    rotation = [torch.empty(1, tokens, shape.head_dim, device="meta", dtype=torch.bfloat16)] * 2
    with torch.inference_mode(), LiveBytes() as live:
        x = torch.empty(1, tokens, shape.hidden_size, device="meta", dtype=torch.bfloat16)
        layer(x, attention_mask=None, position_embeddings=rotation)
    counted = calc.activation_bytes(shape, tokens, batch=1)
    assert 0.75 < live.peak / counted < 1.25


def test_sequences_that_fit():
    # 80 GB, 16 GB of weights, 128 KiB a token, 4096 tokens: 64e9 / 2^29 = 119.2
    assert calc.sequences_that_fit(80e9, 16e9, 2**17, 4096) == 119
    assert calc.sequences_that_fit(16e9 + 2**29, 16e9, 2**17, 4096) == 1  # exactly one
    assert calc.sequences_that_fit(16e9 + 2**29 - 1, 16e9, 2**17, 4096) == 0
    assert calc.sequences_that_fit(10e9, 16e9, 2**17, 4096) == 0  # not even the weights


@pytest.mark.parametrize(
    "total, each, gpus", [(79, 80, 1), (80, 80, 1), (81, 80, 2), (161, 80, 4), (640, 80, 8)]
)
def test_gpus_needed(total, each, gpus):
    assert calc.gpus_needed(total, each) == gpus


# ---------------------------------------------------------------- floors

TOY = ModelShape(
    "toy",
    "0.0B",
    "made up",
    hidden_size=4,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=2,
    intermediate_size=8,
    vocab_size=10,
)


def test_floors_of_a_model_small_enough_for_paper():
    # a layer: q 16, k 8, v 8, o 16, MLP 3·4·8 = 96 -> 144; two layers 288; embedding and head 40
    # each
    assert TOY.params == 288 + 80
    # decode, 3 sequences of 5 tokens: weights 288 + 40 once, cache 3·5·(2·2·1·2) values, 2 bytes
    # each
    step = calc.decode_floor(TOY, batch=3, context=5, bandwidth=1e12, peak=1e12)
    assert step.bytes_moved == 2 * (328 + 3 * 5 * 8)
    # FLOPs: 2 per weight and token; attention: 2 layers · 2 heads · (2 + 2) per key, times 2
    assert step.flops == 3 * 2 * 328 + 3 * 5 * 2 * (2 * 2 * (2 + 2))
    assert step.bound == "compute" and step.seconds == step.flops / 1e12
    # prefill of 5: layers for 5 tokens, head for one, 15 (query, key) pairs
    prompt = calc.prefill_floor(TOY, prompt_tokens=5, bandwidth=1e12, peak=1e12)
    assert prompt.flops == 5 * 2 * 288 + 2 * 40 + 15 * 2 * (2 * 2 * (2 + 2))
    assert prompt.bytes_moved == 2 * (328 + 5 * 8)


def test_decode_reads_the_weights_once_per_step():
    one, many = (
        calc.decode_floor(MODELS["llama-3-8b"], batch, 1, 4.8e12, 989e12) for batch in (1, 64)
    )
    assert many.seconds < 1.01 * one.seconds and many.bound == "memory"


def test_a_prefilled_token_is_cheaper_than_a_decoded_one():
    decode = calc.decode_floor(MODELS["llama-3-8b"], 1, 2048, 4.8e12, 989e12)
    prefill = calc.prefill_floor(MODELS["llama-3-8b"], 2048, 4.8e12, 989e12)
    assert prefill.bound == "compute" and prefill.seconds / 2048 < decode.seconds / 100


def test_a_tied_head_is_read_and_an_untied_embedding_is_not():
    tied = dataclasses.replace(TOY, tie_word_embeddings=True)
    assert tied.params == TOY.params - 40 and tied.params_read(1) == TOY.params_read(1) == 328


def test_experts_touched():
    mixtral = MODELS["mixtral-8x7b"]
    assert mixtral.experts_touched(1) == pytest.approx(2)
    torch.seed()
    batch, draws = 5, 4000
    # each token: 2 of 8, evenly
    picks = torch.rand(draws, batch, 8).topk(2, dim=-1).indices.flatten(1)
    seen = torch.zeros(draws, 8).scatter_(1, picks, 1).sum(-1)
    assert mixtral.experts_touched(batch) == pytest.approx(
        seen.mean().item(), abs=6 * seen.std().item() / draws**0.5
    )
    assert mixtral.params_read(10**6) == pytest.approx(mixtral.params - mixtral.embedding_params)


# ---------------------------------------------------------------- money


def test_cost_by_hand():
    # $3.60 an hour is $0.001 a second; at 1000 tokens/s a million tokens take 1000 s
    assert calc.cost_per_million_tokens(3.60, 1000) == pytest.approx(1.0)
    assert calc.cost_per_million_tokens(3.60, 1000, utilisation=0.25) == pytest.approx(4.0)
    # $86.40 a day against $0.50 a million: 172.8 million tokens a day
    assert calc.break_even_tokens_per_day(3.60, 0.50) == pytest.approx(172.8e6)


def test_break_even_is_where_both_cost_the_same():
    dollars_per_hour, api = 2.75, 0.6
    tokens = calc.break_even_tokens_per_day(dollars_per_hour, api)
    assert calc.cost_per_million_tokens(dollars_per_hour, tokens / 86400) == pytest.approx(api)


@pytest.mark.parametrize(
    "call",
    [
        lambda bad: calc.weight_bytes(TOY, bad),
        lambda bad: calc.kv_bytes_per_token(TOY, bad),
        lambda bad: calc.sequences_that_fit(1e9, 1e6, 100, bad),
        lambda bad: calc.decode_floor(TOY, bad, 5, 1e12, 1e12),
        lambda bad: calc.decode_floor(TOY, 5, bad, 1e12, 1e12),
        lambda bad: calc.prefill_floor(TOY, bad, 1e12, 1e12),
        lambda bad: calc.activation_bytes(TOY, bad, 5),
        lambda bad: calc.activation_bytes(TOY, 5, bad),
        lambda bad: calc.tokens_per_dollar(bad, 100),
        lambda bad: calc.cost_per_million_tokens(bad, 100),
        lambda bad: calc.cost_per_million_tokens(1, bad),
        lambda bad: calc.cost_per_million_tokens(1, 100, bad),
        lambda bad: calc.break_even_tokens_per_day(1, bad),
    ],
)
@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "8"])
def test_a_number_that_cannot_be_is_named(call, bad):
    with pytest.raises((ValueError, TypeError)) as error:
        call(bad)
    assert "\n" not in str(error.value) and "accepted" in str(error.value)


def test_unknown_model_lists_the_known():
    with pytest.raises(ValueError, match=r"'gpt-9'.*known are llama-2-7b, .*falcon-40b"):
        find_model("gpt-9")
    assert find_model("Llama-3-8B").name == "llama-3-8b"
