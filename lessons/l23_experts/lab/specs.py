"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l23_experts.lab.specs
"""

from dataclasses import replace

from lessons.l23_experts.more import fp8, mxfp4, mxfp4_kernels, wide
from lessons.l23_experts.optimized import ALIGN_BLOCK, PLAIN, SUM_BLOCK, SUM_WARPS, TILES, Tiles
from lessons.l23_experts.ranks import windows_kernels
from lessons.toolbox.kernels.compile_check import CHIPS, KernelSpec

KERNELS_FILE = "lessons.l23_experts.kernels"
WITH_MATRIX_UNITS = (80, 89, 90, 100)
TOP_K = 2


def product_spec(kernel: str, dtype: str, tiles: Tiles, chips: tuple[int, ...]) -> KernelSpec:
    """gate_up_kernel or down_kernel as `expert_rows` launches it."""
    counts = ["inner", "size", "stride_expert", "stride_row"]
    if kernel == "gate_up":
        pointers = "x_ptr", "weight_ptr", "h_ptr"
        counts.append("stride_x")
        own = {"BLOCK_N": tiles.block_n, "TOP_K": TOP_K}
    else:
        pointers = "h_ptr", "weight_ptr", "y_ptr"
        own = {"BLOCK_N": tiles.down_block_n}
    return KernelSpec(
        f"{KERNELS_FILE}:{kernel}_kernel",
        name=f"{kernel}_{dtype}_m{tiles.block_m}",
        signature={
            **dict.fromkeys(pointers, f"*{dtype}"),
            **dict.fromkeys(("pairs_ptr", "experts_ptr"), "*i32"),
            **dict.fromkeys(("num_pairs", *counts), "i32"),
        },
        constexprs={"BLOCK_M": tiles.block_m, "BLOCK_K": tiles.block_k, **own},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=tuple(counts),
        chips=chips,
    )


def wide_spec(kernel: str, dtype: str) -> KernelSpec:
    """more/wide.py's gate_up or down as its `expert_rows` launches it."""
    counts = ["inner", "size", "stride_expert", "stride_row"]
    pointers = ("h_ptr", "weight_ptr", "y_ptr")
    own = {}
    if kernel == "gate_up":
        pointers, own = ("x_ptr", "weight_ptr", "h_ptr"), {"TOP_K": TOP_K}
        counts.append("stride_x")
    tiles = wide.TILES
    return KernelSpec(
        f"{wide.__name__}:wide_{kernel}_kernel",
        name=f"wide_{kernel}_{dtype}",
        signature={
            **dict.fromkeys(pointers, f"*{dtype}"),
            **dict.fromkeys(("pairs_ptr", "experts_ptr"), "*i32"),
            **dict.fromkeys(("num_pairs", "num_tiles", *counts), "i32"),
        },
        constexprs={
            "PART": tiles.part,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            "GROUP": tiles.group,
            **own,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=tuple(counts),
        chips=(90,),
    )


def mxfp4_spec(kernel: str, tiles: mxfp4.Tiles) -> KernelSpec:
    """more/mxfp4.py's gate_up or down as its `expert_rows` launches it."""
    counts, own = ["inner", "size"], {}
    pointers = ("h_ptr", "bias_ptr", "y_ptr")
    if kernel == "gate_up":
        pointers = ("x_ptr", "bias_ptr", "h_ptr")
        own = {"LIMIT": mxfp4.SWIGLU_LIMIT, "ALPHA": mxfp4.SWIGLU_ALPHA, "TOP_K": 4}
        counts.append("stride_x")
    return KernelSpec(
        f"{mxfp4_kernels.__name__}:mxfp4_{kernel}_kernel",
        name=f"mxfp4_{kernel}_m{tiles.block_m}",
        signature={
            **dict.fromkeys(pointers, "*bf16"),
            "words_ptr": "*i32",
            "exponents_ptr": "*u8",
            **dict.fromkeys(("pairs_ptr", "experts_ptr"), "*i32"),
            **dict.fromkeys(("num_pairs", *counts), "i32"),
        },
        constexprs={
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": tiles.block_k,
            **own,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=tuple(counts),
        chips=(90, 100) if tiles is mxfp4.TALL else WITH_MATRIX_UNITS,
    )


def fp8_spec(kernel: str, tiles: fp8.Tiles) -> KernelSpec:
    """more/fp8.py's gate_up or down as its `expert_rows` launches it."""
    rows, out, block, own = "h", "y_ptr", tiles.down_block_n, {}
    if kernel == "gate_up":
        rows, out, block, own = "x", "h_ptr", tiles.block_n, {"TOP_K": 8}
    return KernelSpec(
        f"{fp8.__name__}:fp8_{kernel}_kernel",
        name=f"fp8_{kernel}_m{tiles.block_m}",
        signature={
            **dict.fromkeys((f"{rows}_ptr", "weight_ptr"), "*fp8e4nv"),
            **dict.fromkeys((f"{rows}_scales_ptr", "scales_ptr"), "*fp32"),
            out: "*bf16",
            **dict.fromkeys(("pairs_ptr", "experts_ptr"), "*i32"),
            **dict.fromkeys(("num_pairs", "inner", "size"), "i32"),
        },
        constexprs={"TILE": fp8.TILE, "BLOCK_M": tiles.block_m, "BLOCK_N": block, **own},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=("inner", "size"),
        chips=(89, 90, 100),
    )


FP8_ROUNDING = KernelSpec(
    f"{fp8.__name__}:quantize_groups_kernel",
    name="quantize_groups_bf16",
    signature={
        "x_ptr": "*bf16",
        "values_ptr": "*fp8e4nv",
        "scales_ptr": "*fp32",
        "size": "i32",
        "stride_x": "i32",
    },
    constexprs={"LARGEST": fp8.LARGEST, "GROUP": fp8.TILE, "GROUPS": fp8.GROUPS},
    divisible_by_16=("size", "stride_x"),
    chips=(89, 90, 100),
)


def align_spec(num_experts: int, block_m: int = 64) -> KernelSpec:
    """align_kernel as `align` launches it."""
    return KernelSpec(
        f"{KERNELS_FILE}:align_kernel",
        name=f"align_e{num_experts}" if block_m == 64 else f"align_m{block_m}",
        signature={
            "chosen_ptr": "*i64",
            **dict.fromkeys(("pairs_ptr", "experts_ptr"), "*i32"),
            **dict.fromkeys(("num_pairs", "num_experts", "num_tiles"), "i32"),
        },
        constexprs={"BLOCK_M": block_m, "BLOCK_P": ALIGN_BLOCK, "BLOCK_E": 2 * num_experts},
        num_warps=4,
        chips=tuple(CHIPS),
    )


def sum_spec(dtype: str, chips: tuple[int, ...]) -> KernelSpec:
    """sum_kernel as `weighted_sum` launches it."""
    return KernelSpec(
        f"{KERNELS_FILE}:sum_kernel",
        name=f"sum_{dtype}",
        signature={
            "y_ptr": f"*{dtype}",
            "weights_ptr": "*fp32",
            "chosen_ptr": "*i64",
            "out_ptr": f"*{dtype}",
            **dict.fromkeys(("num_experts", "size"), "i32"),
        },
        constexprs={"TOP_K": 8, "BLOCK": SUM_BLOCK},
        num_warps=SUM_WARPS,
        divisible_by_16=("size",),
        chips=chips,
    )


def window_spec(kernel: str, size: int) -> KernelSpec:
    """dispatch_kernel or combine_kernel as KernelWindows launches them among `size` ranks, for rows
    of whole 16 bytes.
    """
    words, flags = ("*i32",) * size, ("*i32",) * size
    if kernel == "dispatch":
        pointers = dict(packed_ptr=words[0], chosen_ptr="*i64", slots_ptr="*i64", counts_ptr="*i64")
        pointers |= dict(rows=words, full=("*i64",) * size)
        counts, own = ("num_pairs",), {"TOP_K": 8}
    else:
        pointers = dict(results_ptr=words[0], full_ptr="*i64", windows=words)
        counts, own = (), {}
    counts = (*counts, "num_own", "max_tokens", "vectors", "rank")
    return KernelSpec(
        f"{windows_kernels.__name__}:{kernel}_kernel",
        name=f"{kernel}_{size}_ranks",
        signature={
            **pointers,
            "flags": flags,
            "own_flags_ptr": "*i32",
            **dict.fromkeys(counts, "i32"),
        },
        constexprs={"SIZE": size, "BLOCK": windows_kernels.BLOCK, "VECTOR": 4, **own},
        divisible_by_16=("num_own", "max_tokens"),
        chips=tuple(CHIPS),
    )


def of_one(spec: KernelSpec, *names: str) -> KernelSpec:
    """The same with arguments that equal 1, which Triton compiles as constants: one expert, one
    column.
    """
    return replace(
        spec,
        name=f"one_{spec.label}",
        signature={name: kind for name, kind in spec.signature.items() if name not in names},
        constexprs=spec.constexprs | dict.fromkeys(names, 1),
        divisible_by_16=tuple(name for name in spec.divisible_by_16 if name not in names),
        chips=(90,),
    )


FEW_ROWS = next(iter(TILES.values()))
# A T4 has no bfloat16 and no matrix unit that Triton uses.
KERNELS = [
    *(
        product_spec(kernel, dtype, tiles, chips)
        for kernel in ("gate_up", "down")
        for dtype, of_dtype, chips in (
            ("bf16", TILES.values(), WITH_MATRIX_UNITS),
            ("fp16", [FEW_ROWS], WITH_MATRIX_UNITS),
            ("fp16", [PLAIN], (75,)),
            ("fp32", [PLAIN], tuple(CHIPS)),
        )
        for tiles in of_dtype
    ),
    *(wide_spec(kernel, dtype) for kernel in ("gate_up", "down") for dtype in ("bf16", "fp16")),
    *(
        mxfp4_spec(kernel, tiles)
        for kernel in ("gate_up", "down")
        for tiles in (mxfp4.FEW, mxfp4.MIDDLE, mxfp4.TALL)
    ),
    *(fp8_spec(kernel, tiles) for kernel in ("gate_up", "down") for tiles in fp8.TILES.values()),
    FP8_ROUNDING,
    *(align_spec(num_experts) for num_experts in (8, 64, 256)),
    align_spec(8, wide.PARTS * wide.TILES.part),
    sum_spec("bf16", WITH_MATRIX_UNITS),
    sum_spec("fp32", tuple(CHIPS)),
    *(window_spec(kernel, size) for kernel in ("dispatch", "combine") for size in (2, 8)),
    of_one(product_spec("gate_up", "bf16", FEW_ROWS, (90,)), "inner"),
    of_one(product_spec("down", "bf16", FEW_ROWS, (90,)), "inner"),
    of_one(align_spec(1), "num_experts"),
    of_one(sum_spec("bf16", (90,)), "num_experts", "size"),
]
