"""Proves that scores depend on the distance alone, that both layouts are one model, and that the
kernel rotates and writes.
"""

import math
import random
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention import rope
from lessons.l02_naive_attention.rope import rope_inv_freq, rope_tables
from lessons.l04_positions import naive, optimized
from lessons.l04_positions.alibi import (
    alibi_attention,
    alibi_bias,
    alibi_slopes,
    sinusoidal,
)
from lessons.l04_positions.lab.specs import KERNELS
from lessons.l04_positions.lab.traffic import eager_bytes, fused_bytes
from lessons.l04_positions.naive import (
    half_from_interleaved,
    interleaved_from_half,
    inverse_frequencies,
    new_cos_sin_cache,
    rotate,
)
from lessons.l04_positions.optimized import (
    rope_cache,
    rope_cache_kernel,
    rotate_kernel,
    rotate_rows,
)
from lessons.toolbox.kernels.accesses import Accesses
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.device import default_device, interpreting
from lessons.toolbox.model.config import ModelConfig, RopeScaling
from lessons.toolbox.proof.numerics import (
    NotEquivalent,
    attention_inputs,
    draw,
    poisoned,
    prove,
    with_canaries,
)
from lessons.toolbox.proof.refusals import KINDS, assert_refused

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter
CONFIG = ModelConfig(
    "llama",
    vocab_size=29,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=16,
    max_position_embeddings=96,
    sliding_windows=(None, 5),
)
LAYOUTS = list(naive.ROTATIONS)
SCALINGS = {
    "default": None,
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, original_max_position_embeddings=32),
    "yarn": RopeScaling("yarn", 8.0, original_max_position_embeddings=32),
}


def table(head_dim, num_positions=64, dtype=torch.float32):
    return new_cos_sin_cache(inverse_frequencies(head_dim).to(dtype), num_positions).to(DEVICE)


# ---------------------------------------------------------------- the distance, and nothing else


def rope_scores(layout):
    """q, k: [T, H, D] at positions [T] -> every score [H, T, T], float64."""

    def scores(q, k, positions):
        cos_sin = new_cos_sin_cache(inverse_frequencies(q.shape[-1]), int(positions.max()) + 1)
        return torch.einsum(
            "qhd,khd->hqk", *(rotate(x, positions, cos_sin, layout) for x in (q, k))
        )

    return scores


def alibi_scores(q, k, positions):
    """The bias of lesson code for the last of `positions`' keys: what a query at each position
    sees, shifted or not.
    """
    bias = alibi_bias(alibi_slopes(q.shape[1]), *2 * [int(positions.max()) + 1])
    return torch.einsum("qhd,khd->hqk", q, k) + bias[:, positions][:, :, positions]


def added_scores(q, k, positions):
    """Positions added to the embedding, as in the first transformer."""
    there = sinusoidal(positions, q.shape[-1])[:, None]
    return torch.einsum("qhd,khd->hqk", q + there, k + there)


def shift_changes(scores, seed):
    """The largest change of any score when all positions move by the same random amount. float64,
    scores of size 1 to 30.
    """
    q, k = (draw("normal", (7, 5, 16), dtype=torch.float64, seed=seed + i) for i in range(2))
    positions = torch.tensor(sorted(random.sample(range(200), 7)))
    here = scores(q, k, positions)
    return max(
        float((scores(q, k, positions + random.randrange(1, 1000)) - here).abs().max())
        for _ in range(5)
    )


@pytest.mark.parametrize(
    "scores", [*(rope_scores(layout) for layout in LAYOUTS), alibi_scores], ids=[*LAYOUTS, "alibi"]
)
def test_scores_depend_on_the_distance_only(scores, seed):
    assert shift_changes(scores, seed) < 1e-9


def test_added_positions_depend_on_more(seed):
    assert shift_changes(added_scores, seed) > 0.1


