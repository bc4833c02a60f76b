"""Any checkpoint that the course reads: a folder of numbers, a folder of codes, or a .gguf file.

stored_method("some/Llama-GPTQ")      # "gptq"
model = load_any("some/Llama-GPTQ")   # by load_decoder, load_quantized or load_gguf
"""

import os

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.deepseek import load_decoder
from lessons.l18_weight_quantization.linear import Multiply
from lessons.l18_weight_quantization.naive import dequantize_matmul
from lessons.toolbox.model.checkpoint import load_config
from reference.checkpoints.gguf.gguf_file import is_gguf
from reference.checkpoints.gguf.gguf_model import load_gguf
from reference.checkpoints.quantized_checkpoint import load_quantized

GGUF = "gguf"


def stored_method(name_or_path: str | os.PathLike) -> str | None:
    """How a checkpoint is quantized: "gguf" for a .gguf file, which is not opened, else the
    quant_method of its config.json. None for numbers. Raises CheckpointError.
    """
    if is_gguf(name_or_path):
        return GGUF
    found = load_config(name_or_path).quantization_config
    return None if found is None else found["quant_method"]


def load_any(
    name_or_path: str | os.PathLike,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    multiply: Multiply = dequantize_matmul,
    gguf_options: dict | None = None,
) -> Decoder:
    """The model, by folder, hub name or .gguf file; quantized layers keep their codes.

    dtype: of what is not quantized. multiply: the product of a quantized layer of a folder;
    gguf_options: `multiply` and `prepare` of load_gguf, for a file. Raises CheckpointError.
    """
    stored = stored_method(name_or_path)
    if stored is None:
        return load_decoder(name_or_path, device, dtype)
    if stored == GGUF:
        return load_gguf(name_or_path, device, dtype, **(gguf_options or {}))
    return load_quantized(name_or_path, device, dtype, multiply)
