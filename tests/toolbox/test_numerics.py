"""The judges are judged: honest kernels pass over fresh seeds, and every planted error falls under
the rule meant for it.
"""

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lessons.toolbox.proof import numerics
from lessons.toolbox.proof.numerics import (
    NotEquivalent,
    assert_close_to_oracle,
    attention_inputs,
    floor_for,
    prove,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# fresh in every run; pytest prints it with a failure, because it is in the assert
SEED = random.randrange(2**31)


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √D) v, causal and bottom-right. q: [M, Hq, D]; k, v: [N, Hkv, D] -> [M, Hq,
    D].
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("mhd,nhd->hmn", q, k) * q.shape[-1] ** -0.5
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    return torch.einsum("hmn,nhd->mhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def tiled_attention(q, k, v, block=32, shift=0, skip_tile=None):
    """An honest kernel: tiles of keys, float32 sums. `shift` and `skip_tile` plant errors."""
    group, dtype = q.shape[1] // k.shape[1], q.dtype
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1).float() for x in (k, v))
    q = q.transpose(0, 1).float() * q.shape[-1] ** -0.5
    rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] + shift
    m, l, acc = (
        torch.full((*q.shape[:2], 1), -torch.inf),
        torch.zeros(*q.shape[:2], 1),
        torch.zeros_like(q),
    )
    for tile, start in enumerate(range(0, k.shape[1], block)):
        if tile == skip_tile:
            continue
        cols = torch.arange(start, min(start + block, k.shape[1]))
        scores = (q @ k[:, cols].transpose(1, 2)).masked_fill(cols > rows, -torch.inf)
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        alpha, p = torch.exp(m - m_new), torch.exp(scores - m_new)
        l, acc, m = alpha * l + p.sum(-1, keepdim=True), alpha * acc + p @ v[:, cols], m_new
    return (acc / l).transpose(0, 1).to(dtype)


def sdpa(q, k, v):
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)[0].transpose(
        0, 1
    )


def broken_rule(optimized, naive, inputs, **kwargs) -> tuple[str, str]:
    with pytest.raises(NotEquivalent) as caught:
        prove(optimized, naive, inputs, **kwargs)
    return caught.value.rule, str(caught.value)


# ---------------------------------------------------------------- honest results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", numerics.ATTENTION_INPUTS)
def test_honest_attention_passes(name, dtype):
    for seed in range(SEED, SEED + 4):
        for queries, keys in ((1, 33), (40, 97)):
            inputs = attention_inputs(name, queries, keys, 4, 2, 32, dtype=dtype, seed=seed)
            for optimized in (tiled_attention, sdpa):
                errors = prove(
                    optimized, naive_attention, inputs, floor=floor_for(dtype, inputs=name)
                )
                assert errors.rms <= 1.5 * errors.rms_eager + floor_for(dtype, inputs=name), (
                    f"seed {seed}"
                )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", numerics.DISTRIBUTIONS)
