"""The commands behind `make check` and `make progress`; exercise.py lists them."""

import argparse
import subprocess
import sys
from pathlib import Path

from lessons.toolbox.command import OneLineParser, run_command
from lessons.toolbox.exercises.exercise import ROOT, SOLUTIONS, all_exercises, write_stub
from lessons.toolbox.exercises.kernels import print_ladder
from lessons.toolbox.exercises.progress import export_progress, print_progress
from lessons.toolbox.exercises.report import run_checks
from lessons.toolbox.language import said


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser("python -m lessons.toolbox.exercises", description=__doc__)
    commands = ("generate", "cells", "check", "progress", "kernels", "kills", "otter", "nbgrader")
    parser.add_argument("command", choices=commands)
    parser.add_argument(
        "which", nargs="?", help="a lesson (02), or for check one exercise (2.1); default: all"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="generate: start again even where you edited; a backup is kept",
    )
    parser.add_argument(
        "--impl", default="exercises", help="check: exercises (yours), solutions, or a folder"
    )
    parser.add_argument("--export", type=Path, help="progress: a CSV file for a spreadsheet")
    options = parser.parse_args(argv)
    return run_command("exercises", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """What the command line asks for; returns the exit code."""
    if options.command == "check":
        return 0 if run_checks(options.which, options.impl) else 1
    if options.command == "progress":
        print_progress()
        if options.export:
            export_progress(options.export)
        return 0
    if options.command == "kernels":
        print_ladder()
        return 0
    if options.command in ("otter", "nbgrader"):
        import nbformat

        from lessons.toolbox.exercises import assignment  # needs nbformat

        notebooks = {"otter": assignment.otter_notebook, "nbgrader": assignment.nbgrader_notebook}
        print(nbformat.writes(notebooks[options.command](options.which or "")))
        return 0
    files = dict.fromkeys(entry.file for entry in all_exercises(options.which))
    if options.command == "generate":
        for file in files:
            print(said(write_stub(SOLUTIONS / file, force=options.force)))
        return 0
    if options.command == "cells":
        from lessons.toolbox.exercises.statements import refresh  # needs nbformat

        for lesson in dict.fromkeys(file[1:3] for file in files):
            print(said(refresh(lesson)))
        return 0
    # a process of its own, because the toolbox stands below the tests
    lessons = [file[1:3] for file in files]
    command = [sys.executable, "-m", "tests.exercises.killing", *lessons]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
