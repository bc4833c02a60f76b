"""Prompts that are computed on another replica than their answer: which, and what becomes of them
when a replica on either way fails. Scripted replicas; test_apart.py has real ones.
"""

import asyncio
import json
import math
from contextlib import asynccontextmanager

import httpx
import pytest

from lessons.l26_kv_transfer.costs import LINKS, least_worth_sending, token_of
from reference.router.args import RouterArgs, read_args
from reference.router.metrics import Metrics
from reference.router.prefill import Prefill, prompt_tokens
from tests.router import fakes
from tests.router.fakes import SOON_S, Fake, cluster_of, until, whole
from tests.server.paths import REPOSITORY

LONG = "word " * 400
SEEN = dict(do_remote_prefill=True, remote_block_ids=[4, 5])


async def computes(fake, request, reader, writer) -> None:
    """A prefill replica."""
    writer.write(whole({"choices": [{"text": "secret"}], "kv_transfer_params": SEEN}))


async def computes_alone(fake, request, reader, writer) -> None:
    writer.write(whole({"choices": [{"text": "secret"}]}))


async def says_nonsense(fake, request, reader, writer) -> None:
    writer.write(whole(["kv_transfer_params"]))


@asynccontextmanager
async def apart(prefills=(computes,), decodes=(fakes.answers, fakes.answers), **own):
    """(router, prefill replicas, decode replicas), each with its script."""
    everyone = [Fake() for _ in (*prefills, *decodes)]
    for fake, script in zip(everyone, (*prefills, *decodes)):
        fake.script = script
        await fake.start()
        about = dict(engine_id=f"e{fake.port}", remote_host="10.0.0.9", remote_port=fake.port)
        fake.ready_says = {"kv_transfer": about}
    firsts, seconds = everyone[: len(prefills)], everyone[len(prefills) :]
    own = dict(health_interval=30.0, prefill=[fake.url for fake in firsts]) | own
    args = RouterArgs([fake.url for fake in seconds], **own)
    async with cluster_of(args, seconds) as router:
        yield router, firsts, seconds
    for fake in everyone:
        fake.go_on.set()
        await fake.die()


def bodies(fake) -> list[dict]:
    return [json.loads(request.body) for request in fake.seen]


def prefills(router, fake) -> dict[str, float]:
    names = ("sent", "computed", "refused", "failed", "late", "lost")
    counts = {
        name: router.counted("router_prefills_total", replica=fake.url, outcome=name)
        for name in names
    }
    return {name: count for name, count in counts.items() if count}


async def ask(router, prompt=LONG, **more) -> httpx.Response:
    body = dict(prompt=prompt, max_tokens=7, stream=False, n=1, min_tokens=2) | more
    return await router.client.post("/v1/completions?x=1", json=body)


async def test_a_long_prompt_goes_to_both():
    async with apart() as (router, [first], _):
        answer = await ask(router)
        second = router.ranked(LONG)[0]
        assert answer.json() == {"from": second.port}, "the client sees the second answer alone"
        [asked], [told] = bodies(first), bodies(second)
        assert asked["kv_transfer_params"] == dict(
            do_remote_decode=True,
            do_remote_prefill=False,
            remote_engine_id=f"e{second.port}",
            remote_block_ids=None,
            remote_host="10.0.0.9",
            remote_port=second.port,
        )
        assert asked["max_tokens"] == 1 and not asked.keys() & {"stream", "n", "min_tokens"}
        assert told.pop("kv_transfer_params") == SEEN
        assert told == dict(prompt=LONG, max_tokens=7, stream=False, n=1, min_tokens=2)
        assert first.seen[0].target == "/v1/completions?x=1"
        assert prefills(router, first) == dict(sent=1) and router.in_flight == [0, 0]


@pytest.mark.parametrize(
    "body",
    [
        dict(prompt="short"),
        dict(prompt=[LONG, LONG]),
        dict(prompt=LONG, echo=True),
        dict(prompt=LONG, prompt_logprobs=1),
        dict(prompt=LONG, max_tokens=1),
        dict(prompt=LONG, kv_transfer_params=SEEN),
    ],
)
async def test_what_is_not_worth_it_goes_to_one(body):
    async with apart() as (router, [first], seconds):
        await ask(router, **body)
        await router.client.post("/v1/embeddings", json=dict(input=LONG))
        assert not first.seen and sum(len(fake.seen) for fake in seconds) == 2


async def test_a_decode_replica_without_an_address_is_sent_nothing():
    async with apart() as (router, [first], _):
        for replica in router.routing.replicas.all:
            replica.kv_transfer = None
        await ask(router)
        assert not first.seen


