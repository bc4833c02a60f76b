"""kv_offloading_size: blocks that the pool has no room for wait in host memory, and in files.

Lesson 26's parts over an engine's pools. What is stored is known by all that K and V depend on: the
tokens (lesson 13's hashes), the adapter and the pictures of a request (`salt_of`), and the model
with the format of its cache (`format_of`), which names the folder of the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lessons.l13_prefix_caching.naive import FIRST, HashBlocks
from lessons.l26_kv_transfer.blocks import Elsewhere, TieredBlockManager
from lessons.l26_kv_transfer.connector import TierConnector
from lessons.l26_kv_transfer.pages import Pages
from lessons.l26_kv_transfer.tiers import FolderTier, HostTier, Lru
from reference.engine.engine_args import EngineArgs
from reference.features.block_events import EventLog, Key

if TYPE_CHECKING:
    from lessons.l03_kv_cache.cache import KVPool
    from lessons.l21_multi_lora.peft.adapters import Adapter
    from reference.engine.model_runner import ModelRunner
    from reference.engine.request import EngineSequence

GIB = 2**30


def tiered_blocks(
    args: EngineArgs, runner: ModelRunner, others: Iterable[KVPool], cache: HashBlocks
) -> TieredBlockManager:
    """Blocks of this runner's pool that are saved elsewhere. others: pools whose blocks have the
    same numbers. cache: which blocks the pool knows. Raises ValueError for a folder that cannot be
    used.
    """
    pages = Pages([runner.pool, *others])
    size, files = pages.block_bytes, None
    if args.kv_offloading_folder is not None:
        quota = int(args.kv_offloading_folder_size * GIB)
        try:
            files = FolderTier(args.kv_offloading_folder, size, quota, format_of(runner, pages))
        except Exception as error:  # of a store that is not installed, too
            raise ValueError(
                f"kv_offloading_folder: got {args.kv_offloading_folder!r} "
                f"({type(error).__name__}: {error}); accepted: a folder that can be written, or an "
                "address that fsspec knows"
            ) from None
    capacity = int(args.kv_offloading_size * GIB // size)
    log, order = getattr(cache, "log", None), None
    if log is not None:
        order = ToldOrder(log)
        if files is not None:
            tell_of_files(files, log)
    tier = HostTier(capacity, size, files, order, pin_memory=pages.is_gpu)
    connector = TierConnector(pages, tier)
    return TieredBlockManager(runner.pool.num_blocks, args.block_size, cache, connector)


def elsewhere(blocks: TieredBlockManager) -> Elsewhere:
    """The scheduler's `host` for them."""
    return Elsewhere(blocks, salt_of)


class ToldOrder(Lru):
    """The order of eviction of a HostTier is told of every block that comes or goes, under the
    tier's lock. It tells a log.
    """

    def __init__(self, log: EventLog):
        super().__init__()
        self.log = log

    def add(self, key: Key) -> None:
        super().add(key)
        self.log.stored("host", key)

    def evict(self) -> Key:
        key = super().evict()
        self.log.removed("host", key)
        return key


def tell_of_files(files: FolderTier, log: EventLog) -> None:
    """Tell of the files that are there, and of those that come and go by this engine. Of engines
    that share a folder each tells of its own files after that.
    """

    def note(key: Key, is_here: bool) -> None:
        (log.stored if is_here else log.removed)("folder", key)

    files.note = note
    for file in files.files():
        with suppress(ValueError):  # a file of someone else, whose name is no key
            note(files.key_of(file.name), True)


# ---------------------------------------------------------------- what K and V depend on


def salt_of(sequence: EngineSequence) -> bytes:
    """A hash of the adapter, and of the pictures with their places; FIRST for neither."""
    if sequence.adapter is None and not sequence.pictures:
        return FIRST
    found = hashlib.sha256()
    if sequence.adapter is not None:
        found.update(digest_of(sequence.adapter))
    for start, picture in sequence.pictures:
        found.update(b"%d " % start + picture.digest)
    return found.digest()


DIGESTS: WeakKeyDictionary[Adapter, bytes] = WeakKeyDictionary()


def digest_of(adapter: Adapter) -> bytes:
    """A hash of all its numbers, made once."""
    if adapter not in DIGESTS:
        found = hashlib.sha256()
        for name in sorted(adapter.layers):
            layer = adapter.layers[name]
            found.update(f"{name} {layer.scaling}".encode())
            for tensor in (layer.a, layer.b):
                found.update(as_bytes(tensor))
        DIGESTS[adapter] = found.digest()
    return DIGESTS[adapter]


def format_of(runner: ModelRunner, pages: Pages) -> str:
    """Names the model and the layout of its blocks, by what the model itself stores of a fixed
    prompt. Weights, their format, rotation and the cache's format all change some bit of that, and
    what changes none may share the files. So may no other kind of machine that adds in another
    order. Writes into block 0: call it before a sequence owns it.
    """
    tokens = [(7 * i + 3) % runner.model.config.vocab_size for i in range(runner.pool.block_size)]
    with torch.inference_mode():
        runner.run([(tokens, 0)], [[0]])
    found = hashlib.sha256(repr([tuple(x.shape) for x in runner.pool.tensors]).encode())
    found.update(as_bytes(Pages([runner.pool]).read([0], pages.now())))
    found.update(repr(pages.sizes).encode())
    return found.hexdigest()[:16]


def as_bytes(x: Tensor) -> bytes:
    """The bytes of a tensor, wherever it is."""
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
