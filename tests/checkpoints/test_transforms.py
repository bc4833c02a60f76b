"""Rotations that a checkpoint asks for as the model runs: files of compressed-tensors and our own
give the logits of the model that was never rotated, and wrong ones are seen or refused.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.deepseek import load_decoder
from lessons.l18_weight_quantization.linear import QuantizedLinear, quantized
from lessons.l18_weight_quantization.naive import dequantize_matmul, round_to_nearest
from lessons.l19_kv_quantization.activations.hadamard import hadamard
from lessons.l19_kv_quantization.activations.rotations import (
    RotatedInput,
    RotatedOutput,
    with_rotated_inputs,
)
from lessons.l21_multi_lora.batch import AdapterBatch, AdapterContext
from lessons.l21_multi_lora.layers import adapter_layers, with_adapter_slots
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.proof.planted import with_bug
from reference.checkpoints import transforms
from reference.checkpoints.quantized_checkpoint import load_quantized
from reference.checkpoints.transforms import Rotation, read_turns
from reference.checkpoints.write_checkpoint import save_quantized
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.engine.model import load_model
from reference.engine.sampling_params import SamplingParams
from tests.test_deepseek import random_model
from tests.test_quantized_checkpoints import CONFIGS, SHAPE, logits_of

pytestmark = pytest.mark.usefixtures("seed")

LINEAR, BUT_HEAD = ["Linear"], ["lm_head"]


def place(location: str, inverse: bool = False, targets=LINEAR, **more) -> dict:
    return {"location": location, "inverse": inverse, "targets": targets, **more}


def both_sides(kind: str, **more) -> dict:
    """QuIP's: inputs by one rotation and outputs by another, each undone in the matrix."""
    sides = {
        "v": [place("input", ignore=BUT_HEAD), place("weight_input", True, ignore=BUT_HEAD)],
        "u": [place("weight_output", ignore=BUT_HEAD), place("output", True, ignore=BUT_HEAD)],
    }
    return {name: {"type": kind, "apply": apply, **more} for name, apply in sides.items()}


DOWN, ATTENTION = ["re:.*down_proj$"], ["re:.*self_attn$"]
R2 = [place("weight_output", targets=["re:.*v_proj$"])]
R2 += [place("weight_input", True, targets=["re:.*o_proj$"])]
SPINQUANT = {
    "R2": {"type": "hadamard", "head_dim": 16, "apply": R2},
    "R3": {
        "type": "hadamard",
        "head_dim": 16,
        "apply": [place("q_attn", targets=ATTENTION), place("k_cache", targets=ATTENTION)],
    },
    "R4": {
        "type": "hadamard",
        "apply": [place("input", targets=DOWN), place("weight_input", True, targets=DOWN)],
    },
}
RECIPES = {
    "both sides": both_sides("hadamard"),
    "both sides, random": both_sides("random-hadamard"),
    "both sides, shuffled": both_sides("random-hadamard", randomize=True),
    "both sides, by blocks": both_sides("hadamard", head_dim=32),
    "both sides, by random blocks": both_sides("random-hadamard", head_dim=16, randomize=True),
    "SpinQuant without R1": SPINQUANT,
}


def by_library(config, folder, recipe: dict, quantize=None):
    """A random model, rotated and saved by compressed-tensors under folder/rotated, and as it was
    under folder/plain. quantize(model): what is done before it is saved. Returns the library's.
    """
    pytest.importorskip("compressed_tensors", reason="NOT RUN: compressed-tensors is not installed")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    model = random_model(config)
    model.save_pretrained(folder / "plain")
    model.set_attn_implementation("sdpa")  # the library hooks no "eager" attention
    apply_transform_config(model, TransformConfig(config_groups=copy.deepcopy(recipe)))
    if quantize is not None:
        quantize(model)
    with torch.no_grad():
        logits = model(torch.arange(11)[None]).logits[0]
    compressor = ModelCompressor.from_pretrained_model(model)
    if quantize is not None:
        compressor.compress_model(model)
    model.save_pretrained(folder / "rotated")
    compressor.update_config(folder / "rotated")
    return logits


