"""Who is next: users share the engine, not requests. A user who sends a hundred requests gets as
much as one who sends one, until that one request is answered.

Read `FairQueue._number`. Time is counted in tokens, not in seconds. Each user has a line of tokens,
on which the user's requests are laid end to end. The request with the smallest start on its line is
next, whichever user sent it. A user who comes while none of the user's requests is waiting starts
where the engine is. So a user saves up no claim by asking for nothing, and pays nothing for tokens
that no other user wanted.

What an answer costs is only known when it has ended. Until then a request is laid out with the
tokens that it may take at most, and what it did not take is given back to its user.

Sources: Goyal, Vin and Cheng 1996, Start-time Fair Queuing, sections 2 and 3 (lines of tokens and
the bound); Parekh and Gallager 1993 (where the engine is: its work over those who are there); Sheng
et al. 2024, Fairness in Serving Large Language Models (tokens as the measure, and answers of
unknown length).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lessons.l14_continuous_batching.sequence import Sequence
from lessons.toolbox.model.arguments import check_positive

IDLE_USERS_KEPT = 64  # before the first look for users who can be forgotten


@dataclass(eq=False)
class Ticket:
    """A request's place on its user's line. cost: tokens that it may take at most, and once it has
    left those that it took. not_before: where the engine stood when it came, if none of its user's
    requests was waiting then. start: in tokens, by which requests are compared.
    """

    user: str
    cost: float
    not_before: float
    start: float = 0.0
    has_begun: bool = False
    has_left: bool = False

    @property
    def is_waiting(self) -> bool:
        return not self.has_begun and not self.has_left


@dataclass
class Line:
    """A user's tickets in the order of their arrival, and where the first of them may start."""

    base: float
    end: float
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
        self.now = 0.0  # where the engine is, in tokens for a weight of 1
        self.lines: dict[str, Line] = {}
        self.look_at = IDLE_USERS_KEPT

    def arrive(self, user: str, cost: float) -> Ticket:
        """A request of at most `cost` tokens comes."""
        if len(self.lines) >= self.look_at:
            self._forget_idle()
        line = self.lines.setdefault(user, Line(self.now, self.now))
        waits_already = any(ticket.is_waiting for ticket in reversed(line.tickets))
        ticket = Ticket(user, cost, not_before=0.0 if waits_already else self.now)
        line.tickets.append(ticket)
        self._number(user)
        return ticket

    def begin(self, ticket: Ticket) -> None:
        """It runs now. From here on its number is fixed, because the order of those who run
        must.
        """
        if not ticket.has_begun:
            ticket.has_begun = True
            self.now = max(self.now, ticket.start)

    def leave(self, ticket: Ticket, used: float) -> None:
        """It has ended, however; used: the tokens that it took. The numbers of the same user's
        waiting requests may fall, so sort what is sorted by them again.
        """
        # Each of those who are here has got so much more of the engine's work, if it was fair. So
        # it moves on even if all who come are new, and each that waits is reached one day.
        here = sum(self._weight(user) for user, line in self.lines.items() if line.tickets)
        self.now += used / here
        ticket.has_left, ticket.cost = True, used
        line = self.lines[ticket.user]
        while line.tickets and line.tickets[0].has_left:
            first = line.tickets.pop(0)
            line.base = max(line.base, first.not_before) + self._length(first)
        self._number(ticket.user)

    def _number(self, user: str) -> None:
        """Lay the user's requests end to end."""
        line = self.lines[user]
        end = line.base
        for ticket in line.tickets:
            start = max(end, ticket.not_before)
            if not ticket.has_begun:
                ticket.start = start
            end = start + self._length(ticket)
        line.end = end

    def _length(self, ticket: Ticket) -> float:
        return ticket.cost / self._weight(ticket.user)

    def _weight(self, user: str) -> float:
        return self.weights.get(user, 1.0)

    def _forget_idle(self) -> None:
        """Users who ask for nothing, and whose line the engine has passed: they would start where
        it is in any case. If no user asks for anything, these are all users.
        """
        is_idle = not any(line.tickets for line in self.lines.values())
        self.lines = {
            user: line
            for user, line in self.lines.items()
            if line.tickets or (line.end > self.now and not is_idle)
        }
        self.look_at = IDLE_USERS_KEPT + 2 * len(self.lines)


@dataclass(eq=False)
class UserSequence(Sequence):
    """A sequence of a scheduler, and whose it is."""

    ticket: Ticket | None = None


def by_fair_share(sequence: UserSequence) -> tuple:
    """The scheduler's order: the smallest number first, among equals the order of arrival."""
    return (sequence.ticket.start, sequence.row)
