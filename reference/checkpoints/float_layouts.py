"""The layouts whose codes are bytes: INT8, FP8, bitsandbytes' NF4, MXFP4. Read layouts.py first.

Sources: compressed-tensors, naive_quantized/base.py; transformers, integrations/finegrained_fp8.py
and mxfp4.py; bitsandbytes, functional.py, QuantState.as_dict, and nn/modules.py, Linear8bitLt.
"""

import json

import torch
from torch import Tensor

from lessons.l18_weight_quantization.weights import (
    DYNAMIC_VALUES,
    MXFP4_BLOCK,
    NESTED_BLOCK,
    NF4_BLOCK,
    NF4_VALUES,
    TILE,
    Float8Weight,
    GroupedInt,
    Mxfp4Weight,
    Nf4Weight,
    QuantizedWeight,
)
from lessons.toolbox.model.arguments import refuse, shown
from reference.checkpoints.layouts import (
    ACTIVATION_SCALES,
    FLOATS,
    Layout,
    Parts,
    check_bits,
    expect,
    grouped,
    groups_of,
    natural_codes,
)

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


# ---------------------------------------------------------------- 8 bits


def int_quantized(bits: int = 8, group_size: int | None = None) -> Layout:
    """compressed-tensors' "int-quantized" (and "naive-quantized" with whole numbers): a byte for
    each code of 4 or 8 bits, around 0. group_size: inputs that share a scale; None: a scale for
    each row or for the matrix.
    """
    ends = ("weight", "weight_scale", "weight_zero_point")
    low = -(2 ** (bits - 1))

    def read(parts: Parts, shape: tuple[int, int]) -> GroupedInt:
        codes = expect(parts, "weight", shape, torch.int8).int()
        if bool((codes < low).any()) or bool((codes >= -low).any()):
            raise ValueError(f"weight: got codes beyond {bits} bits; accepted: {low} to {-low - 1}")
        count = 1 if group_size is None else groups_of(shape[1], group_size)
        if group_size is None:
            scales = row_scales(parts, "weight_scale", shape)
            scales = scales.expand(shape[0], 1)
        else:
            scales = expect(parts, "weight_scale", (shape[0], count), *FLOATS)
        zeros = None
        if "weight_zero_point" in parts:
            zeros = expect(parts, "weight_zero_point", (shape[0], count), torch.int8)
            zeros = (zeros.int() - low).to(torch.uint8)
        return grouped((codes - low).to(torch.uint8), scales, zeros, bits)

    def write(weight: QuantizedWeight) -> Parts:
        check_bits(weight, bits, "int-quantized")
        if weight.order is not None:
            refuse("int-quantized", "columns in another order", "GPTQ without act-order")
        parts = {"weight": natural_codes(weight).int() + low, "weight_scale": weight.scales}
        if weight.zeros is not None:
            parts["weight_zero_point"] = weight.zeros.int() + low
        return {end: x if end == "weight_scale" else x.to(torch.int8) for end, x in parts.items()}

    return Layout("int-quantized", "weight_scale", ends, read, write, ACTIVATION_SCALES)


def float_quantized(scale: str = "weight_scale", tile: bool = False) -> Layout:
    """FP8: compressed-tensors' "float-quantized", Meta's fbgemm_fp8, and the fine-grained form of
    DeepSeek-V3 and transformers. scale: the name of the scales. tile: they are those of tiles of
    128 × 128 numbers, else of rows or of the matrix.
    """

    def read(parts: Parts, shape: tuple[int, int]) -> Float8Weight:
        values = expect(parts, "weight", shape, *FLOAT8)
        if tile:
            kinds = (*FLOATS, torch.float8_e8m0fnu)
            scales = expect(parts, scale, tiles_of(shape), *kinds).float()
        else:
            scales = row_scales(parts, scale, shape)
        return Float8Weight(values, scales)

    def write(weight: QuantizedWeight) -> Parts:
        if not isinstance(weight, Float8Weight):
            got = type(weight).__name__
            raise ValueError(f"float-quantized: got {got}; accepted: Float8Weight")
        tiled = tuple(weight.scales.shape) == tiles_of(weight.shape)
        if not (tiled if tile else not is_tiled(weight)):
            accepted = "a scale for each tile" if tile else "a scale for each row, or one"
            got = list(weight.scales.shape)
            raise ValueError(f"float-quantized: got scales {got}; accepted: {accepted}")
        return {"weight": weight.values, scale: weight.scales}

    unread = ACTIVATION_SCALES
    return Layout("float-quantized", scale, ("weight", scale), read, write, unread)


