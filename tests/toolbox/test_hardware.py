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
    Ceilings,
    attainable_flops,
    lookup,
    measured_ceilings,
    ridge_point,
    this_machine,
    time_floor_s,
)

# name: tensor FLOPs per clock and SM (16-bit, dense), tensor clock in GHz, FP32 lanes per SM, boost
# clock in GHz, memory bus in bits, data rate per pin in Gbit/s. They are those of the whitepapers,
# and B200's clocks those of public databases.
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
    assert chip.source.startswith("NVIDIA ") and chip.cuda_names


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
    measured = Ceilings("x", 1, "2", 1, 10.0, 20.0, {"float32": 5.0})
    assert (
        time_floor_s(100, 0, measured) == 5.0
        and time_floor_s(0, 100, measured, torch.float32) == 20.0
    )
    with pytest.raises(ValueError, match="dtype is bfloat16, measured are float32"):
        time_floor_s(1, 1, measured)


# ---------------------------------------------------------------- this machine


@pytest.fixture
def quick(monkeypatch):
    """Small working sets and short budgets: the figures are noisy, the arithmetic is the same."""
    monkeypatch.setattr(hardware, "_measured", {})
    monkeypatch.setattr(hardware, "default_working_set_bytes", lambda device: 2**22)
    real = timing.measure
    monkeypatch.setattr(
        timing, "measure", lambda fn, device, budget_s: real(fn, device=device, budget_s=0.02)
    )


def test_ceilings_of_this_cpu_are_plausible_and_cached(quick, monkeypatch):
    c = measured_ceilings("cpu")
    assert 1e8 < c.copy_bytes_per_s < 1e13 and 1e8 < c.read_bytes_per_s < 1e13
    assert c.memory_bytes_per_s == max(c.copy_bytes_per_s, c.read_bytes_per_s)
    assert 1e8 < c.peak_flops_per_s(torch.float32) < 1e14 and set(c.matmul_flops_per_s) == {
        "float32",
        "bfloat16",
    }
    monkeypatch.setattr(timing, "measure", None)  # a second measurement would fail
    assert measured_ceilings("cpu") is c
    cpu = lookup("cpu")
    assert cpu.source == "measured on this machine" and cpu.fp32_flops_per_s == c.peak_flops_per_s(
        torch.float32
    )
    assert cpu.memory_bytes > 2**28 and cpu.sm_count >= 1 and this_machine("cpu") == cpu


def test_bytes_and_flops_are_counted_right(monkeypatch):
    monkeypatch.setattr(hardware, "_best_s", lambda fn, device, budget_s: (fn(), 2.0)[1])
    # half of it read, half of it written
    assert hardware.copy_bandwidth("cpu", 2**20) == 2**20 / 2
    assert hardware.read_bandwidth("cpu", 2**20) == 2**20 / 2
    assert hardware.matmul_flops("cpu", torch.float32, size=10) == 2 * 1000 / 2


def test_ceilings_on_disk(quick, monkeypatch, tmp_path):
    path = tmp_path / "deep" / "ceilings.json"
    c = measured_ceilings("cpu", cache_file=path)
    assert [p.name for p in path.parent.iterdir()] == ["ceilings.json"]
    monkeypatch.setattr(hardware, "_measured", {})
    measure = timing.measure
    monkeypatch.setattr(timing, "measure", None)
    assert measured_ceilings("cpu", cache_file=path) == c
    monkeypatch.setattr(timing, "measure", measure)
    for content in ("{", "[]", "{}", path.read_text().replace(c.device, "another CPU")):
        path.write_text(content)
        monkeypatch.setattr(hardware, "_measured", {})
        again = measured_ceilings("cpu", cache_file=path)
        assert again.device == c.device and again.copy_bytes_per_s != c.copy_bytes_per_s


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
    properties = SimpleNamespace(
        name=name,
        total_memory=7,
        multi_processor_count=3,
        shared_memory_per_block_optin=5,
        major=9,
        minor=0,
        L2_cache_size=11,
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    ceilings = Ceilings(name, 1, "2", 1, 10.0, 20.0, {"float32": 5.0, "bfloat16": 6.0})
    monkeypatch.setattr(hardware, "measured_ceilings", lambda device: ceilings)
    chip = this_machine("cuda")
    if expected:
        assert chip is CHIPS[expected]
    else:
        assert chip.source == "measured on this machine" and chip.memory_bytes_per_s == 20.0
        assert (chip.name, chip.sm_count, chip.l2_bytes, chip.compute_capability) == (
            name,
            3,
            11,
            (9, 0),
        )


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
