"""Blocks that leave layer by layer: the same bytes, the same tokens, and the last byte earlier, by
a virtual clock.
"""

import random
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lessons import l26_kv_transfer as lesson
from lessons.l26_kv_transfer.costs import LINKS, token_of
from lessons.l26_kv_transfer.lab.testing import KINDS as POOLS
from lessons.l26_kv_transfer.lab.testing import bytes_in, pool_of
from lessons.l26_kv_transfer.pages import Pages
from lessons.l26_kv_transfer.tiers import HostTier
from reference.features.kv_transfer.handover import Departure
from reference.features.kv_transfer.layers import LayerByLayer, LayeredPages, OneLayer, Parts
from reference.features.kv_transfer.links import Sending
from reference.features.kv_transfer.rounded import RoundedPages
from reference.features.kv_transfer.wire import Address, key_and_part, part_of
from reference.simulator.links import Port, Prompts, send
from tests.engine_cases import CONFIG, new_model
from tests.test_kv_rounded import numbers_by_key
from tests.transfer_cases import (
    BLOCK,
    KINDS,
    answer,
    apart,
    config,
    engine_of,
    key,
    params,
    to_be_sent,
    tokens,
    until,
)

LAYERS = 4
DEEP = new_model(replace(CONFIG, num_hidden_layers=LAYERS)).cpu().double()
PROMPT = [random.Random(1).randrange(60) for _ in range(41)]  # ten blocks and a token
LIMIT = 8
ROLES = ("kv_producer", "kv_consumer")


def by_layer(kind: str, role: str, **more) -> dict:
    extra = {"timeout_s": 30.0, "use_layerwise": True} | more
    return config(kind, role, kv_connector_extra_config=extra)


@pytest.fixture
def pair(request):
    """A producer and a consumer; the kind is the test's parameter, TCP without one."""
    kind = getattr(request, "param", KINDS[0])
    engines = [engine_of(by_layer(kind, role), model=DEEP) for role in ROLES]
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def alone() -> list[int]:
    return tokens(answer(engine_of(model=DEEP), PROMPT, params(LIMIT)))


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("kind", POOLS)
def test_a_row_is_layer_after_layer(kind):
    """Read as a whole, or each layer for itself; and written back with every bit."""
    source, target = pool_of(kind, 7, 5), pool_of(kind, 7, 5, seed=1)
    there, here = LayeredPages(source), LayeredPages(target)
    blocks, parts = [6, 2, 5], range(len(source.layers))
    rows = there.read(blocks, there.now())
    assert list(rows.shape) == [3, Pages([source]).block_bytes] and there.parts == len(parts) > 1
    each = [Pages([OneLayer(source, part)]).read(blocks, there.now()) for part in parts]
    assert torch.cat(each, dim=1).equal(rows)
    assert all(there.packed(part, blocks).cpu().equal(each[part]) for part in parts)
    before = bytes_in(target)
    here.write([0, 5, 2], rows, here.now())
    for old, new, sent in zip(before, bytes_in(target), bytes_in(source)):
        assert new[:, :, [0, 5, 2]].equal(sent[:, :, blocks])
        assert new[:, :, [1, 3, 4, 6]].equal(old[:, :, [1, 3, 4, 6]])


def test_layers_in_8_bits_are_the_blocks_in_8_bits():
    source, one, two = (pool_of("float32", 7, 5, seed) for seed in range(3))
    source.k_slots.nan_to_num_(0.5, 1.0, 1.0)
    source.v_slots.nan_to_num_(0.5, 1.0, 1.0)
    for target, new in ((one, lambda pool: RoundedPages([pool])), (two, rounded_layers)):
        there, here = new(source), new(target)
        here.write([3, 1], there.read([2, 4], there.now()), here.now())
    for a, b in zip(bytes_in(one), bytes_in(two)):
        assert a[:, :, [3, 1]].equal(b[:, :, [3, 1]])
    layered = rounded_layers(source)
    assert layered.part_bytes * layered.parts == RoundedPages([source]).block_bytes


def rounded_layers(pool) -> LayeredPages:
    return LayeredPages(pool, RoundedPages)


def test_a_part_has_a_name_of_its_own():
    assert part_of(key(1), 0) == key(1)
    names = [part_of(key(number), part) for number in (1, 2) for part in (0, 1, 300)]
    assert len(set(names)) == 6
    assert [key_and_part(name)[1] for name in names] == [0, 1, 300] * 2
    assert {key_and_part(name)[0] for name in names} == {key(1), key(2)}


def test_a_block_is_whole_once_all_its_layers_are_here():
    tier = Parts(HostTier(4, 8), 3, last=[2])
    layers = [torch.full((8,), part, dtype=torch.uint8) for part in range(3)]
    for part in (0, 1):
        tier.inner.put(part_of(key(1), part), layers[part])
    assert not tier.has(key(1)) and tier.get(key(1)) is None
    tier.inner.put(part_of(key(1), 2), layers[2])
    assert tier.has(key(1)) and tier.get(key(1)).equal(torch.cat(layers))
    tier.put(key(2), torch.cat(layers))  # which pushes out layers of the first block
    assert tier.get(key(1)) is None and tier.get(key(2)).equal(torch.cat(layers))


