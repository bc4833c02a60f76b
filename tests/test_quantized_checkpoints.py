"""Quantized checkpoints of every family and layout: what is read is what the codes mean, what is
written is what transformers reads, and what cannot be read is one line.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FineGrainedFP8Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Mxfp4Config,
    Phi3Config,
    Qwen2Config,
)

from lessons.l01_roofline.planner.formats import LAYERS_ONLY
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l06_mla.deepseek import load_decoder
from lessons.l17_tree_speculation.heads.mtp_files import load_mtp
from lessons.l17_tree_speculation.lab.mtp_checkpoint import write_checkpoint
from lessons.l18_weight_quantization.linear import QuantizedLinear, quantized
from lessons.l18_weight_quantization.methods.nvfp4 import to_nvfp4
from lessons.l18_weight_quantization.naive import (
    dequantize_matmul,
    round_to_nearest,
    to_float8,
    to_mxfp4,
    to_nf4,
)
from lessons.l18_weight_quantization.weights import GroupedInt
from lessons.toolbox.model.config_json import CheckpointError
from reference.checkpoints.float_layouts import bnb_nf4, float_quantized
from reference.checkpoints.layouts import awq, gptq, pack_quantized
from reference.checkpoints.quantized_checkpoint import load_quantized, load_quantized_mtp
from reference.checkpoints.write_checkpoint import FORMATS, save_quantized
from tests.test_deepseek import random_model

pytestmark = pytest.mark.usefixtures("seed")

SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)
MOE = dict(num_local_experts=3, num_experts_per_tok=2)
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SHAPE, **MOE, sliding_window=None),
    "phi3": Phi3Config(
        **SHAPE,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
    "gemma2": Gemma2Config(**SHAPE, head_dim=16, query_pre_attn_scalar=16, sliding_window=5),
    "gpt_oss": GptOssConfig(**SHAPE, **MOE, head_dim=16, sliding_window=6),
    "deepseek_v3": DeepseekV3Config(
        **SHAPE | dict(num_key_value_heads=4),
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
}


def logits_of(model, tokens):
    with torch.no_grad():
        return model.logits(model(tokens, whole_sequence(model, len(tokens))))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{family: a random model of it, saved by transformers}."""
    found = {}
    for name, config in CONFIGS.items():
        found[name] = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        random_model(config).save_pretrained(found[name])
    return found


def with_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def acts_in_another_order(weight):
    """Codes as GPTQ with act-order leaves them: groups of columns that are no neighbours."""
    order = torch.randperm(weight.shape[1])
    grouped = round_to_nearest(weight[:, order], 4, 32)
    fields = grouped.codes, grouped.scales, grouped.zeros, 4, 32, order
    return GroupedInt(*fields)


INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def compressed(form, weights):
    schemes = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": schemes}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# family: how each matrix is quantized, its layout, what config.json says
