"""Every committed notebook runs from top to bottom on a CPU and is left as it is.

nbmake would start a kernel from nothing for each, in the notebook's own folder and without a limit.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebook_kernels import preloaded_kernels
from tests.notebook_rules import notebooks

nbclient = pytest.importorskip("nbclient", reason="NOT RUN: nbclient is not installed")
nbformat = pytest.importorskip("nbformat", reason="NOT RUN: nbformat is not installed")

REPOSITORY = Path(__file__).resolve().parents[1]
# of processor time on one core, so that neither other tests nor a machine that was put to sleep
# count
LIMIT_S = 120
HANGS_S = 900  # a single cell

each_notebook = pytest.mark.parametrize("path", notebooks(REPOSITORY), ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def seconds_used():
    """Kernels start preloaded; a function that tells the seconds of a core that they used."""
    with preloaded_kernels() as seconds:
        yield seconds


def execute(
    path: Path,
    folder: Path,
    seconds_used: Callable[[], float],
    limit_s: float = LIMIT_S,
    hangs_s: float = HANGS_S,
    is_quick: bool = False,
):
    """Run a copy of a notebook with `folder` as working directory, as Jupyter does with the
    notebook's own; returns the copy.

    is_quick: what it measures is measured once, so the figures show that they are drawn.
    """
    notebook = nbformat.read(path, as_version=4)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if is_quick:
        environment["TIMED_ONCE"] = "1"
        environment["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes longer than all that is timed
    environment.pop("PYTHONPATH", None)
    client = nbclient.NotebookClient(
        notebook,
        timeout=hangs_s,
        shutdown_kernel="immediate",
        resources={"metadata": {"path": str(folder)}},
    )
    before_s = seconds_used()
    client.execute(env=environment)
    seconds = seconds_used() - before_s
    assert 0 < seconds < limit_s, (
        f"{path.name} took {seconds:.0f} s of a core, more than {limit_s:.0f} s"
    )
    return notebook


@each_notebook
@pytest.mark.sample(1)
def test_notebook_runs(path, seconds_used, request):
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    is_quick = not request.config.getoption("--all")
    notebook = execute(path, path.parent, seconds_used, is_quick=is_quick)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before, (
        "running it changed the committed file"
    )
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    assert code and all(cell.execution_count for cell in code)


@each_notebook
def test_a_notebook_is_one_by_its_schema(path):
    nbformat.validate(nbformat.read(path, as_version=4))


@each_notebook
def test_a_notebook_begins_with_one_import(path):
    """`start.py` beside it knows where the course is. A kernel that does not find it has one error
    in one line, and the cell says what to do.
    """
    cells = nbformat.read(path, as_version=4).cells
    first = next(cell.source for cell in cells if cell.cell_type == "code").splitlines()
    assert first[0].startswith("from start import ") and "make lab" in first[0]
    assert first[-1].startswith("begin(seed=") and len(first) <= 7


def test_without_pytorch_a_notebook_says_what_to_do(tmp_path):
    """In one line, and not as a traceback of imports."""
    command = [sys.executable, "-S", "-c", "import start"]  # -S: without installed packages
    folder = REPOSITORY / "notebooks"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "make setup" in line and "torch" in line


def written(folder, *sources):
    path = folder / "example.ipynb"
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.sample(1, of="long and alone")
def test_a_notebook_that_fails_or_dawdles_is_caught(tmp_path, seconds_used):
    away = tmp_path / "elsewhere"
    away.mkdir()
    sound = written(
        tmp_path, "import os, sys\nprint(os.path.basename(os.getcwd()), 'lessons' in sys.modules)"
    )
    done = execute(sound, away, seconds_used)
    assert done.cells[0].outputs[0].text == "elsewhere False\n"
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ModuleNotFoundError"):
        execute(written(tmp_path, "import lessons"), away, seconds_used)
    with pytest.raises(AssertionError, match=r"took \d s of a core, more than 1 s"):
        busy = written(tmp_path, "import time\nwhile time.process_time() < 1.5: pass")
        execute(busy, away, seconds_used, limit_s=1)
    with pytest.raises(nbclient.exceptions.CellTimeoutError):
        execute(written(tmp_path, "import time; time.sleep(60)"), away, seconds_used, hangs_s=1)
    with pytest.raises(nbclient.exceptions.DeadKernelError):
        execute(written(tmp_path, "import os; os._exit(3)"), away, seconds_used)
