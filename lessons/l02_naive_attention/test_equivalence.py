"""Proves that every attention of lesson 2 is the same mathematics: loops, one head at a time, one
expression, one kernel.
"""

import pytest
import torch

from lessons.l02_naive_attention.lab.specs import KERNELS
from lessons.l02_naive_attention.naive import (
    attention,
    attention_loops,
    attention_per_head,
    causal_mask,
    masked_softmax,
)
from lessons.l02_naive_attention.optimized import (
    MAX_KEYS,
    attention_torch,
    fused_softmax,
    softmax_kernel,
)
from lessons.l02_naive_attention.optimized import attention as fused_attention
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.proof.numerics import (
    ATTENTION_INPUTS,
    DISTRIBUTIONS,
    NotEquivalent,
    attention_inputs,
    draw,
    edge_lengths,
    prove,
    with_canaries,
)

DEVICE = default_device()  # without a GPU the kernel runs in Triton's interpreter
STEPS = {
    "loops": attention_loops,
    "per_head": attention_per_head,
    "one_expression": attention,
    "torch": attention_torch,
}
# (Tq, Tk, Hq, Hkv, D): one token; decode; prefill; chunks after a cache, D no power of two; more
# queries than keys
SHAPES = [
    (1, 1, 1, 1, 8),
    (1, 17, 8, 1, 16),
    (9, 9, 4, 4, 16),
    (5, 18, 8, 2, 20),
    (16, 33, 4, 2, 80),
    (13, 7, 6, 3, 12),
]
WINDOWS = [None, 1, 4]


