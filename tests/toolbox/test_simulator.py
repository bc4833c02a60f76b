"""The simulator of Gluon computes what a Hopper GPU computes, and names every slip in words."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from lessons.toolbox.kernels.compile_check import KernelSpec, check
from lessons.toolbox.measure.device import has_triton
from lessons.toolbox.simulator.language import Int, maximum, minimum
from lessons.toolbox.simulator.launch import schedule, simulate
from lessons.toolbox.simulator.machine import ENDS, Hazard

if not has_triton():
    pytest.skip("NOT RUN: needs Triton", allow_module_level=True)

from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.toolbox import gluon_to_compile, gluon_to_simulate

SEEDS = range(8)


def descriptor(x, rows=64, columns=64):
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(x, [rows, columns], layout)


def product(kernel, size=64):
    """The kernel's answer and the right one."""
    a, b = torch.randn(2, size, size).bfloat16()
    out = torch.full_like(a, float("nan"))
    simulate(kernel)[1](descriptor(a), descriptor(b), descriptor(out), num_warps=4)
    return out, (a.float() @ b.float()).bfloat16()


def with_slip(old, new, folder: Path):
    source = Path(gluon_to_simulate.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the kernel"
    file = folder / "slip.py"
    file.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("slip", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tile_kernel


@pytest.mark.parametrize("kernel", [gluon_to_simulate.tile_kernel, gluon_to_compile.tile_kernel])
@pytest.mark.parametrize("ends", ENDS)
def test_a_product_by_tma_and_wgmma(kernel, ends, seed):
    for number in SEEDS:
        with schedule(number, ends):
            assert torch.equal(*product(kernel))


@pytest.mark.compiler
def test_the_kernel_of_these_tests_compiles():
    tile = f"tensordesc<bf16[64, 64],{gluon_to_compile.LAYOUT!r}>"
    names = dict.fromkeys(("a_desc", "b_desc", "out_desc"), tile)
    spec = KernelSpec("tests.toolbox.gluon_to_simulate:tile_kernel", names, {"num_warps": 4})
    (report,) = check(spec, [90])
    if not report.was_run:
        pytest.skip(report.error)
    assert report.fits and report.warp_specialized


# ---------------------------------------------------------------- slips, and what is said of them

WAIT, STORE = "    mbarrier.wait(ready, 0)\n", "    a.store(acc.to(out_desc.dtype))\n"
SLIPS = {
    "no wait": (
        WAIT,
        "",
        r"slip.py:\d+ \(partition 0, compute\): the product reads a, which the TMA load of "
        r"slip.py:\d+ still fills \(it never waited for ready\)|the product still reads|"
        r"the TMA load writes [ab], which the product of slip.py:\d+ still reads",
    ),
    "wrong phase": (
        "mbarrier.wait(ready, 0)",
        "mbarrier.wait(ready, 1)",
        r"\(its last wait for ready: slip.py:\d+, for parity 1, passed at once\)|"
        r"the TMA load writes [ab], which the product",
    ),
    "wait for a later phase": (
        WAIT,
        WAIT + "    mbarrier.wait(ready, 1)\n",
        r"deadlock: nothing is in flight, and partition 0, compute waits at slip.py:\d+ for parity "
        r"1 \(ready is in phase 1, 1 of 1 arrivals and 0 bytes are missing\)",
    ),
    "too many bytes": (
        "b_desc.block_type.nbytes)",
        "b_desc.block_type.nbytes + 16)",
        r"deadlock: .* \(ready is in phase 0, 0 of 1 arrivals and 16 bytes are missing\)",
    ),
    "too few bytes": (
        "a_desc.block_type.nbytes + b",
        "b",
        r"copies bring 8192 bytes more to ready than it expects|"
        r"still fills \(its last wait for ready: slip.py:\d+, for parity 0, had to wait\)",
    ),
    "nobody expects": (
        "    mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)\n",
        "",
        r"deadlock: .* \(ready is in phase 0, 1 of 1 arrivals and -16384 bytes are missing\)",
    ),
    "arrived once more": (
        "[0, 0], ready, b)\n",
        "[0, 0], ready, b)\n    mbarrier.arrive(ready, count=2)\n",
        r"more arrivals at ready than its count of 1",
    ),
    "never initialised": (
        "    mbarrier.init(ready, count=1)\n",
        "",
        r"ready is used before mbarrier.init",
    ),
    "product used before its wait": (
        "    acc = warpgroup_mma_wait(0, deps=(acc,))\n",
        "",
        r"the product of slip.py:\d+ is used before its warpgroup_mma_wait",
    ),
    "wait that leaves it in flight": (
        "warpgroup_mma_wait(0",
        "warpgroup_mma_wait(1",
        r"the product of slip.py:\d+ is used before its warpgroup_mma_wait",
    ),
    "operand overwritten": (
        "    acc = warpgroup_mma_wait(0, deps=(acc,))\n" + STORE,
        "    a.store(gl.zeros([64, 64], gl.bfloat16, LAYOUT))\n"
        "    acc = warpgroup_mma_wait(0, deps=(acc,))\n",
        r"this line writes a, which the product of slip.py:\d+ still reads",
    ),
    "no fence": (
        "    fence_async_shared()\n",
        "",
        r"the TMA store reads a, stored without fence_async_shared",
    ),
    "no wait for the store": (
        "    tma.store_wait(pendings=0)\n",
        "",
        r"the program ended before the TMA store of slip.py:\d+ had ended",
    ),
    "wrong tile": ("[64, 64], a_desc", "[64, 32], a_desc", r"a is torch.bfloat16 \[64, 32\], the"),
    "out of bounds": (
        "[0, 0], ready, b)",
        "[0, 0], ready, b.index(64))",
        r"b.index\(64\): there are",
    ),
    "a worker without warps": ("[1],\n", "[],\n", r"0 counts of warps, 1 workers"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_named(slip, tmp_path):
    old, new, said = SLIPS[slip]
    kernel = with_slip(old, new, tmp_path)
    with pytest.raises(Hazard) as caught:
        for number in SEEDS:
            with schedule(number, "latest"):
                product(kernel)
    assert re.search(said, str(caught.value)), caught.value
    assert re.search(
        r"In program \(0, 0, 0\), schedule\(seed=\d, ends='latest'\)", str(caught.value)
    )


def test_a_hazard_comes_again_with_its_schedule(tmp_path):
    kernel = with_slip(*SLIPS["no wait"][:2], tmp_path)
    for _ in range(3):
        said = []
        for number in SEEDS:
            try:
                with schedule(number, "latest"):
                    product(kernel)
                said.append("")
            except Hazard as hazard:
                said.append(str(hazard))
        assert any(said)
    with pytest.raises(ValueError, match="accepted: random, latest"), schedule(0, "never"):
        pass


def test_an_error_of_the_kernel_ends_all_partitions(tmp_path):
    kernel = with_slip(WAIT, "    raise KeyError('own')\n", tmp_path)
    with pytest.raises(KeyError, match="own"):
        product(kernel)


# ---------------------------------------------------------------- the language


def test_tiles_outside_the_tensor_are_zeros_and_are_not_written():
    out, right = product(gluon_to_simulate.tile_kernel, 40 + 8)
    assert torch.equal(out, right)


def test_integers_divide_as_on_a_gpu():
    for x in (-5, -1, 0, 1, 5):
        for y in (-3, 2, 3):
            quotient, remainder = Int(x) // y, Int(x) % y
            assert quotient == int(x / y) and remainder == x - y * quotient
            assert isinstance(quotient, Int) and isinstance(remainder, Int)
            assert x // Int(y) == quotient and x % Int(y) == remainder
    assert type(Int(2) + 1) is Int and type(1 - Int(2)) is Int and type(Int(1) * 0.5) is float
    assert torch.equal(Int(2) + torch.arange(2), torch.tensor([2, 3]))
    nan, one = torch.tensor(float("nan")), torch.tensor(1.0)
    assert maximum(nan, one) == 1 and minimum(one, nan) == 1 and maximum(Int(2), 3) == 3


def test_what_is_not_simulated_says_so(tmp_path):
    kernel = with_slip("gl.zeros([64, 64], gl.float32, LAYOUT)", "gl.histogram(a)", tmp_path)
    with pytest.raises(AttributeError, match="histogram is not simulated"):
        product(kernel)
