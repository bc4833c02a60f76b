"""Wrong answers to lesson 04's exercises: real slips, and the hint for each."""

import torch

from lessons.l02_naive_attention import rope as lesson2
from lessons.l04_positions import naive
from lessons.l04_positions.alibi import alibi_slopes
from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 4.1 RoPE from its formula


answers.slips(
    "4.1",
    """
    strides_ignored: You read x or positions as if their values followed each other.
    - positions[:, None, None]
    + positions.as_strided(positions.shape, (1,))[:, None, None]
    - first, second = x.chunk(2, dim=-1)
    + x = x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1))
    + first, second = x.chunk(2, dim=-1)

    end_of_a_table: Your angles end with a table. The formula knows no last position.
    - positions[:, None, None]
    + positions.clamp(max=4095)[:, None, None]

    d_in_the_exponent: Your frequencies fall half as fast: the exponent is -2i / D for the pairs
        i = 0 … D/2 - 1.
    - torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    + torch.arange(config.head_dim // 2, dtype=torch.float32)

    layouts_mixed: You turn neighbours, Meta's layout. Here coordinate i goes with i + D/2.
    - x.chunk(2, dim=-1)
    + x[..., 0::2], x[..., 1::2]
    - torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    + torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)

    cos_and_sin_swapped: cos and sin have changed places: position 0 must change nothing.
    - angles.cos(), angles.sin()
    + angles.sin(), angles.cos()

    turned_backwards: You turn the other way: the minus belongs to the first half.
    - first * cos - second * sin, second * cos + first * sin
    + first * cos + second * sin, second * cos - first * sin

    angles_in_bfloat16: Your angles are computed in half precision, where neighbours coincide.
    - positions[:, None, None].float() * frequency.to(positions.device)
    + positions[:, None, None].bfloat16() * frequency.bfloat16()

    angles_in_float16: Your angles are computed in half precision, where far ones are rounded.
    - positions[:, None, None].float() * frequency.to(positions.device)
    + positions[:, None, None].half() * frequency.half()

    positions_restart: You count from 0. `positions` says where the tokens are: others are in the
        cache.
    - positions[:, None, None]
    + torch.arange(len(positions))[:, None, None]

    one_position_late: Your positions are one too high: the first token is at 0.
    - positions[:, None, None]
    + (positions + 1)[:, None, None]

    theta_10000: You take theta = 10000; config.rope_theta has the checkpoint's.
    - config.rope_theta **
    + 10000.0 **

    scaling_ignored: You ignore config.rope_scaling.
    - frequency = share * frequency + (1 - share) * frequency / s.factor

    scaling_of_all_positions: You divide every frequency, as if positions were scaled. llama3 spares
        fast pairs.
    - share * frequency + (1 - share) * frequency / s.factor
    + frequency / s.factor

    scaling_multiplied: You speed the pairs up. A longer context needs slower ones: divide by
        factor.
    - * frequency / s.factor
    + * frequency * s.factor

    without_2_pi: A turn is 2π: that many radians are one turn, not one radian.
    - / (2 * math.pi)

    ramp_inverted: You slow the fast pairs and spare the slow ones: it is the other way round.
    - (turns - s.low_freq_factor)
    + (s.high_freq_factor - turns)

    no_blend: Between the two factors the frequencies blend; you cut at one of them.
    - share = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(
    -     0, 1
    - )
    + share = (turns > s.high_freq_factor).float()

    blends_wavelengths: You blend wavelengths. The checkpoint blends frequencies.
    - share * frequency + (1 - share) * frequency / s.factor
    + 1 / (share / frequency + (1 - share) * s.factor / frequency)

    fixed_factors: You take 1 and 4 for the two factors; the config has its own.
    - (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    + (turns - 1.0) / (4.0 - 1.0)

    returns_float32: You compute in float32, which is fine, and forget to return x's dtype.
    - .to(
    -     x.dtype
    - )
    + .float()

    changes_x: You turn the caller's x in place; a new tensor is asked for.
    - return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(
    -     x.dtype
    - )
    + return x.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))

    first_half_reused: The second half needs the first as it was, not as it is after turning.
    - second * cos + first * sin
    + second * cos + (first * cos - second * sin) * sin

    accepts_anything: An unknown rope_type gives wrong answers without a word; raise ValueError.
    - if s.rope_type not in ("linear", "llama3"):
    -     raise ValueError(f"rope_type: got {s.rope_type!r}; accepted: linear, llama3")
    """,
)


