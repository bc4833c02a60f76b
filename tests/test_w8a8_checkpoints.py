"""A checkpoint that asks for 8-bit activations gets them: lesson 19's product, in the layers that
its schemes name, and in no other. W8A8 and W4A8, scales found as tokens come or beforehand.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import inspect
import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l06_mla.deepseek import load_decoder
from lessons.l18_weight_quantization.linear import QuantizedLinear, quantized
from lessons.l18_weight_quantization.naive import dequantize_matmul, round_to_nearest, to_float8
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.proof.planted import with_bug
from reference.checkpoints.inputs import Rounding, inputs_of
from reference.checkpoints.write_checkpoint import save_quantized
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.engine.model import load_model
from reference.engine.sampling_params import SamplingParams
from reference.weights import activations as rounding_of_inputs
from reference.weights.activations import eight_bits
from tests.test_deepseek import random_model

pytestmark = pytest.mark.usefixtures("seed")

LLAMA = LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    eos_token_id=None,
)
TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
QUANTIZERS = {
    "int8": lambda x: round_to_nearest(x, 8, None, True),
    "fp8": to_float8,
    "fp8, one scale": lambda x: to_float8(x, per="tensor"),
    "int4": lambda x: round_to_nearest(x, 4, 32, True),
    "int4, zero points": lambda x: round_to_nearest(x, 4, 64),
}
INT, FLOAT = (dict(num_bits=8, type=name) for name in ("int", "float"))


def tokens_as(name: str) -> dict:
    return TOKENS | {"type": "float" if name.startswith("fp8") else "int"}


def stored(folder, name: str, activations: dict | None):
    """A random Llama with 8-bit weights, under `folder`/out; its config asks for `activations`."""
    random_model(LLAMA).save_pretrained(folder / "plain")
    twin = quantized(
        load_decoder(folder / "plain"),
        lambda _, part: QUANTIZERS[name](part.weight),
        dequantize_matmul,
    )
    save_quantized(twin, str(folder / "plain"), folder / "out", "compressed-tensors")
    file = folder / "out/config.json"
    config = json.loads(file.read_text())
    (scheme,) = config["quantization_config"]["config_groups"].values()
    scheme["input_activations"] = activations
    file.write_text(json.dumps(config))
    return folder / "out"


def layers(model) -> list[QuantizedLinear]:
    return [part for part in model.modules() if isinstance(part, QuantizedLinear)]


def logits_of(model, tokens):
    with torch.inference_mode():
        return model.logits(model(tokens, whole_sequence(model, len(tokens))))


def definition(x, weight, bias, rounding: Rounding):
    """In float64, from the formula: codes of the inputs, numbers of both."""
    numbers, scale, zero = x.double(), rounding.scale, 0.0
    largest = 448.0 if rounding.kind == "fp8" else 127.0
    if not rounding.is_symmetric:
        low, high = numbers.amin(1, keepdim=True).clamp(max=0), numbers.amax(1, keepdim=True)
        scale = (high.clamp(min=0) - low) / 255 if scale is None else scale.double()
        zero = torch.round(-128 - low / scale) if rounding.zero is None else rounding.zero.double()
    elif scale is None:
        scale = numbers.abs().amax(1, keepdim=True) / largest
    codes = numbers / scale + zero
    if rounding.kind == "fp8":
        codes = codes.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    else:
        codes = codes.round().clamp(-128, 127)
    out = (codes - zero) * scale @ weight.dequantize().double().T
    return out if bias is None else out + bias


def with_static(folder, scale: float, zero: int | None = None, name: str = "input_scale"):
    """The same checkpoint with a scale of inputs beside each matrix."""
    tensors = load_file(folder / "model.safetensors")
    layers = [x.rpartition(".")[0] for x in tensors if x.endswith(".weight_scale")]
    tensors |= {f"{layer}.{name}": torch.tensor([scale]) for layer in layers}
    if zero is not None:
        zeros = torch.tensor([zero], dtype=torch.int8)
        tensors |= {f"{layer}.input_zero_point": zeros.clone() for layer in layers}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


STATIC = dict(dynamic=False, strategy="tensor", symmetric=True)
SCALE = torch.tensor([0.05])
# what a scheme says of inputs, and what its layers do
ASKED = {
    "int8 tokens": (INT | TOKENS, Rounding("int8")),
    "fp8 tokens": (FLOAT | TOKENS, Rounding("fp8")),
    "int8, found before": (INT | STATIC, Rounding("int8", True, SCALE)),
    "fp8, found before": (FLOAT | STATIC, Rounding("fp8", True, SCALE)),
    "int8 with zero points": (INT | TOKENS | dict(symmetric=False), Rounding("int8", False)),
    "zero points found before": (
        INT | STATIC | dict(symmetric=False),
        Rounding("int8", False, SCALE, torch.tensor([-20.0])),
    ),
}
PAIRS = [(matrix, inputs) for inputs in ASKED for matrix in ("int8", "int4", "int4, zero points")]
PAIRS += [
    (matrix, inputs) for inputs in ASKED if "fp8" in inputs for matrix in ("fp8", "fp8, one scale")
]


def product_of(matrix: str, inputs: str) -> str:
    """Which product a layer has."""
    if "zero points" in inputs:
        return "product"
    if matrix.startswith("int4"):
        return "w4a8_matmul"
    return "w8a8_matmul" if matrix[:3] == inputs[:3] else "product"


@pytest.mark.parametrize("matrix, inputs", PAIRS)
def test_layers_compute_the_definition(matrix, inputs, tmp_path):
    """Each layer by itself, because a difference in the last bits of its input may become another
    code; and rounding the inputs changes something.
    """
    said, rounding = ASKED[inputs]
    folder, tokens = stored(tmp_path, matrix, said), torch.randint(97, (11,))
    if not said["dynamic"]:
        with_static(folder, float(SCALE), None if rounding.zero is None else int(rounding.zero))
    ours = load_model(folder, "cpu", "float64")
    assert len(layers(ours)) == 14 and all(part.rounds_inputs for part in layers(ours))
    seen = []

    def beside(x, weight, bias, own):
        got, wanted = own(x, weight, bias), definition(x, weight, bias, rounding)
        seen.append(float((got - wanted).norm() / wanted.norm()))
        return wanted

    products = [part.multiply for part in layers(ours)]
    assert {getattr(x, "func", x).__name__ for x in products} == {product_of(matrix, inputs)}
    for part in layers(ours):
        part.multiply = partial(beside, own=part.multiply)
    wanted = logits_of(ours, tokens)
    assert len(seen) == 14 and max(seen) < 1e-5
    for part in layers(ours):
        part.multiply = dequantize_matmul
    unrounded = logits_of(ours, tokens)
    assert 1e-3 < float((wanted - unrounded).norm() / unrounded.norm()) < 0.5


SLIPS = {
    "the middle is not moved": (" + zero).round()", ").round()"),
    "zero without a code": ("low, high = low.clamp(max=0), high.clamp(min=0)", "pass"),
    "a scale of every token's own": ("rounding.kind, rounding.scale)", "rounding.kind)"),
    "a step too wide": ("(high - low) / (HIGHEST - LOWEST)", "(high - low) / HIGHEST"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_rounding_is_seen(slip, tmp_path):
    wrong, weight = with_bug(rounding_of_inputs, tmp_path, *SLIPS[slip]), torch.eye(16)
    x = torch.rand(5, 16) + 3
    kind = Rounding("int8", True, SCALE) if "every" in slip else Rounding("int8", False)
    wanted = definition(x, to_float8(weight), None, kind).float()
    right = rounding_of_inputs.rounded(x, kind)
    torch.testing.assert_close(right, wanted, atol=1e-5, rtol=0)
    assert float((wrong.rounded(x, kind) - wanted).abs().max()) > 1e-3


@pytest.mark.filterwarnings("ignore")
def test_transformers_computes_the_same(tmp_path):
    """By compressed-tensors, in FP8. Its INT8 step is 1/127.5 of a token's largest value, and
    vLLM's and ours is 1/127, so that INT8 has lesson 19's definition alone.
    """
    reason = "NOT RUN: compressed-tensors is not installed"
    pytest.importorskip("compressed_tensors", reason=reason)
    folder, tokens = stored(tmp_path, "fp8", tokens_as("fp8")), torch.randint(97, (11,))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    with torch.no_grad():
        wanted = theirs(tokens[None]).logits[0].float()
    ours = load_model(folder, "cpu")

    def error() -> float:
        return float((logits_of(ours, tokens) - wanted).norm() / wanted.norm())

    assert error() < 0.01  # an input halfway between two codes may go either way, and is then 1e-3
    for part in layers(ours):
        part.multiply = dequantize_matmul
    assert error() > 0.03


@pytest.mark.parametrize(
    "activations",
    [
        None,
        dict(num_bits=4, type="float", strategy="tensor_group", dynamic="local", group_size=16),
        FLOAT | dict(strategy="group", group_size=128, dynamic=True),
    ],
)
def test_other_schemes_keep_their_inputs(activations, tmp_path):
    """FP4, and groups of a token in FP8, are multiplied in the model's type."""
    model = load_model(stored(tmp_path, "int8", activations), "cpu")
    assert len(layers(model)) == 14
    products = {inspect.getmodule(part.multiply).__name__ for part in layers(model)}
    assert products == {"lessons.l18_weight_quantization.kernels.stand_ins"}


