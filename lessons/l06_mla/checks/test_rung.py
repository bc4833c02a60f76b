"""One algebra in two forms, and caches of latents: the same tokens on every rung."""

import pytest
import torch

from lessons.l02_naive_attention import naive as recompute
from lessons.l02_naive_attention import optimized as fused
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.generate import Rung, generate
from lessons.l03_kv_cache.naive import CONCATENATED, ConcatCache
from lessons.l03_kv_cache.optimized import PREALLOCATED
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.l06_mla import optimized
from lessons.l06_mla.deepseek import MLAttention, absorbed, latent
from lessons.l06_mla.lab.testing import (
    CONFIG,
    DEVICE,
    EVERY_TOKEN,
    RANK,
    ROPE,
    hidden_of,
    new_model,
    random_prompts,
)
from lessons.l06_mla.naive import EXPANDED, LATENTS_TORCH, LatentPool
from lessons.l06_mla.optimized import ABSORBED, AbsorbedPool
from lessons.toolbox.model.config import MLAConfig, ModelConfig
from lessons.toolbox.proof.numerics import assert_close_to_oracle, draw, poison_
from lessons.toolbox.proof.traps import Allocations

pytestmark = pytest.mark.usefixtures("seed")


# ---------------------------------------------------------------- one algebra, two forms


@pytest.mark.parametrize(
    "mla",
    [MLAConfig(20, RANK, 8, ROPE, 12), MLAConfig(None, RANK, 8, ROPE, 12, rope_interleave=False)],
)
def test_absorbed_equals_expanded_in_float64(mla):
    model, tokens = new_model(mla=mla), torch.randint(0, 61, (50,))
    one, other = hidden_of(model, tokens), hidden_of(absorbed(model), tokens)
    assert (other - one).abs().max() < 1e-12 * one.abs().max()


def test_each_form_in_bfloat16_against_float64(seed):
    """Against the oracle, not against each other: both round, at different places."""
    mla = new_model(torch.bfloat16).layers[0].self_attn
    # Several texts, because the largest error of one depends on whether a score of it is a tie.
    texts = [draw("normal", (40, 48), dtype=torch.bfloat16, seed=seed + i) for i in range(8)]

    def in_form(name, layer, x):
        q, (c_kv, k_pe) = layer.queries(x), layer.latents(x)
        if name == "expanded":
            return attention(q, *layer.expand(c_kv, k_pe), CONFIG.softmax_scale)
        rows = torch.cat([c_kv, k_pe], -1)
        return layer.project_values(attention(layer.absorb(q), rows, c_kv, CONFIG.softmax_scale))

    def of_all(name, layer, texts):
        return torch.cat([in_form(name, layer, x) for x in texts])

    one, other = (of_all(name, mla, texts) for name in ("expanded", "absorbed"))
    # the rounded weights and inputs, widened
    ref64 = of_all("expanded", mla.double(), [x.double() for x in texts])
    assert_close_to_oracle(other, one, ref64, floor=1e-2)
    assert_close_to_oracle(one, other, ref64, floor=1e-2)


def test_forms_share_their_weights_and_leave_the_model_alone():
    model = new_model()
    twin, other = absorbed(model), latent(model)
    weights = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for m in (twin, other) for p in m.parameters()} == weights
    assert all(type(layer.self_attn) is MLAttention for layer in model.layers)
    assert other.config is model.config is not twin.config
    shape = twin.config.num_key_value_heads, twin.config.head_dim, twin.config.v_head_dim
    assert shape == (1, RANK + ROPE, RANK)
    assert twin.config.softmax_scale == model.config.softmax_scale  # never from the latent's width


# ---------------------------------------------------------------- every cache, every rung


@pytest.mark.parametrize("mla", [CONFIG.mla, MLAConfig(None, RANK, 8, ROPE, 40)])
def test_all_rungs_agree_in_float64(mla):
    """Lessons 2 and 3 see expanded heads (or, of the absorbed twin, one), this lesson's caches
    latents.
    """
    model = new_model(mla=mla, v_head_dim=mla.v_head_dim)
    prompts, limits = random_prompts(1, 3, 40), [30, 1, 20]
    expected = recompute.generate(model, prompts, limits, EVERY_TOKEN)
    assert [len(row) for row in expected] == limits
    assert len({token for row in expected for token in row}) > 5
    assert fused.generate(model, prompts, limits, EVERY_TOKEN) == expected
    for rung in (CONCATENATED, PREALLOCATED):
        for form in (model, absorbed(model)):
            assert generate(form, prompts, limits, EVERY_TOKEN, rung=rung) == expected, rung.name
    for rung in (EXPANDED, ABSORBED):
        assert generate(model, prompts, limits, EVERY_TOKEN, rung=rung) == expected, rung.name


