"""What the tests of the open tasks share: the model reports, and the command over a file."""

import json
import re
from functools import lru_cache

import pytest

from lessons.toolbox.measure.device import has_triton
from reference.bench.open_tasks.__main__ import main
from reference.bench.open_tasks.board import START

REPORTS = START.parent / "reports"
needs_triton = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")
TASKS = ("cache", "tiles", "drafter")


@lru_cache
def model_report(task: str) -> str:
    """What the model report hands in, as JSON."""
    text = (REPORTS / f"{task}.md").read_text(encoding="utf-8")
    return re.search(r"```json\n(.*?)```", text, re.DOTALL)[1]


def handed_in(task: str, tmp_path, text: str, capsys, flag: str = "--plan") -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command over a file of this text."""
    file = tmp_path / f"{task}.json"
    file.write_text(text, encoding="utf-8")
    code = main([task, "--seed", "7", flag, str(file)])
    said = capsys.readouterr()
    return code, said.out, said.err


def report_of(task: str) -> dict:
    """The model report's file, in the hands of this machine's Triton."""
    found = json.loads(model_report(task))
    return found | ({"triton": "of the report"} if task == "tiles" else {})
