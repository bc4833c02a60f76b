"""Sequence parallelism in the engine: shards that have some rows each between two sums give the
tokens of one process, and no step sums over all rows; what is no such chain is refused.
"""

import pytest
import torch

from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l20_parallelism.lab.testing import CONFIGS, random_model
from lessons.l20_parallelism.optimized import shard
from lessons.l20_parallelism.processes.launch import run_ranks
from lessons.l20_parallelism.processes.mesh import Mesh, new_links
from reference.parallel.worker import StageRunner
from tests import composition_cases
from tests.parallel_cases import (
    answers,
    parallel_engine,
    requests,
    serve,
    small_args,
    whole_engine,
    write_checkpoint,
)

ROWS = dict(compilation_config=dict(pass_config=dict(enable_sp=True)))
SHARED = dict(decode_context_parallel_size=2, block_size=2)
CASES = [
    ("llama", 2, {}),
    ("llama", 4, dict(preemption_mode="swap")),
    ("llama", 2, dict(data_parallel_size=2)),
    ("llama", 2, dict(async_scheduling=True)),
    ("mixtral", 2, dict(enable_expert_parallel=True)),
    ("qwen2_moe", 4, {}),
    ("deepseek_v3", 2, SHARED),
    ("deepseek_v3", 4, dict(enable_expert_parallel=True)),
]


def named(case) -> str:
    family, size, how = case
    return "-".join([family, str(size), *how])


@pytest.mark.parametrize("family, size, how", CASES, ids=map(named, CASES))
@pytest.mark.sample(1)
def test_tokens_are_those_of_one_process(family, size, how, tmp_path, seed):
    """Of steps of any number of rows, fewer than there are shards included."""
    model = write_checkpoint(tmp_path, family, seed)
    args = small_args(model, tensor_parallel_size=size, **ROWS, **how)
    asked = requests(seed)
    want = serve(whole_engine(args), asked)
    engine = parallel_engine(args)
    try:
        got = serve(engine, asked)
    finally:
        engine.close()
    assert answers(got) == answers(want)


BESIDE = [
    "LoRA",
    "int8",
    "AWQ",
    "W8A8",
    "MXFP4",
    "draft",
    "ngram",
    "swap",
    "async",
    "structured",
    "beams",
    "MoE",
    "MLA",
]


@pytest.mark.parametrize("feature", [*BESIDE, "fp8 KV", "prefix cache", "chunked prefill", "n > 1"])
@pytest.mark.sample(1, of="split rows")
def test_beside_another_feature(feature, monkeypatch):
    """What composition promises of tensor parallelism."""
    cut = composition_cases.ARGUMENTS["tensor parallel"] | ROWS
    monkeypatch.setitem(composition_cases.ARGUMENTS, "tensor parallel", cut)
    composition_cases.check(frozenset({feature, "tensor parallel"}))


def sent(world, name: str, seed: int) -> dict:
    """How often each collective was called in a step of five rows, and its hidden states."""
    links, counts = new_links(Mesh(tp=world.size)), {}
    for splits_rows in (False, True):
        part = fused(shard(random_model(CONFIGS[name], seed, torch.float64), links))
        for _ in range(2):
            runner = StageRunner(links, part, 8, 4, 32, splits_rows=splits_rows)
        links.tensor.wire.clear()
        hidden = runner.run([([1, 2, 3], 0), ([4, 5], 0)], [[3], [1]])
        counts[splits_rows] = dict(links.tensor.wire.calls), hidden
    return counts


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3"])
@pytest.mark.sample(1, of="split rows")
def test_a_sum_becomes_two_halves(name, seed):
    """Also of a part that was changed before, as where a GPU's memory was measured."""
    sums = 2 * CONFIGS[name].num_hidden_layers + 1
    for counts in run_ranks(2, sent, name, seed):
        (whole, wanted), (halves, hidden) = counts[False], counts[True]
        assert whole == dict(all_reduce=sums)
        assert halves == dict(reduce_scatter=sums, all_gather=sums)
        torch.testing.assert_close(hidden, wanted, atol=1e-10, rtol=1e-10)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "family, how, said",
    [
        (
            "llama",
            dict(pipeline_parallel_size=2),
            "pipeline_parallel_size: got 2; accepted: 1 with",
        ),
        (
            "mixtral",
            dict(data_parallel_size=2, enable_expert_parallel=True),
            "data_parallel_size: got 2; accepted: 1 with compilation_config",
        ),
        ("gpt_oss", {}, "model: got 'gpt_oss'; accepted: one with a norm before each product"),
        (
            "llama",
            dict(compilation_config="fast"),
            "compilation_config: got 'fast'; accepted: a dict",
        ),
        (
            "llama",
            dict(compilation_config=dict(pass_config=3)),
            "compilation_config: got {'pass_config': 3}; accepted: a dict",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(family, how, said, tmp_path, monkeypatch):
    def fails(*arguments):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("reference.parallel.engine.new_workers", fails)
    model = write_checkpoint(tmp_path, family, 0)
    with pytest.raises(ValueError) as error:
        parallel_engine(small_args(model, **dict(tensor_parallel_size=2) | ROWS | how))
    assert said in str(error.value) and "\n" not in str(error.value), error.value


@pytest.mark.parametrize("config", [3, {}, dict(cudagraph_mode="FULL"), dict(pass_config={})])
def test_other_keys_have_no_effect(config):
    assert not small_args("models/tiny", compilation_config=config).splits_rows
