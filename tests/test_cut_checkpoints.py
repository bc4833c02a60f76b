"""Checkpoints that round or rotate what a layer receives, in parts: shards and stages give the
logits of one process, or say in one line why they cannot.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import pytest
import torch
from transformers import Qwen2Config

from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Links, Mesh
from reference.checkpoints.quantized_checkpoint import load_quantized
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.engine.model import load_model
from reference.engine.sampling_params import SamplingParams
from reference.parallel.engine import engine_over_parts
from reference.weights.cut import noted, shard_quantized
from tests.checkpoints.test_transforms import RECIPES, SPINQUANT, by_library
from tests.test_quantized_checkpoints import CONFIGS, SHAPE
from tests.test_w8a8_checkpoints import ASKED, SCALE, layers, stored, with_static

pytestmark = [
    pytest.mark.usefixtures("seed"),
    pytest.mark.filterwarnings("ignore"),
]

TP, PP = dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2)
ROWS = dict(compilation_config={"pass_config": {"enable_sp": True}})
PROMPTS = [list(range(1, 12)), [5, 6, 7]]
WISHES = SamplingParams(temperature=0, max_tokens=4, logprobs=3, detokenize=False)


def rounded(folder, matrix: str, inputs: str):
    """A checkpoint whose layers round their inputs."""
    said, rounding = ASKED[inputs]
    model = stored(folder, matrix, said)
    if not said["dynamic"]:
        with_static(model, float(SCALE), None if rounding.zero is None else int(rounding.zero))
    return model


def answers(engine) -> dict[str, list[dict[int, float]]]:
    """Of each prompt the log-probabilities at each place."""
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, WISHES)
    found = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            found[output.request_id] = output.outputs[0].logprobs
    return {
        id: [{token: one.logprob for token, one in here.items()} for here in places]
        for id, places in found.items()
    }


def of_parts(model, **sizes) -> dict:
    """Through a parallel engine, if there are sizes; in float64, so that codes are the same."""
    args = EngineArgs(
        str(model), device="cpu", dtype="float64", num_gpu_blocks_override=16, **sizes
    )
    if not sizes:
        return answers(engine_over(load_model(model, "cpu", "float64"), None, args))
    engine = engine_over_parts(None, args)
    try:
        return answers(engine)
    finally:
        engine.close()


def assert_same(model, **sizes) -> None:
    got, wanted = of_parts(model, **sizes), of_parts(model)
    for id, places in wanted.items():
        for here, there in zip(got[id], places, strict=True):
            assert here.keys() == there.keys()
            assert all(abs(here[token] - there[token]) < 1e-6 for token in here)


@pytest.mark.parametrize(
    "matrix, inputs, sizes",
    [
        ("int4", "int8, found before", TP),
        ("int4", "fp8, found before", TP | ROWS),
        ("int8", "int8, found before", TP),
        ("fp8", "fp8, found before", TP),
        ("int8", "zero points found before", TP),
        ("int4", "int8 tokens", TP),
        ("int8", "int8 tokens", TP | ROWS),
        ("fp8", "fp8 tokens", TP),
        ("int4", "int8 with zero points", TP),
        ("int4", "int8 tokens", PP),
        ("int8", "int8 with zero points", PP),
    ],
)
@pytest.mark.sample(2)
def test_parts_round_what_the_whole_model_rounds(matrix, inputs, sizes, tmp_path):
    assert_same(rounded(tmp_path, matrix, inputs), **sizes)


def part_of(model, tp: int, rank: int = 0, multiply=None):
    """A rank's part, whose shards are never asked."""
    whole = load_quantized(model, rounded=noted)
    links = Links(Mesh(tp), rank, Group(list(range(tp)), rank), Group.alone())
    return shard_quantized(whole, links, False, torch.device("cpu"), multiply)


@pytest.mark.parametrize("matrix, inputs", [("int4", "int8 tokens"), ("int8", "fp8 tokens")])
def test_another_product_of_numbers_still_gets_rounded_inputs(matrix, inputs, tmp_path):
    """As on a GPU, where a worker multiplies by kernels: they take codes or rounded numbers."""
    seen = []

    def multiply(x, weight, bias):
        seen.append(x)
        return x @ weight.dequantize().to(x.dtype).T

    part = part_of(rounded(tmp_path, matrix, inputs), 1, multiply=multiply)
    assert len(layers(part)) == 14 and all(layer.rounds_inputs for layer in layers(part))
    x = torch.randn(3, 64)
    part.layers[0].self_attn.q_proj(x)
    (given,) = seen
    assert 0 < (given - x).abs().max() < 0.2, "numbers that were not rounded"


@pytest.mark.parametrize(
    "recipe, family, sizes",
    [
        ("both sides, by random blocks", "llama", TP),
        ("both sides, by random blocks", "qwen2", TP | ROWS),
        ("both sides, random", "llama", PP),
        ("SpinQuant without R1", "llama", PP),
    ],
)
@pytest.mark.sample(1)
def test_parts_are_rotated(recipe, family, sizes, tmp_path):
    config = CONFIGS["llama"] if family == "llama" else Qwen2Config(**SHAPE)
    by_library(config, tmp_path, RECIPES[recipe])
    assert_same(tmp_path / "rotated", **sizes)


def test_what_is_rotated_together_is_not_cut(tmp_path):
    by_library(CONFIGS["llama"], tmp_path, SPINQUANT)
    with pytest.raises(ValueError) as error:
        part_of(tmp_path / "rotated", 2)
    said = "transform_config of layers.0.mlp.down_proj: got 128 inputs that are rotated together"
    assert str(error.value).startswith(said) and "\n" not in str(error.value)
