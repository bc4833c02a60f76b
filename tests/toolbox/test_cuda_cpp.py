"""The launcher of .cu files: what it hands to the driver, and what it says without a compiler.
`test_cuda_driver.py` goes on to a driver. On a CPU it hands over to the machine, which
gpu/test_cuda_*.py test.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lessons.toolbox.gpu import nvrtc
from lessons.toolbox.gpu.nvrtc import CompileError, architecture
from lessons.toolbox.kernels import cuda_cpp
from lessons.toolbox.kernels.cuda_cpp import CudaKernel, packed
from lessons.toolbox.measure.device import default_device

SOURCE = (
    'extern "C" __global__ void twice(float* x, long long n) '
    "{ if (threadIdx.x < n) x[threadIdx.x] *= 2.f; }"
)


@pytest.fixture
def kernel(tmp_path):
    cuda_cpp.compiled.cache_clear()
    file = tmp_path / "optimized.cu"
    file.write_text(SOURCE)
    yield CudaKernel(file, "twice")
    cuda_cpp.compiled.cache_clear()


class FakeDriver:
    """cuda_driver's functions; keeps what they were given."""

    def __init__(self):
        self.loaded, self.launches = [], []

    def function_of(self, cubin, name, device_index):
        self.loaded.append((cubin, name, device_index))
        return len(self.loaded)

    def launch(self, *given):
        self.launches.append(given)


fake_index = [0]


@pytest.fixture
def gpus(monkeypatch):
    """Two fake GPUs of compute capability 9.0, and CPU tensors that pass for theirs."""
    fake = FakeDriver()
    monkeypatch.setattr(cuda_cpp, "function_of", fake.function_of)
    monkeypatch.setattr(cuda_cpp, "driver_launch", fake.launch)
    monkeypatch.setattr(
        cuda_cpp,
        "common_device",
        lambda name, arguments: SimpleNamespace(type="cuda", index=fake_index[0]),
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    fake_index[0] = 0
    return fake


def test_a_launch(kernel, gpus, monkeypatch):
    """Addresses, widths, the grid and PyTorch's stream arrive; the file is compiled once, for the
    GPU's generation.
    """
    asked = []
    compile = lambda source, file, chip: asked.append((source, chip)) or (b"code", "")
    monkeypatch.setattr(cuda_cpp, "cubin_of", compile)
    x = torch.zeros(8)
    kernel[3, 256](x, 5, 0.1)
    kernel[(2, 4), (32, 2), 512](x, 6, 0.2)
    (*where, values), (*others, second) = gpus.launches
    assert where == [1, 0, (3, 1, 1), (256, 1, 1), 0, 77]
    assert others == [1, 0, (2, 4, 1), (32, 2, 1), 512, 77]
    assert values == [x.data_ptr(), 5, np.float32(0.1)] and second[1] == 6
    assert [type(value) for value in values] == [np.uint64, np.int64, np.float32]
    assert asked == [(SOURCE, 90)] and gpus.loaded == [(b"code", "twice", 0)]


def test_each_device_gets_its_own_code(kernel, gpus, monkeypatch):
    monkeypatch.setattr(cuda_cpp, "cubin_of", lambda *_: (b"code", ""))
    x = torch.zeros(8)
    for fake_index[0] in (0, 1, 0):
        kernel[1, 32](x, 8)
    assert [device for _, _, device in gpus.loaded] == [0, 1]
    assert [(launch[0], launch[1]) for launch in gpus.launches] == [(1, 0), (2, 1), (1, 0)]


@pytest.mark.parametrize("value", [True, "x", None, [1], 1j])
def test_other_arguments_are_refused(value):
    with pytest.raises(
        ValueError,
        match=r"k: argument 1 is .*; accepted: a tensor, an int, a float or a NumPy scalar",
    ):
        packed("k", (torch.zeros(1), value))


def test_numbers_beyond_64_bits_are_refused():
    with pytest.raises(OverflowError):
        packed("k", (2**63,))


@pytest.mark.parametrize(
    "arguments, found",
    [
        ((3,), "no tensor"),
        ((torch.zeros(2), torch.zeros(2, device="meta")), "cpu, meta"),
    ],
)
def test_tensors_of_no_device_that_runs_are_refused(kernel, arguments, found):
    with pytest.raises(
        ValueError, match=f"twice: got {found}; accepted: tensors on one device"
    ) as error:
        kernel[1, 32](*arguments)
    assert "\n" not in str(error.value)


def test_without_a_compiler_one_line(kernel, gpus, monkeypatch):
    monkeypatch.setattr(nvrtc, "why_not_here", lambda: "needs NVRTC")
    with pytest.raises(CompileError) as error:
        kernel[1, 32](torch.zeros(2))
    assert str(error.value) == (
        "for compute capability 9.0: optimized.cu cannot be compiled: needs NVRTC"
    )


@pytest.mark.cuda_cpp
def test_an_error_of_the_compiler_is_one_line(kernel, gpus):
    kernel.file.write_text(SOURCE.replace("2.f", "two"))
    with pytest.raises(CompileError) as error:
        kernel[1, 32](torch.zeros(2))
    assert str(error.value) == (
        'for compute capability 9.0: optimized.cu(1): error: identifier "two" is undefined'
    )


def test_naming_a_kernel_imports_nothing(kernel):
    assert repr(kernel) == "CudaKernel(optimized.cu: twice)" and not kernel.of_device


def test_architectures():
    assert [architecture(c) for c in (75, 80, 89, 90, 100, 120)] == [
        "sm_75",
        "sm_80",
        "sm_89",
        "sm_90a",
        "sm_100a",
        "sm_120a",
    ]


@pytest.mark.cuda_cpp
def test_a_kernel_runs(kernel):
    x = torch.arange(64.0, device=default_device())
    kernel[1, 64](x, 60)
    assert torch.equal(x.cpu(), torch.cat([2 * torch.arange(60.0), torch.arange(60.0, 64.0)]))
