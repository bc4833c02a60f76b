"""What `flash_attention` refuses, each in one line that names the argument: a kernel given wrong
shapes reads foreign memory.
"""

from functools import lru_cache

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import (
    VALUES_ON_GPU,
    check_grid,
    check_one_device,
    check_powers_of_two,
    check_window,
)
from lessons.l09_flash_attention.tiles import Tiles

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD_DIM = 256
# elements between two rows, because 128 rows of a tile are counted in 32 bits
MAX_ROW_STRIDE = 2**24


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
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError(
            "q, k, v: got tensors that require grad; accepted: none that do, because these kernels "
            "have no backward pass (torch.no_grad() around the call)"
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
    if max(x.stride(0) for x in (q, k, v)) > MAX_ROW_STRIDE:
        raise ValueError(
            f"q, k, v: got strides {[x.stride() for x in (q, k, v)]}; accepted: rows up to "
            f"{MAX_ROW_STRIDE} elements apart"
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
    check_window(window)
    if window is not None and not causal:
        raise ValueError(f"window: got {window} with causal=False; accepted: causal=True with it")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: got {softcap}; accepted: None, or more than 0")
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if x is None:
            continue
        if x.dtype != torch.float32 or x.shape != q.shape[1:2] or not x.is_contiguous():
            raise ValueError(
                f"{name}: got {x.dtype} {tuple(x.shape)} with strides {x.stride()}; accepted: "
                f"float32 ({q.shape[1]},), dense"
            )
        check_one_device(q=q, **{name: x})


def check_tiles(tiles: Tiles, num_queries: int, smallest: int = 16) -> None:
    """Raise ValueError unless products of such tiles can be made, and a grid of them be launched.

    num_queries: of the longest sequence. smallest: keys that a product needs at least.
    """
    check_powers_of_two(16, block_m=tiles.block_m)
    check_powers_of_two(smallest, block_n=tiles.block_n)
    check_grid("q", -(-num_queries // tiles.block_m), f"tiles of {tiles.block_m} queries")


def check_sequences(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
) -> tuple[Tensor, Tensor, int]:
    """cu_seqlens_q and cu_seqlens_k, [B + 1] each, and max_seqlen_q, made for one sequence if None.
    q: [T, Hq, D], k: [Tk, Hkv, D].

    Raises ValueError if only one is given, or dtype, shape or device do not fit. Values are checked
    where that is free, as in `check_values`.
    """
    if cu_seqlens_q is None and cu_seqlens_k is None:
        _check_longest(max_seqlen_q, len(q))
        return one_sequence(len(q), q.device), one_sequence(len(k), q.device), len(q)
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
    check_grid("cu_seqlens_q", len(cu_seqlens_q) - 1, "sequences")
    check_one_device(q=q, **given)
    for name, x, rows in (("cu_seqlens_q", cu_seqlens_q, q), ("cu_seqlens_k", cu_seqlens_k, k)):
        _check_order(name, x, len(rows))
    if max_seqlen_q is None or VALUES_ON_GPU or q.is_cpu:
        longest = int(cu_seqlens_q.diff().max())
        _check_longest(max_seqlen_q, longest)
        max_seqlen_q = longest
    return cu_seqlens_q, cu_seqlens_k, max_seqlen_q


def _check_order(name: str, cu_seqlens: Tensor, num_rows: int) -> None:
    if cu_seqlens.is_cpu or VALUES_ON_GPU:
        starts = cu_seqlens.tolist()
        if starts != sorted(starts) or (starts[0], starts[-1]) != (0, num_rows):
            raise ValueError(
                f"{name}: got {starts}; accepted: ascending from 0 to {num_rows}, the rows there "
                "are"
            )


def _check_longest(max_seqlen_q: int | None, longest: int) -> None:
    if max_seqlen_q is not None and max_seqlen_q < longest:
        raise ValueError(
            f"max_seqlen_q: got {max_seqlen_q}; accepted: None, or {longest} or more, the queries "
            "of the longest sequence"
        )


@lru_cache(maxsize=64)
def one_sequence(length: int, device: torch.device) -> Tensor:
    """cu_seqlens of one sequence: [2] int32. Kept, because every layer of a pass asks for it and a
    copy makes the CPU wait.
    """
    return torch.tensor([0, length], dtype=torch.int32, device=device)
