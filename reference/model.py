"""The model that the engine runs: any supported checkpoint, in the class that its config asks for,
fused on a GPU.

    model = load_model("models/tiny")                      # the GPU if there is one, else the CPU
    model = load_model("Qwen/Qwen3-0.6B", dtype="bfloat16")
"""

import os

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.deepseek import load_decoder
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.model.placement import read_device


def load_model(
    name_or_path: str | os.PathLike,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
) -> Decoder:
    """A checkpoint as a decoder, ready to generate: Llama, Mistral, Mixtral, Qwen, Qwen3-MoE, gpt-oss,
    Phi-3, Gemma 2 and 3, DeepSeek-V2 and V3, by folder or hub name.

    device: default the GPU if there is one. dtype: a torch.dtype or its name; default the GPU's
    16-bit type, float32 on a CPU. On a GPU the result is lesson 7's fused twin. Raises ValueError
    (CheckpointError for the checkpoint) in one line.
    """
    device = default_device() if device is None else read_device(device)
    if dtype is None:
        dtype = default_dtype() if device.type == "cuda" else torch.float32
    model = load_decoder(name_or_path, device, dtype)
    return fused(model) if device.type == "cuda" else model