def test_what_has_arrived_has_arrived_in_all_layers():
    departure = Departure(Address("x"), parts=2)
    here = [{key(1), key(2)}, {key(2), key(3)}, {key(2)}]
    for part, keys in zip((0, 1, 1), here):
        departure.sendings.append(Sending([key(1), key(2), key(3)], [7, 8, 9], part=part))
        departure.sendings[-1].end(keys)
    assert departure.arrived == [8] and departure.has_ended


# ---------------------------------------------------------------- two engines


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_two_engines_give_the_tokens_of_one(pair, alone):
    handed_over, got = apart(*pair, PROMPT, LIMIT)
    assert tokens(got) == alone and got.num_cached_tokens == 40
    assert len(handed_over["remote_block_ids"]) == 10
    assert not pair[0].scheduler.blocks.left
    check_numbers(*pair)
    drawn = dict(temperature=0.9, top_p=0.95, seed=5)
    one = answer(engine_of(model=DEEP), PROMPT[::-1], params(LIMIT, **drawn))
    _, got = apart(*pair, PROMPT[::-1], LIMIT, **drawn)
    assert tokens(got) == tokens(one) and got.num_cached_tokens == 40


def check_numbers(producer, consumer) -> None:
    """All K and V that a prompt left with the producer are the consumer's, too."""
    sent, come = numbers_by_key(producer), numbers_by_key(consumer)
    both = sent.keys() & come.keys()
    assert len(both) == 10
    for name in both:
        assert all(map(torch.equal, sent[name], come[name])) and not sent[name][0].isnan().any()


def test_in_8_bits_too():
    producer, consumer = (
        engine_of(by_layer(KINDS[0], role, serde={"type": "fp8"}), model=DEEP) for role in ROLES
    )
    handed_over, got = apart(producer, consumer, PROMPT, LIMIT)
    assert len(handed_over["remote_block_ids"]) == 10 and got.num_cached_tokens == 40
    assert producer.scheduler.blocks.connector.of.endswith(" in float8_e4m3fn by layer")
    for engine in (producer, consumer):
        engine.close()


def test_the_first_layer_is_there_before_the_last_one_runs(pair):
    """The step waits in its last layer until the consumer has all layers before it."""
    producer, consumer = pair
    inbox, pool = consumer.scheduler.blocks.connector.inbox, producer.runner.pool
    attending, seen = pool.attending, []

    def waiting(batch, *more):
        attend = attending(batch, *more)

        def one(layer, *qkv):
            if layer == LAYERS - 1 and producer.runner.layers.leaving:
                (leaving,) = producer.runner.layers.leaving
                names = [part_of(name, layer - 1) for name in leaving.keys]
                until(lambda: all(map(inbox.has, names)))
                seen.extend(names)
            return attend(layer, *qkv)

        return one

    pool.attending = waiting
    handed_over, _ = apart(producer, consumer, PROMPT, LIMIT)
    assert len(seen) == 10 == len(handed_over["remote_block_ids"])


def test_what_no_layer_told_of_is_sent_after_the_step(pair, alone):
    """What the prefix cache knew, and what a captured step has written."""
    producer, consumer = pair
    producer.runner.layers.told = lambda attend: attend
    handed_over, got = apart(producer, consumer, PROMPT, LIMIT)
    assert len(handed_over["remote_block_ids"]) == 10 and tokens(got) == alone
    del producer.runner.layers.told
    fresh = engine_of(by_layer(KINDS[0], "kv_consumer"), model=DEEP)
    handed_over, got = apart(producer, fresh, PROMPT, LIMIT)
    assert len(handed_over["remote_block_ids"]) == 10 and tokens(got) == alone
    assert got.num_cached_tokens == 40
    fresh.close()


@pytest.mark.parametrize("which", [(True, False), (False, True)], ids=str)
def test_both_ends_have_to_ask_for_it(which, alone):
    producer, consumer = (
        engine_of(by_layer(KINDS[0], role) if each else config(KINDS[0], role), model=DEEP)
        for role, each in zip(ROLES, which)
    )
    handed_over, got = apart(producer, consumer, PROMPT, LIMIT)
    assert handed_over is None and tokens(got) == alone
    assert producer.scheduler.blocks.connector.faults == {"refused": 1}
    for engine in (producer, consumer):
        engine.close()


def told_too_early(self, attend):
    """Before the layer has written."""

    def send_and_attend(layer, *qkv):
        self.send(layer)
        return attend(layer, *qkv)

    return send_and_attend


def sent_of_the_first_layer(self, index, blocks):
    one = self.each[0]
    return one.pack(one.pools[0], blocks)


def test_planted_bugs_are_found(pair, alone, monkeypatch):
    bugs = (
        (LayerByLayer, "told", told_too_early),
        (LayeredPages, "packed", sent_of_the_first_layer),
    )
    for place, name, bug in bugs:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, bug)
            with pytest.raises((AssertionError, ValueError)):  # of NaN no token can be drawn
                test_two_engines_give_the_tokens_of_one(pair, alone)
        pair[:] = [engine_of(by_layer(KINDS[0], role), model=DEEP) for role in ROLES]