@pytest.mark.parametrize(
    "slip", ["v is absolute: only q turns", "two layouts in one score", "k turns twice as fast"]
)
def test_a_wrong_rotation_sees_absolute_positions(slip, seed):
    def scores(q, k, positions):
        cos_sin = new_cos_sin_cache(inverse_frequencies(16), 2 * int(positions.max()) + 1)
        turned_k = {
            "v is absolute: only q turns": k,
            "two layouts in one score": rotate(k, positions, cos_sin, "interleaved"),
            "k turns twice as fast": rotate(k, 2 * positions, cos_sin),
        }[slip]
        return torch.einsum("qhd,khd->hqk", rotate(q, positions, cos_sin), turned_k)

    assert shift_changes(scores, seed) > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rotation_keeps_lengths_and_adds_up(layout, seed):
    """Turning by a and then by b is turning by a + b; position 0 changes nothing."""
    x, cos_sin = (
        draw("normal", (4, 3, 20), dtype=torch.float64, seed=seed),
        table(20, dtype=torch.float64).cpu(),
    )
    a, b = (torch.randint(0, 32, (4,)) for _ in range(2))
    turned = rotate(rotate(x, a, cos_sin, layout), b, cos_sin, layout)
    torch.testing.assert_close(turned, rotate(x, a + b, cos_sin, layout), atol=1e-12, rtol=0)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-12, rtol=0)
    assert torch.equal(rotate(x, 0 * a, cos_sin, layout), x)


# ---------------------------------------------------------------- tables and scaling


def test_frequencies_by_hand():
    """D = 4, theta = 100: the pairs turn by 1 and by 1/10 radian a position (D in place of D/2
    pairs would give 1/sqrt(10)).
    """
    assert inverse_frequencies(4, 100.0).tolist() == pytest.approx([1.0, 0.1])
    x = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]], dtype=torch.float64)
    cos_sin, position = new_cos_sin_cache(inverse_frequencies(4, 100.0), 4), torch.tensor([3])
    cos, sin = math.cos(3), math.sin(3)
    assert rotate(x, position, cos_sin, "half")[0, 0].tolist() == pytest.approx([cos, 0, sin, 0])
    assert rotate(x, position, cos_sin, "interleaved")[0, 0].tolist() == pytest.approx(
        [cos, sin, 0, 0]
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_the_table_is_the_decoders(name):
    config = replace(CONFIG, rope_scaling=SCALINGS[name], rope_theta=500.0)
    cos_sin = rope.new_cos_sin_cache(config, 96)
    cos, sin = rope_tables(config, torch.arange(96), torch.float32)
    assert torch.equal(cos_sin, torch.cat([cos[:, 0, :4], sin[:, 0, :4]], dim=-1))
    if name == "default":
        torch.testing.assert_close(
            rope_inv_freq(config, torch.device("cpu")).double(),
            inverse_frequencies(8, 500.0),
            atol=1e-7,
            rtol=1e-6,
        )


def test_angles_in_half_precision_lose_the_position():
    """What the table refuses: at position 15962 the fastest pair is off by most of a radian."""
    wrong = (torch.tensor(15962.0).bfloat16() * torch.tensor(1.0).bfloat16()).double()
    assert abs(wrong - 15962) > 4
    with pytest.raises(
        ValueError, match=r"inv_freq: got torch\.bfloat16; accepted: float32 or float64"
    ):
        new_cos_sin_cache(inverse_frequencies(8).bfloat16(), 4)


# ---------------------------------------------------------------- the two layouts are one model


def test_weights_change_layout_and_back(seed):
    """Meta's weights turned interleaved, and the permuted ones turned by halves: every score is the
    same, biases included.
    """
    heads, head_dim, hidden = 6, 20, 32
    weights, biases = (
        draw("normal", (2, heads * head_dim, *more), dtype=torch.float64, seed=seed)
        for more in ((hidden,), ())
    )
    x, positions = (
        draw("normal", (9, hidden), dtype=torch.float64, seed=seed + 1),
        torch.randperm(64)[:9],
    )
    cos_sin = table(head_dim, dtype=torch.float64).cpu()

    def scores(weights, biases, layout):
        projected = (
            (x @ w.T + b).unflatten(-1, (heads, head_dim)) for w, b in zip(weights, biases)
        )
        q, k = (rotate(each, positions, cos_sin, layout) for each in projected)
        return torch.einsum("qhd,khd->hqk", q, k)

    metas = scores(weights, biases, "interleaved")
    changed = [[half_from_interleaved(w, heads) for w in both] for both in (weights, biases)]
    torch.testing.assert_close(scores(*changed, "half"), metas, atol=1e-10, rtol=0)
    for w, c in zip((*weights, *biases), (*changed[0], *changed[1])):
        assert torch.equal(interleaved_from_half(c, heads), w) and not torch.equal(c, w)
    assert (scores(weights, biases, "half") - metas).abs().max() > 0.1  # the permutation forgotten
    inverted = [[interleaved_from_half(w, heads) for w in both] for both in (weights, biases)]
    assert (scores(*inverted, "half") - metas).abs().max() > 0.1
    # across heads
    one_head = [[half_from_interleaved(w, 1) for w in both] for both in (weights, biases)]
    assert (scores(*one_head, "half") - metas).abs().max() > 0.1


def test_permutation_of_a_head_of_four():
    assert half_from_interleaved(torch.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


# ---------------------------------------------------------------- ALiBi


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16, 20, 71])
def test_slopes_are_the_published_ones(num_heads):
    """Against transformers' Bloom, which follows the published code: its bias of the key at
    position 1 is the slope.
    """
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(num_heads).float(), theirs, atol=1e-7, rtol=1e-5)


