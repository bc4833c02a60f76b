"""The steps of `make gpu`: which commands prove and measure what."""

import atexit
import hashlib
import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp

from lessons.toolbox.proof import sanitizer, table
from lessons.toolbox.proof.machine import ROOT, Machine, rooms, source_hash

# on a GPU, where a kernel may hang
LIMIT_S = {
    "equivalence": 420,
    "checks": 420,
    "engine": 240,
    "ladder": 240,
    "warm-up": 120,
    "benchmark": 300,
    "memcheck": 240,
    "racecheck": 240,
}
FIRST = ("proof.record(", "mark.gpu")  # in files whose tests are the first to run
# After so long in one test pytest prints where it stands. On a GPU the test's process ends then,
# because a kernel that hangs keeps the GPU from all others.
HANGS_S = 120
ENGINE_TESTS = ("tests/engine_gpu_cases.py", "tests/test_engine.py", "tests/test_llm.py")
# Whose tests compile the most, by a rehearsal. They begin first, because then all cores end
# together.
MOST_VARIANTS = ("12", "19", "23", "27", "02", "07", "18", "09", "08", "17", "16", "10")
# Whose figures the front page and the guides are about: flash attention, split-KV decoding, pages,
# the cache, fusion, quantized weights.
HEADLINES = ("09", "10", "12", "03", "07", "18")
# Then those of kernels whose times are only predicted: sparse attention, states, experts, caches in
# FP8, drafts, transfers of pages.
SECOND = ("28", "27", "23", "19", "16", "26")
# A benchmark with this in its environment runs each candidate once.
ONCE = {"TIMED_ONCE": "1"}


@dataclass(frozen=True)
class Step:
    """One command. source: a hash of what it depends on; cases: where its tests are reported."""

    name: str  # "02 equivalence"
    command: list[str]
    source: str
    cases: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.name.split()[-1]


