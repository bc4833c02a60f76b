"""The kernels over DeepSeek's rows of codes as they are launched, for specs.py."""

from lessons.l12_paged_kv.kernels.hooks import equal_split, listed_split
from lessons.l19_kv_quantization.kernels import codes
from lessons.l19_kv_quantization.kernels.latents.naive import LEAST_SCALE
from lessons.l19_kv_quantization.kernels.latents.optimized import PARTS, coded_tiles, crowding
from lessons.toolbox.kernels.compile_check import CHIPS, KernelSpec
from lessons.toolbox.kernels.triton_ import tl

LATENTS = "lessons.l19_kv_quantization.kernels.latents.kernel"
WITH_E4M3 = (89, 90, 100)


def rows_spec(name: str, unpack, split_of, chips: tuple) -> KernelSpec:
    """coded_mla_kernel over DeepSeek-V3's rows, as coded_mla_decode launches it for 16 heads."""
    strides = ("stride_qb", "stride_qh", "stride_kblock", "stride_kn")
    shared = min(CHIPS[chip].shared_limit_bytes for chip in chips)
    tiles, (_, registers) = coded_tiles(16, 2, shared), crowding(2, shared)
    is_listed = split_of is listed_split
    return KernelSpec(
        f"{LATENTS}:coded_mla_kernel",
        name=f"coded_mla_{name}{'_listed' if is_listed else ''}",
        signature={
            **dict.fromkeys(("q_ptr", "pe_ptr"), "*bf16"),
            "words_ptr": "*u16",
            **dict.fromkeys(("scales_ptr", "lse_ptr"), "*fp32"),
            "out_ptr": "*fp32" if is_listed else "*bf16",
            **dict.fromkeys(("context_lens_ptr", "block_table_ptr"), "*i32"),
            **({"items_ptr": "*i32"} if is_listed else {}),
            "scale_log2e": "fp32",
            **dict.fromkeys(("num_heads", "window", "split_size", *strides, "stride_table"), "i32"),
        },
        constexprs={
            **({} if is_listed else {"items_ptr": None}),
            "RANK": 512,
            "ROPE": 64,
            "GROUP": 128,
            "PAGE_SIZE": 64,
            "BLOCK_H": tiles.block_h,
            "BLOCK_N": tiles.block_n,
            "PARTS": PARTS,
            "UNIT": codes.UNITS.get(unpack, 1.0),
            "UNPACK": unpack,
            "NUMBER": tl.float16,
            "SPLIT_OF": split_of,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=("stride_qb", "stride_qh", "num_heads"),
        chips=chips,
        options={} if registers is None else {"maxnreg": registers},
    )


def write_rows_spec() -> KernelSpec:
    """write_rows_kernel for DeepSeek-V3's rows."""
    return KernelSpec(
        f"{LATENTS}:write_rows_kernel",
        name="write_rows",
        signature={
            **dict.fromkeys(("x_ptr", "pe_ptr"), "*bf16"),
            "codes_ptr": "*fp8e4nv",
            "scales_ptr": "*fp32",
            "slot_mapping_ptr": "*i64",
            **dict.fromkeys(("stride_xt", "stride_slot"), "i32"),
        },
        constexprs={
            "RANK": 512,
            "ROPE": 64,
            "GROUP": 128,
            "BLOCK_R": 64,
            "LARGEST": 448.0,
            "LEAST": LEAST_SCALE,
        },
        num_warps=1,
        divisible_by_16=("stride_xt",),
        chips=WITH_E4M3,
    )


# Tiles depend on a chip's shared memory, so each chip has specs of its own.
ROWS = [
    rows_spec(name, unpack, split_of, (chip,))
    for name, unpack, chips in (
        ("e4m3", codes.e4m3_ptx, WITH_E4M3),
        ("e4m3bits", codes.e4m3_bits, (80,)),
    )
    for chip in chips
    for split_of in (equal_split, listed_split)
]
ROWS += [write_rows_spec()]
