"""What a router knows of the blocks of replicas: whatever is lost, sent twice or comes in another
order, it never believes what no replica has said, and after the whole state it knows all.
"""

import random
from pathlib import Path

import pytest

from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l26_kv_transfer.costs import LINKS, token_of
from lessons.toolbox.profile import time_model
from reference import LLM, SamplingParams
from reference.engine.engine_args import EngineArgs
from reference.features.block_events import (
    KEY_BYTES,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    EventLog,
    Follower,
    from_json,
)
from reference.features.kv_events import events_since, log_of
from reference.router.block_index import CREDITS, BlockIndex, scores
from tests.block_events_cases import KEYS, run_histories

# ---------------------------------------------------------------- histories


def test_random_histories(request, seed):
    seen = run_histories(random.Random(seed), 1000 if request.config.getoption("--all") else 60)
    for what in ("lost", "gap", "restart", "behind", "hits", "forgotten"):
        assert seen[what] > 5, seen


class IgnoresGaps(Follower):
    def take(self, batch):
        if not self.is_behind and batch.epoch == self.epoch and batch.seq > self.seq:
            self.seq = batch.seq
            return batch.events
        return super().take(batch)


class TakesAllTwice(Follower):
    def take(self, batch):
        is_old = batch.epoch == self.epoch and batch.seq <= self.seq
        return batch.events if is_old and not self.is_behind else super().take(batch)


class BelievesOldStates(Follower):
    def take(self, batch):
        if batch.is_whole and batch.epoch == self.epoch:
            self.is_behind = False
            return batch.events
        return super().take(batch)


class AddsStates(Follower):
    """The whole state does not end what was known before."""

    def take(self, batch):
        events = super().take(batch)
        return events and [one for one in events if not isinstance(one, AllBlocksCleared)]


class NeverCatchesUp(Follower):
    def take(self, batch):
        is_first = not self.epoch
        events = super().take(batch)
        self.is_behind |= batch.is_whole and not is_first
        return None if self.is_behind else events


class KeepsTheDead(BlockIndex):
    def drop(self, replica):
        pass


class OneTier(BlockIndex):
    """A block that left one tier is gone from all."""

    def remove(self, replica, key, medium):
        for each in list(self.holders.get(key, {}).get(replica, ())):
            super().remove(replica, key, each)


class Unbounded(BlockIndex):
    def apply(self, replica, events):
        most, self.most = self.most, 10**9
        super().apply(replica, events)
        self.most = most


class SkipsHoles(BlockIndex):
    """Blocks after one that is missing are of no use."""

    def mediums(self, replica, keys):
        return [m for key in keys for m in super(SkipsHoles, self).mediums(replica, [key])]


FOLLOWERS = [IgnoresGaps, TakesAllTwice, BelievesOldStates, AddsStates, NeverCatchesUp]
INDEXES = [KeepsTheDead, OneTier, Unbounded, SkipsHoles]


@pytest.mark.parametrize("bug", FOLLOWERS + INDEXES, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug, seed):
    how = dict(follower=bug) if bug in FOLLOWERS else dict(index=bug)
    with pytest.raises(AssertionError):
        run_histories(random.Random(seed), 200, **how)


# ---------------------------------------------------------------- one after the other


def test_a_reader_who_is_too_slow_gets_the_whole_state():
    log = EventLog(16, buffer_steps=2)
    for key in KEYS[:2]:
        log.stored("pool", key)
        (batch,) = log.since(log.epoch, log.seq)
    assert log.since(log.epoch, 1) == [batch]
    for key in KEYS[2:4]:
        log.removed("pool", key)  # it is not there: no event
        log.stored("host", key)
        log.since(log.epoch, log.seq)
    (whole,) = log.since(log.epoch, 1)
    assert whole.is_whole and whole.seq == 4
    assert whole.events == [
        AllBlocksCleared(),
        BlockStored(tuple(KEYS[:2]), "pool"),
        BlockStored(tuple(KEYS[2:4]), "host"),
    ]


