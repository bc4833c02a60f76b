"""Bad input to the wrappers of this lesson's kernels, refused in one line each."""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import (
    DECODE_DTYPES,
    VALUES_ON_GPU,
    check_apart,
    check_dense,
    check_grid,
    check_one_device,
    check_values,
    values_are_free,
)
from lessons.toolbox.model.arguments import is_whole, refuse

MAX_DIM = 256  # of a head: a program holds all rows of a state's column


def check_heads(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None = None
) -> None:
    """Raise ValueError unless q, k: [T, H, Dk], v: [T, H, Dv] and log_decay, beta: [T, H] fit
    together, on one device.
    """
    names, three = "q, k, v", (q, k, v)
    fit = all(x.ndim == 3 for x in three) and q.shape == k.shape and q.shape[:2] == v.shape[:2]
    if not fit or not (0 < q.shape[2] <= MAX_DIM and v.shape[2] > 0):
        shapes = [tuple(x.shape) for x in three]
        accepted = f"[T, H, Dk], [T, H, Dk], [T, H, Dv], with Dk from 1 to {MAX_DIM}"
        raise ValueError(f"{names}: got {shapes}; accepted: {accepted}")
    if len({x.dtype for x in three}) > 1 or q.dtype not in DECODE_DTYPES:
        dtypes = [x.dtype for x in three]
        accepted = "all three float32, float16 or bfloat16"
        raise ValueError(f"{names}: got {dtypes}; accepted: {accepted}")
    if any(x.shape[2] > 1 and x.stride(2) != 1 for x in three):
        strides = [x.stride() for x in three]
        raise ValueError(f"{names}: got strides {strides}; accepted: 1 in the last dimension")
    each_token = (
        {"log_decay": log_decay} if beta is None else {"log_decay": log_decay, "beta": beta}
    )
    for name, x in each_token.items():
        if x.shape != q.shape[:2] or x.dtype not in DECODE_DTYPES:
            got = f"{x.dtype} {tuple(x.shape)}"
            accepted = f"float32, float16 or bfloat16 {tuple(q.shape[:2])}"
            raise ValueError(f"{name}: got {got}; accepted: {accepted}")
    check_grid("q", q.shape[1], "heads")
    check_one_device(q=q, k=k, v=v, **each_token)


def check_states(states: Tensor, q: Tensor, v: Tensor) -> None:
    """Raise ValueError unless states: [slots, H, Dk, Dv] fit q: [T, H, Dk] and v: [T, H, Dv], each
    slot dense.
    """
    heads, key_dim, value_dim = *q.shape[1:], v.shape[2]
    shape = f"float32, float16 or bfloat16 [slots, {heads}, {key_dim}, {value_dim}]"
    if states.dtype not in DECODE_DTYPES or states.shape[1:] != (heads, key_dim, value_dim):
        got = f"{states.dtype} {tuple(states.shape)}"
        raise ValueError(f"states: got {got}; accepted: {shape}, as k and v say")
    check_dense_slots("states", states)
    check_one_device(states=states, q=q)


def check_dense_slots(name: str, states: Tensor) -> None:
    """Raise ValueError unless each slot of states: [slots, ...] is dense and has memory of its
    own.
    """
    if len(states) and not states[0].is_contiguous():
        got = f"strides {states.stride()}"
        raise ValueError(f"{name}: got {got}; accepted: any stride between slots, each slot dense")
    check_apart(**{name: states})


def check_slots(slots: Tensor, num_slots: int, count: int, least: int, x: Tensor) -> None:
    """Raise ValueError unless slots: [count] int64 are `least` to num_slots - 1, on x's device,
    none of them twice but −1. Values are looked at where that is free.
    """
    if slots.dtype != torch.int64 or slots.shape != (count,):
        got = f"{slots.dtype} {tuple(slots.shape)}"
        raise ValueError(f"slots: got {got}; accepted: int64 ({count},)")
    check_dense(slots=slots)
    check_one_device(slots=slots, x=x)
    check_values(least, num_slots - 1, slots=slots)
    if values_are_free(slots):
        used = slots[slots >= 0]
        if len(used.unique()) < len(used):
            raise ValueError(f"slots: got {slots.tolist()}; accepted: each slot once, or −1")


