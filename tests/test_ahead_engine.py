"""async_scheduling: an engine that is one step ahead gives the tokens of the serial one, through
random histories, with a real model and with replayed steps; and it refuses what it cannot do.
"""

import json
import random
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention.naive import generate as alone
from lessons.l11_cuda_graphs.simulator import SimulatedGraphs
from lessons.l12_paged_kv.optimized import LESSON_12
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l13_prefix_caching.optimized import RadixTree
from lessons.l25_one_step_ahead.device import PLACEHOLDER
from lessons.toolbox.measure.device import has_triton
from reference import LLM, SamplingParams
from reference.engine.engine import Engine
from reference.engine.engine_args import EngineArgs
from reference.features.ahead import Ahead
from reference.features.decode_graphs import DecodeGraphs
from reference.trace.recorder import read_trace, traced
from tests import engine_histories
from tests.engine_cases import greedy, new_engine, new_model, random_prompts, run
from tests.engine_histories import History, House, VirtualRunner
from tests.test_engine_histories import FAULTS, POOLS, REQUESTS, STEPS, histories

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import Phase, given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("seed")
SOME = pytest.mark.sample(2, of="the engine one step ahead")
needs_triton = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")
HOUSE = st.builds(
    lambda pool, step, *rest: House(*pool, *step, *rest),
    POOLS,
    STEPS,
    st.sampled_from([True, True, True, False]),
    st.sampled_from([None, HashBlocks, RadixTree]),
)


# ---------------------------------------------------------------- random histories


class LateRunner(VirtualRunner):
    """A virtual runner that is given the tokens of the pass before when it runs."""

    late = None

    def __call__(self, step, tables):
        tokens = torch.tensor([token for chunk in step.chunks for token in chunk.tokens])
        if self.late is not None:
            self.late(tokens)
        with holding(step, tokens.tolist()):
            return super().__call__(step, tables)


@contextmanager
def holding(step, tokens: list[int]):
    """Within it the sequences of a step hold these tokens in the place of those that run."""
    kept = [list(chunk.sequence.all_tokens) for chunk in step.chunks]
    for chunk in step.chunks:
        new, tokens = tokens[: chunk.count], tokens[chunk.count :]
        start = chunk.sequence.computed
        chunk.sequence.all_tokens[start : start + chunk.count] = new
    try:
        yield
    finally:
        for chunk, before in zip(step.chunks, kept):
            chunk.sequence.all_tokens[:] = before


class AheadHistory(History):
    """A history of an engine that is one step ahead. part: what makes it so."""

    def __init__(self, house, requests, faults, part: type = Ahead):
        engine = engine_histories.new_engine(house, faults, Engine)
        engine.runner.__class__ = LateRunner
        engine.run = part(engine).run
        super().__init__(house, requests, faults, engine=engine)

    def step(self) -> None:
        """Those who have left are not yet known to have finished."""
        scheduler = self.engine.scheduler
        here = [*scheduler.running, *scheduler.waiting]
        sequences = [s for request in self.requests.values() for s in request.sequences]
        gone = [s for s in sequences if s not in here and (s.all_tokens != s.prompt or s.finished)]
        before = set(self.engine.requests)
        self.engine.runner.rules.departures = len(gone)
        try:
            for output in self.engine.step():
                assert all(PLACEHOLDER not in answer.token_ids for answer in output.outputs)
                if output.finished:
                    self.ended[int(output.request_id)] = "finished"
        except engine_histories.PassFailed:
            for id in before - set(self.engine.requests):
                self.ended[int(id)] = "failed"


def test_random_histories_one_step_ahead(request):
    """Arrivals, priorities, aborts, forks, scored prompts, failing passes, preemption, caches."""

    @histories(500 if request.config.getoption("--all") else 12)
    @given(HOUSE, REQUESTS, FAULTS)
    def check(house, requests, faults):
        AheadHistory(house, requests, faults).run()

    check()


