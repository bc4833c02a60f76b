"""What the engine loads: every family with transformers' logits, fused on a GPU; and one line for
what it cannot load.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l06_mla.deepseek import DeepseekDecoder, absorbed
from lessons.l07_kernel_fusion import optimized, stand_ins
from lessons.l07_kernel_fusion.fused_decoder import FusedDecoder, FusedRMSNorm, fused, ops_of
from lessons.toolbox.model.config_json import CheckpointError
from reference.engine import model as module
from reference.engine.model import load_model

SMALL = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    eos_token_id=None,
    bos_token_id=None,
)
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=5),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "deepseek_v3": DeepseekV3Config(
        **SMALL | dict(num_key_value_heads=4),
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        q_lora_rank=20,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=8,
        v_head_dim=12,
    ),
}
pytestmark = pytest.mark.usefixtures("seed")


@torch.no_grad()
def saved(family, folder):
    """transformers' model with random weights, norms included, saved in `folder`."""
    theirs = (
        AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="eager")
        .eval()
        .float()
    )
    for name, tensor in theirs.state_dict(keep_vars=True).items():
        tensor.normal_(std=0.3 if tensor.dim() == 1 else 1.5 * tensor.shape[-1] ** -0.5)
        if name.endswith("norm.weight"):
            tensor.add_(1)
    theirs.save_pretrained(folder)
    return theirs


@torch.no_grad()
def logits_of(model, tokens):
    return model.logits(model(tokens, whole_sequence(model, len(tokens))))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(3)
def test_every_family_gives_the_logits_of_transformers(family, tmp_path):
    """As loaded, and fused: with PyTorch's operations and with the kernels, interpreted."""
    theirs, tokens = saved(family, tmp_path), torch.randint(97, (19,))
    ours = load_model(tmp_path, device="cpu", dtype=torch.float32)
    assert type(ours) is (DeepseekDecoder if family == "deepseek_v3" else Decoder)
    expected = theirs(tokens[None]).logits[0].detach()
    assert 0.3 < expected.std() < 30, "the model under test must say something"
    models = [ours, fused(ours, ops_of(stand_ins))] + (
        [fused(ours, ops_of(optimized))] if not torch.cuda.is_available() else []
    )
    for model in models:
        torch.testing.assert_close(logits_of(model, tokens), expected, atol=2e-4, rtol=0)


def test_deepseek_twins_of_the_fused_twin(tmp_path):
    """Its forms are made from the twin as from the model: absorbed, and with the norms inside its
    attention fused.
    """
    saved("deepseek_v3", tmp_path)
    model, tokens = load_model(tmp_path, "cpu", "float64"), torch.randint(97, (9,))
    twin = fused(model)
    assert isinstance(twin, FusedDecoder)
    assert type(twin.layers[0].self_attn.kv_a_layernorm) is FusedRMSNorm
    assert type(twin.layers[2].mlp.experts[0]).__name__ == "FusedMLP"
    for one in (twin, absorbed(twin), fused(absorbed(model))):
        torch.testing.assert_close(
            logits_of(one, tokens), logits_of(model, tokens), atol=1e-11, rtol=1e-11
        )


def test_what_is_loaded_follows_the_device(tmp_path, monkeypatch):
    """Here without a GPU: the device's type alone decides about the twin and the default dtype."""
    saved("llama", tmp_path)
    assert load_model(str(tmp_path), "cpu").dtype == torch.float32 and not isinstance(
        load_model(tmp_path, "cpu"), FusedDecoder
    )
    assert load_model(tmp_path, "cpu", "torch.bfloat16").dtype == torch.bfloat16
    asked = {}

    def loader(name, device, dtype, *products):
        asked.update(device=device, dtype=dtype)
        return Decoder.from_pretrained(name)

    monkeypatch.setattr(module, "load_any", loader)
    monkeypatch.setattr(module, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(module, "default_dtype", lambda: torch.bfloat16)
    assert isinstance(load_model(tmp_path), FusedDecoder)
    assert asked == dict(device=torch.device("cuda"), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            dict(name_or_path="no/such/model"),
            CheckpointError,
            "unknown model 'no/such/model': no such folder",
        ),
        (
            dict(name_or_path="models/tiny", device="tpu"),
            ValueError,
            "device: got 'tpu'; accepted: cpu, cuda or cuda:N",
        ),
        (
            dict(name_or_path="models/tiny", device="meta"),
            ValueError,
            "device: got 'meta'; accepted",
        ),
        (dict(name_or_path="models/tiny", device=7.5), ValueError, "device: got 7.5; accepted"),
        (
            dict(name_or_path="models/tiny", device="cuda:99"),
            ValueError,
            "device: got 'cuda:99', PyTorch finds . CUDA devices",
        ),
        (
            dict(name_or_path="models/tiny", device="cpu", dtype="int8"),
            ValueError,
            "dtype: got 'int8'; accepted: float64, float32",
        ),
        (
            dict(name_or_path="models/tiny", device="cpu", dtype=torch.int64),
            ValueError,
            "dtype: got torch.int64; accepted: float64",
        ),
    ],
)
def test_bad_arguments_are_one_line(arguments, error, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(error, match=message) as caught:
        load_model(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
def test_a_gpu_gets_the_fused_twin():
    model = load_model("models/tiny")
    assert (
        isinstance(model, FusedDecoder)
        and model.device.type == "cuda"
        and model.layers[0].mlp.ops == ops_of(optimized)
    )
