"""Any checkpoint that the course reads: a folder of numbers, a folder of codes, or a .gguf file.

stored_method("some/Llama-GPTQ")      # "gptq"
model = load_any("some/Llama-GPTQ")   # by load_decoder, load_quantized or load_gguf
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.toolbox.model import checkpoint
from lessons.toolbox.model.config_json import read_json

if TYPE_CHECKING:
    from lessons.l18_weight_quantization.linear import Multiply
    from reference.checkpoints.quantized_checkpoint import Rounded

GGUF = "gguf"


def stored_method(name_or_path: str | os.PathLike) -> str | None:
    """How a checkpoint is quantized: "gguf" for a .gguf file, which is not opened, else the
    quant_method of its config.json. None for numbers. Raises CheckpointError.
    """
    if is_gguf(name_or_path):
        return GGUF
    found = checkpoint.load_config(name_or_path).quantization_config
    return None if found is None else found["quant_method"].removeprefix("intel/")  # AutoRound's


def load_any(
    name_or_path: str | os.PathLike,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    multiply: Multiply | None = None,
    gguf_options: dict | None = None,
    rounded: Rounded | None = None,
) -> Decoder:
    """The model, by folder, hub name or .gguf file; quantized layers keep their codes.

    dtype: of what is not quantized. multiply: the product of a quantized layer of a folder, None:
    the naive one; gguf_options: `multiply` and `prepare` of load_gguf, for a file. rounded: the
    product where a folder wants inputs rounded (load_quantized). Raises CheckpointError.
    """
    stored = stored_method(name_or_path)
    # Each reader, and each decoder but lesson 2's, is imported where a file asks for it.
    if stored is None:
        if checkpoint.load_config(name_or_path).is_plain:
            return Decoder.from_pretrained(name_or_path, device, dtype)
        from lessons.l06_mla.deepseek import load_decoder

        return load_decoder(name_or_path, device, dtype)
    if stored == GGUF:
        from reference.checkpoints.gguf.gguf_model import load_gguf

        return load_gguf(name_or_path, device, dtype, **(gguf_options or {}))
    from reference.checkpoints.quantized_checkpoint import load_quantized

    products = {} if multiply is None else {"multiply": multiply}
    return load_quantized(name_or_path, device, dtype, rounded=rounded, **products)


def load_any_tokenizer(name_or_path: str | os.PathLike):
    """Its tokenizer, as transformers' AutoTokenizer. Raises CheckpointError."""
    if not is_gguf(name_or_path):
        return checkpoint.load_tokenizer(name_or_path)
    from reference.checkpoints.gguf.gguf_file import read_gguf
    from reference.checkpoints.gguf.gguf_tokenizer import tokenizer_of

    return tokenizer_of(read_gguf(name_or_path))


def is_gguf(name_or_path: str | os.PathLike) -> bool:
    """Whether a model is named by a GGUF file, that is by a path that ends in .gguf."""
    is_path = isinstance(name_or_path, (str, os.PathLike))
    return is_path and os.fspath(name_or_path).lower().endswith(".gguf")


def llava_folder(name_or_path: str | os.PathLike) -> Path | None:
    """The folder of a checkpoint that sees; None for every other name, path or file."""
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return None
    folder = path if path.is_dir() else checkpoint.find_folder(name_or_path, checkpoint.SMALL_FILES)
    return folder if is_llava(folder) else None


def is_llava(folder: Path) -> bool:
    """Whether a checkpoint's folder holds a model that sees. A folder without config.json does
    not.
    """
    file = folder / "config.json"
    return file.is_file() and read_json(file).get("model_type") == "llava"
