"""Proves that attention over tokens that ranks share is whole attention, with lists and between
processes, in whole decoders with GQA, MQA and MLA; that each rank stores its share and sends what
the formula says; and that planted bugs are seen.
"""

import tempfile
from math import ceil
from pathlib import Path

import pytest
import torch

from lessons.l01_roofline.planner.models import find_model
from lessons.l02_naive_attention.naive import attention
from lessons.l06_mla.deepseek import absorbed
from lessons.l20_parallelism.lab.testing import CONFIGS, logits_of, random_model
from lessons.l20_parallelism.optimized import shard
from lessons.l20_parallelism.planner import context
from lessons.l20_parallelism.planner.links import LL, machine_of
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import RankError, run_ranks
from lessons.l20_parallelism.processes.mesh import Mesh, new_links
from lessons.l20_parallelism.processes.ranks import Ranks
from lessons.l20_parallelism.ring_attention import striped
from lessons.l20_parallelism.shards import decode_context
from lessons.l20_parallelism.shards.decode_context import (
    ContextCache,
    attention_on_ranks,
    check_context_size,
    context_attention,
    new_context_group,
    numbers_sent,
)
from lessons.toolbox.measure.hardware import CHIPS
from lessons.toolbox.proof.planted import with_bug

H, D, DV = 2, 6, 5  # heads of a rank
# tokens so far, new ones, window: fewer tokens than ranks, a step, a chunk of a prompt
CASES = [(1, 1, None), (2, 1, None), (9, 1, None), (12, 5, None), (10, 10, None), (11, 4, 3)]


def qkv(seed: int, size: int, case: int) -> list[torch.Tensor]:
    """Of all heads and tokens, the same on all ranks. Scores are large, so a wrong merge shows."""
    num_tokens, new, _ = CASES[case]
    generator = torch.Generator().manual_seed(seed + case)
    shapes = (new, size * H, D), (num_tokens, 1, D), (num_tokens, 1, DV)
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [4 * q, k, v]


def whole(seed: int, size: int, case: int) -> torch.Tensor:
    """What one process computes: [new tokens, heads, Dv]."""
    return attention(*qkv(seed, size, case), window=CASES[case][2])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_lists_of_tokens_give_whole_attention(size, seed):
    for case, (num_tokens, new, _) in enumerate(CASES):
        if new > 1:
            continue
        q, k, v = qkv(seed, size, case)
        places = [striped(num_tokens, rank, size) for rank in range(size)]
        ranks = Ranks(size)
        outs = attention_on_ranks(
            list(q[0].split(H)), [k[p, 0] for p in places], [v[p, 0] for p in places], ranks,
            D**-0.5,
        )  # fmt: skip
        torch.testing.assert_close(torch.cat(outs), whole(seed, size, case)[0])
        assert ranks.calls == [("all_gather", H * D), ("all_to_all", size * H * (2 + DV))]


def attention_rank(world: Group, seed: int, bug: tuple[str, str] | None = None) -> list:
    """Of each case this rank's heads, and the bytes that went into its collectives."""
    with tempfile.TemporaryDirectory() as folder:
        module = with_bug(decode_context, Path(folder), *bug) if bug else decode_context
    found, rank, size = [], world.rank, world.size
    for case, (num_tokens, new, window) in enumerate(CASES):
        q, k, v = qkv(seed, size, case)
        mine = striped(num_tokens, rank, size)
        own = q[:, rank * H : (rank + 1) * H].contiguous()
        queries = torch.arange(num_tokens - new, num_tokens)
        world.wire.clear()
        out = module.context_attention(own, k[mine], v[mine], queries, mine, world, D**-0.5, window)
        found.append((out, dict(world.wire.bytes)))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.sample(2)
def test_tokens_on_several_ranks_give_whole_attention(size, seed):
    ranks = run_ranks(size, attention_rank, seed)
    for case, parts in enumerate(zip(*ranks)):
        got = torch.cat([out for out, _ in parts], dim=1)
        torch.testing.assert_close(got, whole(seed, size, case), rtol=1e-12, atol=1e-12)
        new = CASES[case][1]
        sent = numbers_sent(new, H, D, DV, size)
        for _, moved in parts if size > 1 else ():
            # a gather sends a rank's own to the others, a reduce-scatter their parts of its own
            assert 8 * (sent["q"] + sent["lse"]) == (size - 1) * moved["all_gather"]
            assert 8 * sent["out"] == pytest.approx((size - 1) / size * moved["reduce_scatter"])


# ---------------------------------------------------------------- whole decoders

PROMPT, STEPS = 6, 3
# (family, tensor ranks, ranks that share tokens)
MODELS = [
    ("llama", 4, 2),
    ("mistral", 4, 2),  # with windows
    ("smollm3", 4, 2),  # a layer without rotation
    ("gpt_oss", 4, 2),  # with windows and sinks
    ("qwen3", 4, 4),
    ("qwen3", 4, 2),  # two groups with a copy each
    ("deepseek_v3", 4, 4),
    ("deepseek_v2", 4, 2),
]


@torch.inference_mode()
def decode_rank(world: Group, cases: list, seed: int, tokens: list[int], bug=None) -> list:
    """Of each model the logits of a prompt and of some steps, and the rows that this rank keeps."""
    with tempfile.TemporaryDirectory() as folder:
        module = with_bug(decode_context, Path(folder), *bug) if bug else decode_context
    found = []
    for name, tp, dcp in cases:
        links = new_links(Mesh(tp=tp))
        config = CONFIGS[name]
        part = shard(random_model(config, seed, torch.float64), links)
        part = absorbed(part) if config.mla else part
        cache = module.ContextCache(part, new_context_group(links, config, dcp))
        logits = []
        for chunk in (tokens[:PROMPT], *([token] for token in tokens[PROMPT:])):
            hidden = part(torch.tensor(chunk), cache.attending(len(chunk)))
            logits.append(part.logits(hidden))
        rows = {len(x) for kept in (cache.keys, cache.values) for x in kept.values()}
        found.append((torch.cat(logits), rows))
    return found


