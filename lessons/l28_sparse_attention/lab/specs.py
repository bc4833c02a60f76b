"""The three kernels as they are launched: what `compile_check` compiles for five GPU generations,
and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l28_sparse_attention.lab.specs
"""

from lessons.l12_paged_kv.kernels.latents import paged_tiles
from lessons.l28_sparse_attention.index_scores import tiles_for
from lessons.l28_sparse_attention.top_k import BLOCK, NUM_WARPS
from lessons.toolbox.kernels.compile_check import CHIPS, KernelSpec

ROOM = "lessons.l28_sparse_attention"
PAGE_SIZE = 64  # as DeepSeek's kernels have it
SHARED = {80: 163, 89: 99, 90: 227, 100: 227}  # KiB
STRIDES = ("stride_kblock", "stride_kn", "stride_table")


def index_spec(dtype: str, codes: bool, chips: tuple[int, ...]) -> KernelSpec:
    """64 heads of 128, keys in codes or as numbers."""
    itemsize = 4 if dtype == "fp32" else 2
    block_h, block_n, num_warps = tiles_for(64, itemsize)
    strides = ("stride_qt", "stride_qh", "stride_wt", "stride_sblock", *STRIDES)
    return KernelSpec(
        f"{ROOM}.index_scores:index_kernel",
        name=f"index_{dtype}_{'codes' if codes else 'numbers'}",
        signature={
            "q_ptr": f"*{dtype}",
            "keys_ptr": "*u8" if codes else f"*{dtype}",
            **dict.fromkeys(("weights_ptr", "out_ptr"), "*fp32"),
            **({"scales_ptr": "*fp32"} if codes else {}),
            **dict.fromkeys(("block_table_ptr", "sequences_ptr", "positions_ptr"), "*i32"),
            **dict.fromkeys(("num_heads", "width", *strides), "i32"),
        },
        constexprs={
            **({} if codes else {"scales_ptr": None}),
            "DIM": 128,
            "PAGE_SIZE": PAGE_SIZE,
            "BLOCK_H": block_h,
            "BLOCK_N": block_n,
        },
        num_warps=num_warps,
        divisible_by_16=("stride_qt", "stride_qh", "stride_kblock", "stride_kn"),
        chips=chips,
    )


def top_k_spec(has_lengths: bool) -> KernelSpec:
    """Rows of any width."""
    return KernelSpec(
        f"{ROOM}.top_k:top_k_kernel",
        name=f"top_k_{'lengths' if has_lengths else 'full'}",
        signature={
            "scores_ptr": "*fp32",
            "out_ptr": "*i32",
            **({"lengths_ptr": "*i32"} if has_lengths else {}),
            **dict.fromkeys(("width", "k", "stride_row"), "i32"),
        },
        constexprs={**({} if has_lengths else {"lengths_ptr": None}), "BLOCK": BLOCK},
        num_warps=NUM_WARPS,
        divisible_by_16=("stride_row",),
    )


def sparse_spec(dtype: str, heads: int, chip: int) -> KernelSpec:
    """DeepSeek's latents, with lesson 12's tiles for a chip."""
    tiles = paged_tiles(heads, 4 if dtype == "fp32" else 2, SHARED[chip] * 1024, chip)
    strides = ("stride_qt", "stride_qh", "stride_indices", *STRIDES)
    return KernelSpec(
        f"{ROOM}.optimized:sparse_mla_kernel",
        name=f"sparse_mla_{dtype}_{heads}",
        signature={
            **dict.fromkeys(("q_ptr", "kv_ptr"), f"*{dtype}"),
            **dict.fromkeys(("out_ptr", "lse_ptr"), "*fp32"),
            **dict.fromkeys(("indices_ptr", "sequences_ptr", "block_table_ptr"), "*i32"),
            "scale_log2e": "fp32",
            **dict.fromkeys(("num_heads", "num_keys", "split_size", *strides), "i32"),
        },
        constexprs={
            "RANK": 512,
            "ROPE": 64,
            "PAGE_SIZE": PAGE_SIZE,
            "BLOCK_H": tiles.block_h,
            "BLOCK_N": tiles.block_n,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=("stride_qt", "stride_qh", "stride_kblock", "stride_kn"),
        chips=(chip,),
    )


WITH_MATRIX_UNITS = tuple(chip for chip in CHIPS if chip >= 80)
KERNELS = [
    index_spec("bf16", True, WITH_MATRIX_UNITS),
    index_spec("bf16", False, WITH_MATRIX_UNITS),
    index_spec("fp32", True, WITH_MATRIX_UNITS),
    top_k_spec(True),
    top_k_spec(False),
    *(sparse_spec("bf16", heads, chip) for heads in (16, 128) for chip in (80, 90, 100)),
    *(sparse_spec("fp32", 16, chip) for chip in (80, 90)),
]
