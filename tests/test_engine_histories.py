"""Random histories of the whole engine: nothing that happens to others changes a request's tokens,
nothing leaks, and nothing but what can never fit is refused.
"""

from collections import Counter

import pytest

from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l13_prefix_caching.optimized import RadixTree
from reference.engine.engine import Engine
from tests.engine_histories import Asked, History, House

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

ASKED = st.builds(
    Asked,
    arrives=st.integers(0, 5),
    prompt_len=st.integers(1, 16) | st.integers(1, 42),
    limit=st.integers(1, 14),
    answers=st.sampled_from([1, 1, 1, 2, 3]),
    priority=st.sampled_from([0, 0, 1, 2]),
    begins_as_others=st.booleans(),
    scores_prompt=st.sampled_from([False, False, True]),
    aborts=st.none() | st.none() | st.integers(0, 30),
)
REQUESTS = st.lists(ASKED, min_size=2, max_size=8)
# (num_blocks, block_size): from a pool that preempts all the time to one for all
POOLS = st.sampled_from([(45, 1), (80, 1), (16, 3), (24, 3), (4, 16), (6, 16), (40, 16)])
# (max_num_seqs, max_num_batched_tokens): chunks of 1 to 64 tokens
STEPS = st.sampled_from([(1, 1), (3, 3), (4, 7), (4, 16), (8, 33), (8, 64)])
HOUSE = st.builds(
    lambda pool, step, *rest: House(*pool, *step, *rest),
    POOLS,
    STEPS,
    st.sampled_from([True, True, True, False]),
    st.sampled_from([None, HashBlocks, RadixTree]),
    st.sampled_from([None, None, 0, 4, 1000, 1000]),
)
FAULTS = st.dictionaries(
    st.integers(0, 40), st.sampled_from(["before", "after", "logits"]), max_size=2
)


def histories(count: int, **more):
    """One bug of several is reported, because a slip may fail in several ways."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    more = dict(deadline=None, report_multiple_bugs=False) | more
    return settings(max_examples=count, suppress_health_check=slow, **more)


def test_random_histories(request):
    seen, ends = Counter(), Counter()

    @histories(10_000 if request.config.getoption("--all") else 300)
    @given(HOUSE, REQUESTS, FAULTS)
    def check(house, requests, faults):
        history = History(house, requests, faults)
        history.run()
        seen.update({name: count > 0 for name, count in history.seen.items()})
        ends.update(history.ended.values())

    check()
    print(seen, ends)
    # Only of the long form, because a hundred random histories may miss what is rare.
    if request.config.getoption("--all"):
        for name in ("preempted", "swapped", "cached"):
            assert seen[name], f"no history was {name}"
        assert set(ends) == {"finished", "aborted", "failed", "refused"}


# ---------------------------------------------------------------- planted slips


class KeepsWhatFailed(Engine):
    """A pass that raised did not happen, it believes."""

    def step(self):
        abort, self.abort_request = self.abort_request, lambda request_id: None
        try:
            return super().step()
        finally:
            self.abort_request = abort


class AbortsTheFirstAnswer(Engine):
    """The other answers of an aborted request run on."""

    def abort_request(self, request_id):
        request = self.requests[request_id]
        rest, request.sequences = request.sequences[1:], request.sequences[:1]
        output = super().abort_request(request_id)
        request.sequences += rest
        for sequence in rest:
            sequence.finish_reason = "abort"
        return output


class ScoresTwice(Engine):
    """After a preemption it scores the prompt again, after the scores that are there."""

    def score_prompts(self, step, hidden):
        for chunk in step.chunks:
            request = chunk.sequence.request
            if request.prompt_logprobs and chunk.sequence.preemptions:
                request.prompt_logprobs += request.prompt_logprobs[1:]
        super().score_prompts(step, hidden)


class SkipsScores(Engine):
    """Takes what a prefix cache knows, although no request has scored it."""

    def new_sequences(self, request, priority):
        sequences = super().new_sequences(request, priority)
        for sequence in sequences:
            sequence.reuses_prefix = True
        return sequences


class ForksLate(Engine):
    """The other answers begin when the first has a token already."""

    def sample(self, step, hidden):
        begun = [chunk.sequence for chunk in step.chunks if not chunk.sequence.output]
        self.waiting = {s.request: s.request.waiting_to_fork for s in begun}
        for request in self.waiting:
            request.waiting_to_fork = []
        return super().sample(step, hidden)

    def fork(self, sampled):
        super().fork(sampled)
        for request, children in self.waiting.items():
            request.waiting_to_fork = children


@pytest.mark.parametrize(
    "kind", [KeepsWhatFailed, AbortsTheFirstAnswer, ScoresTwice, SkipsScores, ForksLate]
)
def test_a_planted_slip_is_found(kind):
    # No shrinking, to save time.
    @histories(300, database=None, derandomize=True, phases=[Phase.generate])
    @given(HOUSE, REQUESTS, FAULTS)
    def check(house, requests, faults):
        History(house, requests, faults, kind).run()

    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, RuntimeError)):
        check()
