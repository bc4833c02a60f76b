"""The one harness of every lesson's benchmark: check that the providers agree, time them
interleaved, record, draw.

    python -m lessons.toolbox.measure.bench 03 [--quick] [--out DIR]      measure and draw a lesson
    python -m lessons.toolbox.measure.bench 03 --resume KEY --out DIR     only what DIR lacks
    python -m lessons.toolbox.measure.bench --draw build/bench/NAME.json  the same figure anywhere

A lesson's lab/benchmark.py declares `BENCHMARKS = [Benchmark(...), ...]` and holds no loop, no
clock and no plot of its own. Each benchmark leaves NAME.json, NAME.png and NAME.svg.
"""

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from lessons.toolbox.draw.plotting import ROLES
from lessons.toolbox.measure import timing
from lessons.toolbox.measure.device import default_device, fingerprint
from lessons.toolbox.measure.providers import (
    Unavailable,
    compiled,
    disagreement,
    failure,
    needs,
    on_gpu,
)
from lessons.toolbox.measure.records import (
    TITLE_FACTS,
    complaints,
    draw,
    is_sound,
    medians,
    read_json,
    write_json,
)

# what a lab/benchmark.py is written with
__all__ = ["Benchmark", "Unavailable", "compiled", "needs", "on_gpu"]
ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "build" / "bench"


@dataclass(frozen=True)
class Benchmark:
    """What is compared, over which sizes, against which physical limit.

    title: the message; may quote {speedup} (first naive over first optimized at the largest x that
        both ran), {x} (that x), {naive_growth}, {optimized_growth} (time at that x over time at
        {first}, the smallest), {floor_percent} (floor over optimized), {where} (at which x
        optimized wins, in words) and {beside} (the same against the first library), so that it
        cannot contradict the measurement, e.g. "{speedup:.1f}x as fast at {x} tokens"; a point that
        is flagged as noisy counts for none
    inputs(x, device): the tuple of inputs of one size; every provider gets the same
    providers: {label: (role, make_fn)}, role as in plotting.ROLES; make_fn(*inputs) returns the
        function of no arguments to time, which returns its output; it raises Unavailable where it
        cannot run
    bytes_moved(x), flops(x): the least traffic and work that any version needs; floor_s(x): the
        physical floor in seconds
    metric: "time", "bandwidth" (bytes_moved over time) or "flops" (flops over time)
    tolerance: largest relative error (Frobenius) against the first provider that runs; 0 means
        equal in every element
    not_drawn: labels of providers that are measured and recorded, but left out of the figure
    """

    name: str
    title: str
    x_name: str
    x_values: Sequence[int]
    inputs: Callable[[int, torch.device], tuple]
    providers: dict[str, tuple[str, Callable]]
    quick_x_values: Sequence[int] = ()
    ylabel: str = "time"
    metric: str = "time"
    bytes_moved: Callable[[int], float] | None = None
    flops: Callable[[int], float] | None = None
    floor_s: Callable[[int], float] | None = None
    floor_label: str = "physical floor"
    dtype: str = "float32"
    shape: str = ""
    tolerance: float = 1e-4
    not_drawn: Sequence[str] = ()

    def __post_init__(self):
        if not self.name.isidentifier():
            raise ValueError(f"name {self.name!r}; accepted: letters, digits and _, for file names")
        if not self.x_values or list(self.x_values) != sorted(set(self.x_values)):
            raise ValueError(f"x_values {self.x_values}; accepted: one or more sizes, ascending")
        needs = {"time": self.inputs, "bandwidth": self.bytes_moved, "flops": self.flops}
        if needs.get(self.metric) is None:
            known = "time, bandwidth (needs bytes_moved), flops (needs flops)"
            raise ValueError(f"metric {self.metric!r}; accepted: {known}")
        try:
            self.title.format(**dict.fromkeys(TITLE_FACTS, 1))
        except KeyError as unknown:
            raise ValueError(
                f"title quotes {unknown}; accepted: {', '.join(TITLE_FACTS)}"
            ) from None
        if strange := set(self.not_drawn) - set(self.providers):
            raise ValueError(f"not_drawn {sorted(strange)}; accepted: {', '.join(self.providers)}")
        if wrong := {role for role, _ in self.providers.values()} - set(ROLES):
            raise ValueError(f"roles {sorted(wrong)}; accepted: {', '.join(ROLES)}")