def test_neighbours_of_one_kind_are_one_event():
    log = EventLog(16)
    log.since("", 0)
    for key in KEYS[:3]:
        log.stored("pool", key)
    log.removed("pool", KEYS[1])
    (batch,) = log.since(log.epoch, 0)
    assert batch.events == [
        BlockStored(tuple(KEYS[:3]), "pool"),
        BlockRemoved((KEYS[1],), "pool"),
    ]


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"epoch": "a", "seq": 1, "whole": False, "events": [{"type": "BlockMoved"}]},
        {"epoch": "a", "seq": 1, "whole": False, "events": [{"type": "BlockStored"}]},
        {"epoch": "a", "seq": 1, "whole": False, "events": 3},
        {"epoch": "a", "seq": "x", "whole": False, "events": []},
        {"epoch": "a", "seq": 1, "whole": False,
         "events": [{"type": "BlockStored", "block_hashes": ["zz"], "medium": "pool"}]},
        {"epoch": "a", "seq": 1, "whole": False,
         "events": [{"type": "BlockStored", "block_hashes": [], "medium": "moon"}]},
    ],
)  # fmt: skip
def test_what_is_no_batch_is_refused(found):
    with pytest.raises(ValueError):
        from_json(found)


def test_the_first_block_of_a_prompt_is_forgotten_last():
    index = BlockIndex(3)
    index.apply("a", [BlockStored(tuple(KEYS[:5]), "pool")])
    assert index.mediums("a", KEYS[:5]) == ["pool"] * 3 and index.forgotten == 2
    index.apply("a", [BlockStored((KEYS[9],), "pool")])
    assert index.mediums("a", KEYS[:5]) == ["pool"] * 2


# ---------------------------------------------------------------- the score


def test_scores_by_hand():
    """Dynamo's example: three workers hold 2, 5 and 8 of 10 blocks, and decode 10, 5 and 9."""
    costs, cheapest, found, best = scores(10, [2, 5, 8], [0, 0, 0], [10, 5, 9], 1.0)
    assert costs == [18, 10, 11] and cheapest == 1
    assert found == pytest.approx([1.2, 1.5, 1.8]) and best == 2
    # with a queue before the second, and hits that count double
    costs, cheapest, found, best = scores(10, [2, 5, 8], [0, 8, 4], [10, 5, 9], 2.0)
    assert costs == [26, 31, 21] and cheapest == 2
    assert found == pytest.approx([1.4, 1.0, 2.1]) and best == 2


def test_a_hit_in_a_slower_tier_counts_less():
    index = BlockIndex(100, {"pool": 1.0, "host": 0.5, "folder": 0.25})
    events = [BlockStored((KEYS[0],), "pool"), BlockStored((KEYS[0],), "host")]
    events += [BlockStored((KEYS[1],), "host"), BlockStored(tuple(KEYS[1:4]), "folder")]
    index.apply("a", events)
    assert index.cached("a", KEYS[:6]) == 1.0 + 0.5 + 0.25 + 0.25
    index.apply("a", [BlockRemoved((KEYS[0],), "pool")])
    assert index.cached("a", KEYS[:6]) == 0.5 + 0.5 + 0.25 + 0.25


def test_credits_are_those_of_the_costs():
    token = token_of("llama-3-8b")
    host = token.move_s(LINKS["PCIe 5.0"])
    folder = host + token.move_s(LINKS["NVMe"])
    assert CREDITS["pool"] == 1.0
    assert CREDITS["host"] == pytest.approx(1 - host / token.compute_s, abs=0.005)
    assert CREDITS["folder"] == pytest.approx(1 - folder / token.compute_s, abs=0.005)


# ---------------------------------------------------------------- the engine


