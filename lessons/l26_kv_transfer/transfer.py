"""A connector between engines: one computes a prompt and sends its blocks, another one decodes.

    connector = TransferConnector(pages, "name of model and format", inbox)
    connector.listen(Address("127.0.0.1", 14579))         # a consumer: blocks come by themselves
    job, sending = connector.start_send(to, keys, blocks)  # a producer, after each chunk

The producer pushes. A block is sent as soon as a chunk of the prompt has filled it, so most of the
prompt has arrived when its last chunk has run. It arrives in the consumer's inbox, which is a
HostTier. So what the consumer does with it is what an engine with tiers does: `matched` looks into
the inbox, and `start_load` copies to the pool.

What can go wrong costs blocks, and a block that did not come is computed. A consumer that does not
answer costs the producer one timeout; then nothing is sent to it for as long.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lessons.l26_kv_transfer.connector import Job, TierConnector
from lessons.l26_kv_transfer.pages import Pages
from lessons.l26_kv_transfer.tiers import HostTier, Key, Lru
from lessons.l26_kv_transfer.wire import (
    NO,
    ROWS,
    YES,
    Address,
    Refused,
    Torn,
    Wire,
    accept,
    connect,
    digest,
    offered,
    send_batch,
)

MOST_LINKS = 64  # of a producer, and of a consumer


class ReadFirst(Lru):
    """The inbox's order of eviction: what the engine has read goes before what it has not."""

    def use(self, key: Key) -> None:
        self.keys.move_to_end(key, last=False)


@dataclass(eq=False)
class Sending:
    """Blocks on their way. here: which of the keys the consumer has, once that is known."""

    keys: list[Key]
    blocks: list[int]
    here: Future = field(default_factory=Future)
    is_wanted: bool = True  # False: no request waits for it any more

    def end(self, here: set[Key]) -> None:
        """It is known now what arrived."""
        if not self.here.done():
            self.here.set_result(here)