# ---- measuring


def run(
    benchmark: Benchmark,
    device: torch.device | str | None = None,
    quick: bool = False,
    out: str | os.PathLike | None = OUT,
    resume: str = "",
) -> dict:
    """Measure all providers at every size and return the record; write it to `out`/NAME.json unless
    `out` is None.

    quick: only `quick_x_values` (default: the two smallest sizes), a fifth of the time each.
    resume: a key of all that the result depends on, kept in the record; a sound record that `out`
    holds under the same key is returned as it is. Times are seconds. A point's status is "ok", "not
    run", "out of memory", "wrong" (differs from the first provider: never timed) or "failed", with
    the reason. Providers that cannot hold their buffers at the same time are timed one by one, and
    flagged.
    """
    path = None if out is None else Path(out) / f"{benchmark.name}.json"
    if resume and path and path.exists():
        earlier = read_json(path)
        if earlier.get("resume") == resume and is_sound(earlier):
            return earlier
    device = torch.device(device or default_device())
    record = _empty_record(benchmark, device, quick) | {"resume": resume}
    floors_s = record["floor_s"] or [None] * len(record["x"])
    full = {}  # providers that ran out of memory, which larger sizes leave out: {label: point}
    for i, x in enumerate(record["x"]):
        torch.manual_seed(record["seed"] + i)
        ready, points = _compared(benchmark, x, device, full)
        budget_s = timing.BUDGET_S / (5 if quick else 1)
        points |= _timed(ready, device=device, floor_s=floors_s[i], budget_s=budget_s)
        full |= {label: p for label, p in points.items() if p["status"] == "out of memory"}
        for label, series in record["series"].items():
            series["points"].append({"x": x, **points[label]})
        del ready
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if path:
        write_json(path, record)
    return record


def _empty_record(benchmark: Benchmark, device: torch.device, quick: bool) -> dict:
    """What a record says before anything is timed."""
    machine = fingerprint()
    if device.type == "cpu":
        machine["device"] = machine["cpu"]  # it names a GPU where there is one, used or not
    x_values = list(benchmark.x_values)
    if quick:
        x_values = list(benchmark.quick_x_values or x_values[:2])

    def at_each_x(amount):
        return [amount(x) for x in x_values] if amount else None

    return {
        "schema": 1,
        "fingerprint": machine,
        "device_type": device.type,
        "quick": quick,
        # fresh: a result that needs a certain seed is none
        "seed": int.from_bytes(os.urandom(4), "little"),
        "x": x_values,
        **{key: v for key, v in vars(benchmark).items() if isinstance(v, (str, float, int))},
        "bytes": at_each_x(benchmark.bytes_moved),
        "flops": at_each_x(benchmark.flops),
        "floor_s": at_each_x(benchmark.floor_s),
        "not_drawn": list(benchmark.not_drawn),
        "series": {
            label: {"role": role, "points": []} for label, (role, _) in benchmark.providers.items()
        },
    }


def _compared(benchmark, x, device, full) -> tuple[dict[str, Callable], dict[str, dict]]:
    """({label: function} of the providers that agree with the first one at this size, {label:
    point} of all others).
    """
    if "torch._dynamo" in sys.modules:
        # It compiles a function for eight sizes and then gives up on it.
        torch.compiler.reset()
    ready, points, truth = {}, dict(full), None
    try:
        inputs = benchmark.inputs(x, device)
    except Exception as error:
        return {}, dict.fromkeys(benchmark.providers, failure(error))
    for label, (_, make_fn) in benchmark.providers.items():
        if label in full:
            continue
        try:
            function = make_fn(*inputs)
            output = function()
            if truth is None:
                # a copy, because a provider may reuse its output buffer
                copied = isinstance(output, torch.Tensor)
                first, truth = label, output.detach().clone() if copied else output
            complaint = disagreement(output, truth, benchmark.tolerance)
        except Exception as error:
            points[label] = failure(error)
            continue
        if complaint:
            points[label] = {"status": "wrong", "reason": f"differs from {first!r}: {complaint}"}
        else:
            ready[label] = function
    return ready, points


