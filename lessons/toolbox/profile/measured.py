"""Nsight Compute's counts of the profiles' launches: a small record of its table, and ours beside
it.

    python -m lessons.toolbox.profile.measured --record counters.csv     # the table -> the record
    python -m lessons.toolbox.profile.measured [09 10]                   # our counts beside it

`on_gpu.py` says how the table is made. Of its 2,200 columns the record keeps those for which a
profile has a word, launch by launch, without the kernels of PyTorch. The second command counts the
same launches here, compiled for the same chip, and prints how many times the GPU's number ours is.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from lessons.toolbox.command import OneLineParser, run_command
from lessons.toolbox.measure.device import CHIP, compiled_chip, has_triton

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "results" / "h200" / "counters.json"
# our word -> Nsight Compute's metrics, whose sum it is
METRICS = {
    "issued": ["smsp__inst_executed.sum"],
    "sectors": ["memory_l2_theoretical_sectors_global"],
    "least_sectors": ["memory_l2_theoretical_sectors_global_ideal"],
    "l1_sectors_loaded": ["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"],
    "l1_sectors_stored": ["l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"],
    "async_copy_sectors": [
        "sm__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_access.sum",
        "sm__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_bypass.sum",
    ],
    "l2_sectors": ["lts__t_sectors_srcunit_tex.sum"],
    "loaded_bytes": ["dram__bytes_read.sum"],
    "stored_bytes": ["dram__bytes_write.sum"],
    "passes": ["memory_l1_wavefronts_shared"],
    "least_passes": ["memory_l1_wavefronts_shared_ideal"],
    "bank_conflicts": ["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"],
    "flops": ["sm__ops_path_tensor_src_bf16_dst_fp32.sum", "sm__ops_path_tensor_src_fp16.sum"],
    "wgmma_instructions": ["smsp__sass_inst_executed_op_shared_gmma.sum"],
    "registers": ["launch__registers_per_thread"],
    "shared_bytes": ["launch__shared_mem_per_block_dynamic"],
    "warps_active": ["sm__warps_active.avg.per_cycle_active"],
    "duration_s": ["gpu__time_duration.sum"],
    "cycles": ["sm__cycles_elapsed.max"],
    "busiest_sm_cycles": ["sm__cycles_active.max"],
    "clock_hz": ["sm__cycles_elapsed.avg.per_second"],
}
LIMITS = {
    "programs": "launch__occupancy_limit_blocks",
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "warps": "launch__occupancy_limit_warps",
}
SCALES = {"us": 1e-6, "ns": 1e-9, "ms": 1e-3, "Ghz": 1e9, "Mhz": 1e6, "K": 1e3, "M": 1e6, "G": 1e9}
SHOWN = ("issued", "sectors", "least_sectors", "passes", "least_passes", "flops", "loaded_bytes",
         "registers", "programs_per_sm")  # fmt: skip
# How far our count may be from the GPU's, as a share of it. Triton 3.6 compiled for the GPU. Where
# the registers agree, so does the code, as a rule; other versions write some kernels somewhat
# otherwise.
SAME_CODE = {
    "sectors": 0.03,
    "passes": 0.03,
    "flops": 0.0,
    "programs_per_sm": 0.0,
    "loaded_bytes": 0.05,
}
OTHER_CODE = {"sectors": 0.06, "passes": 0.15, "flops": 0.0, "loaded_bytes": 0.15}
# (lesson, function, kernel, word) -> why a count is farther away than that.
EXPLAINED = {
    (
        "00",
        "rows",
        "row_max_kernel",
        "passes",
    ): "every warp reads the maximum back, but only one thread "
    "stores it: the assembler keeps the read of one warp",
    (
        "18",
        "prompt",
        "quantized_matmul_kernel",
        "sectors",
    ): "PTX loads each scale twice at one address, the assembler once",
}
# (lesson, function) -> why it launches another kernel today than the one that the GPU counted.
REPLACED = {
    ("19", "optimized"): "decode over codes has a kernel of its own, which multiplies codes"
}
SMALL = 131072  # bytes: of a launch that loads fewer, what the GPU itself reads is a large share


def scale(unit: str) -> float:
    """What a unit of the table multiplies by: "Kbyte" is 1000 bytes."""
    return SCALES.get(unit, SCALES.get(unit[:1], 1.0) if "byte" in unit else 1.0)


def record(table: Path) -> dict:
    """{"device", "launches": [...]} of Nsight Compute's raw page as CSV. Raises ValueError."""
    rows = list(csv.reader(table.read_text(encoding="utf-8").splitlines()))
    if len(rows) < 3 or "Kernel Name" not in rows[0]:
        raise ValueError(f"{table}: no table; accepted: what ncu --csv --page raw prints")
    names, units, *launches = rows
    units = dict(zip(names, units))
    found = []
    for row in (dict(zip(names, launch)) for launch in launches):
        # the range is a cell as 8939 "<default domain>:09 optimized:none:..."
        ranges = " ".join(value for name, value in row.items() if "Push/Pop_Range" in name)
        where = re.search(r":(\d\d) (\w+):", ranges)
        if where is None or "::" in row["Kernel Name"]:
            continue  # one of PyTorch's own
        found.append(of_launch(row, units, *where.groups()))
    return {
        "device": rows[2][names.index("device__attribute_display_name")],
        "tool": "Nsight Compute, --set full, caches flushed before each pass, clocks not locked",
        "versions": {"torch": "2.11", "triton": "3.6"},
        "launches": found,
    }


