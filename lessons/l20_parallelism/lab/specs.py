"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l20_parallelism.lab.specs
"""

from lessons.l20_parallelism.processes.symmetric_kernels import BLOCK
from lessons.toolbox.kernels.compile_check import CHIPS, KernelSpec
from lessons.toolbox.kernels.triton_ import tl

KERNELS_FILE = "lessons.l20_parallelism.processes.symmetric_kernels"
SIZES = (2, 4, 8)  # GPUs of a machine
# a T4 has no bfloat16
TYPES = {"bf16": (80, 89, 90, 100), "fp16": tuple(CHIPS), "fp32": tuple(CHIPS)}


def all_reduce_spec(kernel: str, dtype: str, size: int, chips: tuple[int, ...]) -> KernelSpec:
    """one_shot_kernel or two_shot_kernel as their wrappers launch them among `size` ranks."""
    is_two_shot = kernel == "two_shot_kernel"
    return KernelSpec(
        f"{KERNELS_FILE}:{kernel}",
        name=f"{kernel.removesuffix('_kernel')}_{dtype}_{size}_ranks",
        signature={
            **dict.fromkeys(("x_ptr", "out_ptr", "own_buffer_ptr"), f"*{dtype}"),
            "buffers": (f"*{dtype}",) * size,
            "flags": ("*i32",) * size,
            "own_flags_ptr": "*i32",
            **dict.fromkeys(("n", "rank", *(("piece",) if is_two_shot else ())), "i32"),
        },
        constexprs={"SIZE": size, "BLOCK": BLOCK, "ACC": tl.float32},
        divisible_by_16=("n", "piece") if is_two_shot else ("n",),
        chips=chips,
    )


KERNELS = [
    all_reduce_spec(kernel, dtype, size, chips)
    for kernel in ("one_shot_kernel", "two_shot_kernel")
    for dtype, chips in TYPES.items()
    for size in (SIZES if dtype == "bf16" else (8,))
]
