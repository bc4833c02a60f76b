"""What is proved, where, and how to prove it: the commands behind `make gpu` and `make proof`.

    python -m lessons.toolbox.proof gpu [--lesson 03] [--out DIR] [--budget-minutes 9] [--again] [--rehearse]
    python -m lessons.toolbox.proof table [--markdown]      each lesson's kernels: interpreter, compiler, GPU
    python -m lessons.toolbox.proof readme                  the same table, as README.md shows it, written there
    python -m lessons.toolbox.proof draw results/h200       the figures of a recorded run, on any machine

A test of equivalence records its proof through the fixture of `proof_record`; `proof_run` runs all
that needs a GPU; `proof_table` holds the records against the sources, so that a kernel changed
since its proof shows as stale.
"""

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lessons.toolbox.measure import records
from lessons.toolbox.measure.device import has_gpu, interpreting
from lessons.toolbox.proof import machine as proof_machine
from lessons.toolbox.proof import run as proof_run
from lessons.toolbox.proof import table as proof_table

ROOT = Path(__file__).resolve().parents[3]
NEEDED_ON_GPU = ("pytest", "triton", "transformers", "matplotlib", "rich")


def gpu(
    options: argparse.Namespace, machine: proof_machine.Machine | None = None, root: Path = ROOT
) -> int:
    """Run everything that needs a GPU; `machine` stands in for this one in a test. Exit code 2
    where it cannot start.
    """
    if machine is None:
        if why := why_not_here(options.rehearse):
            print(f"proof: {why}", file=sys.stderr)
            return 2
        machine = proof_machine.this_machine(interpreted=options.rehearse)
    folder = proof_machine.device_folder(machine.fingerprint["device"])
    default = root / ("build/rehearsal" if machine.interpreted else f"results/{folder}")
    run = proof_run.Run(
        machine,
        (options.out or default).resolve(),
        proof_machine.find_rooms(options.lesson, root),
        time.monotonic() + 60 * options.budget_minutes,
        root,
        options.again,
    )
    return run.everything()


def why_not_here(rehearse: bool) -> str:
    """What keeps this machine from the run, in one line; "" if nothing does."""
    if missing := [name for name in NEEDED_ON_GPU if importlib.util.find_spec(name) is None]:
        return f"{', '.join(missing)} not installed: pip install {' '.join(missing)}"
    if rehearse:
        return (
            ""
            if interpreting()
            else "--rehearse runs kernels in the interpreter: set TRITON_INTERPRET=1"
        )
    if not has_gpu():
        return (
            "no CUDA device on this machine, so there is nothing to prove on it: `make proof` "
            "shows the recorded proofs, "
            "--rehearse goes through the same steps in the interpreter"
        )
    return (
        "TRITON_INTERPRET is set, so no kernel would run on the GPU: unset it"
        if interpreting()
        else ""
    )


def draw(folder: Path, root: Path = ROOT) -> int:
    """Draw a recorded run's benchmarks.json and ladder.json as PNG and SVG into its folder. Returns
    1 if one cannot be drawn.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder; accepted: a folder that `make gpu` wrote, e.g. results/h200"
        )
    recorded, failed = folder / "benchmarks.json", 0
    for number, lesson in (
        json.loads(recorded.read_text(encoding="utf-8")).items() if recorded.exists() else ()
    ):
        for name, record in lesson["records"].items():
            with tempfile.TemporaryDirectory(dir=folder) as beside:
                source = Path(beside) / f"l{number}_{name.removeprefix(f'l{number}_')}.json"
                records.write_json(source, record)
                try:
                    for figure in records.draw(source):
                        print(Path(figure).replace(folder / Path(figure).name))
                except ValueError as error:
                    print(f"proof: {error}", file=sys.stderr)
                    failed = 1
    if (folder / "ladder.json").exists():
        ladder = str((folder / "ladder.json").resolve())
        failed |= (
            subprocess.run(
                [sys.executable, "-m", "reference.ladder_report", ladder], cwd=root
            ).returncode
            != 0
        )
    return failed


def table(options: argparse.Namespace, root: Path = ROOT) -> int:
    """Print the table: live, with this machine's tests and compiler, or --markdown, from the
    recorded results alone.
    """
    if options.markdown:
        print(proof_table.markdown(root))
    else:
        proof_table.print_live(root)
    return 0


def readme(root: Path = ROOT) -> int:
    """Compile all kernels, record what the compiler says in results/compiled.json, and rewrite
    README.md's table.
    """
    proof_table.record_compiled(root)
    path = root / "README.md"
    path.write_text(
        proof_table.with_table(path.read_text(encoding="utf-8"), proof_table.markdown(root)),
        encoding="utf-8",
    )
    print(f"{path.name}: the table of proofs is up to date")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lessons.toolbox.proof", description=__doc__.split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("gpu", help="prove and measure everything on this machine's GPU")
    run.add_argument("--out", type=Path, help="where the results go (default: results/<device>)")
    run.add_argument("--lesson", help="only this lesson: number or name")
    run.add_argument(
        "--budget-minutes",
        type=float,
        default=9.0,
        help="no step runs longer than this after the start",
    )
    run.add_argument("--again", action="store_true", help="also what an earlier run finished")
    run.add_argument(
        "--rehearse",
        action="store_true",
        help="every step, on a CPU and small sizes: proves nothing",
    )
    shown = commands.add_parser("table", help="what is proved, and where")
    shown.add_argument(
        "--markdown",
        action="store_true",
        help="as README.md shows it: from results/ and the sources alone",
    )
    commands.add_parser("readme", help="write the table into README.md")
    drawn = commands.add_parser("draw", help="draw the figures of a recorded run")
    drawn.add_argument("folder", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        if options.command == "gpu":
            # a time limit from outside ends it like Ctrl-C
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            return gpu(options)
        if options.command == "draw":
            return draw(options.folder)
        return table(options) if options.command == "table" else readme()
    except (ValueError, OSError) as error:
        print(f"proof: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "proof: interrupted; what was finished is recorded, run again to go on", file=sys.stderr
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