def check_sequences(
    cu_seqlens: Tensor, max_seqlen: int | None, has_state: Tensor | None, x: Tensor
) -> int:
    """The longest sequence's tokens. cu_seqlens: [B + 1] int32, where each packed sequence of x:
    [T, ...] begins, and the end; has_state: [B] bool, or None. Raises ValueError.
    """
    dtype, shape = cu_seqlens.dtype, tuple(cu_seqlens.shape)
    if dtype != torch.int32 or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        accepted = "int32 [B + 1] with B at least 1"
        raise ValueError(f"cu_seqlens: got {dtype} {shape}; accepted: {accepted}")
    count = len(cu_seqlens) - 1
    check_grid("cu_seqlens", count, "sequences")
    check_dense(cu_seqlens=cu_seqlens)
    check_one_device(cu_seqlens=cu_seqlens, x=x)
    if has_state is not None:
        if has_state.dtype != torch.bool or has_state.shape != (count,):
            got = f"{has_state.dtype} {tuple(has_state.shape)}"
            accepted = f"None, or bool ({count},), as cu_seqlens says"
            raise ValueError(f"has_state: got {got}; accepted: {accepted}")
        check_dense(has_state=has_state)
        check_one_device(has_state=has_state, x=x)
    if max_seqlen is not None and not is_whole(max_seqlen, 0):
        refuse("max_seqlen", max_seqlen, "None, or a whole number")
    if cu_seqlens.is_cpu or VALUES_ON_GPU:
        starts = cu_seqlens.tolist()
        if starts[0] != 0 or starts[-1] != len(x) or starts != sorted(starts):
            accepted = f"from 0 to {len(x)}, never falling"
            raise ValueError(f"cu_seqlens: got {starts}; accepted: {accepted}")
    if max_seqlen is None or cu_seqlens.is_cpu or VALUES_ON_GPU:
        longest = int(cu_seqlens.diff().max())
        if max_seqlen is not None and max_seqlen < longest:
            refuse("max_seqlen", max_seqlen, f"{longest} or more, the longest sequence")
        return longest
    return max_seqlen


def check_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    slots: Tensor,
) -> None:
    """All that a step of a batch checks. q, k: [B, H, Dk], v: [B, H, Dv]. Raises ValueError."""
    check_heads(q, k, v, log_decay, beta)
    check_states(states, q, v)
    check_slots(slots, len(states), len(q), least=-1, x=q)


def check_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor | None,
    max_seqlen: int | None,
) -> int:
    """All that packed prompts check; the tokens of the longest. q, k: [T, H, Dk], v: [T, H, Dv].
    Raises ValueError.
    """
    check_heads(q, k, v, log_decay, beta)
    check_states(states, q, v)
    longest = check_sequences(cu_seqlens, max_seqlen, has_state, q)
    check_slots(slots, len(states), len(cu_seqlens) - 1, least=0, x=q)
    return longest


def check_channels(x: Tensor, weight: Tensor, states: Tensor) -> None:
    """Raise ValueError unless x: [T, C], weight: [C, W] and states: [slots, C, W − 1] fit together,
    on one device.
    """
    if x.ndim != 2 or weight.ndim != 2 or len(weight) != x.shape[1] or not weight.numel():
        shapes = [tuple(x.shape), tuple(weight.shape)]
        raise ValueError(f"x, weight: got {shapes}; accepted: [T, C], [C, W]")
    channels, width = weight.shape
    if states.ndim != 3 or states.shape[1:] != (channels, width - 1):
        accepted = f"[slots, {channels}, {width - 1}], as weight says"
        raise ValueError(f"states: got {tuple(states.shape)}; accepted: {accepted}")
    dtypes = [x.dtype, weight.dtype, states.dtype]
    if len(set(dtypes)) > 1 or x.dtype not in DECODE_DTYPES:
        accepted = "all three float32, float16 or bfloat16"
        raise ValueError(f"x, weight, states: got {dtypes}; accepted: {accepted}")
    if channels > 1 and x.stride(1) != 1:
        raise ValueError(f"x: got strides {x.stride()}; accepted: 1 in the last dimension")
    check_dense(weight=weight)
    check_dense_slots("states", states)
    check_one_device(x=x, weight=weight, states=states)
