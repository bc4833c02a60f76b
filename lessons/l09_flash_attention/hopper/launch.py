"""What the launches of this lesson's Gluon kernels have in common."""

import torch
from torch import Tensor

from lessons.l09_flash_attention.arguments import check_heads, check_options
from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.measure.device import has_triton

if has_triton():
    from triton.experimental.gluon import language as gl
else:
    gl = triton.experimental.gluon.language


def check_launch(q, k, v, softmax_scale: float | None, causal: bool, generation: int) -> None:
    """q: [T, Hq, D]; k, v: [Tk, Hkv, D], dense; generation: of GPUs, 9 for compute capability 9.0.
    Raises ValueError for what a Gluon kernel of this lesson does not take.
    """
    check_sizes(q, k, v, softmax_scale, causal, generation)
    if not all(x.is_contiguous() for x in (q, k, v)):
        raise ValueError(
            f"q, k, v: got {[tuple(x.shape) for x in (q, k, v)]} with strides "
            f"{[x.stride() for x in (q, k, v)]}; accepted: dense"
        )


def check_sizes(q, k, v, softmax_scale: float | None, causal: bool, generation: int) -> None:
    """As check_launch, for a launch that makes dense tensors of its own."""
    check_heads(q, k, v, (torch.bfloat16,))
    check_options(q, softmax_scale, causal, None, None, None, None)
    head_dim = q.shape[2]
    if head_dim not in (64, 128) or v.shape[2] != head_dim or not len(k):
        raise ValueError(
            f"q, k, v: got {[tuple(x.shape) for x in (q, k, v)]}; "
            "accepted: head size 64 or 128 for all, one key or more"
        )
    if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] != generation:
        raise ValueError(
            f"q: got {q.device}; accepted: a GPU of compute capability {generation}.0, a CPU"
        )


def tiles_of(x: Tensor, rows: int):
    """A TMA descriptor of [T, H · D] with tiles of [rows, D]. x: [T, H, D]."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    tile = [rows, x.shape[2]]
    dtype = gl.float8e4nv if x.dtype == torch.float8_e4m3fn else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(tile, dtype)
    return TensorDescriptor.from_tensor(x.flatten(1), tile, layout)
