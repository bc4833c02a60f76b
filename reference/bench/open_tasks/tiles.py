"""Choose the tiles of lesson 9's kernel for a shape and a chip, by what the compiled code does.

Nothing is timed: `tile_counts`, in a process of its own, compiles the kernel for the chip, runs it
on the CPU, counts, and predicts the time (lessons/PROFILING.md says how well).
"""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lessons.l09_flash_attention.tiles import Tiles, tiles_for
from lessons.toolbox.gpu.arguments import VARIABLE as ORDER
from lessons.toolbox.measure.device import CHIP, has_triton, version_of
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.model.arguments import one_line, refuse
from reference.bench.open_tasks import handed_in
from reference.bench.open_tasks.handed_in import Allowed

ROOT = Path(__file__).resolve().parents[3]
SM = 90  # what H100 and H200 run, and the only code whose time is predicted
NUMBERS = ("instructions", "sectors", "registers", "spill_bytes", "shared_bytes", "predicted_us")
ALLOWED = {"predicted_us": Allowed(relative=0.01)}
FIELDS = {
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (16, 32, 64, 128, 256),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1, 2, 3, 4, 5),
}


@dataclass(frozen=True)
class Task:
    """A prompt, or the end of one: `queries` of `keys` tokens, bfloat16. window: tokens that a
    query sees, None: all before it.
    """

    gpu: str
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None

    def __str__(self) -> str:
        sees = f", each sees the last {self.window}" if self.window else ""
        return (
            f"Attention of {self.queries} new tokens to {self.keys}{sees}; heads of "
            f"{self.head_dim}, {self.heads} for queries and {self.kv_heads} for keys, bfloat16, on "
            f"one {self.name}. Choose the tiles of lesson 9's flash_kernel."
        )

    @property
    def name(self) -> str:
        """Of the chip."""
        return lookup(self.gpu).name


# (queries, keys, heads, KV heads, window): the chip nearly empty, or with some waves of programs
SHAPES = (
    (256, 256, 8, 2, None),
    (512, 512, 4, 1, None),
    (128, 1024, 8, 2, None),
    (512, 512, 8, 2, 64),
)


def task_of(seed: int) -> Task:
    """Another number is another task."""
    rng = random.Random(f"tiles {seed}")
    queries, keys, heads, kv_heads, window = rng.choice(SHAPES)
    dim = rng.choice((64, 128))
    return Task(rng.choice(("h100", "h200")), queries, keys, heads, kv_heads, dim, window)


def read_choice(where: str, given) -> Tiles:
    """Raises ValueError, in one line."""
    handed_in.check_fields(f"{where}: choice", given, tuple(FIELDS))
    for name, accepted in FIELDS.items():
        if given[name] not in accepted or isinstance(given[name], bool):
            refuse(f"{where}: {name}", given[name], ", ".join(map(str, accepted)))
    return Tiles(*(int(given[name]) for name in FIELDS))


def counted(task: Task, tiles: list[Tiles]) -> list[dict]:
    """Of each: NUMBERS, "limit" and "off", the largest error of a small case; or "error", in one
    line. Raises ValueError where nothing can be compiled.
    """
    if not has_triton():
        raise ValueError("Triton is not installed, so no kernel can be compiled")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # one order of programs, so that every run predicts the same
    environment |= {CHIP: str(SM), ORDER: "0", "PYTHONPATH": str(ROOT)}
    asked = {"task": vars(task), "tiles": [vars(one) for one in tiles]}
    done = subprocess.run(
        [sys.executable, "-m", "reference.bench.open_tasks.tile_counts"],
        input=json.dumps(asked),
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it was ended"]
        raise ValueError(one_line(f"the kernel was not counted: {said[-1]}"))
    return json.loads(done.stdout.splitlines()[-1])


def not_usable(task: Task, name: str, found: dict) -> str | None:
    """In one line why tiles cannot be launched, or give a wrong result."""
    if "error" in found:
        return one_line(f"{name}: the kernel did not run: {found['error']}")
    most = lookup(task.gpu).shared_memory_bytes
    if found["shared_bytes"] > most:
        return (
            f"{name}: {found['shared_bytes']:,} bytes of shared memory, a program on one "
            f"{task.name} has at most {most:,}"
        )
    if not found["off"] < 0.02:
        return f"{name}: the result is not right, off by {found['off']:.2g}"
    return None


def run(seed: int, plan: Path | None, measure: Path | None) -> int:
    """Say the task, measure choices, or check what is handed in."""
    task, triton = task_of(seed), version_of("triton")
    print(task)
    path = plan or measure
    if path is None:
        print(f"\nA choice is JSON with {', '.join(FIELDS)}. Triton here: {triton}.")
        return 0
    found = handed_in.read_json(path)
    fields = ("tried", "chosen", "triton") if plan else ("tried",)
    handed_in.check_fields(str(path), found, fields, ("chosen", "triton"))
    rows = handed_in.read_tried(found, read_choice, NUMBERS if plan else ())
    chosen = handed_in.one_named(rows, found["chosen"]) if plan else None
    if plan and found["triton"] != triton:
        accepted = f"{triton}, which compiles here: another one writes other code, so measure again"
        refuse("triton", found["triton"], accepted)
    course = tiles_for(SM, task.head_dim, 2)
    again = counted(task, [*(row.choice for row in rows), course])
    print()
    wrong = []
    for row, numbers in zip(rows, again):
        if line := not_usable(task, row.name, numbers):
            wrong.append(line)
            continue
        shown = {name: numbers[name] for name in NUMBERS}
        handed_in.print_numbers(row.name, shown | {"limit": numbers["limit"]})
        wrong += handed_in.wrong_numbers(row, shown, ALLOWED) if plan else []
    if not plan:
        for line in wrong:
            print(line)
        return 1 if wrong else 0
    return judged(task, rows, again, chosen, wrong)


def judged(task: Task, rows, again: list[dict], chosen, wrong: list[str]) -> int:
    """Compare the chosen tiles with the others and with the course's; the exit code."""
    us = {
        row.name: one["predicted_us"]
        for row, one in zip(rows, again)
        if not_usable(task, row.name, one) is None
    }
    if chosen.name not in us:
        return handed_in.verdict(wrong)
    mine, course = us[chosen.name], again[-1]["predicted_us"]
    faster = sorted((name for name in us if us[name] < 0.99 * mine), key=us.get)
    if faster:
        wrong.append(
            one_line(f"{chosen.name}: {faster[0]} is faster, {us[faster[0]]:.2f} µs, by the counts")
        )
    if mine > 1.01 * course:
        wrong.append(f"{chosen.name}: slower than the course's tiles, {course:.2f} µs")
    print(
        f"\nYours, {chosen.name}: {mine:.2f} µs predicted on one {task.name}. The course's tiles: "
        f"{course:.2f} µs."
    )
    return handed_in.verdict(wrong)
