"""What the tests and the notebook share: versions of the loop and of the device with one planted
slip each.
"""

from lessons.l25_one_step_ahead.device import PLACEHOLDER
from lessons.l25_one_step_ahead.lab.virtual import VirtualDevice
from lessons.l25_one_step_ahead.optimized import OneStepAhead

# ---------------------------------------------------------------- the loop


class KeepsTheExtraToken(OneStepAhead):
    """A request that has ended gets the token of the pass that was launched meanwhile."""

    def sample(self, step, ahead):
        wanted = self.scheduler.finish(step)
        self.device.sample(ahead, wanted)
        for sequence in wanted:
            sequence.append(PLACEHOLDER)
        self.scheduler.leave()


class CountsBeforeItTells(OneStepAhead):
    """Tells the prefix cache about tokens that are placeholders still."""

    def step(self):
        step = self.scheduler.schedule()
        ahead = self.device.launch(step, self.running) if step.chunks else None
        ending = self.scheduler.finish(step)
        self.tell()
        if ahead is not None:
            here = set(self.scheduler.running)
            wanted = [sequence for sequence in ending if sequence in here]
            self.device.sample(ahead, wanted)
            for sequence in wanted:
                sequence.append(PLACEHOLDER)
            self.scheduler.leave()
        self.running = ahead


class ForgetsThePreempted(OneStepAhead):
    """A request that ended while it was sent away is computed again, and goes on."""

    def tell(self):
        waiting, self.scheduler.waiting = self.scheduler.waiting, []
        super().tell()
        self.scheduler.waiting = waiting


class LeavesThePlaceholder(OneStepAhead):
    """An aborted request still ends with the token that it waits for."""

    def abort(self, sequence):
        self.scheduler.abort(sequence)


class AnswersTheAborted(OneStepAhead):
    """A request that was aborted while it was sampled gets its token all the same."""

    def tell(self):
        if self.running is not None:
            for sequence in self.running.sequences:
                if sequence.output[-1:] != [PLACEHOLDER]:
                    sequence.append(PLACEHOLDER)
        super().tell()


# ---------------------------------------------------------------- the device


class PlaceholderIsAnId(VirtualDevice):
    """Runs the placeholder itself, as token 0."""

    def write(self, chunk, before):
        ids = [0 if token == PLACEHOLDER else token for token in chunk.tokens]
        super().write(chunk._replace(tokens=ids), before)


class RowsByPlace(VirtualDevice):
    """The i-th sequence of a pass takes the i-th token of the one before, though some have gone."""

    def launch(self, step, before=None):
        self.place = 0
        return super().launch(step, before)

    def placed(self, chunk, before):
        placed = super().placed(chunk, before)
        if placed.row is None:
            return placed
        row, self.place = self.place, self.place + 1
        return placed._replace(row=row)


class PromptsOnAnotherStream(VirtualDevice):
    """A pass that needs no earlier token does not wait for the passes before it. So a late pass
    writes into blocks that a new request has been given since.
    """

    def launch(self, step, before=None):
        passed = super().launch(step, before)
        work = self.stream.waiting[-1]
        if not any(PLACEHOLDER in chunk.tokens for chunk in step.chunks):
            work.run()
            work.run = lambda: None
        return passed


class ReadsTheHostLate(VirtualDevice):
    """Looks up a chunk when the pass runs, in lists that the host has gone on changing."""

    def launch(self, step, before=None):
        passed = super().launch(step, before)
        work, copies = self.stream.waiting[-1], list(step.copies)

        def run():
            here = [chunk for chunk in step.chunks if chunk.sequence.row in self.blocks.tables]
            self.run(passed, [self.placed(chunk, before) for chunk in here], copies, before)

        work.run = run
        return passed


LOOP_SLIPS = (
    KeepsTheExtraToken,
    CountsBeforeItTells,
    ForgetsThePreempted,
    LeavesThePlaceholder,
    AnswersTheAborted,
)
DEVICE_SLIPS = (PlaceholderIsAnId, RowsByPlace, PromptsOnAnotherStream, ReadsTheHostLate)
FOUND_BY = (AssertionError, ValueError, KeyError, IndexError, TypeError, AttributeError)
