"""`make gpu`: everything that only a GPU can prove, in one run under a time budget, step after
step.

Steps, in this order: equivalence tests of every lesson (several at once, since nothing is timed
there), the ladder, benchmarks (one at a time), compute-sanitizer. A step that fails or takes too
long is recorded, and the next one runs. After every step the files of the output folder are whole,
so a run that is cut loses only the step under way; the next run skips what is finished.

    proof.json       {device, lessons: {"02": {status, tests, seconds, failed, fingerprint, kernels}}, ladder: {status, ...}}
    benchmarks.json  {"02": {status, seconds, records: {name: what toolbox.measure.bench records}}}
    ladder.json      what reference.ladder records
    sanitizer.json   {memcheck: {status, seconds, kernels, tests, report}, racecheck: {...}}
    log.txt          everything that the steps printed
"""

import hashlib
import json
import shutil
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from lessons.toolbox.measure.records import read_json, write_json
from lessons.toolbox.proof import record as proof_record
from lessons.toolbox.proof.machine import (
    ROOT,
    Machine,
    Outcome,
    device_folder,
    end_all,
    execute,
    rooms,
    source_hash,
)

LIMIT_S = {"equivalence": 300, "ladder": 240, "benchmark": 240, "memcheck": 120, "racecheck": 120}
SHORTEST_S = 5  # a step with less time left than this is not started
FOUND_EXIT_CODE = 86  # of compute-sanitizer, so that a finding differs from a failing test
UNSUPPORTED = ("Device not supported", "not supported on this device", "Failed to initialize")


