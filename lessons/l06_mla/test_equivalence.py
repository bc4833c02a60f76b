"""Proves that absorbed attention equals decompressing, in every form and cache, and that the kernel
is attention over latents.
"""

import pytest
import torch

from lessons.l02_naive_attention.naive import causal_mask, masked_softmax
from lessons.l06_mla.lab.specs import KERNELS
from lessons.l06_mla.lab.testing import RANK, ROPE
from lessons.l06_mla.optimized import (
    Tiles,
    mla_decode,
    mla_decode_kernel,
    tiles_for,
)
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.proof.numerics import (
    NotEquivalent,
    draw,
    edge_lengths,
    floor_for,
    poisoned,
    prove,
)
from lessons.toolbox.proof.refusals import KINDS, assert_refused

pytestmark = pytest.mark.usefixtures("seed")
DEVICE = default_device()  # without a GPU the kernel runs in Triton's interpreter
# ---------------------------------------------------------------- the kernel


def by_definition(q, kv_cache, context_lens, softmax_scale, rank=RANK):
    """The definition of mla_decode, one sequence at a time: ([B, H, rank], [B, H])."""
    outs, lses = [], []
    for one, rows, n in zip(q, kv_cache, context_lens.tolist()):
        scores = one @ rows[:n].T * softmax_scale  # [H, n]
        sees = causal_mask(1, n).to(q.device)
        outs.append(masked_softmax(scores, sees) @ rows[:n, :rank])
        lses.append(torch.logsumexp(scores if q.dtype == torch.float64 else scores.float(), dim=-1))
    return torch.stack(outs), torch.stack(lses)


def decode_inputs(
    name, lengths, capacity, num_heads, seed, dtype=torch.float32, rank=RANK, rope=ROPE
):
    """q: [B, H, rank + rope], kv_cache: [B, capacity, rank + rope] whose unused rows are NaN,
    context_lens: [B] int32.
    """
    dim = rank + rope
    q = draw("normal", (len(lengths), num_heads, dim), dtype=dtype, seed=seed, device=DEVICE)
    kv_cache = poisoned((len(lengths), capacity, dim), dtype, DEVICE)
    for b, n in enumerate(lengths):
        rows = draw("normal", (n, dim), seed=seed + b + 1)
        # every key scores higher than the one before, so the running max moves in every tile
        if name == "ascending":
            rows, q[b] = rows.abs() * torch.linspace(0, 2, n)[:, None], q[b].abs()
        elif name == "all_negative":  # padding that scores 0 would take nearly all of the weight
            rows, q[b] = -rows.abs(), q[b].abs()
        elif name == "large_logits":
            rows = 30 * rows
        kv_cache[b, :n] = rows.to(kv_cache)
    return q, kv_cache, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def proved(inputs, proof, scale=24**-0.5, rank=RANK, tiles=None, **how):
    errors = prove(
        lambda *x: mla_decode(*x, scale, rank, tiles),
        lambda *x: by_definition(*x, scale, rank),
        inputs,
        **how,
    )
    for error in errors:
        proof.record(mla_decode_kernel, error)


@pytest.mark.parametrize(
    "num_heads, dtype",
    [(16, torch.float32), (4, torch.float32), (20, torch.bfloat16), (16, torch.float16)],
)
def test_decode_kernel(num_heads, dtype, seed, proof):
    """A ragged batch with an empty sequence; lengths around the tile size; heads that do not fill a
    block.
    """
    proved(decode_inputs("normal", [0, 1, 15, 16, 17, 33, 50], 50, num_heads, seed, dtype), proof)


@pytest.mark.parametrize("name", ["large_logits", "ascending", "all_negative"])
def test_decode_kernel_on_hard_inputs(name, seed, proof):
    floor = floor_for(torch.float32, name)
    proved(decode_inputs(name, [2, 40, 65], 70, 4, seed), proof, floor=floor)


@pytest.mark.parametrize("tiles", [Tiles(16, 16, 4, 1), Tiles(16, 64, 4, 2), Tiles(32, 32, 8, 2)])
def test_decode_kernel_at_every_tile_size(tiles, seed, proof):
    lengths = edge_lengths(tiles.block_n, at_most=130)
    proved(decode_inputs("ascending", lengths, max(lengths), 18, seed), proof, tiles=tiles)


@pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 0),
    reason="NOT RUN: needs a GPU whose shared memory holds such a tile, from 8.0 on, or none",
)
@pytest.mark.parametrize("num_heads, dtype", [(16, torch.bfloat16), (128, torch.bfloat16)])
def test_decode_kernel_at_the_published_width(num_heads, dtype, seed, proof):
    """512 + 64, with the tiles that a GPU gets: V2-Lite's 16 heads, V3's 128."""
    proved(
        decode_inputs("normal", [45, 3], 45, num_heads, seed, dtype, 512, 64),
        proof,
        scale=192**-0.5,
        rank=512,
    )


