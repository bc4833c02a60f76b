"""The table of what the compiler may say finds each kernel that breaks a bound, and no other."""

import pytest

from lessons.toolbox.kernels.compile_report import KernelSpec, Report
from lessons.toolbox.proof import compiled
from lessons.toolbox.proof.compiled import Bounds, of_16_bits, reports_of

SPEC = KernelSpec("nowhere:tile_kernel", {}, name="tile_bf16")
GOOD = dict(registers=64, shared_bytes=1024, loads_128bit=4, census={"HGMMA": 8, "LDG": 4})


def told(monkeypatch, **facts):
    """The compiler says this of SPEC on an H100: GOOD, changed by `facts`."""
    report = Report("tile_bf16", 90, **(GOOD | facts))
    monkeypatch.setattr(compiled, "check_all", lambda specs: [report for _ in specs])


BROKEN = {  # what the compiler says, of which bounds, and the complaint
    "error": (dict(error="ptxas failed"), Bounds(), "ptxas failed"),
    "spills": (dict(spill_bytes=8), Bounds(), "spill_bytes 8, at most 0"),
    "more spills": (dict(spill_bytes=8), Bounds(spill_bytes={"bf16": 4}), "8, at most 4"),
    "spills elsewhere": (dict(spill_bytes=8), Bounds(spill_bytes={"sm_80": 8}), "at most 0"),
    "shared": (dict(shared_bytes=1025), Bounds(shared_bytes=1024), "shared_bytes 1025"),
    "the chip's shared": (dict(shared_bytes=2**20), Bounds(shared_bytes=2**21), "at most 232448"),
    "registers": (dict(), Bounds(registers=63), "registers 64, at most 63"),
    "local memory": (dict(census={"LDL": 1}), Bounds(local_memory=0), "local_memory.* 1"),
    "serialised": (dict(serialized_wgmma=True), Bounds(), "WGMMA serialised"),
    "few wide loads": (dict(), Bounds(loads_128bit=5), "4 loads of 16 bytes, at least 5"),
    "no wide loads": (dict(), Bounds(loads_128bit=0), "4 loads of 16 bytes, none"),
    "no matrix unit": (dict(census={}), Bounds(matrix=of_16_bits), "None, expected True"),
    "a matrix unit": (dict(), Bounds(matrix=False), "HGMMA, expected False"),
    "another unit": (dict(), Bounds(matrix="HMMA"), "HGMMA, expected HMMA"),
    "another on this chip": (dict(), Bounds(matrix={90: "QGMMA"}), "expected QGMMA"),
    "an instruction": (dict(census={"I2FP": 1}), Bounds(without=("I2F",)), "instruction I2FP"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_bound_is_found(name, monkeypatch):
    facts, bounds, complaint = BROKEN[name]
    told(monkeypatch, **facts)
    with pytest.raises(AssertionError, match=f"tile_bf16 on sm_90: .*{complaint}"):
        bounds.check([SPEC])


def test_kept_bounds_pass(monkeypatch):
    told(monkeypatch, spill_bytes=8)
    within = dict(registers=64, shared_bytes=1024, local_memory=0, loads_128bit=4, without=("I2F",))
    for matrix in (None, True, "HGMMA", {90: "HGMMA"}, of_16_bits):
        Bounds("bf16$", [90], {"bf16 on sm_90": 8}, **within, matrix=matrix).check([SPEC])


def test_a_table_of_no_kernel_is_an_error(monkeypatch):
    told(monkeypatch)
    for kernels, chips in (("fp32", [90]), ("bf16", [80])):
        with pytest.raises(AssertionError, match="no kernel"):
            reports_of([SPEC], kernels, chips)


def test_without_a_compiler_the_check_is_skipped(monkeypatch):
    told(monkeypatch, error="not run: Triton is not installed")
    with pytest.raises(pytest.skip.Exception, match="not run"):
        Bounds().check([SPEC])
