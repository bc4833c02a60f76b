"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l05_gqa.lab.specs
"""

from lessons.l05_gqa.tiles import tiles_for, warps_for
from lessons.toolbox.kernels.compile_check import KernelSpec

ROOM = "lessons.l05_gqa"

# (query heads a KV head, head_dim) of Llama-3-8B, Llama-3-70B, an MQA model of 32 heads, the
# embedded model, odd and wide heads.
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
SHAPES = {
    "bf16": ((4, 128), (8, 128), (32, 128), (3, 64), (4, 80), (4, 256)),
    "fp32": ((4, 128), (3, 64)),
}


def spec_of(dtype: str, group: int, head_dim: int, chips: tuple[int, ...]) -> KernelSpec:
    """The kernel as decode_attention launches it on these chips. dtype: "bf16" or "fp32"."""
    size = tiles_for(group, head_dim, dtype != "fp32" and 75 not in chips)
    name = f"gqa_{dtype}_{group}x{head_dim}_n{size['BLOCK_N']}"
    return KernelSpec(
        f"{ROOM}.optimized:gqa_decode_kernel",
        name=name,
        signature={
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}"),
            "context_lens_ptr": "*i32",
            "scale_log2e": "fp32",
            "window": "i32",
            **dict.fromkeys(STRIDES, "i32"),
        },
        constexprs={"GROUP": group, "HEAD_DIM": head_dim, **size},
        num_warps=warps_for(group, head_dim),
        divisible_by_16=STRIDES,
        chips=chips,
    )


KERNELS = [
    spec_of(dtype, group, dim, chips)
    for dtype, shapes in SHAPES.items()
    for group, dim in shapes
    for chips in ((75,), (80, 89, 90, 100))
]
