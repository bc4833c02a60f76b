"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l03_kv_cache.lab.specs
"""

from lessons.toolbox.kernels.compile_check import KernelSpec

ROOM = "lessons.l03_kv_cache"

ROW_STRIDES = ("stride_kt", "stride_vt", "stride_kslot", "stride_vslot")
Q_STRIDES = ("stride_qb", "stride_qh")
CACHE_STRIDES = ("stride_kb", "stride_kn", "stride_kh", "stride_vb", "stride_vn", "stride_vh")
DTYPES = ("bf16", "fp32")


def append_spec(dtype: str, kv_heads: int, dim: int) -> KernelSpec:
    """One new token's rows of K and V, kv_heads · dim values each."""
    pointers = ("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr")
    return KernelSpec(
        f"{ROOM}.optimized:append_kernel",
        name=f"append_{dtype}_{kv_heads}x{dim}",
        signature={
            **dict.fromkeys(pointers, f"*{dtype}"),
            "slot_mapping_ptr": "*i64",
            **dict.fromkeys(ROW_STRIDES, "i32"),
        },
        constexprs=dict.fromkeys(("K_ROW", "V_ROW", "BLOCK"), kv_heads * dim),
        divisible_by_16=ROW_STRIDES,
    )


def decode_spec(dtype: str, group: int, dim: int) -> KernelSpec:
    """A query head of `dim` values; `group` of them share a KV head."""
    strides = Q_STRIDES + CACHE_STRIDES
    return KernelSpec(
        f"{ROOM}.optimized:decode_kernel",
        name=f"decode_{dtype}_{group}x{dim}",
        signature={
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}"),
            "context_lens_ptr": "*i32",
            "softmax_scale": "fp32",
            "window": "i32",
            **dict.fromkeys(strides, "i32"),
        },
        constexprs={
            "GROUP": group,
            **dict.fromkeys(("HEAD_DIM", "V_HEAD_DIM", "BLOCK_D"), dim),
            "BLOCK_N": 32,
        },
        divisible_by_16=strides,
    )


# Llama-3-8B has 8 KV heads of 128, four queries each. The embedded model has 2 of 64, three each.
KERNELS = [append_spec(dtype, *row) for dtype in DTYPES for row in ((8, 128), (2, 64))]
KERNELS += [decode_spec(dtype, *head) for dtype in DTYPES for head in ((4, 128), (3, 64))]
