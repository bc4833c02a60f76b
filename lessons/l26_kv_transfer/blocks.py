"""Lesson 13's prefix cache, with more room elsewhere.

    blocks = TieredBlockManager(num_blocks, block_size, HashBlocks(block_size), connector)
    scheduler = ChunkedScheduler(blocks, host=Elsewhere(blocks))

A block is saved when it is full, and not when the pool takes it back: then no one has to wait
until it is read. A load puts blocks into the prefix cache, and not into a request: they are free
blocks that are known, and the request finds them as it finds all others. So nothing else of the
scheduler changes, and a request that ends, or is preempted, while its load runs needs no rule of
its own.
"""

from collections.abc import Callable

from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.naive import FIRST, HashBlocks
from lessons.l14_continuous_batching.sequence import Sequence
from lessons.l15_chunked_prefill.preemption import Nowhere
from lessons.l26_kv_transfer.connector import Job, KVConnector
from lessons.l26_kv_transfer.tiers import Key

TOKEN_BITS = 32  # of a name; an adapter's number is above them


def plain(name: int) -> int:
    """A name without the numbers that only this process gives: to an adapter, which the salt names,
    and to the rows of pictures (below zero), which it names, too.
    """
    return -1 if name < 0 else name & ((1 << TOKEN_BITS) - 1)


class TieredBlockManager(CachingBlockManager):
    """A CachingBlockManager that saves what is full, and gets back what was saved.

    salts: of each sequence that was announced, a hash of what its K and V depend on besides its
    tokens. saved: the keys of its blocks that the connector was told of. loads: what it asked for.
    """

    def __init__(self, num_blocks: int, block_size: int, cache: HashBlocks, connector: KVConnector):
        super().__init__(num_blocks, block_size, cache)
        self.connector = connector
        self.salts: dict[int, Key] = {}
        self.saved: dict[int, list[Key]] = {}
        self.loads: dict[int, Job] = {}
        self.copying: dict[Job, tuple[list[int], list[int]]] = {}  # see `hold`
        self.asked = self.found = 0  # tokens

    def announce(self, sequence: int, salt: Key) -> None:
        """Before anything of a sequence is loaded or saved. salt: FIRST, if tokens say it all."""
        self.salts[sequence] = salt
        self.saved.setdefault(sequence, [])

    def leave(self, sequence: int) -> None:
        """Forget what was announced."""
        for known in (self.salts, self.saved, self.loads):
            known.pop(sequence, None)

    def keys(self, sequence: int, names: list[int], start: int, end: int, last: Key) -> list[Key]:
        """Keys of the blocks from `start` to `end` of a sequence, the same in every process. last:
        the key of the block before `start`; the salt, if there is none.
        """
        if self.salts[sequence] != FIRST:
            names = [plain(name) for name in names]
        return list(self.cache.hashes(names, end, start, last))

    # ------------------------------------------------------------ out

    def remember(self, sequence: int, tokens: list[int]) -> None:
        super().remember(sequence, tokens)
        if (
            sequence in self.salts
        ):  # else it was never announced: a beam's, which lives for a search
            self.save(sequence, tokens)

    def save(self, sequence: int, tokens: list[int]) -> None:
        """Begin to save the full blocks that the connector was not told of."""
        start, new = self.untold(sequence, tokens)
        self.saved[sequence] += new
        job = self.start_save(sequence, new, self.tables[sequence][start : start + len(new)])
        if job is not None:
            self.hold(job, [], [])
            self.pool.share(job.blocks)

    def untold(self, sequence: int, tokens: list[int]) -> tuple[int, list[Key]]:
        """(how many blocks the connector was told of, the keys of the full ones after them)."""
        told = self.saved[sequence]
        last = told[-1] if told else self.salts[sequence]
        start, end = len(told), len(tokens) // self.block_size
        return start, self.keys(sequence, tokens, start, end, last)

    def start_save(self, sequence: int, keys: list[Key], blocks: list[int]) -> Job | None:
        """Begin to copy these blocks of a sequence; None: nothing has to be copied."""
        return self.connector.start_save(keys, blocks)

    def fork(self, parent: int, child: int) -> None:
        super().fork(parent, child)
        if parent in self.salts:
            self.announce(child, self.salts[parent])
            self.saved[child] = list(self.saved[parent])

    def free(self, sequence: int) -> None:
        super().free(sequence)
        self.leave(sequence)

    # ------------------------------------------------------------ in

    def begin_load(self, sequence: Sequence) -> Job | None:
        """Begin to load what follows the blocks that the pool knows of a waiting sequence. None:
        nothing does, or there is no room for all of the sequence.
        """
        names = list(sequence.known_as)
        known = self.cache.match(names)
        # - 1, because the last token has to be computed: its logits were not stored
        whole = (len(names) - 1) // self.block_size
        keys = self.keys(sequence.row, names, 0, whole, self.salts[sequence.row])
        # Before anything is taken, because taking a free block makes the cache forget it.
        self.pool.share(known)
        count = 0
        if self.blocks_for(len(names)) - len(known) <= self.num_free:
            count = self.connector.matched(keys[len(known) :])
            self.asked += (len(keys) - len(known)) * self.block_size
        if not count:
            self.pool.release(reversed(known))
            return None
        end = len(known) + count
        job = self.connector.start_load(keys[len(known) : end], self.pool.take(count))
        self.hold(job, known, names[: end * self.block_size])
        return job

    def hold(self, job: Job, known: list[int], names: list[int]) -> None:
        """The job owns its blocks until it has ended. known: blocks before those that it loads;
        names: of the tokens of both.
        """
        self.copying[job] = known, names

    def settle(self) -> None:
        """Give back the blocks of copies that have ended. Those that arrived are known now."""
        for job in self.connector.finished():
            known, names = self.copying.pop(job)
            blocks = known + job.blocks
            if job.is_load:
                whole = len(known) + job.arrived
                self.cache.insert(names[: whole * self.block_size], blocks[:whole])
                self.found += job.arrived * self.block_size
            self.pool.release(reversed(blocks))

    def can_grow(self, sequence: int, held: int, tokens: int) -> bool:
        if not super().can_grow(sequence, held, tokens) and self.copying:
            # Because a copy takes less time than to compute a preempted request again.
            self.connector.wait()
            self.settle()
        return super().can_grow(sequence, held, tokens)


