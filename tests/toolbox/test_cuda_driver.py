"""What the real cuda-bindings hand to CUDA's driver. The driver is `fake_libcuda.c`, which prints
what arrives, so the way from a tensor to the driver is tried where there is no GPU.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lessons.toolbox.gpu import nvrtc

pytestmark = [
    pytest.mark.skipif(bool(nvrtc.why_not_here()), reason=f"NOT RUN: {nvrtc.why_not_here()}"),
    pytest.mark.skipif(
        not (shutil.which("cc") and sys.platform == "linux"), reason="NOT RUN: needs cc and Linux"
    ),
]
ROOT = Path(__file__).parents[2]
SOURCE = (
    'extern "C" __global__ void twice(float* x, long long n, float f) '
    "{ if (threadIdx.x < n) x[threadIdx.x] *= f; }"
)
# CPU tensors that pass for those of a GPU: the driver is the fake's, and its memory this process's
PRETENDED = """
import contextlib, sys, threading
from pathlib import Path
from types import SimpleNamespace

import torch

from lessons.toolbox.kernels import cuda_cpp

devices = [0]
device = lambda *_: SimpleNamespace(type="cuda", index=devices[-1])
cuda_cpp.common_device = device
torch.cuda.device = lambda _: contextlib.nullcontext()
torch.cuda.current_stream = lambda _: SimpleNamespace(cuda_stream=77)
torch.cuda.get_device_capability = lambda _: (9, 0)
kernel = cuda_cpp.CudaKernel(Path(sys.argv[1]), "twice")
x = torch.arange(8.0)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The folder of a libcuda.so.1."""
    folder = tmp_path_factory.mktemp("driver")
    made = ["-shared", "-fPIC", "-w", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(["cc", *made, str(Path(__file__).with_name("fake_libcuda.c"))], check=True)
    return folder


@pytest.fixture
def say(library, tmp_path):
    """Run lines of Python on the pretended GPU: what they and the driver print."""
    file = tmp_path / "small.cu"
    file.write_text(SOURCE)

    def run(lines: str) -> list[str]:
        environment = os.environ | {"LD_LIBRARY_PATH": str(library)}
        command = [sys.executable, "-u", "-c", PRETENDED + lines, str(file)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.splitlines())

    return run


def test_a_launch_arrives(say):
    """The addresses and the numbers of a launch, in the widths that the kernel reads, and where it
    is to run.
    """
    said = say("kernel[3, 4](x, 5, 0.5)\nprint(x.tolist())")
    assert said == [
        "[0.0, 0.5, 1.0, 1.5, 4.0, 5.0, 6.0, 7.0]",
        "current 1",
        "current 1",
        "launch 3 1 1, 4 1 1, 0 bytes, stream 77, extra (nil)",
        "load ELF",
        "retain 0",
    ]


def test_dimensions_and_shared_memory_arrive(say):
    """Above 48 KiB a block has to ask for its shared memory."""
    said = say("kernel[(2, 4), (8, 2), 48 * 1024](x, 5, 0.1)\nkernel[1, 8, 49_153](x, 5, 0.1)")
    launches = [line for line in said if line.startswith(("launch", "attribute"))]
    assert launches == [
        "attribute 8 49153",
        "launch 1 1 1, 8 1 1, 49153 bytes, stream 77, extra (nil)",
        "launch 2 4 1, 8 2 1, 49152 bytes, stream 77, extra (nil)",
    ]


def test_each_device_has_its_code_and_each_thread_a_context(say):
    said = say(
        "kernel[1, 4](x, 5, 0.5)\ndevices.append(1)\nkernel[1, 4](x, 5, 0.5)\n"
        "devices.append(0)\n"
        "t = threading.Thread(target=lambda: kernel[1, 4](x, 5, 0.5)); t.start(); t.join()"
    )
    assert [line for line in said if line.startswith(("load", "retain"))] == [
        "load ELF",
        "load ELF",
        "retain 0",
        "retain 1",
    ]
    # two loads and three launches
    assert said.count("current 1") == 5 and sum("launch" in line for line in said) == 3


REFUSED = """
def tried(block):
    try:
        kernel[1, block](x, 5, 0.5)
    except RuntimeError as error:
        print(error)

tried(2048)
devices.append(7)
tried(4)
kernel.name, devices[:] = "two", [1]
tried(4)
"""


def test_what_the_driver_refuses_is_one_line(say):
    """A block, a device and a name that there is not."""
    assert [line for line in say(REFUSED) if "says" in line] == [
        "the CUDA driver says CUDA_ERROR_INVALID_DEVICE: said by the fake",
        "the CUDA driver says CUDA_ERROR_INVALID_VALUE: said by the fake",
        "the CUDA driver says CUDA_ERROR_NOT_FOUND: named symbol not found",
    ]
