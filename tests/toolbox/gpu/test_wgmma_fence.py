"""A wgmma.fence that is missing in the compiled code of lesson 9's Hopper kernel is a fault."""

from dataclasses import replace

import pytest
import torch

from lessons.l09_flash_attention.hopper.gluon_flash import flash_attention_hopper
from lessons.toolbox.gpu.arguments import WATCHERS
from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.measure.device import has_gpu, has_triton, machine_chip
from lessons.toolbox.proof.numerics import attention_inputs

pytestmark = pytest.mark.skipif(
    has_gpu() or not has_triton() or machine_chip() != 90,
    reason="NOT RUN: needs Triton and code for sm_90, and is for machines without a GPU",
)


@pytest.mark.sample(1, of="compiled code")
def test_a_missing_fence_is_found(seed):
    """Triton emits them itself, so each one is deleted from the compiled code. Where a thread has
    written no register of the product since the fence before, none is missed.
    """
    launches = []
    given = attention_inputs("normal", 70, 300, 2, 1, 64, dtype=torch.bfloat16, seed=seed)
    WATCHERS.append(launches.append)
    try:
        flash_attention_hopper(*given)
    finally:
        WATCHERS.pop()
    kernel = next(launch.kernel for launch in launches if "flash_hopper" in launch.kernel.name)
    fences = [i for i, x in enumerate(kernel.instructions) if x.op == "wgmma" and x.has("fence")]
    said = []
    for place in fences:
        fence = kernel.instructions[place]
        kernel.instructions[place] = replace(fence, op="bar", modifiers=("warp", "sync"))
        vars(kernel).pop("steps", None)
        try:
            flash_attention_hopper(*given)
        except Fault as fault:
            said.append(str(fault))
        finally:
            kernel.instructions[place] = fence
            vars(kernel).pop("steps", None)
    print(f"{len(said)} of {len(fences)} found")
    assert len(said) >= 4
    assert all("no wgmma.fence came after it was written" in sentence for sentence in said)
