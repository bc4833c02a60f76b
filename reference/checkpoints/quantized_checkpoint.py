"""A quantized checkpoint as a decoder: every layer that is stored as codes keeps its codes, and the
rest is loaded as it always was.

    model = load_quantized("some/Llama-GPTQ")

Which layers are quantized is not looked up in a list: it is those whose marker is among the stored
tensors (layouts.py). config.json only says how to read them. Nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.deepseek import decoder_class
from lessons.l06_mla.gpt_oss import StackedExperts
from lessons.l18_weight_quantization.linear import Multiply, QuantizedLinear
from lessons.l18_weight_quantization.naive import dequantize_matmul
from lessons.l18_weight_quantization.weights import (
    Float8Weight,
    GroupedInt,
    Nvfp4Weight,
    QuantizedWeight,
)
from lessons.toolbox.model.checkpoint import (
    SMALL_FILES,
    WEIGHT_FILES,
    check_room,
    fill,
    find_folder,
    load_config,
)
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.model.placement import read_device, read_dtype
from lessons.toolbox.model.places import (
    Place,
    of_the_decoder,
    places_of,
    stored_name,
    turning_last,
)
from lessons.toolbox.model.stored import CODE_DTYPES, STORED_DTYPES, Stored, catalog
from reference.checkpoints.codes import KEPT_DENSE, Codes
from reference.checkpoints.float_layouts import is_tiled, mxfp4
from reference.checkpoints.inputs import Rounding
from reference.checkpoints.layouts import Parts
from reference.checkpoints.quantization_config import Says, StoredAs, read_layouts
from reference.checkpoints.quantized_experts import QuantizedExperts
from reference.checkpoints.transforms import Matrices, rotated

if TYPE_CHECKING:
    from lessons.l17_tree_speculation.heads.heads import MTPDraft

# a product of inputs that are rounded first: (matrix, rounding, product of numbers) -> the matrix
# as it takes it, and itself
Rounded = Callable[[QuantizedWeight, Rounding, Multiply], tuple[QuantizedWeight, Multiply]]


def load_quantized(
    name_or_path: str | os.PathLike,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    multiply: Multiply = dequantize_matmul,
    rounded: Rounded | None = None,
) -> Decoder:
    """A checkpoint with a quantization_config, by folder or hub name: GPTQ, AutoRound, AWQ,
    compressed-tensors (FP8, INT8, INT4, NVFP4), ModelOpt (FP8, NVFP4), fine-grained FP8,
    bitsandbytes (NF4, LLM.int8), gpt-oss in MXFP4.

    dtype: of what is not quantized. multiply: the product of a quantized layer. rounded: that of
    one whose inputs the checkpoint wants rounded; None keeps them as they are. Raises
    CheckpointError, in one line, for what cannot be read.
    """
    device, dtype = read_device(device), read_dtype(dtype)
    config = load_config(name_or_path)
    says = says_of(name_or_path, config)
    folder = find_folder(name_or_path, SMALL_FILES + WEIGHT_FILES)
    stored = catalog(folder, STORED_DTYPES + CODE_DTYPES)
    stored = of_the_decoder(stored, config)
    check_room(folder, len(stored), config)
    with torch.device("meta"):  # no memory until the weights arrive
        model = decoder_class(config)(config)
    fill_quantized(model, folder, stored, says, multiply, device, dtype, rounded)
    return model.eval().requires_grad_(False)


def load_quantized_mtp(
    name_or_path: str | os.PathLike, target: Decoder, multiply: Multiply = dequantize_matmul
) -> MTPDraft:
    """The MTP layer of such a checkpoint: lesson 17's load_mtp for codes."""
    from lessons.l17_tree_speculation.heads.mtp_files import find_mtp  # here: few models need it

    says = says_of(name_or_path, load_config(name_or_path))
    draft, folder, stored = find_mtp(name_or_path, target, STORED_DTYPES + CODE_DTYPES)
    fill_quantized(draft, folder, stored, says, multiply, target.device, target.dtype)
    return draft.eval().requires_grad_(False)


def says_of(name_or_path: str | os.PathLike, config: ModelConfig) -> Says:
    """How the matrices of a checkpoint may be stored. Raises CheckpointError."""
    if config.quantization_config is None:
        raise CheckpointError(
            f"{name_or_path} has no quantization_config: load it with load_decoder"
        )
    try:
        return read_layouts(config.quantization_config)
    except ValueError as error:
        raise CheckpointError(f"{name_or_path}: {error}") from error