@pytest.mark.parametrize(
    "activations, said",
    [
        (INT | dict(num_bits=4), "input_activations: got '4 bits, int'; accepted: 8 bits"),
        (INT | dict(strategy="channel"), "strategy: got 'channel'; accepted: token or tensor"),
        (
            INT | dict(strategy="token", dynamic=False),
            "dynamic: got False; accepted: true for a scale for each",
        ),
        (FLOAT | TOKENS | dict(symmetric=False), "symmetric: got False; accepted: true for float"),
        (INT | STATIC, "layer layers.0.self_attn.q_proj in .*: input_scale: got None"),
        (INT | dict(type=[8]), "input_activations.type: got .8.; accepted: int or float"),
        (INT | TOKENS | dict(rotated=True), "input_activations.rotated: got True"),
    ],
)
def test_schemes_that_it_does_not_have_are_one_line(activations, said, tmp_path):
    with pytest.raises(CheckpointError, match=said) as error:
        load_model(stored(tmp_path, "int8", activations), "cpu")
    assert "\n" not in str(error.value)


def test_schemes_may_have_formats_of_their_own(tmp_path):
    """ "mixed-precision": attention in FP8 with FP8 inputs, MLPs in 4 bits with inputs of 16."""
    torch.manual_seed(0)
    four = stored(tmp_path / "4", "int4", None)
    torch.manual_seed(0)
    eight = stored(tmp_path / "8", "fp8", FLOAT | TOKENS)
    tensors = load_file(four / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if "self_attn" not in name}
    others = load_file(eight / "model.safetensors")
    tensors |= {name: x for name, x in others.items() if "self_attn" in name}
    save_file(tensors, four / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((four / "config.json").read_text())
    said = config["quantization_config"]
    other = json.loads((eight / "config.json").read_text())["quantization_config"]
    (scheme,), (fp8,) = (x["config_groups"].values() for x in (said, other))
    said["config_groups"] = {
        "mlp": scheme | dict(targets=["re:.*mlp.*"]),
        "attention": fp8 | dict(targets=["re:.*self_attn.*"]),
    }
    said["format"] = "mixed-precision"
    (four / "config.json").write_text(json.dumps(config))
    model = load_model(four, "cpu")
    parts = {name: x for name, x in model.named_modules() if isinstance(x, QuantizedLinear)}
    assert len(parts) == 14
    assert all(x.rounds_inputs == ("self_attn" in name) for name, x in parts.items())
    one = load_model(eight, "cpu")
    for name in ("layers.0.self_attn.q_proj", "layers.1.self_attn.o_proj"):
        mine, its = (x.get_submodule(name).quantized.dequantize() for x in (model, one))
        assert torch.equal(mine, its)


FP8_FILES = {
    # quantization_config, the scale's name in the file or None, and what the layers do
    "modelopt": (dict(quant_method="modelopt", quant_algo="FP8"), "input_scale", True),
    "modelopt, weights alone": (dict(quant_method="modelopt", quant_algo="FP8"), None, None),
    "modelopt, tokens": (
        dict(quant_method="modelopt", quant_algo="FP8_PER_CHANNEL_PER_TOKEN"),
        None,
        False,
    ),
    "autofp8": (dict(quant_method="fp8", activation_scheme="static"), "input_scale", True),
    "transformers": (
        dict(quant_method="fp8", activation_scheme="static"),
        "activation_scale",
        True,
    ),
    "tokens": (dict(quant_method="fp8", activation_scheme="dynamic"), None, False),
}


@pytest.mark.parametrize("name", FP8_FILES)
def test_other_fp8_files_round_their_inputs(name, tmp_path):
    """ModelOpt's and those without tiles: a scale beside the matrix, each token's own, or none."""
    config, scale, is_static = FP8_FILES[name]
    folder = stored(tmp_path, "fp8, one scale", None)
    if scale is not None:
        with_static(folder, float(SCALE), name=scale)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    ours, x = load_model(folder, "cpu", "float64"), torch.randn(7, 64).double()
    for part in layers(ours):
        assert part.rounds_inputs == (is_static is not None)
        if part.in_features == 64 and is_static is not None:
            rounding = Rounding("fp8", True, SCALE if is_static else None)
            wanted = definition(x, part.quantized, part.bias, rounding)
            torch.testing.assert_close(part(x), wanted, atol=1e-5, rtol=1e-5)
    if name in ("autofp8", "transformers"):
        tensors = load_file(folder / "model.safetensors")
        few = {key: x for key, x in tensors.items() if not key.endswith(scale)}
        save_file(few, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match="input_scale: got None; accepted: one number"):
            load_model(folder, "cpu")


def test_a_scale_of_a_whole_step_is_each_token_s_own():
    """Because a request's tokens must not depend on what else is in its batch."""
    whole = INT | dict(strategy="tensor", dynamic=True, symmetric=True)
    assert inputs_of(whole).read({}) == Rounding("int8")


def test_schemes_are_told_apart_by_their_targets(tmp_path):
    """As mixed-precision recipes write them: by names, by patterns and by class."""
    folder = stored(tmp_path, "int8", None)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    (scheme,) = config["quantization_config"]["config_groups"].values()
    groups = {
        "all": scheme | dict(targets=["Linear"], input_activations=None),
        "down": scheme | dict(targets=["re:.*down_proj$"], input_activations=INT | TOKENS),
        "one": scheme | dict(targets=["model.layers.1.mlp.down_proj"], input_activations=None),
        "q": scheme
        | dict(targets=["re:.*q_proj"], input_activations=INT | TOKENS | dict(symmetric=False)),
    }
    config["quantization_config"]["config_groups"] = groups
    file.write_text(json.dumps(config))
    model = load_model(folder, "cpu")
    found = {n: x.multiply.__name__ for n, x in model.named_modules() if hasattr(x, "multiply")}
    others = {"layers.0.mlp.down_proj": "w8a8_matmul"}
    others |= dict.fromkeys((f"layers.{n}.self_attn.q_proj" for n in (0, 1)), "product")
    assert found == dict.fromkeys(found, "matmul") | others
    groups["all"]["targets"] = ["re:.*(self_attn|mlp).*"]  # lm_head is numbers, and no target
    file.write_text(json.dumps(config))
    assert len(layers(load_model(folder, "cpu"))) == 14
    groups.pop("all")
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is I32, and no layer that the quantization_config"):
        load_model(folder, "cpu")


def test_matrices_that_it_cannot_multiply_stay():
    """Groups, zero points, 4 bits, tiles, E5M2 and the other format."""
    weight, kinds = torch.randn(256, 256), ("int8", "fp8")
    made = [
        round_to_nearest(weight, 8, 64, True),
        round_to_nearest(weight, 8, None),
        round_to_nearest(weight, 4, None, True),
        to_float8(weight, per="block"),
        to_float8(weight, torch.float8_e5m2),
    ]
    assert all(eight_bits(x, kind) is None for x in made for kind in kinds)
    for name in ("int8", "fp8", "fp8, one scale"):
        kind = "fp8" if name.startswith("fp8") else "int8"
        assert eight_bits(QUANTIZERS[name](weight), {"int8": "fp8", "fp8": "int8"}[kind]) is None
        found = eight_bits(QUANTIZERS[name](weight), kind)
        assert torch.equal(found.dequantize(), QUANTIZERS[name](weight).dequantize())


@pytest.mark.parametrize("matrix", ["int8", "int4", "int4, zero points", "fp8", "fp8, one scale"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_what_is_written_is_what_is_read(matrix, kind, tmp_path):
    """A byte for each whole number, and the same codes; transformers reads the same logits."""
    random_model(LLAMA).save_pretrained(tmp_path / "plain")
    plain, source = load_decoder(tmp_path / "plain"), str(tmp_path / "plain")
    twin = quantized(plain, lambda _, x: QUANTIZERS[matrix](x.weight), dequantize_matmul)
    write = partial(save_quantized, twin, source, tmp_path / "out")
    if (matrix[:3], kind) == ("fp8", "int8"):
        with pytest.raises(ValueError, match="activations: got 'int8'; accepted: fp8 for FP8"):
            write("compressed-tensors", kind)
        return
    write("compressed-tensors", kind)
    said = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert said["format"] == ("float-quantized" if matrix[:3] == "fp8" else "int-quantized")
    ours = load_model(tmp_path / "out", "cpu")
    assert all(part.rounds_inputs for part in layers(ours)) and len(layers(ours)) == 14
    for mine, its in zip(layers(ours), layers(twin)):
        assert torch.equal(mine.quantized.dequantize(), its.quantized.dequantize())
    with pytest.raises(ValueError, match="got 'layers that round inputs as their checkpoint asks'"):
        save_quantized(ours, source, tmp_path / "again", "compressed-tensors", kind)
    with pytest.raises(ValueError, match="format: got 'gptq'; accepted: compressed-tensors, for"):
        save_quantized(twin, source, tmp_path / "gptq", "gptq", kind)
    with pytest.raises(ValueError, match="activations: got 'int4'; accepted: int8 or fp8"):
        save_quantized(twin, source, tmp_path / "four", "compressed-tensors", "int4")
    pytest.importorskip("compressed_tensors", reason="NOT RUN: compressed-tensors is not installed")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, device_map="cpu"
    )
    tokens = torch.randint(97, (11,))
    with torch.no_grad():
        wanted = theirs(tokens[None]).logits[0].float()
    # the library's step of int8 is 1/127.5 of a token's largest value, vLLM's and ours 1/127
    error = float((logits_of(ours, tokens) - wanted).norm() / wanted.norm())
    assert error < (0.06 if kind == "fp8" else 0.15)


@pytest.mark.parametrize("matrix, product", [("int8", "w8a8_matmul"), ("int4", "w4a8_matmul")])
def test_the_engine_generates_from_it(matrix, product, tmp_path):
    """A batch's tokens are those of each prompt alone, because each token has a scale of its
    own.
    """
    folder = stored(tmp_path, matrix, INT | TOKENS)
    prompts = [[3, 4, 5], [7] * 9, [11]]
    params = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
    args = EngineArgs(str(folder), device="cpu", num_gpu_blocks_override=40)
    engine = engine_over(load_model(folder, "cpu"), None, args)
    found = [getattr(x.multiply, "func", x.multiply) for x in layers(engine.runner.model)]
    assert {one.__name__ for one in found} == {product}

    def tokens(some):
        for index, prompt in enumerate(some):
            engine.add_request(str(index), prompt, params)
        found = {}
        while engine.has_unfinished_requests:
            found |= {output.request_id: output for output in engine.step()}
        return [list(found[str(index)].outputs[0].token_ids) for index in range(len(some))]

    assert tokens(prompts) == [tokens([prompt])[0] for prompt in prompts]
