"""Some rows and columns of a quantized matrix, and the part of a quantized model that a rank holds.

Codes only move, so a rank's numbers are those of the whole matrix. What the format has in common
for several numbers has to be whole in each part: a tile of FP8, 32 numbers of MXFP4, 16 of
NVFP4, a block of GGUF. Groups of whole numbers may be cut, because both halves keep the scale.
"""

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import NamedTuple

import torch
from torch import nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.gguf.gguf_blocks import FORMATS, GgufWeight
from lessons.l18_weight_quantization.linear import Multiply, QuantizedLinear
from lessons.l18_weight_quantization.weights import (
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    TILE,
    Float8Weight,
    GroupedInt,
    Mxfp4Weight,
    Nvfp4Weight,
    QuantizedWeight,
    pack,
    unpack,
)
from lessons.l19_kv_quantization.activations.rotations import RotatedInput, RotatedOutput
from lessons.l20_parallelism.optimized import finish, new_part, own_slices
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Links
from reference.checkpoints.gguf.gguf_linear import GgufEmbedding
from reference.checkpoints.inputs import Rounding
from reference.weights.activations import rounded_product

SMALLEST_GROUP = 16  # of numbers that share a scale, as the kernels read them


def cut(weight: QuantizedWeight, rows: slice, columns: slice) -> QuantizedWeight:
    """weight: [N, K] -> these rows and columns of it. Raises ValueError where the cut goes through
    what has to stay whole.
    """
    if (rows, columns) == tuple(slice(0, length) for length in weight.shape):
        return weight
    for kind, of_kind in CUTS.items():
        if isinstance(weight, kind):
            return of_kind(weight, rows, columns)
    kind = type(weight).__name__
    raise ValueError(f"{kind}: its blocks run across rows; accepted: matrices that are not cut")


