"""Would the tests of this lesson notice? Slips of absorption and of the cache change the output."""

import pytest
import torch

from lessons.l06_mla import naive
from lessons.l06_mla.checks.test_rung import run_steps
from lessons.l06_mla.deepseek import MLAttention, absorbed, latent
from lessons.l06_mla.lab.testing import RANK, ROPE, hidden_of, new_model
from lessons.l06_mla.naive import LATENTS_TORCH, write_latents
from lessons.l06_mla.optimized import AbsorbedPool

pytestmark = pytest.mark.usefixtures("seed")


def k_first_then_v(self):
    """kv_b_proj as [all W_UK | all W_UV] in place of head by head."""
    weight = self.kv_b_proj.weight
    return weight[: 4 * 8].unflatten(0, (4, 8)), weight[4 * 8 :].unflatten(0, (4, 12))


def another_heads_key(self):
    w_uk, w_uv = self.kv_b_proj.weight.unflatten(0, (4, 20)).split([8, 12], 1)
    return w_uk.roll(1, 0), w_uv


def transposed(self, q):
    w_uk = self.up_projections()[0].mT.reshape(4, 8, RANK)
    return torch.cat([torch.einsum("thn,hnr->thr", q[..., :8], w_uk), q[..., 8:]], -1)


def rotary_part_first(self, q):
    q_latent = torch.einsum("thn,hnr->thr", q[..., :8], self.up_projections()[0])
    return torch.cat([q[..., 8:], q_latent], -1)


def values_from_keys(self, out):
    weight = self.kv_b_proj.weight.unflatten(0, (4, 20))[:, :12]
    return torch.einsum("thr,hvr->thv", out, weight)


SLIPS = {
    "kv_b_proj read as W_UK, then W_UV": ("up_projections", k_first_then_v),
    "W_UK of another head": ("up_projections", another_heads_key),
    "W_UK transposed": ("absorb", transposed),
    "q_pe before the latent": ("absorb", rotary_part_first),
    "W_UK in place of W_UV": ("project_values", values_from_keys),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_of_absorption_is_noticed(slip, monkeypatch):
    model, tokens = new_model(), torch.randint(0, 61, (20,))
    right = hidden_of(model, tokens)
    monkeypatch.setattr(MLAttention, *SLIPS[slip])
    assert (hidden_of(absorbed(model), tokens) - right).abs().max() > 1e-3


def unrotated_key(q, k, v, k_slots, v_slots, batch, cos_sin_cache):
    kept = k.clone()
    q = write_latents(q, k, v, k_slots, v_slots, batch, cos_sin_cache)
    k_slots[batch.slot_mapping] = kept
    return q


def rotary_key_first(q, k, v, k_slots, v_slots, batch, cos_sin_cache):
    q = write_latents(q, k, v, k_slots, v_slots, batch, cos_sin_cache)
    k_slots[batch.slot_mapping] = torch.cat([k[..., RANK:], k[..., :RANK]], -1)
    return q


def over_the_last_row(q, k, v, k_slots, v_slots, batch, cos_sin_cache):
    q = write_latents(q, k, v, k_slots, v_slots, batch, cos_sin_cache)
    k_slots[batch.slot_mapping - 1] = k
    return q


def latent_scale(q, k_cache, v_cache, batch, softmax_scale, window):
    return LATENTS_TORCH.decode(q, k_cache, v_cache, batch, (RANK + ROPE) ** -0.5, window)


WRONG = {
    "k_pe kept before its rotation": dict(write=unrotated_key),
    "rotary key first": dict(write=rotary_key_first),
    "a row written over the last one": dict(write=over_the_last_row),
    "scale from the latent": dict(decode=latent_scale),
}


@pytest.mark.parametrize("slip", [None, *WRONG])
def test_a_wrong_cache_is_rejected(slip):
    model, tokens = new_model(), torch.randint(0, 61, (12,))
    ops = LATENTS_TORCH._replace(**WRONG[slip]) if slip else LATENTS_TORCH
    pool = AbsorbedPool.for_model(latent(model), 1, 16, ops)
    got = run_steps(latent(model), pool, tokens, (5, 1, 1, 4, 1))
    worst = float((got - hidden_of(model, tokens)).abs().max())
    assert worst > 1e-3 if slip else worst < 1e-9


def test_a_latent_kept_before_its_norm_is_noticed(monkeypatch):
    model, tokens = new_model(), torch.randint(0, 61, (12,))
    right = hidden_of(model, tokens)

    def without_norm(self, x):
        both = self.kv_a_proj_with_mqa(x)[:, None]
        return both[..., :RANK], self.in_halves(both[..., RANK:])

    monkeypatch.setattr(MLAttention, "latents", without_norm)
    pool = naive.LatentPool.for_model(latent(model), 1, 16, LATENTS_TORCH)
    got = run_steps(latent(model), pool, tokens, (5, 1, 1, 4, 1))
    assert (got - right).abs().max() > 1e-3