def test_slopes_of_twelve_heads_by_hand():
    of_eight, of_sixteen = [2.0**-i for i in range(1, 9)], [2.0 ** -(i / 2) for i in range(1, 17)]
    assert alibi_slopes(12).tolist() == pytest.approx(of_eight + of_sixteen[0:8:2])


def test_bias_by_hand():
    assert alibi_bias(torch.tensor([0.5]), 2, 4).tolist() == [
        [[-1.0, -0.5, 0.0, 0.5], [-1.5, -1.0, -0.5, 0.0]]
    ]


def test_alibi_is_a_bias_of_the_scores(seed):
    """Against PyTorch's attention with the bias as its mask; a constant shift of a row's scores
    would not show, a slope does.
    """
    q, k, v = attention_inputs("normal", 5, 12, 12, 4, 16, dtype=torch.float64, seed=seed)
    bias = alibi_bias(alibi_slopes(12), 5, 12).masked_fill(
        torch.ones(5, 12).triu(8).bool(), -torch.inf
    )
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, attn_mask=bias, enable_gqa=True
    )
    torch.testing.assert_close(
        alibi_attention(q, k, v, alibi_slopes(12)), want.transpose(0, 1), atol=1e-12, rtol=0
    )


# ---------------------------------------------------------------- the kernels


def rotate_and_write(
    q, k, v, k_cache, v_cache, positions, slot_mapping, cos_sin_cache, layout="half"
):
    """The definition of rope_cache, in PyTorch."""
    q.copy_(rotate(q, positions, cos_sin_cache, layout))
    kept = slot_mapping >= 0
    k_cache[slot_mapping[kept]] = rotate(k, positions, cos_sin_cache, layout)[kept]
    v_cache[slot_mapping[kept]] = v[kept]


def inputs_for(
    num_tokens, num_heads, num_kv_heads, head_dim, dtype=torch.float32, seed=0, num_slots=11
):
    """The tensors of rope_cache: random positions, slots in any order with every fourth token
    skipped.
    """
    q, k, v = (
        draw("normal", (num_tokens, heads, head_dim), dtype=dtype, seed=seed + i, device=DEVICE)
        for i, heads in enumerate((num_heads, num_kv_heads, num_kv_heads))
    )
    caches = [
        draw(
            "normal", (num_slots, num_kv_heads, head_dim), dtype=dtype, seed=seed + i, device=DEVICE
        )
        for i in (3, 4)
    ]
    slots = [
        -1 if i % 4 == 3 else slot
        for i, slot in enumerate(random.sample(range(num_slots), num_tokens))
    ]
    positions = torch.randint(0, 64, (num_tokens,), device=DEVICE)
    return [
        q,
        k,
        v,
        *caches,
        positions,
        torch.tensor(slots, dtype=torch.int64, device=DEVICE),
        table(head_dim),
    ]


def fused(layout):
    return lambda *inputs: rope_cache(*inputs, last_position=63, layout=layout)


