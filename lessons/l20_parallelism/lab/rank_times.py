"""What the commands have in common that time two ranks, `lab.experiments` and `lab.small_sums`."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from lessons.l20_parallelism.processes.launch import run_ranks
from lessons.toolbox.command import OneLineParser, check_writable, run_command
from lessons.toolbox.measure.device import fingerprint
from lessons.toolbox.measure.records import write_json


def time_ranks(
    name: str,
    doc: str,
    experiments: Mapping[str, Callable],
    record: Mapping[str, object],
    repeats: int,
    argv: list[str] | None,
) -> int:
    """Run what both ranks run, {name: a function of a group and a number of repeats}, print what
    rank 0 found, and write it with --out. name: of the module, doc: its docstring. record: lines of
    the record, "name" is also its file's. repeats: without --repeats. Returns the exit code.
    """
    prog = f"python -m lessons.l20_parallelism.lab.{name}"
    parser = OneLineParser(prog, description=doc.split("\n")[0])
    parser.add_argument("--out", type=Path, default=None, help="folder for the record")
    parser.add_argument("--repeats", type=int, default=repeats)
    options = parser.parse_args(argv)
    return run_command(name, lambda: run(options, experiments, record))


def run(
    options: argparse.Namespace,
    experiments: Mapping[str, Callable],
    record: Mapping[str, object],
) -> int:
    """Measure, print and record. Raises ValueError for options that cannot work."""
    if options.repeats < 1:
        raise ValueError(f"--repeats: got {options.repeats}; accepted: 1 or more")
    if options.out:
        check_writable(options.out)
    series = {}
    for name, function in experiments.items():
        series[name] = run_ranks(2, function, options.repeats, timeout_s=600.0)[0]
        print(name)
        for label, found in series[name].items():
            print(f"  {label}: {found}", flush=True)
    if options.out:
        # a record like those of the harness, but its series have no x
        facts = {"schema": 1, "fingerprint": fingerprint(), "repeats": options.repeats}
        write_json(options.out / f"{record['name']}.json", {**facts, **record, "series": series})
    return 0
