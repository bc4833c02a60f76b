"""The one harness of every lesson's benchmark: check that the providers agree, time them
interleaved, record, draw.

    python -m lessons.toolbox.measure.bench 03 [--quick] [--out DIR]      lessons/l03_*/lab/benchmark.py -> build/bench/*.json, *.png, *.svg
    python -m lessons.toolbox.measure.bench --draw build/bench/NAME.json  the same figure from a record made on any machine

A lesson's benchmark.py declares `BENCHMARKS = [Benchmark(...), ...]` and holds no loop, no clock
and no plot of its own.
"""

import argparse
import contextlib
import functools
import gc
import importlib.util
import os
import re
import string
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lessons.toolbox.draw.plotting import ROLES
from lessons.toolbox.measure import timing
from lessons.toolbox.measure.device import default_device, fingerprint
from lessons.toolbox.measure.records import METRICS, TITLE_FACTS, complaints, draw, write_json

ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "build" / "bench"


class Unavailable(Exception):
    """Raised by a provider's make_fn where it cannot run; its one line is recorded as the reason."""


def on_gpu(make: Callable) -> Callable:
    """A provider that is only timed on a GPU: the interpreter's speed says nothing about a kernel."""

    @functools.wraps(make)
    def checked(*inputs):
        if not any(isinstance(i, torch.Tensor) and i.is_cuda for i in inputs):
            raise Unavailable("needs a GPU: the interpreter's speed says nothing about a kernel")
        return make(*inputs)

    return checked


