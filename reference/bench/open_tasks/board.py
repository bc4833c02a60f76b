"""`make board`: your kernel, checked, counted as the code that the compiler makes of it, and put on
a board of your own runs.

The file defines `softmax(x)`. Nothing is timed: instructions and sectors are counted on a CPU, and
the time on an H100 is predicted from them (lessons/PROFILING.md says how well).
"""

import json
import os
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[3]
START = Path(__file__).with_name("start.py")
SHAPE = (32, 1000)  # that is counted
# Runs in a process of its own: once interpreted, to be checked, and once as compiled code.
DRIVER = """
import importlib.util, sys, torch

spec = importlib.util.spec_from_file_location("mine", {file!r})
mine = importlib.util.module_from_spec(spec)
sys.modules["mine"] = mine  # Triton looks its kernels up there
spec.loader.exec_module(mine)
softmax, given = mine.softmax, torch.randn{shape}


def counted():
    return softmax(given)


def check():
    for columns in (1, 5, 128, 129, 1000, 4096):
        for scale in (1.0, 100.0):
            x = scale * torch.randn(3, columns) - 50 * scale
            got, want = softmax(x.clone()), x.double().softmax(-1)
            assert got.shape == x.shape, f"rows of {{columns}}: the shape is {{list(got.shape)}}"
            error = (got.double() - want).abs().max().item()
            assert error < 1e-5, f"rows of {{columns}}: off by {{error:.2g}}"


if __name__ == "__main__":
    try:
        check()
    except Exception as error:
        sys.exit(f"{{type(error).__name__}}: {{error}}".splitlines()[0])
"""


def run(file: Path, folder: Path) -> int:
    """Give the first version where there is none; else check, count, and print the board."""
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        shutil.copy(START, file)
        print(f"{file} is written: make it faster, and run this again")
        return 0
    row = measured(file, folder)
    if isinstance(row, str):
        print(f"{file}: {row}")
        return 1
    board = folder / "board.json"
    rows = json.loads(board.read_text(encoding="utf-8")) if board.exists() else []
    if not rows:
        rows.append(measured(START, folder) | {"when": "as given"})
    rows.append(row)
    board.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print_board(rows)
    return 0


def measured(file: Path, folder: Path) -> dict | str:
    """A row of the board, or in one line why there is none."""
    driver = folder / "driver.py"
    driver.write_text(DRIVER.format(file=str(file.resolve()), shape=SHAPE), encoding="utf-8")
    done = called([str(driver)])
    if done.returncode:
        return f"not right: {done.stderr.strip().splitlines()[-1]}"
    profile = ["-m", "lessons.toolbox.profile", f"{driver}:counted", "--out", str(folder)]
    done = called(profile)
    if done.returncode:
        return f"not counted: {done.stderr.strip().splitlines()[-1]}"
    found = json.loads((folder / "counted_h100.json").read_text(encoding="utf-8"))["counted"]
    kernels, passes = found["kernels"], found["passes"]
    if moved := [one["name"] for one in passes]:
        return f"PyTorch computes, too: {', '.join(sorted(set(moved)))}"
    return {
        "when": datetime.now().strftime("%d %b %H:%M:%S"),
        "kernels": sum(kernel["launches"] for kernel in kernels),
        "instructions": sum(kernel["total"]["issued"] for kernel in kernels),
        "sectors": sum(kernel["total"]["sectors"] for kernel in kernels),
        "registers": max(kernel["registers"] for kernel in kernels),
        "us": 1e6 * sum(kernel["predicted"]["H100 SXM"]["predicted_s"] for kernel in kernels),
    }


def called(arguments: list[str]) -> subprocess.CompletedProcess:
    """A process of Python that finds the course."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def print_board(rows: list[dict]) -> None:
    """The fastest first, each beside the version that was given."""
    given = rows[0]
    table = Table("when", title=f"softmax of {SHAPE[0]} rows of {SHAPE[1]}, predicted for an H100")
    table.columns[0].no_wrap = True
    for name in ("kernels", "registers", "sectors", "issued", "µs", "of given"):
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: (row["us"], row["instructions"])):
        table.add_row(
            row["when"],
            str(row["kernels"]),
            str(row["registers"]),
            f"{row['sectors']:,}",
            f"{row['instructions']:,}",
            f"{row['us']:.2f}",
            f"{row['us'] / given['us']:.0%}",
        )
    Console().print(table)
