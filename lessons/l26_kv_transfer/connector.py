"""What an engine asks of a place that has K and V: what do you have, begin to load, begin to save,
what has ended.

    job = connector.start_load(keys, blocks)   # beside the steps that follow
    ...
    for job in connector.finished(): ...       # its blocks may be read now

The shape is that of vLLM's KVConnector (get_num_new_matched_tokens, start_load_kv, save_kv_layer,
get_finished), for whole blocks of all layers. Three rules make it right, whatever the place is:

1. A block that is being copied, in or out, has an owner until the copy has ended.
2. No step reads a block before its load has ended.
3. What did not arrive is computed. A place may forget, fail or be slow; it may never be wrong.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import torch

from lessons.l26_kv_transfer.pages import Pages
from lessons.l26_kv_transfer.tiers import Key, Tier


@dataclass(eq=False)
class Job:
    """A copy under way. arrived: how many of its blocks, from the first on, hold their K and V."""

    keys: list[Key]
    blocks: list[int]
    is_load: bool
    arrived: int = 0
    began: float = field(default_factory=time.monotonic)
    has_ended: bool = False
    is_touching: bool = False  # reads or writes blocks of the pool at this moment
    is_given_up: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def may_touch(self) -> bool:
        """Whether the copy may go on to the pool's blocks: not once it was given up."""
        with self.lock:
            self.is_touching = not self.is_given_up
            return self.is_touching

    def give_up(self) -> bool:
        """Forget a copy that has not come to the pool's blocks yet. False: it has."""
        with self.lock:
            self.is_given_up = not self.is_touching and not self.has_ended
            return self.is_given_up

    def end(self, arrived: int = 0) -> None:
        """Its blocks are not touched any more."""
        with self.lock:
            self.is_touching, self.arrived, self.has_ended = False, arrived, True


class KVConnector(Protocol):
    """A place that has K and V by key. One thread calls it, the engine's."""

    def matched(self, keys: Sequence[Key]) -> int:
        """How many of the keys, from the first on, it has. Fast: nothing is copied."""

    def start_load(self, keys: Sequence[Key], blocks: Sequence[int]) -> Job:
        """Begin to copy into these blocks of the pool."""

    def start_save(self, keys: Sequence[Key], blocks: Sequence[int]) -> Job | None:
        """Begin to copy from these blocks those that it lacks; None: it lacks none."""

    def finished(self) -> list[Job]:
        """The copies that have ended, or were given up, since the last call."""

    def wait(self) -> None:
        """Until a copy has ended. At once, if none is under way."""

    def close(self) -> None:
        """End all copies."""


class TierConnector:
    """A connector over tiers. Two threads copy, so that one may wait for a file.

    patience_s: after so long a copy that has not begun to touch the pool is given up, and for as
    long nothing is offered, so that a store that hangs costs one request its patience, and not all.
    """

    def __init__(self, pages: Pages, tier: Tier, patience_s: float = 10.0):
        self.pages, self.tier, self.patience_s = pages, tier, patience_s
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="kv-copy")
        self.copying: dict[Job, Future] = {}  # whose end was not told yet
        self.saving: dict[Key, Future] = {}  # which no tier may have yet
        self.loaded_blocks = self.saved_blocks = self.given_up = 0
        self.faults: dict[str, int] = {}
        self.rests_until = 0.0

    def matched(self, keys: Sequence[Key]) -> int:
        if time.monotonic() < self.rests_until:
            return 0
        return len(list(takewhile(self.has, keys)))

    def has(self, key: Key) -> bool:
        """Whether a tier has the block, or gets it now."""
        return key in self.saving or self.tier.has(key)

    def start_load(self, keys: Sequence[Key], blocks: Sequence[int]) -> Job:
        job = Job(list(keys), list(blocks), is_load=True)
        before = {self.saving[key] for key in keys if key in self.saving}
        self.copying[job] = self.threads.submit(self.run, job, self.load, self.pages.now(), before)
        return job

    def start_save(self, keys: Sequence[Key], blocks: Sequence[int]) -> Job | None:
        new = [pair for pair in zip(keys, blocks) if not self.has(pair[0])]
        if not new:
            return None
        job = Job([key for key, _ in new], [block for _, block in new], is_load=False)
        future = self.threads.submit(self.run, job, self.save, self.pages.now())
        self.copying[job] = future
        self.saving.update(dict.fromkeys(job.keys, future))
        return job

    def finished(self) -> list[Job]:
        now, ended = time.monotonic(), []
        self.saving = {key: future for key, future in self.saving.items() if not future.done()}
        for job in list(self.copying):
            late = now - job.began > self.patience_s and job.give_up()
            if late:
                self.given_up += 1
                self.rests_until = now + self.patience_s
                self.saving = {key: it for key, it in self.saving.items() if key not in job.keys}
            if job.has_ended or late:
                del self.copying[job]
                ended.append(job)
        return ended

    def wait(self) -> None:
        wait(list(self.copying.values()), timeout=0.05, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        until = time.time() + self.patience_s
        wait([*self.copying.values(), *self.saving.values()], timeout=self.patience_s)
        for job in self.copying:
            job.give_up()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.tier.flush(until)

    # ------------------------------------------------------------ in the copying threads

    def run(self, job: Job, copy, *arguments) -> None:
        """A copy, whose faults are counted: no one waits for this thread's exceptions."""
        try:
            copy(job, *arguments)
        except Exception as error:
            name = type(error).__name__
            self.faults[name] = self.faults.get(name, 0) + 1
        finally:
            if not job.has_ended:
                job.end()

    def load(self, job: Job, after, saves: set[Future]) -> None:
        """From the tiers into the pool: up to the first block that is not there any more."""
        wait(saves)
        found = []
        for key in job.keys:
            block = None if job.is_given_up else self.tier.get(key)
            if block is None:
                break
            found.append(block)
        if found and job.may_touch():
            self.pages.write(job.blocks[: len(found)], torch.stack(found), after)
            self.loaded_blocks += len(found)
            job.end(len(found))

    def save(self, job: Job, after) -> None:
        """From the pool into the tiers. The blocks are read first, and may be taken then."""
        if not job.may_touch():
            return
        packed = self.pages.read(job.blocks, after)
        job.end(len(job.blocks))
        for key, block in zip(job.keys, packed):
            self.tier.put(key, block)
        self.saved_blocks += len(job.keys)
