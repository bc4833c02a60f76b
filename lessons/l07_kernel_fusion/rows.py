"""What the kernels of this lesson share: which tensors are rows, how many rows a program takes, and
where a norm rounds.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_one_device
from lessons.toolbox.kernels.triton_ import tl, triton

# values that one program holds: 16 for each thread of 32 warps; 32 a thread would spill on some
# chips
MAX_ROW = 16384
# values of a program: 16 for each thread of 4 warps, two loads of 16 bytes in 16 bits
SHORTEST_TILE = 2048
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def weighted(wide, mean_square, weight, eps, dtype: tl.constexpr, GEMMA: tl.constexpr):
    """wide: [R, N] float32, mean_square: [R, 1], weight: [1, N] -> the norm's output in `dtype`."""
    normed = wide * tl.rsqrt(mean_square + eps)
    if GEMMA:
        # Gemma rounds after the weight
        out = normed * (1.0 + weight.to(tl.float32))
    else:
        # Llama rounds before it, and again after it
        out = normed.to(dtype).to(tl.float32) * weight.to(tl.float32)
    return out.to(dtype)


def tile_of(size: int) -> tuple[int, int, int]:
    """(rows, padded length, warps) of a program whose rows hold `size` values: 16 values a
    thread.
    """
    block = triton.next_power_of_2(size)
    # short rows share a program: a head of 128 alone would leave most threads idle
    rows = max(1, SHORTEST_TILE // block)
    return rows, block, max(4, rows * block // 512)


def warps_of_a_row(block: int) -> int:
    """Warps of a program that holds one row of `block` values: as tile_of's, but never more than
    the row has values for.

    A warp without values of its own would hold copies of another's. It would then load a residual
    while that one stores it.
    """
    return min(tile_of(block)[2], max(1, block // 32))


def rows_of(**tensors: Tensor) -> list[Tensor]:
    """The named tensors, [..., N] each, as views [R, N]. Raises ValueError unless a kernel can take
    them as rows.

    One shape, dtype and device for all; N at least 1 and dense; the rows of each tensor one stride
    apart.
    """
    names, (first, *_) = ", ".join(tensors), tensors.values()
    if (
        any(x.shape != first.shape for x in tensors.values())
        or not first.ndim
        or not first.shape[-1]
    ):
        raise ValueError(
            f"{names}: got {_listed(tuple(x.shape) for x in tensors.values())}; accepted: [..., N] "
            f"with N at least 1" + (", the same for all" if len(tensors) > 1 else "")
        )
    if any(x.dtype != first.dtype for x in tensors.values()) or first.dtype not in DTYPES:
        raise ValueError(
            f"{names}: got {_listed(x.dtype for x in tensors.values())}; accepted: float32, "
            f"float16 or bfloat16" + (", one for all" if len(tensors) > 1 else "")
        )
    check_one_device(**tensors)
    rows = []
    for name, x in tensors.items():
        try:
            rows.append(x.view(-1, x.shape[-1]))
        except RuntimeError:  # because no single stride leads from each row to the next
            raise ValueError(
                f"{name}: got {tuple(x.shape)}, strides {x.stride()}; accepted: rows one stride "
                f"apart"
            ) from None
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"{name}: got strides {x.stride()}; accepted: a dense last dimension, stride 1"
            )
    return rows


def check_weight(x: Tensor, **weights: Tensor) -> None:
    """Raise ValueError unless each weight is [N], dense, of x's dtype and on its device. x: [...,
    N].
    """
    for name, weight in weights.items():
        if (
            weight.shape != x.shape[-1:]
            or weight.dtype != x.dtype
            or (len(weight) > 1 and weight.stride(0) != 1)
        ):
            raise ValueError(
                f"{name}: got {weight.dtype} {tuple(weight.shape)}, strides {weight.stride()}; "
                f"accepted: {x.dtype} "
                f"{tuple(x.shape[-1:])}, dense"
            )
        check_one_device(x=x, **{name: weight})


def _listed(values) -> str:
    return ", ".join(map(str, values))
