"""Decode steps as CUDA graphs: what is replayed, and that it changes no tokens. Without a GPU
on simulated graphs, and on a pretended GPU.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention.naive import generate as alone
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l11_cuda_graphs.simulator import SimulatedGraphs
from lessons.l12_paged_kv.optimized import LESSON_12
from lessons.l17_tree_speculation.lab.testing import random_heads
from lessons.l17_tree_speculation.optimized import LESSON_17
from lessons.l17_tree_speculation.trees.tree import Tree
from lessons.toolbox.measure.device import has_gpu, has_triton
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from reference.features.decode_graphs import DecodeGraphs
from reference.speculation.tree_graphs import TreeGraphs
from tests.engine_cases import greedy, new_engine, new_model, run
from tests.test_tree_engine import SecondIsRight, tree_engine

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("seed")
needs_triton = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")


def simulated_engine(kind=DecodeGraphs):
    """An engine on the CPU whose kernels are interpreted, and whose decode steps are recorded."""
    model = new_model()
    engine = new_engine(fused(model), num_blocks=30, block_size=4, max_num_seqs=3)
    runner = engine.runner
    runner.pool.ops = LESSON_12
    runner.captured = kind(runner.model, runner.pool, SimulatedGraphs(1), [1, 3], 24)
    return model, engine


def serve(model, engine):
    prompts = [random.choices(range(60), k=k) for k in (3, 9, 5)]
    limits = [5, 3, 6]
    got = run(engine, prompts, [greedy(limit) for limit in limits])
    return [got[str(at)][0] for at in range(3)], alone(model, prompts, limits)


@needs_triton
def test_replayed_steps_give_the_same_tokens_and_write_no_padding():
    """The unused slots hold NaN, so a table, a length or a padded row that is wrong shows."""
    model, engine = simulated_engine()
    got, want = serve(model, engine)
    assert got == want
    assert engine.runner.pool.k_slots[:, -1].isnan().all(), "a row of padding was written"


@needs_triton
def test_a_table_that_is_not_copied_in_is_found():
    class Stale(DecodeGraphs):
        def copy_in(self, bucket, inputs, table):
            super().copy_in(bucket, inputs, self.inputs[bucket][1])

    for _ in range(3):  # one history may by chance sit in the right blocks
        try:
            got, want = serve(*simulated_engine(Stale))
        except ValueError as error:
            assert "finite" in str(error)
            return
        if got != want:
            return
    pytest.fail("tokens of other blocks went unseen")


def test_only_small_decode_steps_are_replayed():
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs.buckets, graphs.most_each = [1, 2], 1
    assert graphs.fits([([5], 3)]) and graphs.fits([([5], 3), ([6], 0)])
    assert not graphs.fits([([5, 6], 3)]) and not graphs.fits([([5], 3)] * 3)
    graphs.most_each = 2
    assert graphs.fits([([5, 6], 3)]) and not graphs.fits([([5, 6], 3), ([5], 3)])


@needs_triton
def test_steps_with_drafts_are_replayed_and_give_the_same_tokens():
    """Newest and drafted tokens, each a sequence of its own inside the graph."""
    model, prompts, limits = new_model(), [[7, 8, 9] * 4, [3, 4] * 4], [9, 7]
    config = dict(method="ngram", num_speculative_tokens=2)
    small = dict(max_num_seqs=3, block_size=4, num_gpu_blocks_override=30, max_model_len=24)
    engine = engine_over(fused(model), None, EngineArgs(speculative_config=config, **small))
    runner, replays = engine.runner, []
    runner.pool.ops = LESSON_12

    class Noted(DecodeGraphs):
        def __call__(self, chunks, *args):
            replays.append([len(new) for new, _ in chunks])
            return super().__call__(chunks, *args)

    runner.captured = Noted(runner.model, runner.pool, SimulatedGraphs(1), [2, 9], 24, 3)
    got = run(engine, prompts, [greedy(limit) for limit in limits])
    assert [got[str(at)][0] for at in range(2)] == alone(model, prompts, limits)
    assert any(max(counts) > 1 for counts in replays), "no draft was replayed"


@needs_triton
@pytest.mark.sample(1, of="graphs of heads")
def test_steps_with_trees_are_replayed_and_give_the_same_tokens():
    """Whole trees, cut ones, and sequences of one token, in one graph."""
    model, prompts, limits = new_model(), [[7, 8, 9], [3, 4]], [6, 2]
    tree = Tree((-1, 0, 0, 2))
    small = dict(max_num_seqs=3, num_gpu_blocks_override=30, max_model_len=24)
    engine = tree_engine(model, tree, guesses=SecondIsRight, **small)
    runner, replays = engine.runner, []
    runner.pool.ops = LESSON_17

    class Noted(TreeGraphs):
        def __call__(self, chunks, *args):
            replays.append([len(new) for new, _ in chunks])
            return super().__call__(chunks, *args)

    runner.model = fused(model)
    how = dict(most_nodes=len(tree), most_sequences=3)
    runner.captured = Noted(
        runner.model, runner.pool, SimulatedGraphs(1), [12], max_model_len=24, **how
    )
    got = run(engine, prompts, [greedy(limit) for limit in limits], [0, 1])
    assert [got[str(at)][0] for at in range(2)] == alone(model, prompts, limits)
    assert runner.pool.k_slots[:, -1].isnan().all(), "a row of padding was written"
    assert any(len(tree) in counts for counts in replays), "no tree was replayed"
    assert engine.speculation.counts.accepted > 2


@needs_triton
@pytest.mark.sample(1, of="graphs of heads")
def test_a_replayed_step_hands_out_what_eagle_3_reads():
    """Features of three depths, the same as from an eager step."""
    model, found = new_model(), []
    heads = random_heads(model, "eagle3")
    for is_replayed in (False, True):
        config = dict(method="eagle", model="made here", num_speculative_tokens=2)
        small = dict(max_num_seqs=2, block_size=4, num_gpu_blocks_override=12, max_model_len=24)
        engine = engine_over(
            fused(model), None, EngineArgs(speculative_config=config, **small), heads
        )
        runner, features = engine.runner, []
        runner.pool.ops = LESSON_12
        assert runner.taps == heads.taps
        if is_replayed:
            runner.capture(SimulatedGraphs(1), [3], 3)
        observe = engine.speculation.proposer.observe

        def watched(ran, all_features, tables, observe=observe, features=features):
            features.append(all_features[[row for one in ran for row in one.rows]])
            observe(ran, all_features, tables)

        engine.speculation.proposer.observe = watched
        run(engine, [[1, 2, 3]], [greedy(4)])
        found.append(torch.cat(features))
    assert found[0].shape[1] == 3 * model.config.hidden_size
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@needs_triton
@pytest.mark.sample(1, of="rehearsals")
def test_the_engine_on_a_gpu():
    """The cases of engine_gpu_cases.py, where there is no GPU on a pretended one."""
    pretended = [] if has_gpu() else ["lessons.toolbox.proof.pretended"]
    pytest_of = ["pytest", "-q", "-p", "no:cacheprovider", "tests/engine_gpu_cases.py"]
    done = subprocess.run(
        [sys.executable, "-m", *pretended, *pytest_of],
        cwd=ROOT,
        env=dict(os.environ) | ({} if has_gpu() else {"TRITON_INTERPRET": "1"}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
    assert torch.cuda.is_available() is has_gpu(), "only that process pretends"
