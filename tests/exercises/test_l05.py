"""Checks of lesson 05's exercises. Each exists because it rejects a named wrong answer
(wrong/l05.py).
"""

import math
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lessons.l02_naive_attention import naive
from lessons.l02_naive_attention.decoder import Decoder
from lessons.toolbox.kernels.accesses import Accesses
from lessons.toolbox.measure.device import default_device, has_triton, interpreting
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.proof.traps import Canaries
from tests.exercises.checking import (
    assert_equal,
    assert_largest_tensor,
    call,
    check,
    in_wider_memory,
)
from tests.exercises.kernel_work import kernel_does_it

# ---------------------------------------------------------------- 5.1 nothing is repeated

READ_CASES = {  # name: (new tokens, all tokens, heads, KV heads, window, why)
    "decode": (1, 9, 6, 2, None, "one new token, 3 query heads to a KV head"),
    "first_token": (1, 1, 6, 2, None, "a softmax over one key is 1"),
    "prompt": (7, 7, 6, 2, None, "a prompt alone: causal, in groups"),
    "chunk": (3, 8, 6, 2, None, "a chunk's first query comes after older tokens"),
    "mha": (4, 5, 4, 4, None, "a KV head for every query head"),
    "mqa": (4, 5, 5, 1, None, "one KV head for all"),
    "window_decode": (1, 6, 6, 2, 3, "a step counts its last 3 tokens"),
    "window_prompt": (7, 7, 6, 2, 3, "each query has its own window"),
    "window_chunk": (3, 8, 6, 2, 3, "each query of a chunk has its own window"),
}


