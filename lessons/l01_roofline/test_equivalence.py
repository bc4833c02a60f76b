"""Proves that the first kernel copies like PyTorch, bit for bit, and that the honest timer measures
work instead of launches.
"""

import time

import pytest
import torch

from lessons.l01_roofline import masked, naive
from lessons.l01_roofline.lab import specs
from lessons.l01_roofline.masked import masked_kernel
from lessons.l01_roofline.optimized import (
    TILE_BYTES,
    honest_ms,
    scale_copy,
    scale_copy_kernel,
)
from lessons.l01_roofline.planner.serving import serving_times
from lessons.l01_roofline.virtual_device import VirtualDevice
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.proof.numerics import (
    DISTRIBUTIONS,
    assert_same_bits,
    draw,
    edge_lengths,
    poisoned_empty,
    prove,
    with_canaries,
)

DEVICE = default_device()  # without a GPU the kernel runs in Triton's interpreter
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FACTORS = [1.0, 1, -0.3, 0.0, 3e4]


# ---------------------------------------------------------------- the kernel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_is_exact_at_every_edge_of_a_tile(dtype, seed, proof):
    for length in edge_lengths(TILE_BYTES // dtype.itemsize):
        x = draw("normal", [length], dtype=dtype, seed=seed, device=DEVICE)
        for factor in FACTORS:
            with poisoned_empty():
                out = scale_copy(x, factor)
            assert_same_bits(
                out, naive.scale_copy(x, factor), label=f"{length} elements times {factor}"
            )
    proof.record(scale_copy_kernel)  # bitwise


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(set(DISTRIBUTIONS) - {"non_contiguous"}))
def test_scale_against_the_oracle(name, dtype, seed, proof):
    x = draw(name, (3, 1031), dtype=dtype, seed=seed, device=DEVICE)
    proof.record(
        scale_copy_kernel,
        prove(lambda x: scale_copy(x, 0.7), lambda x: naive.scale_copy(x, 0.7), [x]),
    )


@pytest.mark.parametrize("length", edge_lengths(TILE_BYTES // 2, at_most=9000))
def test_the_masked_kernel_is_right_too(length, seed, proof):
    x = draw("normal", [length], dtype=torch.bfloat16, seed=seed, device=DEVICE)
    with poisoned_empty():
        out = masked.masked_scale_copy(x, -0.3)
    assert_same_bits(out, naive.scale_copy(x, -0.3))
    proof.record(masked_kernel)  # bitwise


@pytest.mark.parametrize("length", edge_lengths(TILE_BYTES // 2, at_most=9000))
def test_nothing_is_written_beside_the_output(length, seed):
    x = draw("normal", [length], dtype=torch.bfloat16, seed=seed, device=DEVICE)
    out, check = with_canaries([length], torch.bfloat16, DEVICE, guard=TILE_BYTES)
    assert scale_copy(x, 2.0, out=out) is out
    check()
    assert_same_bits(out, x * 2)


def test_a_view_that_is_not_aligned_to_16_bytes(seed):
    x = draw("normal", [5001], dtype=torch.float16, seed=seed, device=DEVICE)
    assert_same_bits(scale_copy(x[1:], 0.5), x[1:] * 0.5)


def test_in_place_and_special_values():
    x = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0, 6e-8],
        dtype=torch.float16,
        device=DEVICE,
    )
    want = x * 2.0
    scale_copy(x, 2.0, out=x)
    assert torch.equal(x.isnan(), want.isnan())
    assert_same_bits(x.nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_empty_and_zero_dimensional(shape):
    x = torch.ones(shape, device=DEVICE)
    assert_same_bits(scale_copy(x, 3.0), x * 3)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: scale_copy(torch.ones(4, dtype=torch.float64)),
            "float64; accepted: float16, bfloat16, float32",
        ),
        (lambda: scale_copy(torch.ones(4, dtype=torch.int32)), "int32; accepted"),
        (lambda: scale_copy(torch.ones(4, 4).T), r"strides \[1, 4\]; accepted: contiguous"),
        (
            lambda: scale_copy(torch.ones(4), out=torch.ones(5)),
            r"\[5\].*accepted: contiguous torch.float32 \[4\]",
        ),
        (lambda: scale_copy(torch.ones(4), out=torch.ones(4).half()), "float16"),
        (lambda: scale_copy(torch.ones(4), out=torch.ones(8)[::2]), r"strides \[2\]"),
    ],
)
def test_bad_arguments_are_named_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.compiler
def test_the_compiler_gives_16_byte_loads_without_spills():
    for report in check_all(specs.COPY):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits, f"{report.name} on sm_{report.chip}: {report}"
        # vectors per thread of 4 warps: no load is narrower
        assert report.loads_128bit == TILE_BYTES // (16 * 32 * 4)


