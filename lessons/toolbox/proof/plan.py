"""`make gpu PLAN=1 MINUTES=8`: what `make gpu` would do in so many minutes, said on any machine.

A step's seconds are those that it took on a GPU, where a run has recorded them. All others are
predicted from what is counted here, for 16 cores, and no GPU has confirmed them:

    equivalence   START_S, and LAUNCH_S for each launch in the lesson's lab/specs.py: a fit to 22
                  lessons on an H200, eight at once, two processes each
    benchmark     START_S, and for each provider and size the time of toolbox.measure.timing, 1/8
                  of it to warm up, and CHECK_S to make inputs and compare
    the rest      none: up to their limits

A step that the end cuts off is not lost: its tests and benchmarks go on in the next run.
"""

from collections.abc import Iterable
from pathlib import Path

from lessons.toolbox.measure import bench, timing
from lessons.toolbox.proof import table
from lessons.toolbox.proof.machine import ROOT, Machine
from lessons.toolbox.proof.steps import LIMIT_S, Step, Steps

START_S, LAUNCH_S, CHECK_S = 20.0, 1.0, 0.15
CHIP = 90  # whose launches are counted
JOBS, WORKERS = 8, 2  # of a machine with 16 cores


def machine_like(device: str) -> Machine:
    """A borrowed machine with this GPU."""
    return Machine({"device": device}, False, "compute-sanitizer", JOBS, WORKERS)


class Estimates:
    """Seconds of steps. root: of the course, whose results/ has the records of earlier runs."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        self.known: dict[str, float] = {}
        for proof in table.proofs(root):
            if not proof["interpreted"] and not proof.get("chip"):
                for name, step in proof["steps"].items():
                    if step["status"] == "passed":
                        self.known[name] = step["seconds"]
        self.launches: dict[str, int] = {}
        for name, kernel in table.kernels(root).items():
            count = sum(job.chip == CHIP for job in kernel.jobs)
            self.launches[name[:2]] = self.launches.get(name[:2], 0) + count

    def seconds(self, step: Step) -> tuple[float | None, str]:
        """(seconds, "measured" or "predicted"); None where nothing says so."""
        if step.name in self.known:
            return self.known[step.name], "measured"
        number = step.name[:2]
        if step.kind == "equivalence":
            return START_S + LAUNCH_S * self.launches.get(number, 0), "predicted"
        if step.kind == "benchmark":
            points = points_of(number, self.root)
            return START_S + points * (timing.BUDGET_S * 9 / 8 + CHECK_S), "predicted"
        return None, f"at most {LIMIT_S[step.kind]} s"


def points_of(number: str, root: Path = ROOT) -> int:
    """How many times a lesson's benchmarks time something: providers times sizes."""
    listed = bench.load_benchmarks(number, root / "lessons")
    return sum(len(one.providers) * len(one.x_values) for one in listed)


def plan(steps: Steps, estimates: Estimates, budget_s: float) -> Iterable[str]:
    """A line for each step that begins: when it would end, in seconds from the start, and how long
    it takes; then the others. Steps of unknown length count as their limit.
    """
    free_s, later = 0.0, []  # when all that was begun has ended
    for phase, at_once in steps.phases():
        ends = [free_s] * at_once  # of the processes
        for step in phase:
            seconds, source = estimates.seconds(step)
            begin = min(ends)
            end = begin + (LIMIT_S[step.kind] if seconds is None else seconds)
            ends[ends.index(begin)] = end
            if begin >= budget_s:
                later.append(step.name)
                continue
            verdict = "fits" if end <= budget_s else "cut off"
            took = source if seconds is None else f"{seconds:.0f} s {source}"
            yield f"{end:6.0f} s  {step.name:<20} {verdict:<8} {took}"
        free_s = max(ends)
    if later:
        yield f"for later runs: {', '.join(later)}"
    yield f"{budget_s:.0f} s are the budget; all steps end after {free_s:.0f} s at the latest"
