"""The engine over quantized weights: every request gets the tokens that the same weights give it
alone, whatever the scheduler does, and `quantization=` means what it says.
"""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import generate as alone
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l06_mla.deepseek import absorbed, load_decoder
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l18_weight_quantization.gguf.gguf_mixture import MIXTURES
from lessons.l18_weight_quantization.linear import QuantizedLinear, quantized
from lessons.l18_weight_quantization.methods.calibration import calibration_windows
from lessons.l18_weight_quantization.naive import dequantize_matmul, round_to_nearest
from lessons.l18_weight_quantization.weights import (
    Float8Weight,
    GroupedInt,
    Mxfp4Weight,
    Nf4Weight,
    Nvfp4Weight,
)
from lessons.toolbox.model.checkpoint import REPOSITORY, load_tokenizer
from lessons.toolbox.model.config import ModelConfig
from reference import LLM, SamplingParams
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.engine.model import load_model
from reference.engine.packed import can_pack, packed
from reference.weights.quantization import ACCEPTED, METHODS, Settings, check_stored, quantize_model
from reference.weights.quantize import GGUF, main
from tests.engine_cases import LONGEST, assert_clean, greedy, new_engine, new_model, run

pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture(scope="module")
def model() -> Decoder:
    """The engine tests' model, its linear layers in 4 bits."""
    return quantize_model(new_model(), "int4", None, Settings(group_size=16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small random checkpoint with the tokenizer of models/tiny."""
    out = tmp_path_factory.mktemp("small")
    for file in (REPOSITORY / "models/tiny").glob("*.json"):
        shutil.copyfile(file, out / file.name)
    raw = json.loads((out / "config.json").read_text())
    raw |= dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, head_dim=16)
    raw |= dict(num_attention_heads=4, max_position_embeddings=128)
    (out / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(0)
    tensors = {}
    with torch.device("meta"):
        shapes = Decoder(ModelConfig("llama", 4096, 64, 1, 4, 2, 16, 128, 128)).state_dict()
    for name, tensor in shapes.items():
        if name != "lm_head.weight":
            drawn = torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5
            tensors[f"model.{name}"] = drawn + 1 if tensor.ndim == 1 else 1.5 * drawn
    save_file(tensors, out / "model.safetensors")
    return out


# ---------------------------------------------------------------- the scheduler

WAYS = {
    "small chunks": dict(
        num_blocks=200, block_size=3, cache=HashBlocks, max_num_seqs=5, max_num_batched_tokens=7
    ),
    "few blocks, hashes": dict(num_blocks=10, block_size=4, cache=HashBlocks, max_num_seqs=8),
    "swapping": dict(num_blocks=10, block_size=4, host_blocks=1000, max_num_seqs=8),
}


@pytest.fixture(scope="module")
def asked(model):
    """Prompts, some of which begin alike, how many tokens each gets, and which they are."""
    random.seed(0)
    shared = torch.randint(60, (9,)).tolist()
    prompts = [torch.randint(60, (n,)).tolist() for n in (2, 14)]
    prompts += [shared + torch.randint(60, (n,)).tolist() for n in (3, 6, 9)]
    limits = [12, 9, 11, 4, 10]
    return prompts, limits, alone(model, prompts, limits)


@pytest.mark.parametrize("way", WAYS)
def test_every_request_gets_the_tokens_of_running_alone(model, asked, way):
    prompts, limits, want = asked
    engine = new_engine(model, **WAYS[way])
    got = run(engine, prompts, [greedy(n) for n in limits], [0, 0, 0, 2, 5])
    assert [got[str(at)] for at in range(len(prompts))] == [[tokens] for tokens in want]
    assert_clean(engine)


def test_speculation_with_a_quantized_target_and_its_own_weights_as_the_draft(model):
    """What a quantized model drafts for itself is always accepted; what the model in full precision
    drafts for it is right now and then. No tokens change.
    """
    answers = [[]]
    while any(
        len(tokens) < 7 for tokens in answers
    ):  # what is drafted after an end is not accepted
        prompts = [torch.randint(60, (6,)).tolist() * 2 for _ in range(2)]
        answers = alone(model, prompts, 7)
    want = {str(at): [tokens] for at, tokens in enumerate(answers)}
    params = [SamplingParams(temperature=0, max_tokens=7, detokenize=False)] * 2
    small = dict(max_num_seqs=4, block_size=4, num_gpu_blocks_override=60, max_model_len=LONGEST)
    config = dict(method="draft", model="made here", num_speculative_tokens=3)
    for name, drafter in {"in full precision": new_model(), "itself": model}.items():
        engine = engine_over(model, None, EngineArgs(speculative_config=config, **small), drafter)
        assert run(engine, prompts, params) == want, name
        speculation = engine.speculation.counts
        assert speculation.drafted
        if name == "itself":
            assert speculation.accepted == speculation.drafted


@pytest.mark.skipif(not can_pack(torch.float32), reason="NOT RUN: no oneDNN in this PyTorch")
def test_packing_leaves_quantized_layers_alone_and_packs_the_rest():
    plain = new_model().cpu()
    everything = quantize_model(plain, "int8", None)
    twin = packed(fused(everything))
    for part in ("layers.0.self_attn", "layers.1.mlp"):
        linears = [x for x in twin.get_submodule(part).modules() if isinstance(x, QuantizedLinear)]
        assert len(linears) == (4 if part.endswith("attn") else 3)
    assert type(twin.lm_head).__name__ == "PackedLinear"

    def only_k(name, linear):
        return round_to_nearest(linear.weight, 8, None) if name.endswith("k_proj") else None

    mixed = packed(fused(quantized(plain, only_k, dequantize_matmul)))
    assert type(mixed.layers[0].self_attn).__name__ == "FusedAttention"
    assert type(mixed.layers[0].mlp).__name__ == "PackedMLP"


# ---------------------------------------------------------------- the argument

KINDS = dict(int8=GroupedInt, int4=GroupedInt, fp8=Float8Weight, nf4=Nf4Weight, mxfp4=Mxfp4Weight)
KINDS |= dict(nvfp4=Nvfp4Weight)
KINDS |= dict(gptq=GroupedInt, awq=GroupedInt, bitsandbytes=Nf4Weight)
BITS = dict(int8=(8, 8.3), int4=(4.3, 4.4), fp8=(8, 8.6), nf4=(4.1, 4.2), mxfp4=(4.25, 4.25))
BITS |= dict(nvfp4=(4.5, 4.6))
BITS |= dict(gptq=(4.3, 4.4), awq=(4.3, 4.4), bitsandbytes=(4.1, 4.2))


@pytest.mark.parametrize("method", KINDS)
def test_every_method_quantizes_while_loading(method, folder, monkeypatch):
    few = lambda tokenizer, count, length: calibration_windows(tokenizer, 2, 32)
    monkeypatch.setattr("reference.weights.quantization.calibration_windows", few)
    llm = LLM(str(folder), quantization=method, max_model_len=64, num_gpu_blocks_override=8)
    layers = [x for x in llm.engine.runner.model.modules() if isinstance(x, QuantizedLinear)]
    assert len(layers) == 7 and all(type(x.quantized) is KINDS[method] for x in layers)
    low, high = BITS[method]
    assert all(low <= layer.quantized.bits_per_weight <= high for layer in layers)
    prompts = [[5, 6, 7], [9] * 12]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    got = [output.outputs[0].token_ids for output in outputs]
    assert got == alone(llm.engine.runner.model, prompts, 3)


def test_the_argument_and_the_checkpoint():
    for name in ACCEPTED:
        EngineArgs.read(model="models/tiny", quantization=name)
    check_stored(None, "gptq")
    check_stored("gptq_marlin", "gptq")
    check_stored("gguf", "gguf")
    check_stored("inc", "auto-round")
    for given in ("awq", "int4", "fp8"):
        with pytest.raises(ValueError, match=r"quantization: got .*; accepted: None or 'gptq'"):
            check_stored(given, "gptq")
    with pytest.raises(ValueError, match=r"got 'compressed-tensors'; accepted: int8, int4, .* for"):
        load_model("models/tiny", "cpu", quantization="compressed-tensors")
    odd = Decoder(ModelConfig("llama", 37, 30, 1, 3, 1, 10, 19, 96))
    with pytest.raises(
        ValueError, match=r"layers.0.self_attn.q_proj: weight: got .*multiple of 32"
    ):
        quantize_model(odd, "mxfp4", None)


def test_deepseek_keeps_the_matrix_that_absorption_reads(tmp_path):
    from tests.test_deepseek import CASES, random_model

    random_model(CASES["v3"]).save_pretrained(tmp_path)
    model = quantize_model(load_decoder(tmp_path), "int8", None)
    assert any(isinstance(part, QuantizedLinear) for part in model.modules())
    tokens = torch.tensor([1, 2, 3, 4])
    logits = [
        one.logits(one(tokens, whole_sequence(one, len(tokens))))
        for one in (model, absorbed(model))
    ]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    "options, stored",
    [
        ("--method int8", "compressed-tensors"),
        ("--method int4 --group-size 16 --format gptq --symmetric", "gptq"),
        ("--method fp8 --format fp8", "fp8"),
        ("--method int4 --group-size 64 --activations int8", "compressed-tensors"),
        ("--method fp8 --activations fp8", "compressed-tensors"),
        ("--method nf4 --no-double-quant", "bitsandbytes"),
        ("--method gptq --group-size 32 --act-order --windows 1", "gptq"),
        ("--method awq --group-size 32 --windows 1", "awq"),
    ],
)
def test_the_command_writes_what_the_engine_runs(
    options, stored, folder, tmp_path, capsys, request
):
    if "awq" in options and not request.config.getoption("--all"):
        pytest.skip("NOT RUN: a search of several seconds; --all runs it")
    out = tmp_path / "out"
    arguments = ["--model", str(folder), "--out", str(out), "--device", "cpu", *options.split()]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "7 layers" in said and f"format {stored}" in said and said.count("\n") == 1
    raw = json.loads((out / "config.json").read_text())
    assert raw["quantization_config"]["quant_method"] == stored
    ours = load_model(out, "cpu", quantization=stored)
    assert sum(isinstance(part, QuantizedLinear) for part in ours.modules()) == 7
    layers = [part for part in ours.modules() if isinstance(part, QuantizedLinear)]
    assert {part.rounds_inputs for part in layers} == {"--activations" in options}
    assert (
        load_tokenizer(out)("def f(")["input_ids"] == load_tokenizer(folder)("def f(")["input_ids"]
    )
    if (
        "--method int8" in options
    ):  # what was written is what the engine would have made of the model itself
        twin = load_model(folder, "cpu", quantization="int8")
        assert alone(ours, [[3, 4]], 5) == alone(twin, [[3, 4]], 5)
    assert main(arguments) == 2, "the folder is full now"
    assert "out: got" in capsys.readouterr().err


def test_the_command_writes_a_gguf_file(folder, tmp_path, capsys):
    out = tmp_path / "new" / "small.gguf"
    arguments = ["--model", str(folder), "--out", str(out), "--device", "cpu"]
    assert main([*arguments, "--method", "Q8_0"]) == 0
    assert "Q8_0" in capsys.readouterr().out
    ours, plain = load_model(out, "cpu", quantization="gguf"), load_model(folder, "cpu")
    assert sum(isinstance(part, QuantizedLinear) for part in ours.modules()) >= 7
    matrix = ours.layers[0].mlp.up_proj.quantized.dequantize()
    torch.testing.assert_close(matrix, plain.layers[0].mlp.up_proj.weight, atol=0.01, rtol=0)
    assert main([*arguments, "--method", "q8_0"]) == 2
    assert "accepted: a new file that ends in .gguf" in capsys.readouterr().err
    with pytest.raises(ValueError, match="got 'gptq'; accepted: None or 'gguf'"):
        load_model(out, "cpu", quantization="gptq")
    assert {name.upper() for name in GGUF} == set(MIXTURES)


@pytest.mark.parametrize(
    "options, said",
    [
        ("--method q4_k_m --bits 4", "--bits: got q4_k_m as --method; accepted: gptq, awq"),
        ("--method q4_k_m", "accepted: a new file that ends in .gguf"),
        ("--method fp8 --bits 4", "--bits: got fp8 as --method; accepted: gptq, awq"),
        ("--method int8 --act-order", "--act-order: got int8 as --method; accepted: gptq"),
        (
            "--method int4 --group-size 48",
            "group_size: got 48; accepted: a divisor of the matrix's",
        ),
        ("--method nf4 --format awq", "--format: got awq for nf4; accepted: bitsandbytes"),
        ("--method fp8 --group-size 0", "--group-size: got fp8 as --method; accepted: int4, int8"),
        (
            "--method gptq --act-order --format compressed-tensors",
            "--format: got compressed-tensors with --act-order; accepted: gptq",
        ),
        ("--method awq --bits 8", "--bits: got 8 for the format awq; accepted: 4"),
        ("--method nf4 --activations int8", "--activations: got nf4 as --method; accepted: int8"),
        ("--method fp8 --activations int8", "--activations: got int8 for fp8; accepted: fp8"),
        ("--method gptq --activations int8", "--format: got gptq with --activations; accepted: co"),
        ("--method int8 --model no/such/folder", "unknown model 'no/such/folder'"),
    ],
)
def test_a_command_that_cannot_work_is_one_line(
    options, said, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ["--model", str(folder), "--out", str(tmp_path / "out"), *options.split()]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("quantize: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_help_names_every_method_and_format(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    for word in (*METHODS[:4], "awq", "gptq", "compressed-tensors", "bitsandbytes", "vLLM"):
        assert word in said
