"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l19_kv_quantization.lab.specs
"""

from dataclasses import replace

from lessons.l12_paged_kv.kernels.hooks import causal, equal_split, in_window, listed_split
from lessons.l12_paged_kv.lab.specs import WITH_MATRIX_UNITS, decode_spec, prefill_spec
from lessons.l19_kv_quantization.activations import w4a8
from lessons.l19_kv_quantization.activations.attention.optimized import products_tiles
from lessons.l19_kv_quantization.activations.hadamard import LEAST_SIDE, sides_of, warps_of
from lessons.l19_kv_quantization.activations.w8a8 import blocks_of
from lessons.l19_kv_quantization.kernels import codes, hooks
from lessons.l19_kv_quantization.kernels.launch import crowding, sizes_for
from lessons.l19_kv_quantization.lab import block_scaled_specs
from lessons.l19_kv_quantization.lab.specs_of_rows import ROWS
from lessons.l19_kv_quantization.optimized import LARGEST
from lessons.toolbox.kernels.compile_check import KernelSpec
from lessons.toolbox.kernels.triton_ import tl, triton

ROOM = "lessons.l19_kv_quantization"
WITH_E4M3 = (89, 90, 100)
# what a cache holds -> (UNPACK, bits of a code, numbers of a scale, the chips that it is for)
CODES = {
    "fp8": (codes.e4m3_ptx, 8, 1, WITH_E4M3),
    "fp8bits": (codes.e4m3_bits, 8, 1, (80,)),
    "int8": (codes.int8_ptx, 8, 1, WITH_MATRIX_UNITS),
    "int4": (codes.int4_ptx, 4, 2, WITH_MATRIX_UNITS),
}
# what a cache holds -> (LOAD, LOAD_V, Triton's type of its codes, the chips that it is for)
FORMATS = {
    "fp8": (hooks.scaled_load, hooks.scaled_load, "*fp8e4nv", WITH_E4M3),
    "fp8bits": (hooks.e4m3_bits_load, hooks.e4m3_bits_load, "*u8", (80,)),
    "int8": (hooks.scaled_load, hooks.scaled_load, "*i8", WITH_MATRIX_UNITS),
    "int4": (hooks.int4_load, hooks.int4_load, "*u8", WITH_MATRIX_UNITS),
    # not sm_89: three tiles of codes and of scales under way take 103 KiB of its 99
    "kivi": (hooks.kivi_key_load, hooks.kivi_value_load, "*u8", (80, 90, 100)),
}


def quantized(spec: KernelSpec, name: str, scales: str = "*bf16") -> KernelSpec:
    """One of lesson 12's specs over a cache that holds what `name` says."""
    load, load_v, kind, _ = FORMATS[name]
    pointers = {"k_ptr": kind, "v_ptr": kind, "k_scale_ptr": scales, "v_scale_ptr": scales}
    constexprs = {key: x for key, x in spec.constexprs.items() if key not in pointers}
    return replace(
        spec,
        name=f"{name}_{spec.name}",
        signature=spec.signature | pointers,
        constexprs=constexprs | {"LOAD": load, "LOAD_V": load_v},
        divisible_by_16=(*spec.divisible_by_16, "stride_sh"),
    )


def codes_spec(
    name: str, group: int, head_dim: int, sees=causal, split_of=equal_split
) -> KernelSpec:
    """codes_decode_kernel as quantized_decode launches it for pages of 16, with a single split, or
    (listed_split) by a list of splits.
    """
    unpack, bits, per_row, chips = CODES[name]
    plain = decode_spec("bf16", group, head_dim, chips, sees=sees, split_of=split_of)
    parts = 16 // bits
    same = ("GROUP", "HEAD_DIM", "V_HEAD_DIM", "PAGE_SIZE", "SPLIT_OF", "items_ptr")
    kept = {key: plain.constexprs[key] for key in same if key in plain.constexprs}
    _, registers = crowding(bits, group, head_dim, True)
    return replace(
        plain,
        kernel=f"{ROOM}.kernels.decode:codes_decode_kernel",
        name=f"{name}_{plain.name}",
        signature=plain.signature
        | dict.fromkeys(("k_ptr", "v_ptr"), "*u16")
        | dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*bf16"),
        constexprs=kept
        | sizes_for(group, (head_dim, head_dim), parts, True)
        | {
            "PARTS": parts,
            "PER_ROW": per_row,
            "UNIT": codes.UNITS.get(unpack, 1.0),
            "UNPACK": unpack,
            "NUMBER": tl.float16,
            "SEES": sees,
        },
        divisible_by_16=(*plain.divisible_by_16, "stride_sh"),
        options={} if registers is None else {"maxnreg": registers},
    )


