"""Parallel drafting in the engine: one pass of the draft, K guesses, and no token changes."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.sampling import SamplingParams as RowParams
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l16_speculative_sampling.lab.chi_squared import (
    chance_of,
    chi_squared,
    sequences,
    tables_of,
)
from lessons.l17_tree_speculation.heads.parallel import ParallelDraft
from reference import LLM, SamplingParams
from reference.engine.engine_args import EngineArgs
from reference.speculation.proposers import DraftModelProposer, ParallelDraftProposer
from reference.speculation.speculation import Speculation
from tests.engine_cases import LONGEST, new_model, random_prompts, run
from tests.speculative_histories import DraftedHistory, VirtualParallel
from tests.test_speculative_engine import EVERY_WISH, HOUSES, new_engine, wishes

pytestmark = pytest.mark.usefixtures("seed")
ARRIVALS = [0, 0, 1, 2, 2, 4]
MASK = 3


@pytest.fixture(scope="module")
def model():
    return new_model()


@pytest.fixture(scope="module")
def draft(model):
    """A twin with some noise and a mask: its first guess is right now and then."""
    twin = new_model()
    for parameter in twin.parameters():
        parameter.add_(0.15 * torch.randn_like(parameter) * parameter.std())
    return ParallelDraft(twin, MASK)


def parallel_engine(model, draft, **arguments):
    keys = dict(parallel_drafting=True)
    return new_engine(model, "draft", draft, speculative=keys, **arguments)


def some_requests(temperature=None):
    prompts = [prompt[: LONGEST - 16] for prompt in random_prompts(len(EVERY_WISH), shared=9)]
    params = [wishes(index) for index in range(len(prompts))]
    if temperature is not None:
        params = [replace(p, temperature=temperature, n=1) for p in params]
    return prompts, params


@pytest.mark.parametrize("house", HOUSES)
def test_every_greedy_wish_is_served_as_without_speculation(model, draft, house):
    """Penalties, bans, stops; few blocks, swap, chunks."""
    prompts, params = some_requests(temperature=0)
    engine = parallel_engine(model, draft, **house)
    assert isinstance(engine.speculation.proposer, ParallelDraftProposer)
    assert run(engine, prompts, params, ARRIVALS) == run(new_engine(model), prompts, params)
    assert engine.speculation.counts.accepted


def test_seeds_give_the_same_tokens_alone_and_in_any_batch(model, draft):
    prompts, params = some_requests()
    prompts = [prompt[:15] for prompt in prompts]
    want = {}
    for at, prompt in enumerate(prompts):
        engine = parallel_engine(model, draft, num_gpu_blocks_override=30)
        want[str(at)] = run(engine, [prompt], [params[at]])["0"]
    for house in HOUSES:
        assert run(parallel_engine(model, draft, **house), prompts, params, ARRIVALS) == want


def test_sampled_outputs_follow_the_targets_distribution(model, draft):
    """False alarm: 1e-9."""
    how, prompt, length, total = dict(temperature=1.0, top_k=4), [7, 8, 9, 7, 8], 4, 3000
    tables = tables_of(model, draft.model, prompt, RowParams(**how), length)
    engine = parallel_engine(model, draft, max_num_seqs=50, num_gpu_blocks_override=400)
    outputs = []
    for start in range(0, total, 50):
        wish = SamplingParams(
            **how, n=50, seed=start, max_tokens=length, ignore_eos=True, detokenize=False
        )
        outputs += run(engine, [prompt], [wish])["0"]
    counts = engine.speculation.counts
    assert 0 < counts.accepted < counts.drafted
    assert chance_of(*chi_squared(sequences(tables, outputs), tables.expected * total)) > 1e-9


@pytest.mark.parametrize("kind", [ParallelDraftProposer, DraftModelProposer])
def test_a_step_runs_the_draft_once(model, draft, monkeypatch, kind):
    """And over few tokens: what stayed of the last draft, the newest one, and masks. A chain takes
    a pass for each guess. One block, because a full one is completed with a pass of its own.
    """
    count, runs, steps = 5, [], []
    drafter = draft if kind is ParallelDraftProposer else draft.model
    engine = new_engine(model, "draft", drafter, count=count, block_size=64)
    proposer = engine.speculation.proposer
    assert type(proposer) is kind
    made, ran = proposer.propose, proposer.runner.run

    def run_and_note(chunks, tables):
        runs.append(sum(len(tokens) for tokens, _ in chunks))
        return ran(chunks, tables)

    def propose_and_note(sequences, counts, tables):
        before = len(runs)
        drafts = made(sequences, counts, tables)
        steps.append((max(counts), len(runs) - before))
        return drafts

    monkeypatch.setattr(proposer.runner, "run", run_and_note)
    monkeypatch.setattr(proposer, "propose", propose_and_note)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=25, detokenize=False))
    while engine.has_unfinished_requests:
        engine.step()
    if kind is ParallelDraftProposer:
        assert {passes for _, passes in steps} == {1}
        assert max(runs[1:]) <= 2 * count, "after the prompt"
    else:
        assert all(passes == most for most, passes in steps)


# ---------------------------------------------------------------- histories


class HoldsMasks(VirtualParallel):
    """K and V of masks count as those of what was accepted in their places."""

    def propose(self, sequences, counts, tables):
        drafts = super().propose(sequences, counts, tables)
        for sequence, count in zip(sequences, counts):
            self.held[sequence.row] += count - 1
        return drafts


class OneMaskLess(VirtualParallel):
    """The last guess is read from the mask before its own."""

    def next_logits(self, rows, tables):
        near = [row._replace(ahead=row.ahead[:-1]) for row in rows]
        return super().next_logits(near, tables)


@pytest.mark.parametrize("slip", [HoldsMasks, OneMaskLess])
def test_slips_are_found_by_histories(slip):
    pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
    from hypothesis import Phase, given

    from tests.test_engine_histories import FAULTS, HOUSE, REQUESTS, histories
    from tests.test_speculative_histories import DRAFTING

    @histories(600, database=None, derandomize=True, phases=[Phase.generate])
    @given(HOUSE, REQUESTS, FAULTS, DRAFTING)
    def check(house, requests, faults, drafting):
        house = house._replace(cache=HashBlocks)
        drafting = drafting._replace(kind="drawn at once")
        DraftedHistory(house, requests, faults, drafting, Speculation, slip).run()

    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, RuntimeError)):
        check()


# ---------------------------------------------------------------- the embedded draft, arguments


def embedded(**config):
    base = dict(method="draft_model", num_speculative_tokens=4, parallel_drafting=True)
    return LLM(
        "models/tiny",
        speculative_config=base | config,
        dtype="float32",
        device="cpu",
        max_model_len=128,
        num_gpu_blocks_override=64,
    )


def test_the_embedded_draft_is_right_often_and_changes_nothing():
    """vLLM's keys, as they are in its documentation."""
    llm = embedded(model="models/tiny-pard")
    plain = LLM("models/tiny", dtype="float32", device="cpu", max_model_len=128)
    texts = ["def read_lines(path):\n", "class Queue:\n    def __init__(self", "import os\n"]
    params = SamplingParams(temperature=0, max_tokens=30)
    found, want = ([o.outputs[0] for o in each.generate(texts, params)] for each in (llm, plain))
    assert [one.token_ids for one in found] == [one.token_ids for one in want]
    assert llm.engine.speculation.counts.tokens_per_pass > 1.3


def test_what_cannot_work_is_refused_in_one_line(tmp_path):
    for given, said in (
        (dict(method="ngram"), "parallel_drafting: got True; accepted: False with method 'ngram'"),
        (dict(method="eagle", model="x"), "False with method 'eagle'"),
        (dict(model="x", parallel_drafting="yes"), "got 'yes'; accepted: True or False"),
    ):
        given = dict(parallel_drafting=True, num_speculative_tokens=2) | given
        with pytest.raises(ValueError, match="speculative_config") as error:
            EngineArgs.read(speculative_config=given)
        assert said in str(error.value) and "\n" not in str(error.value), error.value
    with pytest.raises(ValueError, match="got pard_token None in config") as error:
        embedded(model="models/tiny-draft")
    assert "\n" not in str(error.value)
    folder = tmp_path / "wide"
    shutil.copytree("models/tiny-draft", folder)
    config = json.loads((folder / "config.json").read_text())
    for token in (4096, -1, True, "ÿ"):
        (folder / "config.json").write_text(json.dumps(config | {"pard_token": token}))
        with pytest.raises(ValueError, match="below 4096"):
            embedded(model=str(folder))