def oracle(q, k, v, softmax_scale=None, causal=True, window=None):
    """PyTorch's own attention with a mask spelled out element by element; rows that see nothing are
    zeroed by hand.
    """
    tq, tk, group = len(q), len(k), q.shape[1] // k.shape[1]
    sees = torch.tensor(
        [
            [
                not causal or (j <= i + tk - tq and (window is None or i + tk - tq - j < window))
                for j in range(tk)
            ]
            for i in range(tq)
        ],
        device=q.device,
    )
    k, v = (torch.stack([x[:, head // group] for head in range(q.shape[1])]) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k, v, attn_mask=sees, scale=softmax_scale
    )
    return out.transpose(0, 1).masked_fill(~sees.any(1)[:, None, None], 0)


# ---------------------------------------------------------------- the steps in PyTorch


def check_step(function, seed):
    """Raise unless `function` equals the oracle in float64 on every shape, window, scale, and
    without a causal mask.
    """
    for tq, tk, hq, hkv, d in SHAPES:
        inputs = attention_inputs(
            "large_logits", tq, tk, hq, hkv, d, dtype=torch.float64, seed=seed
        )
        for window in WINDOWS:
            torch.testing.assert_close(
                function(*inputs, window=window),
                oracle(*inputs, window=window),
                atol=1e-11,
                rtol=1e-11,
            )
        torch.testing.assert_close(
            function(*inputs, causal=False), oracle(*inputs, causal=False), atol=1e-11, rtol=1e-11
        )
        # 40: scores in the thousands, where exp overflows float64 as well
        for scale in (0.07, 40.0):
            torch.testing.assert_close(
                function(*inputs, scale), oracle(*inputs, scale), atol=1e-9, rtol=1e-9
            )


@pytest.mark.parametrize("name", STEPS)
def test_each_step_is_the_same_mathematics(name, seed):
    check_step(STEPS[name], seed)


def test_mask_is_bottom_right_aligned():
    assert causal_mask(2, 5).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(3, 2).int().tolist() == [[0, 0], [1, 0], [1, 1]]
    assert causal_mask(3, 5, window=2).int().tolist() == [
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_a_nan_stays_visible():
    q, k, v = attention_inputs("normal", 4, 4, 2, 1, 8)
    k[1] = float("nan")
    for function in (attention, attention_torch, fused_attention):
        out = function(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE))
        assert out[1:].isnan().all() and out[0].isfinite().all()  # token 0 does not see token 1


# ---------------------------------------------------------------- the kernel


@pytest.mark.parametrize(
    "shape, dtype",
    [
        *((shape, torch.float32) for shape in SHAPES[1:]),
        (SHAPES[3], torch.float16),
        (SHAPES[3], torch.bfloat16),
        (SHAPES[5], torch.bfloat16),
    ],
)
@pytest.mark.sample(3)
def test_fused_attention(shape, dtype, seed, proof):
    inputs = attention_inputs("normal", *shape, dtype=dtype, seed=seed, device=DEVICE)
    for window in WINDOWS[::2]:
        proof.record(
            softmax_kernel,
            prove(
                lambda q, k, v, w=window: fused_attention(q, k, v, window=w),
                lambda q, k, v, w=window: attention(q, k, v, window=w),
                inputs,
            ),
        )


@pytest.mark.parametrize("name", ATTENTION_INPUTS)
@pytest.mark.sample(3)
def test_fused_attention_on_hard_inputs(name, seed, proof):
    inputs = attention_inputs(name, 9, 21, 4, 2, 16, seed=seed, device=DEVICE)
    proof.record(softmax_kernel, prove(fused_attention, attention, inputs))
    proof.record(
        softmax_kernel,
        prove(
            lambda q, k, v: fused_attention(q, k, v, 0.3, False),
            lambda q, k, v: attention(q, k, v, 0.3, False),
            inputs,
        ),
    )


def plain_softmax(scores, scale, causal=True, window=None):
    tq, tk = scores.shape[1:]
    sees = (
        causal_mask(tq, tk, window, scores.device)
        if causal
        else torch.ones(tq, tk, dtype=torch.bool, device=scores.device)
    )
    return masked_softmax(scores * scale, sees)


@pytest.mark.parametrize("num_keys", [*edge_lengths(16), 1000])
@pytest.mark.sample(4)
def test_softmax_kernel_rows(num_keys, seed, proof):
    """Row lengths around powers of two, where BLOCK_N jumps; fewer, as many and more queries than
    keys.
    """
    for num_queries in {1, min(num_keys, 5), num_keys + 2 if num_keys < 20 else 3}:
        scores = draw("normal", (2, num_queries, num_keys), seed=seed, device=DEVICE)
        for window in (3, None):
            proof.record(
                softmax_kernel, prove(fused_softmax, plain_softmax, [scores, 1.7, True, window])
            )


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_softmax_kernel_on_hard_inputs(name, seed, proof):
    for dtype in (torch.float32, torch.bfloat16):
        scores = draw(name, (2, 5, 37), dtype=dtype, seed=seed, device=DEVICE)
        proof.record(softmax_kernel, prove(fused_softmax, plain_softmax, [scores, 0.5]))


def test_softmax_kernel_stays_in_bounds(seed):
    scores = draw("normal", (3, 5, 19), seed=seed, device=DEVICE)
    probs, check = with_canaries((3, 5, 19), device=DEVICE)
    softmax_kernel[5, 3](
        scores, probs, 1.0, 5, 19, 19, *scores.stride()[:2], CAUSAL=True, BLOCK_N=32
    )
    check()
    torch.testing.assert_close(probs, plain_softmax(scores, 1.0))


@pytest.mark.compiler
def test_the_compiler_gives_wide_loads_without_spills():
    for report in check_all(spec for spec in KERNELS if "softmax" in spec.label):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits, f"{report.name} on sm_{report.chip}: {report}"
        size, scores_a_warp = (
            {"bf16": 2, "fp32": 4}[report.name.split("_")[1]],
            512 if "1024" in report.name else 1024,
        )
        # Rows that end anywhere cannot be loaded 16 bytes at a time: the price of a context that is
        # no multiple of 16.
        assert report.loads_128bit == (
            0 if "odd" in report.name else scores_a_warp * size // (16 * 32)
        ), report.name


@pytest.mark.parametrize("function", [attention, attention_torch, fused_attention])
def test_probes_with_known_answers(function, seed):
    q, k, v = attention_inputs("normal", 6, 11, 4, 2, 16, seed=seed, device=DEVICE)
    torch.testing.assert_close(
        function(q, k, torch.ones_like(v)), torch.ones_like(q), atol=1e-6, rtol=0
    )
    # query i sees 6 + i keys
    mean = torch.stack([v[: i + 6].mean(0) for i in range(6)]).repeat_interleave(2, dim=1)
    torch.testing.assert_close(function(q, torch.zeros_like(k), v), mean, atol=1e-6, rtol=1e-5)
    shifted = k + 3 * torch.ones_like(k)  # adds the same number to all scores of a query
    torch.testing.assert_close(function(q, shifted, v), function(q, k, v), atol=1e-4, rtol=0)
    beyond = k.clone()
    beyond[-1] += 5  # only the last query sees the last key
    assert torch.equal(function(q, beyond, v)[:-1], function(q, k, v)[:-1])


# ---------------------------------------------------------------- wrong answers


def wrong(
    scores_mask=causal_mask,
    expand=torch.repeat_interleave,
    scale=None,
    shift=True,
    zero_unseen=True,
):
    """`attention` with one part replaced by a misconception."""

    def function(q, k, v, softmax_scale=None, causal=True, window=None):
        softmax_scale = softmax_scale or scale or q.shape[-1] ** -0.5
        sees = (
            scores_mask(len(q), len(k), window)
            if causal
            else torch.ones(len(q), len(k), dtype=torch.bool)
        )
        group = q.shape[1] // k.shape[1]
        scores = (torch.einsum("qhd,khd->hqk", q, expand(k, group, 1)) * softmax_scale).masked_fill(
            ~sees, -torch.inf
        )
        weights = (scores - (scores.amax(-1, keepdim=True) if shift else 0)).exp()
        probs = weights / weights.sum(-1, keepdim=True)
        probs = probs.masked_fill(~sees, 0) if zero_unseen else probs
        return torch.einsum("hqk,khd->qhd", probs, expand(v, group, 1))

    return function


def top_left(tq, tk, window):
    """The mask of a prefill, cut out for whatever shape comes: what torch.tril and SDPA's is_causal
    give.
    """
    side = max(tq, tk)
    return causal_mask(side, side, window)[:tq, :tk]


WRONG = {
    "top-left mask": wrong(top_left),
    "no mask": wrong(lambda tq, tk, window: torch.ones(tq, tk, dtype=torch.bool)),
    "a query does not see itself": wrong(
        lambda tq, tk, window: torch.nn.functional.pad(causal_mask(tq, tk - 1, window), (0, 1))
    ),
    "window one too wide": wrong(lambda tq, tk, window: causal_mask(tq, tk, window and window + 1)),
    "window ignored": wrong(lambda tq, tk, window: causal_mask(tq, tk)),
    "repeat instead of repeat_interleave": wrong(
        expand=lambda x, group, dim: x.repeat(1, group, 1)
    ),
    "no scale": wrong(scale=1.0),
    "no max": wrong(shift=False),
    "unseen rows are nan": wrong(zero_unseen=False),
}


def test_the_right_answer_in_the_wrong_ones_form_passes(seed):
    """Otherwise the next test would prove nothing."""
    check_step(wrong(), seed)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answer_is_rejected(name, seed):
    with pytest.raises(AssertionError):
        check_step(WRONG[name], seed)


@pytest.mark.parametrize("slip", ["scale", "offset", "drops the last key"])
def test_a_wrong_kernel_is_rejected(slip, seed):
    def slipped(scores, scale):
        if slip == "scale":
            return fused_softmax(scores, scale * 1.01)
        if slip == "offset":
            return fused_softmax(scores, scale, window=scores.shape[2] - 1)
        return torch.nn.functional.pad(
            fused_softmax(scores[..., :-1].contiguous(), scale, False), (0, 1)
        )

    with pytest.raises(NotEquivalent):
        prove(slipped, plain_softmax, [draw("normal", (2, 20, 20), seed=seed, device=DEVICE), 2.0])


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("function", [*STEPS.values(), fused_attention])
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(k=torch.zeros(3, 3, 8)), "q, k, v: got q .2, 4, 8.*multiple of Hkv"),
        (dict(v=torch.zeros(2, 2, 8)), "accepted: .Tq, Hq, D"),
        (dict(q=torch.zeros(2, 4, 16)), "accepted: .Tq, Hq, D"),
        (dict(v=torch.zeros(3, 2, 8).half()), "one dtype"),
        (dict(window=0), "window: got 0 .*accepted: None, or 1 or more"),
        (dict(window=2, causal=False), "window: got 2 with causal=False"),
    ],
)
def test_bad_arguments(function, change, message):
    with pytest.raises(ValueError, match=message) as error:
        function(
            **dict(q=torch.zeros(2, 4, 8), k=torch.zeros(3, 2, 8), v=torch.zeros(3, 2, 8)) | change
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "scores",
    [
        torch.zeros(2, 3),
        torch.zeros(1, 2, 3).double(),
        torch.zeros(1, 1, MAX_KEYS + 1),
        torch.zeros(1, 3, 2).transpose(1, 2),
    ],
)
def test_bad_scores(scores):
    with pytest.raises(ValueError, match=r"scores: got .*; accepted: "):
        fused_softmax(scores, 1.0)