def wrapped(model: Decoder) -> int:
    """How many layers are rotated as the model runs, on either side."""
    return sum(isinstance(part, (RotatedInput, RotatedOutput)) for part in model.modules())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_library_s_files_give_the_logits_of_the_unrotated_model(family, recipe, tmp_path):
    config = CONFIGS["llama"] if family == "llama" else Qwen2Config(**SHAPE)
    theirs = by_library(config, tmp_path, RECIPES[recipe])
    ours, plain = load_quantized(tmp_path / "rotated"), load_decoder(tmp_path / "plain")
    assert wrapped(ours) == (2 if "SpinQuant" in recipe else 28)
    tokens = torch.arange(11)
    wanted = logits_of(plain, tokens)
    assert wanted.std() > 0.1, "the model under test must say something"
    torch.testing.assert_close(logits_of(ours, tokens), wanted, atol=1e-4, rtol=1e-4)
    if family == "llama" or "both" not in recipe:
        torch.testing.assert_close(theirs, wanted, atol=1e-3, rtol=1e-3)
    without = load_quantized(tmp_path / "rotated")
    for name, part in list(without.named_modules()):
        if isinstance(part, RotatedInput) and "layers.1" in name:
            part.rotate = lambda x: x
    assert float((logits_of(without, tokens) - wanted).abs().max()) > 0.1


def w4a8(model) -> None:
    """INT4 in groups of 32, inputs in FP8, by compressed-tensors, its scales by the largest."""
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    inputs = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
    scheme = QuantizationScheme(targets=LINEAR, weights=weights, input_activations=inputs)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=BUT_HEAD)
    apply_quantization_config(model, config)
    for part in model.modules():
        if getattr(part, "quantization_scheme", None) is not None:
            groups = part.weight.detach().unflatten(1, (-1, 32))
            scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
            part.weight_scale.data.copy_(scales)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", [None, "both sides, random", "SpinQuant without R1"])
def test_the_library_s_w4a8_is_ours(recipe, tmp_path):
    """Its INT4 with FP8 inputs, "int-quantized", rotated and not, beside its own product."""
    rotations = RECIPES[recipe] if recipe else {}
    theirs = by_library(CONFIGS["llama"], tmp_path, rotations, w4a8)
    said = json.loads((tmp_path / "rotated/config.json").read_text())["quantization_config"]
    assert said["format"] == "int-quantized"
    ours, tokens = load_model(tmp_path / "rotated", "cpu"), torch.arange(11)
    layers = [part for part in ours.modules() if isinstance(part, QuantizedLinear)]
    assert len(layers) == 14 and {part.quantized.bits for part in layers} == {4}
    assert {part.multiply.func.__name__ for part in layers} == {"w4a8_matmul"}

    def error() -> float:
        return float((logits_of(ours, tokens) - theirs).norm() / theirs.norm())

    rounded = error()
    assert rounded < 0.06  # an input halfway between two codes may go either way
    for part in layers:
        part.multiply = dequantize_matmul
    assert error() > rounded


# ---------------------------------------------------------------- our own writer


