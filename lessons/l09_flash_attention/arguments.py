"""What `flash_attention` refuses, each in one line that names the argument: a kernel given wrong
shapes reads foreign memory.
"""

from functools import lru_cache

import torch
from torch import Tensor

from lessons.l03_kv_cache.optimized import check_one_device

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD_DIM = 256


def check_heads(q: Tensor, k: Tensor, v: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Raise ValueError unless q: [T, Hq, D], k: [Tk, Hkv, D], v: [Tk, Hkv, Dv] fit together, dense
    in the last dimension.
    """
    shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    if (
        any(x.ndim != 3 for x in (q, k, v))
        or q.shape[2] != k.shape[2]
        or k.shape[:2] != v.shape[:2]
    ):
        raise ValueError(
            f"q, k, v: got {shapes}; accepted: [T, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv]"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q, k, v: got {shapes}; accepted: Hq a multiple of Hkv")
    if not all(1 <= x.shape[2] <= LARGEST_HEAD_DIM for x in (q, v)):
        raise ValueError(
            f"q, k, v: got {shapes}; accepted: head sizes from 1 to {LARGEST_HEAD_DIM}"
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"q, k, v: got {q.dtype}, {k.dtype}, {v.dtype}; accepted: one of {names} for all three"
        )
    check_one_device(q=q, k=k, v=v)
    if any(x.stride(2) != 1 and x.shape[2] > 1 for x in (q, k, v)):
        raise ValueError(
            "q, k, v: got a last dimension that is not dense; accepted: stride 1 in it"
        )


def check_options(
    q: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Raise ValueError for an option that the kernel does not have. q: [T, Hq, D]; alibi_slopes,
    sinks: [Hq] float32.
    """
    # the maximum of scaled scores is taken before scaling
    if softmax_scale is not None and not softmax_scale > 0:
        raise ValueError(f"softmax_scale: got {softmax_scale}; accepted: None, or more than 0")
    if window is not None and (window < 1 or not causal):
        raise ValueError(
            f"window: got {window} with causal={causal}; accepted: None, or 1 or more with "
            f"causal=True"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: got {softcap}; accepted: None, or more than 0")
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if x is None:
            continue
        if x.dtype != torch.float32 or x.shape != q.shape[1:2] or not x.is_contiguous():
            raise ValueError(
                f"{name}: got {x.dtype} {tuple(x.shape)} with strides {x.stride()}; accepted: "
                f"float32 "
                f"({q.shape[1]},), dense"
            )
        check_one_device(q=q, **{name: x})


def check_sequences(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """cu_seqlens_q and cu_seqlens_k, [B + 1] each, made for one sequence if None. q: [T, Hq, D], k:
    [Tk, Hkv, D].

    Raises ValueError if only one is given, or dtype, shape or device do not fit. Their values lie
    on the device and are not read.
    """
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return tuple(one_sequence(len(x), q.device) for x in (q, k))
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if missing := [name for name, x in given.items() if x is None]:
        raise ValueError(
            f"{missing[0]}: got None; accepted: both cu_seqlens_q and cu_seqlens_k, or neither"
        )
    for name, x in given.items():
        if x.dtype != torch.int32 or x.ndim != 1 or len(x) < 2 or not x.is_contiguous():
            raise ValueError(
                f"{name}: got {x.dtype} {tuple(x.shape)}; accepted: int32, [B + 1] with B at least "
                f"1, dense"
            )
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_q, cu_seqlens_k: got {len(cu_seqlens_q)} and {len(cu_seqlens_k)} entries; "
            "accepted: [B + 1] for both"
        )
    check_one_device(q=q, **given)
    return cu_seqlens_q, cu_seqlens_k


@lru_cache(maxsize=64)
def one_sequence(length: int, device: torch.device) -> Tensor:
    """cu_seqlens of one sequence: [2] int32. Kept, because every layer of a pass asks for it and a
    copy makes the CPU wait.
    """
    return torch.tensor([0, length], dtype=torch.int32, device=device)
