"""What the loops of this lesson ask of a device: run a pass, sample it, hand over its tokens.

`launch` and `sample` only say what is to be done, and return at once. `read` waits. A device does
what it is told in the order in which it was told: that order is what keeps everything here right.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from lessons.l14_continuous_batching.sequence import Sequence, Step

PLACEHOLDER = -1  # the place of a token that is sampled, and not yet known to the host


@dataclass(eq=False)
class Pass:
    """A step on its way through the device.

    ending: the sequences whose newest token runs in it, in the order of the chunks. sequences:
    those of them that get a token from it, once it is sampled. logits, tokens: the device's own, of
    `ending` and of `sequences`; the host must not look at them.
    """

    step: Step
    ending: list[Sequence]
    sequences: list[Sequence] = field(default_factory=list)
    logits: Any = None
    tokens: Any = None

    @classmethod
    def of(cls, step: Step) -> "Pass":
        """The pass of a step that has not been counted yet."""
        return cls(step, [chunk.sequence for chunk in step.chunks if chunk.is_sampled])

    def row_of(self, sequence: Sequence) -> int:
        """Which of the pass's tokens is the sequence's. Raises ValueError if none is."""
        return self.sequences.index(sequence)


class Device(Protocol):
    """A model with its memory."""

    def launch(self, step: Step, before: Pass | None = None) -> Pass:
        """Begin a pass. before: the pass whose tokens belong in the placeholders of `step`."""

    def sample(self, passed: Pass, sequences: list[Sequence]) -> None:
        """Begin to draw a token for each of these sequences, which are in `passed.ending`."""

    def read(self, passed: Pass) -> list[int]:
        """The tokens of a pass, in the order of `passed.sequences`. Waits until they are drawn, and
        for nothing that was launched later.
        """
