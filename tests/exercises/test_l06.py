"""Checks of lesson 06's exercises. Each exists because it rejects a named wrong answer
(wrong/l06.py).
"""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import torch

from lessons.l02_naive_attention import naive
from lessons.l02_naive_attention.rope import rotate
from lessons.l06_mla.deepseek import MLAttention
from lessons.l06_mla.lab.counts import absorbed_flops, decode_bytes, decode_flops, expanded_flops
from lessons.toolbox.model.config import MLAConfig, ModelConfig, RopeScaling
from lessons.toolbox.proof.traps import poison_
from tests.exercises.checking import assert_equal, assert_largest_tensor, call, check, compare

MLA = MLAConfig(None, kv_lora_rank=24, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=10)
HEADS, HIDDEN = 3, 16


def angles(positions, rope=8):
    """cos and sin of a rotation, each [T, rope / 2]."""
    turns = positions[:, None] * 10 ** -torch.linspace(0, 2, rope // 2)
    return turns.cos(), turns.sin()


# ---------------------------------------------------------------- 6.1 from the weights


def layer_inputs(seed, tokens=7, heads=HEADS, mla=MLA, dtype=torch.float32, **options):
    """Random x: [T, hidden], the weights of a layer, cos and sin: [T, rope / 2], and the options of
    a call.
    """
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "q_proj": (heads * mla.qk_head_dim, HIDDEN),
        "kv_a_proj_with_mqa": (mla.latent_dim, HIDDEN),
        "kv_b_proj": (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "o_proj": (HIDDEN, heads * mla.v_head_dim),
    }
    weights = {
        name: 1.5 * torch.randn(shape, generator=g) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    weights["kv_a_layernorm"] = 1 + 0.4 * torch.randn(mla.kv_lora_rank, generator=g)
    x = torch.randn(tokens, HIDDEN, generator=g) * options.pop("size", 1.0)
    cos, sin = angles(torch.arange(tokens), mla.qk_rope_head_dim)
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    return dict(
        x=x.to(dtype),
        weights=weights,
        mla=mla,
        num_heads=heads,
        cos=cos.to(dtype),
        sin=sin.to(dtype),
        **options,
    )


def by_the_lesson(x, weights, mla, num_heads, cos, sin, factor=1.0, mscale_all_dim=0.0):
    """The lesson's layer in float64, its k and v expanded."""
    scaling = RopeScaling("yarn", factor, mscale_all_dim=mscale_all_dim) if mscale_all_dim else None
    config = ModelConfig(
        "deepseek_v2",
        11,
        HIDDEN,
        1,
        num_heads,
        num_heads,
        mla.qk_head_dim,
        4,
        64,
        v_head_dim=mla.v_head_dim,
        mla=mla,
        rope_scaling=scaling,
    )
    layer = MLAttention(config).double().requires_grad_(False)
    layer.load_state_dict({f"{name}.weight": weight.double() for name, weight in weights.items()})

    table = torch.cat([cos, sin], dim=-1).double()
    positions = torch.arange(len(x))

    def attend(q, k, v):
        q, k = rotate(q, positions, table), rotate(k, positions, table)
        return naive.attention(q, k, v, config.softmax_scale)

    return layer(x.double(), attend)


LAYER_CASES = {
    "prompt": (dict(), "causal, three heads"),
    "one_token": (dict(tokens=1), "only its own value is left"),
    "one_head": (dict(heads=1), "a single head"),
    "wide_values": (dict(mla=replace(MLA, v_head_dim=20)), "v wider than q and k"),
    "stretched": (dict(factor=40.0, mscale_all_dim=0.7), "the scale grows by m²"),
    "not_stretched": (dict(factor=1.0, mscale_all_dim=1.0), "a factor of 1 leaves the scale alone"),
    "factor_alone": (dict(factor=40.0), "without mscale_all_dim a factor leaves it alone, too"),
    "small_input": (dict(size=1e-3), "the norm's 1e-6 shows"),
}


@check("6.1", {case: why for case, (_, why) in LAYER_CASES.items()})
def test_layer(impl, case, seed):
    inputs = layer_inputs(seed, **copy.deepcopy(LAYER_CASES[case][0]))
    compare(impl, inputs, want=by_the_lesson(**inputs), atol=2e-5, rtol=2e-5, dtype=torch.float32)


@check("6.1")
def test_layer_in_float64(impl, seed):
    """The result is float64. Norm and rotation may be computed in float32, as many models do."""
    inputs = layer_inputs(seed, dtype=torch.float64)
    compare(impl, inputs, want=by_the_lesson(**inputs), atol=2e-5, rtol=2e-5)


@check("6.1")
def test_layer_example(impl, seed):
    mla = MLAConfig(None, kv_lora_rank=1, qk_nope_head_dim=1, qk_rope_head_dim=2, v_head_dim=1)
    shapes = dict(
        q_proj=(3, 1),
        kv_a_proj_with_mqa=(3, 1),
        kv_a_layernorm=(1,),
        kv_b_proj=(2, 1),
        o_proj=(1, 1),
    )
    weights = {name: torch.ones(shape, dtype=torch.float64) for name, shape in shapes.items()}
    one = torch.ones(2, 1, dtype=torch.float64)
    compare(
        impl,
        dict(x=one, weights=weights, mla=mla, num_heads=1, cos=one, sin=0 * one),
        want=one,
        atol=1e-5,
    )


# ---------------------------------------------------------------- 6.2 a cache of latents

CONFIG = ModelConfig(
    "deepseek_v3",
    11,
    HIDDEN,
    2,
    HEADS,
    HEADS,
    MLA.qk_head_dim,
    4,
    512,
    v_head_dim=MLA.v_head_dim,
    mla=MLA,
    rope_scaling=RopeScaling("yarn", 8.0, mscale_all_dim=1.0),
)


class Latents:
    """A twin with random weights, and random q, k_pe, c_kv of both layers for `total` tokens."""

    def __init__(self, seed, total, config=CONFIG):
        g = torch.Generator().manual_seed(seed)
        mla, heads = config.mla, config.num_attention_heads
        rows = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        weights = [
            torch.randn(rows, mla.kv_lora_rank, generator=g) * mla.kv_lora_rank**-0.5
            for _ in range(2)
        ]
        self.model = SimpleNamespace(
            config=config,
            dtype=torch.float32,
            device=torch.device("cpu"),
            layers=[
                SimpleNamespace(self_attn=SimpleNamespace(kv_b_proj=SimpleNamespace(weight=weight)))
                for weight in weights
            ],
        )
        self.streams = [
            tuple(
                torch.randn(total, *shape, generator=g)
                for shape in (
                    (heads, mla.qk_head_dim),
                    (1, mla.qk_rope_head_dim),
                    (1, mla.kv_lora_rank),
                )
            )
            for _ in range(2)
        ]

    def feed(self, cache, rows):
        """One pass of the tokens `rows` through both layers: [[len(rows), H, v_dim]] * 2."""
        return [
            cache.attend(layer, *(x[rows] for x in stream))
            for layer, stream in enumerate(self.streams)
        ]

    def whole(self, layer, count):
        """Ordinary attention of the first `count` tokens over expanded k and v, in float64: [count,
        H, v_dim].
        """
        mla, weight = (
            self.model.config.mla,
            self.model.layers[layer].self_attn.kv_b_proj.weight.double(),
        )
        q, k_pe, c_kv = (x[:count].double() for x in self.streams[layer])
        both = (c_kv[:, 0] @ weight.T).unflatten(-1, (q.shape[1], -1))
        k_nope, v = both.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, q.shape[1], -1)], dim=-1)
        return naive.attention(q, k, v, self.model.config.softmax_scale)


