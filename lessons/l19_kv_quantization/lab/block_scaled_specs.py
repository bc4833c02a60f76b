"""The block-scaled products as they are launched (see specs.py)."""

from lessons.l19_kv_quantization.activations.block_scaled import dot_scaled, tokens
from lessons.l19_kv_quantization.activations.block_scaled import gluon_matmul as gluon
from lessons.l19_kv_quantization.activations.block_scaled.operands import ROWS, SCALES
from lessons.toolbox.kernels.compile_check import KernelSpec
from lessons.toolbox.kernels.triton_ import triton

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


def dot_scaled_spec(name: str, block_n: int) -> KernelSpec:
    """dot_scaled_kernel."""
    kind, block = FORMATS[name]
    parts, row = dot_scaled.BLOCK_K // block // SCALES, dot_scaled.BLOCK_K // 2
    return KernelSpec(
        f"{ROOM}.dot_scaled:dot_scaled_kernel",
        name=f"dot_scaled_{name}_{block_n}",
        signature={
            "a_desc": f"tensordesc<u8[{dot_scaled.BLOCK_M}, {row}]>",
            "b_desc": f"tensordesc<u8[{block_n}, {row}]>",
            "a_scale_desc": f"tensordesc<{kind}[{dot_scaled.BLOCK_M // ROWS}, {parts}, 2, 256]>",
            "b_scale_desc": f"tensordesc<{kind}[{block_n // ROWS}, {parts}, 2, 256]>",
            "out_desc": f"tensordesc<bf16[{dot_scaled.BLOCK_M}, {block_n}]>",
            **dict.fromkeys(("row_scale_ptr", "column_scale_ptr"), "*fp32"),
            **dict.fromkeys(("num_rows", "num_columns", "num_steps"), "i32"),
        },
        constexprs={
            "BLOCK_M": dot_scaled.BLOCK_M,
            "BLOCK_N": block_n,
            "BLOCK_K": dot_scaled.BLOCK_K,
            "SCALES": parts * SCALES,
        },
        num_warps=block_n // 32,
        num_stages=3,
        chips=(100,),
    )


def tokens_spec(inputs: int) -> KernelSpec:
    """round_tokens_kernel."""
    block = triton.next_power_of_2(inputs)
    return KernelSpec(
        f"{ROOM}.tokens:round_tokens_kernel",
        name=f"round_tokens_{inputs}",
        signature={
            "x_ptr": "*bf16",
            "codes_ptr": "*u8",
            "atoms_ptr": "*fp8e4nv",
            "row_scale_ptr": "*fp32",
            **dict.fromkeys(("stride_x", "num_inputs", "parts"), "i32"),
        },
        constexprs={"BLOCK_K": block},
        num_warps=tokens.warps_of(block),
        divisible_by_16=("stride_x", "num_inputs"),
        chips=(90, 100),
    )


KERNELS = [
    spec(name, block_n)
    for spec in (block_scaled_spec, dot_scaled_spec)
    for name in FORMATS
    for block_n in (128, 256)
]
KERNELS += [tokens_spec(inputs) for inputs in (4096, 14336)]
