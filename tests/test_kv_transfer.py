"""K and V between two engines: the tokens are those of one engine, whatever becomes of the other
one, of the connection and of what is on it.
"""

import random
import socket
import time

import pytest
import torch

from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l26_kv_transfer.tiers import HostTier
from reference import EngineArgs, SamplingParams
from reference.features.kv_transfer import links, listener, wire
from reference.features.kv_transfer import transfers as features
from reference.features.kv_transfer.connector import ReadFirst
from reference.features.kv_transfer.handover import TransferBlockManager
from reference.features.kv_transfer.transfers import Transfers
from reference.features.kv_transfer.wire import (
    HELLO,
    MAGIC,
    OFFER,
    ROWS,
    Address,
    digest,
    shared_address,
)
from tests.engine_cases import CONFIG, new_model
from tests.transfer_cases import (
    BLOCK,
    KINDS,
    SIZE,
    Inbox,
    address_of,
    answer,
    apart,
    block,
    computed,
    config,
    dies,
    engine_of,
    free_port,
    in_a_process,
    key,
    link_to,
    params,
    send,
    to_be_sent,
    tokens,
    until,
)

TCP = Address("127.0.0.1", 0)
PROMPT = [random.Random(1).randrange(60) for _ in range(41)]  # ten blocks and a token
LIMIT = 8


def places() -> dict[str, Address]:
    return {"TCP": TCP, "shared memory": shared_address(f"test-{random.randrange(2**40)}")}


@pytest.fixture(params=["TCP", "shared memory"])
def inbox(request):
    found = Inbox(places()[request.param])
    yield found
    found.listener.close()


@pytest.fixture(scope="module")
def alone() -> list[int]:
    engine = engine_of()
    return tokens(answer(engine, PROMPT, params(LIMIT)))


@pytest.fixture
def pair(request):
    """A producer and a consumer; the kind is the test's parameter, TCP without one."""
    kind = getattr(request, "param", KINDS[0])
    engines = [engine_of(config(kind, role)) for role in ("kv_producer", "kv_consumer")]
    yield engines
    for engine in engines:
        engine.close()


# ---------------------------------------------------------------- what is on a connection


def test_blocks_arrive_as_they_are(inbox):
    link, faults = link_to(inbox.address)
    everything = list(range(2 * ROWS + 3))
    assert send(link, everything)[0] == everything == inbox.numbers
    assert not faults and not inbox.faults
    link.close()


def test_what_the_consumer_has_is_not_sent(inbox):
    inbox.blocks[key(1)] = block(1)
    link, _ = link_to(inbox.address)
    sent, exchange = [], links.send_batch
    assert send(link, [0, 1, 2])[0] == [0, 1, 2]
    send_row = link.wire.send
    link.wire.send = lambda row, *rest: (sent.append(row), send_row(row, *rest))
    assert send(link, [2, 3, 1])[0] == [1, 2, 3] and sent == [0]
    assert exchange is links.send_batch and inbox.numbers == [0, 1, 2, 3]
    link.close()


def test_another_models_blocks_are_refused(inbox):
    link, faults = link_to(inbox.address, of="another")
    assert send(link, [1])[0] == [] and faults == ["refused"]
    until(lambda: inbox.faults == ["refused"])
    with pytest.raises(wire.Refused, match="blocks of another, 64 bytes; accepted: of model"):
        wire.connect(inbox.address, "another", SIZE, 1.0)
    with pytest.raises(wire.Refused, match="128 bytes"):
        wire.connect(inbox.address, "model", 2 * SIZE, 1.0)
    assert not inbox.blocks


def said(address: Address, *messages: bytes) -> bytes:
    """What a listener answers to a producer that says this and ends."""
    with socket.create_connection(address, 5) as connection:
        for message in messages:
            connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while part := connection.recv(4096):
            found += part
    return found


def test_torn_messages_bring_nothing():
    inbox, data = Inbox(TCP), block(7).numpy().tobytes()
    hello, offer = HELLO.pack(MAGIC, b"model", SIZE), OFFER.pack(1, 0) + key(7)
    checked = digest(key(7), data)
    assert said(inbox.address, hello, offer, checked + data[:-1]) == b"\1\1", "a byte is missing"
    assert said(inbox.address, hello, offer, checked + data[:-1] + b"\0") == b"\1\1\0"
    assert said(inbox.address, hello, offer, digest(key(8), data) + data) == b"\1\1\0"
    assert said(inbox.address, hello[:-3]) == said(inbox.address, b"GET / HTTP/1.1\r\n") == b""
    assert said(inbox.address, hello.replace(MAGIC, b"KVMOVE99")) == b""
    for count in (0, ROWS + 1, 2**32 - 1):
        assert said(inbox.address, hello, OFFER.pack(count, 0)) == b"\1"
    until(lambda: len(inbox.faults) == 6)
    assert not inbox.blocks and inbox.faults == ["torn"] * 6
    assert said(inbox.address, hello, offer, checked + data) == b"\1\1\1"
    assert inbox.numbers == [7], "a listener outlives what was torn"
    inbox.listener.close()


