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

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def load_model(
    name_or_path: str | os.PathLike,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
) -> Decoder:
    """A checkpoint as a decoder, ready to generate: Llama, Mistral, Qwen, DeepSeek-V2 and V3, by
    folder or hub name.

    device: default the GPU if there is one. dtype: a torch.dtype or its name; default the GPU's
    16-bit type, float32 on a CPU. On a GPU the result is lesson 7's fused twin. Raises ValueError
    (CheckpointError for the checkpoint) in one line.
    """
    device = read_device(device)
    model = load_decoder(os.fspath(name_or_path), device, read_dtype(dtype, device))
    return fused(model) if device.type == "cuda" else model


def read_device(device: torch.device | str | None) -> torch.device:
    """The device to load to; None is the default. Raises ValueError for one that this machine does
    not have.
    """
    try:
        found = default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device!r}; accepted: cpu, cuda or cuda:N")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device: got {str(device)!r}, PyTorch finds {torch.cuda.device_count()} CUDA devices; "
            f"accepted: cpu"
        )
    return found


def read_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The dtype of the weights; None is the device's default. Raises ValueError for one that the
    decoder does not compute in.
    """
    if dtype is None:
        return default_dtype() if device.type == "cuda" else torch.float32
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ValueError(f"dtype: got {dtype!r}; accepted: {', '.join(DTYPES)}")
    return found
