"""Bad input to the kernels' wrappers, refused in one line each.

A kernel believes its pointers, shapes and strides: given wrong ones it reads foreign memory.
"""

import os

import torch
from torch import Tensor

DECODE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_ELEMENTS = 2**31  # of one sequence's K or V, because decode_kernel counts them in 32 bits
MAX_GRID = 65535  # programs along the second and third axis of a CUDA grid
# To read a value on a GPU, the CPU waits. So values there are checked only if this is set.
VALUES_ON_GPU = bool(os.environ.get("LADDER_CHECK_VALUES"))


# False while lesson 11 only notes launches: on the meta device, or in a capture that may not wait.
KERNELS_RUN = True


def check_one_device(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors, [...] each, are on one device that holds data: a kernel
    given foreign memory crashes, or reads it.
    """
    has_no_data = KERNELS_RUN and any(x.is_meta for x in tensors.values())
    if len({x.device for x in tensors.values()}) > 1 or has_no_data:
        found = ", ".join(f"{name} on {x.device}" for name, x in tensors.items())
        accepted = "one device for all, and not meta, which holds no data"
        raise ValueError(f"{', '.join(tensors)}: got {found}; accepted: {accepted}")


def values_are_free(x: Tensor) -> bool:
    """Whether the values of x: [...] may be read: on the CPU, on a GPU if LADDER_CHECK_VALUES is
    set.
    """
    return KERNELS_RUN and (x.is_cpu or (x.is_cuda and VALUES_ON_GPU))


def check_values(least: int, most: int, **tensors: Tensor) -> None:
    """Raise ValueError unless the values of each tensor of integers, [...], are least to most.

    Looks where `values_are_free`.
    """
    for name, x in tensors.items():
        if x.numel() and values_are_free(x):
            smallest, largest = (int(value) for value in x.aminmax())
            if smallest < least or largest > most:
                got = f"values from {smallest} to {largest}"
                raise ValueError(f"{name}: got {got}; accepted: {least} to {most}")


def check_apart(**outputs: Tensor) -> None:
    """Raise ValueError unless each element of an output, [...], has memory of its own: in an
    expanded tensor many share it, and programs would overwrite each other.
    """
    for name, x in outputs.items():
        reach = 1  # elements from the first to the last, over the dimensions so far
        for stride, size in sorted(zip(x.stride(), x.shape)):
            if size > 1 and stride < reach:
                got = f"shape {tuple(x.shape)} with strides {x.stride()}"
                raise ValueError(f"{name}: got {got}; accepted: elements that do not overlap")
            reach += (size - 1) * stride


def check_grid(name: str, count: int, what: str) -> None:
    """Raise ValueError for more of something than a grid has programs along its second axis. name:
    the argument that says how many; what: of what.
    """
    if count > MAX_GRID:
        raise ValueError(f"{name}: got {count} {what}; accepted: up to {MAX_GRID}")


def check_dense(**tensors: Tensor) -> None:
    """Raise ValueError unless each tensor, [...], is contiguous: kernels read tensors of integers
    one element after the other.
    """
    for name, x in tensors.items():
        if not x.is_contiguous():
            got = f"shape {tuple(x.shape)} with strides {x.stride()}"
            raise ValueError(f"{name}: got {got}; accepted: contiguous")


def check_append_inputs(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Raise ValueError unless k: [T, Hkv, D], v: [T, Hkv, Dv], k_cache: [slots, Hkv, D], v_cache:
    [slots, Hkv, Dv] and slot_mapping: [T] fit together.
    """
    names, four = "k, v, k_cache, v_cache", (k, v, k_cache, v_cache)
    three_dimensions = all(x.ndim == 3 for x in four)
    if not (
        three_dimensions
        and v.shape[:2] == k.shape[:2]
        and v_cache.shape[0] == k_cache.shape[0]
        and k_cache.shape[1:] == k.shape[1:]
        and v_cache.shape[1:] == v.shape[1:]
    ):
        shapes = [tuple(x.shape) for x in four]
        raise ValueError(
            f"{names}: got {shapes}; accepted: [T, Hkv, D], [T, Hkv, Dv], [slots, Hkv, D], "
            "[slots, Hkv, Dv]"
        )
    if len({x.dtype for x in four}) > 1:
        dtypes = [x.dtype for x in four]
        raise ValueError(f"{names}: got {dtypes}; accepted: one dtype for all four")
    if any(x.stride()[1:] != (x.shape[2], 1) for x in four):
        strides = [x.stride() for x in four]
        raise ValueError(f"{names}: got strides {strides}; accepted: (any, width of a head, 1)")
    check_apart(k_cache=k_cache, v_cache=v_cache)
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != k.shape[:1]:
        raise ValueError(
            f"slot_mapping: got {slot_mapping.dtype} {tuple(slot_mapping.shape)}; accepted: int64 "
            f"({len(k)},)"
        )
    check_dense(slot_mapping=slot_mapping)
    check_values(-1, len(k_cache) - 1, slot_mapping=slot_mapping)


def check_one_query_inputs(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, context_lens: Tensor
) -> None:
    """Raise ValueError unless q: [B, Hq, D], k_cache: [B, capacity, Hkv, D], v_cache: [B, capacity,
    Hkv, Dv] and context_lens: [B] fit together.
    """
    dimensions = (q.ndim, k_cache.ndim, v_cache.ndim)
    if not (
        dimensions == (3, 4, 4)
        and k_cache.shape[:3] == v_cache.shape[:3]
        and (len(q), q.shape[2]) == (len(k_cache), k_cache.shape[3])
        and k_cache.shape[2] > 0
        and q.shape[1] % k_cache.shape[2] == 0
        and context_lens.shape == q.shape[:1]
    ):
        shapes = [tuple(x.shape) for x in (q, k_cache, v_cache, context_lens)]
        raise ValueError(
            f"q, k_cache, v_cache, context_lens: got {shapes}; accepted: [B, Hq, D], "
            "[B, capacity, Hkv, D], [B, capacity, Hkv, Dv], [B], with Hq a multiple of Hkv"
        )
    dtypes = [x.dtype for x in (q, k_cache, v_cache)]
    if len(set(dtypes)) > 1 or q.dtype not in DECODE_DTYPES:
        raise ValueError(
            f"q, k_cache, v_cache: got {dtypes}; accepted: all three float32, float16 or bfloat16"
        )
    if context_lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"context_lens: got {context_lens.dtype}; accepted: int32 or int64")
    check_dense(context_lens=context_lens)
    check_values(0, k_cache.shape[1], context_lens=context_lens)
    if any(x.stride(-1) != 1 for x in (q, k_cache, v_cache)):
        raise ValueError(
            "q, k_cache, v_cache: got a last dimension that is not dense; accepted: stride 1 in it"
        )
    if max(span_of_a_sequence(k_cache), span_of_a_sequence(v_cache)) > MAX_ELEMENTS:
        raise ValueError(
            f"k_cache, v_cache: got a sequence that spans more than {MAX_ELEMENTS} elements; "
            "accepted: at most so many"
        )


def span_of_a_sequence(cache: Tensor) -> int:
    """Elements from the first to the last of one sequence. cache: [B, capacity, Hkv, D]."""
    last = [(size - 1) * stride for size, stride in zip(cache.shape[1:], cache.stride()[1:])]
    return sum(last) + 1


def check_tile_options(window: int | None, block_n: int) -> None:
    """Raise ValueError unless window is None or 1 or more, and block_n a power of two."""
    check_window(window)
    check_powers_of_two(1, block_n=block_n)


def check_window(window: int | None) -> None:
    """Raise ValueError unless window is None or 1 or more."""
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window: got {window!r}; accepted: None, or 1 or more")


def check_powers_of_two(least: int, **sizes: int) -> None:
    """Raise ValueError unless each size is a power of two and at least `least`: tl.arange takes no
    others, and a tile of tl.dot has at least 16 rows and columns.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or size < least or size & (size - 1):
            raise ValueError(f"{name}: got {size!r}; accepted: a power of two, {least} or more")
