"""What a chip can do: data sheets, the same measured on this machine, and the roofline that follows
from either.

A data sheet's figures (`CHIPS`, source "… data sheet") are the physical limit; nothing reaches
them. Measured ones (`measured_ceilings`, source "measured …") are what the best simple code reaches
here: a copy, a read, a large matrix product. Percentages of the first are comparable between
machines; percentages of the second say how much is left to win.

Matrix rates are dense. NVIDIA's tables print the rate "with sparsity", twice as much, beside or
instead of it.
"""

import contextlib
import os
from dataclasses import dataclass
from functools import lru_cache

import torch

from lessons.toolbox.measure import timing
from lessons.toolbox.measure.device import cpu_name, default_device, default_dtype

GB, MIB, KIB = 10**9, 2**20, 2**10
# Of one SM. CUDA programming guide, appendix "Compute Capabilities": 64 Ki registers of 32 bits;
# 32 banks of shared memory, each 4 bytes a clock; lanes that add and multiply float32.
REGISTER_BYTES, SHARED_BYTES_PER_CLOCK = 256 * KIB, 128
FP32_LANES = {(7, 5): 64, (8, 0): 64, (8, 9): 128, (9, 0): 128, (10, 0): 128}
BUDGET_S = 0.25  # of one ceiling


@dataclass(frozen=True)
class Chip:
    """One processor. Rates of formats that it has no matrix units for are None; `source` says where
    the figures are from.

    memory_bytes: as sold, in units of 10^9; the driver keeps some of it. shared_memory_bytes: the
    most that one thread block can have. Of a measured chip only the rates, the name and the memory
    are known.
    """

    name: str
    memory_bytes_per_s: float
    memory_bytes: int
    bf16_flops_per_s: float | None
    fp16_flops_per_s: float | None
    fp8_flops_per_s: float | None
    fp32_flops_per_s: float
    l2_bytes: int | None = None
    sm_count: int | None = None
    shared_memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    source: str = "measured on this machine"

    def peak_flops_per_s(self, dtype: torch.dtype = torch.bfloat16) -> float:
        """Dense matrix rate in FLOP/s (float32: IEEE, not tf32). Raises ValueError if the chip has
        none for this dtype.
        """
        rates = {
            torch.bfloat16: self.bf16_flops_per_s,
            torch.float16: self.fp16_flops_per_s,
            torch.float32: self.fp32_flops_per_s,
            torch.float8_e4m3fn: self.fp8_flops_per_s,
            torch.float8_e5m2: self.fp8_flops_per_s,
        }
        if rates.get(dtype) is None:
            known = ", ".join(str(d).removeprefix("torch.") for d, rate in rates.items() if rate)
            raise ValueError(f"dtype is {dtype}, {self.name} has rates for {known}")
        return rates[dtype]

    @property
    def clock_hz(self) -> float:
        """The clock behind the data sheet's float32 rate: every lane one multiply-add a clock."""
        self._need("clock_hz")
        lanes = self.sm_count * FP32_LANES[self.compute_capability]
        return self.fp32_flops_per_s / (2 * lanes)

    @property
    def shared_bytes_per_s(self) -> float:
        """Of all SMs' shared memories together, without bank conflicts, at that clock."""
        return self.clock_hz * SHARED_BYTES_PER_CLOCK * self.sm_count

    @property
    def register_bytes(self) -> int:
        """Of all SMs together."""
        self._need("register_bytes")
        return self.sm_count * REGISTER_BYTES

    def _need(self, what: str) -> None:
        if self.sm_count is None or self.compute_capability not in FP32_LANES:
            known = ", ".join(CHIPS)
            raise ValueError(f"{what} of {self.name} is not known; accepted: a chip of {known}")


# SM counts, L2 sizes: whitepapers, and what the driver reports (H200, L40S, B200, whose sheets do
# not give L2). Shared memory and capability: CUDA programming guide, appendix "Compute
# Capabilities".
# fmt: off
CHIPS = {
    # name, memory in bytes/s and bytes, FLOP/s in bf16, fp16, fp8 and fp32,
    # L2, SMs, shared memory, compute capability, source
    "a100": Chip(
        "A100 80GB SXM", 2.039e12, 80 * GB, 312e12, 312e12, None, 19.5e12,
        40 * MIB, 108, 163 * KIB, (8, 0), "NVIDIA A100 Tensor Core GPU data sheet"),
    "h100": Chip(
        "H100 SXM", 3.35e12, 80 * GB, 989.5e12, 989.5e12, 1979e12, 67e12,
        50 * MIB, 132, 227 * KIB, (9, 0),
        "NVIDIA H100 Tensor Core GPU data sheet (halved, it prints sparse rates)"),
    "h200": Chip(
        "H200", 4.8e12, 141 * GB, 989.5e12, 989.5e12, 1979e12, 67e12,
        60 * MIB, 132, 227 * KIB, (9, 0),
        "NVIDIA H200 Tensor Core GPU data sheet (halved, it prints sparse rates)"),
    "b200": Chip(
        "B200", 8e12, 180 * GB, 2250e12, 2250e12, 4500e12, 75e12,
        126 * MIB, 148, 227 * KIB, (10, 0),
        "NVIDIA DGX B200 and Blackwell HGX data sheets (halved, they print sparse rates; per GPU)"),
    "l40s": Chip(
        "L40S", 864e9, 48 * GB, 362.05e12, 362.05e12, 733e12, 91.6e12,
        96 * MIB, 142, 99 * KIB, (8, 9), "NVIDIA L40S data sheet"),
    "rtx4090": Chip(
        "RTX 4090", 1008e9, 24 * GB, 165.2e12, 165.2e12, 330.3e12, 82.6e12,
        72 * MIB, 128, 99 * KIB, (8, 9),
        "NVIDIA Ada GPU architecture whitepaper, appendix A (rates with FP32 accumulation)"),
    "t4": Chip(
        "T4", 320e9, 16 * GB, None, 65e12, None, 8.1e12,
        4 * MIB, 40, 64 * KIB, (7, 5), "NVIDIA T4 data sheet"),
}
# fmt: on
# Other names, without "NVIDIA" and punctuation. The driver's name must match as a whole, because
# variants differ: an "H100 PCIe" is none of these.
ALIASES = {
    "a10080gb": "a100",
    "a100sxm480gb": "a100",  # the driver's
    "h100sxm": "h100",
    "h10080gbhbm3": "h100",  # the driver's
    "h200sxm": "h200",
    "4090": "rtx4090",
    "geforcertx4090": "rtx4090",  # the driver's
    "teslat4": "t4",  # the driver's
}


