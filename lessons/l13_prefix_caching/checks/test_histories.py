"""Proves that hash blocks and the radix tree keep the laws of cache.py, in histories that
hypothesis invents, and that wrong caches do not.
"""

import hashlib

import pytest
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

from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l13_prefix_caching.optimized import Node, RadixTree

CACHES = {"hash blocks": HashBlocks, "radix tree": RadixTree}


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

    def hashes(self, tokens, count, start=0, before=b""):
        for index in range(start, count):
            yield bytes(tokens[index * self.block_size : (index + 1) * self.block_size])


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


# ---------------------------------------------------------------- how often a token is hashed


def test_a_sequence_that_grows_hashes_each_block_once(monkeypatch):
    """Ten blocks, remembered one by one as they fill; then a second sequence with the same
    tokens.
    """
    hashed, sha256 = [], hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data: hashed.append(data) or sha256(data))
    manager, tokens = manager_of(HashBlocks, 30, 4), list(range(40))
    for sequence in range(2):
        for end in range(4, 41, 4):
            manager.grow(sequence, end - 4, end)
            manager.remember(sequence, tokens[:end])
    assert hashed[:10] == hashed[10:] and len(set(hashed)) == 10
    assert manager.tables[0] == manager.tables[1] == manager.cache.match([*tokens, 0])


def test_who_keeps_an_equal_block_of_its_own_is_not_taken_for_known():
    """Block 4 holds what block 7 is remembered for, so 4 has no name, though 5 behind it has."""
    cache = HashBlocks(2)
    cache.insert([1, 2, 3, 4], [7, 8])
    assert cache.insert([1, 2, 6, 6], [4, 5]) == [7, 5]
    assert cache.insert([1, 2, 6, 6, 9, 9], [4, 5, 6]) == [7, 5, 6]
    assert cache.match([1, 2, 6, 6, 9, 9, 0]) == [7, 5, 6]
