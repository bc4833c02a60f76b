"""What the tests of `hopper/specialized` run where kernels are compiled, in another process."""

import tempfile
from pathlib import Path

from lessons.l09_flash_attention.checks.gluon_cases import inputs, proved, with_bug
from lessons.l09_flash_attention.hopper.specialized import triton_flash
from lessons.l09_flash_attention.tiles import Tiles
from lessons.toolbox.gpu.arguments import WATCHERS
from lessons.toolbox.gpu.ptx import Kernel
from lessons.toolbox.proof.numerics import NotEquivalent

# (queries, keys, query heads, KV heads, head size, causal)
SHAPES = [
    (200, 333, 2, 1, 64, True),
    (130, 256, 2, 2, 128, False),
    (70, 300, 4, 2, 128, True),
    (300, 100, 1, 1, 64, True),
    (100, 70, 1, 1, 256, True),
]


def wrong_with(shapes: list[tuple], seed: int, old: str = "", new: str = "") -> str:
    """What is wrong with the kernel in which `new` stands for `old`; "" for nothing."""
    with tempfile.TemporaryDirectory() as folder:
        module = with_bug(triton_flash, (), old, new, Path(folder)) if old else triton_flash
        kernel = module.flash_attention_specialized
        try:
            for *sizes, causal in shapes:
                proved(*inputs(*sizes, seed=seed, on="cpu"), causal, kernel)
        except NotEquivalent as error:
            return str(error)
    return ""


def code_with(kernel_tiles: Tiles) -> dict:
    """Threads of a program, how many instructions of some kinds stand in its PTX, and the numbers
    of registers that its warps ask for.
    """
    kernels: list[Kernel] = []

    def watch(launch):
        kernels.append(launch.kernel)

    WATCHERS.append(watch)
    try:
        triton_flash.flash_attention_specialized(
            *inputs(8, 8, head_dim=128, on="cpu"), tiles=kernel_tiles
        )
    finally:
        WATCHERS.remove(watch)
    code = kernels[0].instructions
    copies = [i for i in code if i.op == "cp" and i.has("bulk") and i.has("tensor")]
    return {
        "threads": kernels[0].threads,
        "registers": {int(i.operands[0]) for i in code if i.op == "setmaxnreg"},
        "loads": sum(i.has("mbarrier_complete_tx_bytes") for i in copies),
        "stores": sum(i.has("bulk_group") for i in copies),
        "products": sum(i.op == "wgmma" and i.has("mma_async") for i in code),
    }