@answers.alternative("4.1")
def by_the_lessons_tables(config, positions, dtype):
    if config.rope_scaling is not None and config.rope_scaling.rope_type == "yarn":
        raise ValueError("rope_type: got 'yarn'; accepted: linear, llama3")
    cos, sin = lesson2.rope_tables(config, positions, torch.float32)
    return lambda x: lesson2.apply_rope(x, cos, sin).to(x.dtype)


# ---------------------------------------------------------------- 4.2 ALiBi


answers.slips(
    "4.2",
    """
    slope_positive: Your bias grows with the distance: far keys would win. It is minus slope ·
        distance.
    - return -torch.tensor
    + return torch.tensor

    one_formula_for_all: 12 heads do not get 2^(-8i/12): first those of 8, then every other one of
        16.
    - 2 ** int(math.log2(num_heads))
    + num_heads

    starts_at_one: Your first slope is 1. The first is 2^(-8/n).
    - 2 ** int(math.log2(num_heads))
    + num_heads
    - range(1, known + 1)
    + range(known)

    first_of_the_larger: You take the first slopes of the next larger power of two.
    - 2 ** int(math.log2(num_heads))
    + 2 ** math.ceil(math.log2(num_heads))
    - torch.tensor(slopes)
    + torch.tensor(slopes[:num_heads])

    every_second_slope: Of the larger set you take the 2nd, 4th, …: these are the smaller set again.
    - range(1, 2 * known, 2)
    + range(2, 2 * known + 1, 2)

    continues_the_larger: Of the larger set every other slope is taken, the 1st, 3rd, 5th, …
    - range(1, 2 * known, 2)
    + range(1, 2 * known)

    sorted: You sort the slopes: a trained head keeps its own, and the extra ones come last.
    - torch.tensor(slopes)
    + torch.tensor(sorted(slopes, reverse=True))

    repeated: The extra heads get slopes of their own, not those of the first heads again.
    - [2 ** (-8 * i / (2 * known)) for i in range(1, 2 * known, 2)][: num_heads - known]
    + slopes[: num_heads - known]

    top_left: Your first query is at key 0. With a cache the last query belongs to the last key.
    - torch.arange(num_keys - num_queries, num_keys)
    + torch.arange(num_queries)

    one_query_for_all: All your queries are at the last key; only the last one is.
    - torch.arange(num_keys - num_queries, num_keys)
    + torch.full((num_queries,), num_keys - 1)

    mirrored: You take the distance without its sign; what is ahead gets a positive bias here.
    - query[:, None] - torch.arange(num_keys)
    + (query[:, None] - torch.arange(num_keys)).abs()

    mask_inside: You put the causal mask into the bias; it is not part of it.
    - return -torch.tensor(slopes)[:, None, None] * distance
    + bias = -torch.tensor(slopes)[:, None, None] * distance
    + return bias.masked_fill(distance < 0, -torch.inf)

    in_float64: float32 is asked for.
    - torch.tensor(slopes)
    + torch.tensor(slopes, dtype=torch.float64)
    """,
)


@answers.alternative("4.2")
def element_by_element(num_heads, num_queries, num_keys):
    slopes = alibi_slopes(num_heads).tolist()
    return torch.tensor(
        [
            [
                [-slope * (i + num_keys - num_queries - j) for j in range(num_keys)]
                for i in range(num_queries)
            ]
            for slope in slopes
        ]
    )


# ---------------------------------------------------------------- 4.3 predict