STORED = {
    "llama": (acts_in_another_order, gptq(4, 32), GPTQ),
    "qwen2": (
        lambda w: round_to_nearest(w, 4, 32),
        awq(32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    ),
    "mixtral": (to_nf4, bnb_nf4(), NF4),
    "phi3": (
        lambda w: round_to_nearest(w, 4, 32),
        pack_quantized(4, 32, False),
        compressed("pack-quantized", INT4),
    ),
    "gemma2": (to_float8, float_quantized(), compressed("float-quantized", FP8)),
    "gpt_oss": (to_float8, float_quantized(), {"quant_method": "fbgemm_fp8"}),
    "deepseek_v3": (
        lambda w: to_float8(w, per="block"),
        float_quantized("weight_scale_inv", tile=True),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
    ),
}


def store(source, folder, quantize, layout, config):
    """The checkpoint in `source`, its projections quantized, under `folder`/quantized; and with the
    numbers that their codes mean, under `folder`/plain.
    """
    tensors = load_file(source / "model.safetensors")
    plain, codes = dict(tensors), {}
    for name, tensor in tensors.items():
        is_linear = tensor.ndim == 2 and name.endswith(
            ("proj.weight", "w1.weight", "w2.weight", "w3.weight", "_mqa.weight")
        )
        if not is_linear:
            codes[name] = tensor
            continue
        weight = quantize(tensor.float())
        plain[name] = weight.dequantize()
        parts = layout.write(weight)
        codes |= {name.removesuffix("weight") + end: x.contiguous() for end, x in parts.items()}
    for kind, content in (("quantized", codes), ("plain", plain)):
        (folder / kind).mkdir()
        save_file(content, folder / kind / "model.safetensors", metadata={"format": "pt"})
        (folder / kind / "config.json").write_text((source / "config.json").read_text())
    with_config(folder / "quantized", quantization_config=config)
    return len(plain.keys() - codes.keys()) or sum("scale" in name for name in codes)


@pytest.mark.parametrize("family", STORED)
def test_a_quantized_checkpoint_is_the_model_of_its_numbers(family, folders, tmp_path):
    store(folders[family], tmp_path, *STORED[family])
    ours, plain = load_quantized(tmp_path / "quantized"), load_decoder(tmp_path / "plain")
    layers = [part for part in ours.modules() if isinstance(part, QuantizedLinear)]
    assert len(layers) >= 8
    tokens = torch.randint(97, (19,))
    expected = logits_of(plain, tokens)
    assert expected.std() > 0.1, "the model under test must say something"
    torch.testing.assert_close(logits_of(ours, tokens), expected, atol=1e-5, rtol=1e-5)
    assert not any(parameter.requires_grad for parameter in ours.parameters())


def test_the_layer_of_deepseek_that_predicts_further_is_left_out(folders, tmp_path):
    """Its codes come after the last layer, and no config names them."""
    store(folders["deepseek_v3"], tmp_path, *STORED["deepseek_v3"])
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    further = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.1.self_attn" in name
    }
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in further.values())
    tokens = torch.randint(97, (9,))
    expected = logits_of(load_quantized(tmp_path / "quantized"), tokens)
    save_file(tensors | further, file)
    assert torch.equal(logits_of(load_quantized(tmp_path / "quantized"), tokens), expected)


@torch.inference_mode()
def test_the_layer_of_deepseek_that_predicts_further_may_be_codes(tmp_path):
    """As DeepSeek-V3's, in FP8: it drafts what the numbers that its codes mean draft."""
    write_checkpoint(tmp_path / "deepseek")
    store(tmp_path / "deepseek", tmp_path, *STORED["deepseek_v3"])
    target = load_decoder(tmp_path / "plain")
    plain = load_mtp(tmp_path / "plain", target)
    ours = load_quantized_mtp(tmp_path / "quantized", load_quantized(tmp_path / "quantized"))
    assert sum(isinstance(part, QuantizedLinear) for part in ours.layer.modules()) > 20
    inputs = torch.randn(2, 9, 48)
    found, want = (draft(*inputs, partial(whole_sequence(target, 9), 0)) for draft in (ours, plain))
    assert want.std() > 0.1, "the layer under test must say something"
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    with pytest.raises(CheckpointError, match="weights are quantized"):
        load_mtp(tmp_path / "quantized", target)
    with pytest.raises(CheckpointError, match="has no quantization_config"):
        load_quantized_mtp(tmp_path / "plain", target)


def publish_gpt_oss(source, folder):
    """The model of `source` in `folder` as OpenAI publishes it; returns its tensors."""
    tensors = load_file(source / "model.safetensors")
    tensors = {name: x.bfloat16() for name, x in tensors.items()}  # because transformers' are
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        for stacked in (name, name.replace("gate_up", "down")):
            weights = [to_mxfp4(matrix.T.contiguous()) for matrix in tensors.pop(stacked).float()]
            rows = [weight.codes.view(len(weight.codes), -1, 16) for weight in weights]
            tensors[f"{stacked}_blocks"] = torch.stack(rows)
            tensors[f"{stacked}_scales"] = torch.stack([weight.exponents for weight in weights])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    published = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.norm"]}
    with_config(folder, quantization_config=published)
    return tensors


def test_gpt_oss_as_published(folders, tmp_path):
    """Its experts in MXFP4, under the names of the published files; transformers widens them."""
    tensors = publish_gpt_oss(folders["gpt_oss"], tmp_path)
    ours, tokens = load_quantized(tmp_path), torch.randint(97, (19,))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=Mxfp4Config(dequantize=True),
        attn_implementation="eager",
    ).float()
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0].float()
    torch.testing.assert_close(logits_of(ours, tokens), expected, atol=2e-4, rtol=0)
    tensors.pop("model.layers.1.mlp.experts.down_proj_scales")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layer layers.1.mlp.experts.down_proj in .*scales"):
        load_quantized(tmp_path)


