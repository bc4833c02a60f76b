"""Blocks on their way from one process to another: what is said on a connection, and the two ways
in which the bytes go.

    who says it   what
    producer      hello: a version, the name of model and format, bytes of a block
    consumer      1; or 0 and why not, and the connection ends
    then, for each batch:
    producer      how many blocks, which part of them, and their keys
    consumer      a byte for each: 1, send it; 0, I have it
    producer      each wanted block: SHA-256 of its key and bytes, and the bytes
    consumer      a byte for each wanted block: 1, it is here; 0, it was torn

A block travels as one part, or as a part for each layer (layers.py). "Block" above is a part then.

`TcpWire` sends the bytes through the socket, so the two may be on two machines. `SharedWire` writes
them into memory that both processes have mapped, and only the rest goes through a socket. That
memory has no name: its file descriptor goes with the hello. So nothing is left of it, however the
two end.

Why sockets and not `torch.distributed` with gloo: a process group has its members from the start,
each with a rank. When one dies, the others can use the group no more, and one that was started
again cannot come in. Here each pair of engines has a connection of its own, which ends alone. A
read that takes too long ends by the socket's timeout. On GPUs NIXL or NCCL would carry the bytes.
"""

import hashlib
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

MAGIC = b"KVMOVE02"
HELLO = struct.Struct("!8s64sQ")  # version, name of model and format, bytes of a block
OFFER = struct.Struct("!IH")  # how many blocks, which part
COUNT = struct.Struct("!I")
KEY_BYTES = DIGEST_BYTES = hashlib.sha256().digest_size
ROWS = 16  # blocks of a batch at most, and rows of a shared memory
YES, NO = b"\1", b"\0"


class Refused(Exception):
    """The other end takes no blocks of this model or format."""


class Torn(Exception):
    """The other end does not keep to the protocol."""


class Address(NamedTuple):
    """Where a consumer listens: a host and a port, or a socket's path, for shared memory."""

    host: str
    port: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether the bytes go through memory, because both are on one machine."""
        return self.host.startswith("/")


def shared_address(name: int | str) -> Address:
    """Of shared memory under a port's number, or another name that both sides know."""
    return Address(f"{tempfile.gettempdir()}/kv-transfer-{os.getuid()}-{name}.sock")


def part_of(key: bytes, part: int) -> bytes:
    """The name of a part of a block. That of its first part is its key."""
    return key if part == 0 else key + part.to_bytes(2, "big")


def key_and_part(name: bytes) -> tuple[bytes, int]:
    """The inverse."""
    return name[:KEY_BYTES], int.from_bytes(name[KEY_BYTES:], "big")


def digest(name: bytes, data) -> bytes:
    """SHA-256 of the name of a block, or of a part, and its bytes."""
    found = hashlib.sha256(name)
    found.update(data)
    return found.digest()


def receive(connection: socket.socket, count: int) -> bytearray:
    """Exactly so many bytes. Raises ConnectionError if the other end stops before."""
    data = bytearray(count)
    at, view = 0, memoryview(data)
    while at < count:
        got = connection.recv_into(view[at:])
        if not got:
            raise ConnectionError(f"{at} of {count} bytes came")
        at += got
    return data


# ---------------------------------------------------------------- the two ways of the bytes


class Wire(Protocol):
    """A connection after its hello."""

    connection: socket.socket

    def send(self, row: int, checked: bytes, data) -> None:
        """One block, the row-th of its batch. checked: its digest."""

    def take(self, row: int) -> tuple[bytes, bytearray]:
        """(digest, bytes) of the row-th block of a batch."""

    def close(self) -> None:
        """End it."""


class TcpWire:
    """The bytes of a block follow its digest."""

    def __init__(self, connection: socket.socket, block_bytes: int):
        self.connection, self.block_bytes = connection, block_bytes

    def send(self, row: int, checked: bytes, data) -> None:
        self.connection.sendall(checked)
        self.connection.sendall(data)

    def take(self, row: int) -> tuple[bytes, bytearray]:
        checked = bytes(receive(self.connection, DIGEST_BYTES))
        return checked, receive(self.connection, self.block_bytes)

    def close(self) -> None:
        self.connection.close()


