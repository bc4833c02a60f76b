"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l12_paged_kv.lab.specs
"""

from dataclasses import replace

from lessons.l05_gqa.tiles import warps_for
from lessons.l09_flash_attention.tiles import tiles_for
from lessons.l10_flash_decoding.lab import specs as splits
from lessons.l12_paged_kv.kernels.few_heads import GROUPS, is_grouped
from lessons.l12_paged_kv.kernels.hooks import (
    causal,
    contiguous_row,
    equal_split,
    in_window,
    listed_split,
    paged_row,
    plain_load,
)
from lessons.l12_paged_kv.kernels.hopper import gluon_mla
from lessons.l12_paged_kv.kernels.latents import paged_tiles
from lessons.l12_paged_kv.kernels.launch import narrower, sizes_of
from lessons.toolbox.kernels.compile_check import CHIPS, KernelSpec
from lessons.toolbox.kernels.triton_ import triton

ROOM = "lessons.l12_paged_kv"
CACHE_STRIDES = (
    "stride_kblock",
    "stride_kn",
    "stride_kh",
    "stride_vblock",
    "stride_vn",
    "stride_vh",
)
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
WITH_MATRIX_UNITS = (80, 89, 90, 100)


def common(dtype: str, strides: tuple[str, ...], page_size: int, row_of, sees) -> dict:
    """What the specs of both kernels share: the arguments of `KernelSpec`, in part."""
    return {
        "signature": {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}"),
            "context_lens_ptr": "*i32",
            "block_table_ptr": "*i32",
            "scale_log2e": "fp32",
            "window": "i32",
            **dict.fromkeys((*strides, *CACHE_STRIDES, "stride_table"), "i32"),
        },
        "constexprs": {
            "k_scale_ptr": None,
            "v_scale_ptr": None,
            "PAGE_SIZE": page_size,
            "ROW_OF": row_of,
            "LOAD": plain_load,
            "SEES": sees,
        },
        "divisible_by_16": (*strides, *CACHE_STRIDES),
    }


def decode_spec(
    dtype: str,
    group: int,
    head_dim: int,
    chips: tuple[int, ...] = WITH_MATRIX_UNITS,
    v_head_dim: int | None = None,
    page_size: int = 16,
    row_of=paged_row,
    sees=causal,
    split_of=equal_split,
) -> KernelSpec:
    """decode_kernel as paged_decode launches it on these chips, with a single split, or
    (listed_split) by a list of splits.
    """
    v_head_dim = v_head_dim or head_dim
    parts = common(dtype, ("stride_qb", "stride_qh"), page_size, row_of, sees)
    sizes = f"{head_dim}" if v_head_dim == head_dim else f"{head_dim}_{v_head_dim}"
    return KernelSpec(
        f"{ROOM}.kernels.paged:decode_kernel",
        name=f"decode_{dtype}_{group}x{sizes}_{hooks(row_of, sees, split_of)}{page_size}",
        signature=parts["signature"]
        | {"lse_ptr": "*fp32", "split_size": "i32", "stride_sh": "i32"}
        | ({"items_ptr": "*i32", "out_ptr": "*fp32"} if split_of is listed_split else {}),
        constexprs={
            **({} if split_of is listed_split else {"items_ptr": None}),
            "SPLIT_OF": split_of,
            "LOAD_V": plain_load,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": v_head_dim,
            **sizes_of(group, head_dim, v_head_dim, dtype != "fp32" and 75 not in chips),
            **parts["constexprs"],
        },
        num_warps=warps_for(group, max(head_dim, v_head_dim)),
        divisible_by_16=parts["divisible_by_16"],
        chips=chips,
    )


def prefill_spec(
    dtype: str,
    head_dim: int,
    chip: int,
    v_head_dim: int | None = None,
    page_size: int = 16,
    row_of=paged_row,
    sees=causal,
) -> KernelSpec:
    """prefill_kernel for one chip with the tiles that lesson 9 gives it."""
    v_head_dim = v_head_dim or head_dim
    itemsize = ITEMSIZE[dtype]
    tiles = narrower(tiles_for(chip, max(head_dim, v_head_dim), itemsize), itemsize)
    parts = common(dtype, ("stride_qm", "stride_qh"), page_size, row_of, sees)
    sizes = f"{head_dim}" if v_head_dim == head_dim else f"{head_dim}_{v_head_dim}"
    return KernelSpec(
        f"{ROOM}.kernels.paged:prefill_kernel",
        name=f"prefill_{dtype}_{sizes}_{hooks(row_of, sees)}{page_size}",
        signature=parts["signature"] | {"cu_seqlens_q_ptr": "*i32", "stride_sh": "i32"},
        constexprs={
            "LOAD_V": plain_load,
            "GROUP": 4,
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": v_head_dim,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_DV": triton.next_power_of_2(v_head_dim),
            **parts["constexprs"],
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=parts["divisible_by_16"],
        chips=(chip,),
    )


def hooks(row_of, sees, split_of=equal_split) -> str:
    """The hooks in a spec's name."""
    where = "paged_" if row_of is paged_row else "contiguous_"
    listed = "listed_" if split_of is listed_split else ""
    return where + ("window_" if sees is in_window else "") + listed