def attention_inputs(new, total, heads, kv_heads, seed, dtype=torch.float32):
    """q of the newest tokens; k and v as views of a cache whose other rows are NaN."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(new, heads, 8, generator=g).to(dtype)
    cache = torch.full((2, total + 4, kv_heads, 8), torch.nan, dtype=dtype)
    cache[:, :total] = torch.randn(2, total, kv_heads, 8, generator=g).to(dtype)
    return q, cache[0, :total], cache[1, :total]


def attended(impl, q, k, v, window=None, softmax_scale=0.25):
    return call(impl, dict(q=q, k=k, v=v, softmax_scale=softmax_scale, window=window))


@check("5.1", {case: why for case, (*_, why) in READ_CASES.items()})
def test_attends_in_groups(impl, case, seed):
    new, total, heads, kv_heads, window, _ = READ_CASES[case]
    q, k, v = attention_inputs(new, total, heads, kv_heads, seed)
    want = naive.attention(q.double(), k.double(), v.double(), 0.25, window=window)
    assert_equal(attended(impl, q, k, v, window), want, atol=1e-5, dtype=torch.float32)


@check("5.1")
def test_any_scale(impl, seed):
    q, k, v = attention_inputs(2, 6, 6, 2, seed)
    for scale in (0.0, 0.07, 1.5):
        want = naive.attention(q.double(), k.double(), v.double(), scale)
        got = attended(impl, q, k, v, softmax_scale=scale)
        assert_equal(got, want, atol=1e-5, dtype=torch.float32, label=f"softmax_scale {scale}")


@check("5.1")
def test_keeps_bfloat16(impl, seed):
    q, k, v = attention_inputs(3, 4, 6, 2, seed, torch.bfloat16)
    want = naive.attention(q.double(), k.double(), v.double(), 0.25)
    assert_equal(attended(impl, q, k, v), want, atol=6e-2, dtype=torch.bfloat16)


def lowered_scores(q, k, by):
    """Change q: [..., Hq, D] and k: [..., Hkv, D] so that scores are near -by, and those of the
    last query head near 0; no product is rounded.
    """
    for x, first in ((q, by / 64), (k, -64)):
        x.copy_((8 * x).round() / 8)[..., 0] = first
    q[..., -1, :] = 0


@check("5.1")
def test_very_negative_scores(impl, seed):
    """One head's scores are near -65536, another's near 0: each row has its own maximum, and a mask
    of -10000 hides nothing.
    """
    q, k, v = attention_inputs(3, 7, 6, 2, seed)
    lowered_scores(q, k, 65536)
    want = naive.attention(q.double(), k.double(), v.double(), 0.5)
    assert_equal(attended(impl, q, k, v, None, 0.5), want, atol=1e-5, dtype=torch.float32)


@check("5.1")
def test_slices(impl, seed):
    """q, k and v are slices of wider tensors. Their strides say where their rows are."""
    q, k, v = map(in_wider_memory, attention_inputs(3, 7, 6, 2, seed))
    want = naive.attention(q.double(), k.double(), v.double(), 0.25)
    assert_equal(attended(impl, q, k, v), want, atol=1e-5, dtype=torch.float32)


@check("5.1")
def test_repeats_nothing_on_the_way(impl, seed):
    q, k, v = attention_inputs(1, 50, 6, 2, seed)
    assert_largest_tensor(
        50 * 6 * 8,
        "let the query heads of a KV head be the rows of one matrix",
        lambda: attended(impl, q, k, v),
    )


@check("5.1")
def test_example(impl, seed):
    v = torch.tensor([[[5.0], [7.0]]])
    out = attended(impl, torch.ones(1, 4, 1), torch.ones(1, 2, 1), v)
    assert_equal(out, torch.tensor([[[5.0], [5.0], [7.0], [7.0]]]), atol=1e-6)


# ---------------------------------------------------------------- 5.2 the kernel

DEVICE = default_device()


class GuardedEmpty(TorchDispatchMode):
    """Within it torch.empty gives poison between canaries: a kernel that writes too much spoils
    nothing, and is seen.
    """

    def __init__(self):
        super().__init__()
        self.guarded = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (
            func._schema.name.startswith("aten::empty")
            and out.dtype.is_floating_point
            and out.is_contiguous()
        ):
            with torch.utils._python_dispatch._disable_current_modes():
                self.guarded.append(Canaries(out.shape, out.dtype, out.device, guard=4096))
                return self.guarded[-1].tensor
        return out


def launch(impl, inputs):
    """Call, and fail if anything beside an output was written."""
    if not has_triton():
        pytest.skip("needs Triton, which runs on Linux alone")
    with GuardedEmpty() as mode:
        got = call(impl, inputs)
    for canaries in mode.guarded:
        canaries.check()
    return got


def kernel_inputs(
    seed, lengths=(9, 0, 40), heads=6, kv_heads=2, dim=16, dtype=torch.float32, **options
):
    """Ragged sequences; unused rows are NaN and go on for two tiles, so that what reads them reads
    NaN and nothing else. q, K and V have strides of their own, with NaN beside each row.
    """
    g = torch.Generator().manual_seed(seed)
    capacity = max(lengths) + 40
    q = torch.randn(len(lengths), heads, dim, generator=g)
    k, v = (torch.randn(len(lengths), capacity, kv_heads, dim, generator=g) for _ in range(2))
    for b, n in enumerate(lengths):
        k[b, n:] = v[b, n:] = torch.nan
    q, k, v = (x.to(DEVICE, dtype) for x in (q, k, v))
    return dict(
        q=in_wider_memory(q),
        k_cache=k,
        v_cache=in_wider_memory(v),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        **options,
    )


def by_definition(q, k_cache, v_cache, context_lens, softmax_scale=None, window=None):
    """Lesson 2's attention in float64 on the rows in use, sequence after sequence."""
    return torch.cat(
        [
            naive.attention(
                q[b : b + 1].double(),
                k_cache[b, :n].double(),
                v_cache[b, :n].double(),
                softmax_scale,
                window=window,
            )
            for b, n in enumerate(context_lens.tolist())
        ]
    )


KERNEL_CASES = {
    "groups_of_3": (
        dict(),
        1e-5,
        "query heads 0, 1, 2 read KV head 0; 13 rows of the tile are padding",
    ),
    "mqa": (dict(heads=8, kv_heads=1), 1e-5, "one KV head for all"),
    "mha": (dict(heads=2, kv_heads=2, lengths=(20,)), 1e-5, "a group of one is a row of one"),
    "tile_edges": (dict(lengths=(1, 15, 16, 17, 33)), 1e-5, "lengths around the tile of 16 keys"),
    "head_dim_12": (dict(dim=12, lengths=(20,)), 1e-5, "columns 12 to 15 of the tile are padding"),
    "window": (
        dict(window=18, lengths=(5, 18, 40)),
        1e-5,
        "the last 18 rows count, wherever they begin in a tile",
    ),
    "given_scale": (
        dict(softmax_scale=0.7, lengths=(20,)),
        1e-5,
        "softmax_scale comes from the caller",
    ),
    "large_logits": (
        dict(softmax_scale=30.0, lengths=(40,)),
        1e-3,
        "without the running maximum 2^x overflows",
    ),
    "bfloat16": (
        dict(dtype=torch.bfloat16, lengths=(40,), softmax_scale=3.0),
        6e-2,
        "the dots take bfloat16, the scores are float32",
    ),
}


