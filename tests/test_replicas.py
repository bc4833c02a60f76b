"""Several engines behind the interface of one: what happens between the end of a replica's step and
the moment at which a reader is told of it.
"""

import pytest

from lessons.l02_naive_attention.naive import generate as alone
from reference.parallel.replicas import ReplicatedEngine
from tests.engine_cases import assert_clean, greedy, new_engine, new_model

pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture(scope="module")
def model():
    return new_model()


@pytest.fixture
def engine(model):
    engine = ReplicatedEngine([new_engine(model, 60, 4, max_num_seqs=3) for _ in range(2)], seed=0)
    yield engine
    for replica in engine.replicas:
        replica.close()
        assert_clean(replica.engine)


def silent_step(engine: ReplicatedEngine, request_id: str) -> None:
    """The replica of a request ends a step, and whose end was not told."""
    [replica] = [one for one in engine.replicas if request_id in one.requests]
    replica.begin_step().result()


def answers(engine: ReplicatedEngine) -> dict[str, list[int]]:
    """{id: tokens} of all that end."""
    found = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            assert output.request_id not in found, "told twice"
            if output.finished:
                found[output.request_id] = output.outputs[0].token_ids
    return found


def test_a_name_that_is_used_again_hears_nothing_of_who_left(model, engine):
    engine.add_request("a", [1, 2, 3], greedy(6))
    engine.add_request("b", [4, 5, 6], greedy(9))
    silent_step(engine, "b")
    assert engine.abort_request("b").outputs[0].finish_reason == "abort"
    engine.add_request("b", [7, 8], greedy(4))
    [first, again] = alone(model, [[1, 2, 3], [7, 8]], [6, 4])
    assert answers(engine) == {"a": first, "b": again}


def test_an_end_that_no_reader_has_been_told_is_still_to_come(model, engine):
    engine.add_request("a", [1, 2, 3], greedy(1))
    silent_step(engine, "a")
    assert engine.has_unfinished_requests and "a" in engine.requests
    with pytest.raises(ValueError, match="request_id: got 'a'; accepted: a string not in use"):
        engine.add_request("a", [1], greedy(1))
    assert answers(engine) == {"a": alone(model, [[1, 2, 3]], 1)[0]}
    assert not engine.requests and engine.abort_request("a") is None


def test_a_reader_that_leaves_after_the_end_gets_the_answer(model, engine):
    engine.add_request("a", [1, 2, 3], greedy(1))
    silent_step(engine, "a")
    output = engine.abort_request("a")
    assert output.outputs[0].token_ids == alone(model, [[1, 2, 3]], 1)[0]
    assert output.finished and output.outputs[0].finish_reason == "length"
    assert answers(engine) == {}


def test_a_step_that_raises_takes_no_other_replicas_tokens(model, engine, monkeypatch):
    engine.add_request("a", [1, 2, 3], greedy(1))
    engine.add_request("b", [4, 5, 6], greedy(1))
    broken = next(one.engine for one in engine.replicas if "b" in one.requests)
    monkeypatch.setattr(broken, "run", lambda step: 1 / 0)
    for replica in engine.replicas:
        replica.begin_step().exception()
    told, raised = [], 0
    while engine.has_unfinished_requests:
        try:
            told += engine.step()
        except ZeroDivisionError:
            raised += 1
    assert raised == 1 and [output.request_id for output in told] == ["a"]
    assert told[0].outputs[0].token_ids == alone(model, [[1, 2, 3]], 1)[0]
    assert not engine.requests