# (query heads a KV head, head_dim) of Llama-3-8B, Llama-3-70B, the embedded model, odd heads.
def hopper_spec(page_size: int, listed: bool) -> KernelSpec:
    """The Gluon kernel of DeepSeek's latents: 512 values and 64 rotary ones."""
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"
    piece = min(page_size, gluon_mla.BLOCK_N)
    tile = "tensordesc<bf16[{}, {}],{}>".format
    return KernelSpec(
        f"{ROOM}.kernels.hopper.gluon_mla:paged_mla_hopper_kernel",
        name=f"hopper_page_{page_size}{'_listed' if listed else ''}",
        signature={
            "q_desc": tile(gluon_mla.BLOCK_H, 256, layout),
            "q_pe_desc": tile(gluon_mla.BLOCK_H, 64, layout),
            "kv_desc": tile(piece, 256, layout),
            "pe_desc": tile(piece, 64, layout),
            **dict.fromkeys(("out_ptr", "lse_ptr"), "*fp32"),
            **dict.fromkeys(("items_ptr", "context_lens_ptr", "block_table_ptr"), "*i32"),
            "scale_log2e": "fp32",
            **dict.fromkeys(("num_heads", "split_size", "stride_table", "num_rows"), "i32"),
        },
        constexprs={
            "PAGE_SIZE": page_size,
            "LISTED": listed,
            "STAGES": gluon_mla.STAGES,
            "BLOCK_N": gluon_mla.BLOCK_N,
            "num_warps": gluon_mla.NUM_WARPS,
        },
        num_warps=gluon_mla.NUM_WARPS,
        chips=(90,),
    )


def is_few(spec: KernelSpec) -> bool:
    """Whether a launch over latents is one of grouped_mla_kernel."""
    if "paged_mla_kernel" not in spec.kernel:
        return False
    sizes = [spec.constexprs[name] for name in ("BLOCK_H", "RANK", "ROPE")]
    return is_grouped(*sizes, 4 if "fp32" in spec.name else 2, spec.num_warps)


