"""Proves that slots and lengths of a rank that stores some of the tokens are those of a dealer who
deals one token after the other; that attention over all ranks' tokens is whole attention, in
PyTorch and by kernels; and that planted bugs are seen.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lessons.l03_kv_cache.cache import KVPool
from lessons.l12_paged_kv.kernels.latents import decode_states
from lessons.l12_paged_kv.kernels.stand_ins import LESSON_12_TORCH, paged_batch
from lessons.l12_paged_kv.optimized import LESSON_12
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import RankError, run_ranks
from lessons.l20_parallelism.shards.decode_context import numbers_sent
from lessons.toolbox.measure.device import has_triton
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.proof.planted import with_bug
from reference.parallel import shared_tokens
from reference.parallel.shared_tokens import SharedPool, TokenShare, kernel_states, torch_states

CONFIG = ModelConfig("llama", 61, 48, 1, 12, 1, 8, 64, 96)
# a rule for attention -> the model of one layer that has it
RULES = {
    "all tokens": CONFIG,
    "a window of 3": replace(CONFIG, sliding_windows=(3,)),
    "a window of 10": replace(CONFIG, sliding_windows=(10,)),
    "sinks": replace(CONFIG, attention_sinks=True),
    "both": replace(CONFIG, attention_sinks=True, sliding_windows=(6,)),
}
SINKS = torch.linspace(-1, 3, 12, dtype=torch.float64)  # of each head
SHARES = [(1, 1, 4), (2, 1, 4), (2, 2, 4), (2, 4, 4), (3, 1, 2), (3, 2, 6), (4, 1, 2), (4, 2, 2)]
NUM_BLOCKS = 12
TABLES = [[9, 2, 11, 0], [4, 7, 1], [5, 3, 8, 10]]
# of each step (sequence, new tokens): prompts; singles in front of one; a chunk; singles; a single
# behind a chunk
STEPS = [[(0, 7), (1, 1)], [(0, 1), (1, 1), (2, 9)], [(1, 1), (2, 3)], [(0, 1), (1, 1), (2, 1)]]
STEPS.append([(2, 2), (0, 1)])


# ---------------------------------------------------------------- whose token is whose


@pytest.mark.parametrize("size, interleave, block_size", SHARES, ids=str)
def test_tokens_are_dealt_out_in_turn(size, interleave, block_size):
    """Each token is in one slot of one rank, and a rank's slots are filled from the front."""
    block_tokens, table = size * block_size, TABLES[0]
    most = len(table) * block_tokens
    slots = torch.tensor(
        [table[at // block_tokens] * block_tokens + at % block_tokens for at in range(most)] + [-1]
    )
    dealt = [[] for _ in range(size)]
    for at in range(most):
        dealt[at // interleave % size].append(at)
    for rank in range(size):
        share = TokenShare(Group(list(range(size)), rank), interleave)
        found = share.own_slots(slots).tolist()
        here = [at for at, slot in enumerate(found) if slot >= 0]
        assert here == dealt[rank]
        places = [block * block_size + at for block in table for at in range(block_size)]
        assert [found[at] for at in here] == places
        lens = share.own_lens(torch.arange(most + 1, dtype=torch.int32))
        assert lens.dtype == torch.int32
        assert lens.tolist() == [sum(at < end for at in here) for end in range(most + 1)]
        assert all(share.most(end) >= lens[end] for end in range(most + 1))


class Rows(Group):
    """A group whose other ranks are here: of_ranks is what each has."""

    def __init__(self, of_ranks):
        super().__init__(list(range(len(of_ranks))), 0)
        self.of_ranks = of_ranks

    def all_gather(self, x, dim=-1):
        return torch.stack(self.of_ranks)


@pytest.mark.parametrize("size, interleave, block_size", SHARES, ids=str)
def test_gathered_tokens_are_in_order(size, interleave, block_size):
    count = 3 * size * block_size
    rows = [
        torch.tensor([at for at in range(count) if at // interleave % size == rank])
        for rank in range(size)
    ]
    group = Rows([row.view(3, block_size, 1) for row in rows])
    whole = TokenShare(group, interleave).whole(group.of_ranks[0])
    assert whole.shape == (3 * size, block_size, 1)
    assert whole.flatten().tolist() == list(range(count))


# ---------------------------------------------------------------- attention


def outputs(pool, heads: slice, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each step's attention gives to some of the heads: [T, heads, D]."""
    draw = torch.Generator().manual_seed(seed)
    held, found = [0, 0, 0], []
    for step in STEPS:
        chunks = [(list(range(1, count + 1)), held[row]) for row, count in step]
        total = sum(count for _, count in step)
        shapes = (total, 12, 8), (total, 1, 8), (total, 1, 8)
        q, k, v = (torch.randn(s, generator=draw, dtype=torch.float64).to(dtype) for s in shapes)
        batch = paged_batch(chunks, pool.block_size, [TABLES[row] for row, _ in step])
        attend = pool.attending(batch)
        found.append(attend(0, 3 * q[:, heads].contiguous(), k, v).clone())
        for row, count in step:
            held[row] += count
    return found


def whole_outputs(seed: int, block_tokens: int, rule: str) -> list[torch.Tensor]:
    """By one process, in float64."""
    how = dict(dtype=torch.float64, max_context_len=64)
    pool = KVPool(RULES[rule], NUM_BLOCKS, block_tokens, LESSON_12_TORCH, **how)
    pool.sinks = [SINKS]
    return outputs(pool, slice(None), seed, torch.float64)


def shared_outputs(
    world, cases, seed: int, by_kernels: bool = False, bug=None, rule: str = "all tokens"
) -> list:
    """A rank's heads, for each case of (size, interleave, block_size)."""
    with tempfile.TemporaryDirectory() as folder:
        module = with_bug(shared_tokens, Path(folder), *bug) if bug else shared_tokens
    dtype, found = torch.float32 if by_kernels else torch.float64, []
    for size, interleave, block_size in cases:
        share, own = module.TokenShare(world, interleave), 12 // size
        part = replace(RULES[rule], num_attention_heads=own)
        how = dict(dtype=dtype, max_context_len=64)
        block_tokens = size * block_size
        pool = module.SharedPool(share, part, NUM_BLOCKS, block_tokens, LESSON_12_TORCH, **how)
        assert pool.k_slots.shape[1] == NUM_BLOCKS * block_size + 1, "it stores its share alone"
        if by_kernels:
            pool.ops = module.sharing(LESSON_12, share, module.kernel_states, block_tokens)
        heads = slice(world.rank * own, (world.rank + 1) * own)
        pool.sinks = [SINKS[heads]]
        with torch.inference_mode():
            found.append(outputs(pool, heads, seed, dtype))
    return found


def largest_error(
    size: int, cases, seed: int, by_kernels: bool = False, bug=None, rule: str = "all tokens"
) -> float:
    """Over all steps and heads, against one process."""
    error, how = 0.0, (by_kernels, bug, rule)
    for case, *parts in zip(cases, *run_ranks(size, shared_outputs, cases, seed, *how)):
        want = whole_outputs(seed, size * case[2], rule)
        for step, *rows in zip(want, *parts):
            error = max(error, float((torch.cat(rows, 1) - step).abs().max().nan_to_num(9.0)))
    return error


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.sample(2)
def test_shared_tokens_give_whole_attention(size, rule, seed):
    cases = [case for case in SHARES if case[0] == size]
    assert largest_error(size, cases, seed, rule=rule) < 1e-12


@pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")
@pytest.mark.parametrize("rule", ["all tokens", "a window of 3"])
def test_kernels_give_whole_attention(rule, seed):
    """A window's single queries are PyTorch's there, too."""
    assert largest_error(2, [(2, 1, 4), (2, 2, 4)], seed, True, rule=rule) < 1e-5


def sent(world, seed: int) -> list[dict]:
    """Bytes that go into each collective, of each step."""
    share, found = TokenShare(world, 1), []
    part, how = replace(CONFIG, num_attention_heads=6), dict(max_context_len=64)
    pool = SharedPool(share, part, NUM_BLOCKS, 8, LESSON_12_TORCH, torch.float64, **how)
    draw = torch.Generator().manual_seed(seed)
    for chunks in ([([1] * 9, 0), ([1] * 20, 0)], [([1], 9), ([1], 20)]):
        batch = paged_batch(chunks, 8, [[4, 2], [1, 0, 5]])
        total = len(batch.tokens)
        q, k, v = (torch.randn(total, heads, 8, generator=draw).double() for heads in (6, 1, 1))
        world.wire.clear()
        pool.attending(batch)(0, q, k, v)
        found.append(dict(world.wire.bytes))
    return found


@pytest.mark.sample(2, of="bugs of shared tokens")
def test_what_is_sent(seed):
    """A prompt sends K and V of its own blocks, not as many as the longest prompt; a single query
    what lesson 20 counts.
    """
    numbers = numbers_sent(2, 6, 8, 8, 2)
    for prompts, singles in run_ranks(2, sent, seed):
        assert prompts == {"all_gather": 8 * (2 + 3) * 4 * 16}
        # a gather's input goes to one other rank, and half of what is scattered
        assert singles["all_gather"] == 8 * (numbers["q"] + numbers["lse"])
        assert singles["reduce_scatter"] == 8 * 2 * numbers["out"]


BUGS = {
    "another rank stores the token": (
        "(turn % self.group.size == self.group.rank)",
        "((turn + 1) % self.group.size == self.group.rank)",
    ),
    "slots of other turns": (
        "turn // self.group.size * self.interleave + place",
        "turn // self.group.size * self.interleave",
    ),
    "the rank's number is forgotten": ("lens % around - self.group.rank * size", "lens % around"),
    "a turn is longer": (".clamp(0, size)", ".clamp(min=0)"),
    "gathered rank after rank": ("turns.movedim(0, 2)", "turns.movedim(0, 1)"),
    "a prompt reads its neighbour's blocks": (
        "list(accumulate(counts[:-1], initial=0))",
        "[0] * len(counts)",
    ),
    "whole lengths over a share": (
        "lens, most = batch.share.own_lens[: len(q)]",
        "lens, most = batch.context_lens[: len(q)]",
    ),
    "lengths of those who are behind": ("own_lens[: len(q)]", "own_lens[-len(q) :]"),
    "heads of another rank": ("group.all_gather(q, dim=1)", "group.all_gather(q, dim=1).flip(1)"),
    "what is elsewhere is seen": (
        "< batch.context_lens[:, None]",
        "<= batch.context_lens[:, None]",
    ),
    "a window begins where the whole one does": (
        "begins = share.own_lens((batch.context_lens[: len(q)] - window).clamp(min=0))",
        "begins = (batch.context_lens[: len(q)] - window).clamp(min=0)",
    ),
    "a window of as many of the rank's own tokens": (
        "begins = share.own_lens((batch.context_lens[: len(q)] - window).clamp(min=0))",
        "begins = (lens - window).clamp(min=0)",
    ),
    "a window has no further block": ("-(-most // block_size) + 1", "-(-most // block_size)"),
    "the window's first block again": (
        "softmax_scale, begins - first * block_size)",
        "softmax_scale, begins)",
    ),
    "no sinks": ("lse.T, group, sinks)", "lse.T, group)"),
}


def rule_of(name: str) -> str:
    """With which rule a bug shows."""
    if "sinks" in name or ("block" in name and "window" in name):
        return "both"
    return "a window of 3" if "window" in name else "all tokens"


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.sample(2, of="bugs of shared tokens")
def test_planted_bugs_are_seen(name, seed):
    try:
        assert largest_error(2, [(2, 2, 4)], seed, bug=BUGS[name], rule=rule_of(name)) > 1e-3
    except RankError as error:
        assert "index" in str(error), error


# ---------------------------------------------------------------- states


def cases_of_states(dim: int, value_dim: int, seed: int):
    """Queries of 3 heads over 0, 1, 7 and 12 tokens in pages of 4."""
    draw = torch.Generator().manual_seed(seed)
    q, rows = (torch.randn(s, generator=draw) for s in [(4, 3, dim), (9, 4, 1, dim)])
    values = rows[..., :value_dim]
    lens = torch.tensor([0, 1, 7, 12], dtype=torch.int32)
    nothing = 2**30
    table = [[nothing] * 3, [8, nothing, nothing], [2, 5, nothing], [0, 6, 3]]
    chunks = [([1], max(0, length - 1)) for length in lens.tolist()]
    batch = paged_batch(chunks, 4, [[each % 9 for each in row] for row in table])
    batch = replace(batch, context_lens=lens, block_table=torch.tensor(table, dtype=torch.int32))
    return q, rows, values, batch


def test_states_are_the_definition(seed):
    q, k, v, batch = cases_of_states(8, 8, seed)
    out, lse = torch_states(q.double(), k.double(), v.double(), batch, 0.3)
    assert not out[0].any() and (lse[0] == -torch.inf).all(), "nothing is seen"
    for row, length in enumerate(batch.context_lens.tolist()[1:], 1):
        places = [(int(batch.block_table[row, at // 4]), at % 4) for at in range(length)]
        keys = torch.stack([k[place][0] for place in places]).double()
        values = torch.stack([v[place][0] for place in places]).double()
        scores = q[row].double() @ keys.T * 0.3
        torch.testing.assert_close(out[row], scores.softmax(-1) @ values)
        torch.testing.assert_close(lse[row], scores.logsumexp(-1))


@pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")
@pytest.mark.parametrize("states", [kernel_states, decode_states])
def test_kernels_give_the_same_states(states, seed):
    """decode_states: of latents of 32 + 16 values."""
    sizes = (32, 32) if states is kernel_states else (48, 32)
    *tensors, batch = cases_of_states(*sizes, seed)
    want = torch_states(*tensors, batch, 0.3)
    batch = replace(batch, block_table=batch.block_table.clamp(max=8))
    for got, wanted in zip(states(*tensors, batch, 0.3), want):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
