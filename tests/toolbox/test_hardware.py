"""The data sheets against the physics behind them, the roofline against hand-made numbers, the
ceilings against this machine.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from lessons.toolbox.measure import hardware, timing
from lessons.toolbox.measure.hardware import (
    CHIPS,
    Chip,
    attainable_flops,
    lookup,
    measured_ceilings,
    ridge_point,
    this_machine,
    time_floor_s,
)

# name: tensor FLOPs per clock and SM (16-bit, dense), tensor clock in GHz, FP32 lanes per SM, boost
# clock in GHz, memory bus in bits, data rate per pin in Gbit/s. From whitepapers; B200's clocks are
# those of public databases.
PHYSICS = {
    "a100": (2048, 1.410, 64, 1.410, 5120, 3.186),
    "h100": (4096, 1.830, 128, 1.980, 5120, 5.23),
    "h200": (4096, 1.830, 128, 1.980, 6144, 6.25),
    "b200": (8192, 1.856, 128, 1.980, 8192, 7.81),
    "l40s": (1024, 2.490, 128, 2.520, 384, 18),
    "rtx4090": (512, 2.520, 128, 2.520, 384, 21),
    "t4": (1024, 1.590, 64, 1.590, 256, 10),
}


@pytest.mark.parametrize("key", CHIPS)
def test_data_sheet_agrees_with_the_physics(key):
    """A sparse rate taken for a dense one would be off by a factor of 2."""
    chip = CHIPS[key]
    tensor, tensor_ghz, lanes, boost_ghz, bus_bits, pin_gbit = PHYSICS[key]
    assert chip.fp16_flops_per_s == pytest.approx(
        chip.sm_count * tensor * tensor_ghz * 1e9, rel=0.01
    )
    assert chip.fp32_flops_per_s == pytest.approx(
        chip.sm_count * lanes * 2 * boost_ghz * 1e9, rel=0.01
    )
    assert chip.memory_bytes_per_s == pytest.approx(bus_bits / 8 * pin_gbit * 1e9, rel=0.01)


@pytest.mark.parametrize("key", CHIPS)
def test_data_sheet_agrees_with_the_generation(key):
    chip = CHIPS[key]
    shared_kib = {(7, 5): 64, (8, 0): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227}
    assert chip.shared_memory_bytes == shared_kib[chip.compute_capability] * 1024
    assert (chip.bf16_flops_per_s is None) == (chip.compute_capability < (8, 0))
    assert (chip.fp8_flops_per_s is None) == (chip.compute_capability < (8, 9))
    if chip.fp8_flops_per_s:
        assert chip.fp8_flops_per_s == pytest.approx(2 * chip.bf16_flops_per_s, rel=0.02)
    assert chip.source.startswith("NVIDIA ") and chip.l2_bytes >= 4 * 2**20


def test_chips_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CHIPS["h200"].memory_bytes = 1


@pytest.mark.parametrize(
    "name,key",
    [
        ("H200", "h200"),
        ("NVIDIA H100", "h100"),
        ("rtx-4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("a100-80gb", "a100"),
        ("Tesla T4", "t4"),
        ("l40s", "l40s"),
    ],
)
def test_lookup_forgives_spelling(name, key):
    assert lookup(name) is CHIPS[key]


@pytest.mark.parametrize("name", ["h300", "", "a100-40gb", "h100-pcie"])
def test_lookup_names_what_it_knows(name):
    with pytest.raises(ValueError) as caught:
        lookup(name)
    assert (
        str(caught.value)
        == f"chip is {name!r}, known are a100, h100, h200, b200, l40s, rtx4090, t4, cpu"
    )


def test_a_missing_rate_is_an_error():
    assert lookup("t4").peak_flops_per_s(torch.float16) == 65e12
    with pytest.raises(
        ValueError, match=r"dtype is torch.bfloat16, T4 has rates for float16, float32"
    ):
        lookup("t4").peak_flops_per_s(torch.bfloat16)
    with pytest.raises(ValueError, match=r"dtype is torch\.int8"):
        lookup("h100").peak_flops_per_s(torch.int8)


# ---------------------------------------------------------------- roofline


def test_roofline_by_hand():
    assert ridge_point(1000.0, 10.0) == 100.0
    assert attainable_flops(50, 1000.0, 10.0) == 500.0  # left of the ridge: bandwidth
    assert attainable_flops(100, 1000.0, 10.0) == 1000.0
    assert attainable_flops(400, 1000.0, 10.0) == 1000.0  # right of it: the flat roof


def test_time_floor_is_the_slower_of_memory_and_compute():
    h200 = lookup("h200")
    weights = 16e9  # an 8B model in bfloat16
    assert time_floor_s(weights, 2 * 8e9, h200) == pytest.approx(16e9 / 4.8e12)
    assert time_floor_s(weights, 2 * 8e9 * 8192, h200) == pytest.approx(2 * 8e9 * 8192 / 989.5e12)
    # no FLOPs: the missing bfloat16 rate does not matter
    assert time_floor_s(320e9, 0, lookup("t4")) == 1.0
    measured = Chip("x", 20.0, 1, None, None, None, 5.0)
    assert time_floor_s(100, 0, measured) == 5.0
    assert time_floor_s(0, 100, measured, torch.float32) == 20.0
    with pytest.raises(ValueError, match=r"dtype is torch.bfloat16, x has rates for float32"):
        time_floor_s(1, 1, measured)


# ---------------------------------------------------------------- this machine


def test_ceilings_of_this_cpu_are_plausible_and_measured_once(monkeypatch):
    """Small working sets and short budgets: the figures are noisy, the arithmetic is the same."""
    real = timing.measure
    monkeypatch.setattr(hardware, "default_working_set_bytes", lambda device: 2**22)
    monkeypatch.setattr(
        timing, "measure", lambda fn, device, budget_s: real(fn, device=device, budget_s=0.02)
    )
    hardware._measured.cache_clear()
    try:
        cpu = measured_ceilings("cpu")
        monkeypatch.setattr(timing, "measure", None)  # a second measurement would fail
        assert measured_ceilings("cpu") is lookup("CPU") is this_machine("cpu") is cpu
    finally:
        hardware._measured.cache_clear()
    assert 1e8 < cpu.memory_bytes_per_s < 1e13 and cpu.memory_bytes > 2**28
    assert 1e8 < cpu.peak_flops_per_s(torch.float32) < 1e14
    assert cpu.peak_flops_per_s(torch.bfloat16) > 1e6 and cpu.fp16_flops_per_s is None
    assert cpu.source == "measured on this machine"


def test_bytes_and_flops_are_counted_right(monkeypatch):
    def two_seconds(fn, device, budget_s=None):
        fn()
        return 2.0

    monkeypatch.setattr(hardware, "_best_s", two_seconds)
    # half of it read, half of it written
    assert hardware.copy_bandwidth("cpu", 2**20) == 2**20 / 2
    assert hardware.read_bandwidth("cpu", 2**20) == 2**20 / 2
    assert hardware.matmul_flops("cpu", torch.float32) == 2 * 768**3 / 2


def test_a_ceiling_is_the_fastest_run_and_the_better_of_copy_and_read(monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda fn, **how: timing.summarise([3.0, 2.0, 9.0]))
    assert hardware._best_s(lambda: None, "cpu") == 2.0
    monkeypatch.setattr(hardware, "copy_bandwidth", lambda *_: 10.0)
    monkeypatch.setattr(hardware, "read_bandwidth", lambda *_: 20.0)
    monkeypatch.setattr(hardware, "matmul_flops", lambda device, dtype: float(dtype.itemsize))
    chip = hardware._measured.__wrapped__(torch.device("cpu"), 1)
    assert (chip.memory_bytes_per_s, chip.fp32_flops_per_s, chip.bf16_flops_per_s) == (20, 4, 2)


@pytest.mark.parametrize(
    "name,expected",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H200 NVL", None),
    ],
)
def test_a_gpu_is_matched_by_its_exact_name(monkeypatch, name, expected):
    measured = Chip(name, 20.0, 7, 6.0, None, None, 5.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(hardware, "measured_ceilings", lambda device: measured)
    assert this_machine("cuda") is (CHIPS[expected] if expected else measured)


@pytest.mark.parametrize("capability, half", [((7, 5), "fp16"), ((8, 9), "bf16")])
def test_a_gpu_that_is_in_no_table_is_measured(monkeypatch, capability, half):
    properties = SimpleNamespace(name="NVIDIA L4", total_memory=7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for rate in ("copy_bandwidth", "read_bandwidth", "matmul_flops"):
        monkeypatch.setattr(hardware, rate, lambda *_: 5.0)
    chip = hardware._measured.__wrapped__(torch.device("cuda"), 1)
    assert (chip.name, chip.memory_bytes, chip.memory_bytes_per_s) == ("NVIDIA L4", 7, 5.0)
    rates = {"bf16": chip.bf16_flops_per_s, "fp16": chip.fp16_flops_per_s}
    assert rates.pop(half) == 5.0 and set(rates.values()) == {None}


@pytest.mark.gpu
def test_a_real_gpu_stays_below_its_data_sheet():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    chip, ceilings = this_machine(), measured_ceilings()
    properties = torch.cuda.get_device_properties(0)
    assert 0 < ceilings.memory_bytes_per_s <= chip.memory_bytes_per_s
    assert ceilings.peak_flops_per_s(torch.bfloat16) <= chip.peak_flops_per_s(torch.bfloat16)
    assert properties.multi_processor_count == chip.sm_count
    assert properties.L2_cache_size == pytest.approx(chip.l2_bytes, rel=0.02)
    assert properties.total_memory >= 0.9 * chip.memory_bytes


@pytest.mark.parametrize(
    "name, megahertz",
    [("a100", 1410), ("h100", 1980), ("l40s", 2520), ("rtx4090", 2520), ("t4", 1590)],
)
def test_clocks_behind_the_float32_rates(name, megahertz):
    """The boost clocks that the data sheets and whitepapers print."""
    chip = hardware.lookup(name)
    assert chip.clock_hz == pytest.approx(megahertz * 1e6, rel=0.01)
    # an SM's shared memory gives each of 32 lanes 4 bytes a clock
    assert chip.shared_bytes_per_s == pytest.approx(chip.sm_count * 128 * chip.clock_hz)
    assert chip.register_bytes == chip.sm_count * 65536 * 4


def test_a_measured_chip_has_no_clock():
    chip = hardware.Chip("here", 1e10, 1, None, None, None, 1e11)
    for what in ("clock_hz", "shared_bytes_per_s", "register_bytes"):
        with pytest.raises(ValueError, match="of here is not known; accepted: a chip of a100"):
            getattr(chip, what)
