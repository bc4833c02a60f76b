"""What a kernel does, line by line, counted on a CPU: the command behind `make profile`.

    python -m lessons.toolbox.profile 09 [--gpu h100] [--kernel flash] [--compare naive]
    python -m lessons.toolbox.profile mine.py:try_it      every kernel that try_it() launches

A lesson's lab/profile.py holds functions of no arguments: `optimized`, and others to compare with.
The kernels are compiled for the GPU and run on `lessons.toolbox.gpu`, so no GPU is needed, and
nothing is timed: for Hopper `time_model` predicts. Operations of PyTorch are listed with the bytes
that they move.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from lessons.toolbox.measure.device import CHIP, compiled_chip, has_triton

ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "build" / "profile"
GPUS = {"t4": 75, "a100": 80, "l40s": 89, "rtx4090": 89, "h100": 90, "h200": 90}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m lessons.toolbox.profile", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "what", nargs="?", default="", help="a lesson's number, or FILE.py:FUNCTION"
    )
    parser.add_argument("--gpu", default="h100", choices=GPUS, help="compile for it: h100")
    parser.add_argument("--kernel", default="", help="only kernels with this in their name")
    parser.add_argument("--compare", default="", help="another function of the file, beside it")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of JSON and figures")
    return parser.parse_args(argv)


def functions_of(what: str) -> tuple[dict[str, Callable], str]:
    """({name: function}, the one to run) of "09" or "mine.py:try_it". Raises ValueError."""
    if not what:
        raise ValueError("nothing named; accepted: LESSON=09, or FILE=mine.py:try_it")
    file, colon, name = what.rpartition(":")
    if colon:
        path = Path(file)
        if path.suffix != ".py" or not path.is_file():
            raise ValueError(f"got {what!r}; accepted: a lesson's number, or FILE.py:FUNCTION")
        # last, and under a name of its own, because a file may be called profile.py or copy.py
        sys.path.append(str(path.parent.resolve()))
        spec = importlib.util.spec_from_file_location(f"profiled_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        spec.loader.exec_module(module)
    else:
        found = sorted((ROOT / "lessons").glob(f"l{what.zfill(2)}_*/lab/profile.py"))
        if not found:
            known = [p.parts[-3][1:3] for p in (ROOT / "lessons").glob("l*/lab/profile.py")]
            raise ValueError(
                f"LESSON={what}: nothing to profile; accepted: {', '.join(sorted(known))}"
            )
        module = importlib.import_module(".".join(found[0].relative_to(ROOT).with_suffix("").parts))
        name = "optimized"
    functions = {
        n: f
        for n, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__
    }
    if name not in functions:
        raise ValueError(f"function: got {name!r}; accepted: {', '.join(functions)}")
    return functions, name


def profiled(function: Callable, gpu: str):
    """(profiles of the kernels, passes of PyTorch's operations) of one call."""
    import triton

    from lessons.toolbox.gpu.arguments import WATCHERS
    from lessons.toolbox.gpu.counters import counting
    from lessons.toolbox.measure.hardware import lookup
    from lessons.toolbox.measure.passes import passes_of
    from lessons.toolbox.profile.counted import profiles

    # because code that was compiled before may name another file with the same source
    triton.knobs.compilation.always_compile = True
    function()  # once before, because what is prepared once belongs to no launch
    seen: list = []
    WATCHERS.append(seen.append)
    try:
        with counting():
            passes = passes_of(function)
    finally:
        WATCHERS.remove(seen.append)
    return profiles(seen, lookup(gpu)), passes


def where(error: Exception) -> str:
    """The last line of the course's code, or the user's, that an error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not {"site-packages", "toolbox"} & set(Path(f.filename).parts)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: " if own else ""


def report(options: argparse.Namespace) -> int:
    """In the process that compiles: run, print, write."""
    from lessons.toolbox.measure.passes import total_bytes
    from lessons.toolbox.profile import figure, margin, time_model

    check_writable(options.out)
    functions, name = functions_of(options.what)
    if options.compare and options.compare not in functions:
        raise ValueError(f"COMPARE={options.compare}; accepted: {', '.join(functions)}")
    written, shown = {}, []
    for each in filter(None, (options.compare, name)):
        try:
            kernels, passes = profiled(functions[each], options.gpu)
        except Exception as error:
            raise ValueError(f"{each}() did not end: {where(error)}{error}") from None
        kernels = [k for k in kernels if options.kernel in k.kernel.name]
        print(f"\n{each}: {len(kernels)} kernels, {len(passes)} operations of PyTorch that move "
              f"{margin.size(total_bytes(passes))}\n")  # fmt: skip
        for profile in kernels:
            print(margin.text(profile), end="\n\n")
        written[each] = {
            "kernels": [
                profile.as_json() | {"predicted": time_model.as_json(profile)}
                for profile in kernels
            ],
            "passes": [vars(one) for one in passes],
        }
        shown += [(each, profile) for profile in kernels]
    if not shown:
        raise ValueError(f"no kernel was launched with {options.kernel!r} in its name")
    stem = options.what.rpartition(":")[2] if ":" in options.what else f"l{options.what.zfill(2)}"
    file = options.out / f"{stem}_{options.gpu}.json"
    file.write_text(json.dumps(written, indent=1), encoding="utf-8")
    files = [file, *figure.draw(shown, options.out / f"{stem}_{options.gpu}")]
    print("written:", *(os.path.relpath(f) for f in files), sep="\n  ")
    return 0


def run(options: argparse.Namespace) -> int:
    """Start the process that compiles for the GPU; this one has Triton's interpreter."""
    if not has_triton():
        raise ValueError("Triton is not installed, so no kernel can be compiled")
    chip = GPUS[options.gpu]
    if compiled_chip() == chip:
        return report(options)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    arguments = ["--gpu", options.gpu, "--out", str(options.out)]
    arguments += ["--kernel", options.kernel, "--compare", options.compare]
    command = [sys.executable, "-m", "lessons.toolbox.profile", options.what, *arguments]
    return subprocess.run(command, env=environment | {CHIP: str(chip)}, check=False).returncode


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    return run_command("profile", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
