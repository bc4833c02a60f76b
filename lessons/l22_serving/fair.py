"""Who is next: users share the engine, not requests. A user who sends a hundred requests gets as much
as one who sends one, until that one has all that he asked for.

Read `FairQueue._number`. Time is counted in tokens, not in seconds. Each user's requests are laid
end to end on a line of tokens of his own, and the request that starts first on its line is next,
whoever sent it. Somebody who comes now starts where the engine stands, so nobody saves up a claim
while he asks for nothing, and nobody is punished for what he got while nobody else wanted it.

What an answer costs is only known when it has ended. Until then a request is laid out with the
tokens that it may take at most, and what it did not take is given back to its user.

Sources: Goyal, Vin and Cheng 1996, Start-time Fair Queuing, sections 2 and 3 (the line of tokens and
the bound); Sheng et al. 2024, Fairness in Serving Large Language Models (tokens as the measure, and
answers whose length nobody knows).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lessons.l14_continuous_batching.sequence import Sequence
from lessons.toolbox.model.arguments import check_positive

IDLE_USERS_KEPT = 64  # before the first look for users who can be forgotten


@dataclass(eq=False)
class Ticket:
    """A request's place on its user's line. cost: tokens that it may take at most, and once it has
    left those that it took. start: in tokens, by which requests are compared.
    """

    user: str
    cost: float
    arrived_at: float  # where the engine stood then
    start: float = 0.0
    has_begun: bool = False
    has_left: bool = False


@dataclass
class Line:
    """A user's tickets in the order of their arrival, and where the first of them may start."""

    base: float = 0.0
    end: float = 0.0
    tickets: list[Ticket] = field(default_factory=list)


class FairQueue:
    """Numbers requests so that those of different users take turns by tokens.

    weights: how much more than others a user gets; who is not named has 1. Between two users who
    both have requests waiting all the time, the tokens of the requests that have begun, over the
    weights, never differ by more than one largest request of each.
    """

    def __init__(self, weights: Mapping[str, float] | None = None):
        self.weights = dict(weights or {})
        for user, weight in self.weights.items():
            check_positive(**{f"weights[{user!r}]": weight})
        self.now = 0.0  # where the engine stands: the largest start of those that have begun
        self.lines: dict[str, Line] = {}
        self.look_at = IDLE_USERS_KEPT

    def arrive(self, user: str, cost: float) -> Ticket:
        """A request of at most `cost` tokens comes."""
        if len(self.lines) >= self.look_at:
            self._forget_idle()
        line = self.lines.setdefault(user, Line(base=self.now))
        ticket = Ticket(user, cost, arrived_at=self.now)
        line.tickets.append(ticket)
        self._number(user)
        return ticket

    def begin(self, ticket: Ticket) -> None:
        """It runs now. From here on its number stands, because the order of those who run must."""
        if not ticket.has_begun:
            ticket.has_begun = True
            self.now = max(self.now, ticket.start)

    def leave(self, ticket: Ticket, used: float) -> None:
        """It has ended, however; used: the tokens that it took. The numbers of the same user's waiting
        requests may fall, so sort what is sorted by them again.
        """
        ticket.has_left, ticket.cost = True, used
        line = self.lines[ticket.user]
        while line.tickets and line.tickets[0].has_left:
            first = line.tickets.pop(0)
            line.base = max(line.base, first.arrived_at) + self._length(first)
        self._number(ticket.user)

    def _number(self, user: str) -> None:
        """Lay the user's requests end to end; none starts before where the engine stood when it
        came.
        """
        line = self.lines[user]
        end = line.base
        for ticket in line.tickets:
            start = max(end, ticket.arrived_at)
            if not ticket.has_begun:
                ticket.start = start
            end = start + self._length(ticket)
        line.end = end

    def _length(self, ticket: Ticket) -> float:
        return ticket.cost / self.weights.get(ticket.user, 1.0)

    def _forget_idle(self) -> None:
        """Users who asked for nothing since the engine has passed their line's end: they would start
        where it stands in any case. So memory is that of those who are here.
        """
        self.lines = {
            user: line for user, line in self.lines.items() if line.tickets or line.end > self.now
        }
        self.look_at = IDLE_USERS_KEPT + 2 * len(self.lines)


@dataclass(eq=False)
class UserSequence(Sequence):
    """A sequence of a scheduler, and whose it is."""

    ticket: Ticket | None = None


def by_fair_share(sequence: UserSequence) -> tuple:
    """The scheduler's order: the smallest number first, among equals the order of arrival."""
    return (sequence.ticket.start, sequence.row)
