"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l03_kv_cache.lab.specs
"""

from lessons.toolbox.kernels.compile_check import KernelSpec

ROOM = "lessons.l03_kv_cache"

# Rows of Llama-3-8B (8 KV heads of 128, four queries each) and of the embedded model (2 of 64,
# three queries each).
STRIDES = (
    "stride_qb",
    "stride_qh",
    "stride_kb",
    "stride_kn",
    "stride_kh",
    "stride_vb",
    "stride_vn",
    "stride_vh",
)
ROW_STRIDES = ("stride_kt", "stride_vt", "stride_kslot", "stride_vslot")
KERNELS = [
    KernelSpec(
        f"{ROOM}.optimized:append_kernel",
        name=f"append_{dtype}_{kv_heads}x{dim}",
        signature={
            **dict.fromkeys(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), f"*{dtype}"),
            "slot_mapping_ptr": "*i64",
            **dict.fromkeys(ROW_STRIDES, "i32"),
        },
        constexprs=dict.fromkeys(("K_ROW", "V_ROW", "BLOCK"), kv_heads * dim),
        divisible_by_16=ROW_STRIDES,
    )
    for dtype in ("bf16", "fp32")
    for kv_heads, dim in ((8, 128), (2, 64))
]
KERNELS += [
    KernelSpec(
        f"{ROOM}.optimized:decode_kernel",
        name=f"decode_{dtype}_{group}x{dim}",
        signature={
            "q_ptr": f"*{dtype}",
            "k_ptr": f"*{dtype}",
            "v_ptr": f"*{dtype}",
            "out_ptr": f"*{dtype}",
            "context_lens_ptr": "*i32",
            "softmax_scale": "fp32",
            "window": "i32",
            **dict.fromkeys(STRIDES, "i32"),
        },
        constexprs={
            "GROUP": group,
            **dict.fromkeys(("HEAD_DIM", "V_HEAD_DIM", "BLOCK_D"), dim),
            "BLOCK_N": 32,
        },
        divisible_by_16=STRIDES,
    )
    for dtype in ("bf16", "fp32")
    for group, dim in ((4, 128), (3, 64))
]
