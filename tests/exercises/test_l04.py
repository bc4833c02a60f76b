"""Checks of lesson 04's exercises. Each exists because it rejects a named wrong answer
(wrong/l04.py).
"""

import math
from dataclasses import replace

import torch

from lessons.l02_naive_attention.rope import apply_rope
from lessons.l04_positions import naive
from lessons.l04_positions.alibi import alibi_slopes
from lessons.l04_positions.lab.traffic import eager_bytes
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import ModelConfig, RopeScaling
from tests.exercises.checking import assert_equal, call, check, compare, in_wider_memory
from tests.exercises.kernel_work import kernel_does_it

# ---------------------------------------------------------------- 4.1 RoPE from its formula

CONFIG = ModelConfig(
    "llama",
    vocab_size=11,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=4,
    max_position_embeddings=4096,
    rope_theta=500.0,
)
OTHERS = RopeScaling(
    "llama3", 32.0, low_freq_factor=0.5, high_freq_factor=6.0, original_max_position_embeddings=64
)
LLAMA3 = RopeScaling(
    "llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


def oracle(config, x, positions):
    """Pair after pair, as complex numbers in float64."""
    half, out = config.head_dim // 2, x.double().clone()
    for i in range(half):
        frequency, s = config.rope_theta ** (-2 * i / config.head_dim), config.rope_scaling
        if s is not None:
            turns = s.original_max_position_embeddings * frequency / (2 * math.pi)
            share = 0.0
            if s.rope_type == "llama3":
                share = min(
                    max(
                        (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0
                    ),
                    1.0,
                )
            frequency *= share + (1 - share) / s.factor
        turn = torch.exp(1j * positions.double() * frequency)[:, None]
        turned = torch.complex(x[..., i].double(), x[..., i + half].double()) * turn
        out[..., i], out[..., i + half] = turned.real, turned.imag
    return out


ROPE_CASES = {  # name: (config, first position, heads, why)
    "from_zero": (CONFIG, 0, 3, "positions 0, 1, 2, …"),
    "after_a_cache": (CONFIG, 700, 2, "the first new token is at position 700"),
    "theta": (replace(CONFIG, rope_theta=500000.0), 30, 2, "theta comes from the checkpoint"),
    "linear": (
        replace(CONFIG, rope_scaling=RopeScaling("linear", 4.0)),
        100,
        2,
        "every frequency is divided",
    ),
    "llama3": (
        replace(CONFIG, rope_scaling=LLAMA3),
        100,
        2,
        "fast pairs stay, slow ones are divided, some are blended",
    ),
    "llama3_other_factors": (
        replace(CONFIG, rope_scaling=OTHERS),
        100,
        2,
        "the three factors are the checkpoint's",
    ),
}


def rope_inputs(case, seed, tokens=5):
    config, start, heads, _ = ROPE_CASES[case]
    g = torch.Generator().manual_seed(seed)
    return (
        config,
        torch.randn(tokens, heads, config.head_dim, generator=g),
        torch.arange(start, start + tokens),
    )


def turned_by(impl, config, positions, x, dtype=None):
    """impl's rotation of x, with neither positions nor x changed."""
    rotate = call(impl, dict(config=config, positions=positions, dtype=dtype or x.dtype))
    assert callable(rotate), (
        f"your result is {type(rotate).__name__}, expected a function that turns [T, H, D]"
    )
    return call(lambda x: rotate(x), dict(x=x))


@check("4.1", {case: why for case, (*_, why) in ROPE_CASES.items()})
def test_turns(impl, case, seed):
    config, x, positions = rope_inputs(case, seed)
    assert_equal(
        turned_by(impl, config, positions, x),
        oracle(config, x, positions),
        atol=1e-3,
        dtype=torch.float32,
    )


@check("4.1")
def test_any_positions(impl, seed):
    """A batch of decode steps: one token of each sequence, each at its own position."""
    config, x, _ = rope_inputs("from_zero", seed)
    positions = torch.tensor([12, 3, 700, 3, 0])
    assert_equal(
        turned_by(impl, config, positions, x),
        oracle(config, x, positions),
        atol=1e-3,
        dtype=torch.float32,
    )


@check("4.1")
def test_bfloat16_at_a_far_position(impl, seed):
    """After max_position_embeddings, in a model of bfloat16: angles in bfloat16 are off by radians
    here. The tolerance is that of cos and sin in bfloat16; the result has x's dtype.
    """
    config, x, positions = rope_inputs("after_a_cache", seed)
    positions = positions + 6000
    for dtype in (torch.bfloat16, torch.float32):
        x = x.to(dtype)
        got = turned_by(impl, config, positions, x, torch.bfloat16)
        assert_equal(got, oracle(config, x, positions), atol=6e-2, dtype=dtype)


@check("4.1")
def test_one_rotation_for_q_and_k(impl, seed):
    """The same function turns q and then k, which are slices of one projection's result."""
    config, q, positions = rope_inputs("from_zero", seed)
    rotate = call(impl, dict(config=config, positions=in_wider_memory(positions), dtype=q.dtype))
    for name, x in (("q", q), ("k", q[:, :2].flip(0))):
        got = call(lambda x: rotate(x), dict(x=in_wider_memory(x)))
        want = oracle(config, x, positions)
        assert_equal(got, want, atol=1e-3, dtype=torch.float32, label=name)


@check("4.1")
def test_scores_depend_on_the_distance(impl, seed):
    """Moving all positions by the same amount changes no score."""
    config, q, positions = rope_inputs("from_zero", seed)
    q, k = q.double(), q.flip(0).double()
    scores = [
        torch.einsum(
            "qhd,khd->hqk", *(turned_by(impl, config, positions + shift, x) for x in (q, k))
        )
        for shift in (0, 1234)
    ]
    assert_equal(
        scores[1], scores[0], atol=1e-2, label="the scores after a shift of all positions by 1234"
    )


@check("4.1")
def test_refuses_what_it_does_not_know(impl, seed):
    config, x, positions = rope_inputs("from_zero", seed)
    try:
        turned_by(impl, replace(config, rope_scaling=RopeScaling("yarn", 4.0)), positions, x)
    except ValueError:
        return
    raise AssertionError("expected a ValueError for rope_type 'yarn'")


@check("4.1")
def test_rope_example(impl, seed):
    config = ModelConfig("llama", 11, 8, 1, 2, 1, 4, 4, 4096, rope_theta=100.0)
    x = torch.tensor([1.0, 0, 0, 0]).view(1, 1, 4)
    want = torch.tensor([math.cos(3), 0, math.sin(3), 0]).view(1, 1, 4)
    assert_equal(turned_by(impl, config, torch.tensor([3]), x), want, atol=1e-5)
    halved = torch.tensor([math.cos(1.5), 0, math.sin(1.5), 0]).view(1, 1, 4)
    config = replace(config, rope_scaling=RopeScaling("linear", 2.0))
    assert_equal(
        turned_by(impl, config, torch.tensor([3]), x),
        halved,
        atol=1e-5,
        label="your result with factor 2",
    )


# ---------------------------------------------------------------- 4.2 ALiBi

BIAS_CASES = {  # name: (heads, queries, keys, why)
    "eight_heads": (8, 4, 4, "a power of two"),
    "one_head": (1, 2, 3, "2^-8 alone"),
    "twelve_heads": (12, 3, 3, "those of 8 heads, then the 1st, 3rd, 5th, 7th of 16"),
    "many_heads": (71, 1, 2, "Falcon-7B's 71: 64 and 7 more"),
    "decode": (8, 1, 9, "one query, at the last key"),
    "chunk": (6, 3, 10, "three queries after seven cached keys"),
}


@check("4.2", {case: why for case, (*_, why) in BIAS_CASES.items()})
def test_bias(impl, case, seed):
    heads, queries, keys, _ = BIAS_CASES[case]
    distance = torch.tensor(
        [[float(i + keys - queries - j) for j in range(keys)] for i in range(queries)],
        dtype=torch.float64,
    )
    want = -alibi_slopes(heads)[:, None, None] * distance
    compare(
        impl,
        dict(num_heads=heads, num_queries=queries, num_keys=keys),
        want=want,
        atol=1e-5,
        dtype=torch.float32,
    )


@check("4.2")
def test_bias_example(impl, seed):
    want = torch.tensor([0.0625, 0.00390625, 0.25])[:, None, None] * torch.tensor([-2.0, -1.0, 0.0])
    compare(impl, dict(num_heads=3, num_queries=1, num_keys=3), want=want, atol=1e-6)


# ---------------------------------------------------------------- 4.3 predict

BYTES_CASES = {  # name: (arguments, (step by step, fused), why)
    "bytes_example": ((1, 1, 2, torch.float16), (96, 24), "the docstring's"),
    "llama_3_8b": ((32, 8, 128, torch.bfloat16), (110592, 24576), "4.5 times as much"),
    "float32": ((6, 2, 64, torch.float32), (22528, 5120), "the embedded model, 4 bytes a value"),
    "no_sharing": ((16, 16, 64, torch.float16), (49152, 12288), "as many KV heads as query heads"),
}


@check("4.3", {case: why for case, (*_, why) in BYTES_CASES.items()})
def test_bytes(impl, case, seed):
    numbers, want, _ = BYTES_CASES[case]
    got = call(impl, dict(zip(("num_heads", "num_kv_heads", "head_dim", "dtype"), numbers)))
    assert isinstance(got, tuple) and len(got) == 2, (
        f"your result is {got!r}, expected two numbers of bytes"
    )
    for what, mine, right in zip(("step by step", "fused"), got, want):
        assert_equal(mine, right, label=f"bytes {what}")


@check("4.3")
def test_counted_operation_by_operation(impl, seed):
    """Against PyTorch's own operations, on tensors without memory; the tables' share is taken
    off.
    """
    g = torch.Generator().manual_seed(seed)
    kv_heads, group, half = (int(torch.randint(1, 5, (1,), generator=g)) for _ in range(3))
    heads, dim = kv_heads * group, 2 * half
    q, k, v, k_cache, v_cache = (
        torch.empty(1, n, dim, dtype=torch.float16, device="meta") for n in (heads, *4 * [kv_heads])
    )
    table = torch.empty(1, 1, dim, dtype=torch.float16, device="meta")

    def step_by_step():
        apply_rope(q, table, table)
        k_cache.copy_(apply_rope(k, table, table))
        v_cache.copy_(v)

    counted = eager_bytes(step_by_step) - 4 * table.nbytes  # cos and sin, for q and for k
    got = call(
        impl, dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=torch.float16)
    )
    assert_equal(
        got[0], counted, label=f"bytes step by step, {heads} and {kv_heads} heads of {dim}"
    )


# ---------------------------------------------------------------- 4.4 the kernel

KERNEL_CASES = {  # name: (tokens, heads, KV heads, D, first position, slots, why)
    "first_token": (1, 2, 1, 8, 0, [0], "position 0 turns nothing: k and v are copied"),
    "nothing_kept": (1, 2, 1, 8, 0, [-1], "a slot of -1, at the position that turns nothing"),
    "fresh_sequence": (4, 4, 2, 8, 0, [0, 1, 2, 3], "positions 0 to 3, in rows 0 to 3"),
    "after_a_cache": (
        3,
        4,
        2,
        8,
        20,
        [4, 5, 6],
        "positions that are neither the token's number nor its slot",
    ),
    "skipped": (
        4,
        2,
        2,
        8,
        5,
        [3, -1, 0, -1],
        "a slot of -1 writes nothing, and its q turns all the same",
    ),
    "odd_sizes": (3, 6, 3, 20, 9, [6, 2, 4], "head_dim 20, slots in any order"),
}


def kernel_inputs(case, seed, dtype=torch.float32):
    """The tensors of rotate_and_write, and what q and the caches must hold. The caches are inside
    larger ones.
    """
    tokens, heads, kv_heads, dim, start, slots, _ = KERNEL_CASES[case]
    g, device = torch.Generator().manual_seed(seed), default_device()
    q, k, v = (
        torch.randn(tokens, n, dim, generator=g).to(device, dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    # A row more before and after, because a slot of -1 that is not skipped writes there.
    around = [torch.randn(10, kv_heads, dim, generator=g).to(device, dtype) for _ in range(2)]
    positions, slot_mapping = (
        torch.arange(start, start + tokens, device=device),
        torch.tensor(slots, device=device),
    )
    cos_sin = naive.new_cos_sin_cache(naive.inverse_frequencies(dim, 50.0).float(), 40).to(device)
    wanted = [naive.rotate(q, positions, cos_sin), around[0].clone(), around[1].clone()]
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted[1][slot + 1], wanted[2][slot + 1] = (
                naive.rotate(k, positions, cos_sin)[token],
                v[token],
            )
    return (
        dict(
            q=q,
            k=k,
            v=v,
            k_cache=around[0][1:-1],
            v_cache=around[1][1:-1],
            positions=positions,
            slot_mapping=slot_mapping,
            cos_sin_cache=cos_sin,
        ),
        around,
        wanted,
    )


def check_kernel(impl, case, seed, dtype, **tolerance):
    inputs, around, wanted = kernel_inputs(case, seed, dtype)
    unchanged = {
        name: inputs.pop(name) for name in ("k", "v", "positions", "slot_mapping", "cos_sin_cache")
    }
    call(lambda **others: impl(**inputs, **others), unchanged)
    for what, mine, right in zip(
        ("q", "the K cache", "the V cache"), (inputs["q"], *around), wanted
    ):
        # without the rows around it: these first, because a write there is another mistake
        if what != "q":
            for row, place in ((0, "before"), (-1, "after")):
                assert torch.equal(mine[row], right[row]), (
                    f"the row {place} {what} was written: is a slot of -1 skipped?"
                )
            mine, right = mine[1:-1], right[1:-1]
        assert_equal(mine, right.double(), **tolerance, dtype=dtype, label=what)


@check("4.4", {case: why for case, (*_, why) in KERNEL_CASES.items()})
def test_kernel(impl, case, seed):
    check_kernel(impl, case, seed, torch.float32, atol=1e-5)


@check("4.4")
def test_kernel_in_bfloat16(impl, seed):
    """Computed in float32 and rounded once: one unit in the last of 8 bits is tolerated."""
    check_kernel(impl, "after_a_cache", seed, torch.bfloat16, atol=1e-5, rtol=2**-7)


test_the_kernel_does_it = kernel_does_it(
    "4.4",
    lambda seed: kernel_inputs("fresh_sequence", seed)[0],
    results=lambda got, inputs: {
        "q": inputs["q"],
        "the rows of k_cache in slot_mapping": inputs["k_cache"][:4],
        "the rows of v_cache in slot_mapping": inputs["v_cache"][:4],
    },
    not_loaded=("k_cache", "v_cache"),
)