STEPS = {
    "prompt_then_tokens": ([6, 1, 1, 1], "the prompt at once, then token by token"),
    "one_by_one": ([1] * 6, "each token finds those before it"),
    "chunks": ([5, 3, 1, 4], "a chunk's first token does not see its last one"),
}


@check("6.2", {case: why for case, (_, why) in STEPS.items()})
def test_attends_as_if_expanded(impl, case, seed):
    steps = STEPS[case][0]
    latents, start = Latents(seed, sum(steps)), 0
    cache = impl(latents.model, sum(steps) + 2)
    poison_(cache.rows)
    for step in steps:
        assert cache.length == start, (
            f"before the token at position {start} your cache's length is {cache.length}"
        )
        rows = torch.arange(start, start + step)
        for layer, out in enumerate(latents.feed(cache, rows)):
            want = latents.whole(layer, start + step)[rows]
            assert_equal(
                out,
                want,
                atol=2e-5,
                dtype=torch.float32,
                label=f"layer {layer}, positions from {start}",
            )
        start += step


@check("6.2")
def test_what_a_row_holds(impl, seed):
    """The latent first, then the rotary key, as they were given."""
    latents = Latents(seed, 4)
    cache = impl(latents.model, 6)
    poison_(cache.rows)
    rows = cache.rows  # kept, or a new buffer may take its place in memory
    _, k_pe, c_kv = latents.streams[0]
    assert_equal(cache.append(0, k_pe, c_kv), 4, label="what append returned for layer 0")
    assert_equal(cache.length, 0, label="the length before the last layer has appended")
    assert_equal(
        cache.append(1, *latents.streams[1][1:]), 4, label="what append returned for layer 1"
    )
    assert_equal(cache.length, 4, label="the length once all layers have appended")
    assert_equal(cache.rows[0, :4], torch.cat([c_kv, k_pe], -1)[:, 0], label="the rows of layer 0")
    assert cache.rows.data_ptr() == rows.data_ptr(), (
        "append built `rows` anew: write into the rows there are"
    )


