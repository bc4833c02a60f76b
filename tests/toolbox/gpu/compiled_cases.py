"""Bugs planted in compiled code: a barrier or a wait that is missing. Run by test_compiled.py in a
process of its own, because Triton's interpreter has to be off.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lessons.l02_naive_attention.optimized import fused_softmax
from lessons.l09_flash_attention.naive import attention
from lessons.l09_flash_attention.optimized import flash_attention
from lessons.toolbox.gpu import triton_driver
from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import compiled_chip
from lessons.toolbox.proof.numerics import NotEquivalent, attention_inputs, prove


@triton.jit
def double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n + 1)


def test_a_store_after_the_end_names_its_line():
    x = torch.randn(1000)
    with pytest.raises(Fault, match=r"double_kernel, compiled_cases.py:\d+, program .*out_ptr, wh"):
        double_kernel[(4,)](x, torch.empty_like(x), len(x), BLOCK=256)


def test_the_chip_is_the_one_that_was_asked_for():
    seen = []
    triton_driver.WATCHERS.append(seen.append)
    try:
        scores = torch.randn(2, 5, 70)
        probs = fused_softmax(scores, 1.0, causal=False)
        torch.testing.assert_close(probs, torch.softmax(scores, -1))
    finally:
        triton_driver.WATCHERS.pop()
    assert seen and seen[0].steps > 100 and seen[0].programs == 10
    assert triton.runtime.driver.active.get_current_target().arch == compiled_chip()


def prove_flash(seed: int) -> None:
    q, k, v = attention_inputs("normal", 150, 260, 2, 1, 64, dtype=torch.bfloat16, seed=seed)
    flash = partial(flash_attention, causal=True)
    plain = partial(attention, causal=True)
    prove(lambda *x: flash(*x)[0], lambda *x: plain(*x)[0], (q, k, v))


def test_missing_barriers_and_waits_are_found(seed):
    """Each barrier of FlashAttention's code becomes one of a warp alone, each wait for copies waits
    for one group less, one after the other. What a barrier beside it makes up for is not found.
    """
    launches = []
    triton_driver.WATCHERS.append(launches.append)
    try:
        prove_flash(seed)
    finally:
        triton_driver.WATCHERS.pop()
    done = next(launch for launch in launches if "flash" in launch.kernel.name)
    kernel, found, missed = done.kernel, 0, []
    for place, instruction in enumerate(kernel.instructions):
        weaker = weakened(instruction)
        if weaker is None or not done.executed[place]:
            continue
        kernel.instructions[place] = weaker
        vars(kernel).pop("steps", None)
        try:
            prove_flash(seed)
            missed.append(str(instruction.line))
        except (Fault, NotEquivalent):
            found += 1
        finally:
            kernel.instructions[place] = instruction
            vars(kernel).pop("steps", None)
    print(f"{found} found, not found: {missed}")
    assert found >= 2 and found >= len(missed)


def weakened(instruction):
    """The same instruction without its effect on other threads; None for what has none."""
    if instruction.op == "bar" and instruction.modifiers == ("sync",):
        return replace(instruction, modifiers=("warp", "sync"), operands=("-1",))
    if instruction.op == "cp" and instruction.has("wait_group"):
        return replace(instruction, operands=(str(int(instruction.operands[0]) + 1),))
    return None
