"""Proves that hash blocks and the radix tree keep the laws of cache.py, in histories that hypothesis
invents, and that tokens do not depend on a cache.
"""

import random

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lessons.l02_naive_attention import naive as lesson2
from lessons.l02_naive_attention.request import read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l11_cuda_graphs.lab.testing import new_model, new_prompts
from lessons.l12_paged_kv.blocks import BlockPool
from lessons.l13_prefix_caching import cascade
from lessons.l13_prefix_caching.cache import CachingBlockManager, Hits, NoCache
from lessons.l13_prefix_caching.generate import WaveRunner, generate
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l13_prefix_caching.optimized import Node, RadixTree

CACHES = {"hash blocks": HashBlocks, "radix tree": RadixTree}
both_caches = pytest.mark.parametrize("new_cache", CACHES.values(), ids=CACHES)


def manager_of(new_cache, num_blocks, block_size):
    return CachingBlockManager(num_blocks, block_size, new_cache(block_size))


# ---------------------------------------------------------------- the laws, in invented histories


class Histories(RuleBasedStateMachine):
    """Sequences arrive, grow, fork and leave; the same history for each of `makers`. Tokens are 0
    and 1, so that prefixes meet often; pools are small, so that blocks are taken back often.
    """

    makers = tuple(CACHES.values())
    new_manager = staticmethod(manager_of)

    @initialize(block_size=st.integers(1, 3), num_blocks=st.integers(3, 14))
    def begin(self, block_size, num_blocks):
        self.size, self.num_blocks, self.ids = block_size, num_blocks, 0
        self.managers = [self.new_manager(make, num_blocks, block_size) for make in self.makers]
        self.written = [{} for _ in self.makers]  # block -> all tokens up to the last one in it
        self.live = {}  # sequence -> its tokens

    def write(self, which, sequence, tokens, held):
        """Give the sequence room for its tokens, and write those behind the first `held`."""
        manager, written = self.managers[which], self.written[which]
        for source, target in manager.grow(sequence, held, len(tokens)):
            written[target] = written[source]
        for index, block in enumerate(manager.tables[sequence]):
            end = min((index + 1) * self.size, len(tokens))
            if end > held:
                assert manager.pool.owners[block] == 1, "somebody else's block is written"
                written[block] = tuple(tokens[:end])
        manager.remember(sequence, tokens)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def arrive(self, tokens):
        answers = []
        for which, manager in enumerate(self.managers):
            held = manager.reuse(self.ids, tokens)
            assert held < len(tokens), "no token is left to compute"
            assert held % self.size == 0 and held == len(manager.tables[self.ids]) * self.size
            for index, block in enumerate(manager.tables[self.ids]):
                claimed = tuple(tokens[: (index + 1) * self.size])
                assert self.written[which].get(block) == claimed, "it holds something else"
            fits = manager.can_grow(self.ids, held, len(tokens))
            if fits:
                self.write(which, self.ids, tokens, held)
            else:
                manager.free(self.ids)
            answers.append((held, fits))
        assert len(set(answers)) == 1, f"two caches, two answers: {answers}"
        if answers[0][1]:
            self.live[self.ids] = tokens
        self.ids += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def answer(self, data, token):
        sequence = data.draw(st.sampled_from(sorted(self.live)))
        tokens = [*self.live[sequence], token]
        held = len(tokens) - 1
        if self.managers[0].can_grow(sequence, held, held + 1):
            self.live[sequence] = tokens
            for which in range(len(self.managers)):
                self.write(which, sequence, tokens, held)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.live)))
        for manager in self.managers:
            manager.fork(parent, self.ids)
        self.live[self.ids] = self.live[parent]
        self.ids += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data):
        sequence = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[sequence]
        for manager in self.managers:
            manager.free(sequence)

    @invariant()
    def owners_count_right(self):
        for manager in getattr(self, "managers", ()):
            owners = [0] * self.num_blocks
            for table in manager.tables.values():
                for block in table:
                    owners[block] += 1
            assert owners == manager.pool.owners
            assert set(manager.pool.free) == {b for b, count in enumerate(owners) if not count}

    @invariant()
    def what_is_in_use_is_known_and_whole(self):
        """Nobody's block is evicted or changed while he owns it."""
        for manager, written in zip(getattr(self, "managers", ()), getattr(self, "written", ())):
            for sequence, tokens in self.live.items():
                table, whole = manager.tables[sequence], len(tokens) // self.size
                assert manager.cache.match([*tokens, 0])[:whole] == table[:whole]
                for index, block in enumerate(table):
                    assert written[block] == tuple(tokens[: (index + 1) * self.size])

    def teardown(self):
        for manager in getattr(self, "managers", ()):
            for sequence in list(self.live):
                manager.free(sequence)
            assert manager.num_free == self.num_blocks, "a block leaked"