@check("5.2", {case: why for case, (*_, why) in KERNEL_CASES.items()})
def test_values(impl, case, seed):
    options, atol, _ = KERNEL_CASES[case]
    inputs = kernel_inputs(seed, **options)
    assert_equal(launch(impl, inputs), by_definition(**inputs), atol=atol, dtype=inputs["q"].dtype)


@check("5.2")
def test_very_negative_scores_in_the_kernel(impl, seed):
    """One head's scores are near -16384, another's near 0: a maximum that starts at -10000, or is
    one for the whole tile, leaves no weight.
    """
    inputs = kernel_inputs(seed, lengths=(20,), softmax_scale=1.0)
    lowered_scores(inputs["q"], inputs["k_cache"][:, :20], 16384)
    want = by_definition(**inputs)
    assert_equal(launch(impl, inputs), want, atol=2e-2, dtype=torch.float32)


@check("5.2")
def test_sums_in_float32(impl, seed):
    """All weights are equal, and the first tile's values cancel the second's but for a 1, which is
    lost where 3841 is kept in bfloat16. A softmax_scale of 0 is a scale.
    """
    inputs = kernel_inputs(seed, lengths=(32,), dtype=torch.bfloat16, softmax_scale=0.0)
    values = torch.tensor([1.0] + 15 * [256.0] + [0.0] + 15 * [-256.0])
    inputs["v_cache"][0, :32] = values[:, None, None]
    want = torch.full(inputs["q"].shape, 1 / 32, device=DEVICE)
    assert_equal(launch(impl, inputs), want, atol=1e-3, dtype=torch.bfloat16)


@check("5.2")
def test_loads_each_tile_once(impl, seed):
    """Counted in the interpreter: K and V for each KV head, whatever the number of query heads."""
    if not interpreting():
        pytest.skip("counts the loads of the interpreter, and this machine compiles kernels")
    inputs = kernel_inputs(seed, lengths=(37,), heads=8, kv_heads=2)
    with Accesses() as accesses:
        launch(impl, inputs)
    want = 2 * 37 * 2 * 16 + 8 * 16  # K and V of two KV heads, q
    loaded = accesses.loaded
    assert want <= loaded <= want + 16, (
        f"your kernel loads {loaded} values, expected {want}: q once, K and V once per KV head"
    )


@check("5.2")
def test_kernel_example(impl, seed):
    k = torch.tensor([0.0, math.log(3), torch.nan], device=DEVICE).view(1, 3, 1, 1)
    v = torch.tensor([4.0, 8.0, torch.nan], device=DEVICE).view(1, 3, 1, 1)
    q = torch.tensor([0.0, 1.0], device=DEVICE).view(1, 2, 1)
    inputs = dict(
        q=q, k_cache=k, v_cache=v, context_lens=torch.tensor([2], device=DEVICE), softmax_scale=1.0
    )
    assert_equal(
        launch(impl, inputs), torch.tensor([6.0, 7.0], device=DEVICE).view(1, 2, 1), atol=1e-5
    )


test_the_kernel_does_it = kernel_does_it(
    "5.2", lambda seed: kernel_inputs(seed, lengths=(20,), heads=4)
)


# ---------------------------------------------------------------- 5.3 converting


