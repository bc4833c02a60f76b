"""What is proved, where, and how to prove it: the commands behind `make gpu` and `make proof`.

    python -m lessons.toolbox.proof gpu [--lesson 03] [--out DIR] [--budget-minutes 9] [--pack FILE]
    python -m lessons.toolbox.proof gpu --rehearse [...]    the same steps on a pretended GPU
    python -m lessons.toolbox.proof plan [--out DIR] [--budget-minutes 8]    what gpu would do
    python -m lessons.toolbox.proof cpu [...]    the tests of equivalence without a GPU
    python -m lessons.toolbox.proof compiled --chip 90 [...]    the same with the code that the
                                                 compilers make for a chip, run on the CPU
    python -m lessons.toolbox.proof planted --chip 80 [...]      bugs in that code: are they found?
    python -m lessons.toolbox.proof table        each kernel: on a CPU, by the compiler, on a GPU
    python -m lessons.toolbox.proof readme       the same, written into the READMEs

A test of equivalence records its proof through the fixture of `record`. `run` runs all that needs a
GPU. `table` holds the records against the sources, so that a kernel changed since its proof shows
as stale.
"""

import argparse
import dataclasses
import importlib.util
import signal
import sys
from pathlib import Path

from lessons.toolbox.command import OneLineParser, run_command
from lessons.toolbox.measure.device import RUNS, core_count, has_gpu, interpreting
from lessons.toolbox.proof import machine, table
from lessons.toolbox.proof.machine import ROOT
from lessons.toolbox.proof.planting import command as planting
from lessons.toolbox.proof.rehearsal import Rehearsal, folder
from lessons.toolbox.proof.run import Run
from lessons.toolbox.proof.steps import Steps

# what the lessons, their tests and the ladder import
NEEDED = ("pytest", "hypothesis", "triton", "transformers", "tokenizers", "safetensors", "rich")
NEEDED += ("numpy", "matplotlib")


def prove(options: argparse.Namespace, here: machine.Machine, root: Path = ROOT) -> int:
    """The commands gpu and cpu on the machine `here`; the exit code says whether all passed."""
    folder = "cpu" if here.interpreted else machine.device_folder(here.fingerprint["device"])
    if here.chip:
        folder = f"sm_{here.chip}"
    out = (options.out or root / "results" / folder).resolve()
    lessons = machine.rooms(root, options.lesson)
    run = Run(here, out, lessons, 60 * options.budget_minutes, root, options.pack)
    if here.interpreted:
        run.go(run.equivalence(), here.jobs)
        run.go_again()
    else:
        run.everything()
    return run.close()


def rehearse(options: argparse.Namespace, root: Path = ROOT) -> int:
    """The steps of the command gpu on a pretended one; the exit code says whether all passed."""
    here = machine.this_machine()
    pretended = here.fingerprint | {"device": "pretended GPU", "rehearsed": True}
    here = dataclasses.replace(here, fingerprint=pretended, interpreted=False, workers=1)
    lessons = machine.rooms(root, options.lesson)
    run = Rehearsal(here, folder(options.out, root), lessons, 60 * options.budget_minutes, root)
    run.everything()
    return run.close()


def show_plan(options: argparse.Namespace, root: Path = ROOT) -> int:
    """What `gpu` would do in its minutes, after what --out already holds (default: nothing)."""
    from lessons.toolbox.proof import plan

    here = plan.machine_like("the GPU")
    out = (options.out or root / "build" / "nothing").resolve()
    steps = Steps(here, out, machine.rooms(root, options.lesson), root)
    for line in plan.plan(steps, plan.Estimates(root), 60 * options.budget_minutes):
        print(line)
    return 0


