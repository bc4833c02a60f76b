"""Proves that tokens do not depend on a cache, and what the laws of cache.py mean for a few prompts
that can be followed on paper.
"""

import random
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention import naive as lesson2
from lessons.l02_naive_attention.request import read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l06_mla.deepseek import DeepseekDecoder
from lessons.l11_cuda_graphs.lab.testing import CONFIG, new_model, new_prompts
from lessons.l12_paged_kv.blocks import BlockPool
from lessons.l12_paged_kv.kernels.latents import PagedLatentPool
from lessons.l13_prefix_caching import cascade
from lessons.l13_prefix_caching import generate as loop
from lessons.l13_prefix_caching.cache import CachingBlockManager, Hits, NoCache
from lessons.l13_prefix_caching.generate import WaveRunner, generate
from lessons.l13_prefix_caching.lab import traffic
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l13_prefix_caching.optimized import RadixTree
from lessons.toolbox.model.config import MLAConfig

CACHES = {"hash blocks": HashBlocks, "radix tree": RadixTree}
both_caches = pytest.mark.parametrize("new_cache", CACHES.values(), ids=CACHES)


def manager_of(new_cache, num_blocks, block_size):
    return CachingBlockManager(num_blocks, block_size, new_cache(block_size))


# ---------------------------------------------------------------- on paper


@both_caches
@pytest.mark.parametrize(
    "length, known, runs", [(1000, 992, 8), (1008, 992, 16), (16, 0, 16), (17, 16, 1), (1, 0, 1)]
)
def test_a_full_hit_still_computes_the_rest(new_cache, length, known, runs):
    """The quiz: the same prompt again, blocks of 16."""
    manager, tokens = manager_of(new_cache, 200, 16), list(range(length))
    for sequence in range(2):
        held = manager.reuse(sequence, tokens)
        manager.grow(sequence, held, length)
        manager.remember(sequence, tokens)
    assert held == known and length - held == runs


@both_caches
def test_one_changed_token_in_front_loses_everything(new_cache):
    manager, tokens = manager_of(new_cache, 20, 4), list(range(16))
    manager.grow(0, 0, 16)
    manager.remember(0, tokens)
    changed = {at: [*tokens[:at], 99, *tokens[at + 1 :], 5] for at in (0, 7, 8, 15)}
    assert {at: manager.reuse(at + 1, prompt) for at, prompt in changed.items()} == {
        0: 0,
        7: 4,
        8: 8,
        15: 12,
    }


@both_caches
def test_the_end_of_the_longest_unused_prompt_is_taken_first(new_cache):
    manager = manager_of(new_cache, 4, 2)
    old, new = [0, 1, 2, 3], [7, 8, 9, 9]
    for sequence, tokens in enumerate((old, new)):
        manager.grow(sequence, 0, 4)
        manager.remember(sequence, tokens)
        manager.free(sequence)
    manager.take(1)
    assert [len(manager.cache.match([*tokens, 5])) for tokens in (old, new)] == [1, 2]
    manager.take(1)
    assert [len(manager.cache.match([*tokens, 5])) for tokens in (old, new)] == [0, 2]


@both_caches
def test_blocks_that_were_never_full_are_taken_first(new_cache):
    """A prompt of two blocks, then four prompts that fill no block: with a plain list they would
    have taken all of the pool's four blocks, one after the other.
    """
    kept = {}
    for name in ("ours", "a plain list"):
        manager = manager_of(new_cache, 4, 4)
        if name == "a plain list":
            manager.pool = BlockPool(4, manager.cache.forget)
        for sequence, tokens in enumerate(([0, 1, 2, 3, 4, 5, 6, 7], [8], [9], [10], [11])):
            manager.grow(sequence, 0, len(tokens))
            manager.remember(sequence, tokens)
            manager.free(sequence)
        kept[name] = manager.reuse(9, [0, 1, 2, 3, 4, 5, 6, 7, 0])
    assert kept == {"ours": 8, "a plain list": 0}


class PlainList(CachingBlockManager):
    """Lesson 12's free list, in which a block that was never full waits for its turn."""

    def __init__(self, num_blocks, block_size, cache):
        super().__init__(num_blocks, block_size, cache)
        self.pool = BlockPool(num_blocks, cache.forget)


def test_the_order_of_the_free_list_shows_in_tight_pools(monkeypatch):
    """The numbers of README.md: chats over 72 blocks, the share of tokens saved in percent."""
    rates = []
    for manager in (CachingBlockManager, PlainList):
        monkeypatch.setattr(traffic, "CachingBlockManager", manager)
        hits = traffic.replay(traffic.multi_turn(random.Random(13)), num_blocks=72)
        rates.append(round(100 * hits.rate_per_token, 1))
    assert rates == [46.5, 41.5]


def test_a_tree_without_branches_is_one_edge():
    """What makes it a radix tree: a run of blocks that no prompt has split is one node."""
    tree = RadixTree(2)
    tree.insert([1, 2, 3, 4, 5, 6], [0, 1, 2])
    (edge,) = tree.root.children.values()
    assert edge.blocks == [0, 1, 2] and not edge.children
    tree.insert([1, 2, 9, 9], [0, 3])
    assert edge.blocks == [0] and sorted(n.blocks for n in edge.children.values()) == [[1, 2], [3]]