class ForgetsTheTokens(Ahead):
    """Runs the id 0 where a token is on its way."""

    def launch(self, step):
        kept, self.launched = self.launched, None
        try:
            return super().launch(step)
        finally:
            self.launched = kept


class AnswersTheEnded(Ahead):
    """Samples for those who ended while the pass was launched."""

    def tell(self):
        leave, self.engine.scheduler.leave = self.engine.scheduler.leave, lambda: []
        touched = super().tell()
        self.engine.scheduler.leave = leave
        return touched


class RunsBeyondTheLimit(Ahead):
    """Lets a request run on whose last token is on its way."""

    def sample(self, step, hidden):
        abort, self.engine.scheduler.abort = self.engine.scheduler.abort, lambda sequence: None
        launched = super().sample(step, hidden)
        self.engine.scheduler.abort = abort
        return launched


SLIPS = (ForgetsTheTokens, AnswersTheEnded, RunsBeyondTheLimit)


@pytest.mark.parametrize("part", SLIPS)
@SOME
def test_a_planted_slip_is_found(part):
    @histories(200, database=None, derandomize=True, phases=[Phase.generate])
    @given(HOUSE, REQUESTS, FAULTS)
    def check(house, requests, faults):
        AheadHistory(house, requests, faults, part).run()

    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, RuntimeError)):
        check()


# ---------------------------------------------------------------- a real model


def ahead_engine(model, num_blocks, block_size, **how) -> Engine:
    engine = new_engine(model, num_blocks, block_size, **how)
    engine.run = Ahead(engine).run
    return engine


@pytest.mark.parametrize(
    "how",
    [dict(), dict(max_num_seqs=3, max_num_batched_tokens=5), dict(cache=HashBlocks)],
    ids=["roomy", "small chunks", "prefix cache"],
)
@SOME
def test_the_tokens_of_one_at_a_time(how):
    """On a pool that has to send some away, and a request that comes late."""
    model, prompts, limits = new_model(), random_prompts(5, shared=6), [6, 11, 1, 9, 4]
    engine = ahead_engine(model, 20, 3, **how)
    got = run(engine, prompts, [greedy(limit) for limit in limits], [0, 0, 0, 2, 5])
    assert [got[str(at)][0] for at in range(5)] == alone(model, prompts, limits)


def simulated(part: type | None, kind=DecodeGraphs) -> Engine:
    """An engine on the CPU whose decode steps are recorded and replayed."""
    engine = new_engine(new_model(), num_blocks=30, block_size=4, max_num_seqs=3)
    runner = engine.runner
    runner.pool.ops = LESSON_12
    runner.captured = kind(runner.model, runner.pool, SimulatedGraphs(1), [1, 3], 24)
    if part is not None:
        engine.run = part(engine).run
    return engine


class NotIntoTheGraph(DecodeGraphs):
    """Replays without the tokens that the host does not know."""

    def __call__(self, chunks, tables, row_slots=None, trees=(), late=None):
        return super().__call__(chunks, tables, row_slots, trees)


@needs_triton
def test_replayed_steps_are_given_the_tokens_of_the_pass_before(request):
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: interpreted kernels take long, make test-all")
    prompts = [random.choices(range(60), k=k) for k in (3, 9)]
    params = [greedy(3), greedy(2)]
    want = run(simulated(None), prompts, params)
    assert run(simulated(Ahead), prompts, params) == want
    assert run(simulated(Ahead, NotIntoTheGraph), prompts, params) != want


WISHES = (
    dict(temperature=0),
    dict(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=1, n=2),
    dict(temperature=0, stop=["\n"], logprobs=2),
    dict(temperature=1.0, top_k=20, seed=3, min_tokens=4, logit_bias={7: 2}),
    dict(temperature=0, structured_outputs=dict(regex="[a-z]{3,9} = [0-9]+")),
    dict(temperature=0.7, seed=5, frequency_penalty=0.4, prompt_logprobs=1),
)


