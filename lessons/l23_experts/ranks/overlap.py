"""Two halves of a batch in turns: one computes while the rows of the other travel. Drawn as a time
line, before anything runs.

    one = schedule(parts, num_layers=4, batches=[128])
    two = schedule(parts, num_layers=4, batches=[64, 64])
    end_of(one) / end_of(two)                                  # what the halves gain, or lose

A GPU has two lanes that work at the same time: it computes, and it sends and receives. In one batch
each part of a layer waits for the part before, so one lane is always idle:

    compute   attention |                   | experts |                | attention …
    network             | dispatch          |         | combine        |

With two halves, one's parts fill the other's gaps. Nothing is free: a half computes as long as the
whole if its time goes into reading weights, because each half reads all of them again.

Whatever is ready first runs first in a lane, and nothing is interrupted. Source: DeepSeek-V3
(2024), section 3.4; vLLM's Dual Batch Overlap (docs/design/dbo.md) runs the same idea with a thread
for each half, as halves.py does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lessons.toolbox.model.arguments import check_whole, refuse

COMPUTE, NETWORK = "compute", "network"


@dataclass(frozen=True)
class Part:
    """A part of a layer. needs: the parts of the same layer that it waits for; none: it waits for
    the whole layer before. It takes start_s (a launch, a latency), and then token_s for each token,
    but least_s at least (reading its weights).
    """

    name: str
    lane: str
    needs: tuple[str, ...]
    token_s: float
    least_s: float = 0.0
    start_s: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        """How long it runs for so many tokens."""
        return self.start_s + max(self.least_s, num_tokens * self.token_s)


class Piece(NamedTuple):
    """A part of one layer for one batch, and when it runs, in seconds."""

    batch: int
    layer: int
    name: str
    lane: str
    start_s: float
    end_s: float


def schedule(parts: Sequence[Part], num_layers: int, batches: Sequence[int]) -> list[Piece]:
    """When each part of each layer runs, in the order in which they start. batches: how many tokens
    each has. Raises ValueError.
    """
    check_whole(num_layers=num_layers)
    check_parts(parts)
    progress = [Progress(batch, parts) for batch in range(len(batches))]
    free_s = dict.fromkeys((COMPUTE, NETWORK), 0.0)
    pieces = []
    while running := [each for each in progress if each.layer < num_layers]:
        # of the parts that could start first, that of the earlier layer, then the earlier part
        start_s, layer, number, batch = min(
            (max(ready_s, free_s[parts[number].lane]), each.layer, number, each.batch)
            for each in running
            for number, ready_s in each.ready()
        )
        part = parts[number]
        end_s = start_s + part.seconds(batches[batch])
        pieces.append(Piece(batch, layer, part.name, part.lane, start_s, end_s))
        free_s[part.lane] = end_s
        progress[batch].ran(number, end_s)
    return sorted(pieces, key=lambda piece: (piece.start_s, piece.batch))


class Progress:
    """How far a batch is. layer: the one that it is in, whose parts wait for all of the layer
    before; ends_s: when those parts of it that ran end, by name.
    """

    def __init__(self, batch: int, parts: Sequence[Part]):
        self.batch, self.parts = batch, parts
        self.layer, self.began_s = 0, 0.0
        self.ends_s: dict[str, float] = {}

    def ready(self) -> Iterator[tuple[int, float]]:
        """(number, second) of each part that waits for nothing that has not run."""
        for number, part in enumerate(self.parts):
            if part.name not in self.ends_s and all(name in self.ends_s for name in part.needs):
                yield number, max((self.ends_s[name] for name in part.needs), default=self.began_s)

    def ran(self, number: int, end_s: float) -> None:
        """Note the end of a part; after the last one the next layer begins."""
        self.ends_s[self.parts[number].name] = end_s
        if len(self.ends_s) == len(self.parts):
            self.began_s = max(self.ends_s.values())
            self.layer, self.ends_s = self.layer + 1, {}


def check_parts(parts: Sequence[Part]) -> None:
    """Raise ValueError unless each part waits for parts before it, in a lane that is known."""
    seen: set[str] = set()
    for part in parts:
        if part.lane not in (COMPUTE, NETWORK):
            refuse(f"the lane of {part.name}", part.lane, f"{COMPUTE} or {NETWORK}")
        if not set(part.needs) <= seen:
            refuse(f"what {part.name} needs", part.needs, "names of parts before it")
        seen.add(part.name)


def end_of(pieces: Sequence[Piece]) -> float:
    """Seconds until everything has run."""
    return max(piece.end_s for piece in pieces)


def busy_s(pieces: Sequence[Piece], lane: str) -> float:
    """Seconds in which a lane works."""
    return sum(piece.end_s - piece.start_s for piece in pieces if piece.lane == lane)


def gain(parts: Sequence[Part], num_layers: int, num_tokens: int) -> float:
    """How many times as fast two halves are as one batch of so many tokens; below 1 they lose."""
    half = num_tokens // 2
    one = schedule(parts, num_layers, [num_tokens])
    two = schedule(parts, num_layers, [num_tokens - half, half])
    return end_of(one) / end_of(two)