def cut_grouped(weight: GroupedInt, rows: slice, columns: slice) -> GroupedInt:
    """Groups at the edges of the cut become smaller ones with the same scale."""
    if weight.order is not None:
        raise ValueError("desc_act: got true; accepted: false where matrices are cut")
    size = gcd(weight.group_size, columns.start, columns.stop)
    if size < SMALLEST_GROUP:
        raise ValueError(
            f"group_size: columns {columns.start} to {columns.stop} of groups of "
            f"{weight.group_size} leave groups of {size}; accepted: {SMALLEST_GROUP} or more"
        )
    codes = unpack(weight.codes[rows], weight.bits, weight.group_size).flatten(1)[:, columns]
    groups = slice(columns.start // size, columns.stop // size)

    def of_groups(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        return x[rows].repeat_interleave(weight.group_size // size, 1)[:, groups].contiguous()

    return replace(
        weight,
        codes=pack(codes.unflatten(-1, (-1, size)), weight.bits).contiguous(),
        scales=of_groups(weight.scales),
        zeros=of_groups(weight.zeros),
        group_size=size,
    )


def cut_float8(weight: Float8Weight, rows: slice, columns: slice) -> Float8Weight:
    """With a scale for the whole, for rows, or for tiles."""
    scales, (num_rows, _) = weight.scales, weight.shape
    if scales.shape == (num_rows, 1) and num_rows > 1:
        scales = scales[rows]
    elif scales.shape != (1, 1):
        rows_of, columns_of = (in_blocks(one, TILE, "FP8") for one in (rows, columns))
        scales = scales[rows_of, columns_of]
    return Float8Weight(weight.values[rows, columns].contiguous(), scales.contiguous())


def cut_mxfp4(weight: Mxfp4Weight, rows: slice, columns: slice) -> Mxfp4Weight:
    """Whole blocks of 32."""
    blocks = in_blocks(columns, MXFP4_BLOCK, "MXFP4")
    bytes_of = slice(columns.start // 2, columns.stop // 2)
    codes, exponents = weight.codes[rows, bytes_of], weight.exponents[rows, blocks]
    return Mxfp4Weight(codes.contiguous(), exponents.contiguous())


def cut_nvfp4(weight: Nvfp4Weight, rows: slice, columns: slice) -> Nvfp4Weight:
    """Whole blocks of 16; the scale of the matrix is that of each part."""
    blocks = in_blocks(columns, NVFP4_BLOCK, "NVFP4")
    bytes_of = slice(columns.start // 2, columns.stop // 2)
    codes, scales = weight.codes[rows, bytes_of], weight.scales[rows, blocks]
    return replace(weight, codes=codes.contiguous(), scales=scales.contiguous())


def cut_gguf(weight: GgufWeight, rows: slice, columns: slice) -> GgufWeight:
    """Whole blocks of the file."""
    kind = FORMATS[weight.format]
    blocks = in_blocks(columns, kind.values, weight.format)
    bytes_of = slice(blocks.start * kind.bytes, blocks.stop * kind.bytes)
    return GgufWeight(weight.blocks[rows, bytes_of].contiguous(), weight.format)


CUTS = {
    GroupedInt: cut_grouped,
    Float8Weight: cut_float8,
    Mxfp4Weight: cut_mxfp4,
    Nvfp4Weight: cut_nvfp4,
    GgufWeight: cut_gguf,
}


def in_blocks(of: slice, size: int, name: str) -> slice:
    """The blocks of `size` that a slice has. Raises ValueError if it has half of one."""
    if of.start % size or of.stop % size:
        raise ValueError(
            f"{name}: got a part from {of.start} to {of.stop}; accepted: multiples of {size}, "
            f"because {size} numbers have something in common"
        )
    return slice(of.start // size, of.stop // size)


class Noted(NamedTuple):
    """In the place of a product that rounds its inputs, until the matrix is cut: how, and the
    product of numbers.
    """

    rounding: Rounding
    multiply: Multiply


def noted(
    weight: QuantizedWeight, rounding: Rounding, multiply: Multiply
) -> tuple[QuantizedWeight, Multiply]:
    """In the place of `rounded_product`, for matrices that are still to be cut."""
    return weight, Noted(rounding, multiply)


def shard_quantized(
    model: Decoder, links: Links, expert_parallel: bool, device: torch.device, multiply
) -> Decoder:
    """Lesson 20's `shard` for a model with quantized layers, whose roundings of inputs are `noted`:
    this rank's part, on a device. multiply: of a quantized layer there; None: as it is. Raises
    ValueError.
    """
    config = model.config
    part, whole = new_part(config, links, expert_parallel), model.state_dict()
    if isinstance(
        model.embed_tokens, GgufEmbedding
    ):  # as numbers, because ranks look up their rows
        numbers = model.embed_tokens.quantized.dequantize()
        whole["embed_tokens.weight"] = numbers.to(model.embed_tokens.dtype)

    def own(name: str, shape: torch.Size) -> tuple[slice, ...]:
        whose = [one for one in name.split(".") if one != "linear"]  # of a layer that is rotated
        return own_slices(config, ".".join(whose), shape, links, expert_parallel)

    kept = {name for name, _ in part.named_modules()}
    for name, layer in model.named_modules():
        if name not in kept:
            continue
        if isinstance(layer, (RotatedInput, RotatedOutput)):
            of_part = rotated_part(name, layer, part.get_submodule(name), own, device)
            kept.add(f"{name}.linear")
        elif isinstance(layer, QuantizedLinear):
            of_part = quantized_part(name, layer, own, links.tensor, device, multiply)
        else:
            continue
        part.set_submodule(name, of_part)
    weights = {}
    for name in part.state_dict():
        index = own(name, whole[name].shape)
        weights[name] = whole[name][index].to(device, copy=True)
    return finish(part, weights, config, links, expert_parallel)


def quantized_part(
    name: str, layer: QuantizedLinear, own: Callable, shards: Group, device: torch.device, multiply
) -> QuantizedLinear:
    """This rank's part of a layer. own(name, shape): its slices of a tensor. shards: the ranks that
    have the others. Others: shard_quantized's. Raises ValueError.
    """
    shape, product = layer.quantized.shape, layer.multiply
    slices = own(f"{name}.weight", shape)
    try:
        codes = cut(layer.quantized, *slices).to(device)
    except ValueError as error:
        raise ValueError(f"{name} in parts: {error}") from None
    if isinstance(product, Noted):
        rounding, numbers = product.rounding.to(device), multiply or product.multiply
        ranks = None if slices[1] == slice(0, shape[1]) else shards
        codes, product = rounded_product(codes, rounding, numbers, ranks)
    else:
        product = multiply or product
    bias = layer.bias
    if bias is not None:  # as large as this rank's rows; its numbers come later
        index = own(f"{name}.bias", bias.shape)
        bias = nn.Parameter(bias[index], requires_grad=False)
    return QuantizedLinear(codes, bias, product, layer.rounds_inputs)


def rotated_part(
    name: str,
    layer: RotatedInput | RotatedOutput,
    linear: nn.Module,
    own: Callable,
    device: torch.device,
) -> RotatedInput | RotatedOutput:
    """`linear`, this rank's part of a layer, rotated as the whole one. own: as in quantized_part.
    Raises ValueError for a part that has some of the numbers that are rotated together.
    """
    shape, is_input = (layer.out_features, layer.in_features), isinstance(layer, RotatedInput)
    mine, together = own(f"{name}.weight", shape)[is_input], layer.rotate.n
    if mine.start % together or mine.stop % together:
        side, whose = "inputs" if is_input else "outputs", name.replace(".linear", "")
        raise ValueError(
            f"transform_config of {whose}: got {together} {side} that are rotated together, and a "
            f"part with those from {mine.start} to {mine.stop}; accepted: parts that have all of "
            "them"
        )
    return type(layer)(linear, layer.rotate.to(device))