@check("6.2", {"one": "a decode step", "four": "a short chunk"})
def test_expands_nothing(impl, case, seed):
    """No tensor of a pass is as large as k or v of every head: H · nope (or v_dim) values for each
    of 200 tokens.
    """
    new, heads = {"one": 1, "four": 4}[case], 16
    latents = Latents(
        seed, 204, replace(CONFIG, num_attention_heads=heads, num_key_value_heads=heads)
    )
    cache = impl(latents.model, 204)
    latents.feed(cache, torch.arange(200))
    tokens = [x[200 : 200 + new] for x in latents.streams[0]]
    assert_largest_tensor(
        200 * heads * MLA.qk_nope_head_dim,
        "absorb W_UK into the query",
        lambda: cache.attend(0, *tokens),
    )


@check("6.2")
def test_cache_example(impl, seed):
    mla = MLAConfig(None, kv_lora_rank=1, qk_nope_head_dim=1, qk_rope_head_dim=2, v_head_dim=1)
    latents = Latents(
        seed,
        1,
        replace(
            CONFIG, num_attention_heads=1, num_key_value_heads=1, head_dim=3, v_head_dim=1, mla=mla
        ),
    )
    latents.model.layers[0].self_attn.kv_b_proj.weight = torch.tensor([[2.0], [3.0]])
    out = impl(latents.model, 4).attend(
        0, *(torch.tensor([[x]]) for x in ([5.0, 0.0, 0.0], [7.0, 8.0], [4.0]))
    )
    assert_equal(out, torch.tensor([[[12.0]]]), atol=1e-5, label="the example")


# ---------------------------------------------------------------- 6.3 predict

V3 = MLAConfig(1536, 512, 128, 64, 128)
NUMBER_CASES = {  # name: (arguments, the five numbers, why)
    "example": (
        (2, 4, MLAConfig(None, 6, 2, 2, 2), 2, 2),
        (0.03125, 0.09375, 2.0, 7.0, 3.0),
        "the docstring's",
    ),
    "deepseek_v3": (
        (61, 128, V3, 2, 128),
        (68.625, 4880.0, 2.25, 241.77777777777777, 170.66666666666666),
        "less than 3 KV heads' worth; more FLOPs a byte than an H200 has",
    ),
    "v2_lite": (
        (27, 16, V3, 2, 128),
        (30.375, 270.0, 2.25, 30.22222222222222, 170.66666666666666),
        "the same row for an eighth of the heads",
    ),
    "float32": (
        (3, 5, MLAConfig(None, 40, 10, 6, 14), 4, 16),
        (0.5390625, 1.7578125, 1.4375, 4.673913043478261, 17.142857142857142),
        "4 bytes a value, all sizes different",
    ),
}


@check("6.3", {case: why for case, (*_, why) in NUMBER_CASES.items()}, seconds=5)
def test_numbers(impl, case, seed):
    numbers, want, _ = NUMBER_CASES[case]
    names = ("num_hidden_layers", "num_attention_heads", "mla", "bytes_per_value", "gqa_head_dim")
    got = call(impl, dict(zip(names, numbers)))
    assert isinstance(got, tuple) and len(got) == 5, (
        f"your result is {got!r}, expected a tuple of five numbers"
    )
    for number, (mine, right) in enumerate(zip(got, want), 1):
        if number == 5 and mine in (math.ceil(right), math.floor(right) + 1):
            continue  # the first whole number of tokens from there on
        assert_equal(mine, right, rtol=1e-6, atol=1e-9, label=f"number {number}")


