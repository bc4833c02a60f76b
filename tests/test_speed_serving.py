"""What serving costs is computed from the rounds that were run."""

import asyncio
import json

import httpx
import pytest

from lessons.l22_serving.load import Served
from reference.bench import speed_bursts, speed_serving
from reference.bench.bench_load import BenchRequest, Failed, Stream
from reference.bench.speed_peer import Transformers


def test_a_ratio_compares_two_of_one_round():
    """The machine was twice as slow in the second round; the overhead was a tenth in each. The peer
    took part in one.
    """
    rounds = [
        {"engine alone": 100.0, "async engine": 90.0, "server": 80.0, "peer": 50.0},
        {"engine alone": 50.0, "async engine": 45.0, "server": 25.0},
        {"engine alone": 100.0, "async engine": 91.0, "server": 70.0},
    ]
    record = speed_serving.summarize(rounds)
    overhead = {"async engine": 0.1, "server": 0.3, "peer": 0.5}
    assert record["overhead"] == pytest.approx(overhead)
    assert record["tokens_per_s"]["engine alone"] == 100 and record["rounds"] == rounds


def test_gaps_are_those_while_prompts_were_there():
    """Tokens every 10 ms for a while; while a prompt is there, from 1 s to 2 s, every 40 ms and
    once 90 ms; and a long gap when all prompts have gone.
    """
    quiet = [0.8 + at / 100 for at in range(21)]
    under = [1 + at * 0.04 for at in range(1, 24)] + [2.01]
    decode = Served(0.0, 9.0, (*quiet, *under, 9.0))
    prompts = [Served(1.0, 2.0, (2.0,)), Served(1.2, 1.5, (1.5,))]
    found = speed_bursts.gaps_under_bursts([decode], prompts)
    assert found["quiet_itl_s"] == pytest.approx(0.01)
    assert found["median_itl_s"] == pytest.approx(0.04)
    assert 0.04 < found["p99_itl_s"] <= 0.09 + 1e-9
    assert found["p99_over_quiet"] == pytest.approx(found["p99_itl_s"] / 0.01)
    assert found["p99_over_median"] == pytest.approx(found["p99_itl_s"] / 0.04)
    assert found["burst_ttft_s"] == pytest.approx(0.65)


def test_the_largest_chunk_that_is_quiet_enough():
    ratios = {16: 1.5, 32: 2.9, 64: 3.1, 128: 9.0}
    curve = {f"chunks of {chunk}": {"p99_over_quiet": ratio} for chunk, ratio in ratios.items()}
    assert speed_bursts.largest_chunk(curve) == 32
    assert speed_bursts.largest_chunk(curve, most=1.0) is None


@pytest.mark.parametrize("is_whole", [True, False])
def test_the_peers_stream_ends_with_a_reason(is_whole):
    parts = [
        {"text": "a"},
        {"text": "b c"},
        *([{"text": "", "finish_reason": "length"}] * is_whole),
    ]
    events = [{"choices": [part]} for part in parts]
    if is_whole:
        events[-1]["usage"] = dict(prompt_tokens=5, completion_tokens=3)
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)

    async def ask():
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
        async with httpx.AsyncClient(transport=transport, base_url="http://peer") as client:
            backend, stream = Transformers(client, "m"), Stream()
            await backend.send(BenchRequest("x", 0, 3), stream)
            return backend.texts, stream

    if is_whole:
        texts, stream = asyncio.run(ask())
        assert texts == {"x": "ab c"} and len(stream.token_s) == 2
        assert (stream.prompt_tokens, stream.generated_tokens) == (5, 3)
    else:
        with pytest.raises(Failed, match="middle"):
            asyncio.run(ask())


@pytest.mark.parametrize("name", ["streams", "input-len", "output-len", "rounds"])
def test_mistakes_are_one_line(name, capsys):
    with pytest.raises(SystemExit) as end:
        speed_serving.main([f"--{name}", "0"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert f"--{name} must be at least 1, got 0" in said
