"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l09_flash_attention.lab.specs
"""

from lessons.l09_flash_attention.hopper import gluon_flash as hopper
from lessons.l09_flash_attention.hopper import gluon_fp8
from lessons.l09_flash_attention.hopper.blackwell import gluon_flash as blackwell
from lessons.l09_flash_attention.hopper.fp8 import P_SHIFT
from lessons.l09_flash_attention.hopper.specialized import triton_flash
from lessons.l09_flash_attention.tiles import Tiles, tiles_for
from lessons.toolbox.kernels.compile_check import CHIPS, KernelSpec
from lessons.toolbox.kernels.triton_ import triton

ROOM = "lessons.l09_flash_attention"
STRIDES = ("stride_qm", "stride_qh", "stride_kn", "stride_kh", "stride_vn", "stride_vh")
OPTIONS = ("CAUSAL", "WINDOW", "SOFTCAP", "ALIBI", "SINKS")
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


def flash_spec(
    dtype: str,
    head_dim: int,
    chip: int,
    v_head_dim: int | None = None,
    options: tuple[str, ...] = ("CAUSAL",),
    group: int = 4,
    tiles: Tiles | None = None,
) -> KernelSpec:
    """flash_kernel for one chip with the tiles that tiles.py gives it. options: which of OPTIONS
    are on.
    """
    v_head_dim = v_head_dim or head_dim
    tiles = tiles or tiles_for(chip, max(head_dim, v_head_dim), ITEMSIZE[dtype])
    sizes = f"{head_dim}" if v_head_dim == head_dim else f"{head_dim}_{v_head_dim}"
    return KernelSpec(
        f"{ROOM}.optimized:flash_kernel",
        name="_".join(["flash", dtype, sizes, *(o.lower() for o in options)]),
        signature={
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}"),
            "lse_ptr": "*fp32",
            "cu_seqlens_q_ptr": "*i32",
            "cu_seqlens_k_ptr": "*i32",
            "alibi_slopes_ptr": "*fp32",
            "sinks_ptr": "*fp32",
            "total_q": "i32",
            "total_k": "i32",
            "softmax_scale": "fp32",
            "window": "i32",
            "softcap": "fp32",
            **dict.fromkeys(STRIDES, "i32"),
        },
        constexprs={
            **{option: option in options for option in OPTIONS},
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": v_head_dim,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_DV": triton.next_power_of_2(v_head_dim),
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=STRIDES,
        chips=(chip,),
    )


def descriptor_spec(
    head_dim: int, chip: int, causal: bool = True, tiles: Tiles | None = None
) -> KernelSpec:
    """flash_descriptor_kernel, with the tiles that it has for the chip or with others."""
    tiles = tiles or triton_flash.TILES[chip][head_dim]
    keys = f"tensordesc<bf16[{tiles.block_n}, {head_dim}]>"
    return KernelSpec(
        f"{triton_flash.__name__}:flash_descriptor_kernel",
        name=f"descriptors_bf16_{head_dim}_{'causal' if causal else 'full'}",
        signature={
            **dict.fromkeys(("q_ptr", "out_ptr"), "*bf16"),
            **dict.fromkeys(("k_desc", "v_desc"), keys),
            "lse_ptr": "*fp32",
            "num_queries": "i32",
            "num_keys": "i32",
            "softmax_scale": "fp32",
        },
        constexprs={
            "CAUSAL": causal,
            "EDGE": causal,
            "GROUP": 4,
            "HEAD_DIM": head_dim,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        chips=(chip,),
    )


def fa1_spec(dtype: str) -> KernelSpec:
    """fa1_kernel with its own tiles, for reading and not for speed."""
    return KernelSpec(
        f"{ROOM}.fa1:fa1_kernel",
        name=f"fa1_{dtype}_64",
        signature={
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{dtype}"),
            **dict.fromkeys(("out_ptr", "l_ptr", "m_ptr"), "*fp32"),
            "softmax_scale": "fp32",
            "num_queries": "i32",
            "num_keys": "i32",
            **dict.fromkeys((*STRIDES, "stride_om"), "i32"),
        },
        constexprs={
            "CAUSAL": True,
            "GROUP": 4,
            "HEAD_DIM": 64,
            "V_HEAD_DIM": 64,
            "BLOCK_M": 32,
            "BLOCK_N": 32,
            "BLOCK_D": 64,
            "BLOCK_DV": 64,
        },
        num_warps=16,
        num_stages=1,
        divisible_by_16=(*STRIDES, "stride_om"),
    )


def fp8_spec(head_dim: int) -> KernelSpec:
    """flash_fp8_kernel for the chips that have the format."""
    strides = ("stride_qm", "stride_qh", "stride_kn", "stride_kh", "stride_vh", "stride_vd")
    return KernelSpec(
        f"{ROOM}.hopper.fp8:flash_fp8_kernel",
        name=f"flash_fp8_{head_dim}",
        signature={
            **dict.fromkeys(("q_ptr", "k_ptr", "v_t_ptr"), "*fp8e4nv"),
            "out_ptr": "*bf16",
            **dict.fromkeys(("q_scale_ptr", "k_scale_ptr", "v_scale_ptr"), "*fp32"),
            "softmax_scale": "fp32",
            "num_queries": "i32",
            "num_keys": "i32",
            **dict.fromkeys(strides, "i32"),
        },
        constexprs={
            "CAUSAL": True,
            "GROUP": 4,
            "HEAD_DIM": head_dim,
            "BLOCK_M": 128,
            "BLOCK_N": 64,
        },
        num_warps=8,
        num_stages=2,
        divisible_by_16=(*strides, "num_keys"),
        chips=(89, 90, 100),
    )


def tile_type(dtype: str, rows: int, head_dim: int) -> str:
    """A descriptor's type, swizzled over a row of at most 128 bytes."""
    bits = 8 if dtype.startswith("fp8") else 16
    width = min(128, head_dim * bits // 8)
    layout = f"swizzle_byte_width={width}, element_bitwidth={bits}, rank=2"
    return f"tensordesc<{dtype}[{rows}, {head_dim}],NVMMASharedLayout({layout})>"


def gluon_spec(module, kernel: str, head_dim: int, causal: bool, chip: int, **constexprs):
    """A Gluon kernel of `module` for its chip."""
    rows, keys = (tile_type("bf16", n, head_dim) for n in (module.ROWS, module.BLOCK_N))
    room = module.__name__.split(".")[-2]
    return KernelSpec(
        f"{module.__name__}:{kernel}",
        name=f"{room}_bf16_{head_dim}_{'causal' if causal else 'full'}",
        signature={
            **dict.fromkeys(("q_desc", "out_desc"), rows),
            **dict.fromkeys(("k_desc", "v_desc"), keys),
            "lse_ptr": "*fp32",
            "num_queries": "i32",
            "num_keys": "i32",
            "qk_scale": "fp32",
        },
        constexprs={
            "CAUSAL": causal,
            "GROUP": 4,
            "STAGES": module.STAGES,
            **constexprs,
            "num_warps": module.NUM_WARPS,
        },
        num_warps=module.NUM_WARPS,
        chips=(chip,),
    )


def hopper_spec(head_dim: int, causal: bool) -> KernelSpec:
    """flash_hopper_kernel."""
    launch = hopper, "flash_hopper_kernel", head_dim, causal, 90
    return gluon_spec(*launch, CONSUMERS=hopper.CONSUMERS)


def blackwell_spec(head_dim: int, causal: bool) -> KernelSpec:
    """flash_blackwell_kernel."""
    launch = blackwell, "flash_blackwell_kernel", head_dim, causal, 100
    return gluon_spec(*launch, GROUPS=blackwell.GROUPS, COLUMNS=blackwell.COLUMNS)


def fp8_hopper_spec(head_dim: int, causal: bool) -> KernelSpec:
    """flash_fp8_hopper_kernel."""
    keys = tile_type("fp8e4nv", gluon_fp8.BLOCK_N, head_dim)
    return KernelSpec(
        f"{ROOM}.hopper.gluon_fp8:flash_fp8_hopper_kernel",
        name=f"gluon_fp8_{head_dim}_{'causal' if causal else 'full'}",
        signature={
            "q_desc": tile_type("fp8e4nv", gluon_fp8.ROWS, head_dim),
            **dict.fromkeys(("k_desc", "v_desc"), keys),
            "out_desc": tile_type("bf16", gluon_fp8.ROWS, head_dim),
            **dict.fromkeys(("lse_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr"), "*fp32"),
            "num_queries": "i32",
            "num_keys": "i32",
            "softmax_scale": "fp32",
        },
        constexprs={
            "CAUSAL": causal,
            "GROUP": 4,
            "STAGES": gluon_fp8.STAGES,
            "CONSUMERS": gluon_fp8.CONSUMERS,
            "SHIFT": P_SHIFT.value,
            "KEYS": gluon_fp8.KEYS,
            "num_warps": gluon_fp8.NUM_WARPS,
        },
        num_warps=gluon_fp8.NUM_WARPS,
        chips=(90,),
    )


KERNELS = [
    flash_spec(dtype, head_dim, chip)
    for chip in CHIPS
    for dtype in ("fp16" if chip == 75 else "bf16", "fp32")
    for head_dim in (64, 128, 256)
]
KERNELS += [
    flash_spec("bf16", 80, 90),
    flash_spec("bf16", 96, 90),
    flash_spec("bf16", 192, 90, 128),
]
KERNELS += [flash_spec("bf16", 128, 90, options=())]
# As models combine them: Gemma 2, gpt-oss, BLOOM; and all at once, which none does.
KERNELS += [
    flash_spec("bf16", 128, chip, options=("CAUSAL", *options))
    for chip in (80, 90)
    for options in (("WINDOW", "SOFTCAP"), ("WINDOW", "SINKS"), ("ALIBI",))
]
KERNELS += [flash_spec("bf16", 128, 90, options=OPTIONS)]
KERNELS += [
    descriptor_spec(head_dim, chip, causal)
    for chip, tiles in triton_flash.TILES.items()
    for head_dim in tiles
    for causal in (True, False)
]
KERNELS += [fa1_spec(dtype) for dtype in ("bf16", "fp32")] + [fp8_spec(64), fp8_spec(128)]
GLUON = [(head_dim, causal) for head_dim in (64, 128) for causal in (True, False)]
KERNELS += [hopper_spec(*launch) for launch in GLUON]
KERNELS += [blackwell_spec(*launch) for launch in GLUON]
KERNELS += [fp8_hopper_spec(*launch) for launch in GLUON]