def of_launch(row: dict, units: dict, lesson: str, function: str) -> dict:
    """One line of the record."""

    def number(metric: str) -> float | int:
        value = float(row[metric].replace(",", "")) * scale(units[metric])
        return round(value) if value > 100 or value == int(value) else float(f"{value:.6g}")

    launch = {
        "lesson": lesson,
        "function": function,
        "kernel": row["Kernel Name"],
        "grid": [int(x) for x in re.findall(r"\d+", row["Grid Size"])],
        "warps": int(re.findall(r"\d+", row["Block Size"])[0]) // 32,
    }
    for word, metrics in METRICS.items():
        if all(metric in row for metric in metrics):
            launch[word] = sum(number(metric) for metric in metrics)
    fits = {what: number(metric) for what, metric in LIMITS.items()}
    launch["programs_per_sm"] = min(fits.values())
    launch["programs_per_sm_limit"] = min(fits, key=fits.get)
    return launch


# ---------------------------------------------------------------- ours beside it


def measured() -> list[dict]:
    """The launches of the record."""
    return json.loads(RECORD.read_text(encoding="utf-8"))["launches"]


def pairs(lesson: str, launches: list[dict]):
    """(theirs, our profile) of a lesson's launches, but for REPLACED, in a process that compiles
    for the chip. Raises ValueError where ours launches other kernels.
    """
    from lessons.toolbox.profile.__main__ import functions_of, profiled

    functions, _ = functions_of(lesson)
    theirs = [launch for launch in launches if launch["lesson"] == lesson]
    for name in dict.fromkeys(launch["function"] for launch in theirs):
        if (lesson, name) in REPLACED:
            continue
        ours, _ = profiled(functions[name], "h200")
        mine = [launch for launch in theirs if launch["function"] == name]
        if [(x["kernel"], x["grid"]) for x in mine] != [
            (x.kernel.name, list(x.grid)) for x in ours
        ]:
            raise ValueError(
                f"{lesson} {name}: the GPU ran {[x['kernel'] for x in mine]}, this machine "
                f"{[x.kernel.name for x in ours]} or another grid"
            )
        yield from zip(mine, ours)


def ratios(theirs: dict, ours: dict) -> dict[str, float]:
    """{our word: our number / the GPU's}; words that are 0 in both are left out. ours: of
    as_json.
    """
    flat = ours | ours["total"]
    found = {}
    for word in SHOWN:
        if theirs.get(word) or flat.get(word):
            found[word] = flat.get(word, 0) / theirs[word] if theirs.get(word) else float("inf")
    return found


def disagreements(theirs: dict, found: dict[str, float]) -> list[str]:
    """One line for each count that is farther from the GPU's than its bound and not EXPLAINED."""
    lines = []
    bounds = SAME_CODE if found["registers"] == 1 else OTHER_CODE
    for word, bound in bounds.items():
        if word == "loaded_bytes" and theirs[word] < SMALL:
            continue
        name = (theirs["lesson"], theirs["function"], theirs["kernel"], word)
        if abs(found.get(word, 1.0) - 1) > bound and name not in EXPLAINED:
            lines.append(f"{' '.join(name)}: {found[word]:.3f} times what the GPU counted")
    return lines


def line(theirs: dict, found: dict[str, float]) -> str:
    name = f"{theirs['lesson']} {theirs['function']:11} {theirs['kernel'][:24]:24}"
    return name + "".join(f"{found[word]:>16.3f}" if word in found else " " * 16 for word in SHOWN)


def beside(lessons: list[str]) -> int:
    """Print the ratios of every launch; 1 if one disagrees."""
    launches, wrong = measured(), []
    known = sorted({launch["lesson"] for launch in launches})
    print(f"{'our count / an H200 counted':39}" + "".join(f"{word:>16}" for word in SHOWN))
    for lesson in lessons or known:
        if lesson not in known:
            raise ValueError(f"LESSON={lesson}: not recorded; accepted: {', '.join(known)}")
        for theirs, ours in pairs(lesson, launches):
            found = ratios(theirs, ours.as_json())
            print(line(theirs, found), flush=True)
            wrong += disagreements(theirs, found)
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


def run(options: argparse.Namespace) -> int:
    if options.record:
        RECORD.write_text(json.dumps(record(options.record), indent=1) + "\n", encoding="utf-8")
        return 0
    if not has_triton():
        raise ValueError("Triton is not installed, so no kernel can be compiled")
    if compiled_chip() == 90:
        return beside(options.lessons)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "lessons.toolbox.profile.measured", *options.lessons]
    return subprocess.run(command, env=environment | {CHIP: "90"}, check=False).returncode


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(
        prog="python -m lessons.toolbox.profile.measured", description=__doc__.split("\n")[0]
    )
    parser.add_argument("lessons", nargs="*", help="numbers of lessons; all that are recorded")
    parser.add_argument("--record", type=Path, help="CSV of Nsight Compute's raw page")
    options = parser.parse_args(argv)
    return run_command("measured", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
