"""The speculative engine on a virtual device: scheduler, drafting, verification and choice are the
engine's own; the model and the drafter are a hash, and a clock moves by what they would take.
"""

from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.clock import VirtualClock
from lessons.l14_continuous_batching.sequence import Step
from lessons.toolbox.model.config import ModelConfig
from reference.engine.engine import Engine
from reference.engine.request import EngineSequence
from reference.engine.sampling_params import SamplingParams
from reference.speculation.by_load import ByLoad, speculation_over
from reference.speculation.lookahead import LookaheadScheduler
from reference.speculation.protocol import Draft, Proposer

VOCAB, LONGEST, BLOCK_SIZE = 16, 2**16, 64
CONFIG = ModelConfig("llama", VOCAB, 48, 2, 6, 2, 8, 64, LONGEST)


class Device(NamedTuple):
    """A roofline: a pass takes as long as its slower part, and what the host and each sequence's
    cache add. A drafted token is a pass of the drafter.
    """

    host_ms: float = 2.0
    weights_ms: float = 10.0  # to read them
    token_ms: float = 0.2  # of arithmetic: from 50 tokens on it takes longer than the weights
    sequence_ms: float = 0.02
    draft_ms: float = 0.5
    draft_sequence_ms: float = 0.01

    def pass_s(self, batch: int, tokens: int) -> float:
        """The target over so many tokens of `batch` sequences."""
        slower_ms = max(self.weights_ms, self.token_ms * tokens)
        return (self.host_ms + slower_ms + self.sequence_ms * batch) / 1e3

    def draft_s(self, batch: int, count: int) -> float:
        """`count` drafted tokens for each of `batch` sequences."""
        return count * (self.draft_ms + self.draft_sequence_ms * batch) / 1e3


DEVICE = Device()


def drawn(row: int, position: int, purpose: str) -> float:
    """The random number of a position of a sequence, in [0, 1)."""
    digest = blake2b(f"{row} {position} {purpose}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


def token_at(row: int, position: int) -> int:
    """What the target says there, whatever came before."""
    return int(VOCAB * drawn(row, position, "token"))


class VirtualTarget:
    """In the place of ModelRunner. hidden: [T] int64, the token that follows each."""

    def __init__(self, clock: VirtualClock):
        self.model = torch.nn.Identity()
        self.model.config, self.model.device = CONFIG, torch.device("cpu")
        self.clock = clock
        self.features, self.adapters, self.sight = None, None, None

    def __call__(self, step: Step, tables) -> Tensor:
        self.clock.now_s += DEVICE.pass_s(len(step.chunks), step.num_tokens)
        return torch.tensor(
            [
                token_at(sequence.row, sequence.computed + ahead + 1)
                for sequence, count in step.chunks
                for ahead in range(count)
            ]
        )

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """[len(rows), VOCAB]: all on one token."""
        return one_hot(hidden[rows], VOCAB).float()


class VirtualDrafter(Proposer):
    """Right at position i of a draft with probability rates[i]."""

    taps, pools = None, ()

    def __init__(self, clock: VirtualClock, rates: list[float]):
        self.clock, self.rates = clock, rates

    def most(self, sequence: EngineSequence) -> int:
        return len(self.rates)

    def propose(self, sequences, counts, tables) -> list[Draft]:
        """For each sequence counts[b] tokens."""
        self.clock.now_s += DEVICE.draft_s(len(sequences), max(counts))
        return [Draft(self.guesses(s, count)) for s, count in zip(sequences, counts)]

    def guesses(self, sequence: EngineSequence, count: int) -> list[int]:
        """The target's tokens, or others."""
        row, found = sequence.row, []
        for place, rate in enumerate(self.rates[:count]):
            position = sequence.computed + 1 + place
            is_wrong = drawn(row, position, "guess") >= rate
            found.append((token_at(row, position) + is_wrong) % VOCAB)
        return found

    def observe(self, ran, features, tables) -> None:
        """The hash knows everything."""

    def fork(self, parent, child) -> None:
        """Nothing is kept."""

    def forget(self, sequence) -> None:
        """Nothing is kept."""


def new_engine(batch: int, rates: list[float], chooser: ByLoad, clock: VirtualClock) -> Engine:
    """With room for `batch` sequences. chooser: anything that has count_for."""
    scheduler = LookaheadScheduler(
        BlockManager(batch * LONGEST // BLOCK_SIZE, BLOCK_SIZE),
        max_num_seqs=batch,
        proposer=VirtualDrafter(clock, rates),
        num_speculative_tokens=len(rates),
        chooser=chooser,
    )
    runner = VirtualTarget(clock)
    speculation = speculation_over(runner, scheduler)
    return Engine(runner, scheduler, None, LONGEST, speculation=speculation)


class Always:
    """A chooser that does not choose. count: K."""

    def __init__(self, count: int):
        self.count = count

    def count_for(self, batch: int) -> int:
        """K, whatever the load."""
        return self.count


def tokens_per_s(
    batch: int, rates: list[float], count: int | None, steps: int
) -> tuple[float, list[int]]:
    """Tokens per virtual second of `batch` requests that decode together for so many steps, and the
    K of each step. count: K; None: chosen. 0 is an engine without speculation: it drafts nothing.
    """
    clock = VirtualClock()
    chooser = ByLoad(len(rates), clock=clock) if count is None else Always(count)
    engine = new_engine(batch, rates, chooser, clock)
    for index in range(batch):
        params = SamplingParams(temperature=0, max_tokens=LONGEST - 1, detokenize=False)
        engine.add_request(str(index), [1], params)
    engine.advance()  # the prompts
    sequences = [request.sequences[0] for request in engine.requests.values()]
    begin_s, counts = clock.now_s, []
    for _ in range(steps):
        engine.advance()
        counts.append(chooser.count)
    assert all(s.output == expected(s) for s in sequences), "other tokens than the target's"
    emitted = sum(len(sequence.output) - 1 for sequence in sequences)
    return emitted / (clock.now_s - begin_s), counts


def expected(sequence: EngineSequence) -> list[int]:
    """The answer so far, without an engine."""
    first = len(sequence.prompt)
    return [token_at(sequence.row, first + at) for at in range(len(sequence.output))]
