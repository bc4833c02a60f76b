"""CUDA C++ from Python: a .cu file beside a lesson's module, launched on PyTorch's tensors.

    # an `extern "C" __global__` function
    SOFTMAX = CudaKernel(Path(__file__).with_name("optimized.cu"), "softmax_fp32x4")
    # grid, threads a block; as in Triton
    SOFTMAX[num_rows, 1024](scores, probs, lse, num_columns, stride_row)

The tensors' device decides where it runs. On a GPU: compiled by NVRTC (no nvcc) and launched on
PyTorch's stream, both through cuda-bindings, NVIDIA's Python package. On a CPU: compiled by NVRTC
for an H100, or for the chip of LADDER_CHIP, and run by `lessons.toolbox.gpu`, instruction by
instruction. That finds races, addresses out of bounds and barriers that some threads miss, and
tells no times. What is missing for either is said in one line, and naming a kernel costs nothing.
`compile_check.check_cuda` compiles the same source for five GPU generations without a GPU.

How Python values arrive: a tensor as the address of its first element, an int as `long long`, a
float as `float`; a NumPy scalar as the type that it has. On a GPU nothing checks them against the
kernel's parameters; on a CPU their kinds and widths are.
"""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lessons.toolbox.gpu.nvrtc import CompileError, cubin_of
from lessons.toolbox.kernels.cuda_driver import function_of
from lessons.toolbox.kernels.cuda_driver import launch as driver_launch
from lessons.toolbox.measure.device import machine_chip


class CudaKernel:
    """A kernel of a .cu file. `kernel[grid, block](*arguments)` launches it; grid, block: a number,
    or a tuple of up to three. `kernel[grid, block, shared_bytes]` gives each block so much of
    `extern __shared__` memory.

    Compiled once for each device, at the first launch there.
    """

    def __init__(self, file: Path, name: str):
        self.file, self.name = Path(file), name
        self.of_device = {}  # index of a device -> the driver's function

    def __repr__(self) -> str:
        return f"CudaKernel({self.file.name}: {self.name})"

    def __getitem__(self, config: tuple):
        return lambda *arguments: self.launch(*config, arguments=arguments)

    def launch(self, grid, block, shared_bytes: int = 0, *, arguments: tuple) -> None:
        """Run the kernel where the tensors are; on a GPU, put it on the current stream.

        Raises ValueError for arguments that no kernel takes, CompileError without NVRTC or if the
        file does not compile, RuntimeError for what a GPU's driver refuses; on a CPU Fault for what
        the kernel does wrong.
        """
        device = common_device(self.name, arguments)
        if device.type == "cpu":
            # here, because a lesson that is only read does not need the machine
            from lessons.toolbox.gpu import cuda_launch

            code = self.file.read_text(encoding="utf-8"), str(self.file), self.name, machine_chip()
            given = typed(self.name, arguments)
            cuda_launch.run(*code, three(grid), three(block), shared_bytes, given)
        else:
            self.launch_on_gpu(device, grid, block, shared_bytes, arguments)

    def launch_on_gpu(self, device, grid, block, shared_bytes, arguments: tuple) -> None:
        """The launch on a CUDA device."""
        values = packed(self.name, arguments)
        with torch.cuda.device(device):
            if device.index not in self.of_device:
                code = compiled(self.file.read_text(encoding="utf-8"), self.file, device.index)
                self.of_device[device.index] = function_of(code, self.name, device.index)
            # PyTorch's stream, because a kernel on another one would not wait until the tensors are
            # written.
            stream = torch.cuda.current_stream(device).cuda_stream
            sizes = three(grid), three(block)
            kernel = self.of_device[device.index]
            driver_launch(kernel, device.index, *sizes, shared_bytes, stream, values)


def three(size: int | tuple) -> tuple[int, int, int]:
    """A grid or a block with all its dimensions: 5 -> (5, 1, 1)."""
    size = size if isinstance(size, tuple) else (size,)
    return (*map(int, size), 1, 1)[:3]


def common_device(name: str, arguments: tuple) -> torch.device:
    """The device of the tensors among a kernel's arguments. Raises ValueError unless there is
    exactly one, a CPU or a CUDA device.
    """
    devices = {x.device for x in arguments if isinstance(x, Tensor)}
    if len(devices) != 1 or next(iter(devices)).type not in ("cuda", "cpu"):
        found = ", ".join(sorted(map(str, devices))) or "no tensor"
        raise ValueError(
            f"{name}: got {found}; accepted: tensors on one device, a GPU or the CPU, which "
            f"runs the kernel's compiled code"
        )
    return devices.pop()


def typed(name: str, arguments: tuple) -> list[Tensor | np.generic]:
    """The arguments as tensors, [...] each, and as numbers of a known width. Raises ValueError
    for anything else.
    """
    found = []
    for index, value in enumerate(arguments):
        if isinstance(value, (Tensor, np.generic)):
            # before float, because a NumPy float64 is a Python float as well
            found.append(value)
        elif isinstance(value, float):
            found.append(np.float32(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append(np.int64(value))
        else:
            raise ValueError(
                f"{name}: argument {index} is {value!r}; accepted: a tensor, an int, a float or a "
                f"NumPy scalar"
            )
    return found


def packed(name: str, arguments: tuple) -> list[np.generic]:
    """The arguments as the driver copies them: addresses, and numbers of a known width."""
    given = typed(name, arguments)
    return [np.uint64(x.data_ptr()) if isinstance(x, Tensor) else x for x in given]


@cache
def compiled(source: str, file: Path, device_index: int) -> bytes:
    """The file's machine code for one device; compiled once a process. Raises CompileError."""
    major, minor = torch.cuda.get_device_capability(device_index)
    try:
        return cubin_of(source, str(file), 10 * major + minor)[0]
    except CompileError as error:
        raise CompileError(f"for compute capability {major}.{minor}: {error}") from None