def tiles_of(shape: tuple[int, int]) -> tuple[int, int]:
    """How many tiles of 128 × 128 numbers a matrix has, down and across."""
    return -(-shape[0] // TILE), -(-shape[1] // TILE)


def is_tiled(weight: Float8Weight) -> bool:
    """Whether its scales belong to tiles of 128 × 128 numbers."""
    return tuple(weight.scales.shape) not in ((1, 1), (weight.shape[0], 1))


def row_scales(parts: Parts, name: str, shape: tuple[int, int]) -> Tensor:
    """The scales of a matrix, [N, 1] or [1, 1]. Files also write them [N], [1] or []."""
    scales = parts.get(name)
    rows = 1 if scales is not None and scales.numel() == 1 else shape[0]
    if scales is not None and scales.ndim < 2:
        parts = parts | {name: scales.reshape(-1, 1)}
    return expect(parts, name, (rows, 1), *FLOATS)


# ---------------------------------------------------------------- bitsandbytes


def bnb_int8() -> Layout:
    """LLM.int8(): w = code · SCB / 127, SCB the largest magnitude of each row."""

    def read(parts: Parts, shape: tuple[int, int]) -> GroupedInt:
        codes = expect(parts, "weight", shape, torch.int8)
        largest = expect(parts, "SCB", (shape[0],), torch.float32)
        order = parts.get("weight_format", torch.zeros(()))
        if bool(order):
            raise ValueError(f"weight_format: got {int(order)}; accepted: 0, row by row")
        return grouped((codes.int() + 128).to(torch.uint8), largest[:, None] / 127, None, 8)

    return Layout("bitsandbytes, int8", "SCB", ("weight", "SCB", "weight_format"), read)


NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
NF4_ENDS = ("weight", "weight.absmax", "weight.quant_map", NF4_STATE)
NF4_ENDS += ("weight.nested_absmax", "weight.nested_quant_map")


def bnb_nf4() -> Layout:
    """bitsandbytes' NF4. Beside the codes lies a JSON text, as bytes, and the tables that the codes
    index; these must be the known ones.
    """

    def read(parts: Parts, shape: tuple[int, int]) -> Nf4Weight:
        state = read_state(expect_bytes(parts, NF4_STATE), shape)
        count = shape[0] * shape[1]
        if count % NF4_BLOCK:
            raise ValueError(f"weight: got {count} numbers; accepted: multiples of {NF4_BLOCK}")
        if "weight" not in parts or parts["weight"].nbytes * 2 != count:
            got = parts["weight"].nbytes if "weight" in parts else 0
            raise ValueError(
                f"weight: got {got} bytes; accepted: {count // 2}, two numbers in each"
            )
        codes = parts["weight"].contiguous().flatten().view(torch.uint8)
        check_table(parts, "weight.quant_map", torch.tensor(NF4_VALUES))
        blocks = count // NF4_BLOCK
        if "weight.nested_absmax" not in parts:
            absmax = expect(parts, "weight.absmax", (blocks,), torch.float32)
            return Nf4Weight(codes, absmax, shape)
        absmax = expect(parts, "weight.absmax", (blocks,), torch.uint8)
        shape_of_nested = (-(-blocks // NESTED_BLOCK),)
        nested = expect(parts, "weight.nested_absmax", shape_of_nested, torch.float32)
        check_table(parts, "weight.nested_quant_map", DYNAMIC_VALUES)
        return Nf4Weight(codes, absmax, shape, nested, torch.tensor([state["nested_offset"]]))

    return Layout("bitsandbytes, nf4", NF4_STATE, NF4_ENDS, read, write_nf4)


def write_nf4(weight: QuantizedWeight) -> Parts:
    """As bitsandbytes saves it. Raises ValueError for another format."""
    if not isinstance(weight, Nf4Weight):
        raise ValueError(f"nf4: got {type(weight).__name__}; accepted: Nf4Weight")
    state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": "float32"}
    state |= {"shape": list(weight.shape)}
    parts = {
        "weight": weight.codes[:, None],
        "weight.absmax": weight.absmax,
        "weight.quant_map": torch.tensor(NF4_VALUES),
    }
    if weight.nested_absmax is not None:
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        state |= {"nested_offset": weight.offset.item()}
        parts["weight.nested_absmax"] = weight.nested_absmax
        parts["weight.nested_quant_map"] = DYNAMIC_VALUES.clone()
    return parts | {NF4_STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


def expect_bytes(parts: Parts, end: str) -> bytes:
    """The bytes of a part. Raises ValueError if it is missing, of another kind, or long."""
    tensor = parts.get(end)
    if tensor is None or tensor.dtype != torch.uint8 or tensor.ndim != 1 or len(tensor) > 10_000:
        raise ValueError(f"{end} is missing or no text; accepted: JSON as uint8")
    return bytes(tensor.tolist())


def read_state(text: bytes, shape: tuple[int, int]) -> dict:
    """What bitsandbytes says of a matrix. Raises ValueError for what this reader does not have."""
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{NF4_STATE} is not readable JSON: {error}") from None
    wanted = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "shape": list(shape)}
    if isinstance(state, dict) and "nested_offset" in state:
        wanted["nested_blocksize"] = NESTED_BLOCK
        if type(state["nested_offset"]) is not float:
            raise ValueError(
                f"nested_offset: got {shown(state['nested_offset'])}; accepted: a float"
            )
    for key, value in wanted.items():
        got = state.get(key) if isinstance(state, dict) else None
        if got != value:
            raise ValueError(f"{key}: got {shown(got)}; accepted: {value}")
    return state


def check_table(parts: Parts, end: str, table: Tensor) -> None:
    """Raise ValueError unless the code book, [16] or [256], is the known one, up to the last
    bits.
    """
    given = expect(parts, end, tuple(table.shape), torch.float32)
    # one value of bitsandbytes' dynamic table differs in its last bit between versions of torch
    if not torch.allclose(given, table, rtol=1e-6, atol=0):
        raise ValueError(f"{end}: got another code book; accepted: that of {end.split('.')[-1]}")


# ---------------------------------------------------------------- gpt-oss


def mxfp4(parts: Parts, shape: tuple[int, int]) -> Mxfp4Weight:
    """One expert of gpt-oss: "blocks" [N, K / 32, 16] and "scales" [N, K / 32], both uint8. Raises
    ValueError for parts that do not fit.
    """
    rows, columns = shape
    if columns % MXFP4_BLOCK:
        raise ValueError(f"blocks: got {columns} columns; accepted: multiples of {MXFP4_BLOCK}")
    count = columns // MXFP4_BLOCK
    blocks = expect(parts, "blocks", (rows, count, MXFP4_BLOCK // 2), torch.uint8)
    scales = expect(parts, "scales", (rows, count), torch.uint8)
    return Mxfp4Weight(blocks.flatten(1), scales)
