"""Checks of lesson 01's exercises. Each exists because it rejects a named wrong answer
(wrong/l01.py).
"""

import dataclasses
import math
import random

import pytest

from lessons.l01_roofline import calculators, optimized
from lessons.l01_roofline.planner.models import MODELS
from lessons.l01_roofline.virtual_device import VirtualDevice
from tests.exercises.checking import assert_equal, call, check, compare

# ---------------------------------------------------------------- 1.1 KV bytes

KV_CASES = {  # name: (model, bits per value, KiB, why); the KiB are written down, not computed
    "every_head_caches": ("llama-2-7b", 16, 512, "Llama-2-7B: as many KV heads as query heads"),
    "shared_kv_heads": ("llama-3-8b", 16, 128, "Llama-3-8B: 8 KV heads serve 32 query heads"),
    "head_dim_of_its_own": (
        "qwen3-4b",
        16,
        144,
        "Qwen3-4B: head_dim is 128, hidden_size / heads only 80",
    ),
    "mixture_of_experts": ("mixtral-8x7b", 16, 128, "Mixtral: experts cache nothing"),
    "latent": ("deepseek-v3", 16, 68.625, "DeepSeek-V3: one latent and one rotary key a layer"),
    "eight_bits": ("llama-3-70b", 8, 160, "an FP8 cache"),
    "four_bits_and_scales": ("llama-3-405b", 4.25, 133.875, "bits need not be whole bytes"),
}


@check("1.1", {case: why for case, (*_, why) in KV_CASES.items()}, seconds=5)
def test_kv_bytes(impl, case, seed):
    name, bits, kib, _ = KV_CASES[case]
    compare(impl, dict(model=MODELS[name], bits_per_value=bits), want=kib * 1024.0, atol=1e-6)


@check("1.1", seconds=5)
def test_kv_bytes_need_not_be_whole(impl, seed):
    """6 values of 4.25 bits, in a model without a latent whose heads have a rotary part."""
    model = dataclasses.replace(
        MODELS["llama-3-8b"],
        num_hidden_layers=1,
        num_key_value_heads=1,
        head_dim=3,
        qk_rope_head_dim=2,
    )
    compare(impl, dict(model=model, bits_per_value=4.25), want=3.1875, atol=1e-9)


@check("1.1", seconds=5)
def test_kv_bytes_of_a_random_shape(impl, seed):
    """Every number of the shape is another one, so that no two can be mixed up."""
    draw = random.Random(seed)
    layers, kv_heads, head_dim, group = draw.sample([2, 3, 5, 7, 11, 13, 17], 4)
    model = dataclasses.replace(
        MODELS["llama-3-8b"],
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_attention_heads=kv_heads * group,
    )
    assert_equal(
        call(impl, dict(model=model, bits_per_value=16)),
        2.0 * 2 * layers * kv_heads * head_dim,
        label="your bytes",
    )


# ---------------------------------------------------------------- 1.2 a linear layer

H200 = dict(bandwidth=4.8e12, peak=989.5e12)  # data sheet
LINEAR_CASES = {  # name: (arguments, milliseconds, bound, why)
    "example": (
        dict(tokens=2, in_features=3, out_features=4, bits_per_weight=16, bandwidth=1e3, peak=1e3),
        52.0,
        "memory",
        "the docstring's",
    ),
    "one_token": (
        dict(tokens=1, in_features=4096, out_features=8192, bits_per_weight=16, **H200),
        0.0139861333,
        "memory",
        "a decode step of one sequence: the weights alone count",
    ),
    "prefill": (
        dict(tokens=8192, in_features=4096, out_features=4096, bits_per_weight=16, **H200),
        0.27779475,
        "compute",
        "a long prompt: the multiplications count",
    ),
    "four_bits": (
        dict(tokens=8, in_features=4096, out_features=14336, bits_per_weight=4, **H200),
        0.0061781333,
        "memory",
        "four bits a weight, sixteen an activation",
    ),
    "few_features": (
        dict(tokens=4096, in_features=64, out_features=16, bits_per_weight=16, **H200),
        0.00013696,
        "memory",
        "a narrow layer: activations outweigh the weights",
    ),
    "tie": (
        dict(tokens=1, in_features=1, out_features=1, bits_per_weight=16, bandwidth=6e3, peak=2e3),
        1.0,
        "memory",
        "exactly on the ridge",
    ),
}