def test_the_rung_with_the_kernel(monkeypatch):
    """What a GPU runs; in the interpreter where there is none."""
    monkeypatch.setattr(optimized, "kernel_fits", lambda q: True)
    model, prompts = new_model(torch.float32).to(DEVICE), random_prompts(1, 4)
    ops = LATENTS_TORCH._replace(decode=optimized.decode)
    rung = Rung("kernel", ops, ops, prepare=latent, cache=AbsorbedPool)
    assert generate(model, prompts, 3, rung=rung) == recompute.generate(model, prompts, 3)


def run_steps(model, pool, tokens, steps):
    """Hidden rows of all tokens, fed to the pool in steps: [total, hidden_size]."""
    outputs, start = [], 0
    for step in steps:
        chunk = tokens[start : start + step].tolist()
        batch = new_batch([(chunk, start)], pool.block_size)
        outputs.append(model(batch.tokens, pool.attending(batch)))
        start += step
    return torch.cat(outputs)


@pytest.mark.parametrize("steps", [[1] * 6, [7, 1, 1], [5, 3, 1, 4, 1], [1, 70, 1]])
@pytest.mark.parametrize("kind", [LatentPool, AbsorbedPool])
def test_cached_steps_equal_recomputing(kind, steps):
    """One by one, prefill then decode, chunks; rows not in use are NaN, and change nothing."""
    model, tokens = new_model(), torch.randint(0, 61, (sum(steps),))
    pool = kind.for_model(latent(model), 1, sum(steps) + 3, LATENTS_TORCH)
    poison_(pool.k_slots)
    got = run_steps(latent(model), pool, tokens, steps)
    torch.testing.assert_close(got, hidden_of(model, tokens), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", [LatentPool, AbsorbedPool])
def test_a_mixed_batch_of_latents(kind):
    """A decode, a chunk and a fresh prompt in one step, each in a block of its own."""
    model = new_model()
    twin, sequences = latent(model), random_prompts(6, 9, 4)
    pool = kind.for_model(twin, 3, 12, LATENTS_TORCH)

    def run(chunks):
        batch = new_batch(chunks, 12)
        return twin(batch.tokens, pool.attending(batch))

    first, second, third = sequences
    run([(first[:5], 0), (second[:4], 0)])
    got = run([(first[5:], 5), (second[4:], 4), (third, 0)])
    want = [hidden_of(model, torch.tensor(tokens)) for tokens in sequences]
    want = torch.cat([want[0][5:], want[1][4:], want[2]])
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


def test_bytes_that_each_cache_holds():
    """A latent and a rotary key for each layer and token; lesson 3's cache holds k and v of every
    head.
    """
    model = new_model(torch.float32)
    tokens = torch.randint(0, 61, (10,))
    latents, heads = 2 * (RANK + ROPE) * 4, 2 * 4 * (24 + 12) * 4
    pools = {
        latents: LatentPool.for_model(latent(model), 1, 63, LATENTS_TORCH),
        heads: KVPool.for_model(model, 1, 63, LESSON_03_TORCH),
    }
    assert model.config.kv_bytes_per_token(4) == latents
    for each_token, pool in pools.items():
        run_steps(latent(model) if each_token == latents else model, pool, tokens, [7, 1, 1, 1])
        assert pool.written_bytes == 10 * each_token
        assert pool.allocated_bytes == 64 * each_token  # with the slot that is nobody's
    concatenated = ConcatCache(model.config, 64)
    run_steps(model, concatenated, tokens, [7, 1, 1, 1])
    assert concatenated.written_bytes == 10 * heads


def test_an_absorbed_step_expands_nothing():
    """No tensor of a decode step is as large as one head's keys: the latents are read as they
    lie.
    """
    model, tokens = latent(new_model()), torch.randint(0, 61, (201,))
    for kind in (LatentPool, AbsorbedPool):
        pool = kind.for_model(model, 1, 256, LATENTS_TORCH)
        run_steps(model, pool, tokens, [200])
        batch = new_batch([(tokens[200:].tolist(), 200)], 256)
        attend = pool.attending(batch)
        with Allocations() as allocations:
            model(batch.tokens, attend)
        assert (allocations.largest_elements < 200 * 8) == (kind is AbsorbedPool)


def test_generate_needs_latents():
    llama = Decoder(ModelConfig("llama", 11, 8, 1, 1, 1, 4, 4, 16))
    for rung in (EXPANDED, ABSORBED):
        with pytest.raises(ValueError, match="model: got model_type 'llama'; accepted: one with"):
            generate(llama, [[1]], 2, rung=rung)
