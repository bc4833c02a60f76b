"""Proves that attention in a ring is whole attention, in every layout of the tokens, through the
seam of a whole decoder too, and that its work and bytes are those of the formulas.
"""

import random
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l02_naive_attention.rope import rotation
from lessons.l11_cuda_graphs.lab.testing import CONFIG, new_model, new_prompts
from lessons.l20_parallelism import ring_attention as ring
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import run_ranks
from lessons.l20_parallelism.ring_attention import LAYOUTS, attending, imbalance, pairs, ring_bytes

HQ, HKV, D, DV = 4, 2, 6, 5
# number of tokens, causal, window: more ranks than tokens, and counts that no size divides
CASES = [(1, True, None), (2, True, None), (13, True, None), (24, True, 5), (11, False, None)]


def qkv(seed: int, num_tokens: int) -> list[torch.Tensor]:
    """The same on all ranks. Scores are large, so that a wrong merge shows."""
    generator = torch.Generator().manual_seed(seed + num_tokens)
    shapes = (num_tokens, HQ, D), (num_tokens, HKV, D), (num_tokens, HKV, DV)
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [4 * q, k, v]


def ring_rank(world: Group, seed: int) -> list:
    """(layout, case, this rank's positions, out, bytes sent, pairs that it met)."""
    results, plain = [], ring._attend_to
    for name, layout in LAYOUTS.items():
        for number, (num_tokens, causal, window) in enumerate(CASES):
            met = []

            def counted(q, k, v, queries, keys, *rest, met=met):
                met.append(int((queries[:, None] >= keys).sum()))
                return plain(q, k, v, queries, keys, *rest)

            ring._attend_to = counted
            world.wire.clear()
            mine = layout(num_tokens, world.rank, world.size)
            parts = [x[mine] for x in qkv(seed, num_tokens)]
            out = ring.ring_attention(*parts, layout, num_tokens, world, None, causal, window)
            facts = world.wire.bytes["send"], sum(met)
            results.append((name, number, mine.tolist(), out.tolist(), *facts))
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.sample(1)
def test_a_ring_is_whole_attention(size, seed):
    ranks = run_ranks(size, ring_rank, seed)
    for cases in zip(*ranks):
        name, number = cases[0][:2]
        layout, (num_tokens, causal, window) = LAYOUTS[name], CASES[number]
        want = attention(*qkv(seed, num_tokens), causal=causal, window=window)
        got = torch.full_like(want, torch.nan)
        for _, _, mine, out, sent, _ in cases:
            got[mine] = torch.tensor(out, dtype=torch.float64).view(len(mine), HQ, DV)
            assert sent == ring_bytes(layout, num_tokens, size, HKV * (D + DV), 8)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        if causal:
            assert [case[5] for case in cases] == pairs(layout, num_tokens, size)


def prefill_rank(world: Group, model, prompt: list[int]) -> list:
    results = []
    for layout in LAYOUTS.values():
        mine = layout(len(prompt), world.rank, world.size)
        attend = attending(model.config, layout, len(prompt), world)
        with torch.inference_mode():
            hidden = model(torch.tensor(prompt)[mine], attend)
        results.append((mine.tolist(), hidden.tolist()))
    return results


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.sample(1)
def test_a_decoder_prefills_in_a_ring(size, seed):
    """Nothing but `attend` knows that the tokens are on several ranks."""
    model, (prompt,) = new_model(), new_prompts(random.randint(9, 17))
    ranks = run_ranks(size, prefill_rank, model, prompt)
    rotate = rotation(CONFIG, torch.arange(len(prompt)), torch.float64)

    def attend(layer, q, k, v):
        return attention(rotate(q), rotate(k), v, window=CONFIG.sliding_window(layer))

    want = model(torch.tensor(prompt), attend)
    for parts in zip(*ranks):
        got = torch.full_like(want, torch.nan)
        for mine, hidden in parts:
            got[mine] = torch.tensor(hidden, dtype=torch.float64).view(len(mine), -1)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("num_tokens, size", [(1, 3), (24, 4), (29, 4), (7, 8)])
def test_every_token_is_on_one_rank(name, num_tokens, size):
    parts = [LAYOUTS[name](num_tokens, rank, size) for rank in range(size)]
    assert torch.cat(parts).sort().values.tolist() == list(range(num_tokens))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


def test_consecutive_parts_are_not_equal_work():
    """The ranks do 1, 3, 5, 7 of 16 shares; zigzag and stripes do equal shares."""
    num_tokens = 8192
    total = num_tokens * (num_tokens + 1) / 2
    shares = [work / total * 16 for work in pairs(LAYOUTS["contiguous"], num_tokens, 4)]
    assert shares == pytest.approx([1, 3, 5, 7], rel=1e-3)
    for size in (2, 4, 8):
        worst = imbalance(LAYOUTS["contiguous"], num_tokens, size)
        assert worst == pytest.approx((2 * size - 1) / size, rel=1e-3)
    assert imbalance(LAYOUTS["zigzag"], num_tokens, 4) == 1
    assert imbalance(LAYOUTS["striped"], num_tokens, 4) == pytest.approx(1, rel=1e-3)


def test_a_model_with_sinks_is_refused():
    config = replace(CONFIG, v_head_dim=0, attn_logit_softcapping=50.0)
    with pytest.raises(ValueError, match="config: got 'llama'; accepted: a model without"):
        attending(config, LAYOUTS["zigzag"], 8, Group.alone())