# (T, Hq, Hkv, D, dtype): head counts and dims that are no powers of two, MQA, MHA, two programs a
# token, 16 bits
SHAPES = [
    (1, 1, 1, 2, torch.float32),
    (5, 6, 2, 8, torch.float32),
    (3, 12, 3, 80, torch.float32),
    (2, 40, 1, 64, torch.float32),
    (3, 20, 20, 128, torch.float32),
    (2, 24, 3, 256, torch.float32),
    (4, 7, 7, 20, torch.bfloat16),
    (3, 8, 2, 96, torch.float16),
    (2, 4, 1, 128, torch.bfloat16),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_cache_kernel(shape, layout, seed, proof):
    """q in place, k and v in their slots; every other row of the caches stays."""
    inputs = inputs_for(*shape, seed=seed)
    proof.record(
        rope_cache_kernel,
        prove(fused(layout), lambda *x: rotate_and_write(*x, layout), inputs, mutates=(0, 3, 4)),
    )


@pytest.mark.parametrize("name", ["large", "tiny", "ascending"])
def test_rope_cache_kernel_on_other_inputs(name, seed, proof):
    inputs = inputs_for(5, 6, 2, 16, seed=seed)
    inputs[:3] = (draw(name, x.shape, seed=seed, device=DEVICE) for x in inputs[:3])
    proof.record(
        rope_cache_kernel, prove(fused("half"), rotate_and_write, inputs, mutates=(0, 3, 4))
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_cache_writes_nothing_beside(layout, seed):
    q, k, v, *_, positions, slots, cos_sin = inputs_for(7, 6, 3, 20, seed=seed)
    (q_out, check_q), (k_cache, check_k), (v_cache, check_v) = (
        with_canaries(shape, device=DEVICE) for shape in (q.shape, (11, 3, 20), (11, 3, 20))
    )
    q_out.copy_(q)
    rope_cache(q_out, k, v, k_cache, v_cache, positions, slots, cos_sin, 63, layout)
    for check in (check_q, check_k, check_v):
        check()
    assert (
        k_cache.isfinite().any(-1).sum()
        == v_cache.isfinite().any(-1).sum()
        == 3 * (slots >= 0).sum()
    )


def test_slices_of_one_projection(seed):
    """q and v as slices of a fused qkv projection: rows dense, tokens far apart; k, after a norm
    say, lies by itself.
    """
    qkv = draw("normal", (5, 10, 8), seed=seed, device=DEVICE)
    want = qkv.clone()
    k_cache, v_cache = (poisoned((5, 2, 8), device=DEVICE) for _ in range(2))
    positions = torch.arange(5, device=DEVICE)
    rope_cache(
        qkv[:, :6],
        qkv[:, 6:8].contiguous(),
        qkv[:, 8:],
        k_cache,
        v_cache,
        positions,
        positions,
        table(8),
        4,
    )
    torch.testing.assert_close(
        qkv[:, :6], rotate(want[:, :6], positions, table(8)), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(
        k_cache, rotate(want[:, 6:8], positions, table(8)), atol=1e-6, rtol=0
    )
    assert torch.equal(qkv[:, 6:], want[:, 6:]) and torch.equal(v_cache, want[:, 8:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((1, 1, 2), torch.float32),
        ((5, 6, 80), torch.float32),
        ((2, 70, 128), torch.float32),
        ((3, 5, 64), torch.bfloat16),
    ],
    ids=str,
)
def test_rotate_kernel(shape, dtype, layout, seed, proof):
    x = draw("normal", shape, dtype=dtype, seed=seed, device=DEVICE)
    inputs = [x, torch.randint(0, 64, shape[:1], device=DEVICE), table(shape[2])]
    proof.record(
        rotate_kernel,
        prove(
            lambda *i: rotate_rows(*i, last_position=63, layout=layout).clone(),
            lambda *i: i[0].copy_(rotate(*i, layout)).clone(),
            inputs,
            mutates=(0,),
        ),
    )


def test_rotate_kernel_turns_a_part_of_each_head(seed, proof):
    """Partial rotary dimensions are a slice: the rest of a head is not touched."""
    whole = draw("normal", (4, 3, 24), seed=seed, device=DEVICE)
    inputs = [whole[..., :16], torch.randint(0, 64, (4,), device=DEVICE), table(16)]
    proof.record(
        rotate_kernel,
        prove(
            lambda *i: rotate_rows(*i, last_position=63).clone(),
            lambda *i: i[0].copy_(rotate(*i)).clone(),
            inputs,
            mutates=(0,),
        ),
    )
    kept = whole[..., 16:].clone()
    rotate_rows(whole[..., :16], inputs[1], inputs[2], 63)
    assert torch.equal(whole[..., 16:], kept)


def test_a_token_does_not_depend_on_the_batch(seed):
    q, k, v, k_cache, v_cache, positions, slots, cos_sin = inputs_for(7, 6, 3, 20, seed=seed)
    alone, together = q.clone(), q.clone()
    rope_cache(together, k, v, k_cache.clone(), v_cache.clone(), positions, slots, cos_sin, 63)
    for t in range(7):
        rope_cache(
            alone[t : t + 1],
            k[t : t + 1],
            v[t : t + 1],
            k_cache,
            v_cache,
            positions[t : t + 1],
            slots[t : t + 1],
            cos_sin,
            63,
        )
    assert torch.equal(alone, together)


def test_no_token_changes_nothing():
    q, k, v, k_cache, v_cache, positions, slots, cos_sin = inputs_for(1, 6, 2, 8)
    before = k_cache.clone()
    rope_cache(q[:0], k[:0], v[:0], k_cache, v_cache, positions[:0], slots[:0], cos_sin, -1)
    assert torch.equal(k_cache, before) and rotate_rows(
        q[:0], positions[:0], cos_sin, -1
    ).shape == (0, 6, 8)


@pytest.mark.parametrize("position", [64, 10**6, -1])
def test_a_position_that_lies_gives_nan(position):
    """To look, the host would wait for the GPU; the kernel reads nothing beyond the table, and NaN
    shows what happened.
    """
    q, k, v, k_cache, v_cache, positions, slots, cos_sin = inputs_for(3, 6, 2, 8)
    positions[1], slots = position, torch.arange(3, device=DEVICE)
    rope_cache(q, k, v, k_cache, v_cache, positions, slots, cos_sin, last_position=63)
    for x in (q, k_cache[:3]):
        assert x[1].isnan().all() and x[[0, 2]].isfinite().all()
    assert v_cache.isfinite().all()


def slipped(slip):
    """rope_cache with one slip."""

    def run(q, k, v, k_cache, v_cache, positions, slots, cos_sin):
        last, layout, half = 63, "half", cos_sin.shape[1] // 2
        cos, sin = cos_sin[:, :half], cos_sin[:, half:]
        tables = {
            "cos and sin swapped": torch.cat([sin, cos], 1),
            "turned the other way": torch.cat([cos, -sin], 1),
            "angles in half precision": new_cos_sin_cache(
                inverse_frequencies(2 * half).bfloat16().float(), 64
            ).to(DEVICE),
            "D, not D/2, in the exponent": new_cos_sin_cache(
                inverse_frequencies(2 * half).sqrt().float(), 64
            ).to(DEVICE),
            "one position late": cos_sin.roll(-1, 0),
        }
        if slip == "layouts mixed":
            layout = "interleaved"
        if slip == "offset ignored":
            positions = torch.arange(len(q), device=DEVICE)
        if slip == "slot taken for the position":
            positions = slots.clamp(min=0)
        if slip == "v rotated":
            v = rotate(v, positions, cos_sin)
        if slip == "k not rotated":
            positions, before = 0 * positions, positions
            q.copy_(rotate(q, before, cos_sin))
        if slip == "skipped token kept":
            free = min(set(range(len(k_cache))) - set(slots.tolist()))
            slots = slots.masked_fill(slots < 0, free)
        rope_cache(
            q,
            k,
            v,
            k_cache,
            v_cache,
            positions,
            slots,
            tables.get(slip, cos_sin).contiguous(),
            last,
            layout,
        )
        if slip == "q rotated twice":
            rotate_rows(q, positions, cos_sin, last)

    return run


@pytest.mark.parametrize(
    "slip",
    [
        "layouts mixed",
        "cos and sin swapped",
        "turned the other way",
        "angles in half precision",
        "D, not D/2, in the exponent",
        "one position late",
        "offset ignored",
        "v rotated",
        "slot taken for the position",
        "k not rotated",
        "skipped token kept",
        "q rotated twice",
    ],
)
def test_a_wrong_rope_cache_is_rejected(slip, seed):
    inputs = inputs_for(7, 6, 2, 16, seed=seed)
    # no position by chance that of its token or slot
    inputs[5] = torch.randperm(40, device=DEVICE)[:7] + 20
    with pytest.raises(NotEquivalent):
        prove(slipped(slip), rotate_and_write, inputs, mutates=(0, 3, 4))


# ---------------------------------------------------------------- bytes

only_interpreted = pytest.mark.skipif(
    not interpreting(), reason="NOT RUN: loads are counted in Triton's interpreter"
)


@only_interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape",
    [(5, 6, 2, 8, torch.float32), (3, 12, 3, 80, torch.bfloat16), (2, 80, 4, 128, torch.float16)],
    ids=str,
)
def test_the_kernel_moves_each_byte_once(shape, layout, seed):
    """q, k, v read once and written once; a row of the table, a position and a slot; nothing
    else.
    """
    tokens, heads, kv_heads, head_dim, dtype = shape
    inputs = inputs_for(*shape, seed=seed)
    inputs[6] = torch.arange(tokens)  # none skipped
    with Accesses() as accesses:
        fused(layout)(*inputs)
    programs = tokens * -(
        -kv_heads // optimized.blocks_for(kv_heads, heads // kv_heads, head_dim)[0]["BLOCK_KV"]
    )
    # One program a token, as fused_bytes counts; each further one reads the table's row, position
    # and slot again (from a cache).
    again = (programs - tokens) * (4 * head_dim + 16)
    assert (
        accesses.read_bytes + accesses.written_bytes
        == fused_bytes(tokens, heads, kv_heads, head_dim, dtype.itemsize) + again
    )


@only_interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotate_kernel_moves_each_byte_once(layout, seed):
    """70 heads of 128 are three programs of 32 a token: the last one reads and writes 6 heads."""
    with Accesses() as accesses:
        rotate_rows(draw("normal", (2, 70, 128), seed=seed), torch.arange(2), table(128), 1, layout)
    assert accesses.read_bytes + accesses.written_bytes == 2 * (
        2 * 70 * 128 * 4 + 3 * (128 * 4 + 8)
    )


def test_eager_moves_several_times_the_bytes():
    """Llama-3-8B's heads, 4096 tokens, bfloat16, counted on the meta device."""
    shapes, slots = (
        ((4096, 32, 128), (4096, 8, 128), (4096, 8, 128), (8192, 8, 128), (8192, 8, 128)),
        4096,
    )
    q, k, v, k_cache, v_cache = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes
    )
    cos, sin = torch.empty(2, 4096, 1, 64, device="meta")

    def eager(q, k, v):
        naive.rotate_half(q, cos, sin)
        k_cache[:slots], v_cache[:slots] = naive.rotate_half(k, cos, sin), v

    least = fused_bytes(4096, 32, 8, 128, 2)
    assert (
        2 * (q.nbytes + k.nbytes + v.nbytes) < least < 1.03 * 2 * (q.nbytes + k.nbytes + v.nbytes)
    )
    assert 6 < eager_bytes(eager, q, k, v) / least < 9


def test_moved_bytes_by_hand():
    a, b, index = (torch.empty(*shape, device="meta") for shape in ((10,), (4, 10), (2,)))
    assert eager_bytes(lambda: a + a) == 80  # read once, written once
    assert eager_bytes(lambda: a.view(2, 5).transpose(0, 1)) == 0
    assert eager_bytes(lambda: b[index.long()]) == 2 * 80 + 16 + 24
    assert eager_bytes(lambda: b[1].copy_(a)) == eager_bytes(lambda: b.__setitem__(1, a)) == 80
    assert eager_bytes(lambda: a.add_(1)) == 40 + 40


@pytest.mark.compiler
def test_the_compiler_gives_wide_loads_without_spills():
    for report in check_all(KERNELS):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits, f"{report.name} on sm_{report.chip}: {report}"
        # 64 values of q for each thread are 8 loads of 16 bytes in 16 bits
        least = 1 if "2x64" in report.name else 8
        assert report.loads_128bit >= least, (
            f"{report.name} on sm_{report.chip}: {report.loads_128bit} loads of 16 bytes"
        )
        assert report.registers <= 168, (
            f"{report.name} on sm_{report.chip}: {report.registers} registers"
        )


# ---------------------------------------------------------------- bad input


def rope_arguments():
    names = ("q", "k", "v", "k_cache", "v_cache", "positions", "slot_mapping", "cos_sin_cache")
    return dict(zip(names, inputs_for(3, 6, 2, 8)), last_position=63)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(q=torch.zeros(3, 5, 8)),
            "q, k: got 5 query heads for 2 KV heads; accepted: a multiple",
        ),
        (dict(q=torch.zeros(3, 6, 4)), "q, k, v, k_cache, v_cache: got"),
        (dict(v=torch.zeros(3, 2, 8).half()), "one dtype for all five"),
        (
            dict(last_position=64),
            "last_position: got 64; accepted: 0 to 63, the rows of cos_sin_cache",
        ),
        (dict(last_position=-1), "last_position: got -1"),
        (dict(layout="neox"), "layout: got 'neox'; accepted: half, interleaved"),
        (
            dict(positions=torch.zeros(3, dtype=torch.int32)),
            "positions: got torch.int32 .3,.; accepted: int64 .3,.",
        ),
        (dict(cos_sin_cache=torch.zeros(64, 4)), "cos_sin_cache: got torch.float32 .64, 4."),
        (dict(cos_sin_cache=torch.zeros(64, 8).bfloat16()), "cos_sin_cache: got torch.bfloat16"),
        (dict(q=torch.zeros(3, 8, 6).transpose(1, 2)), "got strides"),
    ],
)
def test_rope_cache_refuses(change, message):
    with pytest.raises(ValueError, match=message) as error:
        rope_cache(
            **rope_arguments()
            | {
                name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x
                for name, x in change.items()
            }
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("head_dim", [0, 7, 258])
def test_head_dims_that_no_program_holds(head_dim):
    x = [torch.zeros(2, heads, head_dim, device=DEVICE) for heads in (4, 2, 2, 2, 2)]
    positions, cos_sin = torch.arange(2, device=DEVICE), torch.zeros(4, head_dim, device=DEVICE)
    for call in (
        lambda: rope_cache(*x, positions, positions, cos_sin, 1),
        lambda: rotate_rows(x[0], positions, cos_sin, 1),
    ):
        with pytest.raises(
            ValueError, match=f"head_dim: got {head_dim}; accepted: an even number from 2 to 256"
        ):
            call()


@pytest.mark.parametrize(
    "name", ["q", "k", "v", "k_cache", "v_cache", "positions", "slot_mapping", "cos_sin_cache"]
)
def test_rope_cache_refuses_every_kind_of_wrong_tensor(name):
    kinds = ("dtype", "device", "shape") if name in ("positions", "slot_mapping") else KINDS
    assert_refused(rope_cache, rope_arguments(), name, kinds)


@pytest.mark.parametrize("name", ["x", "positions", "cos_sin_cache"])
def test_rotate_rows_refuses_every_kind_of_wrong_tensor(name):
    arguments = dict(
        x=torch.zeros(3, 2, 8, device=DEVICE),
        positions=torch.arange(3, device=DEVICE),
        cos_sin_cache=table(8),
        last_position=2,
    )
    if name == "x":
        assert_refused(rotate_rows, arguments, name, ("dtype", "device", "stride"))
    else:
        assert_refused(rotate_rows, arguments, name, ("dtype", "device", "shape"))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: inverse_frequencies(7), "rotary_dim: got 7; accepted: an even number, 2 or more"),
        (
            lambda: new_cos_sin_cache(inverse_frequencies(8), 0),
            "num_positions: got 0; accepted: 1 or more",
        ),
        (
            lambda: rotate(torch.zeros(1, 1, 8), torch.tensor([4]), torch.zeros(4, 8)),
            "positions: got 4 to 4; accepted: 0 to 3",
        ),
        (
            lambda: rotate(torch.zeros(1, 1, 8), torch.tensor([-1]), torch.zeros(4, 8)),
            "positions: got -1",
        ),
        (
            lambda: rotate(torch.zeros(1, 1, 7), torch.tensor([0]), torch.zeros(4, 7)),
            "x, cos_sin_cache: got .1, 1, 7.*even D",
        ),
        (
            lambda: rotate(torch.zeros(1, 1, 8), torch.tensor([0]), torch.zeros(4, 8), "gptj"),
            "layout: got 'gptj'",
        ),
        (lambda: half_from_interleaved(torch.zeros(12, 3), 4), "num_heads: got 4 for 12 rows"),
        (lambda: alibi_slopes(0), "num_heads: got 0; accepted: 1 or more"),
        (
            lambda: alibi_attention(*torch.zeros(3, 2, 4, 8), torch.ones(3)),
            "slopes: got .3,. for 4 query heads",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