def answers(**how) -> list:
    """What the embedded model says to six prompts with different wishes, all fields that count."""
    requests = json.loads((ROOT / "models/prompts.json").read_text(encoding="utf-8"))[:6]
    params = [SamplingParams(max_tokens=5 + row, **wish) for row, wish in enumerate(WISHES)]
    llm = LLM(str(ROOT / "models/tiny"), device="cpu", max_num_seqs=4, **how)
    outputs = llm.generate([one["prompt"][:60] for one in requests], params, use_tqdm=False)
    return [
        [
            (
                one.token_ids,
                one.text,
                one.finish_reason,
                one.stop_reason,
                one.logprobs and [list(tops) for tops in one.logprobs],
            )
            for one in output.outputs
        ]
        for output in outputs
    ]


@SOME
def test_every_wish_is_answered_as_by_the_serial_engine():
    if not (ROOT / "models/tiny/model.safetensors").exists():
        pytest.skip("NOT RUN: models/tiny is not there")
    how = dict(num_gpu_blocks_override=10, max_num_batched_tokens=32)
    assert answers(async_scheduling=True, **how) == answers(**how)


def test_an_aborted_request_has_what_was_told():
    engine = ahead_engine(new_model(), 40, 4)
    engine.add_request("a", [1, 2, 3], greedy(20))
    for _ in range(4):
        engine.step()
    output = engine.abort_request("a")
    assert len(output.outputs[0].token_ids) == 3 and PLACEHOLDER not in output.outputs[0].token_ids
    assert engine.step() == [] and not engine.has_unfinished_requests


class BadLogits(VirtualRunner):
    """The logits of one step are not numbers."""

    def logits(self, hidden, rows):
        logits = super().logits(hidden, rows)
        return logits * torch.nan if self.steps == 2 else logits


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_pass_that_fails_takes_its_requests_along_and_no_others(temperature):
    """Greedy it fails when it is sampled, drawn when it is told."""
    engine = engine_histories.new_engine(House(40, 4, 4, 16), {}, Engine)
    engine.runner.__class__ = type("LateBadLogits", (LateRunner, BadLogits), {})
    engine.run = Ahead(engine).run
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=4, detokenize=False)
    engine.add_request("a", [1, 2, 3], params)
    with pytest.raises(ValueError, match="not finite"):
        while engine.has_unfinished_requests:
            engine.step()
            engine.runner.steps += 1
    engine.runner.steps = 9
    assert not engine.requests and engine.scheduler.is_idle
    engine.add_request("b", [4, 5], params)
    (sequence,) = engine.requests["b"].sequences
    while engine.has_unfinished_requests:
        engine.step()
    history = History(House(40, 4, 4, 16), [], {}, engine=engine)
    assert sequence.output == history.alone(sequence)


def test_a_traced_engine_stays_one_step_ahead(tmp_path):
    model, prompts, limits = new_model(), random_prompts(3), [3, 5, 2]
    params = [greedy(limit) for limit in limits]
    engine = ahead_engine(model, 40, 4)
    part = engine.run.__self__
    with traced(engine, tmp_path / "trace.json"):
        got = run(engine, prompts, params)
    answers = [got[str(at)][0] for at in range(3)]
    assert answers == alone(model, prompts, limits)
    steps = read_trace(tmp_path / "trace.json").steps
    assert engine.run.__self__ is part and len(steps) > max(map(len, answers))


def test_refuses_what_it_cannot_do_yet():
    said = "async_scheduling: got True; accepted: False with speculative_config, because a draft"
    with pytest.raises(ValueError, match=said):
        drafts = dict(method="ngram", num_speculative_tokens=2)
        EngineArgs(async_scheduling=True, speculative_config=drafts)
    with pytest.raises(ValueError, match="async_scheduling: got 1; accepted: True or False"):
        EngineArgs(async_scheduling=1)
