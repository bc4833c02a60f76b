"""What a chip can do: data sheets, ceilings measured on this machine, and the roofline that follows
from either.

A data sheet's figures (`CHIPS`, source "… data sheet") are the physical limit; nothing reaches
them. Measured ceilings (`measured_ceilings`, source "measured …") are what the best simple code
reaches here: a copy, a read, a large matrix product. Percentages of the first are comparable
between machines; percentages of the second say how much is left to win.

Matrix rates are dense. NVIDIA's tables print the rate "with sparsity", twice as much, beside or
instead of it.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lessons.toolbox.measure import timing
from lessons.toolbox.measure.device import core_count, cpu_name, default_device, version_of

GB, MIB, KIB, TERA = 10**9, 2**20, 2**10, 10**12


@dataclass(frozen=True)
class Chip:
    """One processor. Rates of formats that it has no matrix units for are None; `source` says where
    the figures are from.

    memory_bytes: as sold, in units of 10^9; the driver keeps some of it. l2_bytes: the last-level
    cache of a CPU. sm_count: cores of a CPU. shared_memory_bytes: the most that one thread block
    can have. cuda_names: the driver's names.
    """

    name: str
    memory_bytes_per_s: float
    memory_bytes: int
    bf16_flops_per_s: float | None
    fp16_flops_per_s: float | None
    fp8_flops_per_s: float | None
    fp32_flops_per_s: float
    l2_bytes: int
    sm_count: int
    shared_memory_bytes: int | None
    compute_capability: tuple[int, int] | None
    source: str
    cuda_names: tuple[str, ...] = ()

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


# SM counts, L2 sizes: whitepapers, and what the driver reports (H200, L40S, B200, whose sheets do
# not give L2). Shared memory and capability: CUDA programming guide, appendix "Compute
# Capabilities".
CHIPS = {
    "a100": Chip(
        "A100 80GB SXM",
        2.039 * TERA,
        80 * GB,
        312 * TERA,
        312 * TERA,
        None,
        19.5 * TERA,
        40 * MIB,
        108,
        163 * KIB,
        (8, 0),
        "NVIDIA A100 Tensor Core GPU data sheet",
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
    ),
    "h100": Chip(
        "H100 SXM",
        3.35 * TERA,
        80 * GB,
        989.5 * TERA,
        989.5 * TERA,
        1979 * TERA,
        67 * TERA,
        50 * MIB,
        132,
        227 * KIB,
        (9, 0),
        "NVIDIA H100 Tensor Core GPU data sheet (halved, it prints sparse rates)",
        ("NVIDIA H100 80GB HBM3",),
    ),
    "h200": Chip(
        "H200",
        4.8 * TERA,
        141 * GB,
        989.5 * TERA,
        989.5 * TERA,
        1979 * TERA,
        67 * TERA,
        60 * MIB,
        132,
        227 * KIB,
        (9, 0),
        "NVIDIA H200 Tensor Core GPU data sheet (halved, it prints sparse rates)",
        ("NVIDIA H200",),
    ),
    "b200": Chip(
        "B200",
        8.0 * TERA,
        180 * GB,
        2250 * TERA,
        2250 * TERA,
        4500 * TERA,
        75 * TERA,
        126 * MIB,
        148,
        227 * KIB,
        (10, 0),
        "NVIDIA DGX B200 and Blackwell HGX data sheets (halved, they print sparse rates; per GPU)",
        ("NVIDIA B200",),
    ),
    "l40s": Chip(
        "L40S",
        864 * GB,
        48 * GB,
        362.05 * TERA,
        362.05 * TERA,
        733 * TERA,
        91.6 * TERA,
        96 * MIB,
        142,
        99 * KIB,
        (8, 9),
        "NVIDIA L40S data sheet",
        ("NVIDIA L40S",),
    ),
    "rtx4090": Chip(
        "RTX 4090",
        1008 * GB,
        24 * GB,
        165.2 * TERA,
        165.2 * TERA,
        330.3 * TERA,
        82.6 * TERA,
        72 * MIB,
        128,
        99 * KIB,
        (8, 9),
        "NVIDIA Ada GPU architecture whitepaper, appendix A (rates with FP32 accumulation)",
        ("NVIDIA GeForce RTX 4090",),
    ),
    "t4": Chip(
        "T4",
        320 * GB,
        16 * GB,
        None,
        65 * TERA,
        None,
        8.1 * TERA,
        4 * MIB,
        40,
        64 * KIB,
        (7, 5),
        "NVIDIA T4 data sheet",
        ("Tesla T4",),
    ),
}
ALIASES = {
    "a10080gb": "a100",
    "a100sxm": "a100",
    "a10080gbsxm": "a100",
    "h100sxm": "h100",
    "h200sxm": "h200",
    "4090": "rtx4090",
    "geforcertx4090": "rtx4090",
    "teslat4": "t4",
    "thiscpu": "cpu",
}


def lookup(name: str) -> Chip:
    """The chip of that name, however it is spelled; "cpu" is this machine's, measured. Raises
    ValueError with the known names.
    """
    key = "".join(filter(str.isalnum, name.lower())).removeprefix("nvidia")
    key = ALIASES.get(key, key)
    if key == "cpu":
        return _measured_chip(torch.device("cpu"))
    if key not in CHIPS:
        raise ValueError(f"chip is {name!r}, known are {', '.join(CHIPS)}, cpu")
    return CHIPS[key]


def this_machine(device: torch.device | str | None = None) -> Chip:
    """The data sheet of this GPU if it is in the table (by its exact name, because variants
    differ), else a measured Chip.
    """
    device = torch.device(device or default_device())
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for chip in CHIPS.values():
            if name in chip.cuda_names:
                return chip
    return _measured_chip(device)


def _measured_chip(device: torch.device) -> Chip:
    c = measured_ceilings(device)
    rates = c.matmul_flops_per_s
    common = dict(
        memory_bytes_per_s=c.memory_bytes_per_s,
        bf16_flops_per_s=rates.get("bfloat16"),
        fp16_flops_per_s=rates.get("float16"),
        fp8_flops_per_s=None,
        fp32_flops_per_s=rates["float32"],
        l2_bytes=timing.cache_bytes(device),
        source="measured on this machine",
    )
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        return Chip(
            name=p.name,
            memory_bytes=p.total_memory,
            sm_count=p.multi_processor_count,
            shared_memory_bytes=p.shared_memory_per_block_optin,
            compute_capability=(p.major, p.minor),
            **common,
        )
    return Chip(
        name=cpu_name(),
        memory_bytes=_ram_bytes(),
        sm_count=core_count(),
        shared_memory_bytes=None,
        compute_capability=None,
        **common,
    )


def _ram_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        raise RuntimeError(
            "this system does not tell its memory size; pass a chip by name instead of 'cpu'"
        ) from None


# ---------------------------------------------------------------- measured ceilings


@dataclass(frozen=True)
class Ceilings:
    """The best that simple code reaches on this machine, measured. working_set_bytes: how much the
    copy and the read touch.

    copy_bytes_per_s counts read and write. matmul_flops_per_s: {"float32": ..., "bfloat16" or
    "float16": ...}.
    """

    device: str
    threads: int
    torch: str
    working_set_bytes: int
    copy_bytes_per_s: float
    read_bytes_per_s: float
    matmul_flops_per_s: dict[str, float]

    @property
    def memory_bytes_per_s(self) -> float:
        """The better of copy and read."""
        return max(self.copy_bytes_per_s, self.read_bytes_per_s)

    def peak_flops_per_s(self, dtype: torch.dtype = torch.float32) -> float:
        """Measured matrix rate in FLOP/s. Raises ValueError for a dtype that was not measured."""
        name = str(dtype).removeprefix("torch.")
        if name not in self.matmul_flops_per_s:
            raise ValueError(f"dtype is {name}, measured are {', '.join(self.matmul_flops_per_s)}")
        return self.matmul_flops_per_s[name]


_measured: dict[tuple, Ceilings] = {}  # once per process, device and number of threads


def measured_ceilings(
    device: torch.device | str | None = None, cache_file: str | Path | None = None
) -> Ceilings:
    """Measure this machine (about 2 s), once per process; with `cache_file` (JSON) once per
    machine, torch and thread count.
    """
    device = torch.device(device or default_device())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    key = (name, torch.get_num_threads(), version_of("torch"))
    if key not in _measured:
        _measured[key] = _read_ceilings(cache_file, key) or _measure_ceilings(device, key)
    if cache_file is not None:
        _write_ceilings(Path(cache_file), _measured[key])
    return _measured[key]


def _measure_ceilings(device: torch.device, key: tuple) -> Ceilings:
    working_set = default_working_set_bytes(device)
    half = (
        torch.bfloat16
        if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
        else torch.float16
    )
    rates = {
        str(dtype).removeprefix("torch."): matmul_flops(device, dtype)
        for dtype in (torch.float32, half)
    }
    return Ceilings(
        *key,
        working_set,
        copy_bandwidth(device, working_set),
        read_bandwidth(device, working_set),
        rates,
    )


def default_working_set_bytes(device: torch.device | str) -> int:
    """4 times the last-level cache, at least 64 MiB; at most 256 MiB on a CPU, because a laptop's
    memory is small.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return max(4 * timing.cache_bytes(device), 2**30)
    return min(max(4 * timing.cache_bytes(device), 64 * MIB), 256 * MIB)