@check("6.3", seconds=10)
def test_numbers_of_the_lessons_counts(impl, seed):
    """Random sizes, against the lesson's own counts in a context of ten million tokens."""
    g = torch.Generator().manual_seed(seed)
    rank, nope, rope, v_dim, heads = (
        int(torch.randint(low, high, (1,), generator=g))
        for low, high in ((40, 80), (8, 16), (2, 6), (8, 16), (2, 40))
    )
    mla, context = MLAConfig(None, rank, nope, 2 * rope, v_dim), 10**7
    got = call(
        impl,
        dict(
            num_hidden_layers=4,
            num_attention_heads=heads,
            mla=mla,
            bytes_per_value=2,
            gqa_head_dim=nope,
        ),
    )
    assert_equal(got[0], 4 * decode_bytes(1, 1, mla) / 1024, atol=1e-9, label="number 1")
    assert_equal(
        got[3],
        decode_flops(1, 1, heads, mla) / decode_bytes(1, 1, mla),
        atol=1e-9,
        label="number 4",
    )
    # the tokens beside it, should it be a whole number
    lower, upper = math.ceil(got[4]) - 1, math.floor(got[4]) + 1
    assert absorbed_flops(lower, context, heads, mla) <= expanded_flops(
        lower, context, heads, mla
    ) and absorbed_flops(upper, context, heads, mla) > expanded_flops(upper, context, heads, mla), (
        f"number 5 is {got[4]:.6g}, but at {lower} new tokens absorbing is dearer already, or at "
        f"{upper} not yet"
    )


# ---------------------------------------------------------------- 6.4 token by token


def token_inputs(seed, tokens=6, heads=2, nope=4, rope=6, v_dim=5, rank=11, size=1.0):
    """Random q, latents, unrotated keys and both up-projections, in float64."""
    g = torch.Generator().manual_seed(seed)
    q, c_kv, k_pe, w_uk, w_uv = (
        torch.randn(shape, generator=g, dtype=torch.float64)
        for shape in (
            (tokens, heads, nope + rope),
            (tokens, rank),
            (tokens, rope),
            (heads, nope, rank),
            (heads, v_dim, rank),
        )
    )
    cos, sin = angles(torch.arange(tokens), rope)
    return dict(
        q=size * q, c_kv=c_kv, k_pe=k_pe, w_uk=w_uk, w_uv=w_uv, cos=cos.double(), sin=sin.double()
    )


def at_once(q, c_kv, k_pe, w_uk, w_uv, cos, sin):
    """Expanded k and v for every head, all tokens in one causal attention."""

    def turned(pe):
        (a, b), c, s = pe.chunk(2, -1), cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    nope = w_uk.shape[1]
    k = torch.einsum("tr,hnr->thn", c_kv, w_uk)
    k = torch.cat([k, turned(k_pe[:, None]).expand(-1, q.shape[1], -1)], -1)
    v = torch.einsum("tr,hvr->thv", c_kv, w_uv)
    return naive.attention(torch.cat([q[..., :nope], turned(q[..., nope:])], -1), k, v)


TOKEN_CASES = {
    "several": (dict(), "each token after those before it"),
    "one": (dict(tokens=1), "one key: its weight is 1, its value the latent's"),
    "no_query": (dict(size=0.0), "equal weights: the values alone decide"),
    "rope_wider_than_rank": (dict(rope=12, rank=4), "the first `rank` columns, not the last"),
    "one_head": (dict(heads=1, tokens=9), "a single head"),
}


@check("6.4", {case: why for case, (_, why) in TOKEN_CASES.items()}, seconds=10)
def test_tokens(impl, case, seed):
    inputs = token_inputs(seed, **TOKEN_CASES[case][0])
    compare(impl, inputs, want=at_once(**inputs), atol=1e-9)


@check("6.4", seconds=5)
def test_only_distances_count(impl, seed):
    """All positions moved on by 5: no output changes."""
    inputs = token_inputs(seed)
    cos, sin = angles(torch.arange(5, 11), 6)
    compare(
        impl, inputs | dict(cos=cos.double(), sin=sin.double()), want=at_once(**inputs), atol=1e-5
    )


@check("6.4", seconds=5)
def test_tokens_example(impl, seed):
    one = torch.ones(2, 1, dtype=torch.float64)
    inputs = dict(
        q=torch.zeros(2, 1, 3).double(),
        c_kv=torch.tensor([[2.0], [4.0]]).double(),
        k_pe=torch.ones(2, 2).double(),
        w_uk=torch.ones(1, 1, 1).double(),
        w_uv=torch.ones(1, 1, 1).double(),
        cos=one,
        sin=0 * one,
    )
    compare(impl, inputs, want=torch.tensor([[[2.0]], [[3.0]]], dtype=torch.float64), atol=1e-9)