# ---------------------------------------------------------------- written

WRITTEN = {
    "gptq": ("gptq", lambda w: round_to_nearest(w, 4, 32, symmetric=True)),
    "gptq, act-order": ("gptq", acts_in_another_order),
    "gptq, 8 bits": ("gptq", lambda w: round_to_nearest(w, 8, None)),
    "awq": ("awq", lambda w: round_to_nearest(w, 4, 32)),
    "int4": ("compressed-tensors", lambda w: round_to_nearest(w, 4, 32)),
    "int4, symmetric": ("compressed-tensors", lambda w: round_to_nearest(w, 4, 32, True)),
    "int8": ("compressed-tensors", lambda w: round_to_nearest(w, 8, None, True)),
    "fp8": ("compressed-tensors", to_float8),
    "fp8, one scale": ("compressed-tensors", lambda w: to_float8(w, per="tensor")),
    "fp8, tiles": ("fp8", lambda w: to_float8(w, per="block")),
    "nvfp4": ("compressed-tensors", to_nvfp4),
    "nvfp4, modelopt": ("modelopt", to_nvfp4),
    "fp8, modelopt": ("modelopt", to_float8),
    "fp8, one scale, modelopt": ("modelopt", lambda w: to_float8(w, per="tensor")),
    "nf4": ("bitsandbytes", to_nf4),
    "nf4, plain scales": ("bitsandbytes", lambda w: to_nf4(w, False)),
}
NOT_OF_TRANSFORMERS = ("gptq", "awq", "modelopt")  # which needs a GPU's kernels, or has no reader
READERS = {"compressed-tensors": "compressed_tensors", "bitsandbytes": "bitsandbytes"}


def written(folders, family, name, tmp_path):
    """A model quantized as WRITTEN[name] says, and the folder that it was written to."""
    form, quantize = WRITTEN[name]
    model = load_decoder(folders[family])
    twin = quantized(model, lambda _, linear: quantize(linear.weight), dequantize_matmul)
    save_quantized(twin, str(folders[family]), tmp_path / "out", form)
    return twin, tmp_path / "out"


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read_back_to_the_last_bit(name, folders, tmp_path):
    family = {"awq": "qwen2", "int4": "mixtral", "fp8": "gemma2"}.get(name, "llama")
    twin, out = written(folders, family, name, tmp_path)
    ours, tokens = load_quantized(out), torch.randint(97, (9,))
    assert torch.equal(logits_of(ours, tokens), logits_of(twin, tokens))
    assert WRITTEN[name][0] in FORMATS


@pytest.mark.parametrize(
    "name", [name for name, (form, _) in WRITTEN.items() if form not in NOT_OF_TRANSFORMERS]
)
def test_transformers_reads_what_is_written(name, folders, tmp_path):
    form = WRITTEN[name][0]
    if form in READERS:
        pytest.importorskip(READERS[form], reason=f"NOT RUN: {form} is not installed")
        pytest.importorskip("accelerate", reason="NOT RUN: accelerate is not installed")
    how = dict(quantization_config=FineGrainedFP8Config(dequantize=True)) if form == "fp8" else {}
    twin, out = written(folders, "llama", name, tmp_path)
    how["dtype"] = torch.bfloat16 if name == "nvfp4" else torch.float32
    theirs = AutoModelForCausalLM.from_pretrained(out, device_map="cpu", **how)
    if form == "bitsandbytes":  # whose product on a CPU may round to bfloat16
        assert_numbers_of_bitsandbytes(theirs, twin)
        return
    if name == "nvfp4":  # which compressed-tensors makes numbers of in bfloat16 alone
        with torch.no_grad():
            theirs(torch.zeros(1, 1, dtype=torch.int64))  # and only when it runs
        for layer, part in layers_of(twin):
            got = theirs.get_submodule(f"model.{layer}").weight.float()
            expected = part.quantized.dequantize()
            torch.testing.assert_close(got, expected, atol=0, rtol=2**-7)
        return
    tokens = torch.randint(97, (9,))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0].float()
    torch.testing.assert_close(logits_of(twin, tokens), expected, atol=2e-4, rtol=0)


