"""What an engine in groups tells of its blocks: how many each kind of layer has, and how many were
given back.
"""

import random
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from reference.engine.stats import StatsCounter
from reference.features.windows.blocks import GONE, GroupBlocks
from reference.server.metrics import EngineCollector
from tests.window_cases import VOCAB, greedy, new_engine, new_model

pytestmark = pytest.mark.usefixtures("seed")


def by_tables(blocks: GroupBlocks) -> dict[str, int]:
    """Blocks by kind, counted from the tables: a block of several owners once."""
    found: dict[str, set] = {}
    for table in blocks.tables.values():
        for window, pages in zip(blocks.groups.windows, table.groups):
            kind = "full" if window is None else f"window {window}"
            found.setdefault(kind, set()).update(page for page in pages if page != GONE)
    return {kind: len(pages) for kind, pages in found.items()}


def test_blocks_by_group():
    """In every step as the tables have them; at the end none, and what was given back stays."""
    engine = new_engine(new_model("two windows"), max_num_batched_tokens=16)
    counter, most, before = StatsCounter(engine), {}, 0
    prompt = random.choices(range(VOCAB), k=40)
    for at in range(3):
        engine.add_request(str(at), [*prompt, at], greedy(12))
    while engine.has_unfinished_requests:
        engine.step()
        stats = counter.stats()
        owned = by_tables(engine.scheduler.blocks)
        assert stats.blocks_by_group == (owned or {"full": 0, "window 3": 0, "window 9": 0})
        usage = sum(stats.blocks_by_group.values()) / engine.scheduler.blocks.num_blocks
        assert stats.kv_cache_usage == pytest.approx(usage)
        assert stats.blocks_given_back >= before
        before = stats.blocks_given_back
        most |= {kind: max(count, most.get(kind, 0)) for kind, count in owned.items()}
    assert before > 0 and most["full"] > most["window 9"] > 0
    assert not any(counter.stats().blocks_by_group.values())


def test_one_group_has_no_kinds():
    engine = new_engine(new_model("two windows"), disable_hybrid_kv_cache_manager=True)
    stats = StatsCounter(engine).stats()
    assert stats.blocks_by_group == {} and stats.blocks_given_back == 0


def scraped(engine) -> str:
    registry = CollectorRegistry()
    counter = StatsCounter(engine)
    registry.register(EngineCollector(SimpleNamespace(stats=counter.stats), ["tiny", "0"]))
    return generate_latest(registry).decode()


def test_metrics_have_a_label_for_the_group():
    engine = new_engine(new_model("two windows"))
    engine.add_request("a", random.choices(range(VOCAB), k=40), greedy(8))
    for _ in range(4):
        engine.step()
    owned = by_tables(engine.scheduler.blocks)
    text = scraped(engine)
    for kind, count in owned.items():
        line = (
            f'engine_kv_cache_blocks{{engine="0",group="{kind}",model_name="tiny"}} {float(count)}'
        )
        assert line in text, text
    given = float(engine.scheduler.blocks.given_back)
    assert (
        f'engine_kv_cache_blocks_given_back_total{{engine="0",model_name="tiny"}} {given}' in text
    )
    assert "engine_kv_cache_blocks" not in scraped(
        new_engine(new_model("two windows"), disable_hybrid_kv_cache_manager=True)
    )


def test_a_planted_slip_is_found(monkeypatch):
    """Pages that come back with what they hold are not counted."""
    monkeypatch.setattr(
        GroupBlocks, "share_in", lambda self, group, pages: self.pool.share(list(pages))
    )
    with pytest.raises(AssertionError):
        test_blocks_by_group_with_hits()


def test_blocks_by_group_with_hits():
    """A prompt that comes again finds free pages, which are owned then."""
    engine = new_engine(new_model("two windows"))
    counter, prompt = StatsCounter(engine), random.choices(range(VOCAB), k=41)
    for at in range(2):
        engine.add_request(str(at), prompt, greedy(6))
        while engine.has_unfinished_requests:
            engine.step()
            owned = by_tables(engine.scheduler.blocks)
            found = counter.stats().blocks_by_group
            assert {kind: found[kind] for kind in owned} == owned
