"""Wrong answers to lesson 04's exercises: real slips, and the hint for whoever made them."""

import math
from functools import partial

import torch

from lessons.l02_naive_attention import rope as lesson2
from lessons.l04_positions import naive
from lessons.l04_positions.alibi import alibi_slopes
from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 4.1 RoPE from its formula


def slipped_rotation(
    config,
    positions,
    dtype,
    *,
    exponent=2,
    layout="half",
    swapped=False,
    sign=1,
    precision=torch.float32,
    restart=False,
    theta=None,
    scaling="own",
    ramp="turns",
    out_dtype=None,
    in_place=False,
    reused=False,
    by_index=False,
    refuses=True,
    late=0,
    own_strides=True,
    table_rows=None,
):
    """RoPE with one slip. The keyword switches exist only here, to spell the wrong answers briefly."""
    dim, s = config.head_dim, config.rope_scaling
    if refuses and s is not None and s.rope_type not in ("linear", "llama3"):
        raise ValueError(f"rope_type: got {s.rope_type!r}")
    frequency = (theta or config.rope_theta) ** (
        -exponent * torch.arange(dim // 2, dtype=torch.float32) / dim
    )
    if s is not None and scaling != "ignored":
        turns = (
            s.original_max_position_embeddings * frequency / (1 if ramp == "no 2π" else 2 * math.pi)
        )
        low, high = (
            (s.low_freq_factor, s.high_freq_factor) if ramp != "fixed factors" else (1.0, 4.0)
        )
        share = ((turns - low) / (high - low)).clamp(0, 1)
        share = {
            "no blend": (turns > high).float(),
            "wavelengths blended": share,
            "inverted": 1 - share,
        }.get(ramp, share)
        if s.rope_type != "llama3" or scaling == "linear":
            share = torch.zeros_like(share)
        slowed = frequency * s.factor if scaling == "multiplied" else frequency / s.factor
        frequency = (
            1 / (share / frequency + (1 - share) / slowed)
            if ramp == "wavelengths blended"
            else share * frequency + (1 - share) * slowed
        )
    at = torch.arange(len(positions)) if restart else positions + late
    if not own_strides:
        at = at.as_strided(at.shape, (1,))
    if table_rows is not None:
        at = at.clamp(max=table_rows - 1)
    angles = at[:, None, None].to(precision) * frequency.to(precision)
    cos, sin = (angles.sin(), angles.cos()) if swapped else (angles.cos(), angles.sin())

    def rotate(x):
        if not own_strides:
            x = x.as_strided(x.shape, (x.shape[1] * dim, dim, 1))
        if layout == "interleaved":
            return naive.rotate_interleaved(x, cos.to(torch.float32), sign * sin.to(torch.float32))
        first, second = x.chunk(2, -1)
        out_first = first * cos - sign * second * sin
        out_second = second * cos + sign * (out_first if reused else first) * sin
        out = torch.cat([out_first, out_second], -1).to(out_dtype or x.dtype)
        return x.copy_(out) if in_place else out

    return rotate


for name, slip, hint in [
    (
        "strides_ignored",
        dict(own_strides=False),
        "You read x or positions as if their values lay one behind the other.",
    ),
    (
        "end_of_a_table",
        dict(table_rows=4096),
        "Your angles end with a table. The formula knows no last position.",
    ),
    (
        "d_in_the_exponent",
        dict(exponent=1),
        "Your frequencies fall half as fast: the exponent is -2i / D for the pairs i = 0 … D/2 - "
        "1.",
    ),
    (
        "layouts_mixed",
        dict(layout="interleaved"),
        "You turn neighbours, Meta's layout. Here coordinate i goes with i + D/2.",
    ),
    (
        "cos_and_sin_swapped",
        dict(swapped=True),
        "cos and sin have changed places: position 0 must change nothing.",
    ),
    (
        "turned_backwards",
        dict(sign=-1),
        "You turn the other way: the minus belongs to the first half.",
    ),
    (
        "angles_in_bfloat16",
        dict(precision=torch.bfloat16),
        "Your angles are computed in half precision, where neighbours coincide.",
    ),
    (
        "angles_in_float16",
        dict(precision=torch.float16),
        "Your angles are computed in half precision, where far ones are rounded.",
    ),
    (
        "positions_restart",
        dict(restart=True),
        "You count from 0. `positions` says where the tokens stand: others are in the cache.",
    ),
    (
        "one_position_late",
        dict(late=1),
        "Your positions are one too high: the first token stands at 0.",
    ),
    (
        "theta_10000",
        dict(theta=10000.0),
        "You take theta = 10000; config.rope_theta has the checkpoint's.",
    ),
    ("scaling_ignored", dict(scaling="ignored"), "You ignore config.rope_scaling."),
    (
        "scaling_of_all_positions",
        dict(scaling="linear"),
        "You divide every frequency, as if positions were scaled. llama3 spares fast pairs.",
    ),
    (
        "scaling_multiplied",
        dict(scaling="multiplied"),
        "You speed the pairs up. A longer context needs slower ones: divide by factor.",
    ),
    (
        "without_2_pi",
        dict(ramp="no 2π"),
        "A turn is 2π: that many radians are one turn, not one radian.",
    ),
    (
        "ramp_inverted",
        dict(ramp="inverted"),
        "You slow the fast pairs and spare the slow ones: it is the other way round.",
    ),
    (
        "no_blend",
        dict(ramp="no blend"),
        "Between the two factors the frequencies blend; you cut at one of them.",
    ),
    (
        "blends_wavelengths",
        dict(ramp="wavelengths blended"),
        "You blend wavelengths. The checkpoint blends frequencies.",
    ),
    (
        "fixed_factors",
        dict(ramp="fixed factors"),
        "You take 1 and 4 for the two factors; the config has its own.",
    ),
    (
        "returns_float32",
        dict(out_dtype=torch.float32),
        "You compute in float32, which is fine, and forget to return x's dtype.",
    ),
    (
        "changes_x",
        dict(in_place=True),
        "You turn the caller's x in place; a new tensor is asked for.",
    ),
    (
        "first_half_reused",
        dict(reused=True),
        "The second half needs the first as it was, not as it is after turning.",
    ),
    (
        "accepts_anything",
        dict(refuses=False),
        "An unknown rope_type gives wrong answers without a word; raise ValueError.",
    ),
]:
    answers.wrong("4.1", hint, name)(partial(slipped_rotation, **slip))


@answers.alternative("4.1")
def by_the_lessons_tables(config, positions, dtype):
    if config.rope_scaling is not None and config.rope_scaling.rope_type == "yarn":
        raise ValueError("rope_type: got 'yarn'; accepted: linear, llama3")
    cos, sin = lesson2.rope_tables(config, positions, torch.float32)
    return lambda x: lesson2.apply_rope(x, cos, sin).to(x.dtype)


# ---------------------------------------------------------------- 4.2 ALiBi


def slipped_bias(
    num_heads,
    num_queries,
    num_keys,
    *,
    sign=-1,
    slopes="published",
    align="bottom right",
    dtype=torch.float32,
    mirrored=False,
    masked=False,
):
    """ALiBi's bias with one slip."""
    known = 1 << (num_heads.bit_length() - 1)
    larger = alibi_slopes(2 * known).tolist()
    found = {
        "published": alibi_slopes(num_heads).tolist(),
        "one formula": [2 ** (-8 * i / num_heads) for i in range(1, num_heads + 1)],
        "from one": [2 ** (-8 * i / num_heads) for i in range(num_heads)],
        "first of the larger": alibi_slopes(1 << (num_heads - 1).bit_length()).tolist()[:num_heads],
        "even ones": alibi_slopes(known).tolist() + larger[1::2][: num_heads - known],
        "continued": alibi_slopes(known).tolist() + larger[: num_heads - known],
        "sorted": sorted(alibi_slopes(num_heads).tolist(), reverse=True),
        "repeated": (2 * alibi_slopes(known).tolist())[:num_heads],
    }[slopes]
    start = {
        "bottom right": num_keys - num_queries,
        "top left": 0,
        "last query alone": num_keys - 1,
    }[align]
    query = (
        torch.arange(start, start + num_queries)
        if align != "last query alone"
        else torch.full((num_queries,), start)
    )
    distance = query[:, None] - torch.arange(num_keys)
    distance = distance.abs() if mirrored else distance
    bias = sign * torch.tensor(found)[:, None, None] * distance
    return (bias.masked_fill(distance < 0, -torch.inf) if masked else bias).to(dtype)


for name, slip, hint in [
    (
        "slope_positive",
        dict(sign=1),
        "Your bias grows with the distance: far keys would win. It is minus slope · distance.",
    ),
    (
        "one_formula_for_all",
        dict(slopes="one formula"),
        "12 heads do not get 2^(-8i/12): first those of 8, then every other one of 16.",
    ),
    ("starts_at_one", dict(slopes="from one"), "Your first slope is 1. The first is 2^(-8/n)."),
    (
        "first_of_the_larger",
        dict(slopes="first of the larger"),
        "You take the first slopes of the next larger power of two.",
    ),
    (
        "every_second_slope",
        dict(slopes="even ones"),
        "Of the larger set you take the 2nd, 4th, …: these are the smaller set again.",
    ),
    (
        "continues_the_larger",
        dict(slopes="continued"),
        "Of the larger set every other slope is taken, the 1st, 3rd, 5th, …",
    ),
    (
        "sorted",
        dict(slopes="sorted"),
        "You sort the slopes: a trained head keeps its own, and the extra ones come last.",
    ),
    (
        "repeated",
        dict(slopes="repeated"),
        "The extra heads get slopes of their own, not those of the first heads again.",
    ),
    (
        "top_left",
        dict(align="top left"),
        "Your first query stands at key 0. Behind a cache the last query stands at the last key.",
    ),
    (
        "one_query_for_all",
        dict(align="last query alone"),
        "All your queries stand at the last key; only the last one does.",
    ),
    (
        "mirrored",
        dict(mirrored=True),
        "You take the distance without its sign; what lies ahead gets a positive bias here.",
    ),
    (
        "mask_inside",
        dict(masked=True),
        "You put the causal mask into the bias; it is not part of it.",
    ),
    ("in_float64", dict(dtype=torch.float64), "float32 is asked for."),
]:
    answers.wrong("4.2", hint, name)(partial(slipped_bias, **slip))


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


def slipped_bytes(
    num_heads,
    num_kv_heads,
    head_dim,
    dtype,
    *,
    turned=10,
    rotates_v=False,
    copies=2,
    fused=2,
    itemsize=None,
    heads="both",
    per=1,
):
    """The two numbers with one slip."""
    row = head_dim * (itemsize or dtype.itemsize)
    count = {"both": num_heads + num_kv_heads, "q alone": num_heads, "as many": 2 * num_heads}[
        heads
    ] + rotates_v * num_kv_heads
    return (turned * count * row + copies * 2 * num_kv_heads * row) // per, fused * (
        num_heads + 2 * num_kv_heads
    ) * row // per


