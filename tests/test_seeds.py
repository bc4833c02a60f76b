"""Random numbers of a run: the same for one seed, in whatever order and process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.seeds import VARIABLE, seed_of

ROOT = Path(__file__).resolve().parents[1]
DRAWS = """
import random

import numpy as np
import pytest
import torch

pytest_plugins = ["tests.seeds"]

def draw():
    return [torch.rand(1).item(), random.random(), float(np.random.rand())]

@pytest.fixture(scope="module")
def shared():
    return draw()

@pytest.mark.parametrize("at", range(3))
def test_it(at, shared, seed):
    print("drew", at, seed, shared, draw())
"""


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """What the tests above draw, by the seed of their run and in either order."""
    (tmp_path / "test_draws.py").write_text(DRAWS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def lines(run_seed: str, *cases: int) -> set[str]:
        monkeypatch.setenv(VARIABLE, run_seed)
        asked = [f"test_draws.py::test_it[{at}]" for at in cases]
        command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *asked]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return {line[line.index("drew") :] for line in done.stdout.splitlines() if "drew" in line}

    return lines


@pytest.mark.sample(1, of="long and alone")
def test_one_seed_one_run(drawn):
    first = drawn("7", 0, 1, 2)
    assert len(first) == 3 and drawn("7", 2, 1) < first


def test_another_seed_another_run(monkeypatch):
    seeds = set()
    for run in ("7", "8"):
        monkeypatch.setenv(VARIABLE, run)
        seeds |= {seed_of("a"), seed_of("b")}
    assert len(seeds) == 4