@pytest.mark.parametrize("inner", [128, 96])
def test_our_own_writer_s_files(inner, tmp_path):
    """Rotated inputs of down_proj, with Sylvester's matrix and with Paley's times Sylvester's."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.intermediate_size = inner
    random_model(config).save_pretrained(tmp_path / "plain")
    turned = with_rotated_inputs(load_decoder(tmp_path / "plain"))
    round_8 = lambda _, linear: round_to_nearest(linear.weight, 8, None, True)
    twin = quantized(turned, round_8, dequantize_matmul)
    save_quantized(twin, str(tmp_path / "plain"), tmp_path / "out", "compressed-tensors")
    ours, tokens = load_quantized(tmp_path / "out"), torch.arange(11)
    assert wrapped(ours) == wrapped(twin) == 2
    torch.testing.assert_close(
        logits_of(ours, tokens), logits_of(twin, tokens), atol=1e-4, rtol=1e-4
    )
    plain = logits_of(load_decoder(tmp_path / "plain"), tokens)
    assert 1e-4 < float((logits_of(ours, tokens) - plain).norm() / plain.norm()) < 0.2
    with pytest.raises(
        ValueError, match="got 'gptq'; accepted: compressed-tensors, for a model with"
    ):
        save_quantized(twin, str(tmp_path / "plain"), tmp_path / "gptq", "gptq")
    with pytest.raises(ValueError, match="rotate: got 'Rotation'; accepted: lesson 19's rotate"):
        save_quantized(ours, str(tmp_path / "plain"), tmp_path / "again", "compressed-tensors")


def test_the_engine_generates_from_it(tmp_path):
    random_model(CONFIGS["llama"]).save_pretrained(tmp_path / "plain")
    turned = with_rotated_inputs(load_decoder(tmp_path / "plain"))
    round_8 = lambda _, linear: round_to_nearest(linear.weight, 8, None, True)
    twin = quantized(turned, round_8, dequantize_matmul)
    save_quantized(twin, str(tmp_path / "plain"), tmp_path / "out", "compressed-tensors")

    def tokens(model):
        args = EngineArgs(str(tmp_path / "out"), device="cpu", num_gpu_blocks_override=40)
        engine = engine_over(model, None, args)
        params = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
        for index, prompt in enumerate([[3, 4, 5], [7] * 9]):
            engine.add_request(str(index), prompt, params)
        found = {}
        while engine.has_unfinished_requests:
            found |= {x.request_id: list(x.outputs[0].token_ids) for x in engine.step()}
        return found

    assert tokens(load_model(tmp_path / "out", "cpu")) == tokens(twin)


@torch.inference_mode()
def test_an_adapter_reads_and_writes_what_is_outside_of_a_rotation(tmp_path):
    """Adapters for every layer of the rotated model give what they give for the unrotated one."""
    by_library(CONFIGS["llama"], tmp_path, RECIPES["both sides, shuffled"])
    rotated, plain = load_quantized(tmp_path / "rotated"), load_decoder(tmp_path / "plain")
    context, tokens, found = AdapterContext(), torch.arange(11), []
    for model in (rotated, plain):
        twin = with_adapter_slots(model, context, 1, 2)
        layers = adapter_layers(twin)
        torch.manual_seed(3)
        for layer in layers.values():
            a, b = torch.randn(2, layer.in_features), torch.randn(layer.out_features, 2)
            layer.weights.put(0, a / 8, b / 8, 1.0)
        with context.over(AdapterBatch.of([0] * len(tokens))):
            found.append((list(layers), logits_of(twin, tokens)))
    assert found[0][0] == found[1][0] and len(found[0][0]) == 14
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-3, rtol=1e-3)
    assert float((found[1][1] - logits_of(plain, tokens)).abs().max()) > 0.1


# ---------------------------------------------------------------- one rotation


def by_definition(x, matrix, inverse, shuffle):
    """factory/hadamard.py, forward: in float64."""
    matrix = matrix.double()
    if shuffle is not None:
        matrix = matrix[shuffle][:, shuffle]
    matrix = matrix.T if inverse else matrix
    return (x.double().unflatten(1, (-1, len(matrix))) @ matrix).flatten(1) / len(matrix) ** 0.5


def matrices():
    signs = torch.randint(2, (32,)).double() * 2 - 1
    others = torch.randint(2, (32,)).double() * 2 - 1
    plain = hadamard(32)
    return {
        "plain": (plain, True),
        "signs after": (plain * signs, True),
        "signs on both sides": (others[:, None] * plain * signs, True),
        "rows in another order": (plain[torch.randperm(32)], False),
        "a Paley matrix": (hadamard(24), False),
    }


def check_rotations(module) -> None:
    """Raises AssertionError for a wrong Rotation."""
    for matrix, has_kernel in matrices().values():
        n = len(matrix)
        for shuffle in (None, torch.randperm(n)):
            for inverse in (False, True):
                x = torch.randn(5, 2 * n)
                own = module.Rotation(matrix.float(), inverse, shuffle)
                assert (own.signs is not None) == has_kernel
                wanted = by_definition(x, matrix, inverse, shuffle).float()
                torch.testing.assert_close(own(x), wanted, atol=1e-5, rtol=1e-5)
                blocks = torch.randn(3, n)
                if has_kernel:
                    got = own.by_kernel(blocks)
                    torch.testing.assert_close(got, own.by_matrix(blocks), atol=1e-5, rtol=1e-5)


def test_a_rotation_is_its_definition():
    check_rotations(transforms)
    half = Rotation(hadamard(64).float(), False)(torch.randn(3, 64).bfloat16())
    assert half.dtype == torch.bfloat16


BUGS = {
    "the other way": ("matrix.T if is_inverse else matrix", "matrix"),
    "signs in one order": ("self.signs = self.signs[::-1]", "pass"),
    "signs before alone": ("blocks if after is None else", "blocks if True else"),
    "signs after alone": ("blocks if before is None else", "blocks if True else"),
    "shuffled one way": ("blocks = blocks[:, self.back]", "blocks = blocks[:, self.shuffle]"),
    "not shuffled back": ("blocks = blocks[:, self.shuffle]\n", "pass\n"),
    "too large": ("@ self.dense.to(numbers.dtype) / self.n**0.5", "@ self.dense.to(numbers.dtype)"),
    "any matrix has signs": ("if not is_same:", "if False:"),
}


@pytest.mark.parametrize("name", BUGS)
def test_wrong_rotations_are_seen(name, tmp_path):
    wrong = with_bug(transforms, tmp_path, *BUGS[name])
    with pytest.raises(AssertionError):
        check_rotations(wrong)


# ---------------------------------------------------------------- refused


def said_of(folder, recipe) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    transform = {"config_groups": recipe} if isinstance(recipe, dict) else recipe
    config["quantization_config"]["transform_config"] = transform
    file.write_text(json.dumps(config))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rotated")
    torch.manual_seed(0)
    random_model(CONFIGS["llama"]).save_pretrained(folder / "plain")
    turned = with_rotated_inputs(load_decoder(folder / "plain"))
    round_8 = lambda _, linear: round_to_nearest(linear.weight, 8, None, True)
    twin = quantized(turned, round_8, dequantize_matmul)
    save_quantized(twin, str(folder / "plain"), folder / "out", "compressed-tensors")
    return folder / "out"


def one(kind="hadamard", targets=DOWN, location="input", **more) -> dict:
    return {"inputs_128": {"type": kind, "apply": [place(location, targets=targets)], **more}}


@pytest.mark.parametrize(
    "recipe, said",
    [
        ([1], "transform_config: got .1.; accepted: an object of config_groups"),
        (one("random-matrix"), "128.type: got 'random-matrix'; accepted: hadamard or random"),
        (one(head_dim=0), "head_dim: got 0; accepted: a positive whole number, or null"),
        (one(head_dim=48), "head_dim: got 48; accepted: a divisor of 128"),
        (one(location="middle"), "location: got 'middle'; accepted: weight_input, weight_output"),
        (one(angle=3), "transform_config.inputs_128: got 'angle'; accepted: type, apply"),
        (one(targets=[7]), "targets: got .7.; accepted: a list of names"),
        (one(randomize="no"), "randomize: got 'no'; accepted: true or false"),
        ({"a": 3}, "transform_config.a: got 3; accepted: an object of type, apply"),
        ({"a": {"type": "hadamard", "apply": 5}}, "transform_config.a: got 5; accepted: an obj"),
        (one(location="q_attn"), "got q_attn and k_cache that differ; accepted: both alike"),
        (one(targets=LINEAR), r"targets: got 'lm_head'|no tensor inputs_128_input"),
        (one(randomize=True), "inputs_128_input.perm: got None; accepted: a permutation of 128"),
        (one("random-hadamard", targets=["re:.*q_proj"]), "inputs_128_input.weight of 64 rows"),
        ({"other": one()["inputs_128"]}, "tensor model.layers.0.mlp.down_proj.inputs_128_input"),
    ],
)
def test_what_a_transform_config_asks_for_in_vain_is_one_line(recipe, said, written):
    before = (written / "config.json").read_text()
    said_of(written, recipe)
    try:
        with pytest.raises(CheckpointError, match=said) as error:
            load_quantized(written)
        assert "\n" not in str(error.value) and len(str(error.value)) < 500
    finally:
        (written / "config.json").write_text(before)


def test_matrices_that_do_not_fit_are_named(written, tmp_path):
    name = "model.layers.0.mlp.down_proj.inputs_128_input.weight"
    tensors = load_file(written / "model.safetensors")
    (tmp_path / "config.json").write_text((written / "config.json").read_text())
    changes = {
        "accepted: rows of ±1, orthogonal": torch.ones(128, 128),
        r"got \[128, 3\]; accepted: \[128, 128\], floating": torch.ones(128, 3),
    }
    for said, tensor in changes.items():
        save_file(tensors | {name: tensor}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=said):
            load_quantized(tmp_path)


def test_places_in_the_file_ask_for_nothing():
    recipe = {"R1": {"type": "hadamard", "apply": R2}}
    assert read_turns({"transform_config": {"config_groups": recipe}}) == []
    assert read_turns({}) == read_turns({"transform_config": {}}) == []