def layers_of(model) -> list:
    """The quantized layers, all 14 of the Llama under test, by their names."""
    layers = [(n, x) for n, x in model.named_modules() if isinstance(x, QuantizedLinear)]
    assert len(layers) == 14
    return layers


def assert_numbers_of_bitsandbytes(theirs, ours) -> None:
    """Every matrix in 4 or 8 bits means the same to bitsandbytes, but for the last bit. Raises
    AssertionError.
    """
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    for name, layer in layers_of(ours):
        part = theirs.get_submodule(f"model.{name}").weight
        if hasattr(part, "quant_state"):
            expected = dequantize_4bit(part.data, part.quant_state)
        else:
            expected = int8_vectorwise_dequant(part.data, part.SCB)
        got = layer.quantized.dequantize()
        torch.testing.assert_close(got, expected.float(), atol=0, rtol=3e-7)


def test_what_transformers_and_bitsandbytes_write_is_read(folders, tmp_path):
    pytest.importorskip("bitsandbytes", reason="NOT RUN: bitsandbytes is not installed")
    pytest.importorskip("accelerate", reason="NOT RUN: accelerate is not installed")
    from transformers import BitsAndBytesConfig

    nf4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    for name, how in {"nf4": nf4, "int8": dict(load_in_8bit=True)}.items():
        theirs = AutoModelForCausalLM.from_pretrained(
            folders["llama"],
            quantization_config=BitsAndBytesConfig(**how),
            dtype=torch.float32,
            device_map="cpu",
        )
        theirs.save_pretrained(tmp_path / name)
        assert_numbers_of_bitsandbytes(theirs, load_quantized(tmp_path / name))


def test_a_folder_that_is_full_and_a_family_whose_files_merge(folders, tmp_path):
    twin, out = written(folders, "llama", "int8", tmp_path)
    with pytest.raises(ValueError, match=r"out: got .* a folder that is empty or does not exist"):
        save_quantized(twin, str(folders["llama"]), out, "compressed-tensors")
    for form, said in {
        "awq": "got bits \\[8\\]|4 bits",
        "gguf2": "format: got 'gguf2'; accepted: gptq",
        "bitsandbytes": "format bitsandbytes: got GroupedInt in model.layers.0.self_attn.q_proj",
        "fp8": "format fp8: got GroupedInt",
    }.items():
        with pytest.raises(ValueError, match=said):
            save_quantized(twin, str(folders["llama"]), tmp_path / form, form)
    with pytest.raises(CheckpointError, match="model_type 'phi3' cannot be written"):
        written(folders, "phi3", "int8", tmp_path / "phi3")


def test_the_planner_counts_the_bits_that_matrices_take():
    weight = torch.randn(256, 4096)
    made = dict(
        int8=round_to_nearest(weight, 8, None, True),
        fp8=to_float8(weight),
        mxfp4=to_mxfp4(weight),
        nvfp4=to_nvfp4(weight),
        int4=round_to_nearest(weight),
        nf4=to_nf4(weight),
    )
    for name, matrix in made.items():
        # a scale a row, and the offset of NF4, are not counted
        assert 0 <= matrix.bits_per_weight - LAYERS_ONLY[name] < 0.01, name


# ---------------------------------------------------------------- refused


