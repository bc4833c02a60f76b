"""What the tests and exercises of this lesson share: queues, doors and mailboxes with one planted
slip each.
"""

from lessons.l22_serving.admission import AdmissionControl
from lessons.l22_serving.fair import FairQueue, Ticket

# ---------------------------------------------------------------- order of users


class ByRequests(FairQueue):
    """Counts requests, not tokens."""

    def _length(self, ticket: Ticket) -> float:
        return 1.0


class SavesUp(FairQueue):
    """Who asked for nothing for long has a claim on all that others got meanwhile."""

    def arrive(self, user, cost):
        ticket = super().arrive(user, cost)
        line = self.lines[user]
        if line.tickets == [ticket]:
            line.base = ticket.not_before = 0.0
            self._number(user)
        return ticket


class NeverGivesBack(FairQueue):
    """Charges what an answer might have taken."""

    def leave(self, ticket, used):
        super().leave(ticket, ticket.cost)


class PunishesThePast(FairQueue):
    """A user's line goes on where it ended, although no other user wanted the engine then."""

    def arrive(self, user, cost):
        ticket = super().arrive(user, cost)
        ticket.not_before = 0.0
        self._number(user)
        return ticket

    def begin(self, ticket):
        ticket.has_begun = True  # and newcomers start at the beginning

    def leave(self, ticket, used):
        now = self.now
        super().leave(ticket, used)
        self.now = now


class StandsStill(FairQueue):
    """The engine is at the largest start of those that have begun, and nowhere else."""

    def leave(self, ticket, used):
        now = self.now
        super().leave(ticket, used)
        self.now = now


class RemembersEveryUser(FairQueue):
    """Keeps a line for each user that it has ever seen."""

    def _forget_idle(self):
        pass


FAIR_SLIPS = (ByRequests, SavesUp, NeverGivesBack, PunishesThePast, StandsStill, RemembersEveryUser)

# ---------------------------------------------------------------- the door


class CountsTheBatch(AdmissionControl):
    """Takes a request that finds a free place for one that waits."""

    def admit(self, *args, **arguments):
        queue = self.queue
        self.queue = lambda: queue()._replace(free_places=0)
        try:
            super().admit(*args, **arguments)
        finally:
            self.queue = queue


class RetriesAtOnce(AdmissionControl):
    """Tells all to come again in a second."""

    @staticmethod
    def retry_after_s(wait_s):
        return 1


class BelievesLimits(AdmissionControl):
    """Predicts the wait as if each answer were as long as it may be."""

    def wait_s(self, waiting):
        return self.rate.seconds_for(sum(one.prompt_tokens + one.max_tokens for one in waiting))


ADMISSION_SLIPS = (CountsTheBatch, RetriesAtOnce, BelievesLimits)