class Link:
    """A producer's way to one consumer: a connection, and a thread that sends one batch after the
    other. note: told of each fault.
    """

    def __init__(
        self,
        to: Address,
        of: str,
        block_bytes: int,
        timeout_s: float,
        note: Callable[[str], None],
    ):
        self.to, self.of, self.block_bytes, self.timeout_s = to, of, block_bytes, timeout_s
        self.note = note
        self.wire: Wire | None = None
        self.rests_until = 0.0
        self.sent_blocks = 0
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="kv-send")

    def post(self, sending: Sending, packed: Tensor) -> None:
        """Send them after what was posted before. packed: [len(sending.keys), block_bytes]."""
        self.thread.submit(self.send, sending, packed)

    def send(self, sending: Sending, packed: Tensor) -> None:
        """In the link's thread: batch after batch, up to the first that fails."""
        here: set[Key] = set()
        try:
            for start in range(0, len(sending.keys), ROWS):
                if not sending.is_wanted or time.monotonic() < self.rests_until:
                    break
                keys = sending.keys[start : start + ROWS]
                rows = [row.numpy().data for row in packed[start : start + ROWS]]
                arrived = self.exchange(keys, rows)
                here.update(key for key, has_come in zip(keys, arrived) if has_come)
                self.sent_blocks += sum(arrived)
        except Exception as error:
            self.note("refused" if isinstance(error, Refused) else f"send {type(error).__name__}")
            self.close()
            self.rests_until = time.monotonic() + self.timeout_s
        finally:
            sending.end(here)

    def exchange(self, keys: list[Key], rows: list) -> list[bool]:
        """One batch. A connection that was used before may be one to a consumer that has gone, so
        it is tried once more on a new one. Raises OSError and Refused.
        """
        is_used = self.wire is not None
        try:
            self.wire = self.wire or connect(self.to, self.of, self.block_bytes, self.timeout_s)
            return send_batch(self.wire, keys, rows)
        except ConnectionError:
            if not is_used:
                raise
        self.close()
        return self.exchange(keys, rows)

    def close(self) -> None:
        """End the connection."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None


class Listener:
    """A consumer's end: takes blocks from all producers that connect. address: where it listens.

    keep(key, block): what becomes of a block that is whole. wants(key): whether it should come.
    note: told of each fault. timeout_s: until the next bytes of a message. Anyone who reaches the
    address may send blocks, so it belongs into the network of the engines alone.
    """

    def __init__(
        self,
        address: Address,
        of: str,
        block_bytes: int,
        keep: Callable[[Key, Tensor], None],
        wants: Callable[[Key], bool],
        note: Callable[[str], None],
        timeout_s: float,
    ):
        self.of, self.block_bytes, self.timeout_s = of, block_bytes, timeout_s
        self.keep, self.wants, self.note = keep, wants, note
        self.connections: set[socket.socket] = set()
        self.is_over = False
        self.socket = listening(address)
        self.address = address
        if not address.is_shared:
            self.address = Address(*self.socket.getsockname()[:2])
        self.thread = threading.Thread(target=self.serve, name="kv-listen", daemon=True)
        self.thread.start()

    def serve(self) -> None:
        """A thread for each producer."""
        while not self.is_over:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                continue  # the end, or a producer that has gone already
            if self.is_over or len(self.connections) >= MOST_LINKS:
                connection.close()
                continue
            self.connections.add(connection)
            threading.Thread(target=self.take_all, args=(connection,), daemon=True).start()

    def take_all(self, connection: socket.socket) -> None:
        """What one producer sends, until it ends. What came whole by then stays."""
        try:
            connection.settimeout(self.timeout_s)
            wire = accept(connection, self.address.is_shared, self.of, self.block_bytes)
            while True:
                connection.settimeout(None)  # the next prompt may come in an hour
                keys = offered(wire)
                connection.settimeout(self.timeout_s)
                self.take_batch(wire, keys)
        except Refused:
            self.note("refused")
        except Torn:
            self.note("torn")
        except OSError:
            pass  # a producer may go at any time
        finally:
            self.connections.discard(connection)
            connection.close()

    def take_batch(self, wire: Wire, keys: list[Key]) -> None:
        """The wanted blocks of a batch. A torn one is dropped, and the producer is told."""
        wanted = [self.wants(key) for key in keys]
        wire.connection.sendall(bytes(wanted))
        kept = bytearray()
        for row, key in enumerate(key for key, is_wanted in zip(keys, wanted) if is_wanted):
            checked, data = wire.take(row)
            if digest(key, data) == checked:
                self.keep(key, torch.frombuffer(data, dtype=torch.uint8))
                kept += YES
            else:
                self.note("torn")
                kept += NO
        wire.connection.sendall(kept)

    def close(self) -> None:
        """Take nothing any more."""
        self.is_over = True
        for one in (self.socket, *self.connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join(1)
        if self.address.is_shared:
            with suppress(OSError):
                os.unlink(self.address.host)


def listening(address: Address) -> socket.socket:
    """A socket that takes connections. Raises OSError for an address that is taken."""
    if not address.is_shared:
        return socket.create_server((address.host, address.port))
    taken, found = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with taken, suppress(FileNotFoundError):
        try:
            taken.connect(address.host)
        except ConnectionRefusedError:  # its engine was killed
            os.unlink(address.host)
    found.bind(address.host)
    os.chmod(address.host, 0o600)
    found.listen()
    return found


class TransferConnector(TierConnector):
    """A KVConnector between engines. of: names the model and the format of its blocks. inbox: where
    blocks from others wait; of a producer it may have room for none. timeout_s: for an answer of
    the other end.
    """

    def __init__(self, pages: Pages, of: str, inbox: HostTier, timeout_s: float = 10.0):
        super().__init__(pages, inbox, timeout_s)
        self.of, self.timeout_s = of, timeout_s
        self.links: dict[Address, Link] = {}
        self.under_way: set[Future] = set()
        self.listener: Listener | None = None
        self.received_blocks = 0
        self.known: Callable[[Key], bool] = lambda key: False

    def note(self, fault: str) -> None:
        """Count a fault."""
        self.faults[fault] = self.faults.get(fault, 0) + 1

    # ------------------------------------------------------------ a consumer

    def listen(self, address: Address, known: Callable[[Key], bool] = lambda key: False) -> None:
        """Let producers send blocks here. known: whether the pool has a block already. Raises
        OSError for an address that is taken.
        """
        self.known = known
        size = self.pages.block_bytes
        what = (self.of, size, self.keep, self.wants, self.note, self.timeout_s)
        self.listener = Listener(address, *what)

    def wants(self, key: Key) -> bool:
        """Whether a block should be sent. In a listener's thread."""
        return not (self.tier.has(key) or self.known(key))

    def keep(self, key: Key, block: Tensor) -> None:
        """A block has come. In a listener's thread."""
        self.received_blocks += 1
        self.tier.put(key, block)

    def start_save(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:
        """Nothing is kept here."""

    # ------------------------------------------------------------ a producer

    def start_send(
        self, to: Address, keys: Sequence[Key], blocks: Sequence[int]
    ) -> tuple[Job, Sending]:
        """Begin to send blocks of the pool. They are read first, and may be taken then."""
        job = Job(list(keys), list(blocks), is_load=False)
        sending = Sending(job.keys, job.blocks)
        link = self.link(to)
        self.under_way.add(sending.here)
        future = self.threads.submit(self.run, job, self.read, self.pages.now(), link, sending)
        self.copying[job] = future
        return job, sending

    def link(self, to: Address) -> Link:
        """The way to a consumer; of too many, the one that was used least recently is closed."""
        link = self.links.pop(to, None)
        if link is None:
            link = Link(to, self.of, self.pages.block_bytes, self.timeout_s, self.note)
        self.links[to] = link
        if len(self.links) > MOST_LINKS:
            oldest = self.links.pop(next(iter(self.links)))
            oldest.thread.submit(oldest.close)
            oldest.thread.shutdown(wait=False)
        return link

    def read(self, job: Job, after, link: Link, sending: Sending) -> None:
        """From the pool; the link's thread sends them."""
        packed = None
        try:
            if job.may_touch():
                packed = self.pages.read(job.blocks, after)
                job.end(len(job.blocks))
                link.post(sending, packed)
        except BaseException:
            packed = None
            raise
        finally:
            if packed is None:
                sending.end(set())

    def finished(self) -> list[Job]:
        self.under_way = {future for future in self.under_way if not future.done()}
        return super().finished()

    def wait(self) -> None:
        futures = [*self.copying.values(), *self.under_way]
        wait(futures, timeout=0.05, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        super().close()
        for link in self.links.values():
            link.thread.shutdown(wait=False, cancel_futures=True)
            if link.wire is not None:
                with suppress(OSError):
                    link.wire.connection.shutdown(socket.SHUT_RDWR)
