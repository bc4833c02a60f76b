"""async_scheduling=True where the model is in workers: while they run a step, the engine's process
tells the one before it and schedules the next. The next can begin when the tokens have come.
"""

import torch

from lessons.l25_one_step_ahead.model_device import Drawn
from reference.engine.request import EngineSequence
from reference.features.ahead import Ahead
from reference.parallel.remote_sampler import Sampling
from reference.parallel.runner import RemoteHidden


class UnderWay:
    """In the place of Launched: a step that the workers sample."""

    def __init__(self, sampling: Sampling):
        self.sampling, self.sequences = sampling, sampling.sequences

    @property
    def tokens(self) -> Drawn:
        """Wait for them."""
        return Drawn.of(torch.tensor([emitted.tokens[0] for emitted in self.sampling.read()]))

    def read(self) -> list[tuple]:
        """As Launched."""
        found = zip(self.sequences, self.sampling.read())
        return [(sequence, each.tokens[0], each.logprobs[0]) for sequence, each in found]


class RemoteAhead(Ahead):
    """An engine that is one step ahead of its workers."""

    def begin(
        self, hidden: RemoteHidden, rows: list[int], sequences: list[EngineSequence]
    ) -> UnderWay:
        """As in Ahead; the workers draw."""
        return UnderWay(self.engine.emit.begin(hidden, rows, sequences))
