"""What comes of a planted bug, by evidence:

fault       the machine says what is wrong
numbers     the results are refused
missed      neither, but results change beyond rounding, here or with the warps in another order
undecided   a fence: the machine reorders no thread's accesses, so it cannot show that one is needed
rounding    results change as little as another rounding changes them
same        every bit is the same, with the warps in several orders
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import process_time

from lessons.toolbox.gpu.faults import Fault, UnknownInstruction
from lessons.toolbox.gpu.ptx import Kernel
from lessons.toolbox.proof.numerics import NotEquivalent
from lessons.toolbox.proof.planting.kinds import Bug, bugs_of, with_bug
from lessons.toolbox.proof.planting.replay import (
    OneByOne,
    Recorded,
    is_rounding,
    judge,
    same_bits,
)

FOUND = ("fault", "numbers")
CHANGING = (*FOUND, "missed", "undecided")
ROUNDINGS = (1, 2)  # of the result, of the naive version
ORDERS = (0, 1)  # of programs and of copies
SHUFFLED = (0, 1, 2)  # of warps that are held back


@dataclass
class Trials:
    """Of one kernel. counts: {kind: {outcome: bugs}}; missed: what was not found, in words."""

    counts: dict[str, Counter] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)


def outcome_of(bug: Bug, launches: list[Recorded]) -> str | None:
    """None for a change that has no meaning, such as a form of an instruction that there is not."""
    found = "same"
    try:
        wrong = with_bug(launches[0].kernel, bug)
    except (UnknownInstruction, KeyError, ValueError):
        return None
    reached = [launch for launch in launches if bug.place in launch.places]
    for recorded in reached:
        try:
            if not all(accepted(recorded, wrong, order) for order in ORDERS):
                found = "rounding"
        except Missed:
            return "missed"
        except Fault:
            return "fault"
        except NotEquivalent:
            return "numbers"
    if any(changes_in_another_order(recorded, wrong) for recorded in reached):
        return "missed"
    is_seen = "proxy" in bug.instruction.text
    return "undecided" if bug.kind == "fence" and found == "same" and not is_seen else found


class Missed(Exception):
    """A wrong result is accepted."""


def accepted(recorded: Recorded, wrong: Kernel, order: int) -> bool:
    """Whether the results have the same bits. Raises Fault, NotEquivalent, or Missed if they differ
    by more than rounding and are not refused.
    """
    results = recorded.play(wrong, ROUNDINGS[0], order)
    if same_bits(results, recorded.right(ROUNDINGS[0], order)):
        return True
    judge(recorded, results, ROUNDINGS, order)
    if not is_rounding(recorded, results, ROUNDINGS, order):
        raise Missed
    return False


def changes_in_another_order(recorded: Recorded, wrong: Kernel) -> bool:
    """Whether warps that are held back make a difference that they do not make to the right
    kernel.
    """
    for order in SHUFFLED:
        try:
            right = recorded.right(ROUNDINGS[0], order, OneByOne)
        except Fault:
            return False  # because the right kernel is refused too, this order shows nothing
        try:
            results = recorded.play(wrong, ROUNDINGS[0], order, OneByOne)
        except Fault:
            return True
        if not same_bits(results, right) and not is_rounding(recorded, results, ROUNDINGS, order):
            return True
    return False


def drawn(kernel: Kernel, places: list[int], each: int, seed: int) -> Iterator[Bug]:
    """At most `each` bugs of every kind, a kind after the other in turns."""
    by_kind: dict[str, list[Bug]] = {}
    for bug in bugs_of(kernel, places):
        by_kind.setdefault(bug.kind, []).append(bug)
    generator = random.Random(seed)
    for bugs in by_kind.values():
        generator.shuffle(bugs)
    for turn in range(each):
        for bugs in by_kind.values():
            if turn < len(bugs):
                yield bugs[turn]


def plant(launches: list[Recorded], each: int, seconds: float, seed: int = 0) -> Trials:
    """Plant bugs in one kernel, until `seconds` of processor time are over. launches: of it."""
    kernel, trials, start = launches[0].kernel, Trials(), process_time()
    places = sorted({place for launch in launches for place in launch.places})
    for bug in drawn(kernel, places, each, seed):
        if process_time() - start > seconds:
            break
        outcome = outcome_of(bug, launches)
        if outcome is None:
            continue
        trials.counts.setdefault(bug.kind, Counter())[outcome] += 1
        if outcome in ("missed", "undecided"):
            line = kernel.instructions[bug.place].line
            text = kernel.instructions[bug.place].text
            trials.missed.append(f"{line}: {bug.what} [{text[:60]}]")
    return trials
