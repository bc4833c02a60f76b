"""Several batches in the pipeline: the tokens of one batch at a time, through random histories, and
the bubble of lesson 20's formula.
"""

from concurrent.futures import Future
from functools import partial

import pytest

from lessons.l15_chunked_prefill.lab.histories import Rules
from lessons.l20_parallelism.pipeline import Piece, decode_bubble, idle_share
from reference.engine.engine import Engine
from reference.engine.sampling_params import SamplingParams
from reference.parallel.in_flight import InFlight, PipelinedScheduler
from reference.parallel.remote_sampler import RemoteSampler
from tests.engine_histories import History, House, PassFailed, new_engine
from tests.parallel_cases import (
    answers,
    parallel_engine,
    serve,
    small_args,
    whole_engine,
    write_checkpoint,
)
from tests.test_ahead_engine import AheadHistory
from tests.test_parallel_sampling import VirtualWorkers

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import Phase, given
from hypothesis import strategies as st

from tests.test_engine_histories import FAULTS, HOUSE, REQUESTS, histories

# ---------------------------------------------------------------- histories


class PipelinedRules(Rules):
    """Lesson 15's rules. What is new: whose token is on its way waits for it."""

    def check(self, step):
        in_step = {chunk.sequence for chunk in step.chunks}
        assert not self.scheduler.on_their_way & in_step, "runs before its token has come"
        super().check(step)

    def check_progress(self, step):
        if not self.scheduler.on_their_way & set(self.scheduler.running[:1]):
            super().check_progress(step)


def pipelined(house, faults, batches: int, scheduler=PipelinedScheduler, part=InFlight) -> Engine:
    engine = new_engine(house, faults, Engine, partial(scheduler, num_batches=batches))
    engine.runner.__class__ = VirtualWorkers
    engine.runner.rules = PipelinedRules(engine.scheduler)
    engine.emit = RemoteSampler(engine.runner)
    engine.run = part(engine).run
    return engine


class PipelinedHistory(AheadHistory):
    def __init__(self, house, requests, faults, batches, *slips):
        engine = pipelined(house, faults, batches, *slips)
        History.__init__(self, house, requests, faults, engine=engine)


def check_histories(count: int, *slips, **more):
    @histories(count, **more)
    @given(HOUSE, REQUESTS, FAULTS, st.integers(2, 4))
    def check(house, requests, faults, batches):
        history = PipelinedHistory(house, requests, faults, batches, *slips)
        history.run()
        assert all(sequence.finished for sequence in history.engine.under_way)

    check()


def test_random_histories_in_flight(request):
    """Arrivals, aborts, forks, scored prompts, preemption, failing passes, with 2 to 4 batches."""
    check_histories(3_000 if request.config.getoption("--all") else 80)


class AdmitsThem(PipelinedScheduler):
    """One that was preempted computes its tokens again before the last of them is known."""

    def admit(self, *what):
        ways, self.on_their_way = self.on_their_way, set()
        try:
            return super().admit(*what)
        finally:
            self.on_their_way = ways


class RunsThem(PipelinedScheduler):
    """A sequence decodes again before its token has come."""

    def run(self, sequence, most, step):
        ways, self.on_their_way = self.on_their_way, set()
        try:
            super().run(sequence, most, step)
        finally:
            self.on_their_way = ways


class LeavesThemThere(InFlight):
    """If a pass fails, requests whose tokens are on their way are not aborted with it."""

    def note(self):
        super().note()
        self.engine.under_way = []


@pytest.mark.parametrize(
    "slips",
    [
        (AdmitsThem,),
        (RunsThem,),
        (PipelinedScheduler, LeavesThemThere),
    ],
    ids=lambda slips: slips[-1].__name__,
)
def test_a_slip_is_found_by_histories(slips):
    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, RuntimeError)):
        check_histories(400, *slips, database=None, derandomize=True, phases=[Phase.generate])


def test_a_failing_pass_takes_no_namesake_of_one_that_was_aborted():
    """It has come since, by the same name, and waits for its first pass."""
    engine = pipelined(House(40, 1, 1, 16), {1: "before"}, 2)
    params = SamplingParams(temperature=0, max_tokens=9, detokenize=False, ignore_eos=True)
    engine.add_request("a", [1, 2, 3], params)
    engine.step()
    assert engine.under_way, "its token is on its way"
    engine.abort_request("a")
    engine.add_request("b", [4, 5, 6], params)
    engine.add_request("a", [7, 8, 9], params)
    engine.runner.steps += 1
    with pytest.raises(PassFailed):
        engine.step()
    assert list(engine.requests) == ["a"]
    while engine.has_unfinished_requests:
        engine.runner.steps += 1
        [output] = engine.step() or [None]
    assert output.request_id == "a" and len(output.outputs[0].token_ids) == 9


