"""Random histories for a loop: who comes when, with what, who gives up, and what ends an answer.

    history = History.drawn(seed)
    history.run(OneStepAhead)       # AssertionError at the first answer that is not its own

A seed is all that a failure needs to be repeated.
"""

from dataclasses import dataclass, replace
from random import Random

from lessons.l02_naive_attention.sampling import GREEDY
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l13_prefix_caching.optimized import RadixTree
from lessons.l14_continuous_batching.clock import VirtualClock
from lessons.l14_continuous_batching.optimized import ContinuousScheduler
from lessons.l14_continuous_batching.sequence import Sequence
from lessons.l15_chunked_prefill.lab.virtual import VOCAB, answer
from lessons.l15_chunked_prefill.naive import PrefillFirstScheduler
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l25_one_step_ahead.lab.virtual import VirtualDevice
from lessons.l25_one_step_ahead.stream import VirtualStream

SCHEDULERS = (ChunkedScheduler, ChunkedScheduler, PrefillFirstScheduler, ContinuousScheduler)
CACHES = (None, HashBlocks, RadixTree)
POOLS = ((8, 4), (8, 4), (12, 4), (14, 3), (45, 1), (60, 4))  # (num_blocks, block_size)
STEPS = ((1, 1), (3, 7), (4, 16), (8, 64), (8, 64))  # (max_num_seqs, max_num_batched_tokens)
COMMON = [(7 * i) % 89 for i in range(12)]  # how the prompts of some requests begin
MOST_STEPS = 5_000


@dataclass(frozen=True)
class Asked:
    """A request. arrives, aborts: in which step of the loop. tells: after how many tokens its own
    client gives up, in the middle of being told; None: never.
    """

    row: int
    prompt: tuple[int, ...]
    limit: int
    stops: frozenset[int]
    arrives: int
    aborts: int | None
    tells: int | None

    @classmethod
    def drawn(cls, row: int, draws: Random) -> "Asked":
        """A random request; half of them begin alike, and so share a prefix."""
        length = draws.randint(1, 24)
        own = [draws.randrange(VOCAB) for _ in range(length)]
        prompt = (COMMON + own)[:length] if draws.random() < 0.5 else own
        stops = draws.sample(range(VOCAB), draws.choice((0, 5, 20)))
        aborts = draws.randint(0, 40) if draws.random() < 0.2 else None
        tells = draws.randint(1, 6) if draws.random() < 0.1 else None
        limit, arrives = draws.randint(1, 20), draws.randint(0, 12)
        return cls(row, tuple(prompt), limit, frozenset(stops), arrives, aborts, tells)

    def new_sequence(self) -> Sequence:
        """For a scheduler."""
        return Sequence(self.row, list(self.prompt), self.limit, GREEDY, self.stops)

    def alone(self) -> list[int]:
        """Its answer when nothing else is there."""
        tokens = answer(self.row, list(self.prompt), self.limit)
        ends = [at for at, token in enumerate(tokens, 1) if token in self.stops]
        return tokens[: ends[0]] if ends else tokens


@dataclass(frozen=True)
class History:
    """Requests, and the scheduler and pool that serve them."""

    asked: tuple[Asked, ...]
    scheduler: type
    cache: type | None
    pool: tuple[int, int]
    step: tuple[int, int]

    @classmethod
    def drawn(cls, seed: int) -> "History":
        """The history of a seed."""
        draws = Random(seed)
        asked: list[Asked] = []
        for row in range(draws.randint(1, 10)):
            asked.append(Asked.drawn(row, draws))
            if draws.random() < 0.3:  # the same prompt again, at the same time, by another client
                first = draws.choice(asked)
                again = replace(asked[-1], prompt=first.prompt, arrives=first.arrives)
                asked[-1] = again
        scheduler = draws.choice(SCHEDULERS)
        # lesson 14 admits by the longest answer and knows no prefix cache
        cache = None if scheduler is ContinuousScheduler else draws.choice(CACHES)
        return cls(tuple(asked), scheduler, cache, draws.choice(POOLS), draws.choice(STEPS))

    def run(self, loop: type, device: type = VirtualDevice) -> "Served":
        """Serve it. Raises AssertionError if an answer is not the one of the request alone, if one
        is told otherwise than it is, or if a block leaks.
        """
        served = Served(self, loop, device)
        served.run()
        served.check()
        return served


class Served:
    """A history under way. told: {row: tokens, in the order in which a client gets them}."""

    def __init__(self, history: History, loop: type, device: type):
        num_blocks, block_size = history.pool
        if history.cache is None:
            self.blocks = BlockManager(num_blocks, block_size)
        else:
            cache = history.cache(block_size)
            self.blocks = CachingBlockManager(num_blocks, block_size, cache)
        self.history = history
        self.clock = VirtualClock()
        self.device = device(self.blocks, VirtualStream(self.clock), pass_s=1.0)
        scheduler = history.scheduler(self.blocks, *history.step)
        self.loop = loop(scheduler, self.device, self.on_token)
        self.sequences: dict[int, Sequence] = {}
        self.told: dict[int, list[int]] = {}
        self.gone: set[int] = set()

    def run(self) -> None:
        """All steps of it."""
        coming = sorted(self.history.asked, key=lambda asked: asked.arrives)
        steps = 0
        while coming or not self.loop.is_idle:
            while coming and coming[0].arrives <= steps:
                self.arrive(coming.pop(0))
            for asked in self.history.asked:
                if asked.aborts == steps:
                    self.give_up(asked)
            self.loop.step()
            steps += 1
            assert steps < MOST_STEPS, "a request starves"

    def arrive(self, asked: Asked) -> None:
        """Hand a request to the scheduler, which may refuse one that never fits."""
        sequence = asked.new_sequence()
        try:
            self.loop.scheduler.add(sequence)
        except ValueError:
            return
        self.sequences[asked.row], self.told[asked.row] = sequence, []

    def give_up(self, asked: Asked) -> None:
        """A client that wants no more. Lesson 14's scheduler knows no abort."""
        is_here = asked.row in self.sequences and asked.row not in self.gone
        if is_here and self.history.scheduler is not ContinuousScheduler:
            self.loop.abort(self.sequences[asked.row])
            self.gone.add(asked.row)

    def on_token(self, row: int, token: int) -> None:
        """Note what a client is told, and let it give up at that."""
        assert row not in self.gone, "told a client that has gone"
        self.told[row].append(token)
        asked = self.history.asked[row]
        if len(self.told[row]) == asked.tells:
            self.give_up(asked)

    def check(self) -> None:
        """What must hold in the end."""
        for row, sequence in self.sequences.items():
            alone = self.history.asked[row].alone()
            assert sequence.output == self.told[row], "told otherwise than it is"
            if row in self.gone:
                assert sequence.output == alone[: len(sequence.output)], "another request's tokens"
            else:
                assert sequence.output == alone, "not the tokens of the request alone"
            assert sequence.all_tokens == sequence.prompt + sequence.output
        assert not self.blocks.tables and self.blocks.num_free == self.blocks.num_blocks, "a leak"
        assert not self.device.sampled, "a pass that was sampled and never read"
