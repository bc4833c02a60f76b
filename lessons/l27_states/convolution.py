"""The short convolution in Triton: a decode step of a batch, and packed prompts. The last W − 1
inputs of each sequence are in its slot.

    y = conv_step(x, weight, states, slots)
    y = conv_prompts(x, weight, states, slots, cu_seqlens, has_state)

Both kernels ask for the input at a position of the sequence; `inputs_at` gives it from x, or from
the state if the position is before the first token. The new state is the inputs at the last W − 1
positions, so it is made by the same function.
"""

import torch
from torch import Tensor

from lessons.l09_flash_attention.optimized import rows_of_sequence
from lessons.l27_states.arguments import check_channels, check_sequences, check_slots
from lessons.toolbox.kernels.triton_ import tl, triton

CHANNELS = 64  # of one program
TOKENS = 32  # of one program of a prompt


@triton.jit
def inputs_at(x_ptr, state_ptr, position, channel, inside, stride_x, WIDTH: tl.constexpr):
    """Inputs of a sequence at some positions, −(WIDTH − 1) being the oldest in its state. position,
    channel, inside: of shapes that broadcast.
    """
    is_old = position < 0
    x = tl.load(x_ptr + position * stride_x + channel, mask=inside & (position >= 0), other=0.0)
    at = channel * (WIDTH - 1) + WIDTH - 1 + position
    return tl.where(is_old, tl.load(state_ptr + at, mask=inside & is_old, other=0.0), x)


@triton.jit
def conv_step_kernel(
    x_ptr,
    weight_ptr,
    states_ptr,
    slots_ptr,
    y_ptr,
    channels,
    stride_x,
    stride_slot,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per sequence and BLOCK channels."""
    b = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + b)
    inside = (channel < channels) & (slot >= 0)
    x_ptr += b * stride_x
    state_ptr = states_ptr + slot * stride_slot
    y = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, WIDTH):
        # the token itself is at position 0
        x = inputs_at(x_ptr, state_ptr, i - (WIDTH - 1), channel, inside, 0, WIDTH)
        weight = tl.load(weight_ptr + channel * WIDTH + i, mask=inside, other=0.0)
        y += weight.to(tl.float32) * x.to(tl.float32)
        # one place further to the left, where the thread has read already
        is_kept = inside & (i > 0)
        tl.store(state_ptr + channel * (WIDTH - 1) + i - 1, x, mask=is_kept)
    tl.store(y_ptr + b * channels + channel, y.to(y_ptr.dtype.element_ty), mask=channel < channels)


@triton.jit(do_not_specialize=["num_tokens"])
def conv_prompts_kernel(
    x_ptr,
    weight_ptr,
    states_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    has_state_ptr,
    y_ptr,
    num_tokens,
    channels,
    stride_x,
    stride_slot,
    HAS_STATE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK_T tokens, BLOCK channels and sequence. BLOCK_T is at least WIDTH − 1,
    so the first program of a sequence alone reads its old state, and that program writes the new
    one.
    """
    sequence = tl.program_id(2)
    start, length = rows_of_sequence(cu_seqlens_ptr, sequence, num_tokens)
    first = tl.program_id(0) * BLOCK_T
    if (first < length) | (first == 0):
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        in_channel = channel < channels
        x_ptr += start * stride_x
        state_ptr = states_ptr + tl.load(slots_ptr + sequence) * stride_slot
        has_state = length >= 0
        if HAS_STATE:
            has_state = tl.load(has_state_ptr + sequence) != 0
        token = (first + tl.arange(0, BLOCK_T))[:, None].to(tl.int64)
        y = tl.zeros((BLOCK_T, BLOCK), tl.float32)
        for i in range(0, WIDTH):
            position = token - (WIDTH - 1) + i
            inside = in_channel[None, :] & (token < length) & ((position >= 0) | has_state)
            x = inputs_at(x_ptr, state_ptr, position, channel[None, :], inside, stride_x, WIDTH)
            weight = tl.load(weight_ptr + channel * WIDTH + i, mask=in_channel, other=0.0)
            y += weight.to(tl.float32)[None, :] * x.to(tl.float32)
        tl.store(
            y_ptr + (start + token) * channels + channel[None, :],
            y.to(y_ptr.dtype.element_ty),
            mask=(token < length) & in_channel[None, :],
        )
        if first == 0:
            column = tl.arange(0, BLOCK_W)[None, :]
            last = length.to(tl.int64) - (WIDTH - 1) + column
            kept = in_channel[:, None] & (column < WIDTH - 1)
            in_state = kept & ((last >= 0) | has_state)
            new = inputs_at(x_ptr, state_ptr, last, channel[:, None], in_state, stride_x, WIDTH)
            tl.debug_barrier()  # every thread has read the state before any thread writes it
            tl.store(state_ptr + channel[:, None] * (WIDTH - 1) + column, new, mask=kept)


def conv_step(x: Tensor, weight: Tensor, states: Tensor, slots: Tensor) -> Tensor:
    """naive.causal_conv for one token of each of B sequences. x: [B, C], weight: [C, W], states:
    [slots, C, W − 1], slots: [B] int64 -> [B, C], all in one dtype.

    states[slots[b]] is read and written in place. −1 is a row that pads the batch: its output is 0.
    Raises ValueError.
    """
    check_channels(x, weight, states)
    check_slots(slots, len(states), len(x), least=-1, x=x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    channels, width = weight.shape
    if y.numel():
        conv_step_kernel[len(x), triton.cdiv(channels, CHANNELS)](
            x,
            weight,
            states,
            slots,
            y,
            channels,
            x.stride(0),
            states.stride(0),
            WIDTH=width,
            BLOCK=CHANNELS,
            num_warps=2,
        )
    return y


def conv_prompts(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """naive.causal_conv for B packed prompts. x: [T, C], weight: [C, W], states: [slots, C, W − 1],
    slots: [B] int64, cu_seqlens: [B + 1] int32 -> [T, C], all in one dtype.

    has_state: [B] bool, whether states[slots[b]] holds what came before, or whatever an earlier
    request left there; None: it does for all. Afterwards it holds the last W − 1 inputs.
    max_seqlen: the longest prompt, or more; None: read from cu_seqlens, for which the CPU waits.
    Raises ValueError.
    """
    check_channels(x, weight, states)
    longest = check_sequences(cu_seqlens, max_seqlen, has_state, x)
    count = len(cu_seqlens) - 1
    check_slots(slots, len(states), count, least=0, x=x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    channels, width = weight.shape
    block_t = max(TOKENS, triton.next_power_of_2(width))
    blocks = max(1, triton.cdiv(longest, block_t))  # one, where only states are written
    conv_prompts_kernel[blocks, triton.cdiv(channels, CHANNELS), count](
        x,
        weight,
        states,
        slots,
        cu_seqlens,
        has_state,
        y,
        len(x),
        channels,
        x.stride(0),
        states.stride(0),
        HAS_STATE=has_state is not None,
        WIDTH=width,
        BLOCK_W=triton.next_power_of_2(width),
        BLOCK_T=block_t,
        BLOCK=CHANNELS,
        num_warps=4,
    )
    return y