for name, slip, hint in [
    ("v_rotated", dict(rotates_v=True), "v is not rotated: its content has no position."),
    ("reads_alone", dict(turned=6), "You count what is read; every result is written as well."),
    (
        "writes_alone",
        dict(turned=4, copies=1, fused=1),
        "You count what is written; every input is read as well.",
    ),
    (
        "one_pass",
        dict(turned=2),
        "You count one pass. Each of the five operations reads and writes.",
    ),
    (
        "halves_are_free",
        dict(turned=9),
        "The minus is an operation of its own: it reads a half and writes a half.",
    ),
    ("minus_of_all", dict(turned=11), "The minus touches one half alone."),
    ("sum_reads_one", dict(turned=9), "The sum reads two tensors."),
    ("no_copies", dict(copies=0), "k and v still have to be copied into the cache."),
    (
        "fused_write_only",
        dict(fused=1),
        "Fused, each is still read once: two passes over q, k and v.",
    ),
    ("q_alone", dict(heads="q alone"), "k turns as well."),
    ("as_many_kv_heads", dict(heads="as many"), "k has num_kv_heads heads, which may be fewer."),
    ("always_two_bytes", dict(itemsize=2), "You count 2 bytes a value whatever the dtype."),
    ("in_kib", dict(per=1024), "Bytes are asked for."),
]:
    answers.wrong("4.3", hint, name)(partial(slipped_bytes, **slip))


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


