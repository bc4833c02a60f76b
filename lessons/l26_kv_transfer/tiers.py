"""Where blocks of K and V wait that the pool has no room for: host memory, then files.

    host = HostTier(capacity=1000, block_bytes=2**21, below=FolderTier("/var/kv", 2**21, quota))
    host.put(key, block)     # the block that it pushes out goes down into the files
    host.get(key)            # wherever it is; None: it is gone

A block is known by a key: lesson 13's hash of all tokens up to its end. So equal keys have equal
blocks, a second copy is never wrong, and a lost one only has to be computed again. Two threads may
call a tier.
"""

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, Protocol

import fsspec
import torch
from torch import Tensor

Key = bytes


class Tier(Protocol):
    """Keeps blocks by key. A block: [block_bytes] uint8 in host memory."""

    def has(self, key: Key) -> bool:
        """Whether `get` would probably find it. It is fast: a scheduler asks."""

    def put(self, key: Key, block: Tensor) -> None:
        """Keep a copy. It may be dropped at any time."""

    def get(self, key: Key) -> Tensor | None:
        """A copy of the block; None: it is not here any more."""

    def flush(self, until: float) -> None:
        """Bring what would be lost with this process to where it is not, until a time.time()."""


class Lru:
    """An order of eviction: the key that was used least recently goes first."""

    def __init__(self):
        self.keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key) -> None:
        self.keys[key] = None

    def use(self, key: Key) -> None:
        self.keys.move_to_end(key)

    def evict(self) -> Key:
        """Take out the key that goes."""
        return self.keys.popitem(last=False)[0]


class UsedAgainLast(Lru):
    """Keys that were never used again go before all others, because most prompts come once."""

    def __init__(self):
        super().__init__()
        self.again = Lru()

    def use(self, key: Key) -> None:
        if key in self.keys:
            del self.keys[key]
            self.again.add(key)
        else:
            self.again.use(key)

    def evict(self) -> Key:
        return super().evict() if self.keys else self.again.evict()


