"""`make profile`: what it prints and writes of a lesson's kernels and of one's own, and its
refusals.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lessons.toolbox.measure.device import has_triton
from lessons.toolbox.profile.__main__ import functions_of, main

pytestmark = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton's compiler")
ROOT = Path(__file__).parents[2]
MINE = """
import torch
from lessons.toolbox.kernels.triton_ import tl, triton

@triton.jit
def transpose_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    tile = tl.load(x_ptr + row * SIZE + column)
    tl.store(out_ptr + column * SIZE + row, tile)

def try_it():
    x = torch.arange(64.0 * 64).view(64, 64)
    out = torch.empty(64, 64)
    transpose_kernel[(1,)](x, out, 64)
    assert torch.equal(out, x.T)

def nothing():
    return torch.ones(3)

def too_far():
    transpose_kernel[(1,)](torch.zeros(10), torch.empty(64, 64), 64)
"""


def profile(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lessons.toolbox.profile", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.sample(1, of="compiled code")
def test_a_copy_with_gaps_beside_one_without(tmp_path):
    """Lesson 0: every eighth float needs a sector for each, and the line is named."""
    done = profile("00", "--compare", "gaps", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "optimized.py:" in done.stdout
    assert "asks for 8,192 sectors where 1,024 would do" in done.stdout
    assert "No line asks for more sectors or passes than its bytes need." in done.stdout
    found = json.loads((tmp_path / "l00_h100.json").read_text())
    (scale,), (gaps,) = found["optimized"]["kernels"], found["gaps"]["kernels"]
    numbers = 8192 * 8
    assert scale["total"]["sectors"] == scale["total"]["least_sectors"] == 2 * numbers * 4 // 32
    assert (scale["loaded_bytes"], scale["stored_bytes"]) == (numbers * 4, numbers * 4)
    assert gaps["total"]["sectors"] == 8192 + 1024 and gaps["total"]["least_sectors"] == 2048
    assert next(iter(scale["floors_s"])) == "memory", "the longest comes first"
    assert scale["floors_s"]["memory"] == pytest.approx(2 * numbers * 4 / 3.35e12)
    assert scale["registers"] > 0 and scale["spill_bytes"] == 0
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "l00_h100_scale_kernel.png",
        "l00_h100_every_nth_kernel.png",
    }


@pytest.mark.sample(1, of="compiled code")
def test_a_kernel_of_ones_own(tmp_path):
    """A transposition through registers: its stores are a row apart, or its loads do."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    done = profile(f"{file}:try_it", "--gpu", "a100", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "compiled for A100" in done.stdout and "tile = tl.load" in done.stdout
    (kernel,) = json.loads((tmp_path / "try_it_a100.json").read_text())["try_it"]["kernels"]
    assert kernel["total"]["least_sectors"] == 2 * 64 * 64 * 4 // 32
    assert (kernel["loaded_bytes"], kernel["stored_bytes"]) == (64 * 64 * 4, 64 * 64 * 4)
    done = profile(f"{file}:nothing", "--out", str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "no kernel was launched" in done.stderr
    done = profile(f"{file}:too_far", "--out", str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "mine.py:8" in done.stderr and "which has 40 bytes" in done.stderr


CUDA = """
from pathlib import Path
import torch
from lessons.toolbox.kernels.cuda_cpp import CudaKernel

COPY = CudaKernel(Path(__file__).with_name("copy.cu"), "copy")

def copied():
    COPY[2, 64](torch.ones(128), torch.empty(128))
"""
CUDA_SOURCE = """
extern "C" __global__ void copy(const float* x, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = x[i];
}
"""


@pytest.mark.cuda_cpp
@pytest.mark.sample(1, of="compiled code")
def test_cuda_c_plus_plus_is_profiled_too(tmp_path):
    """With its own source's lines and the assembler's registers, and without a predicted time."""
    (tmp_path / "copy.cu").write_text(CUDA_SOURCE)
    file = tmp_path / "mine.py"
    file.write_text(CUDA)
    done = profile(f"{file}:copied", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "copy: 2 programs of 2 warps" in done.stdout and "registers a thread" in done.stdout
    assert "out[i] = x[i];" in done.stdout and "No time is predicted" in done.stdout
    (kernel,) = json.loads((tmp_path / "copied_h100.json").read_text())["copied"]["kernels"]
    assert kernel["total"]["sectors"] == kernel["total"]["least_sectors"] == 2 * 128 * 4 // 32
    assert {line["file"] for line in kernel["lines"]} == {"copy.cu"}


@pytest.mark.sample(1, of="long and alone")
def test_a_file_may_be_called_like_a_module(tmp_path):
    """profile.py, copy.py or random.py: what Python itself imports by that name is still its
    own.
    """
    file = tmp_path / "profile.py"
    file.write_text(MINE)
    done = profile(f"{file}:try_it", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["99"], "LESSON=99: nothing to profile; accepted: 00, 01"),
        (["nowhere.py:f"], "accepted: a lesson's number, or FILE.py:FUNCTION"),
        (["00", "--gpu", "h900"], "--gpu: invalid choice: 'h900'"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr("lessons.toolbox.profile.__main__.compiled_chip", lambda: 90)
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and said in error and error.count("\n") == 1


def test_every_profile_has_what_it_is_compared_with():
    for file in sorted((ROOT / "lessons").glob("l*/lab/profile.py")):
        functions, name = functions_of(file.parts[-3][1:3])
        assert name == "optimized" and len(functions) > 1, file


def asked(kernel: dict) -> float:
    """How many times its least bytes a kernel asks for."""
    return 32 * kernel["total"]["sectors"] / (kernel["loaded_bytes"] + kernel["stored_bytes"])


def moved(passes: list[dict]) -> int:
    return sum(each["read_bytes"] + each["written_bytes"] for each in passes)


def limits(kernel: dict) -> str:
    return next(iter(kernel["floors_s"]))


def naives_share(found: dict) -> float:
    """How many times the bytes of the kernels naive's operations move."""
    kernels = found["optimized"]["kernels"]
    return moved(found["naive"]["passes"]) / sum(
        k["loaded_bytes"] + k["stored_bytes"] for k in kernels
    )


def what_lesson_3_says(found):
    assert round(naives_share(found)) == 12
    _, decode = found["optimized"]["kernels"]
    assert 3.9 < asked(decode) < 4.1 and limits(decode) == "shared memory"


def what_lesson_1_says(found):
    (copy,) = found["optimized"]["kernels"]
    assert asked(copy) == 1 and moved(found["naive"]["passes"]) == 64 * copy["total"]["sectors"]


def what_lesson_7_says(found):
    both = sum(k["loaded_bytes"] + k["stored_bytes"] for k in found["optimized"]["kernels"])
    clones = moved(found["optimized"]["passes"])
    assert moved(found["naive"]["passes"]) - clones > 3 * both


def what_lesson_9_says(found):
    assert 38 < naives_share(found) < 42


def what_lesson_10_says(found):
    assert round(naives_share(found), 1) == 3.4
    splits, merge = found["optimized"]["kernels"]
    assert asked(splits) < 1.02 and limits(splits) == "memory"
    assert merge["warps"] == 1 and limits(merge) == "memory"


def what_lesson_12_says(found):
    assert 16 < naives_share(found) < 17
    decode, _ = found["optimized"]["kernels"]
    extra = decode["total"]["sectors"] - decode["total"]["least_sectors"]
    assert extra < 0.01 * decode["total"]["sectors"]


def what_lesson_18_says(found):
    assert 60 < naives_share(found) < 62
    scales, copies = found["optimized"]["kernels"][0]["findings"]
    assert "asks for 3,072 sectors where 384 would do" in scales
    assert "passes of shared memory" in copies and "short rows" in copies


def what_lesson_19_says_of_naive(found):
    assert 47 < naives_share(found) < 49


def what_lesson_19_says(found):
    ours, theirs = (found[name]["kernels"][0] for name in ("optimized", "bfloat16"))
    assert 0.45 < ours["loaded_bytes"] / theirs["loaded_bytes"] < 0.55
    assert limits(ours) == "instructions issued"


SAY = {
    ("01", "naive"): what_lesson_1_says,
    ("03", "naive"): what_lesson_3_says,
    ("07", "naive"): what_lesson_7_says,
    ("09", "naive"): what_lesson_9_says,
    ("10", "naive"): what_lesson_10_says,
    ("12", "naive"): what_lesson_12_says,
    ("18", "naive"): what_lesson_18_says,
    ("19", "naive"): what_lesson_19_says_of_naive,
    ("19", "bfloat16"): what_lesson_19_says,
}


@pytest.mark.parametrize("lesson, beside", SAY)
@pytest.mark.sample(1, of="compiled code")
def test_what_the_lessons_say(lesson, beside, tmp_path):
    done = profile(lesson, "--compare", beside, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    SAY[lesson, beside](json.loads((tmp_path / f"l{lesson}_h100.json").read_text()))