def test_honest_elementwise_passes(name, dtype):
    def rms_norm(x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    for seed in range(SEED, SEED + 6):
        x = numerics.draw(name, (130, 64), dtype=dtype, seed=seed)
        if dtype == torch.float16 and name == "tiny":
            x = x * 100  # 1e-8, the square of the original, is no float16
        prove(lambda x: rms_norm(x.float()).to(x.dtype), rms_norm, (x,))


def test_float64_and_integers_and_specials():
    x = numerics.draw("normal", (9, 7), dtype=torch.float64, seed=SEED)
    assert prove(lambda x: (x + x) / 2, lambda x: x, (x,)).rms == 0
    prove(lambda x: x.sort(-1).values[..., :2], lambda x: torch.topk(-x, 2).values.neg(), (x,))
    assert broken_rule(lambda x: x.argmin(-1), lambda x: x.argmax(-1), (x,))[0] == "exact"
    specials = torch.tensor([[1.0, float("nan"), float("inf"), -float("inf")]])
    prove(lambda x: x * 1, lambda x: x + 0, (specials,))
    zero_rows = torch.zeros(70, 8)  # fully masked rows: the oracle's norm is 0
    assert prove(lambda x: x * 1, lambda x: x + 0, (zero_rows,)).rms == 0
    assert prove(lambda x: x * 1, lambda x: x + 0, (torch.zeros(0, 8),)).max_abs == 0


# ---------------------------------------------------------------- planted errors


def planted(name: str):
    """A kernel with one error. All but the named slip is the honest kernel."""

    def kernel(q, k, v):
        out = tiled_attention(q, k, v)
        if name == "scale 1 % off":
            return (out.float() * 1.01).to(out.dtype)
        if name == "nan":
            out[3, 1, 5] = float("nan")
        if name == "infinity":
            out[0, 0, 0] = float("inf")
        if name == "wrong tail row":  # two columns of the last row of 190 x 2, slightly
            out[-1, -1, :2] *= 1.02
        if name == "one bad element":
            out[7, 1, 3] += 0.3
        return out

    if name == "dropped tile":
        return lambda q, k, v: tiled_attention(q, k, v, skip_tile=2)
    if name == "mask off by one":
        return lambda q, k, v: tiled_attention(q, k, v, shift=1)
    if name == "bf16 truncated":
        return lambda q, k, v: truncated(tiled_attention(q.float(), k.float(), v.float()))
    return kernel


def truncated(x: Tensor) -> Tensor:
    """float32 -> bfloat16 by cutting bits off instead of rounding."""
    return (x.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


EXPECTED = {  # name: (the rule under which it falls, dtypes)
    "scale 1 % off": ("E1", DTYPES),
    "dropped tile": ("E1", DTYPES),
    "mask off by one": ("E1", DTYPES),
    "nan": ("E0", DTYPES),
    "infinity": ("E0", DTYPES),
    "one bad element": ("E1", DTYPES),
    "wrong tail row": ("E1", [torch.float32]),
    "bf16 truncated": ("E4", [torch.bfloat16]),
}


@pytest.mark.parametrize(
    "name,dtype", [(name, dtype) for name, (_, dtypes) in EXPECTED.items() for dtype in dtypes]
)
def test_planted_error_is_rejected(name, dtype):
    for seed in range(SEED, SEED + 3):
        inputs = attention_inputs("normal", 190, 190, 2, 1, 32, dtype=dtype, seed=seed)
        rule, message = broken_rule(planted(name), naive_attention, inputs)
        assert rule == EXPECTED[name][0], f"seed {seed}: {message}"
        assert "oracle" in message and "[" in message and " of 12160 elements" in message, message


def compare(out, eager, ref64) -> str:
    try:
        assert_close_to_oracle(out, eager, ref64)
    except NotEquivalent as broken:
        return broken.rule
    return "passes"


def test_each_rule_catches_what_the_others_pass():
    """Errors made by hand, so small that exactly one rule sees them."""
    ref64 = torch.randn(256, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))
    eager = ref64.to(torch.bfloat16)
    assert compare(eager, eager, ref64) == "passes"
    nan = eager.clone()
    nan[0, 0] = float("nan")
    assert compare(nan, eager, ref64) == "E0"
    # each element within E2's reach
    assert compare((ref64 * 1.01).to(torch.bfloat16), eager, ref64) == "E1"
    one = eager.clone()
    # 1/65536 of the squares: E1 is blind
    one[17, 3] += 0.25
    assert compare(one, eager, ref64) == "E2"
    # a last tile of two rows, small beside the rest
    tail64 = torch.cat([ref64, 0.05 * ref64[:2]])
    tail = tail64.to(torch.bfloat16)
    bad = tail.clone()
    bad[-2:] = (tail64[-2:] * 1.05).to(torch.bfloat16)
    assert compare(bad, tail, tail64) == "E3"
    # at most one unit in the last place
    assert compare(truncated(ref64.float()), eager, ref64) == "E4"


def test_the_message_names_rule_figures_and_worst_element():
    ref64 = torch.ones(4, 8, dtype=torch.float64)
    out = torch.ones(4, 8)
    out[2, 5] = 1.5
    with pytest.raises(NotEquivalent) as caught:
        assert_close_to_oracle(out, torch.ones(4, 8), ref64, label="logits")
    message = str(caught.value)
    assert message.startswith("E1: relative error 0.0884 of logits, limit 2e-06")
    assert "worst at [2, 5]: 1.5, oracle 1; 1 of 32 elements" in message


def test_shape_and_dtype_and_arithmetic():
    x = torch.randn(5, 4)
    assert broken_rule(lambda x: x[:4], lambda x: x, (x,))[0] == "shape"
    assert broken_rule(lambda x: (x, x), lambda x: x, (x,))[0] == "shape"
    assert broken_rule(lambda x: x.half(), lambda x: x, (x,))[0] == "dtype"
    assert len(prove(lambda x: (x, -x), lambda x: (x, -x), (x,))) == 2
    with pytest.raises(ValueError, match="'int7', known are float64, float32, tf32"):
        floor_for("int7")
    with pytest.raises(ValueError, match="a tensor, or `mutates`, is needed"):
        prove(lambda x: None, lambda x: None, (x,))


# ---------------------------------------------------------------- side effects


def test_tf32_lets_the_naive_version_use_it_too_and_restores_the_setting():
    def tf32(x):  # float32 with 10 bits of mantissa
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    def naive(x):  # what a matrix product does on a GPU
        return (
            tf32(x)
            if x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "high"
            else x * 1
        )

    inputs, before = (torch.randn(64, 32),), torch.get_float32_matmul_precision()
    prove(tf32, naive, inputs, arithmetic="tf32")
    assert broken_rule(tf32, naive, inputs)[0] == "E1"
    try:
        torch.set_float32_matmul_precision("high")
        assert broken_rule(tf32, naive, inputs)[0] == "E1", (
            "a process that allows tf32 must not loosen float32"
        )
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_modified_input_is_caught_and_mutates_allows_it():
    def scale_in_place(x):
        return x.mul_(2)

    def append(cache, rows):
        cache[3:5] = rows

    def append_too_much(cache, rows):
        cache[3:6] = rows[0]

    x = torch.randn(6, 4)
    rule, message = broken_rule(scale_in_place, lambda x: 2 * x, (x,))
    assert rule == "inputs" and "input 0 [6, 4] was written to" in message
    cache = numerics.poisoned((8, 4))
    assert prove(append, append, (cache, torch.randn(2, 4)), mutates=[0]).rms == 0
    assert broken_rule(append, append, (cache, torch.randn(2, 4)), mutates=[1])[0] == "inputs"
    assert broken_rule(append_too_much, append, (cache, torch.randn(2, 4)), mutates=[0])[0] == "E0"
    assert cache.isnan().all(), "prove worked on the original"


def test_a_write_into_the_gap_of_a_strided_input_is_caught():
    def past_the_row(x):
        x.as_strided((1,), (1,), x.storage_offset() + x.shape[1]).fill_(0)
        return x + 1

    x = numerics.draw("non_contiguous", (6, 5), seed=SEED)
    assert x.stride() == (13, 1)
    assert broken_rule(past_the_row, lambda x: x + 1, (x,))[0] == "inputs"
    clone = numerics.clone_with_strides(x)
    assert (
        clone.stride() == x.stride() and torch.equal(clone, x) and clone.data_ptr() != x.data_ptr()
    )


def test_unwritten_row_is_caught():
    def forgets_the_last_row(x):
        out = torch.empty_like(x)
        out[:-1] = x[:-1]
        return out

    assert broken_rule(forgets_the_last_row, lambda x: x * 1, (torch.randn(65, 4),))[0] == "E0"


def test_random_bits_are_caught():
    def noisy(x):  # one unit in the last place of bfloat16, up or down
        return (x.float() * (1 + 6e-3 * (torch.rand(x.shape) - 0.5))).to(x.dtype)

    inputs = (torch.randn(64, 16, dtype=torch.bfloat16),)
    naive = lambda x: (x * 1.7) / 1.7
    assert broken_rule(noisy, naive, inputs)[0] == "deterministic"
    prove(noisy, naive, inputs, deterministic=False)
    nan = torch.tensor([float("nan"), 1.0])
    numerics.assert_same_bits(nan, nan.clone())
    with pytest.raises(NotEquivalent, match="1 of 1 elements differ"):
        numerics.assert_same_bits(torch.tensor(0.0), torch.tensor(-0.0))
