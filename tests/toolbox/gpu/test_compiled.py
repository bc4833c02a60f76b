"""The compiled code of the lessons' kernels runs on this CPU: their own tests of equivalence, in a
process in which Triton's interpreter is off.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lessons.toolbox.measure.device import CHIP, has_gpu, has_triton

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(
    has_gpu() or not has_triton(), reason="NOT RUN: needs Triton, and is for machines without a GPU"
)
# A few quick cases of lessons, by chip.
CASES = [
    (80, "lessons/l02_naive_attention/test_equivalence.py", "softmax_kernel_rows"),
    (80, "lessons/l18_weight_quantization/test_equivalence.py", "zeros and every_format"),
    (90, "lessons/l09_flash_attention/test_equivalence.py", "every_length and 129"),
    (100, "lessons/l09_flash_attention/test_equivalence.py", "every_length and 129"),
    (90, "lessons/l10_flash_decoding/test_equivalence.py", "combine"),
    (90, "lessons/l09_flash_attention/checks/test_hopper.py", "hopper_kernel and 129"),
    (89, "lessons/l19_kv_quantization/test_equivalence.py", "decode_over_codes"),
    (80, "lessons/l08_online_softmax/test_equivalence.py", "cuda"),
]


def run_compiled(chip: int, *arguments: str) -> str:
    """pytest's output of tests on compiled code; fails if they fail or if there is none."""
    environment = os.environ | {CHIP: str(chip), "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-1000:]}"
    return done.stdout


@pytest.mark.sample(1, of="compiled code")
@pytest.mark.parametrize("chip, file, chosen", CASES, ids=lambda x: str(x).rpartition("/")[2])
def test_a_lesson_on_compiled_code(chip, file, chosen):
    run_compiled(chip, file, "-k", chosen)


@pytest.mark.sample(1, of="planted in compiled code")
@pytest.mark.parametrize("chip", [80, 90])
def test_bugs_planted_in_compiled_code(chip):
    run_compiled(chip, "tests/toolbox/gpu/compiled_cases.py")


def test_an_unknown_chip_is_refused_in_one_line():
    done = subprocess.run(
        [sys.executable, "-c", "import lessons.toolbox.kernels.triton_"],
        cwd=ROOT,
        env=os.environ | {CHIP: "81", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert "LADDER_CHIP: got '81'; accepted: 75, 80, 86, 89, 90, 100" in done.stderr
