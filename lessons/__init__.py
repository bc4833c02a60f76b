"""The Inference Ladder. Importing this package decides where Triton kernels run, before any module
imports Triton.

Triton reads TRITON_INTERPRET when a kernel is decorated, and decorates its own library when it is
imported. So on a machine without a usable CUDA device the variable must be set first: then every
kernel of the course runs in Triton's interpreter. A value that you set yourself stays.
"""

import ctypes
import os
import sys
import warnings


def _cuda_is_usable() -> bool:
    """Whether PyTorch can reach a CUDA device. Without NVIDIA's driver the answer takes no import
    of torch (over a second).
    """
    try:
        # loading it initialises nothing
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    # Counting devices through NVML, because initialising CUDA here would break every process forked
    # later.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


if sys.argv[:1] == ["-m"]:  # `python -m lessons…`: its libraries are imported next, for seconds
    from lessons.toolbox.command import say_interrupted

    sys.excepthook = say_interrupted

# LADDER_CHIP: kernels are compiled for this chip, and toolbox.gpu runs what the compiler made.
runs_compiled = bool(os.environ.get("LADDER_CHIP"))
if "TRITON_INTERPRET" not in os.environ and not runs_compiled and not _cuda_is_usable():
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton" in sys.modules:
        warnings.warn(
            "triton was imported before lessons, too late to switch its interpreter on, and this "
            "machine has no CUDA device: no kernel can run. Put `import lessons` first "
            "(transformers imports triton too).",
            RuntimeWarning,
            stacklevel=2,
        )
