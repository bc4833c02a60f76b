"""`make gpu`: everything that only a GPU can prove, in one run under a time budget, step after
step.

Steps, in this order: equivalence tests of every lesson (several at once, since nothing is timed
there), the engine's tests, the ladder, benchmarks (one at a time), compute-sanitizer. A step that fails or takes too
long is recorded, and the next one runs. After every step the files of the output folder are whole,
so a run that is cut loses only the step under way; the next run skips what is finished.

    proof.json             {device, interpreted, steps: {"02 equivalence": {status, seconds, source,
                           fingerprint, tests, failed, kernels}, "ladder": {...}, ...}}
    ladder.json            what reference.ladder records
    l02_softmax.json ...   what toolbox.measure.bench records
    log.txt                everything that the steps printed
"""

import hashlib
import json
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lessons.toolbox.measure.records import write_json
from lessons.toolbox.proof import record, sanitizer
from lessons.toolbox.proof.machine import ROOT, Command, Machine, rooms, source_hash

# on a GPU, where a kernel may hang
LIMIT_S = {
    "equivalence": 420,
    "engine": 240,
    "ladder": 240,
    "benchmark": 300,
    "memcheck": 240,
    "racecheck": 240,
}
HANGS_S = 120  # after so long in one test pytest prints where it stands
ENGINE_TESTS = ("tests/test_engine.py", "tests/test_llm.py")
SHORTEST_S = 5  # a step with less time left than this is not started


@dataclass(frozen=True)
class Step:
    """One command. source: a hash of what it depends on; junit: where its tests are reported."""

    name: str  # "02 equivalence"
    command: list[str]
    source: str
    junit: Path | None = None

    @property
    def kind(self) -> str:
        return self.name.split()[-1]