def play(machine, count, **more):
    """Invent `count` histories of a machine; raises what its rules raise."""
    quiet = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
    how = settings(
        max_examples=count,
        stateful_step_count=25,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=quiet,
        **more,
    )
    run_state_machine_as_test(machine, settings=how)


def test_both_caches_keep_the_laws(request):
    play(Histories, 10_000 if request.config.getoption("all") else 300)


# ---------------------------------------------------------------- wrong versions that must fail


class RoundsUp(HashBlocks):
    """Reports a block of which only a part is the prompt's."""

    def match(self, tokens):
        padded = [*tokens, *[0] * (-len(tokens) % self.block_size), 0]
        return super().match(padded)


class MatchesAll(HashBlocks):
    """Leaves no token whose logits could be computed."""

    def match(self, tokens):
        return super().match([*tokens, 0])


class Unchained(HashBlocks):
    """A block by its own tokens, whatever stands before it."""

    def hashes(self, tokens, count):
        for start in range(0, count * self.block_size, self.block_size):
            yield bytes(tokens[start : start + self.block_size])


class KnowsForever(HashBlocks):
    """Never told that a block is somebody else's now."""

    def forget(self, block):
        pass


class OneIdForAPath(RadixTree):
    """A node's first block stands for the whole edge."""

    def walk(self, keys):
        node, on_edge, found = super().walk(keys)
        return node, on_edge, [self.node_of[block].blocks[0] for block in found]


class NoSplit(RadixTree):
    """Hangs the rest below the whole edge, where it does not belong."""

    def split(self, node, at):
        node.children.setdefault(node.keys[at], Node(node.keys[at:], [], {}, node))


class NoLocks(CachingBlockManager):
    """Uses what it found without becoming its owner."""

    def reuse(self, sequence, tokens):
        self.tables[sequence] = self.cache.match(tokens)
        return len(self.tables[sequence]) * self.block_size


class FirstBlockFirst(CachingBlockManager):
    """Gives the blocks back in the order in which they stand."""

    def free(self, sequence):
        self.pool.release(self.tables.pop(sequence))


class KeepsItsOwn(CachingBlockManager):
    """Does not take the block that was there first."""

    def remember(self, sequence, tokens):
        self.cache.insert(tokens, self.tables[sequence])


class RemembersTooSoon(CachingBlockManager):
    """Remembers tokens that nobody has computed yet."""

    def remember(self, sequence, tokens):
        rest = [0] * (-len(tokens) % self.block_size)
        super().remember(sequence, [*tokens, *rest])


@pytest.mark.parametrize(
    "make, kind",
    [
        (RoundsUp, CachingBlockManager),
        (MatchesAll, CachingBlockManager),
        (Unchained, CachingBlockManager),
        (KnowsForever, CachingBlockManager),
        (OneIdForAPath, CachingBlockManager),
        (NoSplit, CachingBlockManager),
        (HashBlocks, NoLocks),
        (RadixTree, NoLocks),
        (RadixTree, FirstBlockFirst),
        (HashBlocks, KeepsItsOwn),
        (RadixTree, RemembersTooSoon),
    ],
    ids=lambda x: x.__name__,
)
def test_a_wrong_cache_is_rejected(make, kind):
    class Planted(Histories):
        makers = (make,)

        @staticmethod
        def new_manager(new_cache, num_blocks, block_size):
            return kind(num_blocks, block_size, new_cache(block_size))

    with pytest.raises((AssertionError, LookupError, ValueError)):
        # One failure is enough here, so none is looked for that would be shorter.
        play(Planted, 2000, phases=[Phase.generate], report_multiple_bugs=False)


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


def test_a_tree_without_branches_is_one_edge():
    """What makes it a radix tree: a run of blocks that no prompt has parted is one node."""
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
    """A planted slip: the tokens behind a known prefix run as if they stood at the beginning."""
    import lessons.l13_prefix_caching.generate as room

    model, stem = new_model(torch.float32), new_prompts(20)[0]
    prompts = [stem, [*stem[:16], 3, 5, 7, 9]]
    right, paged_batch = lesson2.generate(model, prompts, 8), room.paged_batch

    def slipped(chunks, *rest):
        return paged_batch([(new, 0 if len(new) > 1 else held) for new, held in chunks], *rest)

    monkeypatch.setattr(room, "paged_batch", slipped)
    assert generate(model, prompts, 8) != right