class Steps:
    """The steps of some lessons on a machine. out: what is kept; scratch: what is read once, this
    run's own, because another one may be under way.
    """

    def __init__(self, machine: Machine, out: Path, lessons: dict[str, Path], root: Path = ROOT):
        self.machine, self.out, self.lessons, self.root = machine, out, lessons, root
        self.proof = {"device": machine.fingerprint.get("device"), "steps": {}}
        self.proof["interpreted"] = machine.interpreted
        if machine.chip:
            self.proof["chip"] = machine.chip
        if (file := out / "proof.json").exists():
            earlier = json.loads(file.read_text(encoding="utf-8"))
            is_alike = earlier["interpreted"] == machine.interpreted
            is_alike &= earlier.get("chip") == machine.chip
            if is_alike and not earlier.get("rehearsed"):
                self.proof["steps"] = earlier["steps"]
        self.scratch = Path(mkdtemp(prefix="proof-"))
        atexit.register(shutil.rmtree, self.scratch, ignore_errors=True)

    def phases(self) -> Iterable[tuple[Iterable[Step], int]]:
        """(steps, how many at once), in order: proofs, then what is quoted most, then the rest.
        What was never measured here comes before what has a record of an earlier source.
        """
        jobs = self.machine.jobs
        new = [number for number in self.lessons if not self.is_old(number)]
        first, second = ([n for n in names if n in new] for names in (HEADLINES, SECOND))
        rest = [n for n in first_of(new, self.lessons) if n not in (*first, *second)]
        yield self.equivalence(), jobs
        yield from self.measured(first)
        yield self.ladder(), 1
        yield from self.measured(second)
        yield self.engine(), 1
        yield from self.measured(rest)
        for tool in sanitizer.CLEAN:
            yield self.watch(tool), 1
        yield self.checks(), jobs

    def measured(self, numbers: list[str]) -> Iterable[tuple[Iterable[Step], int]]:
        """The phases of their benchmarks. So many lessons at once are warmed up as the machine can,
        and then measured, because one that finds no time was warmed up for nothing. Not beside the
        tests, because a naive version may take the whole memory for a moment.
        """
        jobs = self.machine.jobs
        for at in range(0, len(numbers), jobs):
            yield self.warm_ups(numbers[at : at + jobs]), jobs
            yield self.benchmarks(numbers[at : at + jobs]), 1

    def is_old(self, number: str) -> bool:
        """Whether a lesson has records here, and all of an earlier source."""
        files = self.out.glob(f"l{number}_*.json")
        keys = {json.loads(file.read_text(encoding="utf-8")).get("resume") for file in files}
        return bool(keys) and self.key(self.source(number)) not in keys

    def equivalence(self) -> Iterable[Step]:
        """Of each lesson the tests that record proofs or need a GPU (`proof.first`). Lessons with
        kernels that no run here has proved come first.
        """
        for number in self.by_need(first_of(MOST_VARIANTS, self.lessons)):
            room = self.lessons[number]
            texts = {path: path.read_text("utf-8") for path in sorted(room.rglob("test_*.py"))}
            found = [path for path, text in texts.items() if any(word in text for word in FIRST)]
            if tests := self.paths(found):
                workers = self.machine.workers
                yield self.testing(f"{number} equivalence", tests, self.source(number), workers)

    def checks(self) -> Iterable[Step]:
        """All tests in the lessons' rooms, without what the compiler can say anywhere."""
        for number, room in self.lessons.items():
            if tests := self.paths(sorted(room.rglob("test_*.py"))):
                workers = self.machine.workers
                yield self.testing(f"{number} checks", tests, self.source(number), workers)

    def paths(self, files: Iterable[Path]) -> list[str]:
        """As pytest takes them, from the root on."""
        return [path.relative_to(self.root).as_posix() for path in files]

    def source(self, number: str) -> str:
        """A hash of a lesson's code and of all its kernels, since one may be of another lesson."""
        kernels = {name: hash for name, hash in self.kernels.items() if name[:2] == number}
        text = json.dumps([source_hash(self.lessons[number]), kernels], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def kernels(self) -> dict[str, str]:
        """{kernel: the hash of its source}, of all lessons."""
        return {name: kernel.hash for name, kernel in table.kernels(self.root).items()}

    def by_need(self, numbers: Iterable[str]) -> list[str]:
        """The lessons with kernels whose source no finished step of this device has proved, then
        all others; each in the given order.
        """
        steps = self.proof["steps"].values()
        finished = [step for step in steps if step["status"] == "passed"]
        proved = {(k, v["hash"]) for step in finished for k, v in step.get("kernels", {}).items()}
        needy = {name[:2] for name, hash in self.kernels.items() if (name, hash) not in proved}
        return sorted(numbers, key=lambda number: number not in needy)

    def testing(
        self, name: str, tests: list[str], source: str, workers: int = 1, watched: Iterable = ()
    ) -> Step:
        """A step of pytest. workers: processes that share its tests, so that kernels are compiled
        on several cores; watched: the command under which it runs.
        """
        command = [*watched, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        if workers > 1:
            command += ["-p", "xdist.plugin", "-n", str(workers)]
        if name.endswith("equivalence"):
            command += ["-p", "lessons.toolbox.proof.first"]
        # those of a sanitizer are short, and not gone on with
        cases = (self.scratch if watched else self.out) / f"{name.replace(' ', '_')}.cases.jsonl"
        command += ["-p", "lessons.toolbox.proof.cases", "--cases", str(cases)]
        command += ["--cases-key", self.key(source), "-m", "not compiler"]
        if self.ends_hangs and not watched:
            command += ["-p", "no:faulthandler", "--hangs-s", str(HANGS_S)]
        else:
            command += ["-o", f"faulthandler_timeout={HANGS_S}"]
        return Step(name, [*command, *tests], source, cases)

    @property
    def ends_hangs(self) -> bool:
        """Whether a test that takes too long ends its process. An interpreter is slow, and may."""
        return not self.machine.interpreted

    def engine(self) -> Iterable[Step]:
        """The engine's tests: whole requests through the kernels of all lessons."""
        tests = [test for test in ENGINE_TESTS if (self.root / test).exists()]
        if tests:
            folders = [self.root / "reference", self.root / "tests", *rooms(self.root).values()]
            # nothing runs beside it, so it may have the processes of all lessons
            workers = max(1, self.machine.jobs * self.machine.workers)
            workers = workers if self.machine.workers > 1 else 1
            yield self.testing("engine", tests, source_hash(*folders), workers)

    def ladder(self) -> Iterable[Step]:
        """reference.ladder on the embedded model."""
        reference = self.root / "reference"
        if (reference / "ladder" / "__main__.py").exists():
            command = [sys.executable, "-m", "reference.ladder", "--out", str(self.out)]
            yield Step("ladder", command, source_hash(reference, *rooms(self.root).values()))

    def benchmarks(self, numbers: Iterable[str]) -> Iterable[Step]:
        """Benchmarks of lessons. One cut off goes on with those that it has not finished."""
        for number in numbers:
            room = self.lessons[number]
            if (room / "lab" / "benchmark.py").exists():
                source = self.source(number)
                command = [*self.bench(number), "--resume", self.key(source)]
                yield Step(f"{number} benchmark", [*command, "--out", str(self.out)], source)

    def warm_ups(self, numbers: Iterable[str]) -> Iterable[Step]:
        """The same benchmarks with each candidate run once, for what they compile: Triton and
        torch.compile keep it on disk. Several at once, as the timing may not be.
        """
        for step in self.benchmarks(numbers):
            number = step.name.split()[0]
            command = [*self.bench(number), "--out", str(self.scratch / "warm-up")]
            yield Step(f"{number} warm-up", command, step.source, None, ONCE)

    def watch(self, tool: str) -> Iterable[Step]:
        """A few cases of every kernel that passed, watched by compute-sanitizer."""
        kernels, tests = sanitizer.cases_of(self.proof["steps"], self.lessons)
        if kernels and self.machine.sanitizer:
            source = hashlib.sha256(json.dumps(kernels).encode()).hexdigest()[:16]
            watched = sanitizer.command(self.machine.sanitizer, tool, kernels, self.lessons)
            yield self.testing(tool, tests, source, watched=watched)

    def bench(self, number: str) -> list[str]:
        """The command that measures a lesson."""
        return [sys.executable, "-m", "lessons.toolbox.measure.bench", number]

    def key(self, source: str) -> str:
        """All that a recorded result depends on: the source, the machine, its versions."""
        facts = {k: v for k, v in self.machine.fingerprint.items() if k != "date"}
        text = json.dumps([source, self.machine.interpreted, facts], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_of(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """What is known, those of `names` before the others."""
    known = list(known)
    first = [name for name in names if name in known]
    return first + [name for name in known if name not in first]
