"""The recurrent step of a batch, in Triton: each sequence's state is read once and written once, in
its slot.

    out = gated_delta_step(q, k, v, log_decay, beta, states, slots)     # a decode step
    out = decayed_step(q, k, v, log_decay, states, slots)               # without the delta rule

Read `state_step_kernel` beside the loop of naive.py's `gated_delta_rule`: it is the loop's body, in
the same order. Between the load and the store of a state nothing goes to memory but the output. A
program owns some columns of one head's state. It needs no other column: Sᵀ k and Sᵀ q are sums
within a column. prompts.py runs prompts in chunks; convolution.py is what comes before.
"""

import torch
from torch import Tensor

from lessons.l27_states.arguments import check_step
from lessons.toolbox.kernels.triton_ import tl, triton

# Columns of a state for one program: 32 · 4 bytes are one line of the cache, and a head of 128
# columns is four programs, so a small batch has work for more of the GPU.
COLUMNS = 32
NUM_WARPS = 4


@triton.jit
def state_step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    log_decay_ptr,
    beta_ptr,
    states_ptr,
    slots_ptr,
    out_ptr,
    num_heads,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_slot,
    DELTA: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per sequence, head and BLOCK_V columns of its state. states: [slots, H, KEY_DIM,
    VALUE_DIM], a slot's heads dense; log_decay, beta: [B, H], dense.
    """
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_row, in_column = row < KEY_DIM, column < VALUE_DIM
    inside = in_row[:, None] & in_column[None, :]
    slot = tl.load(slots_ptr + b)  # 64 bits, as slot · stride may pass 2^31
    is_used = slot >= 0
    cell = head * KEY_DIM * VALUE_DIM + row[:, None] * VALUE_DIM + column[None, :]
    state_ptr = states_ptr + slot * stride_slot + cell
    # These come before the state, because what is asked for after its 16 KiB waits for all of them.
    # q and k would hold too many registers meanwhile.
    log_decay = tl.load(log_decay_ptr + b * num_heads + head).to(tl.float32)
    if DELTA:
        beta = tl.load(beta_ptr + b * num_heads + head).to(tl.float32)
    v = tl.load(v_ptr + b * stride_vb + head * stride_vh + column, mask=in_column, other=0.0)
    state = tl.load(state_ptr, mask=inside & is_used, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + b * stride_qb + head * stride_qh + row, mask=in_row, other=0.0)
    k = tl.load(k_ptr + b * stride_kb + head * stride_kh + row, mask=in_row, other=0.0)
    q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)

    state *= tl.exp(log_decay)
    if DELTA:
        v = beta * (v - tl.sum(state * k[:, None], axis=0))
    state += k[:, None] * v[None, :]
    out = tl.sum(state * q[:, None], axis=0)

    tl.store(state_ptr, state.to(states_ptr.dtype.element_ty), mask=inside & is_used)
    out = tl.where(is_used, out, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (b * num_heads + head) * VALUE_DIM + column, out, mask=in_column)


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    """naive.gated_delta_rule for one token of each of B sequences. q, k: [B, H, Dk], v: [B, H, Dv],
    log_decay, beta: [B, H], states: [slots, H, Dk, Dv], slots: [B] int64 -> [B, H, Dv].

    Sequence b's state is states[slots[b]], which is read and written in place; all other slots stay
    as they are. −1 is a row that pads the batch: its output is 0. Two sequences may not share a
    slot. States are float32, float16 or bfloat16, whatever q, k and v are; the step computes in
    float32 and rounds once, when it writes. Raises ValueError.
    """
    return state_step(q, k, v, log_decay, beta, states, slots)


def decayed_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, states: Tensor, slots: Tensor
) -> Tensor:
    """naive.decayed_linear_attention for one token of each of B sequences. q, k: [B, H, Dk], v: [B,
    H, Dv], log_decay: [B, H] -> [B, H, Dv]. The rest as in `gated_delta_step`.
    """
    return state_step(q, k, v, log_decay, None, states, slots)


def state_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    """One launch of `state_step_kernel`; without beta there is no delta rule. q, k: [B, H, Dk], v:
    [B, H, Dv] -> [B, H, Dv]. Raises ValueError.
    """
    check_step(q, k, v, log_decay, beta, states, slots)
    (batch, num_heads, key_dim), value_dim = q.shape, v.shape[2]
    out = torch.empty(batch, num_heads, value_dim, dtype=v.dtype, device=v.device)
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(COLUMNS, triton.next_power_of_2(value_dim))
    if out.numel():
        state_step_kernel[batch, num_heads, triton.cdiv(value_dim, block_v)](
            q,
            k,
            v,
            log_decay.contiguous(),
            None if beta is None else beta.contiguous(),
            states,
            slots,
            out,
            num_heads,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            states.stride(0),
            DELTA=beta is not None,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=NUM_WARPS,
        )
    return out
