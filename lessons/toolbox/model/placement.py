"""Where a model lies and in which dtype it computes: arguments of every function that makes one."""

from contextlib import AbstractContextManager, nullcontext

import torch

from lessons.toolbox.model.arguments import refuse, shown

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def read_device(device: torch.device | str, *also: str) -> torch.device:
    """The device to place a model on: a CPU, a CUDA device that this machine has, or one of the
    types `also`. Raises ValueError.
    """
    try:
        found = torch.device(device) if isinstance(device, (str, torch.device)) else None
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda", *also):
        refuse("device", device, ", ".join(["cpu", "cuda or cuda:N", *also]))
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device: got {shown(str(device))}, PyTorch finds {torch.cuda.device_count()} CUDA "
            f"devices; accepted: cpu"
        )
    return found


def read_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of the weights, by itself or by its name. Raises ValueError for one that the
    decoders do not compute in.
    """
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        refuse("dtype", dtype, ", ".join(DTYPES))
    return found


def launching_on(device: torch.device) -> AbstractContextManager:
    """Inside it this thread launches kernels on the device, if that is a GPU. Triton needs it on a
    machine with several: it asks no tensor where it lies.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