def test_no_cache_knows_nothing():
    manager = manager_of(NoCache, 8, 2)
    for sequence in range(3):
        assert manager.reuse(sequence, [1, 2, 3]) == 0
        manager.grow(sequence, 0, 3)
        manager.remember(sequence, [1, 2, 3])
    assert manager.num_free == 2


def test_two_rates_of_hits():
    hits = Hits()
    assert (hits.rate_per_request, hits.rate_per_token) == (0, 0)
    for known in (0, 16, 16, 16):
        hits.count(160, known)
    assert (hits.rate_per_request, hits.rate_per_token) == (0.75, 0.075)


# ---------------------------------------------------------------- tokens


def prompts_that_share(count):
    """Prompts that begin alike, some of them whole prompts of others."""
    stem = new_prompts(17)[0]
    cuts = random.choices((0, 1, 3, 4, 8, 9, 16, 17), k=count)
    return [stem[:cut] + new_prompts(random.randint(1, 6))[0] for cut in cuts] + [stem, stem[:8]]


@pytest.mark.parametrize("shortest_shared", [1, 64], ids=["cascade", "lesson 12's decode"])
@pytest.mark.parametrize("new_cache", [NoCache, *CACHES.values()])
def test_tokens_do_not_depend_on_the_cache(new_cache, shortest_shared, seed, monkeypatch):
    """Greedy and sampled, cold and warm, beside lesson 2's generation; one layer has a window."""
    monkeypatch.setattr(cascade, "SHORTEST_SHARED", shortest_shared)
    model, prompts = new_model(torch.float32), prompts_that_share(5)
    limits = [random.randint(0, 9) for _ in prompts]
    sampling = [SamplingParams(temperature=0.9, seed=n) if n % 2 else None for n in range(7)]
    sampling = [params or SamplingParams(temperature=0.0) for params in sampling]
    expected = lesson2.generate(model, prompts, limits, sampling)
    assert generate(model, prompts, limits, sampling, new_cache=new_cache) == expected
    runner = WaveRunner(model, 40, block_size=4, new_cache=new_cache)
    for _ in range(3):
        requests = read_requests(model.config, prompts, limits, sampling)
        runner.serve([request for request in requests if not request.finished])
        assert [request.output for request in requests] == expected
    assert runner.blocks.num_free == 40


@pytest.mark.parametrize("keeps", ["latents", "heads"])
def test_a_model_with_latent_attention(keeps, seed, monkeypatch):
    """DeepSeek's latents; and its expanded heads, whose K and V have other widths, in a cascade."""
    monkeypatch.setattr(cascade, "SHORTEST_SHARED", 1)
    if keeps == "heads":
        monkeypatch.setattr(loop, "LATENTS_WITH_PREFIXES", loop.WITH_PREFIXES)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, head_dim=24, v_head_dim=12)
    config = replace(CONFIG, **heads, sliding_windows=(), mla=MLAConfig(None, 32, 8, 16, 12))
    model = DeepseekDecoder(config).eval().requires_grad_(False)
    prompts = prompts_that_share(4)
    assert isinstance(WaveRunner(model, 8).pool, PagedLatentPool) == (keeps == "latents")
    assert generate(model, prompts, 6) == lesson2.generate(model, prompts, 6)


def test_a_small_pool_takes_blocks_back_and_tokens_stay(seed):
    """Nine blocks for prompts of up to six: each wave is one or two requests."""
    model, runner = new_model(torch.float32), None
    for new_cache in CACHES.values():
        prompts = prompts_that_share(8)
        runner = WaveRunner(model, 9, block_size=4, new_cache=new_cache)
        requests = read_requests(model.config, prompts, 4)
        runner.serve(requests)
        assert [request.output for request in requests] == lesson2.generate(model, prompts, 4)
    with pytest.raises(ValueError, match="num_blocks: got 9; accepted: at least 10, for request 0"):
        runner.serve(read_requests(model.config, new_prompts(30), 11))


def test_one_pass_computes_a_shared_block_once(seed):
    """Three prompts that share 8 tokens arrive together: one runs first, then both others at once.
    Two that are equal and end with their block gain nothing by waiting.
    """
    model, stem = new_model(torch.float32), new_prompts(8)[0]
    runner = WaveRunner(model, 40, block_size=4)
    requests = read_requests(model.config, [[*stem, 1], [*stem, 2, 3], [*stem, 4]], 1)
    first, later = runner.next_pass(requests)
    assert (first, later) == (requests[:1], requests[1:])
    runner.serve(requests)
    assert (runner.hits.tokens, runner.hits.hit_tokens) == (28, 16)
    equal = read_requests(model.config, [stem[:4], stem[:4]], 1)
    assert runner.next_pass(equal) == (equal, [])


def test_positions_that_begin_anew_are_rejected(seed, monkeypatch):
    """A planted slip: the tokens after a known prefix run as if they were at the beginning."""
    model, stem = new_model(torch.float32), new_prompts(20)[0]
    prompts = [stem, [*stem[:16], 3, 5, 7, 9]]
    right, step_batch = lesson2.generate(model, prompts, 8), loop.step_batch

    def slipped(pool, chunks, *rest):
        moved = [(new, 0 if len(new) > 1 else held) for new, held in chunks]
        return step_batch(pool, moved, *rest)

    monkeypatch.setattr(loop, "step_batch", slipped)
    assert generate(model, prompts, 8) != right
