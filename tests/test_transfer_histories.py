"""Random histories of two engines, one of which sends what it computes to the other one: with links
that break, tear and dawdle, requests that are preempted, aborted or fail, and an inbox of few
blocks, no request of either gets a wrong token, and no block is lost. So it is with blocks that
leave layer by layer, of which a link or a failing pass may lose some layers.
"""

import random
import time
from collections import Counter

import pytest

from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l26_kv_transfer.pages import Pages
from lessons.l26_kv_transfer.tiers import HostTier
from reference.engine.engine import Engine
from reference.engine.request import by_priority
from reference.engine.sampling_params import SamplingParams
from reference.features.kv_transfer import links
from reference.features.kv_transfer.config import KVTransferConfig
from reference.features.kv_transfer.connector import ReadFirst, TransferConnector
from reference.features.kv_transfer.handover import TransferBlockManager, TransferHost
from reference.features.kv_transfer.layers import LayerByLayer, LayeredPages
from reference.features.kv_transfer.transfers import Transfers, departure_of
from reference.features.kv_transfer.wire import Address
from tests.engine_histories import LONGEST, House, VirtualRunner
from tests.test_kv_histories import TravelRules, Travels, random_request
from tests.transfer_cases import to_be_sent


class Flaky:
    """A wire that breaks, tears and dawdles."""

    def __init__(self, wire, draw: random.Random, share: float):
        self.wire, self.draw, self.share = wire, draw, share
        self.connection, self.close = wire.connection, wire.close

    def send(self, row: int, checked: bytes, data) -> None:
        trouble = self.draw.random() < self.share
        kind = self.draw.choice(["torn", "cut", "gone", "slow"]) if trouble else None
        data = bytes(data)
        if kind == "torn":
            data = bytes([data[0] ^ 1]) + data[1:]  # of a token
        elif kind == "cut":
            self.connection.sendall(checked + data[: len(data) // 2])
        elif kind == "slow":
            time.sleep(0.002)
        if kind in ("cut", "gone"):
            raise ConnectionResetError(kind)
        self.wire.send(row, checked, data)


class Half:
    """A layer's part of the virtual memory: its tokens, or their places."""

    def __init__(self, memory, index: int):
        self.memory, self.tensors = memory, memory.tensors[index : index + 1]
        self.k_slots, self.blocks = self.tensors[0], memory.blocks

    @property
    def num_blocks(self) -> int:
        return self.memory.num_blocks


class Halves(LayeredPages):
    """Blocks of the virtual memory, which travel in two parts."""

    def __init__(self, memory):
        self.each = [Pages([Half(memory, index)]) for index in range(2)]
        Pages.__init__(self, [memory])
        self.parts, self.last_parts = 2, (1,)


class LayeredRunner(VirtualRunner):
    """A VirtualRunner of two layers. A pass may fail after the first."""

    layers: LayerByLayer | None = None

    def wrote(self, step, tables) -> None:
        if self.layers is not None:
            self.layers.begin(step, tables)
            attend = self.layers.told(lambda layer: None)
            attend(0)
            self.fail("after")
            attend(1)


class Sends(Travels):
    """Whose requests are decoded at `to`. to: None: they stay here."""

    to: Address | None = None

    def params(self, index: int) -> SamplingParams:
        params = super().params(index)
        if self.to is None:
            return params
        # nothing is tossed out: the same wishes, and where K and V go
        wish = {"kv_transfer_params": to_be_sent(self.to)}
        return SamplingParams(**{**vars(params), "extra_args": wish})

    def check_end(self) -> None:
        super().check_end()
        assert not self.engine.scheduler.blocks.departures and not self.engine.transfers.held


def new_engine(house: House, role: str, faults, draw: random.Random, by_layer: bool) -> Engine:
    timeout_s = draw.choice([0.02, 5.0, 5.0])
    config = KVTransferConfig(
        "TcpConnector", role, kv_connector_extra_config={"timeout_s": timeout_s}
    )
    blocks = TransferBlockManager(
        house.num_blocks, house.block_size, HashBlocks(house.block_size), None
    )
    runner = LayeredRunner(blocks, None, faults)
    runner.virtual.memory.num_blocks = house.num_blocks
    pages = Halves(runner.virtual.memory) if by_layer else Pages([runner.virtual.memory])
    rows = draw.choice([1, 4, 50, 50]) if config.is_consumer else 0
    size = pages.part_bytes if by_layer else pages.block_bytes
    inbox = HostTier(rows * (1 + by_layer), size, order=ReadFirst())
    blocks.connector = TransferConnector(pages, "virtual", inbox, timeout_s)
    if by_layer and config.is_producer:
        runner.layers = LayerByLayer(blocks)
    if config.is_consumer:
        blocks.connector.listen(Address("127.0.0.1"), blocks.cache.block_of.__contains__)
    scheduler = ChunkedScheduler(
        blocks,
        max_num_seqs=house.max_num_seqs,
        max_num_batched_tokens=house.max_num_batched_tokens,
        order=by_priority,
        host=TransferHost(blocks, departure_of=departure_of),
    )
    runner.rules = TravelRules(scheduler)
    engine = Engine(runner, scheduler, None, LONGEST)
    engine.transfers = Transfers(engine, config)
    return engine


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
def test_random_histories(request, seed, monkeypatch, by_layer):
    draw, seen, connect = random.Random(seed), Counter(), links.connect
    for nth in range(600):
        if nth >= (600 if request.config.getoption("--all") else 25) and has_all(seen):
            break  # few seeds see all kinds of trouble later
        share = draw.choice([0, 0, 0.05, 0.3])
        monkeypatch.setattr(
            links, "connect", lambda *how, share=share: Flaky(connect(*how), draw, share)
        )
        pool = draw.choice([(45, 1), (16, 3), (24, 3), (40, 4)])
        step = draw.choice([(3, 3), (4, 7), (4, 16), (8, 33)])
        house = House(*pool, *step, cache=HashBlocks)
        requests = [random_request(draw) for _ in range(draw.randint(2, 8))]
        faults = [{}, {}, {draw.randint(0, 40): draw.choice(["before", "after", "logits"])}]
        consumer = new_engine(house, "kv_consumer", {}, draw, by_layer)
        fault = draw.choice(faults)
        producer = new_engine(house, "kv_producer", fault, draw, by_layer)
        first = Sends(house, requests, fault, engine=producer)
        first.to = consumer.scheduler.blocks.connector.listener.address
        first.run()
        later = [one._replace(arrives=draw.randint(0, 4), aborts=None) for one in requests]
        second = Sends(house, later, {}, engine=consumer)
        second.run()
        sender, receiver = producer.scheduler.blocks.connector, consumer.scheduler.blocks.connector
        for connector in (sender, receiver):
            seen += Counter(connector.faults)
            connector.close()
        seen += Counter(loaded=receiver.loaded_blocks, preempted=first.seen["preempted"])
    assert has_all(seen), seen


def has_all(seen: Counter) -> bool:
    """Whether all kinds of trouble were met."""
    kinds = ("loaded", "preempted", "torn", "send ConnectionResetError")
    return all(seen[what] for what in kinds)