@check("1.2", {case: why for case, (*_, why) in LINEAR_CASES.items()}, seconds=5)
def test_linear(impl, case, seed):
    arguments, milliseconds, bound, _ = LINEAR_CASES[case]
    got = call(impl, arguments)
    assert isinstance(got, tuple) and len(got) == 2, (
        f"your result is {got!r}, expected (milliseconds, bound)"
    )
    assert_equal(got[0], milliseconds, rtol=1e-6, label="your time in ms")
    assert_equal(got[1], bound, label="your bound")


@check("1.2", seconds=5)
def test_linear_ridge(impl, seed):
    """The batch at which memory and compute change places is where the two times cross, for any
    layer.
    """
    draw = random.Random(seed)
    layer = dict(
        in_features=draw.randrange(512, 8192),
        out_features=draw.randrange(512, 8192),
        bits_per_weight=16,
        **H200,
    )
    size, width = (
        layer["in_features"] * layer["out_features"],
        layer["in_features"] + layer["out_features"],
    )
    # tokens
    crossing = size / layer["bandwidth"] / (size / layer["peak"] - width / layer["bandwidth"])
    if not 2 < crossing < 1e6:  # too narrow a layer never becomes compute-bound
        crossing, layer["in_features"], layer["out_features"] = 228.7, 4096, 4096
    below, above = (
        call(impl, dict(layer, tokens=tokens))[1]
        for tokens in (math.floor(crossing), math.ceil(crossing) + 1)
    )
    assert (below, above) == ("memory", "compute"), (
        f"below {crossing:.0f} tokens your layer is bound by {below}, above by {above}; expected "
        "memory, then compute"
    )


# ---------------------------------------------------------------- 1.3 the timer


def timed(impl, device, **options):
    """Call the timer on a device whose clock moves only with its work."""
    got = impl(device.launch, device.synchronize, clock=device.clock, **options)
    assert isinstance(got, optimized.Timing), f"your result is {got!r}, expected a Timing"
    return got


# name: (work_ms of each launch, launches queued before, options, (median, p20, p80), why)
TIMER_CASES = {
    "steady": (
        [5],
        0,
        dict(warmup=3, repetitions=5),
        (5, 5, 5),
        "the work takes 5 ms, its launch next to nothing",
    ),
    "slow_first_call": (
        [500, 5],
        0,
        dict(warmup=1, repetitions=5),
        (5, 5, 5),
        "the first call compiles",
    ),
    "two_warm_up_calls": (
        [500, 400, 5],
        0,
        dict(warmup=2, repetitions=4),
        (5, 5, 5),
        "as many warm-up calls as asked for",
    ),
    "busy_device": (
        [5],
        8,
        dict(warmup=0, repetitions=2),
        (5, 5, 5),
        "earlier work is still in the queue",
    ),
    "outlier": (
        [5, 5, 5, 5, 900],
        0,
        dict(warmup=0, repetitions=5),
        (5, 5, 184),
        "a hiccup: the median stays, the band tells",
    ),
    "drift": (
        [*range(1, 12)],
        0,
        dict(warmup=0, repetitions=11),
        (6, 3, 9),
        "1 to 11 ms: p20 is 3, p80 is 9",
    ),
}