def quantize_spec(name: str, codes: str, x: str, head_dim: int, chips: tuple) -> KernelSpec:
    """quantize_kernel for rows of this width. x: Triton's type of what comes in."""
    block_d = 1 << (head_dim - 1).bit_length()
    strides = ("stride_xt", "stride_xh", "stride_slot", "stride_head")
    return KernelSpec(
        f"{ROOM}.optimized:quantize_kernel",
        name=f"quantize_{name}_{head_dim}",
        signature={
            "x_ptr": x,
            "codes_ptr": codes,
            "scales_ptr": x,
            "slot_mapping_ptr": "*i64",
            **dict.fromkeys((*strides, "stride_ss", "stride_sh"), "i32"),
        },
        constexprs={
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d,
            "LARGEST": LARGEST[name],
            "IS_INT4": name == "int4",
            "IS_FLOAT": name == "fp8",
        },
        num_warps=min(8, max(1, block_d // 1024)),
        divisible_by_16=strides,
        chips=chips,
    )


def product_spec(name: str, codes: str, num_tokens: int, chips: tuple) -> KernelSpec:
    """w8a8_kernel for so many tokens."""
    blocks = blocks_of(num_tokens)
    strides = ("stride_xt", "stride_wn", "stride_ot")
    counts = ("num_tokens", "num_outputs", "num_inputs")
    return KernelSpec(
        f"{ROOM}.activations.w8a8:w8a8_kernel",
        name=f"w8a8_{name}_{num_tokens}",
        signature={
            **dict.fromkeys(("x_ptr", "w_ptr"), codes),
            "out_ptr": "*bf16",
            **dict.fromkeys(("x_scale_ptr", "w_scale_ptr"), "*fp32"),
            **dict.fromkeys((*counts, *strides), "i32"),
        },
        constexprs={"bias_ptr": None, **blocks, "IS_FLOAT": name == "fp8"},
        num_warps=8 if blocks["BLOCK_M"] >= 64 else 4,
        num_stages=3,
        divisible_by_16=(*strides, "num_inputs", "num_outputs"),
        chips=chips,
    )


def grouped_spec(name: str, codes: str, num_tokens: int, chips: tuple, zeros: bool) -> KernelSpec:
    """w4a8_kernel for so many tokens, in groups of 128. zeros: whether there are zero points."""
    blocks = w4a8.blocks_of(num_tokens)
    strides = ("stride_xt", "stride_wn", "stride_sn", "stride_ot")
    counts = ("num_tokens", "num_outputs", "num_groups")
    others = ("stride_sg", "stride_zn", "stride_zg")
    return KernelSpec(
        f"{ROOM}.activations.w4a8:w4a8_kernel",
        name=f"w4a8_{name}_{num_tokens}" + ("_zeros" if zeros else ""),
        signature={
            "x_ptr": codes,
            "w_ptr": "*u8",
            "out_ptr": "*bf16",
            "x_scale_ptr": "*fp32",
            "w_scale_ptr": "*bf16",
            **({"zero_ptr": "*u8"} if zeros else {}),
            **dict.fromkeys((*counts, *strides, *others), "i32"),
        },
        constexprs={
            "bias_ptr": None,
            **({} if zeros else {"zero_ptr": None}),
            "GROUP_BYTES": 64,
            "BLOCK_BYTES": w4a8.step_of(64),
            **blocks,
        },
        num_warps=w4a8.warps_of(blocks["BLOCK_M"]),
        num_stages=3,
        divisible_by_16=(*strides[:2], "stride_ot", "num_outputs"),
        chips=chips,
    )


def rotate_spec(n: int, dtype: str, chips: tuple) -> KernelSpec:
    """rotate_kernel for tokens of n numbers."""
    sides = sides_of(n)
    blocks = [max(LEAST_SIDE, triton.next_power_of_2(side)) for side in sides]
    return KernelSpec(
        f"{ROOM}.activations.hadamard:rotate_kernel",
        name=f"rotate_{dtype}_{n}",
        signature={
            **dict.fromkeys(("x_ptr", "left_ptr", "right_ptr", "out_ptr"), f"*{dtype}"),
            "factor": "fp32",
            **dict.fromkeys(("stride_x", "stride_out"), "i32"),
        },
        constexprs={
            **dict(zip(("A", "B"), sides)),
            **dict(zip(("BLOCK_A", "BLOCK_B"), blocks)),
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        },
        num_warps=warps_of(blocks[0] * blocks[1], dtype == "fp32"),
        divisible_by_16=("stride_x", "stride_out"),
        chips=chips,
    )


def products_spec(chip: int, head_dim: int, page_size: int = 16, sees=causal) -> KernelSpec:
    """fp8_prefill_kernel as fp8_prefill launches it, for a cache of a model in bfloat16."""
    tiles = products_tiles(chip, head_dim)
    plain = prefill_spec("bf16", head_dim, chip, page_size=page_size, sees=sees)
    hooks_of_codes = (
        "k_scale_ptr",
        "v_scale_ptr",
        "LOAD",
        "LOAD_V",
        "ROW_OF",
        "BLOCK_D",
        "BLOCK_DV",
    )
    kept = {key: x for key, x in plain.constexprs.items() if key not in hooks_of_codes}
    return replace(
        plain,
        kernel=f"{ROOM}.activations.attention.kernel:fp8_prefill_kernel",
        name=plain.name.replace("prefill_bf16", "fp8_attention"),
        signature=plain.signature
        | {"k_ptr": "*fp8e4nv", "v_ptr": "*u8", "k_scale_ptr": "*bf16", "v_scale_ptr": "*bf16"},
        constexprs=kept | {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=(*plain.divisible_by_16, "stride_sh"),
    )


# (query heads a KV head, head_dim) of Llama-3-8B and of the embedded model
KERNELS = [codes_spec(name, group, dim) for name in CODES for group, dim in ((4, 128), (3, 64))]
KERNELS += [codes_spec("fp8", 8, 128), codes_spec("int4", 8, 128), codes_spec("fp8", 4, 256)]
KERNELS += [codes_spec("int8", 4, 128, sees=in_window)]
KERNELS += [codes_spec(name, 4, 128, split_of=listed_split) for name in CODES]
KERNELS += [
    quantized(decode_spec("bf16", group, dim, FORMATS["kivi"][3], page_size=32), "kivi")
    for group, dim in ((4, 128), (3, 64))
]
KERNELS += [
    quantized(prefill_spec("bf16", 128, chip), name)
    for name, chip in (("fp8", 90), ("int8", 90), ("int4", 90), ("fp8bits", 80), ("int8", 80))
]
KERNELS += [
    quantize_spec("fp8", "*fp8e4nv", "*bf16", 128, WITH_E4M3),
    quantize_spec("int8", "*i8", "*bf16", 128, WITH_MATRIX_UNITS),
    quantize_spec("int4", "*u8", "*bf16", 128, WITH_MATRIX_UNITS),
    quantize_spec("fp8", "*fp8e4nv", "*bf16", 4096, (90,)),
]
KERNELS += [
    product_spec(name, codes, tokens, chips)
    for name, codes, chips in (("int8", "*i8", WITH_MATRIX_UNITS), ("fp8", "*fp8e4nv", WITH_E4M3))
    for tokens in (16, 4096)
]
KERNELS += [
    grouped_spec(name, codes, tokens, chips, zeros)
    for name, codes, chips in (("int8", "*i8", WITH_MATRIX_UNITS), ("fp8", "*fp8e4nv", WITH_E4M3))
    for tokens, zeros in ((16, False), (4096, True))
]
# down_proj's inputs of the embedded model, and of models of 8192 and 11264
KERNELS += [rotate_spec(n, "bf16", WITH_MATRIX_UNITS) for n in (1024, 8192, 11264)]
KERNELS += [rotate_spec(1024, "fp32", WITH_MATRIX_UNITS)]
KERNELS += [products_spec(chip, head_dim) for chip in WITH_E4M3 for head_dim in (64, 128, 256)]
KERNELS += [products_spec(90, 128, page_size=48), products_spec(90, 128, sees=in_window)]
KERNELS += block_scaled_specs.KERNELS
KERNELS += ROWS
