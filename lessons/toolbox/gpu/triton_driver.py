"""Triton's driver for a GPU that is this machine: `kernel[grid](*tensors)` compiles for a chip and
runs here, on tensors of the CPU.

    LADDER_CHIP=80 python -m pytest lessons/l09_flash_attention/test_equivalence.py

With LADDER_CHIP in the environment `import lessons` leaves Triton's interpreter off, and
`toolbox.kernels.triton_` calls `install`. Triton itself then specialises the arguments, compiles,
checks the shared memory against the chip's limit, and launches, as it does for a GPU. Its last
step, from PTX to machine code, is left out: the PTX is what runs.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver

from lessons.toolbox.gpu.arguments import WATCHERS, Descriptor, as_bytes, bind, order_seed
from lessons.toolbox.gpu.global_memory import Buffer, GlobalMemory
from lessons.toolbox.gpu.machine import SHARED_LIMIT, launch
from lessons.toolbox.gpu.ptx import Kernel, parse

ROOT = Path(__file__).parents[3]
COUNTS: Counter[str] = Counter()  # kernel -> launches


def install(capability: int) -> None:
    """From now on every @triton.jit kernel of this process compiles for the chip and runs here."""
    from triton.backends.nvidia.compiler import CUDABackend

    # A folder of its own, because PTX stands there in the place of machine code.
    triton.knobs.cache.dir = str(ROOT / "build" / "machine" / f"triton-{triton.__version__}")
    CUDABackend.make_cubin = lambda self, ptx, metadata, options, arch: ptx.encode()
    triton.runtime.driver.set_active(MachineDriver(capability))


class MachineDriver(GPUDriver):
    """What Triton asks a driver."""

    def __init__(self, capability: int):
        self.capability = capability
        self.utils = self  # load_binary and get_device_properties
        self.launcher_cls = Launcher
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.get_device_capability = lambda device: divmod(capability, 10)

    def get_current_target(self) -> GPUTarget:
        """The chip to compile for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors lie."""
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict:
        """What Triton compares a kernel with."""
        return {"max_shared_mem": SHARED_LIMIT[self.capability], "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple:
        """(module, function, registers, spills, most threads): the function is the parsed PTX."""
        kernels = parse(binary.decode())
        return kernels, kernels[name], 0, 0, 1024

    @classmethod
    def is_active(cls) -> bool:
        """Triton's own drivers ask for a GPU; this one is set by `install`."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """No C++ is compiled."""
        return ty

    def get_benchmarker(self):
        """Nothing is timed here."""
        raise RuntimeError("a kernel on this machine has no time: use `make profile`")


class Launcher:
    """One compiled kernel, to be called with a grid and arguments."""

    def __init__(self, source, metadata):
        self.source, self.metadata = source, metadata

    def __call__(self, x, y, z, stream, function: Kernel, packed, facts, enter, leave, *arguments):
        metas = iter(getattr(self.metadata, "tensordesc_meta", None) or ())
        signature = self.source.signature.values()
        given = flat(self.source.fn.arg_names, signature, arguments, metas)
        buffers, values, maps = bind(function, given)
        values += [0] * (len(function.parameters) - len(values))
        if scratch := getattr(self.metadata, "global_scratch_size", 0):
            # of a program, for tensor maps that it makes; the last parameter but one
            memory = np.full(x * y * z * scratch, 0xFF, dtype=np.uint8)
            buffers.append(Buffer(memory, "the scratch memory", True))
            values[-2] = GlobalMemory.address(len(buffers) - 1)
        parameters = {
            name: as_bytes(value, type_, size)
            for (name, type_, size), value in zip(function.parameters, values)
        }
        warps = total_warps(function, self.metadata.num_warps)
        done = launch(
            function,
            (x, y, z),
            (32 * warps, 1, 1),
            buffers,
            parameters,
            self.metadata.shared,
            maps=maps,
            seed=order_seed(),
        )
        COUNTS[function.name] += 1
        for told in WATCHERS:
            told(done)


def total_warps(function: Kernel, asked: int) -> int:
    """Warps of a program: a kernel with partitions has more than its options say."""
    return max(asked, function.threads // 32)


def flat(names, signature, arguments, metas) -> list[tuple[str, object]]:
    """(name, value) of the arguments that the kernel has as parameters; tuples one by one. metas:
    what the compiler made of each tensor descriptor.
    """
    found = []
    for name, type_, value in zip(names, signature, arguments):
        if isinstance(type_, tuple):
            inner = [f"{name}[{i}]" for i in range(len(type_))]
            found += flat(inner, type_, value, metas)
        elif isinstance(type_, str) and type_.startswith("tensordesc"):
            found += of_descriptor(name, value, next(metas, None))
        elif type_ != "constexpr":
            found.append((name, value))
    return found


def of_descriptor(name: str, value, meta: dict | None) -> list[tuple[str, object]]:
    """The parameters of a tensor descriptor: a tensor map, or its parts where the kernel uses
    pointers; then its sizes and strides.
    """
    sizes = [*value.shape, *value.strides]
    tail = [(name, size) for size in sizes]
    if meta is None:
        flags = [value.padding == "nan", getattr(value, "round_f32_to_tf32", False)]
        return [(name, value.base), *tail, *((name, flag) for flag in flags), *tail]
    width = {0: 0, 1: 32, 2: 64, 3: 128}[meta["swizzle"]]
    box = list(meta["block_size"])
    return [(name, Descriptor(value.base, value.shape, value.strides, box, width)), *tail]