@check("1.3", {case: why for case, (*_, why) in TIMER_CASES.items()}, seconds=5)
def test_timer(impl, case, seed):
    work, queued, options, want, _ = TIMER_CASES[case]
    device = VirtualDevice(work, launch_ms=0.001)
    for _ in range(queued):
        device.launch()
    got = timed(impl, device, **options)
    for name, a, b in zip(got._fields, got, want):
        assert_equal(a, float(b), atol=0.01, label=f"your {name} in ms")
    assert device.launches - queued == options["warmup"] + options["repetitions"], (
        f"{device.launches - queued} launches, expected {options['warmup']} + "
        f"{options['repetitions']}"
    )


@check("1.3", seconds=5)
def test_timer_refuses_one_repetition(impl, seed):
    """One number has no spread."""
    with pytest.raises(ValueError):
        timed(impl, VirtualDevice([5]), repetitions=1)


# ---------------------------------------------------------------- 1.4 cost

COST_CASES = {  # name: (arguments, dollars, why)
    "example": (
        dict(
            memory_gb=80,
            weights_gb=16,
            kv_kib_per_token=128,
            context=4096,
            bandwidth_tb_per_s=3.35,
            dollars_per_hour=3,
        ),
        0.1670,
        "the docstring's",
    ),
    "few_sequences": (
        dict(
            memory_gb=127,
            weights_gb=65.5,
            kv_kib_per_token=256,
            context=65536,
            bandwidth_tb_per_s=4.8,
            dollars_per_hour=3.6,
        ),
        8.12775,
        "three and a half fit: three run",
    ),
    "one_sequence": (
        dict(
            memory_gb=20,
            weights_gb=16,
            kv_kib_per_token=128,
            context=20000,
            bandwidth_tb_per_s=1,
            dollars_per_hour=0.36,
        ),
        1.862144,
        "one sequence: the weights are read for it alone",
    ),
    "none_fits": (
        dict(
            memory_gb=80,
            weights_gb=79,
            kv_kib_per_token=512,
            context=4096,
            bandwidth_tb_per_s=2,
            dollars_per_hour=2,
        ),
        math.inf,
        "no room for a cache",
    ),
    "weights_too_big": (
        dict(
            memory_gb=80,
            weights_gb=141,
            kv_kib_per_token=320,
            context=4096,
            bandwidth_tb_per_s=2,
            dollars_per_hour=2,
        ),
        math.inf,
        "not even the weights fit",
    ),
    "half_a_kib": (
        dict(
            memory_gb=1,
            weights_gb=0.5,
            kv_kib_per_token=0.5,
            context=1000,
            bandwidth_tb_per_s=0.1,
            dollars_per_hour=1,
        ),
        0.002845,
        "sizes need not be whole",
    ),
}


@check("1.4", {case: why for case, (*_, why) in COST_CASES.items()}, seconds=5)
def test_cost(impl, case, seed):
    arguments, dollars, _ = COST_CASES[case]
    got = call(impl, arguments)
    if dollars == math.inf:
        assert got == math.inf, f"your cost is {got!r}, expected math.inf: nothing can run"
        return
    assert_equal(got, dollars, rtol=1e-3, label="your dollars per 10⁶ tokens")


@check("1.4", seconds=5)
def test_cost_agrees_with_the_calculators(impl, seed):
    """Random numbers, against the lesson's own calculators."""
    draw = random.Random(seed)
    memory, weights, kib, context = (
        draw.uniform(40, 200),
        draw.uniform(5, 30),
        draw.uniform(60, 600),
        draw.randrange(500, 9000),
    )
    sequences = calculators.sequences_that_fit(memory * 1e9, weights * 1e9, kib * 1024, context)
    step_s = (weights * 1e9 + sequences * context * kib * 1024) / 3e12
    want = calculators.cost_per_million_tokens(2.0, calculators.tokens_per_s(step_s, sequences))
    compare(
        impl,
        dict(
            memory_gb=memory,
            weights_gb=weights,
            kv_kib_per_token=kib,
            context=context,
            bandwidth_tb_per_s=3.0,
            dollars_per_hour=2.0,
        ),
        want=want,
        rtol=1e-9,
    )
