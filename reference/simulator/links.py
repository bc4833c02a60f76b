"""When K and V are there that one replica sends to another. Read `send`.

Each replica has a link of its own, both ways at once. A prompt that is computed in one step leaves
at the end of it, or layer by layer while the step runs: layer i of L is computed after i / L of it.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Port:
    """A replica's end of its link: until when all that was asked of it will be sent, and received.
    received_s, sent_s: seconds that it was used.
    """

    def __init__(self):
        self.out_free_s = self.in_free_s = 0.0
        self.sent_s = self.received_s = 0.0

    def stop_sending(self, seconds: float, now_s: float) -> None:
        """So much of what was asked of it is not wanted any more."""
        self.out_free_s = max(now_s, self.out_free_s - seconds)
        self.sent_s -= seconds

    def stop_receiving(self, seconds: float, now_s: float) -> None:
        """As `stop_sending`."""
        self.in_free_s = max(now_s, self.in_free_s - seconds)
        self.received_s -= seconds


class Prompts(NamedTuple):
    """Prompts that one step has computed. seconds: what each needs of a link; to: who gets it."""

    began_s: float
    ended_s: float
    seconds: Sequence[float]
    to: Sequence[Port]


def send(source: Port, prompts: Prompts, pieces: int) -> list[float]:
    """When each prompt is with its receiver. pieces: in so many it leaves, a layer each, as they
    are computed; 1: as a whole after the step.

    A layer of all prompts leaves after the layer before it, and not before it is computed. Both
    bounds are straight lines over the layers, so the last layer tells which one counts.
    """
    began_s, ended_s, seconds, to = prompts
    total_s = sum(seconds)
    first_s = max(source.out_free_s, began_s + (ended_s - began_s) / pieces)
    last_s = max(first_s + total_s * (pieces - 1) / pieces, ended_s)  # the last layer's turn
    there_s = []
    for own_s, before_s, port in zip(seconds, accumulate(seconds), to):
        sent_s = last_s + before_s / pieces
        # Another sender may fill the receiver's link at the same time.
        port.in_free_s = max(port.in_free_s, first_s + (before_s - own_s) / pieces) + own_s
        port.received_s += own_s
        there_s.append(max(sent_s, port.in_free_s))
    source.out_free_s = last_s + total_s / pieces
    source.sent_s += total_s
    return there_s
