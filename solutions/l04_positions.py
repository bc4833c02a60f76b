"""Exercises of lesson 04: RoPE from its formula, ALiBi's bias, the bytes of a rotation, and a
kernel with bugs.
"""

import math

import torch
from torch import Tensor

from lessons.l02_naive_attention.rope import Rotate
from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.model.config import ModelConfig


@exercise(
    "4.1",
    "RoPE from its formula, stretched as Llama 3.1 is",
    minutes=40,
    difficulty=3,
    replaces="lessons.l02_naive_attention.rope:rotation",
)
def rotation(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Rotate:
    """A function that turns x: [T, H, D] to positions: [T] int64 and returns a new [T, H, D] of x's
    dtype; x stays as it was.

    Half layout: coordinate i turns together with i + D/2, for i = 0 … D/2 - 1, by angle(i) =
    position · frequency(i):
        out[i]       = x[i] · cos - x[i + D/2] · sin
        out[i + D/2] = x[i + D/2] · cos + x[i] · sin
    frequency(i) = config.rope_theta ^ (-2i / D), D = config.head_dim (even). config.rope_scaling,
    `s` for short:
        None                      as it is
        s.rope_type "linear"      every frequency divided by s.factor
        s.rope_type "llama3"      depends on how often the pair turns in the trained context:
                                  turns = s.original_max_position_embeddings · frequency / 2π
            turns > s.high_freq_factor     as it is
            turns < s.low_freq_factor      divided by s.factor
            in between                     share · frequency + (1 - share) · frequency / s.factor,
                                           where share grows linearly with the turns, from 0 at
                                           low_freq_factor to 1 at high_freq_factor
    Another rope_type: ValueError. Angles in float32 at least, whatever the model's dtype: bfloat16
    has no position 257.
    dtype: the model's, in case you want to prepare cos and sin. Every layer calls the function that
    you return, for q and for k.

    Example: D = 4, theta = 100, frequencies 1 and 0.1. At position 3, x = [1, 0, 0, 0] becomes [cos
    3, 0, sin 3, 0]. With "linear" and factor 2 the angle is 1.5 in place of 3.
    """
    # SOLUTION
    frequency = config.rope_theta ** (
        -torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    )
    if s := config.rope_scaling:
        if s.rope_type not in ("linear", "llama3"):
            raise ValueError(f"rope_type: got {s.rope_type!r}; accepted: linear, llama3")
        share = torch.zeros_like(frequency)
        if s.rope_type == "llama3":
            turns = s.original_max_position_embeddings * frequency / (2 * math.pi)
            share = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(
                0, 1
            )
        frequency = share * frequency + (1 - share) * frequency / s.factor
    angles = positions[:, None, None].float() * frequency.to(positions.device)  # [T, 1, D / 2]
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(
            x.dtype
        )

    return rotate
    # END


@exercise("4.2", "ALiBi: a bias for every head", minutes=20, difficulty=2)
def alibi_bias(num_heads: int, num_queries: int, num_keys: int) -> Tensor:
    """What ALiBi adds to the scores before the softmax: [num_heads, num_queries, num_keys] float32.
    No causal mask in it.

    -slope(head) · (query position - key position). The last query belongs to the last key (bottom
    right), as after cached tokens; so a key in a query's future, which the mask hides anyway, gets
    a positive bias. Slopes: for n heads, n a power of two, 2^(-8/n), 2^(-16/n), … 2^(-8), head 0
    the steepest. For another number of heads, those of the largest power of two below it, say m,
    and then the 1st, 3rd, 5th, … of the slopes of 2m heads, as many as are missing. Errors: none to
    raise; all sizes are 1 or more.

    Example, 3 heads: m = 2 gives 2^-4 and 2^-8; of 4 heads' slopes 2^-2, 2^-4, 2^-6, 2^-8 the
    first. So 0.0625, 0.00390625, 0.25. Head 2, 1 query, 3 keys: [-0.5, -0.25, 0].
    """
    # SOLUTION
    known = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * i / known) for i in range(1, known + 1)]
    slopes += [2 ** (-8 * i / (2 * known)) for i in range(1, 2 * known, 2)][: num_heads - known]
    query = torch.arange(num_keys - num_queries, num_keys)
    distance = query[:, None] - torch.arange(num_keys)
    return -torch.tensor(slopes)[:, None, None] * distance
    # END