@dataclass
class Run:
    """One run over `lessons` into the folder `out`. `problems` counts what failed or found no time."""

    machine: Machine
    out: Path
    lessons: dict[str, Path]
    deadline: float  # on time.monotonic()
    root: Path = ROOT
    again: bool = False
    problems: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.start = time.monotonic()
        self.lock = threading.Lock()  # lessons tested at once share the files
        self.out.mkdir(parents=True, exist_ok=True)
        self.proof = (
            {"lessons": {}}
            | self._earlier("proof.json")
            | {
                "schema": 1,
                "device": self.machine.fingerprint["device"],
                "interpreted": self.machine.interpreted,
            }
        )
        self.benchmarks = self._earlier("benchmarks.json")
        self.sanitizers = self._earlier("sanitizer.json")
        self._earlier("ladder.json")

    def _earlier(self, name: str) -> dict:
        """What an earlier run left in `out`, or in results/ for the same device: copied, so that
        `out` is complete.
        """
        recorded = self.root / "results" / device_folder(self.machine.fingerprint["device"]) / name
        path = self.out / name
        if not path.exists() and recorded.exists() and not self.machine.interpreted:
            shutil.copyfile(recorded, path)
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def everything(self) -> int:
        """All steps; returns the exit code: 0 if every one of them is finished and passed."""
        facts = self.machine.fingerprint
        versions = ", ".join(
            f"{name} {facts.get(name)}"
            for name in ("torch", "triton", "transformers", "cuda", "driver")
        )
        self.say(
            f"{facts['device']}: {versions}; lessons {' '.join(self.lessons)}; "
            f"{self.deadline - self.start:.0f} s; into {self.out}"
        )
        for step, *arguments in (
            (self.equivalence,),
            (self.ladder,),
            (self.benchmark,),
            (self.sanitize, "memcheck"),
            (self.sanitize, "racecheck"),
        ):
            try:
                step(*arguments)
            except Exception:
                # a slip in the bookkeeping of one step must not waste the GPU for the others
                self.log(traceback.format_exc())
                self.finish(" ".join([step.__name__, *arguments]), "crashed", "see log.txt")
        self.say(
            f"done: "
            f"{f'{len(self.problems)} steps failed or found no time' if self.problems else 'everything passed'}"
        )
        for problem in self.problems:
            self.say(f"  {problem}")
        return 1 if self.problems else 0

    def say(self, text: str) -> None:
        """One line of the running summary, on the screen and in log.txt."""
        line = f"[{time.monotonic() - self.start:5.0f} s] {text}"
        print(line, flush=True)
        self.log(line)

    def log(self, text: str) -> None:
        """Add to log.txt alone."""
        with self.lock, open(self.out / "log.txt", "a", encoding="utf-8") as file:
            file.write(text.rstrip("\n") + "\n")

    def step(
        self, name: str, kind: str, command: list[str], env: dict | None = None
    ) -> Outcome | None:
        """Run one step within its own limit and the run's; None if no time is left for it."""
        left_s = self.deadline - time.monotonic()
        if left_s < SHORTEST_S:
            self.finish(name, "no time left: run again to go on here")
            return None
        outcome = execute(command, min(LIMIT_S[kind], left_s), self.root, env)
        self.log(
            f"\n---- {name}: {' '.join(command)}\n{outcome.output}\n---- {name}: {outcome.status}, "
            f"{outcome.seconds} s\n"
        )
        return outcome

    def finish(self, name: str, status: str, detail: str = "", good: bool = False) -> None:
        """Report the end of a step; one that is not good makes the exit code 1."""
        self.say(f"{name:<20} {status:<10} {detail}")
        if not good:
            self.problems.append(f"{name}: {status}")

    def is_finished(self, name: str, record: dict | None, source: str) -> bool:
        """Whether an earlier run finished this step with the same source, in the same way of
        running kernels.
        """
        done = (
            record is not None
            and record.get("status") == "passed"
            and record.get("source") == source
            and record.get("interpreted") == self.machine.interpreted
            and not self.again
        )
        if done:
            self.say(f"{name:<20} finished   earlier, source unchanged")
        return done

    def stamp(self, outcome: Outcome, source: str) -> dict:
        """What is recorded of every step: how it went, of which source, on what."""
        return {
            "status": outcome.status,
            "seconds": outcome.seconds,
            "source": source,
            "interpreted": self.machine.interpreted,
            "fingerprint": self.machine.fingerprint,
        }

    @property
    def where(self) -> str:
        return "interpreter" if self.machine.interpreted else "cuda"

    # ------------------------------------------------------------ equivalence

    def equivalence(self) -> None:
        """The lessons' test_equivalence.py, `machine.jobs` of them at once."""
        todo = {
            number: room
            for number, room in self.lessons.items()
            if (room / "test_equivalence.py").exists()
            and not self.is_finished(
                f"{number} equivalence", self.proof["lessons"].get(number), source_hash(room)
            )
        }
        with ThreadPoolExecutor(self.machine.jobs) as pool:
            try:
                for done in as_completed(
                    [pool.submit(self.test_lesson, *item) for item in todo.items()]
                ):
                    done.result()
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                end_all()  # else leaving this block would wait for tests that nobody wants any more
                raise

    def test_lesson(self, number: str, room: Path) -> None:
        """Run one lesson's test_equivalence.py and record each kernel that it proved."""
        name, source = f"{number} equivalence", source_hash(room)
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "proof.jsonl"
            tests = (room / "test_equivalence.py").relative_to(self.root)
            outcome = self.step(name, "equivalence", self.pytest(record, str(tests)))
            if outcome is None:
                return
            entry = {
                **self.stamp(outcome, source),
                **gathered(proof_record.read(record), self.where),
            }
        if outcome.status == "passed" and not entry["kernels"]:
            entry["status"] = "no kernel recorded"
        with self.lock:
            self.proof["lessons"][number] = entry
            self.proof["lessons"] = dict(sorted(self.proof["lessons"].items()))
            write_json(self.out / "proof.json", self.proof)
        self.finish(
            name,
            entry["status"],
            f"{entry['tests']} tests, {len(entry['kernels'])} kernels, {outcome.seconds} s "
            + " ".join(entry["failed"][:3]),
            good=entry["status"] == "passed",
        )

    def pytest(self, record: Path, *tests: str) -> list[str]:
        """The command that runs these tests and leaves their proofs in `record`."""
        return [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--proof-record",
            str(record),
            *tests,
        ]

    # ------------------------------------------------------------ the ladder, the benchmarks

    def ladder(self) -> None:
        """reference.ladder on the embedded model; only its data is kept."""
        reference = self.root / "reference"
        source = source_hash(reference, *rooms(self.root).values())
        if not (reference / "ladder.py").exists() or self.is_finished(
            "ladder", self.proof.get("ladder"), source
        ):
            return
        with tempfile.TemporaryDirectory() as folder:
            few = ["--requests", "2"] if self.machine.interpreted else []
            outcome = self.step(
                "ladder",
                "ladder",
                [sys.executable, "-m", "reference.ladder", "--out", folder, *few],
            )
            if outcome is None:
                return
            if (data := Path(folder) / "ladder.json").exists():
                shutil.copyfile(data, self.out / "ladder.json")
        self.proof["ladder"] = self.stamp(outcome, source)
        write_json(self.out / "proof.json", self.proof)
        self.finish(
            "ladder", outcome.status, f"{outcome.seconds} s", good=outcome.status == "passed"
        )

    def benchmark(self) -> None:
        """The lessons' benchmark.py through toolbox.measure.bench, one at a time."""
        for number, room in self.lessons.items():
            name, source = f"{number} benchmark", source_hash(room)
            if not (room / "lab/benchmark.py").exists() or self.is_finished(
                name, self.benchmarks.get(number), source
            ):
                continue
            with tempfile.TemporaryDirectory() as folder:
                quick = ["--quick"] if self.machine.interpreted else []
                command = [
                    sys.executable,
                    "-m",
                    "lessons.toolbox.measure.bench",
                    number,
                    "--out",
                    folder,
                    *quick,
                ]
                outcome = self.step(name, "benchmark", command)
                if outcome is None:
                    continue
                records = {
                    path.stem: read_json(path) for path in sorted(Path(folder).glob("*.json"))
                }
            self.benchmarks[number] = {**self.stamp(outcome, source), "records": records}
            self.benchmarks = dict(sorted(self.benchmarks.items()))
            write_json(self.out / "benchmarks.json", self.benchmarks)
            self.finish(
                name,
                outcome.status,
                f"{len(records)} records, {outcome.seconds} s",
                good=outcome.status == "passed",
            )

    # ------------------------------------------------------------ compute-sanitizer

    def sanitize(self, tool: str) -> None:
        """Run a few cases of every kernel that passed under compute-sanitizer, which then watches
        only these kernels.
        """
        kernels, tests = cases_of(self.proof["lessons"], self.lessons)
        source = hashlib.sha256(json.dumps(kernels, sort_keys=True).encode()).hexdigest()[:16]
        if not kernels or self.is_finished(tool, self.sanitizers.get(tool), source):
            return
        if self.machine.sanitizer is None:
            self.say(f"{tool:<20} not run    compute-sanitizer is not installed")
            return
        names = [
            name
            for kernel in kernels
            for name in proof_record.names_on_gpu(kernel, self.lessons[kernel[:2]])
        ]
        watched = [part for name in names for part in ("--kernel-name", f"kns={name}")]
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "proof.jsonl"
            command = [
                self.machine.sanitizer,
                "--tool",
                tool,
                "--error-exitcode",
                str(FOUND_EXIT_CODE),
                *watched,
                *self.pytest(record, *tests),
            ]
            # Without PyTorch's cache, because in a cached block a neighbour's memory is not out of
            # bounds.
            outcome = self.step(tool, tool, command, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
            if outcome is None:
                return
            launched = gathered(proof_record.read(record), self.where)["kernels"]
        status, report = judged(outcome, tool, kernels, launched)
        found = {"status": status, "kernels": kernels, "tests": tests, "report": report}
        self.sanitizers[tool] = self.stamp(outcome, source) | found
        write_json(self.out / "sanitizer.json", self.sanitizers)
        self.finish(
            tool,
            status,
            f"{len(kernels)} kernels, {outcome.seconds} s",
            good=status in ("passed", "not supported"),
        )


def gathered(lines: list[dict], where: str) -> dict:
    """Lines of a record -> {tests, failed: [test], kernels: {kernel: {hash, cases: {test: {seconds,
    errors}}}}}.

    Kernels that ran elsewhere than `where` ("cuda" or "interpreter") are left out: they prove
    nothing here.
    """
    kernels: dict[str, dict] = {}
    for line in lines:
        for kernel, found in line["kernels"].items() if line["where"] == where else ():
            entry = kernels.setdefault(kernel, {"hash": found["hash"], "cases": {}})
            entry["cases"][line["test"]] = {"seconds": line["seconds"], "errors": found["errors"]}
    return {
        "tests": len(lines),
        "failed": [line["test"] for line in lines if line["outcome"] != "passed"],
        "kernels": dict(sorted(kernels.items())),
    }


def cases_of(proved: dict, lessons: dict) -> tuple[dict[str, str], list[str]]:
    """({kernel: hash}, [test]) of the kernels whose lessons passed: for each its quickest and a
    middling case.
    """
    kernels, tests = {}, []
    for number in lessons:
        lesson = proved.get(number, {})
        for kernel, entry in (
            lesson.get("kernels", {}).items() if lesson.get("status") == "passed" else ()
        ):
            kernels[kernel] = entry["hash"]
            by_time = sorted(entry["cases"], key=lambda test: entry["cases"][test]["seconds"])
            # never the slowest: it may fill the memory on purpose
            tests += [by_time[0], by_time[(len(by_time) - 1) // 2]]
    return kernels, list(dict.fromkeys(tests))


def judged(outcome: Outcome, tool: str, kernels: dict, launched: dict) -> tuple[str, list[str]]:
    """(status, lines of the tool's report). Passed means: no finding, the tests passed, and every
    kernel was launched.
    """
    report = [line for line in outcome.output.splitlines() if line.startswith("=========")]
    clean = "RACECHECK SUMMARY: 0 hazards" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
    if outcome.status == "timeout":
        return "timeout", report[:40]
    if any(words in outcome.output for words in UNSUPPORTED):
        return "not supported", report[:10]
    if (
        outcome.code == 0
        and any(clean in line for line in report)
        and not set(kernels) - set(launched)
    ):
        return "passed", report[-1:]
    return "failed", report[:40] or outcome.output.splitlines()[-10:]