def why_not_here(interpreted: bool) -> str:
    """What keeps this machine from the run, in one line; "" if nothing does."""
    if missing := not_installed():
        return missing
    if interpreted and not interpreting():
        return "this runs kernels in the interpreter: set TRITON_INTERPRET=1"
    if not interpreted and interpreting():
        return "TRITON_INTERPRET is set, so no kernel would run on the GPU: unset it"
    if not interpreted and not has_gpu():
        return "no CUDA device on this machine; `make proof` shows what is recorded of others"
    return ""


def not_installed() -> str:
    """Which modules are missing, in one line; "" if none is."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed: pip install {' '.join(missing)}" if missing else ""


def readme(root: Path = ROOT) -> int:
    """Compile the kernels that have no report, record what the compiler says in results/compiled/,
    and rewrite what the READMEs say of proofs.
    """
    table.record_compiled(root)
    for file, text in table.readmes(root).items():
        file.write_text(text, encoding="utf-8")
        print(f"{file.relative_to(root)} is up to date")
    return 0


def show(root: Path = ROOT) -> int:
    from rich.console import Console
    from rich.markdown import Markdown

    rows = table.rows(table.kernels(root), table.proofs(root))
    Console().print(Markdown(table.markdown(rows)))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m lessons.toolbox.proof", description=__doc__.split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (
        ("gpu", "prove and measure everything on this machine's GPU"),
        ("plan", "say what gpu would do in its minutes"),
        ("cpu", "prove every kernel without one: interpreted, CUDA C++ emulated"),
        ("compiled", "prove every kernel without one: compiled for a chip, run on the CPU"),
    ):
        run = commands.add_parser(name, help=about)
        run.add_argument("--out", type=Path, help="folder of the results: results/<device>")
        run.add_argument("--lesson", help="only this lesson: number or name")
        run.add_argument("--budget-minutes", type=float, default=9, help="the run ends then")
        run.add_argument("--pack", type=Path, help="an archive of that folder, after each step")
        run.add_argument("--jobs", type=int, help="lessons tested at once, if not by memory")
        run.set_defaults(rehearse=False)
        run.set_defaults(chip=None)
        if name == "compiled":
            run.add_argument("--chip", type=int, required=True, choices=RUNS, help="80 for sm_80")
        if name in ("gpu", "plan"):
            run.add_argument("--rehearse", action="store_true", help="pretend a GPU, prove nothing")
    bugs = commands.add_parser("planted", help="plant bugs in compiled code, and count those found")
    bugs.add_argument("--chip", type=int, required=True, choices=RUNS, help="80 for sm_80")
    bugs.add_argument("--lesson", help="only this lesson: number or name")
    bugs.add_argument("--each", type=int, default=6, help="bugs of a kind in a kernel, at most")
    bugs.add_argument("--seconds", type=float, default=120, help="of processor time for a kernel")
    commands.add_parser("table", help="what is proved, and where")
    commands.add_parser("readme", help="write it into the READMEs")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    interrupted = "interrupted; what was finished is recorded, run again to go on"
    return run_command("proof", lambda: run_proof(options), interrupted)


def run_proof(options: argparse.Namespace) -> int:
    """What the command line asks for; returns the exit code."""
    if options.command in ("table", "readme"):
        return show() if options.command == "table" else readme()
    if options.command == "plan":
        return show_plan(options)
    if options.command == "planted":
        if missing := not_installed():
            raise ValueError(missing)
        return planting.main(options.chip, options.lesson, options.each, options.seconds)
    interpreted = options.command in ("cpu", "compiled")
    is_rehearsed = getattr(options, "rehearse", False)
    if why := not_installed() if is_rehearsed else why_not_here(interpreted):
        raise ValueError(why)
    # a time limit from outside ends it like Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if is_rehearsed:
        return rehearse(options)
    here = machine.this_machine(interpreted, options.chip)
    if options.jobs:
        workers = max(1, core_count() // options.jobs) if here.workers > 1 else 1
        here = dataclasses.replace(here, jobs=options.jobs, workers=workers)
    return prove(options, here)


if __name__ == "__main__":
    sys.exit(main())