def copy_bandwidth(
    device: torch.device | str, working_set_bytes: int, budget_s: float = 0.25
) -> float:
    """Bytes/s of a copy, reads and writes counted; source and target together are the working set."""
    source = torch.randn(working_set_bytes // 8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_s(lambda: target.copy_(source), device, budget_s)


def read_bandwidth(
    device: torch.device | str, working_set_bytes: int, budget_s: float = 0.25
) -> float:
    """Bytes/s of reading the working set once: the better of a sum and a matrix-vector product,
    which is what a decode step does.

    A working set that fits the cache measures the cache: pass a model's weight bytes to get the
    roof that this model sees.
    """
    columns = 1024
    matrix = torch.randn(max(1, working_set_bytes // (4 * columns)), columns, device=device)
    vector = torch.randn(columns, device=device)
    best = min(
        _best_s(lambda: matrix.sum(), device, budget_s),
        _best_s(lambda: matrix @ vector, device, budget_s),
    )
    return matrix.nbytes / best


def matmul_flops(
    device: torch.device | str, dtype: torch.dtype, size: int | None = None, budget_s: float = 0.25
) -> float:
    """FLOP/s of a square matrix product, 2 size^3 operations; float32 without tf32."""
    if size is None:
        size = 8192 if torch.device(device).type == "cuda" else 768
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return 2 * size**3 / _best_s(lambda: a @ b, device, budget_s)
    finally:
        torch.set_float32_matmul_precision(before)


def _best_s(fn, device, budget_s: float) -> float:
    """The fastest run in seconds: a ceiling is what the machine can, not what it usually does."""
    return min(timing.measure(fn, device=device, budget_s=budget_s).samples_s)


def _read_ceilings(cache_file: str | Path | None, key: tuple) -> Ceilings | None:
    """None if there is no file, or it is damaged or from another machine: then it is measured
    again.
    """
    try:
        ceilings = Ceilings(**json.loads(Path(cache_file).read_text()))
    except (TypeError, OSError, ValueError):
        return None
    return ceilings if (ceilings.device, ceilings.threads, ceilings.torch) == key else None


def _write_ceilings(cache_file: Path, ceilings: Ceilings) -> None:
    cache_file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = cache_file.with_name(f"{cache_file.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(ceilings), indent=1))
    unfinished.replace(cache_file)  # never half a file, because a run may be interrupted


# ---------------------------------------------------------------- the roofline


def attainable_flops(
    intensity_flops_per_byte: float, peak_flops_per_s: float, memory_bytes_per_s: float
) -> float:
    """FLOP/s under the roofline: the lower of the flat roof and bandwidth times intensity (Williams
    et al. 2009).
    """
    return min(peak_flops_per_s, memory_bytes_per_s * intensity_flops_per_byte)


def ridge_point(peak_flops_per_s: float, memory_bytes_per_s: float) -> float:
    """The intensity in FLOPs per byte from which on the matrix units are the limit, not the memory."""
    return peak_flops_per_s / memory_bytes_per_s


def time_floor_s(
    bytes_moved: float, flops: float, chip: Chip | Ceilings, dtype: torch.dtype = torch.bfloat16
) -> float:
    """Seconds below which nothing on this chip can move the bytes and do the FLOPs, perfectly
    overlapped.
    """
    compute_s = flops / chip.peak_flops_per_s(dtype) if flops else 0.0
    return max(bytes_moved / chip.memory_bytes_per_s, compute_s)