def fill_quantized(
    model: Decoder | MTPDraft,
    folder: Path,
    stored: dict[str, Stored],
    says: Says,
    multiply: Multiply,
    device: torch.device,
    dtype: torch.dtype,
    rounded: Rounded | None = None,
) -> None:
    """Fill what is on the meta device; its quantized matrices keep their codes. Raises
    CheckpointError.
    """
    codes = Codes(stored)
    given = replace_linears(model, codes, says, multiply, device, rounded)
    replace_experts(model, codes, multiply, device)
    matrices = Matrices(codes, says.turns, device)
    plain = {key: entry for key, entry in stored.items() if key not in codes.taken}
    for entry in plain.values():
        if entry.dtype not in STORED_DTYPES:
            raise CheckpointError(
                f"tensor {entry.name} in {entry.file} is {entry.dtype}, and no layer that the "
                f"quantization_config describes is stored so"
            )
    given = {name: tensor.to(device, dtype) for name, tensor in given.items()}
    fill(model, folder, plain, given, device, dtype)
    try:
        rotated(model, says.turns, matrices, codes)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def replace_linears(
    model: Decoder,
    codes: Codes,
    says: Says,
    multiply: Multiply,
    device: torch.device,
    rounded: Rounded | None,
) -> dict[str, Tensor]:
    """Every nn.Linear of the model that is stored as codes becomes a QuantizedLinear. Returns what
    was read as numbers instead, [N, K] each, by its name in the model. Raises CheckpointError that
    names the layer.
    """
    places, given = places_of(model), {}
    rows = {}  # of each stored matrix; several of the decoder's may lie in one (Phi-3)
    for place in places.values():
        rows[place.key] = place.first + place.shape[0]
    for name, linear in list(model.named_modules()):
        if type(linear) is not nn.Linear:
            continue
        place = places[f"{name}.weight"]
        key = place.key.removesuffix("weight")
        layer = key.removesuffix(".")
        if layer not in codes.names:
            continue
        try:
            said = says.of(codes.names[layer]) or StoredAs([])
            layout = next((x for x in said.layouts if key + x.marker in codes), None)
            if layout is None:
                continue
            weight = layout.read(codes.parts(key, layout.ends), (rows[place.key], place.shape[1]))
            weight = rows_of(weight, place, name, model).to(device)
            beside, product = codes.parts(key, layout.unread), multiply
            rounding = None
            if said.inputs is not None and rounded is not None and not name.endswith(KEPT_DENSE):
                rounding = said.inputs.read(beside)
            if rounding is not None:
                weight, product = rounded(weight, rounding.to(device), multiply)
        except ValueError as error:
            raise CheckpointError(f"{codes.where(key)}: {error}") from error
        if linear.bias is None:
            codes.skip_empty_bias(key)
        if name.endswith(KEPT_DENSE):
            given[f"{name}.weight"] = weight.dequantize()
        else:
            model.set_submodule(
                name, QuantizedLinear(weight, linear.bias, product, rounding is not None)
            )
    return given


def rows_of(weight: QuantizedWeight, place: Place, name: str, model: Decoder) -> QuantizedWeight:
    """The rows of a stored matrix that are the decoder's matrix `name`, in its order. Raises
    ValueError for a format whose rows cannot be taken apart.
    """
    every = torch.arange(weight.shape[0])
    wanted = every[place.first : place.first + place.shape[0], None]
    wanted = turning_last(f"{name}.weight", wanted, model.config)[:, 0]
    if torch.equal(wanted, every):
        return weight
    if isinstance(weight, GroupedInt):
        zeros = None if weight.zeros is None else weight.zeros[wanted]
        return replace(
            weight, codes=weight.codes[wanted], scales=weight.scales[wanted], zeros=zeros
        )
    if isinstance(weight, Float8Weight) and not is_tiled(weight):
        scales = weight.scales if len(weight.scales) == 1 else weight.scales[wanted]
        return Float8Weight(weight.values[wanted], scales)
    if isinstance(weight, Nvfp4Weight):
        return replace(weight, codes=weight.codes[wanted], scales=weight.scales[wanted])
    raise ValueError(
        f"{type(weight).__name__}: got a matrix that holds several of the decoder's; accepted: "
        "formats with a scale for rows or their groups"
    )


def replace_experts(model: Decoder, codes: Codes, multiply: Multiply, device: torch.device) -> None:
    """Every StackedExperts that is stored in MXFP4 becomes a QuantizedExperts. Raises
    CheckpointError that names the layer.
    """
    for name, experts in list(model.named_modules()):
        # stored_name leaves a name without a tensor behind it as it is
        key = stored_name(name, model.config)
        if type(experts) is not StackedExperts or f"{key}.down_proj_blocks" not in codes:
            continue
        matrices = []
        for part in ("gate_up_proj", "down_proj"):
            stack = getattr(experts, part)  # [E, in, out]
            parts = codes.parts(f"{key}.{part}_", ("blocks", "scales"))
            try:
                matrices.append(read_experts(parts, stack.shape, device))
            except ValueError as error:
                raise CheckpointError(f"{codes.where(f'{key}.{part}')}: {error}") from error
        model.set_submodule(name, QuantizedExperts(experts, *matrices, multiply))


def read_experts(parts: Parts, shape: torch.Size, device: torch.device) -> list[QuantizedWeight]:
    """A matrix for each expert. shape: [E, in, out] of the stack. Raises ValueError."""
    num_experts, columns, rows = shape
    for end in ("blocks", "scales"):
        if end not in parts or len(parts[end]) != num_experts:
            got = list(parts[end].shape) if end in parts else None
            raise ValueError(f"{end}: got {got}; accepted: {num_experts} experts")
    return [
        mxfp4({end: part[expert] for end, part in parts.items()}, (rows, columns)).to(device)
        for expert in range(num_experts)
    ]
