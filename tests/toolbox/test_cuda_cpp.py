"""The launcher of .cu files: what it hands to cuda.core, and what it says where there is none.
On a CPU it hands over to the machine, which gpu/test_cuda_*.py test.
"""

import contextlib
import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lessons.toolbox.kernels import cuda_cpp
from lessons.toolbox.kernels.cuda_cpp import CudaKernel, architecture, packed
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


class FakeCore:
    """cuda.core's names as cuda_cpp calls them (version 1.2.2); keeps what it was given."""

    def __init__(self, error=None):
        self.programs, self.launches, self.current, self.error = [], [], [], error
        self.Stream = SimpleNamespace(from_handle=lambda handle: ("stream", handle))

    def Device(self, index):
        return SimpleNamespace(set_current=lambda: self.current.append(index))

    def ProgramOptions(self, **options):
        return options

    def LaunchConfig(self, grid, block, shmem_size):
        return grid, block, shmem_size

    def Program(self, source, language, options):
        def compile(target):
            if self.error:
                raise self.error
            return SimpleNamespace(get_kernel=lambda name: (name, len(self.programs)))

        self.programs.append((source, language, options))
        return SimpleNamespace(compile=compile)

    def launch(self, stream, config, kernel, *arguments):
        self.launches.append((stream, config, kernel, arguments))


@pytest.fixture
def core(monkeypatch):
    """A fake cuda.core on a machine with two fake GPUs of compute capability 9.0, and CPU tensors
    that pass for theirs.
    """
    fake = FakeCore()
    monkeypatch.setattr(cuda_cpp, "cuda_core", lambda: fake)
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


fake_index = [0]


def test_a_launch(kernel, core):
    """Addresses, widths, the grid and PyTorch's stream arrive; the file is compiled once, as
    compile_check compiles it.
    """
    x = torch.zeros(8)
    kernel[3, 256](x, 5, 0.1)
    kernel[(2, 4), (32, 2), 512](x, 6, 0.2)
    (stream, config, found, arguments), (_, second_config, _, second) = core.launches
    assert (
        stream == ("stream", 77)
        and config == (3, 256, 0)
        and found == ("twice", 1)
        and second_config == ((2, 4), (32, 2), 512)
    )
    assert arguments == (x.data_ptr(), 5, np.float32(0.1)) and [type(a) for a in arguments[1:]] == [
        np.int64,
        np.float32,
    ]
    assert (
        second[1] == 6
        and core.programs == [(SOURCE, "c++", dict(arch="sm_90a", std="c++17"))]
        and core.current == [0]
    )


def test_each_device_gets_its_own_code(kernel, core):
    x = torch.zeros(8)
    for fake_index[0] in (0, 1, 0):
        kernel[1, 32](x, 8)
    assert len(core.programs) == 2 and core.current == [0, 1]
    assert [launch[2] for launch in core.launches] == [("twice", 1), ("twice", 2), ("twice", 1)]


def test_numbers_as_cuda_core_lays_them_out():
    """The real cuda.core: each argument's bytes, read back from the array of addresses that a
    launch passes to the driver.
    """
    handler = pytest.importorskip(
        "cuda.core._kernel_arg_handler", reason="NOT RUN: cuda.core is not installed"
    )
    x = torch.arange(4.0)
    holder = handler.ParamHolder(tuple(packed("k", (x, 2**40 + 3, 0.1, np.int32(-7)))))
    address = (ctypes.c_void_p * 4).from_address(holder.ptr)
    assert ctypes.c_void_p.from_address(address[0]).value == x.data_ptr()
    assert ctypes.c_int64.from_address(address[1]).value == 2**40 + 3
    assert ctypes.c_float.from_address(address[2]).value == np.float32(0.1)
    assert ctypes.c_int32.from_address(address[3]).value == -7


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


def test_without_cuda_core_one_line(kernel, monkeypatch):
    monkeypatch.setattr(
        cuda_cpp, "common_device", lambda name, arguments: SimpleNamespace(type="cuda", index=0)
    )
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(
        RuntimeError, match=r"cuda.core is not installed.*pip install cuda-core"
    ) as error:
        kernel[1, 32](torch.zeros(2))
    assert "\n" not in str(error.value)


def test_an_error_of_the_compiler_is_one_line(kernel, core):
    core.error = RuntimeError(
        'NVRTC_ERROR_COMPILATION\nlog:\nprogram(1): error: identifier "two" is undefined\n1 error'
    )
    with pytest.raises(RuntimeError) as error:
        kernel[1, 32](torch.zeros(2))
    assert str(error.value) == (
        "optimized.cu does not compile for compute capability 9.0: "
        'program(1): error: identifier "two" is undefined'
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
