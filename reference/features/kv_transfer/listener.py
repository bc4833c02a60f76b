"""A consumer's end: it takes blocks from all producers that connect."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from lessons.l26_kv_transfer.tiers import Key
from reference.features.kv_transfer.wire import (
    NO,
    YES,
    Address,
    Refused,
    Torn,
    Wire,
    accept,
    digest,
    offered,
)

MOST_PRODUCERS = 64


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
            if self.is_over or len(self.connections) >= MOST_PRODUCERS:
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