def truth(engine) -> dict[str, set[bytes]]:
    """What an engine's pool and tiers have, asked of themselves."""
    blocks = engine.scheduler.blocks
    tier = blocks.connector.tier
    files = {tier.below.key_of(file.name) for file in tier.below.files()}
    found = {"pool": set(blocks.cache.block_of), "host": set(tier.rows), "folder": files}
    return {medium: {key[:KEY_BYTES] for key in keys} for medium, keys in found.items()}


def test_an_engine_tells_what_its_tiers_have(tmp_path, seed):
    """A small pool, a smaller host, a folder with a quota, over two lives."""
    ids = LLM("models/tiny", device="cpu", max_model_len=128).get_tokenizer()
    text = ids.encode(Path(time_model.__file__).read_text(encoding="utf-8"))
    draw = random.Random(seed)
    for life in range(2):
        llm = LLM(
            "models/tiny",
            device="cpu",
            max_model_len=128,
            num_gpu_blocks_override=12,
            kv_offloading_size=0.0003,
            kv_offloading_folder=str(tmp_path),
            kv_offloading_folder_size=0.001,
            kv_events_config={"enable_kv_cache_events": True},
        )
        engine, index, follower = llm.engine, BlockIndex(10**6), Follower()
        for batch in events_since(engine, "", 0):
            index.apply("me", follower.take(batch))
        assert bool(index.count) == bool(life), "the files of an earlier life"
        for _ in range(12):
            at = draw.choice([0, 100, 200, 300])
            prompt = [at + 5, *text[at : at + draw.randint(20, 90)]]
            params = SamplingParams(temperature=0, max_tokens=draw.randint(1, 20), ignore_eos=True)
            llm.generate([prompt], params, use_tqdm=False)
        connector = engine.scheduler.blocks.connector
        while connector.copying or connector.saving:
            engine.scheduler.host.wait()
            engine.scheduler.host.settle()
        for batch in events_since(engine, follower.epoch, follower.seq):
            index.apply("me", follower.take(batch))
        known = {medium: set() for medium in ("pool", "host", "folder")}
        for key, holders in index.holders.items():
            for medium in holders["me"]:
                known[medium].add(key)
        assert known == truth(engine) and all(known.values())
        keys = [key[:KEY_BYTES] for key in HashBlocks(16).hashes(prompt, len(prompt) // 16)]
        assert index.mediums("me", keys) == ["pool"] * len(keys), "a router knows the last prompt"
        llm.shutdown()


def test_an_engine_that_is_not_asked_tells_nothing():
    for config in (None, {"enable_kv_cache_events": True, "publisher": "null"}):
        llm = LLM("models/tiny", device="cpu", max_model_len=128, kv_events_config=config)
        assert log_of(llm.engine) is None
        llm.shutdown()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(kv_events_config=3), "a dict of enable_kv_cache_events"),
        (dict(kv_events_config={"publisher": "zmq"}), "HTTP stream"),
        (dict(kv_events_config={"endpoint": "tcp://*:5557"}), "no sockets of ZeroMQ's"),
        (dict(kv_events_config={"buffer_steps": 0}), "buffer_steps"),
        (dict(kv_events_config={"enable_kv_cache_events": 1}), "True or False"),
        (dict(kv_events_config={"enable": True}), "enable_kv_cache_events, publisher"),
        (
            dict(kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False),
            "nothing is found again",
        ),
        (
            dict(kv_events_config={"enable_kv_cache_events": True}, tensor_parallel_size=2),
            "other processes",
        ),
    ],
)
def test_what_cannot_work_is_refused(arguments, said):
    with pytest.raises(ValueError) as refused:
        EngineArgs("models/tiny", **arguments)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_batch_says_who_and_when():
    log = EventLog(16)
    log.stored("pool", KEYS[0] * 2)
    assert log.since("", 0) == [
        Batch(log.epoch, 1, [AllBlocksCleared(), BlockStored((KEYS[0],), "pool")], is_whole=True)
    ]
