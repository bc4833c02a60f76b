"""The block-scaled products as they are launched (see specs.py)."""

from lessons.l19_kv_quantization.activations.block_scaled import gluon_matmul as gluon
from lessons.l19_kv_quantization.activations.block_scaled.operands import ROWS, SCALES
from lessons.toolbox.kernels.compile_check import KernelSpec

ROOM = "lessons.l19_kv_quantization.activations.block_scaled"
# name -> (Triton's type of the scales, numbers that share one)
FORMATS = {"nvfp4": ("fp8e4nv", 16), "mxfp4": ("u8", 32)}


def tiles(kind: str, shape: list[int], bits: int, swizzle: int = 128) -> str:
    """Triton's type of a tensor descriptor."""
    rows = f"swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank={len(shape)}"
    return f"tensordesc<{kind}[{', '.join(map(str, shape))}],NVMMASharedLayout({rows})>"


def block_scaled_spec(name: str, block_n: int) -> KernelSpec:
    """block_scaled_kernel."""
    kind, block = FORMATS[name]
    parts = gluon.BLOCK_K // block // SCALES
    row = gluon.BLOCK_K // 2
    return KernelSpec(
        f"{ROOM}.gluon_matmul:block_scaled_kernel",
        name=f"block_scaled_{name}_{block_n}",
        signature={
            "a_desc": tiles("u8", [gluon.BLOCK_M, row], 8),
            "b_desc": tiles("u8", [block_n, row], 8),
            "a_scale_desc": tiles(kind, [gluon.BLOCK_M // ROWS, parts, 2, 256], 8, 0),
            "b_scale_desc": tiles(kind, [block_n // ROWS, parts, 2, 256], 8, 0),
            "out_desc": tiles("bf16", [gluon.BLOCK_M, gluon.COLUMNS], 16),
            **dict.fromkeys(("row_scale_ptr", "column_scale_ptr"), "*fp32"),
            **dict.fromkeys(("num_rows", "num_columns", "num_steps"), "i32"),
        },
        constexprs={"STAGES": gluon.STAGES, "num_warps": gluon.NUM_WARPS},
        num_warps=gluon.NUM_WARPS,
        chips=(100,),
    )


KERNELS = [block_scaled_spec(name, block_n) for name in FORMATS for block_n in (128, 256)]