@pytest.mark.parametrize(
    "script, outcome",
    [
        (fakes.dies_at_once, "lost"),
        (fakes.dies_in_a_whole_answer, "lost"),
        (fakes.is_full, "refused"),
        (fakes.drains, "refused"),
        (fakes.waits, "late"),
        (computes_alone, "computed"),
        (says_nonsense, "computed"),
    ],
)
async def test_a_prefill_replica_that_fails_costs_no_answer(script, outcome):
    # only who waits is late, however busy the machine is
    timeout = 0.2 if outcome == "late" else SOON_S
    async with apart([script], prefill_timeout=timeout) as (router, [first], _):
        answer = await ask(router)
        second = router.ranked(LONG)[0]
        assert answer.json() == {"from": second.port} and len(first.seen) == 1
        assert "kv_transfer_params" not in bodies(second)[0] and len(second.seen) == 1
        counted = prefills(router, first)
        assert counted == {outcome: 1}
        await ask(router)
        assert len(first.seen) == (1 if outcome == "lost" else 2), "a lost one is asked no more"


async def test_a_decode_replica_that_dies_after_the_transfer():
    """The prompt is handed over once more, to the one that is left; the client gets one answer."""
    async with apart() as (router, [first], _):
        one, other = router.ranked(LONG)
        one.script = fakes.dies_at_once
        answer = await ask(router)
        assert answer.json() == {"from": other.port}
        ports = [body["kv_transfer_params"]["remote_port"] for body in bodies(first)]
        assert ports == [one.port, other.port]
        assert len(one.seen) == len(other.seen) == 1
        assert prefills(router, first) == dict(sent=2)


async def test_who_waits_for_a_prefill_counts_where_it_will_go():
    async with apart([fakes.waits], policy="least") as (router, [first], _):
        asked = [asyncio.ensure_future(ask(router, LONG + str(n))) for n in range(4)]
        await until(lambda: len(first.seen) == 4)
        assert router.in_flight == [2, 2]
        first.go_on.set()
        await asyncio.gather(*asked)


async def test_a_client_that_leaves_while_the_prompt_is_computed():
    async with apart([fakes.waits]) as (router, [first], seconds):
        asked = asyncio.ensure_future(ask(router))
        await until(lambda: first.seen)
        asked.cancel()
        await until(lambda: first.left)
        assert not any(fake.seen for fake in seconds)
        await until(lambda: not router.routing.prefill.replicas.all[0].in_flight)


# ---------------------------------------------------------------- which prompts


def test_the_costs_by_hand():
    """A token of 128 KiB: 10 us to compute, 4 us to move, so 6 us are spared; 3 ms are 500."""
    args = RouterArgs(
        ["http://a:1"],
        prefill=["http://b:1"],
        send_costs='{"kv_bytes": 131072, "compute_s": 1e-5, "bytes_per_s": 32768000000, '
        '"fixed_s": 0.003}',
    )
    way = Prefill(args, None, Metrics())
    assert way.least_tokens == pytest.approx(500)
    assert way.is_worth(b"/v1/completions", dict(prompt=[1] * 501))
    assert not way.is_worth(b"/v1/completions", dict(prompt=[1] * 499))
    assert not way.is_worth(b"/v1/completions", None)
    llama = token_of("llama-3-8b")
    assert least_worth_sending(llama, LINKS["25 Gb/s"], 0.01) == math.inf, "a slow link"
    assert least_worth_sending(llama, LINKS["100 Gb/s"], 0.01) == pytest.approx(
        0.01 / (llama.compute_s - llama.kv_bytes / 12.5e9)
    )


def test_how_long_a_prompt_is():
    parts = [dict(type="text", text="a" * 40), dict(type="image_url", image_url="x" * 400)]
    messages = [dict(role="system", content="b" * 20), dict(role="user", content=parts)]
    assert prompt_tokens(dict(messages=messages)) == 15
    assert prompt_tokens(dict(prompt="abcd")) == 1 and prompt_tokens(dict(prompt=[7, 8])) == 2
    assert prompt_tokens(dict(prompt=["a", "b"])) == prompt_tokens(dict(messages=7)) == 0


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--prefill", "http://a:1"], "prefill: got"),
        (["--prefill", "b:1"], "replicas: got 'b:1'"),
        (["--send-from", "-1"], "send_from: got -1.0"),
        (["--send-costs", "{}"], "send_costs: got '{}'; accepted: an object of kv_bytes"),
        (["--send-costs", "x"], "send_costs: got 'x'"),
        (["--prefill-timeout", "0"], "prefill_timeout"),
    ],
)
def test_arguments_that_cannot_work(flags, said):
    with pytest.raises(ValueError, match="got") as refused:
        read_args(["--replicas", "http://a:1", *flags])
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_the_numbers_of_the_lesson():
    """Lesson 26's MORE.md: 100 Gb/s and 10 ms, and 25 Gb/s."""
    text = (REPOSITORY / "lessons/l26_kv_transfer/MORE.md").read_text(encoding="utf-8")
    least = least_worth_sending(token_of("llama-3-8b"), LINKS["100 Gb/s"], 0.01)
    assert f"For Llama-3-8B, 100 Gb/s and 10 ms these are {least:.0f} tokens." in text
    assert least_worth_sending(token_of("llama-3-8b"), LINKS["25 Gb/s"], 0.0) == math.inf
