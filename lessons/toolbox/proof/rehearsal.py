"""`make gpu REHEARSE=1`: the steps of `make gpu` on a machine without a GPU, which is pretended.

A step that fails here would fail on a GPU too, where every minute counts: an operand left on the
CPU, a module that is missing, a grid that CUDA refuses, a test that compiles for longer than its
lesson's limit. What passes here has proved nothing: results go into build/, never into results/,
and name themselves rehearsed.

The tests of equivalence run with small numbers in the interpreter; the benchmarks' smallest sizes
and the ladder run without numbers (proof.pretended says how). NOT_REHEARSED is left to the GPU.
"""

import dataclasses
import json
from pathlib import Path
from uuid import uuid4

from lessons.toolbox.proof.machine import ROOT
from lessons.toolbox.proof.run import Run
from lessons.toolbox.proof.steps import HEADLINES, LIMIT_S, Step, first_of

# Seconds to compile one variant of a kernel for sm_90: 0.9 s of one core in the mean over the
# course's kernels, 0.6 to 1.7 s each.
COMPILE_S = 1.0
# Seconds to launch one operation from Python: assumed, not measured. A benchmark calls what it
# times twice in a rehearsal, and at least six times on a GPU.
LAUNCH_S = 10e-6
CALLS = {"benchmark": 3}
NOT_REHEARSED = {
    "memcheck, racecheck": "compute-sanitizer watches a real GPU",
    "times": "of a pretended GPU they say nothing",
    "warm-ups": "nothing is compiled",
}
# of its tests: interpreted, all take hours
ENGINE_PART = "answers_are_the_models or best_of or engine_gpu_cases"
LADDER_REQUESTS = 4  # of the 32: each is served by every rung


class Rehearsal(Run):
    """A run on a pretended GPU. Nothing that it records counts as a proof."""

    places = ("rehearsal",)
    ends_hangs = False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.proof["rehearsed"] = True

    def everything(self) -> None:
        """The steps, in the order of `make gpu`, one at a time. Without engine and ladder for one
        lesson, because they are every lesson's.
        """
        self.go(self.equivalence())
        if len(self.lessons) > 1:
            self.go(self.engine())
            self.go(self.ladder())
        self.go(self.benchmarks(first_of(HEADLINES, self.lessons)))
        for what, why in NOT_REHEARSED.items():
            self.say(f"{what:<20} NOT REHEARSED: {why}")

    def is_finished(self, step: Step) -> bool:
        """Never: a rehearsal is asked for because something may have changed."""
        return False

    def key(self, source: str) -> str:
        """A new one each time, so that no benchmark is resumed."""
        return uuid4().hex[:16]

    def limit_s(self, step: Step, left_s: float) -> float:
        """All the time that is left, because interpreting is slower than a GPU."""
        return left_s

    def begin(self, step: Step):
        """The step's command, in a process that pretends to have a GPU."""
        python, _, module, *arguments = step.command
        pretending = [python, "-m", "lessons.toolbox.proof.pretended"]
        pretending += ["--report", str(self.report(step))]
        if step.kind == "benchmark":
            arguments += ["--quick"]
        if step.kind == "engine":
            arguments += ["-k", ENGINE_PART]
        if step.kind == "ladder":
            arguments += ["--requests", str(LADDER_REQUESTS)]
        if step.kind in ("benchmark", "ladder"):
            pretending += ["--shapes"]
        self.report(step).unlink(missing_ok=True)
        return super().begin(dataclasses.replace(step, command=[*pretending, module, *arguments]))

    def report(self, step: Step) -> Path:
        """The file in which the step's process leaves what it launched."""
        return self.scratch / f"{step.name}.json"

    def environment(self, step: Step) -> dict[str, str]:
        """A machine that has a GPU rehearses as well."""
        return step.environment | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

    def facts(self, step: Step, status: str, output: str) -> dict:
        """What a run records, and how long a GPU's machine would compile and launch."""
        facts = super().facts(step, status, output)
        if not self.report(step).exists():  # it was cut off
            return facts
        launched = json.loads(self.report(step).read_text(encoding="utf-8"))
        variants = sum(launched["variants"].values())
        compile_s = round(COMPILE_S * variants)
        launches = (launched["launches"] + launched["operations"]) * CALLS.get(step.kind, 1)
        launch_s = round(LAUNCH_S * launches)
        for what in launched["left_out"]:
            self.say(f"{step.name:<20} NOT REHEARSED: {what}")
        self.say(
            f"{step.name:<20} {variants} variants, about {compile_s} s of compiling on a GPU, and "
            f"{launch_s} s of launching"
        )
        if compile_s + launch_s > LIMIT_S[step.kind]:
            facts["status"] = "takes too long"
        return facts | launched | {"compile_s": compile_s, "launch_s": launch_s}


def folder(out: Path | None, root: Path = ROOT) -> Path:
    """Where a rehearsal writes. Raises ValueError for a folder in results/."""
    out = (out or root / "build" / "rehearsal").resolve()
    if out.is_relative_to((root / "results").resolve()):
        raise ValueError(f"--out {out}: a rehearsal proves nothing; accepted: outside of results/")
    return out