@pytest.mark.compiler
def test_a_mask_over_any_length_costs_the_wide_loads():
    plain, multiple_of_16 = check_all(specs.MASKED, [90])
    if (plain.error or "").startswith("not run"):
        pytest.skip(plain.error)
    assert (plain.loads_128bit, plain.census["LDG"]) == (0, 32)  # 2 bytes each
    assert (multiple_of_16.loads_128bit, multiple_of_16.census["LDG"]) == (4, 4)


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE.type != "cuda" or torch.cuda.mem_get_info()[0] < 11 * 2**30,
    reason="NOT RUN: needs a CUDA device with 11 GiB free",
)
def test_beyond_two_to_the_31_elements(proof):
    x = torch.zeros(2**31 + 4099, dtype=torch.bfloat16, device=DEVICE)
    x[-4099:] = 3
    out = scale_copy(x, 2.0)
    assert out[-4099:].eq(6).all() and not out[:-4099].any()
    proof.record(scale_copy_kernel)


# ---------------------------------------------------------------- the timer


def timed(device: VirtualDevice, **options):
    return honest_ms(device.launch, device.synchronize, clock=device.clock, **options)


def test_the_stopwatch_measures_the_launch_and_the_timer_the_work():
    device = naive.QueueDevice()

    def launch():
        device.launch(lambda: time.sleep(0.03))

    assert naive.stopwatch_ms(launch) < 10
    timing = honest_ms(launch, device.synchronize, warmup=1, repetitions=3)
    assert 30 <= timing.median < 300


def test_the_first_call_is_not_charged():
    timing = timed(VirtualDevice([500, 80, 5]), warmup=3, repetitions=5)
    assert timing.median == pytest.approx(5, abs=0.02) and timing.p80 == pytest.approx(5, abs=0.02)


def test_work_queued_earlier_is_not_charged():
    device = VirtualDevice([5])
    for _ in range(10):
        device.launch()
    assert timed(device, warmup=0, repetitions=2) == pytest.approx((5.01, 5.01, 5.01))


def test_median_and_band():
    device = VirtualDevice([*range(1, 12), 900])  # 11 repetitions: 1 … 11 ms
    assert timed(device, warmup=0, repetitions=11) == pytest.approx((6.01, 3.01, 9.01))
    assert device.launches == 11


def test_one_repetition_is_refused():
    with pytest.raises(ValueError, match="repetitions is 1; accepted: 2 or more"):
        timed(VirtualDevice([5]), repetitions=1)


# ---------------------------------------------------------------- TTFT and TPOT


@pytest.fixture(scope="module")
def random_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            vocab_size=61,
            eos_token_id=None,
        )
    ).eval()


def test_serving_times_generate_what_transformers_generates(random_llama, seed):
    prompt = torch.randint(61, (9,), generator=torch.Generator().manual_seed(seed))
    ticks = iter(range(100))
    times = serving_times(random_llama, prompt, 6, clock=lambda: float(next(ticks)))
    want = random_llama.generate(prompt[None], max_new_tokens=6, do_sample=False)[0, 9:]
    assert times.tokens == want.tolist()
    # one reading of the clock per token, none besides
    assert times.ttft_ms == 1000 and times.tpot_ms == [1000] * 5


@pytest.mark.parametrize(
    "prompt, new_tokens",
    [
        (torch.zeros(0, dtype=torch.long), 5),
        (torch.zeros(3, dtype=torch.long), 1),
        (torch.zeros(1, 3, dtype=torch.long), 5),
    ],
)
def test_serving_times_refuses_what_it_cannot_time(random_llama, prompt, new_tokens):
    with pytest.raises(ValueError, match="accepted"):
        serving_times(random_llama, prompt, new_tokens)