answers.slips(
    "4.3",
    """
    v_rotated: v is not rotated: its content has no position.
    - (num_heads + num_kv_heads)
    + (num_heads + 2 * num_kv_heads)

    reads_alone: You count what is read; every result is written as well.
    - step_by_step = 10
    + step_by_step = 6

    writes_alone: You count what is written; every input is read as well.
    - step_by_step = 10
    + step_by_step = 4
    - 2 * 2 * num_kv_heads
    + 2 * num_kv_heads
    - return step_by_step, 2 *
    + return step_by_step,

    one_pass: You count one pass. Each of the five operations reads and writes.
    - step_by_step = 10
    + step_by_step = 2

    halves_are_free: The minus is an operation of its own: it reads a half and writes a half.
    - step_by_step = 10
    + step_by_step = 9

    minus_of_all: The minus touches one half alone.
    - step_by_step = 10
    + step_by_step = 11

    sum_reads_one: The sum reads two tensors.
    - step_by_step = 10
    + step_by_step = 9

    no_copies: k and v still have to be copied into the cache.
    - + 2 * 2 * num_kv_heads * row

    fused_write_only: Fused, each is still read once: two passes over q, k and v.
    - return step_by_step, 2 *
    + return step_by_step,

    q_alone: k turns as well.
    - (num_heads + num_kv_heads)
    + num_heads

    as_many_kv_heads: k has num_kv_heads heads, which may be fewer.
    - (num_heads + num_kv_heads)
    + 2 * num_heads

    always_two_bytes: You count 2 bytes a value whatever the dtype.
    - dtype.itemsize
    + 2

    in_kib: Bytes are asked for.
    - return step_by_step, 2 * (num_heads + 2 * num_kv_heads) * row
    + return step_by_step // 1024, 2 * (num_heads + 2 * num_kv_heads) * row // 1024
    """,
)


