"""Sequence parallelism in the engine: shards that have some rows each between two sums give the
tokens of one process, and no step sums over all rows; what is no such chain is refused.
"""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l20_parallelism.lab.testing import CONFIGS, random_model
from lessons.l20_parallelism.optimized import shard
from lessons.l20_parallelism.processes.launch import RankError, run_ranks
from lessons.l20_parallelism.processes.mesh import Mesh, new_links
from lessons.l20_parallelism.shards import sequence
from lessons.l20_parallelism.shards.sequence import Rows, ScatteredEmbedding
from reference.parallel import processes
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


@pytest.mark.parametrize(
    "feature", [*BESIDE, "fp8 KV", "fp8_ds_mla KV", "prefix cache", "chunked prefill", "n > 1"]
)
@pytest.mark.sample(1, of="split rows")
def test_beside_another_feature(feature, monkeypatch):
    """What composition promises of tensor parallelism."""
    cut = composition_cases.ARGUMENTS["tensor parallel"] | ROWS
    monkeypatch.setitem(composition_cases.ARGUMENTS, "tensor parallel", cut)
    composition_cases.check(frozenset({feature, "tensor parallel"}))


def sent(world, name: str, seed: int, slip: str | None = None) -> dict:
    """How often each collective was called in a step of five rows, and its hidden states."""
    with SLIPS[slip] if slip else nullcontext():
        links, counts = new_links(Mesh(tp=world.size)), {}
        for splits_rows in (False, True):
            part = fused(shard(random_model(CONFIGS[name], seed, torch.float64), links))
            for _ in range(2):
                runner = StageRunner(links, part, 8, 4, 32, splits_rows=splits_rows)
            links.tensor.wire.clear()
            hidden = runner.run([([1, 2, 3], 0), ([4, 5], 0)], [[3], [1]])
            counts[splits_rows] = dict(links.tensor.wire.calls), hidden
    return counts


def holds(name: str, seed: int, slip: str | None = None) -> None:
    """Raises AssertionError if a step splits no rows, or gives other hidden states."""
    sums = 2 * CONFIGS[name].num_hidden_layers + 1
    for counts in run_ranks(2, sent, name, seed, slip):
        (whole, wanted), (halves, hidden) = counts[False], counts[True]
        assert whole == dict(all_reduce=sums)
        assert halves == dict(reduce_scatter=sums, all_gather=sums)
        torch.testing.assert_close(hidden, wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3"])
@pytest.mark.sample(1, of="split rows")
def test_a_sum_becomes_two_halves(name, seed):
    """Also of a part that was changed before, as where a GPU's memory was measured."""
    holds(name, seed)


# ---------------------------------------------------------------- wrong versions


def cut_after_a_sum(self: Rows, partial: Tensor) -> Tensor:
    """Every shard sums all rows, and keeps its own. Arguments: Rows.scatter_sum's."""
    whole = self.group.all_reduce(pad(partial, (0, 0, 0, -len(partial) % self.group.size)))
    return whole.chunk(self.group.size)[self.group.rank]


def zeros_in_front(self: Rows, partial: Tensor) -> Tensor:
    """Rows of zeros come first, and the gather cuts off the last. As Rows.scatter_sum."""
    return self.group.reduce_scatter(pad(partial, (0, 0, -len(partial) % self.group.size, 0)))


def rows_of_the_longest_step(self: ScatteredEmbedding, tokens: Tensor) -> Tensor:
    """The number of tokens never falls. [T] -> [ceil(T / P), hidden_size]."""
    self.rows.num_tokens = max(self.rows.num_tokens, len(tokens))
    return self.rows.scatter_sum(self.embedding.partial(tokens))


SLIPS = {
    "a sum over all rows": mock.patch.object(Rows, "scatter_sum", cut_after_a_sum),
    "changed twice": mock.patch.object(sequence, "as_it_was", lambda layer: layer),
    "zeros in front": mock.patch.object(Rows, "scatter_sum", zeros_in_front),
    "the longest step": mock.patch.object(ScatteredEmbedding, "forward", rows_of_the_longest_step),
}


@pytest.mark.parametrize("slip", ["a sum over all rows", "changed twice"])
@pytest.mark.sample(1, of="split rows")
def test_a_wrong_step_is_seen(slip, seed):
    """In the calls of a step; or because a layer has no such part."""
    with pytest.raises((AssertionError, RankError)) as seen:
        holds("llama", seed, slip)
    assert seen.type is AssertionError or "has no attribute" in str(seen.value), seen.value


def wrong_worker(slip: str, *told) -> None:
    """The body of a worker's process, with a slip. told: worker_main's."""
    SLIPS[slip].start()
    processes.worker_main(*told)


@pytest.mark.parametrize("slip", ["zeros in front", "the longest step"])
@pytest.mark.sample(1, of="split rows")
def test_wrong_rows_are_seen(slip, tmp_path, seed, monkeypatch):
    """In other tokens; or because a step has more rows than its sequences have tokens."""
    args = small_args(write_checkpoint(tmp_path, "llama", seed), tensor_parallel_size=2, **ROWS)
    asked = requests(seed)[:2]
    want = answers(serve(whole_engine(args), asked))
    monkeypatch.setattr(processes, "worker_main", partial(wrong_worker, slip))
    engine = parallel_engine(args)
    try:
        assert answers(serve(engine, asked)) != want
    except RankError as error:
        assert "tensor" in str(error), error
    finally:
        engine.close()


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
