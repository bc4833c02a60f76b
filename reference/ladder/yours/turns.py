"""Exercise 22.2, users who take turns, where lesson 22 numbers requests."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from lessons.l22_serving.fair import Ticket


class Wish(NamedTuple):
    """What the exercise is told of a request. arrival: the tokens of the requests that had begun
    when it came, because the exercise's engine serves one after the other.
    """

    arrival: float
    user: str
    tokens: float


def fair_queue(yours: Callable, original: type) -> Callable:
    """serving_order in place of FairQueue: each time a request comes or leaves, it is asked for the
    order of all since the engine was last without one, and those that wait are numbered by it.
    """

    class Turns:
        """As FairQueue, for the engine. What an answer did not take is not given back, because the
        exercise knows of each request's tokens from the beginning.
        """

        def __init__(self, weights: Mapping[str, float] | None = None):
            self.weights = dict(weights or {})
            self.forget()

        def forget(self) -> None:
            """Begin anew: no request is there, so no user has a claim."""
            self.wishes: list[tuple[Wish, Ticket]] = []
            self.begun_tokens = 0.0

        def arrive(self, user: str, cost: float) -> Ticket:
            ticket = Ticket(user, cost, not_before=self.begun_tokens)
            self.wishes.append((Wish(self.begun_tokens, user, cost), ticket))
            self.number()
            return ticket

        def begin(self, ticket: Ticket) -> None:
            if not ticket.has_begun:
                ticket.has_begun = True
                self.begun_tokens += ticket.cost

        def leave(self, ticket: Ticket, used: float) -> None:
            ticket.has_left = True
            if not ticket.has_begun:  # it never was in the engine
                self.wishes = [one for one in self.wishes if one[1] is not ticket]
            if all(each.has_left for _, each in self.wishes):
                self.forget()
            self.number()

        def number(self) -> None:
            """Number those that wait, after all that have begun."""
            order = yours([wish for wish, _ in self.wishes], self.weights)
            tickets = [self.wishes[index][1] for index in order]
            begun = sum(ticket.has_begun for ticket in tickets)
            waiting = [ticket for ticket in tickets if ticket.is_waiting]
            for place, ticket in enumerate(waiting):
                ticket.start = float(begun + place)

    return Turns