@dataclass(frozen=True)
class Benchmark:
    """What is compared, over which sizes, against which physical limit.

    title: the message; may quote {speedup} (first naive over first optimized at the largest x that both ran), {x} (that x),
        {naive_growth}, {optimized_growth} (time at that x over time at the smallest) and {floor_percent} (floor over optimized),
        so that it cannot contradict the measurement, e.g. "{speedup:.1f}x faster at {x} tokens"
    inputs(x, device): the tuple of inputs of one size; every provider gets the same
    providers: {label: (role, make_fn)}, role as in plotting.ROLES; make_fn(*inputs) returns the function of no arguments to
        time, which returns its output; it raises Unavailable where it cannot run
    bytes_moved(x), flops(x): the least traffic and work that any version needs; floor_s(x): the physical floor in seconds
    metric: "time", "bandwidth" (bytes_moved over time) or "flops" (flops over time)
    tolerance: largest relative error (Frobenius) against the first provider that runs; 0 means equal in every element
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

    def __post_init__(self):
        if not re.fullmatch(r"\w+", self.name):
            raise ValueError(
                f"name {self.name!r}; accepted: letters, digits and _, because it names files"
            )
        if list(self.x_values) != sorted(set(self.x_values)) or not self.x_values:
            raise ValueError(f"x_values {self.x_values}; accepted: one or more sizes, ascending")
        if self.metric not in METRICS:
            raise ValueError(f"metric {self.metric!r}; accepted: {', '.join(METRICS)}")
        if (self.metric == "bandwidth" and not self.bytes_moved) or (
            self.metric == "flops" and not self.flops
        ):
            raise ValueError(
                f"metric {self.metric!r} needs "
                f"{'bytes_moved' if self.metric == 'bandwidth' else 'flops'}"
            )
        if wrong := {field for _, field, *_ in string.Formatter().parse(self.title) if field} - set(
            TITLE_FACTS
        ):
            raise ValueError(f"title quotes {sorted(wrong)}; accepted: {', '.join(TITLE_FACTS)}")
        if wrong := {role for role, _ in self.providers.values()} - set(ROLES):
            raise ValueError(f"roles {sorted(wrong)}; accepted: {', '.join(ROLES)}")


# ---- measuring


def run(
    benchmark: Benchmark,
    device: torch.device | str | None = None,
    quick: bool = False,
    out: str | os.PathLike | None = OUT,
) -> dict:
    """Measure all providers at every size and return the record; write it to `out`/NAME.json unless
    `out` is None.

    quick: only `quick_x_values` (default: the two smallest sizes), a fifth of the time each. Times
    are seconds. A point's status is "ok", "not run", "out of memory", "wrong" (differs from the
    first provider: never timed) or "failed", with the reason. Providers that cannot hold their
    buffers at the same time are timed one by one, and flagged.
    """
    device = torch.device(device or default_device())
    x_values = list(
        (benchmark.quick_x_values or benchmark.x_values[:2]) if quick else benchmark.x_values
    )
    budget_s = timing.BUDGET_S / (5 if quick else 1)
    machine = fingerprint()
    if device.type == "cpu" and "cpu" in machine:
        # the fingerprint names a GPU where there is one, used or not
        machine["device"] = machine["cpu"]
    # fresh: a result that needs a certain seed is none
    seed = int.from_bytes(os.urandom(4), "little")
    at_each = {
        "bytes": benchmark.bytes_moved,
        "flops": benchmark.flops,
        "floor_s": benchmark.floor_s,
    }
    record = {
        "schema": 1,
        "fingerprint": machine,
        "device_type": device.type,
        "quick": quick,
        "seed": seed,
        "x": x_values,
    }
    record |= {
        field: getattr(benchmark, field)
        for field in (
            "name",
            "title",
            "x_name",
            "ylabel",
            "metric",
            "floor_label",
            "dtype",
            "shape",
            "tolerance",
        )
    }
    record |= {key: [f(x) for x in x_values] if f else None for key, f in at_each.items()}
    record["series"] = {
        label: {"role": role, "points": []} for label, (role, _) in benchmark.providers.items()
    }
    with _progress(benchmark.name, len(x_values)) as advance:
        for i, x in enumerate(x_values):
            torch.manual_seed(seed + i)
            for label, point in _measure_size(
                benchmark, x, device, budget_s, record["series"]
            ).items():
                record["series"][label]["points"].append({"x": x, **point})
            advance()
    if out is not None:
        write_json(Path(out) / f"{benchmark.name}.json", record)
    return record


def _measure_size(benchmark, x, device, budget_s, earlier) -> dict[str, dict]:
    """{label: point} for one size: build, compare, and only then time what is left."""
    points, ready, truth = {}, {}, None
    floor_s = benchmark.floor_s(x) if benchmark.floor_s else None
    try:
        inputs = benchmark.inputs(x, device)
    except Exception as error:
        return dict.fromkeys(benchmark.providers, _failure(error))
    for label, (_, make_fn) in benchmark.providers.items():
        if any(p["status"] == "out of memory" for p in earlier[label]["points"]):
            points[label] = {"status": "out of memory", "reason": "already at a smaller size"}
            continue
        try:
            function = make_fn(*inputs)
            output = _copy(function())
            if truth is None:
                truth = (label, output)
            if complaint := disagreement(output, truth[1], benchmark.tolerance):
                points[label] = {
                    "status": "wrong",
                    "reason": f"differs from {truth[0]!r}: {complaint}",
                }
            else:
                ready[label] = function
        except Exception as error:
            points[label] = _failure(error)
    points |= _time(ready, device=device, floor_s=floor_s, budget_s=budget_s)
    del inputs, ready, truth
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return points


def _time(functions, **how) -> dict[str, dict]:
    """{label: point}, interleaved; if that fails, because all hold their buffers at once, each on
    its own and flagged so.
    """

    def point(t, *flags):
        return {
            "status": "ok",
            "median_s": t.median_s,
            "p20_s": t.p20_s,
            "p80_s": t.p80_s,
            "runs": t.runs,
            "flags": [*t.flags, *flags],
        }

    if not functions:
        return {}
    try:
        return {label: point(t) for label, t in timing.interleave(functions, **how).items()}
    except Exception as error:
        why = _failure(error)["reason"]
    points = {}
    for label, function in functions.items():
        try:
            points[label] = point(timing.measure(function, **how), f"timed alone: together {why}")
        except Exception as error:
            points[label] = _failure(error)
    return points


def _failure(error: Exception) -> dict:
    """How an exception is recorded. PyTorch's CPU allocator raises a plain RuntimeError, so its
    words decide.
    """
    if isinstance(error, Unavailable):
        return {"status": "not run", "reason": str(error)}
    words = str(error).lower()
    if (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or "out of memory" in words
        or "can't allocate memory" in words
    ):
        return {"status": "out of memory", "reason": str(error).split("\n")[0][:200]}
    return {
        "status": "failed",
        "reason": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
            :300
        ],
    }


def _copy(output):
    """A provider may reuse its output buffer, so the output is copied before the next provider
    runs.
    """
    return output.detach().clone() if isinstance(output, torch.Tensor) else output


def disagreement(output, truth, tolerance: float) -> str:
    """Why `output` is not `truth`, in one line; "" if it is. Tensors [...]: relative errors;
    anything else: equality.
    """
    if output is None or truth is None:
        return "a provider returned None; accepted: its output, so that it can be compared"
    if not isinstance(output, torch.Tensor):
        return "" if output == truth else "outputs differ"
    if output.shape != truth.shape:
        return f"shape {list(output.shape)}, not {list(truth.shape)}"
    if tolerance == 0 or not truth.is_floating_point():
        count = int((output != truth.to(output.device)).sum())
        return f"{count} of {truth.numel()} elements differ" if count else ""
    got, want = output.double().cpu(), truth.double().cpu()
    if not torch.equal(got.isfinite(), want.isfinite()):
        return "NaN or infinity at other places"
    got, want = got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0)
    error = float((got - want).norm() / want.norm().clamp_min(1e-300))
    worst = (
        float((got - want).abs().max() / want.abs().max().clamp_min(1e-300))
        if want.numel()
        else 0.0
    )
    # the second rule: one wrong row of many hardly moves the norm
    if error > tolerance or worst > 10 * tolerance:
        return f"relative error {error:.1e}, worst element {worst:.1e}, tolerance {tolerance:.1e}"
    return ""


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar once two seconds have passed. Without its own thread, because that would run during the
    measurement.
    """
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:  # a GPU machine that has only torch, triton and matplotlib
        yield lambda: None
        return
    bar, start = (
        Progress(console=Console(stderr=True), auto_refresh=False, transient=True),
        time.monotonic(),
    )
    task = bar.add_task(name, total=total)

    def advance():
        bar.advance(task)
        if time.monotonic() - start > 2:
            bar.start()
            bar.refresh()

    try:
        yield advance
    finally:
        bar.stop()


