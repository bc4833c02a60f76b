"""Two engines on one small model of which one computes prompts for the other; and producers that
are none: they say what a test tells them to.
"""

import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing import get_context

import torch

from reference import EngineArgs, SamplingParams
from reference.engine.assembly import engine_over
from reference.features.kv_transfer.links import Link, Sending
from reference.features.kv_transfer.listener import Listener
from reference.features.kv_transfer.wire import HELLO, MAGIC, OFFER, Address, digest, receive
from tests.engine_cases import CONFIG, LONGEST, assert_clean, new_model

BLOCK = 4
KINDS = ("TcpConnector", "SharedMemoryConnector")
SIZE = 64  # bytes of a block where no engine is needed
MODEL = new_model(CONFIG).cpu().double()


def config(kind: str, role: str, **more) -> dict:
    own = dict(kv_connector=kind, kv_role=role, kv_port=0, kv_buffer_size=1e6)
    return own | dict(kv_connector_extra_config={"timeout_s": 30.0}) | more


def engine_of(transfer: dict | None = None, model=MODEL, **own):
    """An engine in chunks of eight tokens, over a pool of 40 blocks."""
    common = dict(device="cpu", dtype="float64", block_size=BLOCK, max_model_len=LONGEST)
    common |= dict(max_num_seqs=4, max_num_batched_tokens=8, num_gpu_blocks_override=40)
    args = EngineArgs("models/tiny", **common | own, kv_transfer_config=transfer)
    engine = engine_over(model, None, args)
    for slots in (engine.runner.pool.k_slots, engine.runner.pool.v_slots):
        slots.fill_(torch.nan)  # no row may be read that was not written
    return engine


def params(limit: int, transfer: dict | None = None, **own) -> SamplingParams:
    own = dict(temperature=0, ignore_eos=True, detokenize=False) | own
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    return SamplingParams(max_tokens=limit, extra_args=extra, **own)


def to_be_sent(to: Address) -> dict:
    """What a router writes to a producer."""
    return dict(do_remote_decode=True, remote_host=to.host, remote_port=to.port)


def answer(engine, prompt: list[int], wish: SamplingParams, until_s: float = 120.0):
    """The output of one request, alone in an engine. Nothing may be left taken after it."""
    engine.add_request("one", list(prompt), wish)
    output, end = None, time.monotonic() + until_s
    while engine.has_unfinished_requests:
        output = [output, *engine.step()][-1]
        assert time.monotonic() < end, "the engine makes no progress"
    assert_clean(engine)
    return output


def address_of(engine) -> Address:
    about = engine.transfers.about
    return Address(about["remote_host"], about["remote_port"])


def apart(producer, consumer, prompt: list[int], limit: int, **own):
    """(what the producer said, the output of the consumer) for one request."""
    wish = params(1, to_be_sent(address_of(consumer)), **own)
    handed_over = answer(producer, prompt, wish).kv_transfer_params
    return handed_over, answer(consumer, prompt, params(limit, handed_over, **own))


def tokens(output) -> list[int]:
    return output.outputs[0].token_ids


# ---------------------------------------------------------------- without an engine


def block(number: int) -> torch.Tensor:
    return torch.full((SIZE,), number, dtype=torch.uint8)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Inbox:
    """A listener that keeps what comes, and the faults that it was told of."""

    def __init__(self, address: Address, of: str = "model", size: int = SIZE):
        self.blocks, self.faults = {}, []
        keep, wants = self.blocks.__setitem__, lambda key: key not in self.blocks
        self.listener = Listener(address, of, size, keep, wants, self.faults.append, 1.0)
        self.address = self.listener.address

    @property
    def numbers(self) -> list[int]:
        """Of the blocks; each is whole."""
        found = {int.from_bytes(key, "big"): block for key, block in self.blocks.items()}
        assert all((found[number] == number % 256).all() for number in found), "another block"
        return sorted(found)


def link_to(address: Address, of: str = "model", timeout_s: float = 1.0):
    """(a link, the faults that it will have told of)"""
    faults = []
    return Link(address, of, SIZE, timeout_s, faults.append), faults


def send(link: Link, numbers) -> tuple[list[int], float]:
    """Which of the blocks have arrived, and the seconds that it took to know."""
    sending = Sending([key(number) for number in numbers], list(numbers))
    begin = time.monotonic()
    link.post(sending, torch.stack([block(number % 256) for number in numbers]))
    here = sending.here.result(30)
    return sorted(int.from_bytes(one, "big") for one in here), time.monotonic() - begin


def until(condition: Callable[[], bool], wait_s: float = 30.0) -> None:
    """Return when it holds: what a listener's thread does comes a moment later."""
    end = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


# ---------------------------------------------------------------- a producer that dies


def dies(
    address: Address, of: str, size: int, batch: list[tuple[bytes, bytes]], whole: int
) -> None:
    """The body of a process: it sends so many blocks whole and half of the next, then is killed."""
    with socket.create_connection(address) as connection:
        connection.sendall(HELLO.pack(MAGIC, of.encode(), size))
        receive(connection, 1)
        connection.sendall(OFFER.pack(len(batch), 0) + b"".join(name for name, _ in batch))
        receive(connection, len(batch))
        for name, data in batch[:whole]:
            connection.sendall(digest(name, data) + data)
        name, data = batch[whole]
        connection.sendall(digest(name, data) + data[: size // 2])
        os.kill(os.getpid(), signal.SIGKILL)


def in_a_process(body: Callable, *arguments):
    """A child that runs body, and has ended."""
    child = get_context("fork").Process(target=body, args=arguments)
    child.start()
    child.join(30)
    return child


def computed(prompt: list[int]) -> tuple[str, int, list[tuple[bytes, bytes]]]:
    """(format, bytes of a block, the key and bytes of each full block) of a prompt."""
    producer = engine_of(config("TcpConnector", "kv_producer"))
    connector = producer.scheduler.blocks.connector
    inbox = Inbox(Address("127.0.0.1"), connector.of, connector.pages.block_bytes)
    answer(producer, prompt, params(1, to_be_sent(inbox.address)))
    producer.close()
    inbox.listener.close()
    batch = [(name, data.numpy().tobytes()) for name, data in inbox.blocks.items()]
    return connector.of, connector.pages.block_bytes, batch