SHAPES = {"bf16": ((4, 128), (8, 128), (3, 64), (4, 80), (4, 256)), "fp32": ((4, 128), (3, 64))}
KERNELS = [
    decode_spec(dtype, group, dim, chips)
    for dtype, shapes in SHAPES.items()
    for group, dim in shapes
    for chips in ((75,), WITH_MATRIX_UNITS)
    if not (chips == (75,) and dtype == "bf16")
]
KERNELS += [decode_spec("fp16", 4, 128, (75,))]
# DeepSeek's expanded heads; pages of another size; what lessons 3 to 11 have; a window.
KERNELS += [
    decode_spec("bf16", 1, 192, v_head_dim=128),
    decode_spec("bf16", 4, 128, page_size=48),
    decode_spec("bf16", 4, 128, page_size=256),
    # 134 KiB of shared memory, because it has as many stages as the paged one and one load less.
    decode_spec("bf16", 4, 128, (80, 90, 100), row_of=contiguous_row),
    decode_spec("bf16", 4, 128, sees=in_window),
]
# By a list of splits, and the merge of each sequence's own.
KERNELS += [
    decode_spec("bf16", 4, 128, split_of=listed_split),
    decode_spec("bf16", 4, 128, sees=in_window, split_of=listed_split),
    decode_spec("fp32", 3, 64, split_of=listed_split),
    *(
        replace(
            spec,
            kernel=f"{ROOM}.kernels.plan:combine_ranges_kernel",
            name=spec.name.replace("combine", "combine_ranges"),
            signature={
                name.replace("num_splits", "num_places"): kind
                for name, kind in spec.signature.items()
            }
            | {"starts_ptr": "*i32"},
        )
        for spec in splits.KERNELS
        if spec.name in ("combine_bf16_128", "combine_fp32_64")
    ),
]
KERNELS += [
    prefill_spec(dtype, head_dim, chip)
    for chip in CHIPS
    for dtype in ("fp16" if chip == 75 else "bf16", "fp32")
    for head_dim in (64, 128, 256)
]
KERNELS += [
    prefill_spec("bf16", 192, 90, 128),
    prefill_spec("bf16", 128, 90, page_size=48),
    prefill_spec("bf16", 128, 90, row_of=contiguous_row),
    prefill_spec("bf16", 128, 90, sees=in_window),
]
# DeepSeek's latents, with lesson 10's tiles and room for the table's wait.
KERNELS += [
    replace(
        spec,
        kernel=f"{ROOM}.kernels.latents:paged_mla_kernel",
        name=spec.name.replace("mla_split", f"paged_mla{listed}"),
        signature={
            ("scale_log2e" if name == "softmax_scale" else name).replace(
                "stride_kb", "stride_kblock"
            ): kind
            for name, kind in spec.signature.items()
            if name != "capacity"
        }
        | {"block_table_ptr": "*i32", "stride_table": "i32", "window": "i32"}
        | ({"items_ptr": "*i32"} if split_of is listed_split else {}),
        constexprs=spec.constexprs
        | {"PAGE_SIZE": 16, "ROW_OF": paged_row, "SPLIT_OF": split_of}
        | ({} if split_of is listed_split else {"items_ptr": None}),
        num_stages=paged_tiles(
            spec.constexprs["BLOCK_H"],
            4 if "fp32" in spec.name else 2,
            CHIPS[spec.chips[0]].shared_limit_bytes,
            spec.chips[0],
        ).num_stages,
        divisible_by_16=tuple(
            name.replace("stride_kb", "stride_kblock") for name in spec.divisible_by_16
        ),
    )
    for listed, split_of in (("", equal_split), ("_listed", listed_split))
    for spec in splits.KERNELS
    if "mla_split_kernel" in spec.kernel and ("fp32" not in spec.name or not listed)
]
# 16 heads in 16 bits have a kernel of their own, of the same arguments.
KERNELS = [
    replace(
        spec,
        kernel=f"{ROOM}.kernels.few_heads:grouped_mla_kernel",
        name=spec.name.replace("paged_mla", "grouped_mla"),
        constexprs=spec.constexprs | {"GROUPS": GROUPS},
    )
    if is_few(spec)
    else spec
    for spec in KERNELS
]
# The same on Hopper, in Gluon.
KERNELS += [hopper_spec(page_size, listed) for page_size in (16, 64) for listed in (False, True)]