def test_decode_probes_with_known_answers(seed):
    q, kv_cache, lens = decode_inputs("normal", [7, 33], 40, 4, seed)
    # no query prefers any key
    out, lse = mla_decode(torch.zeros_like(q), kv_cache, lens, 1.0, RANK)
    mean = torch.stack([kv_cache[b, :n, :RANK].mean(0) for b, n in enumerate(lens.tolist())])
    torch.testing.assert_close(out, mean[:, None].expand_as(out), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, lens.log()[:, None].expand(-1, 4), atol=1e-6, rtol=1e-6)
    constant = torch.ones_like(kv_cache)
    torch.testing.assert_close(
        mla_decode(q, constant, lens, 1.0, RANK)[0], torch.ones_like(out), atol=1e-6, rtol=0
    )
    q[1, 2] = float("nan")
    assert mla_decode(q, kv_cache, lens, 1.0, RANK)[0].isnan().any(-1).nonzero().tolist() == [
        [1, 2]
    ]


def test_halves_merge_by_their_log_sum_exp(seed):
    """What lesson 10 needs: attention over two slices of the cache, weighted by exp(lse), is
    attention over both.
    """
    q, kv_cache, lens = decode_inputs("normal", [40, 40], 40, 4, seed)
    whole, lse = mla_decode(q, kv_cache, lens, 0.2, RANK)
    parts = [
        mla_decode(q, rows, torch.full_like(lens, rows.shape[1]), 0.2, RANK)
        for rows in kv_cache.split([23, 17], dim=1)
    ]
    weights = torch.stack([part[1] - lse for part in parts]).exp()
    torch.testing.assert_close(weights.sum(0), torch.ones_like(lse), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        sum(w[..., None] * part[0] for w, part in zip(weights, parts)), whole, atol=1e-5, rtol=1e-5
    )


def test_a_sequence_does_not_depend_on_the_batch(seed):
    q, kv_cache, lens = decode_inputs("normal", [7, 33, 20], 40, 4, seed)
    together = mla_decode(q, kv_cache, lens, 0.2, RANK)
    for b in range(3):
        alone = mla_decode(q[b : b + 1], kv_cache[b : b + 1], lens[b : b + 1], 0.2, RANK)
        assert all(torch.equal(x[b], y[0]) for x, y in zip(together, alone))


@pytest.mark.parametrize(
    "slip",
    [
        "scale of the latent",
        "values from the rotary columns too",
        "one key short",
        "rotary part dropped",
    ],
)
def test_a_wrong_decode_is_rejected(slip, seed):
    scale = 24**-0.5

    def slipped(q, kv_cache, lens):
        if slip == "scale of the latent":
            return mla_decode(q, kv_cache, lens, (RANK + ROPE) ** -0.5, RANK)
        if slip == "one key short":
            return mla_decode(q, kv_cache, lens - 1, scale, RANK)
        if slip == "rotary part dropped":
            q = torch.cat([q[..., :RANK], torch.zeros_like(q[..., RANK:])], -1)
            return mla_decode(q, kv_cache, lens, scale, RANK)
        # the value tile starts ROPE columns too far
        shifted = torch.cat([kv_cache[..., ROPE:], kv_cache[..., :ROPE]], -1)
        return mla_decode(torch.cat([q[..., ROPE:], q[..., :ROPE]], -1), shifted, lens, scale, RANK)

    with pytest.raises(NotEquivalent):
        prove(
            slipped,
            lambda *x: by_definition(*x, scale),
            decode_inputs("normal", [7, 33], 40, 4, seed),
        )


@pytest.mark.compiler
def test_the_compiler_gives_matrix_instructions_without_spills():
    for report in check_all(KERNELS):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits and report.loads_128bit, f"{report.name} on sm_{report.chip}: {report}"
        # 64 rows are what Hopper's and Blackwell's widest instructions take
        many = "bf16_128" in report.name
        wanted = {90: "HGMMA", 100: "UTCHMMA"}.get(report.chip, "HMMA") if many else "HMMA"
        assert report.matrix_instruction == (None if "fp32" in report.name else wanted), report.name


def test_tiles_fit_the_chip():
    assert tiles_for(16, 2).block_h == 16 and tiles_for(128, 2).block_h == 64
    assert tiles_for(128, 2, 99 * 1024).block_h == 32 and tiles_for(128, 4) == Tiles(16, 16, 8, 1)


# ---------------------------------------------------------------- bad input


def small_inputs() -> dict:
    return dict(
        q=torch.zeros(2, 4, 48),
        kv_cache=torch.zeros(2, 9, 48),
        context_lens=torch.ones(2, dtype=torch.int32),
        softmax_scale=0.2,
        kv_lora_rank=RANK,
    )


@pytest.mark.parametrize("name", ["q", "kv_cache", "context_lens"])
def test_decode_refuses_every_kind_of_wrong_tensor(name):
    assert_refused(
        mla_decode,
        small_inputs(),
        name,
        KINDS if name != "context_lens" else ("dtype", "device", "shape"),
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(kv_lora_rank=24),
            "kv_lora_rank: got 24, which leaves q and kv_cache 24 rotary values; accepted: powers "
            "of two",
        ),
        (dict(kv_lora_rank=40), "got 40, .* 8 rotary values"),
        (dict(kv_lora_rank=64), "got 64, .* -16 rotary values"),
        (
            dict(q=torch.zeros(1, 4, 48)),
            r"q, kv_cache, context_lens: got .*; accepted: \[B, H, D\]",
        ),
        (dict(q=torch.zeros(2, 4, 48).half()), "accepted: both float32, float16 or bfloat16"),
    ],
)
def test_decode_refuses(change, message):
    with pytest.raises(ValueError, match=message) as error:
        mla_decode(**small_inputs() | change)
    assert "\n" not in str(error.value)
