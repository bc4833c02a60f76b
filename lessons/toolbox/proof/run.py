"""`make gpu`: everything that only a GPU can prove, in one run under a time budget, step after
step.

Steps, in this order: of every lesson the tests that record a proof or need a GPU (several lessons
at once, since nothing is timed there), the benchmarks that the front page is about, the ladder,
the benchmarks of kernels that were only predicted, the engine's tests, the other benchmarks (one
at a time), compute-sanitizer, all other tests of the lessons. Before benchmarks are timed their
candidates run once, several lessons at once, so that all cores compile. A step that fails or takes
too long is recorded, and the next one runs; the next run tries it again when all others are done.
After every step the files of the output folder are whole, so a run that is cut loses only what is
under way; the next run skips what is finished. A step of tests that was cut off goes on with those
that had not passed (`cases`), and what an earlier run proved stays proved until the new one has
ended.

    proof.json             {device, interpreted, steps: {"02 equivalence": {status, seconds, source,
                           fingerprint, tests, failed, kernels}, "ladder": {...}, ...}}
    ladder.json            what reference.ladder records
    l02_softmax.json ...   what toolbox.measure.bench records
    02_equivalence.cases.jsonl ...   of a step that has not passed yet, how each of its tests went
    log.txt                everything that the steps printed
"""

import re
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from lessons.toolbox.measure.records import write_json
from lessons.toolbox.proof import cases, record, sanitizer
from lessons.toolbox.proof.machine import ROOT, Command, Machine
from lessons.toolbox.proof.pack import write_pack
from lessons.toolbox.proof.steps import LIMIT_S, Step, Steps

# A step with less time left than this is not started: so long its processes take to import PyTorch
# and to find their tests, eight at once.
SHORTEST_S = 15
PACK_S = 30  # so often the results are packed while steps run


TOO_FEW_GPUS = "too few GPUs"


def was_cut(entry: dict, kind: str) -> bool:
    """Whether a step's record says that the run's end cut it off, and not its own limit."""
    return entry.get("status") == "timeout" and entry["seconds"] < LIMIT_S[kind]


def silence(tests: Iterable[cases.Case]) -> str:
    """The status of a lesson with kernels whose tests passed and proved none."""
    reasons = [case.reason for case in tests if case.status == "skipped"]
    needs = reasons and all(re.search(r"NOT RUN: needs \d+ GPUs", reason) for reason in reasons)
    return TOO_FEW_GPUS if needs else "no kernel recorded"