def _timed(functions: dict[str, Callable], **how) -> dict[str, dict]:
    """{label: point}, interleaved; if one fails, or all cannot hold their buffers at once, each on
    its own and flagged so.
    """
    try:
        timings = timing.interleave(functions, **how) if functions else {}
        return {label: {"status": "ok", **asdict(t)} for label, t in timings.items()}
    except Exception as error:
        together = failure(error)
    if len(functions) == 1:
        return dict.fromkeys(functions, together)
    points = {}
    for label, function in functions.items():
        points |= _timed({label: function}, **how)
        flags = points[label].setdefault("flags", [])
        flags.append(f"timed alone: together {together['reason']}")
    return points


# ---- the command


def load_benchmarks(wanted: str, root: Path = ROOT / "lessons") -> list[Benchmark]:
    """BENCHMARKS of the lab/benchmark.py of a lesson, by number ("3", "03") or name ("kv_cache",
    "l03_kv_cache"). ValueError lists what exists.
    """
    rooms = [path.parts[-3] for path in sorted(root.glob("l[0-9][0-9]_*/lab/benchmark.py"))]
    for room in rooms:
        if wanted in (room, room[4:]) or wanted.zfill(2) == room[1:3]:
            return importlib.import_module(f"lessons.{room}.lab.benchmark").BENCHMARKS
    names = ", ".join(f"{room[1:3]} {room[4:]}" for room in rooms) or "none yet"
    raise ValueError(f"LESSON={wanted!r} has no benchmark; accepted: {names}")


def main(argv: Sequence[str] | None = None, root: Path = ROOT / "lessons") -> int:
    """The command line; returns the exit code: 1 if an output was wrong or a provider failed, 2 for
    a wrong argument.
    """
    parser = OneLineParser(
        "python -m lessons.toolbox.measure.bench",
        description="Measure and draw a lesson's benchmark.",
    )
    add = parser.add_argument
    add("lesson", nargs="?", default="", help="number or name, e.g. 03 or kv_cache")
    add("--quick", action="store_true", help="only the small sizes")
    add("--out", type=Path, default=OUT, help="folder (default: build/bench)")
    add("--resume", default="", metavar="KEY", help="keep what --out has under this KEY")
    add("--draw", type=Path, metavar="JSON", help="only draw this record again")
    options = parser.parse_args(argv)
    interrupted = "interrupted; finished records are whole, this one was not written"
    return run_command("bench", lambda: measure_and_draw(options, root), interrupted)


def measure_and_draw(options: argparse.Namespace, root: Path) -> int:
    """What the command line asks for; returns the exit code, 1 for an unsound record."""
    if options.draw:
        print(*draw(options.draw))
        return 0
    benchmarks = load_benchmarks(options.lesson, root)
    check_writable(options.out)
    sound = True
    for benchmark in benchmarks:
        print(f"{benchmark.name} ...", flush=True)
        record = run(benchmark, None, options.quick, options.out, options.resume)
        sound &= is_sound(record)
        for line in complaints(record):
            print(f"  {line}")
        if medians(record):
            print(" ", *draw(options.out / f"{benchmark.name}.json"))
        else:
            print("  nothing was measured, so nothing is drawn")
    return 0 if sound else 1


if __name__ == "__main__":
    # not __main__'s copy: a rehearsal changes the module
    from lessons.toolbox.measure.bench import main

    sys.exit(main())
