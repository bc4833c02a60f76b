"""Packed prompts in chunks: the wrappers of chunk_kernels.py.

out = gated_delta_prompts(q, k, v, log_decay, beta, states, slots, cu_seqlens, has_state)
out = decayed_prompts(q, k, v, log_decay, states, slots, cu_seqlens, has_state)
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import check_grid
from lessons.l27_states.arguments import check_heads, check_sequences, check_slots, check_states
from lessons.l27_states.chunk_kernels import outputs_kernel, prepare_kernel, states_kernel
from lessons.toolbox.kernels.triton_ import triton

CHUNK = 64  # tokens; a power of two, 16 or more for tl.dot
COLUMNS = 32  # of the values, for one program
NUM_WARPS = 4


def gated_delta_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor | None = None,
    max_seqlen: int | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """naive.gated_delta_rule for B packed prompts. q, k: [T, H, Dk], v: [T, H, Dv], log_decay,
    beta: [T, H], states: [slots, H, Dk, Dv] float32, slots: [B] int64, cu_seqlens: [B + 1] int32 ->
    [T, H, Dv].

    has_state: [B] bool, whether states[slots[b]] is what came before prompt b, or whatever an
    earlier request left there; None: it is for all. Afterwards it is the state after prompt b.
    max_seqlen: the longest prompt, or more; None: read from cu_seqlens, for which the CPU waits.
    Too small a one, which cannot be seen on a GPU without waiting, leaves rows unwritten. Raises
    ValueError.
    """
    return prompts(
        q, k, v, log_decay, beta, states, slots, cu_seqlens, has_state, max_seqlen, chunk
    )


def decayed_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor | None = None,
    max_seqlen: int | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """naive.decayed_linear_attention for B packed prompts. q, k: [T, H, Dk], v: [T, H, Dv],
    log_decay: [T, H] -> [T, H, Dv]. The rest as in `gated_delta_prompts`.
    """
    return prompts(
        q, k, v, log_decay, None, states, slots, cu_seqlens, has_state, max_seqlen, chunk
    )


def prompts(
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
    chunk: int,
) -> Tensor:
    """The launches; without beta there is no delta rule. q, k: [T, H, Dk], v: [T, H, Dv] -> [T, H,
    Dv]. Raises ValueError.
    """
    if chunk not in (16, 32, 64):
        raise ValueError(f"chunk: got {chunk!r}; accepted: 16, 32 or 64")
    check_heads(q, k, v, log_decay, beta)
    check_states(states, q, v)
    longest = check_sequences(cu_seqlens, max_seqlen, has_state, q)
    count = len(cu_seqlens) - 1
    check_slots(slots, len(states), count, least=0, x=q)
    num_chunks = triton.cdiv(longest, chunk)
    check_grid("max_seqlen", num_chunks, f"chunks of {chunk} tokens")
    num_tokens, num_heads, key_dim = q.shape
    value_dim = v.shape[2]
    log_decay = log_decay.contiguous()
    block_v = min(COLUMNS, triton.next_power_of_2(max(value_dim, 16)))
    blocks = triton.cdiv(value_dim, block_v)
    options = dict(
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        SIZE=chunk,
        BLOCK_K=triton.next_power_of_2(max(key_dim, 16)),
        BLOCK_V=block_v,
        num_warps=NUM_WARPS,
    )
    new = dict(dtype=torch.float32, device=q.device)
    # the most chunks that so many tokens of so many sequences can have: see chunk_of
    most = num_tokens // chunk + count
    before = torch.empty(most, num_heads, key_dim, value_dim, **new)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    u, w = v, None
    if beta is not None:
        u, w = torch.empty(v.shape, **new), torch.empty(k.shape, **new)
        if out.numel():
            prepare_kernel[num_heads, num_chunks, count](
                k,
                v,
                log_decay,
                beta.contiguous(),
                cu_seqlens,
                u,
                w,
                num_tokens,
                *k.stride()[:2],
                *v.stride()[:2],
                **options,
            )
    states_kernel[num_heads, blocks, count](
        k,
        u,
        w,
        log_decay,
        cu_seqlens,
        has_state,
        states,
        slots,
        before,
        num_tokens,
        *k.stride()[:2],
        *u.stride()[:2],
        states.stride(0),
        DELTA=beta is not None,
        HAS_STATE=has_state is not None,
        **options,
    )
    if out.numel():
        outputs_kernel[num_heads * blocks, num_chunks, count](
            q,
            k,
            u,
            log_decay,
            cu_seqlens,
            before,
            out,
            num_tokens,
            num_heads,
            *q.stride()[:2],
            *k.stride()[:2],
            *u.stride()[:2],
            **options,
        )
    return out