class Run(Steps):
    """One run over `lessons` into the folder `out`. `problems`: what failed or found no time; pack:
    a file that holds the results again after each step, for a machine that gives back only a few
    files.
    """

    def __init__(
        self,
        machine: Machine,
        out: Path,
        lessons: dict[str, Path],
        budget_s: float,
        root: Path = ROOT,
        pack: Path | None = None,
    ):
        super().__init__(machine, out, lessons, root)
        self.pack = pack
        self.start = time.monotonic()
        self.deadline = self.start + budget_s
        self.problems: list[str] = []
        self.later: list[Step] = []  # steps that failed in an earlier run
        self.out.mkdir(parents=True, exist_ok=True)
        device = machine.fingerprint["device"]
        self.say(f"{device}: lessons {' '.join(lessons)}; {budget_s:.0f} s; into {out}")

    @property
    def places(self) -> tuple[str, ...]:
        """Where kernels must have run for their proofs to count here."""
        if self.machine.chip:
            return (f"sm_{self.machine.chip}",)
        return record.WITHOUT_GPU if self.machine.interpreted else ("cuda",)

    def everything(self) -> None:
        """All steps, in their order."""
        for steps, at_once in self.phases():
            self.go(steps, at_once)
        self.go_again()

    def close(self) -> int:
        """Say how it went; the exit code: 0 if every step is finished and passed."""
        self.say(f"done: {len(self.problems) or 'no'} steps failed or found no time")
        for problem in self.problems:
            self.say(f"  {problem}")
        return 1 if self.problems else 0

    # ------------------------------------------------------------ running

    def go(self, steps: Iterable[Step], at_once: int = 1) -> None:
        """Run the steps that no earlier run has finished, some at once. Those that failed in an
        earlier one wait for `go_again`.
        """
        waiting = [step for step in steps if not self.is_finished(step)]
        self.later += [step for step in waiting if self.has_failed(step)]
        self.run([step for step in waiting if not self.has_failed(step)], at_once)

    def go_again(self) -> None:
        """Run what failed in an earlier run."""
        again, self.later = self.later, []
        self.run(again, 1)

    def run(self, waiting: list[Step], at_once: int) -> None:
        """Run the steps, some at once, until the time is spent."""
        running: list[tuple[Step, Command]] = []
        packed = time.monotonic()
        try:
            while waiting or running:
                if time.monotonic() > packed + PACK_S:
                    packed = time.monotonic()
                    self.keep()
                while waiting and len(running) < at_once:
                    running += self.begin(waiting.pop(0))
                for step, command in list(running):
                    if command.status != "running":
                        running.remove((step, command))
                        self.finish(step, command)
                time.sleep(0.05)
        finally:
            for _, command in running:
                command.end()

    def has_failed(self, step: Step) -> bool:
        """Whether an earlier run saw it fail with the same source, which its end did not cut
        off.
        """
        earlier = self.proof["steps"].get(step.name, {})
        return earlier.get("source") == step.source and not was_cut(earlier, step.kind)

    def is_finished(self, step: Step) -> bool:
        """Whether an earlier run finished it with the same source; of a warm-up, what it warms
        up.
        """
        name = step.name.replace("warm-up", "benchmark")
        earlier = self.proof["steps"].get(name, {})
        finished = earlier.get("status") == "passed" and earlier["source"] == step.source
        if finished and step.kind != "warm-up":
            self.tell(step, "finished", "earlier, source unchanged")
        return finished

    def begin(self, step: Step) -> list[tuple[Step, Command]]:
        """The step and its command under way; nothing if no time is left."""
        left_s = self.deadline - time.monotonic()
        if left_s < max(SHORTEST_S, self.least_s(step)):
            self.tell(step, "no time left", "run again to go on here")
            return []
        limit_s = self.limit_s(step, left_s)
        output = self.scratch / f"{step.name}.log"
        environment = self.environment(step)
        return [(step, Command(step.command, limit_s, self.root, output, **environment))]

    def least_s(self, step: Step) -> float:
        """Seconds without which the step is of no use: as long as it took before, if it cannot go
        on where it was cut off.
        """
        earlier = self.proof["steps"].get(step.name, {})
        is_whole = step.kind in ("ladder", *sanitizer.CLEAN) and earlier.get("status") == "passed"
        return earlier["seconds"] if is_whole else 0.0

    def limit_s(self, step: Step, left_s: float) -> float:
        """Seconds after which the step is ended."""
        return left_s if self.machine.interpreted else min(LIMIT_S[step.kind], left_s)

    def environment(self, step: Step) -> dict[str, str]:
        """Variables that the step's process gets besides its own."""
        watched = sanitizer.ENVIRONMENT if step.kind in sanitizer.CLEAN else {}
        return self.machine.environment | step.environment | watched

    def finish(self, step: Step, command: Command) -> None:
        """Record how a step went. A slip in our bookkeeping must not waste the GPU for others."""
        entry = {
            "status": command.status,
            "seconds": command.seconds,
            "source": step.source,
            "fingerprint": self.machine.fingerprint,
        }
        output = command.end()
        if step.kind == "warm-up":  # what fails there fails again where it is recorded
            self.say(f"{step.name:<20} {entry['status']:<10} {entry['seconds']} s")
            return
        self.log(f"\n---- {step.name}: {' '.join(step.command)}\n{output}")
        try:
            entry |= self.facts(step, entry["status"], output)
        except Exception:
            self.log(traceback.format_exc())
            entry["status"] = "crashed"
        earlier = self.proof["steps"].get(step.name, {})
        if earlier.get("status") != "passed" or not was_cut(entry, step.kind):
            self.proof["steps"][step.name] = entry
        if entry["status"] == "passed" and step.cases:
            step.cases.unlink(missing_ok=True)
        self.proof["steps"] = dict(sorted(self.proof["steps"].items()))
        write_json(self.out / "proof.json", self.proof)
        self.keep()
        kernels = f"{entry['seconds']} s, {len(entry.get('kernels', ()))} kernels"
        self.tell(step, entry["status"], ", ".join([kernels, *entry.get("failed", [])[:3]]))

    def facts(self, step: Step, status: str, output: str) -> dict:
        """What is recorded of a step besides how it ended; "status" replaces the command's own."""
        if step.cases is None:
            return {}
        tests = cases.read(step.cases)
        found = record.gathered(tests, self.places)
        if step.kind in ("engine", "checks"):
            return {"tests": found["tests"], "failed": found["failed"]}
        if step.kind == "equivalence":
            has_kernels = (self.lessons[step.name[:2]] / "lab" / "specs.py").exists()
            silent = status == "passed" and has_kernels and not found["kernels"]
            return found | ({"status": silence(tests)} if silent else {})
        asked, _ = sanitizer.cases_of(self.proof["steps"], self.lessons)
        missed = set(asked) - set(found["kernels"])
        status, report = sanitizer.judged(status, output, step.kind, missed)
        return {"status": status, "watched": asked, "report": report}

    def keep(self) -> None:
        """Pack the results, where that was asked for."""
        if self.pack:
            write_pack(self.pack, self.out.parent, [self.out])

    def tell(self, step: Step, status: str, detail: str) -> None:
        if status not in ("passed", "finished", "not supported", TOO_FEW_GPUS):
            self.problems.append(f"{step.name}: {status}")
        self.say(f"{step.name:<20} {status:<10} {detail}")

    def say(self, text: str) -> None:
        """A line of the running summary, on the screen and in log.txt."""
        line = f"[{time.monotonic() - self.start:5.0f} s] {text}"
        print(line, flush=True)
        self.log(line)

    def log(self, text: str) -> None:
        with open(self.out / "log.txt", "a", encoding="utf-8") as file:
            file.write(text.rstrip("\n") + "\n")

    def watch(self, tool: str) -> Iterable[Step]:
        """As in Steps, and why not."""
        if self.machine.sanitizer is None:
            self.say(f"{tool:<20} not run    compute-sanitizer is not installed")
        return super().watch(tool)