def lookup(name: str) -> Chip:
    """The chip of that name, however it is spelled; "cpu" is this machine's, measured. Raises
    ValueError with the known names.
    """
    key = "".join(filter(str.isalnum, name.lower())).removeprefix("nvidia")
    key = ALIASES.get(key, key)
    if key == "cpu":
        return measured_ceilings("cpu")
    if key not in CHIPS:
        raise ValueError(f"chip is {name!r}, known are {', '.join(CHIPS)}, cpu")
    return CHIPS[key]


def this_machine(device: torch.device | str | None = None) -> Chip:
    """The data sheet of this GPU if it is in the table, else what was measured."""
    device = torch.device(device or default_device())
    if device.type == "cuda":
        with contextlib.suppress(ValueError):
            return lookup(torch.cuda.get_device_name(device))
    return measured_ceilings(device)


# ---------------------------------------------------------------- measured ceilings


def measured_ceilings(device: torch.device | str | None = None) -> Chip:
    """This machine as a Chip of what simple code reaches on it; measured (about 2 s) once per
    process and thread count. Its memory rate is the better of a copy and a read.
    """
    return _measured(torch.device(device or default_device()), torch.get_num_threads())


@lru_cache
def _measured(device: torch.device, threads: int) -> Chip:
    name, memory_bytes, half = cpu_name(), _ram_bytes(), torch.bfloat16
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory_bytes, half = properties.name, properties.total_memory, default_dtype()
    half_rate = matmul_flops(device, half)
    working_set = default_working_set_bytes(device)
    copy, read = copy_bandwidth(device, working_set), read_bandwidth(device, working_set)
    return Chip(
        name=name,
        memory_bytes_per_s=max(copy, read),
        memory_bytes=memory_bytes,
        bf16_flops_per_s=half_rate if half == torch.bfloat16 else None,
        fp16_flops_per_s=half_rate if half == torch.float16 else None,
        fp8_flops_per_s=None,
        fp32_flops_per_s=matmul_flops(device, torch.float32),
    )


def _ram_bytes() -> int:
    """0 where the system does not tell."""
    if not hasattr(os, "sysconf"):  # Windows
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_working_set_bytes(device: torch.device | str) -> int:
    """1 GiB on a GPU, 8 times the largest L2; 256 MiB on a CPU, because a laptop's memory is
    small.
    """
    return 2**30 if torch.device(device).type == "cuda" else 2**28


def copy_bandwidth(device: torch.device | str, working_set_bytes: int) -> float:
    """Bytes/s of a copy, reads and writes counted; source and target are the working set."""
    source = torch.randn(working_set_bytes // 8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_s(lambda: target.copy_(source), device)


def read_bandwidth(
    device: torch.device | str, working_set_bytes: int, budget_s: float = BUDGET_S
) -> float:
    """Bytes/s of reading the working set once: the better of a sum and a matrix-vector product,
    which is what a decode step does.

    A working set that fits the cache measures the cache: pass a model's weight bytes to get the
    roof that this model sees.
    """
    columns = 1024
    matrix = torch.randn(max(1, working_set_bytes // (4 * columns)), columns, device=device)
    vector = torch.randn(columns, device=device)
    best_s = min(
        _best_s(matrix.sum, device, budget_s), _best_s(lambda: matrix @ vector, device, budget_s)
    )
    return matrix.nbytes / best_s


def matmul_flops(device: torch.device | str, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product, 2 size^3 operations; float32 as PyTorch is set, which is
    IEEE and not tf32 by default.
    """
    size = 8192 if torch.device(device).type == "cuda" else 768
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_s(lambda: a @ b, device)


def _best_s(fn, device, budget_s: float = BUDGET_S) -> float:
    """The fastest run in seconds: a ceiling is what the machine can, not what it usually does."""
    return timing.measure(fn, device=device, budget_s=budget_s).best_s


# ---------------------------------------------------------------- the roofline


def attainable_flops(
    intensity_flops_per_byte: float, peak_flops_per_s: float, memory_bytes_per_s: float
) -> float:
    """FLOP/s under the roofline: the lower of the flat roof and bandwidth times intensity (Williams
    et al. 2009).
    """
    return min(peak_flops_per_s, memory_bytes_per_s * intensity_flops_per_byte)


def ridge_point(peak_flops_per_s: float, memory_bytes_per_s: float) -> float:
    """The intensity in FLOPs per byte from which on the matrix units are the limit."""
    return peak_flops_per_s / memory_bytes_per_s


def time_floor_s(
    bytes_moved: float, flops: float, chip: Chip, dtype: torch.dtype = torch.bfloat16
) -> float:
    """Seconds below which nothing on this chip can move the bytes and do the FLOPs, perfectly
    overlapped.
    """
    compute_s = flops / chip.peak_flops_per_s(dtype) if flops else 0.0
    return max(bytes_moved / chip.memory_bytes_per_s, compute_s)
