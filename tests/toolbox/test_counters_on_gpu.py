"""The machine's counts beside those of an H200 (results/h200/counters.json)."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lessons.toolbox.measure.device import CHIP, has_triton
from lessons.toolbox.profile import measured

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton's compiler")
LESSONS = sorted({launch["lesson"] for launch in measured.measured()})


def beside(lesson: str, plant: str = "") -> subprocess.CompletedProcess:
    """`measured LESSON` in a process for sm_90, with a wrong counter planted first."""
    code = f"from lessons.toolbox.gpu import counters\n{plant}\n"
    code += "import sys\nfrom lessons.toolbox.profile.measured import main\n"
    code += f"sys.exit(main(['{lesson}']))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment | {CHIP: "90"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@needs_triton
@pytest.mark.parametrize("lesson", LESSONS)
@pytest.mark.sample(1, of="compiled code")
def test_our_counts_are_the_gpus(lesson):
    done = beside(lesson)
    assert done.returncode == 0, done.stderr or done.stdout
    launches = [
        launch
        for launch in measured.measured()
        if launch["lesson"] == lesson and (lesson, launch["function"]) not in measured.REPLACED
    ]
    assert done.stdout.count("_kernel") == len(launches)


WRONG = {
    "a wide load never goes together": ("00", "counters.twins = lambda warp, *_: warp < 0"),
    "a sector too many for each request": (
        "00",
        "old = counters.Counts._add\n"
        "def more(self, names, place, *n):\n"
        "    n = (n[0], n[1] + n[0], *n[2:]) if names is counters.GLOBAL else n\n"
        "    old(self, names, place, *n)\n"
        "counters.Counts._add = more",
    ),
    "64 banks": ("00", "counters.BANKS = 64"),
    "a copy's lines do not matter": ("18", "counters.LINE = 1 << 40"),
    "products read nothing": ("18", "counters.Counts.matrix_read = lambda *_: None"),
    "half the FLOPs": (
        "18",
        "import lessons.toolbox.profile.counted as c\nold = c.matrix_flops\n"
        "c.matrix_flops = lambda i: old(i) // 2",
    ),
}


@needs_triton
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.sample(1, of="compiled code")
def test_a_wrong_counter_is_seen(what):
    done = beside(*WRONG[what])
    assert done.returncode == 1, done.stdout
    assert "times what the GPU counted" in done.stderr, done.stderr


def test_what_is_explained_does_differ():
    """An explanation of a count that agrees would hide a wrong counter later."""
    launches = {(x["lesson"], x["function"], x["kernel"]) for x in measured.measured()}
    for *launch, word in measured.EXPLAINED:
        assert tuple(launch) in launches and word in measured.SAME_CODE


def test_a_table_becomes_a_record(tmp_path):
    metrics = [m for every in measured.METRICS.values() for m in every]
    metrics += list(measured.LIMITS.values())
    names = ["Kernel Name", "Grid Size", "Block Size", "device__attribute_display_name",
             "thread Domain:Push/Pop_Range:PL_Type", *dict.fromkeys(metrics)]  # fmt: skip
    units = {"gpu__time_duration.sum": "us", "dram__bytes_read.sum": "Mbyte"}
    units["launch__shared_mem_per_block_dynamic"] = "Kbyte/block"
    value = {name: "3" for name in names} | {
        "Kernel Name": "flash_kernel", "Grid Size": "(4, 2, 1)", "Block Size": "(256, 1, 1)",
        "device__attribute_display_name": "NVIDIA H200", "gpu__time_duration.sum": "2.5",
        "thread Domain:Push/Pop_Range:PL_Type": '8939 "<default domain>:09 optimized:none:none"',
        "dram__bytes_read.sum": "1.5", "smsp__inst_executed.sum": "1,234",
        "launch__occupancy_limit_warps": "2",
    }  # fmt: skip
    theirs = value | {"Kernel Name": "void at::fill<float>"}
    file = tmp_path / "counters.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows(
            [names, [units.get(name, "") for name in names]]
            + [[row[name] for name in names] for row in (theirs, value)]
        )
    found = measured.record(file)
    (launch,) = found["launches"]
    assert found["device"] == "NVIDIA H200"
    assert (launch["lesson"], launch["function"], launch["grid"]) == ("09", "optimized", [4, 2, 1])
    assert launch["duration_s"] == pytest.approx(2.5e-6) and launch["warps"] == 8
    assert (launch["loaded_bytes"], launch["shared_bytes"]) == (1_500_000, 3000)
    assert (launch["issued"], launch["async_copy_sectors"]) == (1234, 6)
    assert (launch["programs_per_sm"], launch["programs_per_sm_limit"]) == (2, "warps")
    file.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no table; accepted: what ncu"):
        measured.record(file)