def test_a_dead_link_costs_one_timeout():
    """A consumer that takes connections and says nothing; then one that is not there at all."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link, faults = link_to(Address(*silent.getsockname()), timeout_s=0.3)
        here, took_s = send(link, [1])
        assert not here and 0.2 < took_s < 2
        assert [send(link, [n])[0] for n in range(50)] == [[]] * 50, "it rests"
        assert len(faults) == 1
    link, faults = link_to(Address("127.0.0.1", free_port()))
    assert send(link, [1])[0] == [] and faults == ["send ConnectionRefusedError"]


@pytest.mark.parametrize("place", ["TCP", "shared memory"])
def test_a_consumer_that_was_started_again_is_found(place):
    address = {"TCP": Address("127.0.0.1", free_port())} | places()
    address = Address("127.0.0.1", free_port()) if place == "TCP" else address[place]
    first = Inbox(address)
    link, faults = link_to(address)
    assert send(link, [1])[0] == [1]
    first.listener.close()
    time.sleep(0.05)
    second = Inbox(address)
    assert send(link, [2])[0] == [2] and second.numbers == [2] and not faults
    link.close()
    second.listener.close()


def test_shared_memory_leaves_nothing():
    address = places()["shared memory"]
    first = Inbox(address)
    with pytest.raises(OSError):
        Inbox(address)
    first.listener.close()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(address.host)
    stale.close()  # as an engine that was killed leaves it
    second = Inbox(address)
    second.listener.close()
    with pytest.raises(FileNotFoundError):
        link_to(address)[0].exchange([key(1)], [b""])


def test_a_full_inbox_keeps_what_was_not_read():
    tier = HostTier(3, SIZE, order=ReadFirst())
    for number in (1, 2, 3):
        tier.put(key(number), block(number))
    tier.get(key(2))
    tier.put(key(4), block(4))
    assert [number for number in range(5) if tier.has(key(number))] == [1, 3, 4]
    tier.put(key(5), block(5))
    assert [number for number in range(6) if tier.has(key(number))] == [3, 4, 5]


# ---------------------------------------------------------------- two engines


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_two_engines_give_the_tokens_of_one(pair, alone):
    handed_over, got = apart(*pair, PROMPT, LIMIT)
    assert tokens(got) == alone and got.num_cached_tokens == 40
    assert handed_over["do_remote_prefill"] and len(handed_over["remote_block_ids"]) == 10
    drawn = dict(temperature=0.9, top_p=0.95, seed=5)
    one = answer(engine_of(), PROMPT[::-1], params(LIMIT, **drawn))
    _, got = apart(*pair, PROMPT[::-1], LIMIT, **drawn)
    assert tokens(got) == tokens(one) and got.num_cached_tokens == 40


def test_blocks_leave_while_the_prompt_runs(pair):
    """Two blocks a chunk: most of them are there before the last chunk runs."""
    producer, consumer = pair
    producer.add_request("one", list(PROMPT), params(1, to_be_sent(address_of(consumer))))
    inbox = consumer.scheduler.blocks.connector
    for step in range(4):
        producer.step()
        until(lambda count=2 * (step + 1): inbox.received_blocks == count)
    producer.abort_request("one")


def test_what_the_producers_prefix_cache_knew_is_sent_too(pair, alone):
    producer, consumer = pair
    answer(producer, PROMPT, params(1))
    handed_over, got = apart(producer, consumer, PROMPT, LIMIT)
    assert handed_over and len(handed_over["remote_block_ids"]) == 10
    assert tokens(got) == alone and got.num_cached_tokens == 40


def test_a_consumer_whose_pool_or_inbox_is_full(pair, alone):
    """It waits for blocks, as any request; what the inbox has lost is computed."""
    producer, _ = pair
    small = engine_of(config(KINDS[0], "kv_consumer"), num_gpu_blocks_override=16)
    small.add_request("first", PROMPT[::-1], params(16))
    small.step()
    wish = params(1, to_be_sent(address_of(small)))
    handed_over = answer(producer, PROMPT, wish).kv_transfer_params
    small.add_request("second", list(PROMPT), params(LIMIT, handed_over))
    found = {}
    while small.has_unfinished_requests:
        found |= {output.request_id: output for output in small.step()}
    assert tokens(found["second"]) == alone and found["second"].num_cached_tokens == 40
    size = small.scheduler.blocks.connector.pages.block_bytes
    small.close()
    tiny = engine_of(config(KINDS[0], "kv_consumer", kv_buffer_size=3 * size))
    _, got = apart(producer, tiny, PROMPT, LIMIT)
    assert tokens(got) == alone and got.num_cached_tokens <= 3 * BLOCK
    tiny.close()


def test_an_engine_of_another_model_gets_nothing(pair, alone):
    """The same shapes and other weights: only what the model computes tells them apart."""
    torch.manual_seed(3)
    other = new_model(CONFIG).cpu().double()
    for parameter in other.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    producer = engine_of(config(KINDS[0], "kv_producer"), model=other)
    handed_over, got = apart(producer, pair[1], PROMPT, LIMIT)
    assert handed_over is None and tokens(got) == alone and got.num_cached_tokens == 0
    assert producer.scheduler.blocks.connector.faults == {"refused": 1}
    producer.close()


# ---------------------------------------------------------------- one of them dies


@pytest.mark.parametrize("whole", [0, 4])
def test_a_producer_that_is_killed_in_the_middle_of_a_block(pair, alone, whole):
    of, size, batch = computed(PROMPT)
    consumer = pair[1]
    child = in_a_process(dies, address_of(consumer), of, size, batch, whole)
    assert child.exitcode == -9
    until(lambda: consumer.scheduler.blocks.connector.received_blocks == whole)
    got = answer(consumer, PROMPT, params(LIMIT))
    assert tokens(got) == alone and got.num_cached_tokens == whole * BLOCK


def test_a_consumer_that_dies_or_hangs_delays_the_producer_once(pair, alone):
    consumer = pair[1]
    extra = dict(kv_connector_extra_config={"timeout_s": 0.5})
    producer = engine_of(config(KINDS[0], "kv_producer", **extra))
    links = producer.scheduler.blocks.connector.links
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = Address(*silent.getsockname())
        assert answer(producer, PROMPT, params(1, to_be_sent(hanging))).kv_transfer_params is None
        links[hanging].rests_until += 1000
        begin = time.monotonic()
        assert answer(producer, PROMPT, params(1, to_be_sent(hanging))).kv_transfer_params is None
        assert not links[hanging].sent_blocks and time.monotonic() < begin + 60
    gone = to_be_sent(Address("127.0.0.1", free_port()))
    assert answer(producer, PROMPT, params(1, gone)).kv_transfer_params is None
    producer.close()
    _, got = apart(pair[0], consumer, PROMPT, LIMIT)
    assert tokens(got) == alone and got.num_cached_tokens == 40


def test_a_request_that_is_aborted_while_it_is_held(pair):
    producer, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as silent:
        wish = params(1, to_be_sent(Address(*silent.getsockname())))
        producer.add_request("one", list(PROMPT), wish)
        while not producer.transfers.held:
            assert not producer.step()
        assert producer.abort_request("one").finished
        assert not producer.has_unfinished_requests and not producer.step()
        assert not producer.transfers.held


def believed(self, row: int) -> tuple[None, bytearray]:
    """A block of zeros, whatever came."""
    wire.receive(self.connection, 32 + self.block_bytes)
    return None, bytearray(self.block_bytes)


def first_row(self, row: int) -> tuple[bytes, bytearray]:
    return bytes(wire.receive(self.connection, 32)), bytearray(self.memory[: self.block_bytes])


def read_before_it_was_asked(self, sequence: int, tokens: list[int]) -> int:
    return CachingBlockManager.reuse(self, sequence, tokens)


def test_planted_bugs_are_found(pair, alone, monkeypatch):
    """Each makes one of the tests above fail."""

    def is_found(test, *arguments, **planted) -> None:
        with monkeypatch.context() as patch:
            for name, bug in planted.items():
                name, _, of = name.rpartition("_in_")
                patch.setattr(PLACES[of], name, bug)
            with pytest.raises(AssertionError):
                test(*arguments)

    everything = dict(digest_in_listener=lambda key, data: None, take_in_tcp=believed)
    is_found(test_two_engines_give_the_tokens_of_one, pair, alone, **everything)
    unheld = dict(released_in_transfers=lambda self, touched: touched)
    is_found(test_two_engines_give_the_tokens_of_one, pair, alone, **unheld)
    unsent = dict(reuse_in_blocks=read_before_it_was_asked)
    is_found(test_what_the_producers_prefix_cache_knew_is_sent_too, pair, alone, **unsent)
    pair[1].scheduler.blocks.connector.listener.of = "any"
    anyones = dict(format_of_in_features=lambda runner, pages: "any")
    is_found(test_an_engine_of_another_model_gets_nothing, pair, alone, **anyones)
    inbox = Inbox(places()["shared memory"])
    is_found(test_blocks_arrive_as_they_are, inbox, take_in_shared=first_row)
    inbox.listener.close()


PLACES = {
    "listener": listener,
    "tcp": wire.TcpWire,
    "shared": wire.SharedWire,
    "transfers": Transfers,
    "blocks": TransferBlockManager,
    "features": features,
}


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "own, said",
    [
        (dict(kv_role="kv_both"), "kv_transfer_config.kv_connector: got None; accepted: TcpConn"),
        (dict(kv_connector="NixlConnector", kv_role="kv_both"), "got 'NixlConnector'"),
        (dict(kv_connector=KINDS[0]), "kv_transfer_config.kv_role: got None; accepted: kv_prod"),
        (config(KINDS[0], "kv_producer", kv_rol=1), "got 'kv_rol'; accepted: the keys"),
        (config(KINDS[0], "kv_producer", kv_port=70000), "kv_port: got 70000"),
        (config(KINDS[0], "kv_consumer", kv_ip="0.0.0.0"), "a host that the other engines reach"),
        (config(KINDS[0], "kv_producer", kv_load_failure_policy="fail"), "accepted: recompute"),
        (config(KINDS[0], "kv_producer", kv_connector_extra_config={"x": 1}), "timeout_s"),
        ("[1]", "kv_transfer_config: got '[1]'"),
        (3, "kv_transfer_config: got 3"),
    ],
)
def test_a_config_that_cannot_work(own, said):
    with pytest.raises(ValueError) as refused:
        EngineArgs("models/tiny", kv_transfer_config=own)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "own, said",
    [
        (dict(enable_prefix_caching=False), "because it finds blocks again"),
        (dict(tensor_parallel_size=2), "each process holds its own share"),
        (dict(preemption_mode="swap"), "one place for what leaves the pool"),
        (dict(kv_offloading_size=1), "one place for what leaves the pool"),
    ],
)
def test_arguments_that_do_not_go_together(own, said):
    with pytest.raises(ValueError, match="kv_transfer_config: got") as refused:
        EngineArgs("models/tiny", kv_transfer_config=config(KINDS[0], "kv_both"), **own)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "role, wish, said",
    [
        (None, dict(do_remote_decode=True), "accepted: none, because kv_transfer_config is None"),
        ("kv_consumer", dict(do_remote_decode=True), "accepted: False of a kv_consumer"),
        ("kv_producer", dict(do_remote_prefill=True), "accepted: False of a kv_producer"),
        ("kv_producer", dict(do_remote_decode=True, remote_host="/tmp/x"), "what a TcpConnector"),
        ("kv_both", dict(do_remote_decode=1), "do_remote_decode: got 1; accepted: True or False"),
        ("kv_both", dict(remote_port=-1), "remote_port: got -1; accepted: 0 to 65535"),
        ("kv_both", dict(do_remote_decod=True), "got 'do_remote_decod'; accepted: the keys"),
        ("kv_both", dict(do_remote_decode=True, do_remote_prefill=True), "False with do_remote_d"),
    ],
)
def test_a_request_that_cannot_be_handed_over(role, wish, said):
    engine = engine_of(None if role is None else config(KINDS[0], role))
    with pytest.raises(ValueError) as refused:
        engine.add_request("one", [1, 2], params(1, wish))
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert not engine.requests
    engine.close()


def test_an_address_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        own = config(KINDS[0], "kv_consumer", kv_port=taken.getsockname()[1])
        with pytest.raises(
            ValueError, match=r"kv_port: got '127\.0\.0\.1:.*; accepted: a free one"
        ):
            engine_of(own)
    assert SamplingParams(extra_args={}).extra_args is None
    empty = SamplingParams(extra_args={"kv_transfer_params": {}})
    assert empty.extra_args is None, "it asks for nothing"