# ---------------------------------------------------------------- when the last byte is there

LAYER_S = 1.0  # of a step


class Clock:
    now_s = 0.0


class AtOnce:
    """A thread that takes no time."""

    def submit(self, function, *arguments) -> Future:
        done = Future()
        done.set_result(function(*arguments))
        return done

    def shutdown(self, **_) -> None:
        """Nothing runs."""


class VirtualLink:
    """A link of so many bytes a second of a clock, in the place of Link."""

    wire, thread = None, AtOnce()

    def __init__(self, clock: Clock, bytes_per_s: float):
        self.clock, self.bytes_per_s = clock, bytes_per_s
        self.free_s, self.sent_bytes = 0.0, 0

    def post(self, sending, packed) -> None:
        self.free_s = max(self.free_s, self.clock.now_s) + packed.numel() / self.bytes_per_s
        self.sent_bytes += packed.numel()
        sending.end(set(sending.keys))


def last_byte_s(is_layered: bool, chunk: int, link_s: float) -> float:
    """When a prompt's last block has been sent by a real producer whose layers take LAYER_S. chunk:
    tokens of a step; link_s: seconds of the link for the blocks of one step.
    """
    own = (by_layer if is_layered else config)(KINDS[0], "kv_producer")
    engine = engine_of(own, model=DEEP, max_num_batched_tokens=chunk)
    connector, pool, clock = engine.scheduler.blocks.connector, engine.runner.pool, Clock()
    step_bytes = connector.pages.block_bytes * chunk // BLOCK
    link = VirtualLink(clock, step_bytes / link_s)
    connector.reader, connector.link = AtOnce(), lambda to: link
    attending = pool.attending

    def timed(batch, *more):
        attend = attending(batch, *more)

        def one(layer, *qkv):
            clock.now_s += LAYER_S
            return attend(layer, *qkv)

        return one

    pool.attending = timed
    handed_over = answer(engine, PROMPT, params(1, to_be_sent(Address("127.0.0.1", 1))))
    assert len(handed_over.kv_transfer_params["remote_block_ids"]) == 10
    assert link.sent_bytes == 10 * connector.pages.block_bytes
    engine.close()
    return link.free_s


def simulated_s(pieces: int, chunk: int, link_s: float) -> float:
    """The same by the simulator's formula."""
    step_s, source, there_s = LAYERS * LAYER_S, Port(), 0.0
    for began, ended in pairwise(step_s * n for n in range(40 // chunk + 1)):
        (there_s,) = send(source, Prompts(began, ended, [link_s], [Port()]), pieces)
    return there_s


@pytest.mark.parametrize("link_s", [0.5, 2.0, 4.0, 6.0, 20.0])
@pytest.mark.parametrize("chunk", [8, 40])
def test_the_last_byte_comes_when_the_simulator_says(chunk, link_s):
    """On links that are faster than a step of 4 s, as fast, and slower. 41 tokens: the last one
    fills no block.
    """
    for is_layered, pieces in ((False, 1), (True, LAYERS)):
        found = last_byte_s(is_layered, chunk, link_s)
        assert found == pytest.approx(simulated_s(pieces, chunk, link_s)), (is_layered, link_s)


def test_by_hand():
    """Five steps of 4 s. A link that needs 2 s for a step's blocks needs 0.5 s for one layer. One
    that needs 6 s is never idle from the first layer on.
    """
    assert last_byte_s(False, 8, 2.0) == 22.0 and last_byte_s(True, 8, 2.0) == 20.5
    assert last_byte_s(False, 8, 6.0) == 4 + 30 and last_byte_s(True, 8, 6.0) == 1 + 30
    assert last_byte_s(False, 40, 2.0) == 6.0 and last_byte_s(True, 40, 2.0) == 4.5


def after_the_prompt_ms(pieces: int, chunk: int, link: str) -> float:
    """Of Llama-3-8B: how long after a prompt of 8192 tokens its last byte comes."""
    token, source, there_s = token_of("llama-3-8b"), Port(), 0.0
    chunk_s, link_s = chunk * token.compute_s, chunk * token.move_s(LINKS[link])
    for n in range(8192 // chunk):
        prompts = Prompts(n * chunk_s, (n + 1) * chunk_s, [link_s], [Port()])
        (there_s,) = send(source, prompts, pieces)
    return 1000 * (there_s - 8192 * token.compute_s)


def test_the_numbers_of_the_text():
    """In MORE.md: with chunks of 512, and of a prompt that runs as a whole."""
    text = (Path(lesson.__file__).parent / "MORE.md").read_text("utf-8")
    for chunk, link in ((512, "100 Gb/s"), (8192, "100 Gb/s"), (512, "25 Gb/s")):
        whole, layers = (after_the_prompt_ms(pieces, chunk, link) for pieces in (1, 32))
        assert f"{whole:.1f} ms chunk by chunk, {layers:.1f} ms layer by layer" in text