@pytest.fixture(scope="module")
def stored_gptq(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gptq")
    store(folders["llama"], folder, *STORED["llama"])
    return folder / "quantized"


def refused(folder, said):
    with pytest.raises(CheckpointError, match=said) as error:
        load_quantized(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    "config, said",
    [
        (dict(quant_method="hqq"), "quant_method: got 'hqq'; accepted: gptq, awq, compressed-ten"),
        (GPTQ | dict(bits=5), "quantization_config.bits: got 5; accepted: 2 or 3 or 4 or 8"),
        (GPTQ | dict(bits=True), "quantization_config.bits: got True"),
        (GPTQ | dict(bits=8), "layer layers.0.self_attn.q_proj in .*: qweight: got int32"),
        (GPTQ | dict(group_size=0), "quantization_config.group_size: got 0"),
        (
            GPTQ | dict(group_size=48),
            "layer .*: group_size: got 48; accepted: a divisor of the lay",
        ),
        (GPTQ | dict(group_size=16), r"qzeros: got int32 \[2, 8\]; accepted: int32 \[4, 8\]"),
        (GPTQ | dict(checkpoint_format="marlin"), "accepted: gptq or gptq_v2"),
        (GPTQ | dict(dynamic={"-:.*": {}}), "is I32, and no layer that the quantization_config"),
        (GPTQ | dict(dynamic={".*q_proj": {"bits": 8}}), "layer .*q_proj in .*: qweight: got int3"),
        (GPTQ | dict(dynamic={"(": {}}), r"'\(' is no regular expression"),
        (GPTQ | dict(dynamic={".*": {"rank": 3}}), "'quantization_config.dynamic' changes 'rank'"),
        (GPTQ | dict(dynamic=[".*"]), "dynamic: got .'..'.; accepted: an object"),
        (GPTQ | dict(rotation="hadamard"), "no reader knows this key; remove it if it changes"),
        (dict(quant_method="awq", bits=4, group_size=32, version="gemv"), "accepted: gemm"),
        (NF4 | dict(bnb_4bit_quant_type="fp4"), "bnb_4bit_quant_type: got 'fp4'; accepted: nf4"),
        (dict(quant_method="bitsandbytes"), "load_in_4bit: got None; accepted: true, or load_in_8"),
        (dict(quant_method="fp8", weight_block_size=[64, 64]), r"accepted: \[128, 128\], or null"),
        (
            compressed("pack-quantized", INT4 | dict(num_bits=2)),
            "num_bits: got 2; accepted: 4 or 8",
        ),
        (compressed("nvfp4-pack-quantized", INT4), "type: got 'int'; accepted: float"),
        (
            compressed("pack-quantized", INT4 | dict(dynamic=True)),
            "'weights.dynamic' must be False",
        ),
        (compressed("pack-quantized", None), "config_groups.group_0: got .* a scheme with weights"),
        (
            compressed("float-quantized", FP8) | dict(transform_config={"a": 1}),
            "transform_config: got .'a': 1.; accepted: an object of config_groups",
        ),
        (
            compressed("float-quantized", FP8) | dict(sparsity_config={"format": "bitmask"}),
            "sparsity_config: got .* accepted: null, or the format 'dense'",
        ),
        # no layer has this method's marker, so the codes are left over
        (dict(quant_method="mxfp4"), "is I32, and no layer that the quantization_config describes"),
    ],
)
def test_what_a_config_asks_for_in_vain_is_one_line(config, said, stored_gptq):
    before = (stored_gptq / "config.json").read_text()
    with_config(stored_gptq, quantization_config=config)
    try:
        refused(stored_gptq, said)
    finally:
        (stored_gptq / "config.json").write_text(before)


def test_tensors_that_do_not_fit_are_named(stored_gptq, tmp_path):
    tensors = load_file(stored_gptq / "model.safetensors")
    (tmp_path / "config.json").write_text((stored_gptq / "config.json").read_text())
    name = "model.layers.1.mlp.up_proj"
    changes = {
        "scales: got float16": {f"{name}.scales": torch.ones(3, 128).half()},
        "qzeros is missing": {f"{name}.qzeros": None},
        "tensor model.layers.1.mlp.up_proj.bias": {f"{name}.bias": torch.ones(128)},
        "tensor model.layers.1.mlp.up_proj.extra": {f"{name}.extra": torch.ones(1)},
        "up_proj.g_idx in .* is I32, and no layer": {f"{name}.qweight": None},
    }
    for said, change in changes.items():
        content = {key: x for key, x in (tensors | change).items() if x is not None}
        save_file(content, tmp_path / "model.safetensors")
        refused(tmp_path, said)
    # AutoGPTQ stores a bias of zeros for every layer
    save_file(tensors | {f"{name}.bias": torch.zeros(128)}, tmp_path / "model.safetensors")
    tokens = torch.randint(97, (5,))
    ours, same = load_quantized(tmp_path), load_quantized(stored_gptq)
    assert torch.equal(logits_of(ours, tokens), logits_of(same, tokens))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    refused(tmp_path, "pytorch_model.bin is a pickle, which may run any code when read, and stays")


def test_readers_of_16_bits_name_the_reader_of_codes(stored_gptq, folders):
    with pytest.raises(CheckpointError, match=r"quant_method 'gptq'\): load them with load_model"):
        load_decoder(stored_gptq)
    with pytest.raises(CheckpointError, match="has no quantization_config: load it with load_dec"):
        load_quantized(folders["llama"])
