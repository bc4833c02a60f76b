"""Every committed notebook runs from top to bottom on a CPU, from a foreign working directory, and is left as it is."""
import copy
import hashlib
import os
import time
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.notebook_rules import notebooks

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT_S = 120


def execute(path: Path, folder: Path, limit_s: float = LIMIT_S):
    """Run a copy of a notebook in `folder`, where the course is importable but no file of it lies; returns the copy."""
    notebook = copy.deepcopy(nbformat.read(path, as_version=4))
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    client = nbclient.NotebookClient(notebook, timeout=limit_s, resources={"metadata": {"path": str(folder)}})
    start = time.monotonic()
    client.execute(env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    seconds = time.monotonic() - start
    assert seconds < limit_s, f"{path.name} took {seconds:.0f} s, more than {limit_s} s"
    return notebook


@pytest.mark.parametrize("path", notebooks(REPOSITORY), ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    notebook = execute(path, tmp_path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before, "running it changed the committed file"
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    assert code and all(cell.execution_count for cell in code)


def written(folder, *sources):
    path = folder / "example.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources]), path)
    return path


def test_a_notebook_that_fails_or_dawdles_is_caught(tmp_path):
    away = tmp_path / "elsewhere"
    away.mkdir()
    done = execute(written(tmp_path, "import os, lessons\nprint(os.path.basename(os.getcwd()))"), away)
    assert done.cells[0].outputs[0].text == "elsewhere\n"
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="FileNotFoundError"):
        execute(written(tmp_path, "open('models/prompts.json')"), away)
    with pytest.raises(nbclient.exceptions.CellTimeoutError):
        execute(written(tmp_path, "import time; time.sleep(60)"), away, limit_s=1)