def differences(seed: int, bug: tuple[str, str] | None = None, cases=MODELS) -> list[float]:
    """The largest error of the logits of each model, on any rank."""
    tokens = torch.randint(61, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(seed))
    ranks = run_ranks(4, decode_rank, cases, seed, tokens.tolist(), bug)
    errors = []
    for (name, _, dcp), parts in zip(cases, zip(*ranks)):
        want = logits_of(random_model(CONFIGS[name], seed, torch.float64), tokens)
        errors.append(max(float((logits - want).abs().max()) for logits, _ in parts))
        if bug is None:
            for rank, (_, rows) in enumerate(parts):
                assert rows == {ceil((PROMPT + STEPS - rank % dcp) / dcp)}, name
    return errors


@pytest.mark.sample(1)
def test_decoders_share_tokens_and_give_the_logits_of_one_process(seed):
    """A prompt and some steps. Each rank keeps every P-th token, and MLA's latent once."""
    assert max(differences(seed)) < 1e-10


BUGS = {
    "parts are averaged": ("exp_difference(lse, of_all.logsumexp(0))",
                           "torch.full_like(lse, 1 / group.size)"),
    "weights do not add up to 1": ("of_all.logsumexp(0)", "of_all.amax(0)"),
    "another rank keeps the token": ("is_mine = queries % size == rank",
                                     "is_mine = (queries + 1) % size == rank"),
    "tokens are where they are stored": ("keys = striped(self.length, rank, size)",
                                         "keys = torch.arange(len(striped(self.length, rank, "
                                         "size)))"),
    "keys are not rotated to their places": ("q, k = rotate(q), rotate(k)",
                                             "q, k = rotate(q), k"),
    "sinks of another rank": ("first = group.rank * len(out)", "first = 0"),
    "a sink on every rank": ("seen - sinks.to",
                             "seen - torch.log(torch.tensor(group.size)) - sinks.to"),
    "v of the first token again": ("self.values[layer], v[is_mine])",
                                   "self.values[layer], v[:1].expand(int(is_mine.sum()), -1, -1))"),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.sample(3)
def test_planted_bugs_are_seen(name, seed):
    """In wrong logits, or because K and their places no longer fit together."""
    try:
        error = max(differences(seed, BUGS[name], [("gpt_oss", 4, 2)]))
    except RankError as refused:
        assert "size of tensor" in str(refused), refused
    else:
        assert error > 1e-4


# ---------------------------------------------------------------- what it is predicted to cost

V3, H200 = find_model("deepseek-v3"), machine_of(CHIPS["h200"])


def test_the_cache_is_shared_and_three_messages_are_paid():
    """DeepSeek-V3 on 8 GPUs: each keeps an eighth. A layer pays three messages."""
    assert context.cache_bytes_per_token(V3, 8, 1) == 61 * 576 * 2
    assert context.cache_bytes_per_token(V3, 8, 8) == 61 * 576 * 2 / 8
    assert context.talk_s(V3, H200, 8, 1, 4) == 0
    start_s = LL.base_s + H200.inside.ll_hop_s
    sent = 2 * 7 * 16 * (576 + 512) + 4 * 7 * 16 * 8  # 16 heads a rank, lse in float32
    wanted = 61 * (3 * start_s + sent / H200.inside.bytes_per_s)
    assert context.talk_s(V3, H200, 8, 8, 1) == pytest.approx(wanted)


def test_it_pays_from_some_context_on():
    for batch in (1, 32):
        tokens = context.break_even_context(V3, H200, 8, 8, batch)
        paid = context.talk_s(V3, H200, 8, 8, batch)
        saved = [context.read_saved_s(V3, H200, 8, 8, int(batch * tokens * x)) for x in (0.9, 1.1)]
        assert saved[0] < paid < saved[1]
    with pytest.raises(ValueError, match="dcp: got 2; accepted: a divisor of 1"):
        context.break_even_context(find_model("llama-3-70b"), H200, 8, 2, 1)


# ---------------------------------------------------------------- what is refused


def test_ranks_without_copies_have_nothing_to_share():
    """Llama with 2 KV heads on 4 ranks: pairs hold copies. DeepSeek's latent is one head."""
    check_context_size(CONFIGS["llama"], 4, 2)
    check_context_size(CONFIGS["deepseek_v3"], 4, 4)
    for tp, dcp in [(4, 4), (2, 2), (3, 1)]:
        with pytest.raises(ValueError, match=f"dcp: got {dcp}; accepted: a divisor of"):
            check_context_size(CONFIGS["llama"], tp, dcp)
    assert Mesh(tp=4, pp=2).context_groups(2) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_model_with_several_kv_heads_on_a_rank_is_refused():
    with pytest.raises(ValueError, match="num_key_value_heads: got 2; accepted: 1"):
        ContextCache(random_model(CONFIGS["llama"], 0), Group.alone())
    with pytest.raises(RankError, match="config: got 'gemma2'; accepted: a model without"):
        run_ranks(2, refused_rank)


def refused_rank(world: Group) -> None:
    ContextCache(shard(random_model(CONFIGS["gemma2"], 0), new_links(Mesh(tp=2))), world)


def test_one_rank_alone_attends_to_all(seed):
    q, k, v = qkv(seed, 1, 3)
    places = torch.arange(12)
    out = context_attention(q, k, v, places[7:], places, Group.alone(), D**-0.5)
    torch.testing.assert_close(out, whole(seed, 1, 3))