@answers.alternative("4.3")
def operation_by_operation(num_heads, num_kv_heads, head_dim, dtype):
    total = 0
    for heads in (num_heads, num_kv_heads):
        whole = heads * head_dim * dtype.itemsize
        total += (
            (whole // 2 + whole // 2)
            + (whole + whole)
            + (whole + whole)
            + (whole + whole)
            + (2 * whole + whole)
        )
    kv = num_kv_heads * head_dim * dtype.itemsize
    return total + 2 * (kv + kv), 2 * num_heads * head_dim * dtype.itemsize + 2 * kv + 2 * kv


# ---------------------------------------------------------------- 4.4 the kernel


answers.slips(
    "4.4",
    """
    as_given: All four bugs are there. Work the example through, then a token whose slot is -1.
    = offset_ignored, first_half_reused, v_rotated, slot_not_skipped

    offset_ignored: You turn by the token's number in the batch. `positions` says where it is.
    - tl.load(positions_ptr + token)
    + token

    slot_for_position: You turn by the slot. A row of the cache is a place, not a position.
    - tl.load(positions_ptr + token)
    + tl.maximum(tl.load(slot_mapping_ptr + token), 0)

    first_half_reused: The second half needs the first as it was loaded, not as it is after turning.
    - second * cos + first * sin
    + second * cos + (first * cos - second * sin) * sin

    v_rotated: v turns as well. Its content has no position: only q and k meet in a score.
    - turns = head < NUM_HEADS + NUM_KV_HEADS
    + turns = head >= 0

    slot_not_skipped: A slot of -1 writes into the row before the cache: another tensor's memory.
    - inside & ((head < NUM_HEADS) | (slot >= 0))
    + inside

    q_of_a_skipped_token: A token that is not kept still asks: its q turns all the same.
    - inside & ((head < NUM_HEADS) | (slot >= 0))
    + inside & (slot >= 0)

    k_not_rotated: k enters the cache unrotated.
    - turns = head < NUM_HEADS + NUM_KV_HEADS
    + turns = head < NUM_HEADS

    cos_and_sin_swapped: cos and sin have changed places: position 0 must change nothing.
    - cos = tl.load(
    + sin = tl.load(
    - sin = tl.load(
    + cos = tl.load(

    turned_backwards: You turn the other way: the minus belongs to the first half.
    - first * cos - second * sin
    + first * cos + second * sin
    - second * cos + first * sin
    + second * cos - first * sin

    layouts_mixed: You turn neighbours; here coordinate i goes with i + D/2.
    - tl.load(x_ptr + pair
    + tl.load(x_ptr + 2 * pair
    - tl.load(x_ptr + HEAD_DIM // 2 + pair
    + tl.load(x_ptr + 2 * pair + 1
    - tl.store(out_ptr + pair
    + tl.store(out_ptr + 2 * pair
    - tl.store(out_ptr + HEAD_DIM // 2 + pair
    + tl.store(out_ptr + 2 * pair + 1

    k_changed: k itself changes. Only its row in the cache does.
    - tl.store(out_ptr + pair
    + is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    + tl.store(x_ptr + pair, out_first.to(x_ptr.dtype.element_ty), mask=inside & is_k)
    + tl.store(out_ptr + pair

    rounded_tables: cos and sin are rounded to bfloat16 before they are used.
    - slot = tl.load(slot_mapping_ptr + token)
    + cos, sin = cos.to(tl.bfloat16).to(tl.float32), sin.to(tl.bfloat16).to(tl.float32)
    + slot = tl.load(slot_mapping_ptr + token)

    three_left_v: Three bugs are left: the position, the second half, the slot of -1.
    = offset_ignored, first_half_reused, slot_not_skipped

    three_left_slot: The position and the second half are left. Once q is right, look at v again.
    = offset_ignored, first_half_reused, v_rotated

    three_left_half: Three bugs are left: the position, v, the slot of -1.
    = offset_ignored, v_rotated, slot_not_skipped

    three_left_position: The second half and the slot of -1 are left. Once q is right, look at v
        again.
    = first_half_reused, v_rotated, slot_not_skipped
    """,
)


def in_pytorch(q, k, v, k_cache, v_cache, positions, slot_mapping, cos_sin_cache):
    q.copy_(naive.rotate(q, positions, cos_sin_cache))
    kept = slot_mapping >= 0
    k_cache[slot_mapping[kept]] = naive.rotate(k, positions, cos_sin_cache)[kept]
    v_cache[slot_mapping[kept]] = v[kept]


attacks(answers, "4.4", in_pytorch)


@triton.jit
def token_kernel(
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
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    inside, other = pair < HEAD_DIM // 2, pair + HEAD_DIM // 2
    table = cos_sin_ptr + tl.load(positions_ptr + token) * HEAD_DIM
    cos, sin = tl.load(table + pair, mask=inside), tl.load(table + other, mask=inside)
    slot = tl.load(slot_mapping_ptr + token)
    kept = inside & (slot >= 0)
    for head in range(NUM_HEADS):
        x = q_ptr + (token * NUM_HEADS + head) * HEAD_DIM
        first = tl.load(x + pair, mask=inside).to(tl.float32)
        second = tl.load(x + other, mask=inside).to(tl.float32)
        tl.store(x + pair, (first * cos - second * sin).to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(x + other, (first * sin + second * cos).to(q_ptr.dtype.element_ty), mask=inside)
    for head in range(NUM_KV_HEADS):
        row, place = (token * NUM_KV_HEADS + head), (slot * NUM_KV_HEADS + head) * HEAD_DIM
        k, v = k_ptr + row * HEAD_DIM, v_ptr + row * HEAD_DIM
        first = tl.load(k + pair, mask=kept).to(tl.float32)
        second = tl.load(k + other, mask=kept).to(tl.float32)
        out = k_cache_ptr + place
        tl.store(out + pair, (first * cos - second * sin).to(k_ptr.dtype.element_ty), mask=kept)
        tl.store(out + other, (first * sin + second * cos).to(k_ptr.dtype.element_ty), mask=kept)
        tl.store(v_cache_ptr + place + pair, tl.load(v + pair, mask=kept), mask=kept)
        tl.store(v_cache_ptr + place + other, tl.load(v + other, mask=kept), mask=kept)


@answers.alternative("4.4")
def one_program_per_token(q, k, v, k_cache, v_cache, positions, slot_mapping, cos_sin_cache):
    token_kernel[(len(q),)](
        q,
        k,
        v,
        k_cache,
        v_cache,
        positions,
        slot_mapping,
        cos_sin_cache,
        NUM_HEADS=q.shape[1],
        NUM_KV_HEADS=k.shape[1],
        HEAD_DIM=q.shape[2],
        PAIRS=triton.next_power_of_2(q.shape[2] // 2),
    )
