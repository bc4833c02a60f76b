"""python -m lessons.toolbox.proof planted --chip 80: bugs in the compiled code of every kernel.

Each lesson's tests of equivalence run in a process of their own (`plugin`), which keeps some
launches and plants the bugs. results/planted.json holds, for each chip and kernel, how many bugs of
a kind had which outcome (`trial`), the kernel's hash, and what was not found.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from lessons.toolbox.measure.device import CHIP
from lessons.toolbox.proof import machine, table
from lessons.toolbox.proof.machine import ROOT
from lessons.toolbox.proof.planting.trial import CHANGING, FOUND

RECORD = Path("results") / "planted.json"
MOST_NAMED = 4  # of a kernel's bugs that were not found


def main(chip: int, lesson: str | None, each: int, seconds: float, root: Path = ROOT) -> int:
    """Plant, print and record; lesson by lesson. The exit code says whether all tests passed."""
    known, failed = table.kernels(root), []
    for number, room in machine.rooms(root, lesson).items():
        kernels = {name: kernel for name, kernel in known.items() if kernel.lesson == number}
        if not kernels:
            continue
        found = planted_in(room, chip, kernels, each, seconds)
        if found is None:
            failed.append(number)
            continue
        record(root / RECORD, f"sm_{chip}", number, kernels, found)
        for name, trials in found.items():
            print(f"{number}/{name}: {in_words(total(trials['counts'].values()))}", flush=True)
    everything = read(root / RECORD).get(f"sm_{chip}", {}).values()
    counts = total(of_kind for entry in everything for of_kind in entry["counts"].values())
    print(f"sm_{chip}: {in_words(counts)}")
    if failed:
        print(f"tests failed before bugs were planted, lessons {', '.join(failed)}")
    return 1 if failed else 0


def planted_in(room: Path, chip: int, kernels: dict, each: int, seconds: float) -> dict | None:
    """{kernel: its trials} of a lesson; None if its tests fail."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        names = [name.partition("/")[2] for name in kernels]
        asked = {"out": str(out), "kernels": names, "each": each, "seconds": seconds}
        environment = {CHIP: str(chip), "TRITON_INTERPRET": "0", "PLANTED": json.dumps(asked)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "lessons.toolbox.proof.planting.plugin", "-m", "not compiler", str(room)]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
        )
        if done.returncode not in (0, 5) or not out.exists():  # 5: no test records a proof here
            print(f"{room.name}: {(done.stdout + done.stderr)[-2000:]}")
            return None
        return json.loads(out.read_text())


def read(file: Path) -> dict:
    return json.loads(file.read_text()) if file.exists() else {}


def record(file: Path, chip: str, number: str, kernels: dict, found: dict) -> None:
    """Put a lesson's trials into the record, one line a kernel."""
    kept = read(file)
    of_chip = kept.setdefault(chip, {})
    for name in [name for name in of_chip if name.startswith(f"{number}/")]:
        del of_chip[name]
    for name, trials in found.items():
        entry = {"hash": hash_of(f"{number}/{name}", kernels), "counts": trials["counts"]}
        if trials["missed"]:
            entry["not found"] = trials["missed"][:MOST_NAMED]
        if "refused" in trials:
            entry["refused"] = trials["refused"]
        of_chip[f"{number}/{name}"] = entry
    file.write_text(as_text(kept), encoding="utf-8")


def hash_of(name: str, kernels: dict) -> str:
    """Of a Triton kernel its own, of a function of a .cu file the file's."""
    files = [kernel for key, kernel in kernels.items() if key.endswith(".cu")]
    kernel = kernels.get(name) or (files[0] if files else None)
    return kernel.hash if kernel else ""


def as_text(kept: dict) -> str:
    """JSON with a line for each kernel."""
    chips = []
    for chip, kernels in sorted(kept.items()):
        lines = [f"  {json.dumps(name)}: {json.dumps(kernels[name])}" for name in sorted(kernels)]
        chips.append(f" {json.dumps(chip)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(chips) + "\n}\n"


def total(counts) -> Counter:
    """The sum of counters."""
    found: Counter[str] = Counter()
    for one in counts:
        found.update(one)
    return found


def in_words(counts: Counter) -> str:
    """How many were found, of those that change a result or an order."""
    changing, found = (sum(counts[name] for name in names) for names in (CHANGING, FOUND))
    share = f"{found} of {changing} found ({100 * found / changing:.1f} %)" if changing else "none"
    rest = ", ".join(
        f"{counts[name]} {name}" for name in ("missed", "undecided", "rounding", "same")
    )
    return f"{share}; {rest}"