class Run:
    """One run over `lessons` into the folder `out`. `problems`: what failed or found no time."""

    def __init__(
        self,
        machine: Machine,
        out: Path,
        lessons: dict[str, Path],
        budget_s: float,
        root: Path = ROOT,
    ):
        self.machine, self.out, self.lessons, self.root = machine, out, lessons, root
        self.start = time.monotonic()
        self.deadline = self.start + budget_s
        self.problems: list[str] = []
        self.scratch = root / "build" / "proof"
        for folder in (self.out, self.scratch):
            folder.mkdir(parents=True, exist_ok=True)
        device = machine.fingerprint["device"]
        self.proof = {"device": device, "interpreted": machine.interpreted, "steps": {}}
        if (file := out / "proof.json").exists():
            earlier = json.loads(file.read_text(encoding="utf-8"))
            is_alike = earlier["interpreted"] == machine.interpreted
            if is_alike and not earlier.get("rehearsed"):
                self.proof["steps"] = earlier["steps"]
        self.say(f"{device}: lessons {' '.join(lessons)}; {budget_s:.0f} s; into {out}")

    @property
    def places(self) -> tuple[str, ...]:
        """Where kernels must have run for their proofs to count here."""
        return record.WITHOUT_GPU if self.machine.interpreted else ("cuda",)

    def everything(self) -> None:
        self.go(self.equivalence(), self.machine.jobs)
        self.go(self.engine())
        self.go(self.ladder())
        self.go(self.benchmarks())
        for tool in sanitizer.CLEAN:
            self.go(self.watch(tool))

    def close(self) -> int:
        """Say how it went; the exit code: 0 if every step is finished and passed."""
        self.say(f"done: {len(self.problems) or 'no'} steps failed or found no time")
        for problem in self.problems:
            self.say(f"  {problem}")
        return 1 if self.problems else 0

    # ------------------------------------------------------------ running

    def go(self, steps: Iterable[Step], at_once: int = 1) -> None:
        """Run the steps that no earlier run has finished, some at once."""
        waiting = [step for step in steps if not self.is_finished(step)]
        running: list[tuple[Step, Command]] = []
        try:
            while waiting or running:
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

    def is_finished(self, step: Step) -> bool:
        """Whether an earlier run finished it with the same source."""
        earlier = self.proof["steps"].get(step.name, {})
        finished = earlier.get("status") == "passed" and earlier["source"] == step.source
        if finished:
            self.tell(step, "finished", "earlier, source unchanged")
        return finished

    def begin(self, step: Step) -> list[tuple[Step, Command]]:
        """The step and its command under way; nothing if no time is left."""
        left_s = self.deadline - time.monotonic()
        if left_s < SHORTEST_S:
            self.tell(step, "no time left", "run again to go on here")
            return []
        limit_s = self.limit_s(step, left_s)
        output = self.scratch / f"{step.name}.log"
        environment = self.environment(step)
        return [(step, Command(step.command, limit_s, self.root, output, **environment))]

    def limit_s(self, step: Step, left_s: float) -> float:
        """Seconds after which the step is ended."""
        return left_s if self.machine.interpreted else min(LIMIT_S[step.kind], left_s)

    def environment(self, step: Step) -> dict[str, str]:
        """Variables that the step's process gets besides its own."""
        return sanitizer.ENVIRONMENT if step.kind in sanitizer.CLEAN else {}

    def finish(self, step: Step, command: Command) -> None:
        """Record how a step went. A slip in our bookkeeping must not waste the GPU for others."""
        entry = {
            "status": command.status,
            "seconds": command.seconds,
            "source": step.source,
            "fingerprint": self.machine.fingerprint,
        }
        output = command.end()
        self.log(f"\n---- {step.name}: {' '.join(step.command)}\n{output}")
        try:
            entry |= self.facts(step, entry["status"], output)
        except Exception:
            self.log(traceback.format_exc())
            entry["status"] = "crashed"
        self.proof["steps"][step.name] = entry
        self.proof["steps"] = dict(sorted(self.proof["steps"].items()))
        write_json(self.out / "proof.json", self.proof)
        kernels = f"{entry['seconds']} s, {len(entry.get('kernels', ()))} kernels"
        self.tell(step, entry["status"], ", ".join([kernels, *entry.get("failed", [])[:3]]))

    def facts(self, step: Step, status: str, output: str) -> dict:
        """What is recorded of a step besides how it ended; "status" replaces the command's own."""
        if step.junit is None:
            return {}
        found = record.gathered(record.read(step.junit), self.places)
        if step.kind == "engine":
            return {"tests": found["tests"], "failed": found["failed"]}
        if step.kind == "equivalence":
            has_kernels = (self.lessons[step.name[:2]] / "lab" / "specs.py").exists()
            silent = status == "passed" and has_kernels and not found["kernels"]
            return found | ({"status": "no kernel recorded"} if silent else {})
        asked, _ = sanitizer.cases_of(self.proof["steps"], self.lessons)
        missed = set(asked) - set(found["kernels"])
        status, report = sanitizer.judged(status, output, step.kind, missed)
        return {"status": status, "watched": asked, "report": report}

    def tell(self, step: Step, status: str, detail: str) -> None:
        if status not in ("passed", "finished", "not supported"):
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

    # ------------------------------------------------------------ the steps

    def equivalence(self) -> Iterable[Step]:
        """The lessons' tests in their rooms, without what the compiler can say anywhere."""
        for number, room in self.lessons.items():
            tests = [f"lessons/{room.name}/{path.name}" for path in sorted(room.glob("test_*.py"))]
            if tests:
                yield self.testing(f"{number} equivalence", [], tests, source_hash(room))

    def testing(self, name: str, watched: list[str], tests: list[str], source: str) -> Step:
        """A step of pytest. watched: the command under which it runs, or []."""
        junit = self.scratch / f"{name}.xml"
        junit.unlink(missing_ok=True)
        command = [*watched, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-m", "not compiler", "--junitxml", str(junit)]
        command += ["-o", f"faulthandler_timeout={HANGS_S}", *tests]
        return Step(name, command, source, junit)

    def engine(self) -> Iterable[Step]:
        """The engine's tests: whole requests through the kernels of all lessons."""
        if all((self.root / test).exists() for test in ENGINE_TESTS):
            folders = [self.root / "reference", self.root / "tests", *rooms(self.root).values()]
            source = source_hash(*folders)
            yield self.testing("engine", [], list(ENGINE_TESTS), source)

    def ladder(self) -> Iterable[Step]:
        """reference.ladder on the embedded model."""
        reference = self.root / "reference"
        if (reference / "ladder.py").exists():
            command = [sys.executable, "-m", "reference.ladder", "--out", str(self.out)]
            yield Step("ladder", command, source_hash(reference, *rooms(self.root).values()))

    def benchmarks(self) -> Iterable[Step]:
        """The lessons' benchmarks. A lesson cut off goes on with those that it has not finished."""
        for number, room in self.lessons.items():
            if (room / "lab" / "benchmark.py").exists():
                command = [sys.executable, "-m", "lessons.toolbox.measure.bench", number]
                command += ["--resume", self.key(source_hash(room)), "--out", str(self.out)]
                yield Step(f"{number} benchmark", command, source_hash(room))

    def key(self, source: str) -> str:
        """All that a recorded result depends on: the source, the machine, its versions."""
        facts = {k: v for k, v in self.machine.fingerprint.items() if k != "date"}
        text = json.dumps([source, self.machine.interpreted, facts], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def watch(self, tool: str) -> Iterable[Step]:
        """A few cases of every kernel that passed, watched by compute-sanitizer."""
        kernels, tests = sanitizer.cases_of(self.proof["steps"], self.lessons)
        if kernels and self.machine.sanitizer is None:
            self.say(f"{tool:<20} not run    compute-sanitizer is not installed")
        elif kernels:
            source = hashlib.sha256(json.dumps(kernels).encode()).hexdigest()[:16]
            watched = sanitizer.command(self.machine.sanitizer, tool, kernels, self.lessons)
            yield self.testing(tool, watched, tests, source)
