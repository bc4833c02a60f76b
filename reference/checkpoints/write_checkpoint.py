"""A decoder with quantized layers as a checkpoint that other programs read.

    save_quantized(model, "models/tiny", "build/tiny-gptq", "gptq")

One safetensors file, a config.json with the quantization_config that the format's own library
writes, and the tokenizer. Codes only move, so a reader of the file gets the same matrices.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.linear import QuantizedLinear
from lessons.l18_weight_quantization.weights import (
    Float8Weight,
    GroupedInt,
    Nf4Weight,
    QuantizedWeight,
)
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.checkpoint import SMALL_FILES, find_folder
from lessons.toolbox.model.config_json import CheckpointError, read_json
from lessons.toolbox.model.places import moves_rows, stored_name
from reference.checkpoints.float_layouts import (
    bnb_nf4,
    float_quantized,
    is_tiled,
    tiles_of,
)
from reference.checkpoints.layouts import Layout, awq, gptq, pack_quantized

Weights = dict[str, QuantizedWeight]  # by the layer's name in a checkpoint
Plan = tuple[Layout, dict[str, Any]]  # how to store a matrix, and what config.json says of it
TILED = {"strategy": "block", "block_structure": [128, 128]}


def save_quantized(model: Decoder, source: str, folder: str | Path, form: str) -> None:
    """Write `model` into a new folder. source: the checkpoint that it was made from, whose
    config.json and tokenizer are copied. form: one of FORMATS. Raises ValueError for matrices that
    the format cannot hold, and CheckpointError for a family whose checkpoints merge matrices.
    """
    if form not in FORMATS:
        refuse("format", form, ", ".join(FORMATS))
    folder = check_new_folder(folder)
    weights = quantized_layers(model)
    names = tensor_names(model)
    tensors = plain_tensors(model, names)
    if not weights:
        raise ValueError("model: got no quantized layer; accepted: one that `quantized` returned")
    layout, config = FORMATS[form](weights)
    left_alone = [
        f"model.{stored_name(name, model.config)}".replace("model.lm_head", "lm_head")
        for name, module in model.named_modules()
        if type(module) is nn.Linear or name == "lm_head"
    ]
    config |= {LEFT_ALONE[form]: left_alone}
    for name, weight in weights.items():
        for end, tensor in layout.write(weight).items():
            tensors[f"{name}.{end}"] = tensor.cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    # "pt" because transformers reads only files that say so
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    copy_small_files(find_folder(source, SMALL_FILES), folder, config)


def check_new_folder(folder: str | Path) -> Path:
    """The folder. Raises ValueError for a file, or a folder with something in it."""
    folder = Path(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        refuse("out", str(folder), "a folder that is empty or does not exist yet")
    return folder


def quantized_layers(model: Decoder) -> Weights:
    """The quantized matrices by the names that a checkpoint of the family gives their layers."""
    return {
        f"model.{stored_name(name, model.config)}": module.quantized
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def tensor_names(model: Decoder) -> dict[str, str]:
    """{name of a tensor in the decoder: in a checkpoint}. Raises CheckpointError where a checkpoint
    keeps several in one, or rows of q and k in another order.
    """
    names = {}
    for name in model.state_dict():
        key = stored_name(name, model.config)
        names[name] = key if key.startswith("lm_head") else f"model.{key}"
    linears = [n for n, part in model.named_modules() if isinstance(part, QuantizedLinear)]
    keys = Counter([*names.values(), *(stored_name(name, model.config) for name in linears)])
    if any(count > 1 for count in keys.values()):
        raise CheckpointError(
            f"model_type {model.config.model_type!r} cannot be written: its checkpoints keep "
            "several matrices in one tensor"
        )
    if moves_rows(model.config):
        raise CheckpointError(
            f"model_type {model.config.model_type!r} cannot be written: its checkpoints hold the "
            "coordinates of q and k in another order"
        )
    return names


def plain_tensors(model: Decoder, names: dict[str, str]) -> dict[str, Tensor]:
    """What is not quantized, of the shapes [N, K] and [N] that it has in the decoder: in 16 bits
    where that loses nothing, so that a model that was read from 16 bits is as small as before;
    scales that AWQ has folded into a norm stay as they are.
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor):
                tensor = tensor.to(dtype)
                break
        tensors[names[name]] = tensor.detach().cpu().contiguous()
    return tensors


def copy_small_files(source: Path, folder: Path, config: dict[str, Any]) -> None:
    """config.json with its quantization_config, and whatever else describes the checkpoint."""
    for pattern in SMALL_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    content = read_json(source / "config.json") | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- what config.json says


def one_kind(weights: Weights, kind: type, form: str) -> list:
    """The matrices. Raises ValueError unless all are of this class."""
    for name, weight in weights.items():
        if not isinstance(weight, kind):
            raise ValueError(
                f"format {form}: got {type(weight).__name__} in {name}; accepted: {kind.__name__}"
            )
    return list(weights.values())


