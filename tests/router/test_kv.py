"""The policy kv: prompts go to what replicas have told, and by their prefix where none has."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from lessons.toolbox.exercises.drop_ins import blaming
from reference.router import block_index
from reference.router.cache_aware import question_of
from reference.router.policies import Prompt
from tests.router import fakes
from tests.router.fakes import SOON_S, until
from tests.router.kv_fakes import BLOCK, heard, ids_of, telling

TEXT = "def the_same_beginning(of, a, prompt):\n    return 1"


async def where(router, prompt: str = TEXT, **more) -> int:
    """Which replica answers."""
    answer = await router.ask(prompt, **more)
    assert answer.status_code == 200
    ports = [fake.port for fake in router.fakes]
    return ports.index(answer.json()["from"])


def home_of(router, prompt: str = TEXT) -> int:
    return router.fakes.index(router.ranked(prompt)[0])


def other_than(router, prompt: str = TEXT) -> list[int]:
    """The replicas that are not the prefix's home, by their rank."""
    return [router.fakes.index(fake) for fake in router.ranked(prompt)[1:]]


async def test_a_prompt_goes_to_who_holds_most_of_it():
    async with telling() as router:
        one, two = other_than(router)
        router.fakes[one].holds(TEXT, blocks=3)
        router.fakes[two].holds(TEXT, blocks=5)
        await heard(router)
        assert await where(router) == two
        router.fakes[two].log.removed("pool", Prompt("", ids_of(TEXT)).keys(BLOCK)[1])
        await until(
            lambda: len(router.routing.replicas.blocks.index.keys[router.fakes[two].url]) == 4
        )
        assert await where(router) == one, "what follows a hole is of no use"
        assert router.counted("router_kv_requests_total", prompt="known") == 2
        assert router.counted("router_kv_cached_blocks_total", medium="pool") == 8
        assert router.counted("router_kv_prompt_blocks_total") == 2 * ((len(TEXT) - 1) // BLOCK)


async def test_slower_tiers_count_less():
    async with telling() as router:
        one, two = other_than(router)
        router.fakes[one].holds(TEXT, "pool", blocks=3)
        router.fakes[two].holds(TEXT, "host", blocks=5)
        await heard(router)
        assert await where(router) == one
        router.fakes[two].holds(TEXT, "host", blocks=7)
        await heard(router)
        assert await where(router) == two


async def test_what_no_one_holds_goes_by_its_prefix():
    async with telling() as router:
        router.fakes[0].holds("something else, and long enough")
        await heard(router)
        for prompt in (TEXT, "one", "two", "three", "four"):
            assert await where(router, prompt) == home_of(router, prompt)
        assert router.counted("router_kv_requests_total", prompt="cold") == 5


async def test_a_hit_is_not_worth_any_queue():
    """Prompts pile up where they are known, until another replica costs less."""
    async with telling() as router:
        for fake in router.fakes:
            fake.work = fakes.waits
        one, *_ = other_than(router)
        router.fakes[one].holds(TEXT, blocks=6)
        await heard(router)
        asked, blocks = [], -(-len(TEXT) // BLOCK)
        lacks = blocks - 6
        for count in range(12):
            asked.append(asyncio.ensure_future(router.ask(TEXT)))
            await until(lambda n=count: sum(len(fake.seen) for fake in router.fakes) > n)
        first = [len(fake.seen) for fake in router.fakes]
        assert sum(first) == 12 and min(first) >= 2 and first[one] == max(first)
        work = router.routing.replicas.policy.work
        assert work[router.fakes[one].url].waiting == first[one] * lacks
        for fake in router.fakes:
            fake.go_on.set()
        await asyncio.gather(*asked)
        assert all(not one.waiting and not one.active for one in work.values())


async def test_an_answer_that_has_begun_waits_no_more():
    async with telling(count=1) as router:
        (fake,) = router.fakes
        fake.work = fakes.streams
        fake.holds(TEXT, blocks=6)
        await heard(router)
        body, blocks = {"prompt": TEXT, "stream": True}, -(-len(TEXT) // BLOCK)
        async with router.client.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200
            (work,) = router.routing.replicas.policy.work.values()
            await until(lambda: (work.waiting, work.active) == (0, blocks))
            fake.go_on.set()
            async for _ in stream.aiter_text():
                pass
        await until(lambda: (work.waiting, work.active) == (0, 0))


# ---------------------------------------------------------------- when events are missing or late


async def test_a_dead_replica_has_nothing_at_once():
    async with telling(health_interval=30.0) as router:
        one, two = other_than(router)
        router.fakes[one].holds(TEXT, blocks=6)
        router.fakes[two].holds(TEXT, blocks=3)
        await heard(router)
        index = router.routing.replicas.blocks.index
        await router.fakes[one].die()
        await until(lambda: router.fakes[one].url not in index.keys)
        assert await where(router) == two


async def test_a_restarted_replica_has_what_it_tells_now():
    async with telling() as router:
        one, two = other_than(router)
        router.fakes[one].holds(TEXT)
        router.fakes[two].holds(TEXT, blocks=2)
        await heard(router)
        assert await where(router) == one
        await router.fakes[one].restart()
        router.fakes[one].holds(TEXT, blocks=1)
        await heard(router)
        assert await where(router) == two


@pytest.mark.parametrize("wrong", ["gap", "another life", "no batch"])
async def test_a_gap_is_mended_by_the_whole_state(wrong):
    async with telling() as router:
        (one, two), blocks = other_than(router), router.routing.replicas.blocks
        fake, lost = router.fakes[one], []

        def spoil(batch):
            if batch.is_whole or lost:
                return batch
            lost.append(batch)
            if wrong == "gap":
                return batch._replace(seq=batch.seq + 1)
            return batch._replace(epoch="x") if wrong == "another life" else None

        router.fakes[two].holds(TEXT, blocks=3)
        await heard(router)
        fake.wrong = spoil
        fake.holds(TEXT, blocks=4)
        await until(lambda: lost)
        fake.holds(TEXT, blocks=8)
        await heard(router)
        assert fake.connected == 2 and blocks.resyncs == {fake.url: 1}
        assert await where(router) == one


async def test_without_events_it_is_the_prefix():
    async with telling() as router:
        for fake in router.fakes:
            fake.says_events = False
            await fake.restart()
        await until(lambda: router.routing.replicas.num_ready == 3)
        for prompt in (TEXT, "one", "two", "three"):
            assert await where(router, prompt) == home_of(router, prompt)
        assert not any(fake.asked for fake in router.fakes), "no tokens are needed"
        assert router.counted("router_kv_requests_total", prompt="unknown") == 4


async def test_events_that_are_late_do_not_count():
    async with telling(events_timeout=0.1) as router:
        one, _ = other_than(router)
        router.fakes[one].holds(TEXT)
        await heard(router)
        router.fakes[one].is_silent = True
        index = router.routing.replicas.blocks.index
        await until(lambda: router.fakes[one].url not in index.keys)


async def test_a_tokenizer_that_is_late_or_refuses_costs_no_request():
    async with telling(tokenize_timeout=0.05) as router:
        one, _ = other_than(router)
        router.fakes[one].holds(TEXT)
        await heard(router)
        for fake in router.fakes:
            fake.reads.clear()
        assert await where(router) == home_of(router)
        assert router.counted("router_kv_requests_total", prompt="unknown") == 1
        router.routing.replicas.reader.timeout_s = SOON_S
        for fake in router.fakes:
            fake.reads.set()
        assert await where(router) == one


async def test_an_adapter_has_blocks_of_its_own():
    async with telling() as router:
        one, _ = other_than(router)
        router.fakes[one].holds(TEXT)
        await heard(router)
        for model, is_known in (("base", True), ("an adapter", False)):
            answer = await router.client.post(
                "/v1/completions", json={"prompt": TEXT, "model": model}
            )
            prompt = "known" if is_known else "cold"
            assert answer.status_code == 200
            assert router.counted("router_kv_requests_total", prompt=prompt) == 1


async def test_messages_and_ids_are_prompts_too():
    async with telling() as router:
        one, _ = other_than(router)
        router.fakes[one].holds(TEXT)
        await heard(router)
        messages = [dict(role="user", content=TEXT)]
        for path, body in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/completions", {"prompt": ids_of(TEXT)}),
        ):
            answer = await router.client.post(path, json=body)
            assert answer.json()["from"] == router.fakes[one].port, path


# ---------------------------------------------------------------- the parts alone


@pytest.mark.parametrize(
    "path, body, wanted",
    [
        ("/v1/completions", b'{"prompt": [1, 2]}', ([1, 2], None)),
        ("/v1/completions", b'{"prompt": "a", "n": 2}', (None, {"prompt": "a"})),
        ("/v1/completions", b'{"prompt": ["a", "b"]}', (None, None)),
        ("/v1/completions", b'{"prompt": [[1], [2]]}', (None, None)),
        ("/v1/completions", b'{"prompt": [true, 2]}', (None, None)),
        ("/v1/completions", b'{"prompt": []}', (None, None)),
        ("/v1/completions", b'{"prompt": "a", "truncate_prompt_tokens": 3}', (None, None)),
        ("/v1/completions", b"[" * 10**5, (None, None)),
        ("/v1/chat/completions", b'{"messages": [], "model": "m"}', (None, None)),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            (None, None),
        ),
        ("/v1/responses", b'{"input": "a"}', (None, None)),
    ],
)
def test_what_a_tokenizer_is_asked(path, body, wanted):
    assert question_of(path, body) == wanted


async def test_a_learner_is_told_where_it_failed(monkeypatch):
    async with telling() as router:
        router.fakes[0].holds(TEXT)
        await heard(router)

        def raises(prompt_blocks, cached, waiting, active, weight):
            return cached[99]

        part = blaming(raises, "26.5", Path(__file__))
        monkeypatch.setattr(block_index, "scores", part)
        answer = await router.ask(TEXT)
        assert answer.status_code == 500 and "exercise 26.5" in answer.text


async def test_the_formula_is_the_exercise(monkeypatch):
    """What stands in for lesson 26's scores decides."""
    async with telling() as router:
        one, _ = other_than(router)
        router.fakes[one].holds(TEXT)
        await heard(router)
        policy, asked = router.routing.replicas.policy, []

        def dearest(prompt_blocks, cached, waiting, active, weight):
            asked.append((prompt_blocks, cached, waiting, active, weight))
            costs = [-have for have in cached]
            return costs, costs.index(max(costs)), costs, 0

        monkeypatch.setattr(block_index, "scores", dearest)
        prompt = Prompt("x", ids_of(TEXT))
        chosen = policy.choose(prompt, np.zeros(3))
        count = (len(TEXT) - 1) // BLOCK
        assert router.fakes[chosen] is not router.fakes[one]
        ((blocks, cached, waiting, active, weight),) = asked
        assert blocks == -(-len(TEXT) // BLOCK) and sorted(cached) == [0, 0, count]
        assert (waiting, active, weight) == ([0.0] * 3, [0.0] * 3, 1.0)
