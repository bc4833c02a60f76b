"""What the running engine has measured: how often drafted tokens stay, and how long steps take."""

from dataclasses import dataclass

# What is believed of a position before its first test, and how many tests that is worth: lesson
# 16's numbers.
BELIEVED, BELIEVED_TESTS = 0.75, 8
RECENT_TESTS = 64  # of a position
RECENT_STEPS = 8  # of one kind
SPIKE = 3  # A step that takes so many times the usual was disturbed by something else.


@dataclass
class RecentMean:
    """A mean in which each sample weighs 1 / count, so what is old fades. most: of `count`."""

    value: float
    count: float
    most: int

    def note(self, sample: float) -> None:
        """One more sample."""
        self.count = min(self.count + 1, self.most)
        self.value += (sample - self.value) / self.count


class Acceptance:
    """How often the drafted token at each position stays, if all before it stayed."""

    def __init__(self, most: int):
        self.rates = [RecentMean(BELIEVED, BELIEVED_TESTS, RECENT_TESTS) for _ in range(most)]

    def note(self, places: int, kept: int) -> None:
        """A sequence had places for so many drafted tokens, and kept so many. A place for which
        nothing was found counts as a rejected token. After the first rejection nothing was tested.
        """
        for position in range(min(places, kept + 1)):
            self.rates[position].note(position < kept)

    def tokens(self, count: int) -> float:
        """Tokens that a sequence is expected to get in a step with `count` drafted ones."""
        total, stays = 1.0, 1.0
        for rate in self.rates[:count]:
            stays *= rate.value
            total += stays
        return total


class MeasuredSeconds:
    """How long something takes for `batch` sequences with K = `count`: its recent mean, or, where
    it was never run, a guess by its size.
    """

    def __init__(self, size_of):
        self.size_of = size_of  # (batch, count) -> tokens
        self.cells: dict[tuple[int, int], RecentMean] = {}

    def note(self, batch: int, count: int, seconds: float) -> None:
        """It has been run."""
        cell = self.cells.get((batch, count))
        if cell is None:
            self.cells[batch, count] = RecentMean(seconds, 1, RECENT_STEPS)
        elif cell.count == 1:
            # because the first run may pay for memory and compilation
            cell.value, cell.count = min(cell.value, seconds), 2
        else:
            cell.note(min(seconds, SPIKE * cell.value))

    def seconds(self, batch: int, count: int) -> float:
        """Measured or guessed; 0 if nothing was measured yet."""
        if (batch, count) in self.cells:
            return self.cells[batch, count].value
        same = {key: cell for key, cell in self.cells.items() if key[1] == count}
        # Other K only where this one says too little: a sequence costs more than its tokens do.
        known = same if len(same) > 1 else self.cells
        points = sorted((self.size_of(*key), cell.value) for key, cell in known.items())
        return on_a_line(points, self.size_of(batch, count))


def on_a_line(points: list[tuple[int, float]], size: int) -> float:
    """Seconds at `size` between its two neighbours. Above the largest point: on the line through
    the smallest and the largest, which is below the curve of a cost that grows faster and faster,
    so a count is rather tried than missed. points: (size, seconds), sorted.
    """
    if not points:
        return 0.0
    below = [point for point in points if point[0] <= size]
    above = [point for point in points if point[0] >= size]
    if not below:
        return above[0][1]  # fewer tokens take no longer
    if above:
        (x0, y0), (x1, y1) = below[-1], above[0]
    else:
        (x0, y0), (x1, y1) = points[0], points[-1]
        if x0 == x1:
            return y1 * size / x1  # one point: at most in proportion
        y0 = min(y0, y1)
    return y0 if x0 == x1 else y0 + (y1 - y0) * (size - x0) / (x1 - x0)


class StepCosts:
    """Seconds of a step: the drafter's and the rest, of which the target's pass is the most."""

    def __init__(self):
        self.passes = MeasuredSeconds(lambda batch, count: batch * (1 + count))
        self.drafts = MeasuredSeconds(lambda batch, count: batch * count)

    def note(self, batch: int, count: int, draft_s: float, pass_s: float) -> None:
        """A step in which `batch` sequences decoded, with K = `count`, and no prompt ran."""
        self.passes.note(batch, count, pass_s)
        if count:
            self.drafts.note(batch, count, draft_s)

    def seconds(self, batch: int, count: int) -> float:
        """Of such a step."""
        drafting = self.drafts.seconds(batch, count) if count else 0.0
        return drafting + self.passes.seconds(batch, count)