# ---------------------------------------------------------------- the bubble, on virtual time


class Later(Future):
    """A reply that comes at a time of the virtual clock."""

    def __init__(self, runner, at: float):
        super().__init__()
        self.runner, self.at = runner, at

    def result(self, timeout=None):
        self.runner.now = max(self.runner.now, self.at)
        return super().result(timeout)


class TimedStages(VirtualWorkers):
    """A pass takes each stage one unit, whatever is in it; the engine's process takes no time."""

    stages, now, batch = 1, 0.0, 0

    def __call__(self, step, tables):
        self.free = getattr(self, "free", [0.0] * self.stages)
        self.pieces = getattr(self, "pieces", [])
        ready = self.now
        for stage in range(self.stages):
            start = max(ready, self.free[stage])
            ready = self.free[stage] = start + 1.0
            self.pieces.append(Piece(stage, self.batch, 0, start, ready))
        self.batch, self.ready = self.batch + 1, ready
        return super().__call__(step, tables)

    def ask_of(self, hidden, method, *arguments):
        found = super().ask_of(hidden, method, *arguments)
        later = Later(self, self.ready)
        later.set_result(found.result())
        return later


class TakesAll(PipelinedScheduler):
    """The first batch has all that decode, so that none is left for the next."""

    @property
    def share(self):
        return len(self.running)


def idle_of(stages: int, batches: int, requests: int, scheduler=PipelinedScheduler) -> float:
    """Share of the stages' time in which they do nothing, without the ends."""
    house = House(400, 1, 8, 64)
    engine = pipelined(house, {}, batches, scheduler)
    engine.runner.__class__ = TimedStages
    engine.runner.stages = stages
    params = SamplingParams(temperature=0, max_tokens=30, detokenize=False, ignore_eos=True)
    for index in range(requests):
        engine.add_request(str(index), [index + 1] * 3, params)
    while engine.has_unfinished_requests:
        engine.step()
        engine.runner.steps += 1
    pieces, end = engine.runner.pieces, engine.runner.now
    middle = [piece for piece in pieces if piece.start >= 12 and piece.end <= end - 12]
    moved = [Piece(p.stage, 0, 0, p.start - 12, p.end - 12) for p in middle]
    return idle_share(moved)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_bubble_is_that_of_the_formula(stages):
    """1 - m / p with m batches in flight: one request makes one batch, p requests make p."""
    for requests in (1, 2, stages, stages + 3):
        flying = min(stages, requests)
        want = decode_bubble(stages, flying)
        assert abs(idle_of(stages, stages, requests) - want) < 0.04, (requests, want)
    # with one batch in flight, however many requests there are
    one = idle_of(stages, 1, stages + 3)
    assert abs(one - decode_bubble(stages, 1)) < 0.04
    greedy = idle_of(stages, stages, stages + 3, TakesAll)
    assert abs(greedy - decode_bubble(stages, 1)) < 0.04, "and so it is without shares"


@pytest.mark.sample(1, of="batches in flight")
@pytest.mark.parametrize("stages", [2, 3])
def test_processes_hold_as_many_batches_as_stages(stages, tmp_path, seed):
    """And with drafts one, because what follows a draft is not known before it is verified."""
    model = write_checkpoint(tmp_path, "llama", seed)
    args = dict(num_gpu_blocks_override=40, pipeline_parallel_size=stages)
    drafts = dict(method="ngram", num_speculative_tokens=2)
    params = SamplingParams(temperature=0, max_tokens=9, detokenize=False, ignore_eos=True)
    asked, found = [([index + 1] * 5, params) for index in range(4)], []
    for changes in ({}, dict(speculative_config=drafts)):
        engine = parallel_engine(small_args(model, max_num_batched_tokens=24, **args, **changes))
        most, part = 0, getattr(engine.run, "__self__", None)
        if part is not engine:
            tell = part.tell

            def noted(tell=tell, part=part):
                nonlocal most
                most = max(most, len(part.queue))
                return tell()

            part.tell = noted
        try:
            found.append((answers(serve(engine, asked)), most))
        finally:
            engine.close()
    (tokens, most), (drafted, none) = found
    assert tokens == drafted == answers(serve(whole_engine(small_args(model)), asked))
    assert (most, none) == (stages, 0)
