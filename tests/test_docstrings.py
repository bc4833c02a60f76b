"""Public functions say what they do, with shapes and units; and each part of that rule is shown to
fail.
"""

from pathlib import Path

import pytest

from tests.docstring_rules import wrong_docstrings

REPOSITORY = Path(__file__).resolve().parents[1]
SOUND = '''
"""A file."""
from torch import Tensor

class Cache:
    """A cache."""
    @property
    def size(self):
        return 1
    def read(self, slot: int) -> Tensor:
        """The row of a slot: [D]."""
    def _private(self): pass

class Longer(Cache):
    def read(self, slot): pass

def attend(q: Tensor, k: Tensor) -> Tensor:
    """q: [T, Hq, D], k: [N, Hkv, D] -> [T, Hq, D]."""

def limit(timeout: float, read_s: float) -> float:
    """Wait `timeout` seconds."""

def main(argv=None): pass
'''


def complaints(folder, text, name="lessons/l01_x/naive.py"):
    (path := folder / name).parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return wrong_docstrings(folder)


def test_the_course_documents_its_functions():
    found = wrong_docstrings(REPOSITORY)
    assert not found, "\n".join(["", *found])


def test_a_sound_file_passes(tmp_path):
    assert complaints(tmp_path, SOUND) == []


@pytest.mark.parametrize(
    "old, new, said",
    [
        ('    """A cache."""\n', "", "class Cache has no docstring"),
        ('"""The row of a slot: [D]."""', "pass", "Cache.read has no docstring"),
        (
            "The row of a slot: [D].",
            "The row of a slot.",
            "Cache.read takes or returns tensors and gives no shape",
        ),
        (
            "q: [T, Hq, D], k: [N, Hkv, D] -> [T, Hq, D].",
            "Attention.",
            "attend takes or returns tensors",
        ),
        ("Wait `timeout` seconds.", "Wait.", "limit: timeout has no unit"),
        ("def main", "def run", "run has no docstring"),
    ],
)
def test_each_slip_is_seen(old, new, said, tmp_path):
    assert old in SOUND
    assert any(said in complaint for complaint in complaints(tmp_path, SOUND.replace(old, new)))


def test_tests_and_exercises_are_free(tmp_path):
    bad = "def f(): pass\n"
    for name in (
        "lessons/l01_x/test_equivalence.py",
        "exercises/l01_x.py",
        "tests/test_x.py",
        "models/train.py",
    ):
        assert complaints(tmp_path, bad, name) == []
    assert complaints(tmp_path, bad, "reference/x.py") == ["reference/x.py: f has no docstring"]