class SharedWire(TcpWire):
    """The bytes are in the row of a memory that both ends have mapped."""

    def __init__(self, connection: socket.socket, block_bytes: int, memory: mmap.mmap):
        super().__init__(connection, block_bytes)
        self.memory = memory

    def send(self, row: int, checked: bytes, data) -> None:
        start = row * self.block_bytes
        self.memory[start : start + self.block_bytes] = bytes(data)
        self.connection.sendall(checked)  # after the bytes, because it says that they are there

    def take(self, row: int) -> tuple[bytes, bytearray]:
        checked = bytes(receive(self.connection, DIGEST_BYTES))
        start = row * self.block_bytes
        return checked, bytearray(self.memory[start : start + self.block_bytes])

    def close(self) -> None:
        super().close()
        self.memory.close()


# ---------------------------------------------------------------- both ends of a hello


def connect(to: Address, of: str, block_bytes: int, timeout_s: float) -> Wire:
    """A producer's end. of: names the model and the format of its blocks. Raises OSError, and
    Refused by a consumer with another model.
    """
    if to.is_shared:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(to.host)
        except OSError:
            connection.close()
            raise
    else:
        connection = socket.create_connection(to, timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        return greet(connection, to.is_shared, of, block_bytes)
    except BaseException:
        connection.close()
        raise


def greet(connection: socket.socket, is_shared: bool, of: str, block_bytes: int) -> Wire:
    """Say hello, and read what the other end thinks of it."""
    hello = HELLO.pack(MAGIC, of.encode(), block_bytes)
    if not is_shared:
        connection.sendall(hello)
        wire = TcpWire(connection, block_bytes)
    else:
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryFile(dir=folder) as file:  # which has no name
            file.truncate(ROWS * block_bytes)
            memory = mmap.mmap(file.fileno(), ROWS * block_bytes)
            socket.send_fds(connection, [hello], [file.fileno()])
        wire = SharedWire(connection, block_bytes, memory)
    if receive(connection, 1) == YES:
        return wire
    (length,) = COUNT.unpack(receive(connection, COUNT.size))
    raise Refused(receive(connection, min(length, 1000)).decode("utf-8", "replace"))


def accept(connection: socket.socket, is_shared: bool, of: str, block_bytes: int) -> Wire:
    """A consumer's end. Raises Refused, which the producer is told, OSError, and Torn."""
    if is_shared:
        hello, fds, *_ = socket.recv_fds(connection, HELLO.size, 1)
        hello += receive(connection, HELLO.size - len(hello))
    else:
        hello, fds = receive(connection, HELLO.size), []
    try:
        magic, theirs, size = HELLO.unpack(hello)
        if magic != MAGIC or len(fds) != is_shared:
            raise Torn("no hello")
        theirs = theirs.rstrip(b"\0").decode("ascii", "replace")
        if (theirs, size) != (of, block_bytes):
            why = f"blocks of {theirs}, {size} bytes; accepted: of {of}, {block_bytes} bytes"
            with suppress(OSError):
                connection.sendall(NO + COUNT.pack(len(why)) + why.encode())
            raise Refused(why)
        if not is_shared:
            wire = TcpWire(connection, block_bytes)
        elif os.fstat(fds[0]).st_size < ROWS * block_bytes:
            raise Torn("too small a memory")  # a read beyond its end would end this process
        else:
            wire = SharedWire(connection, block_bytes, mmap.mmap(fds[0], ROWS * block_bytes))
    finally:
        for fd in fds:
            os.close(fd)
    connection.sendall(YES)
    return wire


# ---------------------------------------------------------------- a batch


def send_batch(wire: Wire, keys: Sequence[bytes], blocks: Sequence, part: int = 0) -> list[bool]:
    """Offer a part of at most ROWS blocks and send those that are wanted. blocks: their bytes.
    Returns which of them the consumer has now. Raises OSError.
    """
    wire.connection.sendall(OFFER.pack(len(keys), part) + b"".join(keys))
    wanted = [bool(answer) for answer in receive(wire.connection, len(keys))]
    sent = [(key, block) for key, block, is_wanted in zip(keys, blocks, wanted) if is_wanted]
    for row, (key, block) in enumerate(sent):
        wire.send(row, digest(part_of(key, part), block), block)
    arrived = iter(receive(wire.connection, len(sent)))
    return [not is_wanted or bool(next(arrived)) for is_wanted in wanted]


def offered(wire: Wire) -> list[bytes]:
    """The names of the next batch, waited for as long as the socket allows. Raises OSError,
    Torn.
    """
    count, part = OFFER.unpack(receive(wire.connection, OFFER.size))
    if not 1 <= count <= ROWS:
        raise Torn(f"a batch of {count}")
    keys = bytes(receive(wire.connection, count * KEY_BYTES))
    return [part_of(keys[at : at + KEY_BYTES], part) for at in range(0, len(keys), KEY_BYTES)]
