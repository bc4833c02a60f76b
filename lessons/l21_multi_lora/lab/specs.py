"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l21_multi_lora.lab.specs
"""

from lessons.l21_multi_lora.batch import BLOCK_M
from lessons.l21_multi_lora.optimized import PLAIN, TILES, Tiles, block_of_ranks
from lessons.toolbox.kernels.compile_check import CHIPS, KernelSpec

ROOM = "lessons.l21_multi_lora"
WITH_MATRIX_UNITS = (80, 89, 90, 100)


def shrink_spec(dtype: str, tiles: Tiles, max_rank: int, chips: tuple[int, ...]) -> KernelSpec:
    """shrink_kernel as `add_lora` launches it."""
    counts = ("num_rows", "size", "max_rank", "stride_x")
    return KernelSpec(
        f"{ROOM}.kernels.segments:shrink_kernel",
        name=f"shrink_{dtype}_r{max_rank}",
        signature={
            **dict.fromkeys(("x_ptr", "a_ptr"), f"*{dtype}"),
            **dict.fromkeys(("order_ptr", "tiles_ptr", "ranks_ptr"), "*i32"),
            "partials_ptr": "*fp32",
            **dict.fromkeys(counts, "i32"),
        },
        constexprs={
            "BLOCK_M": BLOCK_M,
            "BLOCK_R": block_of_ranks(max_rank),
            "BLOCK_K": tiles.block_k,
            "SPLIT_K": tiles.split_k,
            "NUM_STAGES": tiles.num_stages,
        },
        num_warps=tiles.num_warps,
        divisible_by_16=("size", "stride_x", *(("max_rank",) if max_rank % 16 == 0 else ())),
        chips=chips,
    )


def expand_spec(dtype: str, tiles: Tiles, max_rank: int, chips: tuple[int, ...]) -> KernelSpec:
    """expand_kernel as `add_lora` launches it."""
    counts = ("num_rows", "num_outputs", "max_rank", "num_splits", "stride_out")
    return KernelSpec(
        f"{ROOM}.kernels.segments:expand_kernel",
        name=f"expand_{dtype}_r{max_rank}",
        signature={
            **dict.fromkeys(("partials_ptr", "scaling_ptr"), "*fp32"),
            **dict.fromkeys(("b_ptr", "out_ptr"), f"*{dtype}"),
            **dict.fromkeys(("order_ptr", "tiles_ptr", "ranks_ptr"), "*i32"),
            **dict.fromkeys(counts, "i32"),
        },
        constexprs={
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": tiles.block_n,
            "BLOCK_R": block_of_ranks(max_rank),
        },
        num_warps=tiles.num_warps,
        divisible_by_16=(
            "num_outputs",
            "stride_out",
            *(("max_rank",) if max_rank % 16 == 0 else ()),
        ),
        chips=chips,
    )


# The ranks that vLLM's max_lora_rank is given most; a T4 has no bfloat16 and no matrix unit that
# Triton uses.
KERNELS = [
    spec(dtype, tiles, rank, chips)
    for spec in (shrink_spec, expand_spec)
    for dtype, tiles, ranks, chips in (
        ("bf16", TILES, (8, 16, 64), WITH_MATRIX_UNITS),
        ("fp16", TILES, (16,), WITH_MATRIX_UNITS),
        ("fp16", PLAIN, (16,), (75,)),
        ("fp32", PLAIN, (16,), tuple(CHIPS)),
    )
    for rank in ranks
]


def slices_specs(dtype: str, tiles: Tiles, max_rank: int) -> list[KernelSpec]:
    """shrink_slices_kernel and expand_slices_kernel as `add_lora_together` launches them."""
    block_r = block_of_ranks(max_rank)
    shared = {
        "order_ptr": "*i32",
        "tiles_ptr": "*i32",
        "ranks_ptr": "*i32",
        "partials_ptr": "*fp32",
        **dict.fromkeys(("num_rows", "max_rank", "num_slots"), "i32"),
    }
    strides = ("stride_q", "stride_k", "stride_v")
    outputs = ("q_outputs", "k_outputs", "v_outputs")
    shrink = KernelSpec(
        f"{ROOM}.kernels.slices:shrink_slices_kernel",
        name=f"slices_shrink_{dtype}_r{max_rank}",
        signature=shared
        | dict.fromkeys(("x_ptr", "a_ptr"), f"*{dtype}")
        | dict.fromkeys(("size", "stride_x"), "i32"),
        constexprs={
            "BLOCK_M": BLOCK_M,
            "BLOCK_R": block_r,
            "BLOCK_K": tiles.block_k,
            "SPLIT_K": tiles.split_k,
            "RANK_BLOCKS": -(-max_rank // block_r),
            "NUM_STAGES": tiles.num_stages,
        },
        num_warps=tiles.num_warps,
        divisible_by_16=("size", "stride_x", "max_rank"),
        chips=WITH_MATRIX_UNITS,
    )
    expand = KernelSpec(
        f"{ROOM}.kernels.slices:expand_slices_kernel",
        name=f"slices_expand_{dtype}_r{max_rank}",
        signature=shared
        | dict.fromkeys(("b_ptr", "q_ptr", "k_ptr", "v_ptr"), f"*{dtype}")
        | {"scaling_ptr": "*fp32", **dict.fromkeys(("num_splits", *strides, *outputs), "i32")},
        constexprs={"BLOCK_M": BLOCK_M, "BLOCK_N": tiles.block_n, "BLOCK_R": block_r},
        num_warps=tiles.num_warps,
        divisible_by_16=(*strides, *outputs, "max_rank"),
        chips=WITH_MATRIX_UNITS,
    )
    return [shrink, expand]


KERNELS += [
    spec
    for dtype, rank in (("bf16", 16), ("bf16", 64), ("fp16", 16))
    for spec in slices_specs(dtype, TILES, rank)
]
