"""A kernel's counts, brought together: by line of the source, by part of the chip, and against what
the chip can do.

The times are floors: each part of the chip by itself, all its SMs busy from the first to the last
clock, no latency. The largest names the part that limits the kernel, and a real kernel takes
longer. Instructions are those of PTX. The driver's assembler merges some and adds others.

Source: CUDA C++ Programming Guide 13, "Arithmetic Instructions" (results a clock and SM) and
"Technical Specifications per Compute Capability" (warps, programs and registers of an SM).
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lessons.toolbox.gpu.counters import GLOBAL, SECTOR, SHARED, WARP, matrix_flops
from lessons.toolbox.gpu.machine import Launch
from lessons.toolbox.gpu.ptx import Instruction, Kernel, Line
from lessons.toolbox.measure.hardware import Chip

# Of an SM: warps, programs, KiB of shared memory. Each has 65,536 registers, given out by 256.
SM = {75: (32, 16, 64), 80: (64, 32, 164), 89: (48, 24, 100), 90: (64, 32, 228)}
REGISTERS, REGISTER_UNIT = 65536, 256
RESERVED = 1024  # bytes of shared memory that each program loses to the system, from sm_80 on
ISSUED = 4  # warp instructions a clock and SM
# Threads' results a clock and SM.
RATES = {
    75: {"float32": 64, "integer": 64, "functions": 16, "conversions": 16},
    80: {"float32": 64, "integer": 64, "functions": 16, "conversions": 16},
    89: {"float32": 128, "integer": 64, "functions": 16, "conversions": 64},
    90: {"float32": 128, "integer": 64, "functions": 16, "conversions": 64},
}
L2_BYTES = 64  # a clock and SM, from L2. Source: Jia et al. 2018, Dissecting Volta, table 3.1
FUNCTIONS = ("ex2", "lg2", "sin", "cos", "rcp", "rsqrt", "sqrt", "tanh", "div")
WHY = " (bank conflicts, or copies from short rows)"
COLUMNS = ("issued", "threads", *GLOBAL, *SHARED, "flops")


def pipe(instruction: Instruction) -> str:
    """The part of an SM that runs an instruction; "" for what none of RATES runs."""
    op, type_ = instruction.op, instruction.type
    if op in FUNCTIONS and type_[0] == "f":
        return "functions"
    if op == "cvt":
        return "conversions"
    if op in ("ld", "st", "cp", "atom", "red", "mma", "wgmma", "ldmatrix", "stmatrix"):
        return ""
    if op in ("bar", "barrier", "bra", "ret", "fence", "membar", "mbarrier", "mov", "shfl"):
        return ""
    return "float32" if type_[:1] == "f" or type_.startswith("bf") else "integer"


@dataclass
class KernelProfile:
    """All launches of one kernel with one grid. lines: {line: {column: number}}."""

    kernel: Kernel
    chip: Chip
    grid: tuple[int, int, int]
    warps: int  # of a program
    shared_bytes: int  # of a program
    launches: int = 0
    programs: int = 0
    lines: dict[Line, Counter] = field(default_factory=dict)
    pipes: Counter = field(default_factory=Counter)  # threads' results, by part of the SM
    loaded_bytes: int = 0  # of distinct sectors, launch by launch
    stored_bytes: int = 0
    first: Launch | None = None  # of the launches

    def add(self, launch: Launch) -> None:
        """One more launch, counted."""
        counts = launch.counts
        self.first = self.first or launch
        self.launches += 1
        self.programs += launch.programs
        self.loaded_bytes += counts.footprint("loaded")
        self.stored_bytes += counts.footprint("stored")
        for place, instruction in enumerate(launch.kernel.instructions):
            issued = launch.executed[place]
            row = self.lines.setdefault(instruction.source, Counter())
            row["issued"] += issued
            row["flops"] += matrix_flops(instruction) * issued
            for name, column in counts.columns.items():
                row[name] += int(column[place])
            if name := pipe(instruction):
                self.pipes[name] += WARP * issued

    @cached_property
    def total(self) -> Counter:
        return sum(self.lines.values(), Counter())

    @cached_property
    def assembled(self) -> dict[str, int]:
        """What NVIDIA's assembler says: {"registers", "spill_bytes"}; empty where it is missing."""
        return assembled(self.kernel.text, self.kernel.name)

    @property
    def capability(self) -> int:
        major, minor = self.chip.compute_capability
        return 10 * major + minor

    def occupancy(self) -> tuple[int, str]:
        """(programs that fit on an SM, what keeps more out)."""
        warps, programs, shared_kib = SM[self.capability]
        reserved = RESERVED if self.capability >= 80 else 0
        fits = {"programs": programs, "warps": warps // self.warps}
        if self.shared_bytes:
            fits["shared memory"] = 1024 * shared_kib // (self.shared_bytes + reserved)
        if each := self.assembled.get("registers"):
            unit = -(-each * WARP // REGISTER_UNIT) * REGISTER_UNIT
            fits["registers"] = REGISTERS // (unit * self.warps)
        return min((number, what) for what, number in fits.items())

    def floors_s(self) -> dict[str, float]:
        """{part of the chip: seconds that it needs at least}, the longest first."""
        chip, total = self.chip, self.total
        clocks = {
            "instructions issued": total["issued"] / ISSUED,
            "shared memory": total["passes"],
            "L2 cache": total["sectors"] * SECTOR / L2_BYTES,
        }
        for name, number in self.pipes.items():
            clocks[name] = number / RATES[self.capability][name]
        found = {name: n / chip.sm_count / chip.clock_hz for name, n in clocks.items()}
        found["memory"] = (self.loaded_bytes + self.stored_bytes) / chip.memory_bytes_per_s
        if total["flops"]:
            found["matrix units"] = total["flops"] / self.matrix_rate()
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def matrix_rate(self) -> float:
        """FLOP/s of the chip's matrix units for the kernel's most frequent format."""
        words = Counter(
            word
            for i in self.kernel.instructions
            if matrix_flops(i)
            for word in i.modifiers
            if word in ("bf16", "f16", "e4m3", "e5m2", "s8", "tf32")
        )
        kind = words.most_common(1)[0][0] if words else "bf16"
        half = self.chip.bf16_flops_per_s or self.chip.fp16_flops_per_s
        # tf32 has half the rate, 8-bit formats the double: data sheets of all chips in the table
        return half * {"tf32": 0.5, "e4m3": 2, "e5m2": 2, "s8": 2}.get(kind, 1)

    def findings(self) -> list[str]:
        """Sentences on lines that ask for more than they need, the most expensive first."""
        found = []
        for line, row in self.lines.items():
            for many, least, unit, why in (
                ("sectors", "least_sectors", "sectors", ""),
                ("passes", "least_passes", "passes of shared memory", WHY),
            ):
                if line and row[many] > 1.05 * row[least]:
                    text = (
                        f"{line} asks for {row[many]:,} {unit} where {row[least]:,} would do{why}"
                    )
                    found.append((row[many] - row[least], text))
            lanes = row["threads"] / max(row["issued"], 1)
            if line and lanes < WARP / 2 and row["issued"] > 0.03 * self.total["issued"]:
                text = f"{line} keeps {lanes:.0f} of 32 threads busy"
                found.append((0, text))
        found.sort(key=lambda item: -item[0])
        if spilled := self.assembled.get("spill_bytes"):
            found.insert(0, (0, f"{spilled} bytes of registers are spilled to memory"))
        return [text for _, text in found]

    def as_json(self) -> dict:
        """What a figure or another run needs."""
        programs, limit = self.occupancy()
        return {
            "kernel": self.kernel.name,
            "chip": self.chip.name,
            "grid": list(self.grid),
            "warps": self.warps,
            "launches": self.launches,
            "programs": self.programs,
            "shared_bytes": self.shared_bytes,
            **self.assembled,
            "programs_per_sm": programs,
            "programs_per_sm_limit": limit,
            "loaded_bytes": self.loaded_bytes,
            "stored_bytes": self.stored_bytes,
            "pipes": dict(self.pipes),
            "floors_s": self.floors_s(),
            "total": {name: self.total[name] for name in COLUMNS},
            "lines": [
                {"file": Path(line.file).name, "line": line.number}
                | {name: row[name] for name in COLUMNS if row[name]}
                for line, row in sorted(self.lines.items(), key=lambda item: place(item[0]))
                if line
            ],
            "findings": self.findings(),
        }


def place(line: Line) -> tuple[str, int]:
    return line.file, line.number


def profiles(launches: list[Launch], chip: Chip) -> list[KernelProfile]:
    """A profile for each kernel and shape of its grid, in the order of their first launch."""
    found: dict[tuple, KernelProfile] = {}
    for done in launches:
        key = (done.kernel.name, id(done.kernel), done.grid)
        if key not in found:
            found[key] = KernelProfile(done.kernel, chip, done.grid, done.warps, done.shared_bytes)
        found[key].add(done)
    return list(found.values())


def assembled(ptx: str, name: str) -> dict[str, int]:
    """Registers a thread and spilled bytes of a kernel, from ptxas; {} where there is none."""
    try:
        import triton

        tool = triton.knobs.nvidia.ptxas.path
    except (ImportError, RuntimeError, AttributeError):
        return {}
    said = run_ptxas(tool, ptx)
    # NVRTC writes its newest version of PTX, and Triton's assembler may be older
    if said.returncode and (newest := re.search(r"current version is '([\d.]+)'", said.stderr)):
        said = run_ptxas(tool, re.sub(r"\.version [\d.]+", f".version {newest[1]}", ptx))
    if said.returncode:
        return {}
    mine = said.stderr.partition(f"entry function '{name}'")[2].partition(
        "Compiling entry function"
    )[0]
    spilled = re.findall(r"(\d+) bytes spill", mine)
    registers = re.search(r"Used (\d+) registers", mine)
    return {"registers": int(registers[1]), "spill_bytes": sum(map(int, spilled))}


def run_ptxas(tool: str, ptx: str) -> subprocess.CompletedProcess:
    """NVIDIA's assembler over a file's text; what it says of each kernel is in `stderr`."""
    target = re.search(r"\.target\s+(\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx, encoding="utf-8")
        command = [tool, "-v", f"--gpu-name={target}", "-o", "/dev/null", file]
        return subprocess.run(command, capture_output=True, text=True, check=False)
