"""The film of the front page (make film): record the run again, and draw it.

python -m reference.trace.film          writes both films, a still of each, and run.json
"""

import sys
from pathlib import Path

from lessons.toolbox.command import OneLineParser, run_command
from reference.trace.film import draw, run


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = OneLineParser("python -m reference.trace.film", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=run.RECORD.parent, help="a folder")
    options = parser.parse_args(argv)
    return run_command("film", lambda: write(options.out))


def write(out: Path) -> int:
    """The record and the pictures."""
    found = run.record()
    out.mkdir(parents=True, exist_ok=True)
    (out / run.RECORD.name).write_text(run.written(found), encoding="utf-8")
    for name, text in draw.pictures(found).items():
        (out / name).write_text(text, encoding="utf-8")
        print(f"{out / name}: {len(text.encode()) // 1024} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
