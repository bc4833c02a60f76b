"""What the safetensors files of a checkpoint hold, from their headers alone.

Source of the format: huggingface.co/docs/safetensors.
"""

import os
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from lessons.toolbox.model.arguments import shown
from lessons.toolbox.model.config_json import CheckpointError, read_json

STORED_DTYPES = ("F64", "F32", "F16", "BF16")
# what the codes and the scales of quantized matrices are stored in, beside these
CODE_DTYPES = ("U8", "I8", "I32", "I64", "F8_E4M3", "F8_E5M2", "F8_E8M0")


class Stored(NamedTuple):
    file: Path
    name: str  # in the file
    shape: list[int]
    dtype: str  # the file's name of it


def shards_of(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or those that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        files = sorted(folder.iterdir())
        pickles = [file.name for file in files if file.suffix in (".bin", ".pt", ".pth")]
        why = ""
        if pickles:
            why = f"; {pickles[0]} is a pickle, which may run any code when read, and stays closed"
        raise CheckpointError(
            f"{folder} holds neither model.safetensors nor model.safetensors.index.json{why}"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} lacks the key 'weight_map' (an object: tensor to file)")
    shards, files = [], os.listdir(folder)
    for name in dict.fromkeys(map(str, weight_map.values())):
        if name not in files:
            raise CheckpointError(f"{index} names the shard {shown(name)}, not a file of {folder}")
        shards.append(folder / name)
    return shards


def open_file(file: Path) -> safe_open:
    """The file, to be read tensor by tensor. Raises CheckpointError for one that is damaged."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        said = f"{file} is not a complete safetensors file ({error}); fetch it again"
        raise CheckpointError(said) from error


def catalog(folder: Path, dtypes: tuple[str, ...] = STORED_DTYPES) -> dict[str, Stored]:
    """Every stored tensor by its name without the prefix "model." ("backbone." in
    Nemotron-H's). Raises CheckpointError, for one
    of another dtype, too.
    """
    stored: dict[str, Stored] = {}
    for file in shards_of(folder):
        with open_file(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                key = name.removeprefix("model.").removeprefix("backbone.")
                if key.endswith("rotary_emb.inv_freq"):
                    # a buffer that old checkpoints hold; the decoder computes it from the config
                    continue
                header = tensors.get_slice(name)
                dtype = header.get_dtype()
                if dtype not in dtypes:
                    raise CheckpointError(
                        f"tensor {name} in {file} is {dtype}; supported: {', '.join(dtypes)}"
                    )
                if key in stored:
                    raise CheckpointError(
                        f"tensor {name} is in {stored[key].file.name} and in {file.name} of "
                        f"{folder}"
                    )
                stored[key] = Stored(file, name, header.get_shape(), dtype)
    return stored