@triton.jit
def slipped_kernel(
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
    POSITION: tl.constexpr,
    REUSED: tl.constexpr,
    V_TURNS: tl.constexpr,
    K_TURNS: tl.constexpr,
    UNSKIPPED: tl.constexpr,
    Q_SKIPPED: tl.constexpr,
    SWAPPED: tl.constexpr,
    SIGN: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    K_IN_PLACE: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    inside = pair < HEAD_DIM // 2
    slot = tl.load(slot_mapping_ptr + token)
    position = tl.load(positions_ptr + token)
    if POSITION == "token":
        position = token
    if POSITION == "slot":
        position = tl.maximum(slot, 0)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + pair, mask=inside, other=0.0)
    sin = SIGN * tl.load(
        cos_sin_ptr + position * HEAD_DIM + HEAD_DIM // 2 + pair, mask=inside, other=0.0
    )
    if SWAPPED:
        cos, sin = sin, cos
    if ROUNDS:
        cos, sin = cos.to(tl.bfloat16).to(tl.float32), sin.to(tl.bfloat16).to(tl.float32)
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    if head < NUM_HEADS:
        x_ptr = q_ptr + (token * NUM_HEADS + head) * HEAD_DIM
        out_ptr = x_ptr
    elif head < NUM_HEADS + NUM_KV_HEADS:
        x_ptr = k_ptr + (token * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM
        out_ptr = k_cache_ptr + (slot * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM
    else:
        x_ptr = v_ptr + (token * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
        out_ptr = v_cache_ptr + (slot * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
    one, other = (2 * pair, 2 * pair + 1) if NEIGHBOURS else (pair, pair + HEAD_DIM // 2)
    first = tl.load(x_ptr + one, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + other, mask=inside, other=0.0).to(tl.float32)
    out_first = first * cos - second * sin
    out_second = second * cos + (out_first if REUSED else first) * sin
    turns = is_q | (is_k & K_TURNS) | (~is_q & ~is_k & V_TURNS)
    out_first, out_second = tl.where(turns, out_first, first), tl.where(turns, out_second, second)
    kept = inside & ((is_q & (not Q_SKIPPED)) | (slot >= 0) | UNSKIPPED)
    tl.store(out_ptr + one, out_first.to(out_ptr.dtype.element_ty), mask=kept)
    tl.store(out_ptr + other, out_second.to(out_ptr.dtype.element_ty), mask=kept)
    if K_IN_PLACE:
        tl.store(x_ptr + one, out_first.to(out_ptr.dtype.element_ty), mask=inside & is_k)


def slipped_write(q, k, v, k_cache, v_cache, positions, slot_mapping, cos_sin_cache, **slip):
    """The wrapper of the exercise with the kernel above. Every switch is off unless given."""
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    switches = dict(
        POSITION="own",
        REUSED=False,
        V_TURNS=False,
        K_TURNS=True,
        UNSKIPPED=False,
        Q_SKIPPED=False,
        SWAPPED=False,
        SIGN=1,
        NEIGHBOURS=False,
        K_IN_PLACE=False,
        ROUNDS=False,
    )
    slipped_kernel[num_tokens, num_heads + 2 * num_kv_heads](
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
        **switches | slip,
    )


AS_GIVEN = dict(POSITION="token", REUSED=True, V_TURNS=True, UNSKIPPED=True)
for name, slip, hint in [
    (
        "as_given",
        AS_GIVEN,
        "All four bugs are there. Work the example through, then a token whose slot is -1.",
    ),
    (
        "offset_ignored",
        dict(POSITION="token"),
        "You turn by the token's number in the batch. `positions` says where it stands.",
    ),
    (
        "slot_for_position",
        dict(POSITION="slot"),
        "You turn by the slot. A row of the cache is a place, not a position.",
    ),
    (
        "first_half_reused",
        dict(REUSED=True),
        "The second half needs the first as it was loaded, not as it is after turning.",
    ),
    (
        "v_rotated",
        dict(V_TURNS=True),
        "v turns as well. Its content has no position: only q and k meet in a score.",
    ),
    (
        "slot_not_skipped",
        dict(UNSKIPPED=True),
        "A slot of -1 writes into the row before the cache: somebody else's memory.",
    ),
    (
        "q_of_a_skipped_token",
        dict(Q_SKIPPED=True),
        "A token that is not kept still asks: its q turns all the same.",
    ),
    ("k_not_rotated", dict(K_TURNS=False), "k enters the cache unrotated."),
    (
        "cos_and_sin_swapped",
        dict(SWAPPED=True),
        "cos and sin have changed places: position 0 must change nothing.",
    ),
    (
        "turned_backwards",
        dict(SIGN=-1),
        "You turn the other way: the minus belongs to the first half.",
    ),
    (
        "layouts_mixed",
        dict(NEIGHBOURS=True),
        "You turn neighbours; here coordinate i goes with i + D/2.",
    ),
    ("k_changed", dict(K_IN_PLACE=True), "k itself changes. Only its row in the cache does."),
    (
        "rounded_tables",
        dict(ROUNDS=True),
        "cos and sin are rounded to bfloat16 before they are used.",
    ),
    (
        "three_left_v",
        AS_GIVEN | dict(V_TURNS=False),
        "Three bugs are left: the position, the second half, the slot of -1.",
    ),
    (
        "three_left_slot",
        AS_GIVEN | dict(UNSKIPPED=False),
        "The position and the second half are left. Once q is right, look at v again.",
    ),
    (
        "three_left_half",
        AS_GIVEN | dict(REUSED=False),
        "Three bugs are left: the position, v, the slot of -1.",
    ),
    (
        "three_left_position",
        AS_GIVEN | dict(POSITION="own"),
        "The second half and the slot of -1 are left. Once q is right, look at v again.",
    ),
]:
    answers.wrong("4.4", hint, name)(partial(slipped_write, **slip))


@answers.wrong("4.4", "PyTorch does it all. Write the kernel.")
def in_pytorch(q, k, v, k_cache, v_cache, positions, slot_mapping, cos_sin_cache):
    q.copy_(naive.rotate(q, positions, cos_sin_cache))
    kept = slot_mapping >= 0
    k_cache[slot_mapping[kept]] = naive.rotate(k, positions, cos_sin_cache)[kept]
    v_cache[slot_mapping[kept]] = v[kept]


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