class Elsewhere(Nowhere):
    """The scheduler's `host`: a waiting request whose blocks are on their way is not admitted, and
    the running ones go on meanwhile. A preempted request needs nothing: its full blocks are saved.

    salt_of: a hash of what the K and V of a sequence depend on besides its tokens; FIRST: nothing.
    """

    def __init__(
        self, blocks: TieredBlockManager, salt_of: Callable[[Sequence], Key] = lambda _: FIRST
    ):
        self.blocks, self.salt_of = blocks, salt_of
        self.refused: tuple[int, int] = (-1, 0)  # who got no load, and how many blocks were free

    @property
    def asked(self) -> int:
        return self.blocks.asked

    @property
    def found(self) -> int:
        return self.blocks.found

    def fetch(self, sequence: Sequence) -> None:
        blocks, row = self.blocks, sequence.row
        if row in blocks.loads:
            return
        blocks.announce(row, self.salt_of(sequence))
        refused, too_few = self.refused
        if not sequence.reuses_prefix or (refused == row and blocks.num_free <= too_few):
            return  # because a search is as long as the prompt
        job = blocks.begin_load(sequence)
        if job is None:
            self.refused = (row, blocks.num_free)
        else:
            blocks.loads[row] = job

    def has(self, sequence: Sequence) -> bool:
        """Whether its blocks are on their way."""
        return self.blocks.loads.get(sequence.row) in self.blocks.copying

    def bring_back(self, sequence: Sequence) -> bool:
        return False  # not yet: once they are here, the prefix cache knows them

    def forget(self, sequence: Sequence) -> None:
        self.blocks.leave(sequence.row)

    def settle(self) -> None:
        self.blocks.settle()

    def wait(self) -> None:
        self.blocks.connector.wait()

    def close(self) -> None:
        self.blocks.connector.close()