@exercise("4.3", "Predict: the bytes of a rotation", minutes=15, difficulty=1)
def rotation_bytes(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[int, int]:
    """Bytes that one layer moves for one token to rotate q and k and to write k and v to the cache:
    step by step, and fused.

    Step by step, as transformers writes it, every operation a pass over memory: it reads its inputs
    and writes its result once.
        for x in (q, k):  -second · torch.cat([-second, first]) · x * cos · rotated * sin · their
                          sum
        then k is copied into the cache, and so is v
    where first and second are the halves of x: views, which move nothing. Fused: q, k and v are
    read once and written once.
    Do not count cos, sin, positions and slots: a few percent. All values have `dtype`. Errors: none
    to raise.

    Example: 1 query head, 1 KV head, head_dim 2, float16: a row of q, k or v is 4 bytes, half of it
    2.
        one x: 2+2 | 4+4 | 4+4 | 4+4 | 8+4 = 40 bytes; q and k 80, the copies of k and v 8 + 8: 96.
          Fused: 3 · 8 = 24.
    Write down your guess first: Llama-3-8B (32 and 8 heads of 128) in bfloat16, how many times as
    much?
    """
    # SOLUTION
    row = head_dim * dtype.itemsize
    step_by_step = 10 * (num_heads + num_kv_heads) * row + 2 * 2 * num_kv_heads * row
    return step_by_step, 2 * (num_heads + 2 * num_kv_heads) * row
    # END


@exercise("4.4", "Find the bugs: a kernel that rotates and writes", minutes=35, difficulty=3)
def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
) -> None:
    """Turn q: [T, Hq, D] in place; write k, turned, and v: [T, Hkv, D] to slot_mapping: [T] int64
    of the caches: [slots, Hkv, D].

    Half layout, by the rows positions: [T] int64 of cos_sin_cache: [num_positions, D]
    float32, cos in the first half of a row and sin in the second. A slot of -1: that token's k and
    v are written nowhere; its q turns all the same. Nothing else of the caches changes, nor k and
    v. All contiguous; q, k, v and the caches have one dtype; float32 inside. Errors: none to raise.

    Example, D = 2, one head each, position 5: q = [1, 0] becomes [cos 5, sin 5]; so does k = [1,
    0], in its slot; v stays.

    This launch is right. `rotate_and_write_kernel` below runs, and the first token of a sequence
    even comes out right. It has four bugs. Delete its line with `raise` and find them; the names
    and the launch may stay as they are.
    """
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    rotate_and_write_kernel[num_tokens, num_heads + 2 * num_kv_heads](
        q,
        k,
        v,
        k_cache,
        v_cache,
        positions,
        slot_mapping,
        cos_sin_cache,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAIRS=triton.next_power_of_2(head_dim // 2),
    )


@triton.jit
def rotate_and_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    positions_ptr,
    slot_mapping_ptr,
    cos_sin_ptr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One program per token and head: first those of q, then those of k, then those of v."""
    # SOLUTION 4.4
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    inside = pair < HEAD_DIM // 2
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + pair, mask=inside, other=0.0)
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + HEAD_DIM // 2 + pair, mask=inside, other=0.0)
    slot = tl.load(slot_mapping_ptr + token)
    if head < NUM_HEADS:
        x_ptr = q_ptr + (token * NUM_HEADS + head) * HEAD_DIM
        out_ptr = x_ptr
    elif head < NUM_HEADS + NUM_KV_HEADS:
        x_ptr = k_ptr + (token * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM
        out_ptr = k_cache_ptr + (slot * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM
    else:
        x_ptr = v_ptr + (token * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
        out_ptr = v_cache_ptr + (slot * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
    first = tl.load(x_ptr + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HEAD_DIM // 2 + pair, mask=inside, other=0.0).to(tl.float32)
    turns = head < NUM_HEADS + NUM_KV_HEADS
    out_first = tl.where(turns, first * cos - second * sin, first)
    out_second = tl.where(turns, second * cos + first * sin, second)
    kept = inside & ((head < NUM_HEADS) | (slot >= 0))
    tl.store(out_ptr + pair, out_first.to(out_ptr.dtype.element_ty), mask=kept)
    tl.store(out_ptr + HEAD_DIM // 2 + pair, out_second.to(out_ptr.dtype.element_ty), mask=kept)
    # STUB
    # token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # pair = tl.arange(0, PAIRS)
    # inside = pair < HEAD_DIM // 2
    # cos = tl.load(cos_sin_ptr + token * HEAD_DIM + pair, mask=inside, other=0.0)
    # sin = tl.load(cos_sin_ptr + token * HEAD_DIM + HEAD_DIM // 2 + pair, mask=inside, other=0.0)
    # slot = tl.load(slot_mapping_ptr + token)
    # if head < NUM_HEADS:
    #     x_ptr = q_ptr + (token * NUM_HEADS + head) * HEAD_DIM
    #     out_ptr = x_ptr
    # elif head < NUM_HEADS + NUM_KV_HEADS:
    #     x_ptr = k_ptr + (token * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM
    #     out_ptr = k_cache_ptr + (slot * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM
    # else:
    #     x_ptr = v_ptr + (token * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
    #     out_ptr = v_cache_ptr + (slot * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
    # first = tl.load(x_ptr + pair, mask=inside, other=0.0).to(tl.float32)
    # second = tl.load(x_ptr + HEAD_DIM // 2 + pair, mask=inside, other=0.0).to(tl.float32)
    # first = first * cos - second * sin
    # second = second * cos + first * sin
    # tl.store(out_ptr + pair, first.to(out_ptr.dtype.element_ty), mask=inside)
    # tl.store(out_ptr + HEAD_DIM // 2 + pair, second.to(out_ptr.dtype.element_ty), mask=inside)
    # END