def model_of(seed, heads=12, kv_heads=6, bias=True):
    torch.manual_seed(seed)
    config = ModelConfig("qwen2", 11, 20, 2, heads, kv_heads, 4, 8, 64, qkv_bias=bias)
    model = Decoder(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.requires_grad_(False), config


@check(
    "5.3",
    {
        "to_3": "pairs",
        "to_2": "threes",
        "to_1": "MQA: the mean of all",
        "to_6": "nothing to merge",
        "in_bfloat16": "the dtype of a checkpoint stays",
        "without_biases": "Llama has none",
    },
)
def test_conversion(impl, case, seed):
    """Each new head's rows are the mean of its group's; everything else is as it was."""
    model, config = model_of(seed, bias=case != "without_biases")
    dtype, atol = (torch.bfloat16, 6e-2) if case == "in_bfloat16" else (torch.float32, 1e-5)
    weights, new = dict(model.to(dtype).state_dict()), int(case[-1]) if case[:3] == "to_" else 2
    weights["layers.0.self_attn.k_norm.weight"] = torch.ones(4)  # Qwen3 has it
    got = call(impl, dict(weights=weights, config=config, num_kv_heads=new))
    assert isinstance(got, tuple) and len(got) == 2, (
        f"your result is a {type(got).__name__}, expected (weights, config)"
    )
    assert sorted(got[0]) == sorted(weights), "your weights have other names than those given"
    merge = 6 // new
    for name, weight in weights.items():
        want = weight
        if ".k_proj." in name or ".v_proj." in name:
            heads = weight.split(4)
            want = torch.cat(
                [torch.stack(heads[at : at + merge]).mean(0) for at in range(0, 6, merge)]
            )
        assert_equal(got[0][name], want, atol=atol, label=name)
    assert_equal(
        (got[1].num_key_value_heads, got[1].num_attention_heads, got[1].head_dim),
        (new, 12, 4),
        label="KV heads, query heads and head_dim of your config",
    )


@check("5.3")
def test_equal_heads_stay(impl, seed):
    """An MHA model whose heads agree in groups is a GQA model already: converting it changes no
    logit.
    """
    model, _ = model_of(seed, heads=6, kv_heads=2)
    wide = {
        name: weight.unflatten(0, (2, 4)).repeat_interleave(3, 0).flatten(0, 1)
        if "k_proj" in name or "v_proj" in name
        else weight
        for name, weight in model.state_dict().items()
    }
    big = ModelConfig("qwen2", 11, 20, 2, 6, 6, 4, 8, 64, qkv_bias=True)
    weights, small = call(impl, dict(weights=wide, config=big, num_kv_heads=2))
    converted = Decoder(small)
    converted.load_state_dict(weights)
    tokens = torch.randint(11, (5,), generator=torch.Generator().manual_seed(seed))
    got, want = (
        m.logits(m(tokens, naive.whole_sequence(m, 5)))
        for m in (converted.requires_grad_(False), model)
    )
    assert_equal(got, want, atol=1e-3, rtol=1e-3, label="the converted model's logits")


# ---------------------------------------------------------------- 5.4 predict

SHARING_CASES = {  # name: (arguments, the answer, why)
    "example": ((2, 4, 1, 64, torch.float16, 1024, 0.01), (0.5, 2.0, 4.5, 20), "the docstring's"),
    "llama_3_8b": (
        (32, 32, 8, 128, torch.bfloat16, 8192, 100),
        (1024.0, 4096.0, 9216.0, 100),
        "a quarter, or 9 times",
    ),
    "mha": (
        (32, 32, 32, 128, torch.float16, 4096, 60),
        (2048.0, 2048.0, 6144.0, 30),
        "repeating once still copies",
    ),
    "mqa": ((1, 16, 1, 256, torch.float32, 512, 0.5), (1.0, 16.0, 33.0, 512), "one KV head"),
    "does_not_fit": (
        (32, 32, 32, 128, torch.float32, 8192, 7.9),
        (8192.0, 8192.0, 24576.0, 0),
        "not even one sequence",
    ),
}


@check("5.4", {case: why for case, (*_, why) in SHARING_CASES.items()}, seconds=5)
def test_shared_heads(impl, case, seed):
    numbers, want, _ = SHARING_CASES[case]
    assert_numbers(call(impl, dict(zip(NAMES, numbers))), want)


NAMES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "dtype",
    "context",
    "memory_gib",
)


def assert_numbers(got, want):
    assert isinstance(got, tuple) and len(got) == 4, (
        f"your result is {got!r}, expected a tuple of four numbers"
    )
    for what, mine, right in zip(
        ("MiB in groups", "MiB as MHA", "MiB repeated", "sequences that fit"), got, want
    ):
        assert_equal(mine, right, atol=1e-6, label=what)


@check("5.4", seconds=5)
def test_the_caches_own_bytes(impl, seed):
    """A random shape, against ModelConfig.kv_bytes_per_token."""
    draw = random.Random(seed)
    layers, kv, group, tokens = (
        draw.randint(2, 9),
        draw.randint(2, 5),
        draw.randint(2, 6),
        draw.randint(100, 999),
    )
    dim = draw.choice((64, 96))
    grouped, mha = (
        tokens
        * ModelConfig("llama", 11, 8, layers, kv * group, h, dim, 8, 64).kv_bytes_per_token(2)
        / 2**20
        for h in (kv, kv * group)
    )
    got = call(impl, dict(zip(NAMES, (layers, kv * group, kv, dim, torch.bfloat16, tokens, 3.0))))
    assert_numbers(got, (grouped, mha, grouped + 2 * mha, int(3072 // grouped)))
