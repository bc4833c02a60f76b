"""A LLaVA checkpoint from a folder: its decoder, and its eyes.

    decoder, eyes = load_llava("models/tiny-vision")

Two kinds of folders are read. A whole one has all weights, as transformers writes and reads it.
Ours has those of the tower and the projector alone, in eyes.safetensors, and its text_config names
the decoder's checkpoint ("_name_or_path"), because models/tiny need not be stored twice. A whole
folder is made of it by

    python -m reference.vision.checkpoint models/tiny-vision build/tiny-vision
"""

import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.deepseek import decoder_class
from lessons.toolbox.command import OneLineParser
from lessons.toolbox.model.arguments import shown
from lessons.toolbox.model.checkpoint import SMALL_FILES, WEIGHT_FILES, fill, find_folder
from lessons.toolbox.model.config_json import CheckpointError, read_config, read_json
from lessons.toolbox.model.stored import STORED_DTYPES, Stored, catalog, open_file
from reference.engine.model import default_place, finished, load_model
from reference.vision.config import VisionConfig, read_vision_config
from reference.vision.tower import Eyes

EYES = "eyes.safetensors"
# Whose parameters stand under which names: transformers has changed them, and reads all of these.
OF_DECODER = re.compile(r"^language_model\.(model\.)?|^(?=lm_head\.)")
OF_TOWER = re.compile(r"^vision_tower\.(vision_model\.)?")
OF_PROJECTOR = re.compile(r"^(?=multi_modal_projector\.)")


def load_llava(
    folder: str | os.PathLike,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    quantization: str | None = None,
) -> tuple[Decoder, Eyes]:
    """The decoder as load_model gives it, and the eyes on its device and in its dtype.
    quantization: of the decoder. Raises ValueError (CheckpointError for the checkpoint) in one
    line.
    """
    folder = Path(folder)
    config = read_vision_config(folder)
    if (folder / EYES).is_file():
        decoder = load_model(decoder_of(folder), device, dtype, quantization)
    elif quantization is not None:
        raise CheckpointError(
            f"quantization: got {shown(quantization)}; accepted: None for a whole LLaVA folder"
        )
    else:
        decoder = load_own_decoder(folder, device, dtype)
    if decoder.config.hidden_size != config.text_size:
        raise CheckpointError(
            f"{folder}: its text_config has hidden_size {config.text_size}, and its decoder "
            f"{decoder.config.hidden_size}"
        )
    return decoder, load_eyes(folder, config, decoder.device, decoder.dtype)


def decoder_of(folder: Path) -> str:
    """The checkpoint that text_config names. Raises CheckpointError if it names none."""
    name = read_json(folder / "config.json")["text_config"].get("_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{folder} holds {EYES}, and its text_config no '_name_or_path'")
    return name


def load_own_decoder(
    folder: Path, device: torch.device | str | None, dtype: torch.dtype | str | None
) -> Decoder:
    """The decoder of a whole folder."""
    device, dtype = default_place(device, dtype)
    config = read_config(folder, "text_config")
    stored = under(whole_catalog(folder), OF_DECODER)
    with torch.device("meta"):
        model = decoder_class(config)(config)
    fill(model, folder, stored, {}, device, dtype)
    return finished(model.eval().requires_grad_(False), device)


def whole_catalog(folder: Path) -> dict[str, Stored]:
    """All tensors of a folder, by their names without "model."."""
    folder = find_folder(folder, SMALL_FILES + WEIGHT_FILES)
    return catalog(folder, (*STORED_DTYPES, "I64"))  # I64: position_ids of old files


def under(stored: dict[str, Stored], prefix: re.Pattern) -> dict[str, Stored]:
    """The tensors of one part, by their names in it."""
    return {
        prefix.sub("", key, count=1): entry
        for key, entry in stored.items()
        if prefix.match(key) and not key.endswith("position_ids")
    }


def load_eyes(folder: Path, config: VisionConfig, device: torch.device, dtype: torch.dtype) -> Eyes:
    """Tower and projector. Raises CheckpointError for tensors that are missing, of another shape,
    or of no use.
    """
    with torch.device("meta"):
        eyes = Eyes(config)
    if (folder / EYES).is_file():
        with open_file(folder / EYES) as tensors:
            stored = {
                name: Stored(folder / EYES, name, tensors.get_slice(name).get_shape(), "")
                for name in tensors.keys()  # noqa: SIM118 (safe_open is no mapping)
            }
    else:
        stored = whole_catalog(folder)
    found = {f"vision_tower.{key}": entry for key, entry in under(stored, OF_TOWER).items()}
    found |= under(stored, OF_PROJECTOR)
    wanted = {name: list(tensor.shape) for name, tensor in eyes.state_dict().items()}
    for name in sorted({*wanted, *found}):
        have = list(found[name].shape) if name in found else None
        if have != wanted.get(name):
            raise CheckpointError(
                f"tensor {name} in {folder}: got shape {have}; accepted: {wanted.get(name)}"
            )
    weights = {}
    for file in {entry.file for entry in found.values()}:
        with open_file(file) as tensors:
            for name, entry in found.items():
                if entry.file == file:
                    # a copy, because an uncast tensor would stay a view of the file
                    tensor = tensors.get_tensor(entry.name)
                    weights[name] = tensor.to(device=device, dtype=dtype, copy=True)
    eyes.load_state_dict(weights, assign=True)
    return eyes.eval().requires_grad_(False)


def write_whole(folder: str | os.PathLike, target: str | os.PathLike) -> Path:
    """Write a whole LLaVA folder, which transformers loads, from one that names its decoder.
    Returns the target. Raises CheckpointError.
    """
    folder, target = Path(folder), Path(target)
    if not (folder / EYES).is_file():
        raise CheckpointError(
            f"{folder} holds no {EYES}; accepted: a folder that names its decoder"
        )
    target.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copyfile(file, target / file.name)
    raw = read_json(folder / "config.json")
    raw["text_config"].pop("_name_or_path")
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    named = {}
    decoder = find_folder(decoder_of(folder), SMALL_FILES + WEIGHT_FILES)
    for key, entry in catalog(decoder).items():
        prefix = "language_model." if key.startswith("lm_head.") else "language_model.model."
        with open_file(entry.file) as tensors:
            named[prefix + key] = tensors.get_tensor(entry.name)
    with open_file(folder / EYES) as tensors:
        named |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    save_file(named, target / "model.safetensors", {"format": "pt"})
    return target


def main(arguments: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m reference.vision.checkpoint")
    parser.add_argument("folder", help=f"that holds {EYES}")
    parser.add_argument("target", help="to be written")
    found = parser.parse_args(arguments)
    try:
        print(write_whole(found.folder, found.target))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
