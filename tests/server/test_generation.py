"""What is told of an answer: each token once, in however many steps the engine's outputs arrive."""

import random

import pytest

from reference import SamplingParams
from reference.engine.outputs import CompletionOutput, Logprob, RequestOutput
from reference.server.calls import Answer, Call
from reference.server.generation import Run, merged
from tests.server.live import ask

WORDS = [f"w{at} " for at in range(40)]


def output(prompt: int, lengths: list[int]) -> RequestOutput:
    """A request as it is. lengths: tokens of each answer so far."""
    answers = []
    for index, length in enumerate(lengths):
        ids = list(range(length))
        logprobs = [{token: Logprob(-1.0, 1)} for token in ids]
        reason = "length" if length == len(WORDS) else None
        answers.append(
            CompletionOutput(index, "".join(WORDS[:length]), ids, None, logprobs, reason)
        )
    return RequestOutput(str(prompt), None, [1], answers, all(one.finished for one in answers))


def test_outputs_that_skip_tokens(seed):
    call = Call("x", "tiny", [[1], [1]], SamplingParams(n=2, logprobs=0))
    run = Run(None, call)
    answers = [Answer(at) for at in range(4)]
    lengths = [[0, 0], [0, 0]]
    while min(map(min, lengths)) < len(WORDS):
        prompt = random.randrange(2)
        lengths[prompt] = [
            min(len(WORDS), n + random.choice((0, 1, 1, 3))) for n in lengths[prompt]
        ]
        for delta in run.news(prompt, output(prompt, lengths[prompt])):
            assert delta.index // 2 == prompt and (delta.token_ids or delta.finish_reason)
            answers[delta.index].add(delta)
    for answer in answers:
        assert answer.token_ids == list(range(len(WORDS))) and answer.text == "".join(WORDS)
        assert len(answer.logprobs) == len(WORDS) and answer.finish_reason == "length"
    assert run.usage.completion == 4 * len(WORDS)
    assert not run.news(0, output(0, [len(WORDS)] * 2)), "nothing is told twice"


def test_merged_streams_and_their_errors():
    import asyncio

    closed = []

    async def numbers(name, count, fails=False):
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield name, number
            if fails:
                raise ValueError("broken")
        finally:
            closed.append(name)

    async def read(streams):
        return [item async for item in merged(streams)]

    found = asyncio.run(read([numbers("a", 3), numbers("b", 5)]))
    assert [n for name, n in found if name == "b"] == list(range(5)) and len(found) == 8
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(read([numbers("c", 10**9), numbers("d", 2, fails=True)]))
    assert set(closed) == set("abcd")


def test_a_reader_who_stops_holds_few_outputs():
    """Of two prompts of one call. Neither runs ahead of the reader, so mailboxes can skip."""
    import asyncio

    class Output:
        alive = 0

        def __init__(self):
            Output.alive += 1

        def __del__(self):
            Output.alive -= 1

    async def outputs():
        for _ in range(1000):
            yield Output()
            await asyncio.sleep(0)

    async def read_one():
        both = merged([outputs(), outputs()])
        await both.__anext__()
        for _ in range(3000):
            await asyncio.sleep(0)
        held = Output.alive
        await both.aclose()
        return held

    assert asyncio.run(read_one()) <= 6


def test_a_name_that_is_in_use_is_refused(running):
    body = dict(prompt=["x", "y"], max_tokens=2, request_id="mine")
    answer = ask(running.service, "POST", "/v1/completions", json=body)
    assert answer.json()["id"] == "cmpl-mine"
    bad = ask(running.service, "POST", "/v1/completions", json=body | dict(request_id="a b"))
    assert bad.status_code == 400 and "request_id" in bad.text