def bits_and_group(weights: list[GroupedInt], form: str) -> tuple[int, int]:
    """What all matrices have in common: bits, and the group size, -1 for a scale a row. Raises
    ValueError if they differ.
    """
    bits = {weight.bits for weight in weights}
    sizes = {weight.group_size for weight in weights}
    if len(sizes) > 1 and all(weight.scales.shape[1] == 1 for weight in weights):
        sizes = {-1}
    if len(bits) > 1 or len(sizes) > 1:
        raise ValueError(
            f"format {form}: got bits {sorted(bits)}, group sizes {sorted(sizes)}; accepted: one "
            "of each for all layers"
        )
    return bits.pop(), sizes.pop()


def as_gptq(weights: Weights) -> Plan:
    """Whole numbers of 4 or 8 bits, in any order of columns. Raises ValueError."""
    matrices = one_kind(weights, GroupedInt, "gptq")
    bits, group_size = bits_and_group(matrices, "gptq")
    # Programs disagree on a zero of 0 in the older form, which stores zero − 1.
    older = not any(x.zeros is not None and bool((x.zeros == 0).any()) for x in matrices)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": any(x.order is not None for x in matrices),
        "sym": all(x.zeros is None for x in matrices),
        "lm_head": False,
        "checkpoint_format": "gptq" if older else "gptq_v2",
        "pack_dtype": "int32",
    }
    return gptq(bits, group_size, older), config


def as_awq(weights: Weights) -> Plan:
    """Whole numbers of 4 bits. Raises ValueError for others."""
    matrices = one_kind(weights, GroupedInt, "awq")
    bits, group_size = bits_and_group(matrices, "awq")
    if bits != 4 or any(x.order is not None for x in matrices):
        refuse("format", "awq", "matrices of 4 bits, without GPTQ's act-order")
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size}
    return awq(group_size), config | {"zero_point": True, "version": "gemm"}


def as_compressed(weights: Weights) -> Plan:
    """FP8, or whole numbers of 4 or 8 bits. Raises ValueError for others."""
    is_float = isinstance(next(iter(weights.values())), Float8Weight)
    layout, scheme = (compressed_floats if is_float else compressed_integers)(weights)
    group = {"targets": ["Linear"], "weights": scheme | {"dynamic": False}}
    group |= {"input_activations": None, "output_activations": None, "format": layout.name}
    config = {"quant_method": "compressed-tensors", "format": layout.name}
    config |= {"quantization_status": "compressed", "config_groups": {"group_0": group}}
    return layout, config


def compressed_floats(weights: Weights) -> Plan:
    """FP8. The second value is the scheme of compressed-tensors."""
    matrices = one_kind(weights, Float8Weight, "compressed-tensors")
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
    if any(is_tiled(x) for x in matrices):
        return float_quantized(tile=True), scheme | TILED
    per_row = any(x.scales.shape[0] > 1 for x in matrices)
    return float_quantized(), scheme | {"strategy": "channel" if per_row else "tensor"}


def compressed_integers(weights: Weights) -> Plan:
    """INT8 and INT4, packed. The second value is the scheme of compressed-tensors."""
    matrices = one_kind(weights, GroupedInt, "compressed-tensors")
    bits, group_size = bits_and_group(matrices, "compressed-tensors")
    per_row = all(x.scales.shape[1] == 1 for x in matrices)
    size, strategy = (None, "channel") if per_row else (group_size, "group")
    symmetric = all(x.zeros is None for x in matrices)
    scheme = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    scheme |= {"group_size": size, "strategy": strategy}
    return pack_quantized(bits, size, symmetric), scheme


def as_fp8(weights: Weights) -> Plan:
    """FP8 with scales for tiles of 128 × 128. Raises ValueError for others."""
    matrices = one_kind(weights, Float8Weight, "fp8")
    if not all(tuple(x.scales.shape) == tiles_of(x.shape) for x in matrices):
        refuse("format", "fp8", "scales for tiles of 128 × 128; compressed-tensors has one a row")
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return float_quantized("weight_scale_inv", tile=True), config | {
        "weight_block_size": [128, 128]
    }


def as_bitsandbytes(weights: Weights) -> Plan:
    """NF4. Raises ValueError for others."""
    matrices = one_kind(weights, Nf4Weight, "bitsandbytes")
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": any(x.nested_absmax is not None for x in matrices),
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
    }
    return bnb_nf4(), config


FORMATS: dict[str, Callable[[Weights], Plan]] = {
    "gptq": as_gptq,
    "awq": as_awq,
    "compressed-tensors": as_compressed,
    "fp8": as_fp8,
    "bitsandbytes": as_bitsandbytes,
}
LEFT_ALONE = {  # what each format calls the list of layers that it left alone
    "gptq": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "compressed-tensors": "ignore",
    "fp8": "modules_to_not_convert",
    "bitsandbytes": "llm_int8_skip_modules",
}
