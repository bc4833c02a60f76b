"""Public functions say what they do, with shapes and units; and each part of that rule is shown to fail."""
from pathlib import Path

import pytest

from tests.docstring_rules import wrong_docstrings

REPOSITORY = Path(__file__).resolve().parents[1]
TO_MEND = (  # written before the rule; take an entry out when its docstring is mended
    "lessons/l01_roofline/calculators.py: decode_floor",
    "lessons/l01_roofline/calculators.py: prefill_floor",
    "lessons/l02_naive_attention/optimized.py: attention_torch",
    "lessons/l03_kv_cache/cache.py: KVCache.write",
    "lessons/l03_kv_cache/cache.py: KVCache.decode",
    "lessons/toolbox/compile_check.py: Report.to_dict",
    "lessons/toolbox/compile_check.py: Job.report",
    "lessons/toolbox/compile_check.py: Job.save",
    "lessons/toolbox/compile_check.py: Job.load",
    "lessons/toolbox/figure.py: frame",
    "lessons/toolbox/figure.py: role_of",
    "lessons/toolbox/inputs.py: draw",
    "lessons/toolbox/interpreter.py: Patch.where",
    "lessons/toolbox/numerics.py: assert_same_bits",
    "lessons/toolbox/numerics.py: clone_with_strides",
    "lessons/toolbox/traps.py: poison_",
    "lessons/toolbox/traps.py: poisoned",
    "lessons/toolbox/traps.py: with_canaries",
    "reference/ladder.py: Rung.generate",
    "reference/ladder.py: new_measurement",
    "reference/ladder.py: call_rung",
    "reference/ladder_report.py: print_table",
    "reference/ladder_report.py: write_json",
)
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
    found = [complaint for complaint in wrong_docstrings(REPOSITORY) if not complaint.startswith(TO_MEND)]
    assert not found, "\n".join(["", *found])


def test_a_sound_file_passes(tmp_path):
    assert complaints(tmp_path, SOUND) == []


@pytest.mark.parametrize("old, new, said", [
    ('    """A cache."""\n', "", "class Cache has no docstring"),
    ('"""The row of a slot: [D]."""', "pass", "Cache.read has no docstring"),
    ("The row of a slot: [D].", "The row of a slot.", "Cache.read takes or returns tensors and gives no shape"),
    ("q: [T, Hq, D], k: [N, Hkv, D] -> [T, Hq, D].", "Attention.", "attend takes or returns tensors"),
    ("Wait `timeout` seconds.", "Wait.", "limit: timeout has no unit"),
    ("def main", "def run", "run has no docstring"),
])
def test_each_slip_is_seen(old, new, said, tmp_path):
    assert old in SOUND
    assert any(said in complaint for complaint in complaints(tmp_path, SOUND.replace(old, new)))


def test_tests_and_exercises_are_free(tmp_path):
    bad = "def f(): pass\n"
    for name in ("lessons/l01_x/test_equivalence.py", "exercises/l01_x.py", "tests/test_x.py", "models/train.py"):
        assert complaints(tmp_path, bad, name) == []
    assert complaints(tmp_path, bad, "reference/x.py") == ["reference/x.py: f has no docstring"]
