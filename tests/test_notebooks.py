"""Every committed notebook runs from top to bottom on a CPU, from a foreign working directory, and
is left as it is.
"""

import hashlib
import os
import resource
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.notebook_rules import notebooks

REPOSITORY = Path(__file__).resolve().parents[1]
# of processor time on one core, so that neither other tests nor a machine that was put to sleep
# count
LIMIT_S = 120
HANGS_S = 900  # a single cell


def execute(
    path: Path,
    folder: Path,
    limit_s: float = LIMIT_S,
    cells: int | None = None,
    session: str | None = None,
):
    """Run a copy of a notebook (its first `cells` cells) with `folder` as working directory;
    returns the copy.

    session: what JupyterLab tells a kernel of its notebook's place; that is how a notebook finds
    the course from anywhere.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = notebook.cells[:cells]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "JPY_SESSION_NAME")
    }
    client = nbclient.NotebookClient(
        notebook, timeout=HANGS_S, resources={"metadata": {"path": str(folder)}}
    )
    before_s = processor_s()
    client.execute(
        env=environment | {"OMP_NUM_THREADS": "1", "JPY_SESSION_NAME": session or str(path)}
    )
    seconds = processor_s() - before_s
    assert 0 < seconds < limit_s, (
        f"{path.name} took {seconds:.0f} s of a core, more than {limit_s:.0f} s"
    )
    return notebook


def processor_s() -> float:
    """Seconds that processes which this one started, and which have ended, kept a core busy."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


@pytest.mark.parametrize("path", notebooks(REPOSITORY), ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    notebook = execute(path, tmp_path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before, (
        "running it changed the committed file"
    )
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    assert code and all(cell.execution_count for cell in code)


@pytest.mark.parametrize("path", notebooks(REPOSITORY), ids=lambda path: path.stem)
def test_notebook_away_from_the_course_says_so_in_one_line(path, tmp_path):
    if Path(sys.prefix).is_relative_to(REPOSITORY):
        pytest.skip(
            "NOT RUN: this Python lies inside the course, from which a notebook finds it wherever "
            "it is"
        )
    first = next(
        i
        for i, cell in enumerate(nbformat.read(path, as_version=4).cells)
        if cell.cell_type == "code"
    )
    with pytest.raises(nbclient.exceptions.CellExecutionError) as stopped:
        execute(path, tmp_path, cells=first + 1, session=str(tmp_path / path.name))
    assert (
        stopped.value.ename == "SystemExit"
        and "\n" not in stopped.value.evalue
        and "make lab" in stopped.value.evalue
    )


def written(folder, *sources):
    path = folder / "example.ipynb"
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources]),
        path,
    )
    return path


def test_a_notebook_that_fails_or_dawdles_is_caught(tmp_path, monkeypatch):
    away = tmp_path / "elsewhere"
    away.mkdir()
    done = execute(written(tmp_path, "import os\nprint(os.path.basename(os.getcwd()))"), away)
    assert done.cells[0].outputs[0].text == "elsewhere\n"
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="FileNotFoundError"):
        execute(written(tmp_path, "open('models/prompts.json')"), away)
    with pytest.raises(AssertionError, match=r"took \d s of a core, more than 3 s"):
        execute(
            written(tmp_path, "import time\nwhile time.process_time() < 4: pass"), away, limit_s=3
        )
    monkeypatch.setattr(sys.modules[__name__], "HANGS_S", 1)
    with pytest.raises(nbclient.exceptions.CellTimeoutError):
        execute(written(tmp_path, "import time; time.sleep(60)"), away)