# ---- the command


def lessons_with_benchmarks(root: Path = ROOT / "lessons") -> dict[str, Path]:
    """{folder name: its benchmark.py}, in order of the lessons."""
    return {path.parts[-3]: path for path in sorted(root.glob("l[0-9][0-9]_*/lab/benchmark.py"))}


def find_lesson(wanted: str, root: Path = ROOT / "lessons") -> Path:
    """The benchmark.py of a lesson by number ("3", "03") or name ("kv_cache", "l03_kv_cache").
    ValueError lists what exists.
    """
    known = lessons_with_benchmarks(root)
    for folder, path in known.items():
        number, name = folder[1:3], folder[4:]
        if wanted in (folder, name) or (wanted.isdecimal() and int(wanted) == int(number)):
            return path
    names = ", ".join(f"{folder[1:3]} {folder[4:]}" for folder in known) or "none yet"
    raise ValueError(f"LESSON={wanted!r} has no benchmark; accepted: {names}")


def load_benchmarks(path: Path) -> list[Benchmark]:
    """BENCHMARKS of a lesson's benchmark.py."""
    name = f"lessons.{path.parts[-3]}.lab.benchmark"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not getattr(module, "BENCHMARKS", None):
        raise ValueError(
            f"{path.parts[-3]}/lab/benchmark.py declares no BENCHMARKS; accepted: BENCHMARKS = "
            f"[Benchmark(...), ...]"
        )
    return module.BENCHMARKS


def report(record: dict) -> bool:
    """Print what did not run and why, one line each. False if an output was wrong or a provider
    failed.
    """
    for line in complaints(record):
        print(f"  {line}")
    return not any(
        p["status"] in ("wrong", "failed") for s in record["series"].values() for p in s["points"]
    )


def main(argv: Sequence[str] | None = None, root: Path = ROOT / "lessons") -> int:
    """The command line; returns the exit code: 1 if an output was wrong or a provider failed, 2 for
    a wrong argument.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lessons.toolbox.measure.bench",
        description="Measure and draw a lesson's benchmark.",
    )
    parser.add_argument("lesson", nargs="?", default="", help="number or name, e.g. 03 or kv_cache")
    parser.add_argument("--quick", action="store_true", help="only the small sizes")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: the GPU if there is one"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder for JSON, PNG and SVG (default: build/bench)"
    )
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only draw this record again")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device here; accepted: cpu")
    sound = True
    try:
        if options.draw:
            print(*draw(options.draw))
            return 0
        for benchmark in load_benchmarks(find_lesson(options.lesson, root)):
            print(f"{benchmark.name} ...", flush=True)
            record = run(benchmark, options.device, options.quick, options.out)
            sound &= report(record)
            if any(p["status"] == "ok" for s in record["series"].values() for p in s["points"]):
                print(" ", *draw(options.out / f"{benchmark.name}.json"))
            else:
                print("  nothing was measured, so nothing is drawn")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "interrupted; finished records are whole, the unfinished one was not written",
            file=sys.stderr,
        )
        return 130
    return 0 if sound else 1


if __name__ == "__main__":
    # not __main__'s copy: lessons import Unavailable from the module
    from lessons.toolbox.measure.bench import main

    sys.exit(main())
