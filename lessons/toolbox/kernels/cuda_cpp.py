"""CUDA C++ from Python: a .cu file beside a lesson's module, launched on PyTorch's tensors.

    # an `extern "C" __global__` function
    SOFTMAX = CudaKernel(Path(__file__).with_name("optimized.cu"), "softmax_fp32x4")
    # grid, threads a block; as in Triton
    SOFTMAX[num_rows, 1024](scores, probs, lse, num_columns, stride_row)

The tensors' device decides where it runs. On a GPU: compiled by NVRTC through cuda.core (NVIDIA's
Python package, no nvcc), on PyTorch's stream. On a CPU: compiled by NVRTC for an H100, or for the
chip of LADDER_CHIP, and run by `lessons.toolbox.gpu`, instruction by instruction. That finds races,
addresses out of bounds and barriers that some threads miss, and tells no times. What is missing for
either is said in one line, and naming a kernel costs nothing. `compile_check.check_cuda` compiles
the same source for five GPU generations without a GPU.

How Python values arrive: a tensor as the address of its first element, an int as `long long`, a
float as `float`; a NumPy scalar as the type that it has. On a GPU nothing checks them against the
kernel's parameters; on a CPU their kinds and widths are.
"""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lessons.toolbox.gpu.nvrtc import architecture
from lessons.toolbox.measure.device import machine_chip

MISSING = (
    "cuda.core is not installed, so no CUDA C++ kernel can run: pip install cuda-core "
    "cuda-bindings nvidia-cuda-nvrtc "
    '(for CUDA 12: "cuda-core[cu12]")'
)


class CudaKernel:
    """A kernel of a .cu file. `kernel[grid, block](*arguments)` launches it; grid, block: a number,
    or a tuple of up to three. `kernel[grid, block, shared_bytes]` gives each block so much of
    `extern __shared__` memory.

    Compiled once for each device, at the first launch there.
    """

    def __init__(self, file: Path, name: str):
        self.file, self.name = Path(file), name
        self.of_device = {}  # index of a device -> cuda.core's Kernel

    def __repr__(self) -> str:
        return f"CudaKernel({self.file.name}: {self.name})"

    def __getitem__(self, config: tuple):
        return lambda *arguments: self.launch(*config, arguments=arguments)

    def launch(self, grid, block, shared_bytes: int = 0, *, arguments: tuple) -> None:
        """Run the kernel where the tensors are; on a GPU, put it on the current stream.

        Raises ValueError for arguments that no kernel takes, RuntimeError without cuda.core or
        NVRTC or if the file does not compile; on a CPU Fault for what the kernel does wrong.
        """
        device = common_device(self.name, arguments)
        if device.type == "cpu":
            # here, because a lesson that is only read does not need the machine
            from lessons.toolbox.gpu import cuda_launch

            code = self.file.read_text(encoding="utf-8"), str(self.file), self.name, machine_chip()
            given = typed(self.name, arguments)
            cuda_launch.run(*code, grid, block, shared_bytes, given)
        else:
            self.launch_on_gpu(device, grid, block, shared_bytes, arguments)

    def launch_on_gpu(self, device, grid, block, shared_bytes, arguments: tuple) -> None:
        """The launch on a CUDA device."""
        core = cuda_core()
        with torch.cuda.device(device):
            if device.index not in self.of_device:
                code = compiled(self.file.read_text(encoding="utf-8"), self.file.name, device.index)
                self.of_device[device.index] = code.get_kernel(self.name)
            # PyTorch's stream, because a kernel on another one would not wait until the tensors are
            # written.
            stream = core.Stream.from_handle(torch.cuda.current_stream(device).cuda_stream)
            core.launch(
                stream,
                core.LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes),
                self.of_device[device.index],
                *packed(self.name, arguments),
            )


def cuda_core():
    """The module cuda.core. Raises RuntimeError, one line, where it is not installed."""
    try:
        import cuda.core
    except ImportError:
        raise RuntimeError(MISSING) from None
    return cuda.core


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


def packed(name: str, arguments: tuple) -> list:
    """The arguments as cuda.core passes them on: addresses, and numbers of a known width."""
    given = typed(name, arguments)
    return [value.data_ptr() if isinstance(value, Tensor) else value for value in given]


@cache
def compiled(source: str, file_name: str, device_index: int):
    """The file's machine code for one device, an ObjectCode of cuda.core; compiled once a process.
    Raises RuntimeError.
    """
    core = cuda_core()
    core.Device(device_index).set_current()  # the context that PyTorch uses as well
    major, minor = torch.cuda.get_device_capability(device_index)
    options = core.ProgramOptions(arch=architecture(10 * major + minor), std="c++17")
    try:
        return core.Program(source, "c++", options).compile("cubin")
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if "error" in line] or [
            repr(error)
        ]
        raise RuntimeError(
            f"{file_name} does not compile for compute capability {major}.{minor}: {lines[0]}"
        ) from None
