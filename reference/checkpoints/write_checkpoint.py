"""A decoder with quantized layers as a checkpoint that other programs read.

    save_quantized(model, "models/tiny", "build/tiny-gptq", "gptq")

One safetensors file, a config.json with the quantization_config that the format's own library
writes, and the tokenizer. Codes only move, so a reader of the file gets the same matrices. Inputs
that lesson 19's transform rotates are written as the transform_config of compressed-tensors.
"""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.linear import QuantizedLinear
from lessons.l19_kv_quantization.activations.hadamard import hadamard, rotate, rotate_by_matrix
from lessons.l19_kv_quantization.activations.rotations import RotatedInput
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.checkpoint import SMALL_FILES, find_folder
from lessons.toolbox.model.config_json import CheckpointError, read_json
from lessons.toolbox.model.places import moves_rows, stored_name
from reference.checkpoints.written_formats import FORMATS, LEFT_ALONE, Weights, rounding_inputs

COMPRESSED = "compressed-tensors"


def save_quantized(
    model: Decoder, source: str, folder: str | Path, form: str, activations: str | None = None
) -> None:
    """Write `model` into a new folder. source: the checkpoint that it was made from, whose
    config.json and tokenizer are copied. form: one of FORMATS. activations: "int8" or "fp8", what
    every quantized layer's inputs shall be rounded to; None: they are not. Raises ValueError for
    what the format cannot hold, and CheckpointError for a family whose checkpoints merge matrices.
    """
    if form not in FORMATS:
        refuse("format", form, ", ".join(FORMATS))
    if activations is not None and form != COMPRESSED:
        refuse("format", form, f"{COMPRESSED}, for inputs of 8 bits")
    folder = check_new_folder(folder)
    weights = quantized_layers(model)
    names = tensor_names(model)
    tensors = plain_tensors(model, names)
    if not weights:
        raise ValueError("model: got no quantized layer; accepted: one that `quantized` returned")
    if any(part.rounds_inputs for part in quantized_parts(model).values()):
        refuse("model", "layers that round inputs as their checkpoint asks", "others")
    plan = FORMATS[form](weights)
    layout, config = plan if activations is None else rounding_inputs(plan, activations)
    turned = rotated_inputs(model)
    if turned and form != COMPRESSED:
        refuse("format", form, f"{COMPRESSED}, for a model with rotated inputs")
    if turned:
        matrices, config["transform_config"] = as_transforms(turned)
        tensors |= matrices
    left_alone = [
        f"model.{name_of(name, model)}".replace("model.lm_head", "lm_head")
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
    return {name: part.quantized for name, part in quantized_parts(model).items()}


def quantized_parts(model: Decoder) -> dict[str, QuantizedLinear]:
    """The layers themselves, by these names."""
    return {
        f"model.{name_of(name, model)}": part
        for name, part in model.named_modules()
        if isinstance(part, QuantizedLinear)
    }


def name_of(name: str, model: Decoder) -> str:
    """What a checkpoint of the family calls a part of the decoder, without "model."; a layer whose
    inputs are rotated has the name of the whole.
    """
    return stored_name(name.replace(".linear", ""), model.config)


def rotated_inputs(model: Decoder) -> dict[str, int]:
    """The layers whose inputs are rotated, by their names in a checkpoint, and how many inputs each
    has. Raises ValueError for a rotation that is not lesson 19's.
    """
    found = {}
    for name, part in model.named_modules():
        if isinstance(part, RotatedInput):
            if part.rotate not in (rotate, rotate_by_matrix):
                refuse(f"{name}.rotate", type(part.rotate).__name__, "lesson 19's rotate")
            found[f"model.{name_of(name, model)}"] = part.linear.in_features
    return found


def as_transforms(turned: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the transform_config of `rotated_inputs`: a rotation for each size, whose
    matrix is beside its first layer. One that is no power of two is a random one to the library.
    """
    tensors, groups = {}, {}
    for name, n in turned.items():
        group = f"inputs_{n}"
        if group not in groups:
            kind = "random-hadamard" if n & (n - 1) else "hadamard"
            places = [{"location": "input", "inverse": False}]
            places += [{"location": "weight_input", "inverse": True}]
            apply = [place | {"targets": [], "ignore": []} for place in places]
            groups[group] = {"type": kind, "apply": apply, "randomize": False, "head_dim": None}
            tensors[f"{name}.{group}_input.weight"] = hadamard(n).T.float().contiguous()
        for place in groups[group]["apply"]:
            place["targets"].append(name)
    return tensors, {"config_groups": groups}


def tensor_names(model: Decoder) -> dict[str, str]:
    """{name of a tensor in the decoder: in a checkpoint}. Raises CheckpointError where a checkpoint
    keeps several in one, or rows of q and k in another order.
    """
    names = {}
    for name in model.state_dict():
        key = name_of(name, model)
        names[name] = key if key.startswith("lm_head") else f"model.{key}"
    linears = [n for n, part in model.named_modules() if isinstance(part, QuantizedLinear)]
    keys = Counter([*names.values(), *(name_of(name, model) for name in linears)])
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