class HostTier:
    """Blocks in one buffer of host memory, of a GPU's machine pinned, because only such memory is
    copied beside the GPU's work.

    capacity: blocks. below: the tier that gets what has to leave; None: it is lost. order: which
    block leaves. hits: blocks that were found here.
    """

    def __init__(
        self,
        capacity: int,
        block_bytes: int,
        below: Tier | None = None,
        order: Lru | None = None,
        pin_memory: bool = False,
    ):
        self.buffer = torch.empty(capacity, block_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        self.rows: dict[Key, int] = {}
        self.free = list(range(capacity))
        self.below = below
        self.order = Lru() if order is None else order
        self.lock = threading.Lock()
        self.hits = 0

    def has(self, key: Key) -> bool:
        return key in self.rows or (self.below is not None and self.below.has(key))

    def put(self, key: Key, block: Tensor) -> None:
        with self.lock:
            if key in self.rows:
                return
            leaving = None if self.free else self._evicted()
            if self.free:
                row = self.rows[key] = self.free.pop()
                self.buffer[row] = block
                self.order.add(key)
            else:  # there is no room for any block
                leaving = key, block
        if leaving is not None and self.below is not None:
            self.below.put(*leaving)  # outside of the lock, because files are slow

    def _evicted(self) -> tuple[Key, Tensor] | None:
        """A block that leaves, so that there is room for another; None: there is no block."""
        if not self.rows:
            return None
        key = self.order.evict()
        row = self.rows.pop(key)
        self.free.append(row)
        return key, self.buffer[row].clone()

    def get(self, key: Key) -> Tensor | None:
        with self.lock:
            if key in self.rows:
                self.order.use(key)
                self.hits += 1
                return self.buffer[self.rows[key]].clone()
        block = None if self.below is None else self.below.get(key)
        if block is not None:
            self.put(key, block)  # it is wanted now, so it comes up again
        return block

    def flush(self, until: float) -> None:
        if self.below is None:
            return
        for key, row in reversed(self.rows.items()):  # the newest first, if time is short
            if time.time() > until:
                break
            self.below.put(key, self.buffer[row])
        self.below.flush(until)


class Found(NamedTuple):
    """A file of a FolderTier. used: when it was read or written last, seconds."""

    name: str
    size: int
    used: float


MAGIC = b"KVBLOCK1"  # the version of the layout: magic, SHA-256 of key and block, block
HEADER = len(MAGIC) + 32
OLDEST_PART_S = 600.0  # a file that is still being written after this time has lost its writer


class FolderTier:
    """A file for each block, in a folder or in a store that fsspec reaches ("s3://…").

    of: names the model and the format of its blocks, because equal tokens have other K and V in
    another model. quota: bytes of its files; when they are more, the least recently used ones go.
    Several engines may share a folder. A file appears whole or not at all: it is written
    under another name first. A file that is torn or of another layout is removed when it is read.
    faults: what went wrong with the store, counted; the block is lost then, and nothing else.
    """

    def __init__(self, url: str, block_bytes: int, quota: int, of: str = "model"):
        self.store, path = fsspec.core.url_to_fs(url)
        self.folder = f"{path}/{of}"
        self.block_bytes, self.quota = block_bytes, quota
        self.faults: dict[str, int] = {}
        self.hits = 0
        self.lock = threading.Lock()
        self.note: Callable[[Key, bool], None] = lambda key, is_here: None  # for who wants to know
        self.store.makedirs(self.folder, exist_ok=True)
        self.used_bytes = sum(file.size for file in self.files())

    def has(self, key: Key) -> bool:
        with self.counted("has"):
            return self.store.exists(self.name_of(key))
        return False

    def put(self, key: Key, block: Tensor) -> None:
        size = HEADER + self.block_bytes
        if size > self.quota or self.has(key):
            return
        name = self.name_of(key)
        part = f"{name}.{os.getpid()}.{threading.get_ident()}.part"
        data = block.numpy().tobytes()
        try:
            self.store.makedirs(name.rpartition("/")[0], exist_ok=True)
            self.store.pipe_file(part, MAGIC + digest(key, data) + data)
            self.store.mv(part, name)
        except Exception as error:  # a store may raise what it likes
            self.count("put", error)
            with suppress(Exception):
                self.store.rm_file(part)
            return
        self.note(key, True)
        with self.lock:
            self.used_bytes += size
            if self.used_bytes > self.quota:
                self.make_room()

    def get(self, key: Key) -> Tensor | None:
        name = self.name_of(key)
        with self.counted("get"):
            if not self.store.exists(name):
                return None
            data = self.store.cat_file(name)
            body = data[HEADER:]
            is_whole = len(body) == self.block_bytes and data.startswith(MAGIC)
            if is_whole and data[len(MAGIC) : HEADER] == digest(key, body):
                self.touch(name)
                self.hits += 1
                return torch.frombuffer(bytearray(body), dtype=torch.uint8)
            self.count("get", ValueError("torn"))
            self.note(key, False)
            self.store.rm_file(name)
        return None

    def flush(self, until: float) -> None:
        """Nothing of it is in memory."""

    def name_of(self, key: Key) -> str:
        """Where a block's file is. In 256 folders, because some systems are slow with one."""
        name = key.hex()
        return f"{self.folder}/{name[:2]}/{name}.kv"

    def key_of(self, name: str) -> Key:
        """Of a file's name."""
        return bytes.fromhex(name.rpartition("/")[2].removesuffix(".kv"))

    def touch(self, name: str) -> None:
        """Note that a file was used, where the store can."""
        with suppress(Exception):
            self.store.touch(name, truncate=False)

    def files(self) -> Iterator[Found]:
        """All blocks that are here, of all engines. Removes what killed writers left."""
        now = time.time()
        with self.counted("list"):
            self.store.invalidate_cache()
            for name, info in self.store.find(self.folder, detail=True).items():
                used = info.get("mtime") or info.get("created") or now
                used = used if isinstance(used, (int, float)) else used.timestamp()
                if not name.endswith(".part"):
                    yield Found(name, info["size"], used)
                elif now - used > OLDEST_PART_S:
                    self.store.rm_file(name)

    def make_room(self) -> None:
        """Remove the least recently used files until a tenth of the quota is free. They are listed
        again, because other engines write and remove here, too.
        """
        found = sorted(self.files(), key=lambda file: file.used)
        self.used_bytes = sum(file.size for file in found)
        for file in found:
            if self.used_bytes <= 0.9 * self.quota:
                break
            with self.counted("remove"):
                self.used_bytes -= file.size
                self.store.rm_file(file.name)
                self.note(self.key_of(file.name), False)

    def counted(self, what: str) -> "Counted":
        """Inside it a fault of the store is counted, and ends the block."""
        return Counted(self, what)

    def count(self, what: str, error: Exception) -> None:
        """A fault, by what was tried and the kind of error."""
        name = f"{what} {type(error).__name__}"
        self.faults[name] = self.faults.get(name, 0) + 1


class Counted(suppress):
    """suppress(Exception) that counts."""

    def __init__(self, tier: FolderTier, what: str):
        super().__init__(Exception)
        self.tier, self.what = tier, what

    def __exit__(self, kind, error, traceback) -> bool:
        if isinstance(error, Exception) and not isinstance(error, FileNotFoundError):
            self.tier.count(self.what, error)  # another engine may remove a file at any time
        return super().__exit__(kind, error, traceback)


def digest(key: Key, data: bytes) -> bytes:
    """SHA-256 of a key and its block. Of both, because a file may be renamed, too."""
    return hashlib.sha256(key + data).digest()
