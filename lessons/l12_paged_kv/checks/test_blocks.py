"""Proves that block tables never mix up two sequences, lose a block, or count an owner wrongly."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lessons.l12_paged_kv.blocks import BlockManager, BlockPool, OutOfBlocks
from lessons.l12_paged_kv.lab.histories import History, random_history

# ---------------------------------------------------------------- any history


def test_any_history_keeps_every_token(request):
    """Growing, forking and freeing in any order: 300 histories, 10,000 with --all."""
    count = 10_000 if request.config.getoption("all") else 300

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data(), st.integers(1, 5), st.integers(1, 12))
    def run(data, block_size, num_blocks):
        def draw(low, high):
            return data.draw(st.integers(low, high))

        History(BlockManager(num_blocks, block_size), draw).run(data.draw(st.integers(1, 30)))

    run()


def test_histories_come_to_the_interesting_places(seed):
    """Else they would prove nothing: pools run full, blocks are shared and copied."""
    refused = copied = 0
    for n in range(40):
        manager = CountsCopies(12, 5)
        refused += random_history(manager, seed + n, 80).refused
        copied += manager.copied
    assert refused > 40 and copied > 40


class CountsCopies(BlockManager):
    copied = 0

    def grow(self, sequence, held, tokens):
        copies = super().grow(sequence, held, tokens)
        self.copied += len(copies)
        return copies


# ---------------------------------------------------------------- wrong managers


class NeverCopies(BlockManager):
    """A fork that only counts: two sequences write into one block."""

    def _is_written_shared(self, table, held, tokens):
        return False


class CopiesTheFirst(BlockManager):
    """The copy is taken from the wrong block of the table."""

    def grow(self, sequence, held, tokens):
        first = self.tables.get(sequence, [None])[0]
        return [(first, target) for _, target in super().grow(sequence, held, tokens)]


class ForgetsTheCopied(BlockManager):
    """The owner of a copy goes on owning what it was copied from."""

    def grow(self, sequence, held, tokens):
        copies = super().grow(sequence, held, tokens)
        self.pool.share(source for source, _ in copies)
        return copies


class NeverGrows(BlockManager):
    """A table of the prompt's blocks, and no more."""

    def grow(self, sequence, held, tokens):
        return super().grow(sequence, held, tokens) if not held else []


class OneTooFew(BlockManager):
    def blocks_for(self, tokens):
        return tokens // self.block_size


class OneTooMany(BlockManager):
    """A spare block in every table whose last block is full."""

    def blocks_for(self, tokens):
        return tokens // self.block_size + 1


class SharesOneTable(BlockManager):
    """Parent and child have the same list, so both see what one of them appends."""

    def fork(self, parent, child):
        super().fork(parent, child)
        self.tables[child] = self.tables[parent]


class ForkCountsNobody(BlockManager):
    def fork(self, parent, child):
        self.tables[child] = list(self.tables[parent])


class LeaksOnFree(BlockManager):
    """Whoever leaves gives back all blocks but the last."""

    def free(self, sequence):
        self.pool.release(self.tables.pop(sequence)[:-1])


class AllocatesAgain(BlockManager):
    """Growing takes a whole new table and forgets the old one."""

    def grow(self, sequence, held, tokens):
        self.tables[sequence] = self.take(self.blocks_for(tokens))
        return []


class TakesHalfOfIt(BlockManager):
    """Without enough blocks it takes what there is, and then raises."""

    def take(self, count):
        return (
            super().take(min(count, self.num_free))
            if count > self.num_free > 0
            else super().take(count)
        )


WRONG = [
    NeverCopies,
    CopiesTheFirst,
    ForgetsTheCopied,
    NeverGrows,
    OneTooFew,
    OneTooMany,
    SharesOneTable,
    ForkCountsNobody,
    LeaksOnFree,
    AllocatesAgain,
    TakesHalfOfIt,
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_manager_is_found(wrong, seed):
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError, OutOfBlocks)):
        for n in range(30):
            random_history(wrong(10, 3), seed + n)


# ---------------------------------------------------------------- by hand


def test_the_classic_example():
    """Prompts of 200, 500 and 100 tokens in 1000 blocks of 16."""
    manager = BlockManager(1000, 16)
    for sequence, tokens in enumerate((200, 500, 100)):
        assert manager.grow(sequence, 0, tokens) == []
    assert [len(table) for table in manager.tables.values()] == [13, 32, 7]
    assert manager.num_free == 948
    # A block more at the first token of a new block, and not before.
    assert manager.needs(0, 200, 208) == 0 and manager.needs(0, 200, 209) == 1


def test_the_last_heir_copies_nothing():
    manager = BlockManager(8, 4)
    manager.grow(0, 0, 6)
    manager.fork(0, 1)
    assert manager.tables[1] == manager.tables[0]
    shared = manager.tables[0][1]
    ((source, copy),) = manager.grow(1, 6, 7)
    assert source == shared and manager.tables[1][1] == copy != shared
    # Its only owner is sequence 0 now, so it may write.
    assert manager.grow(0, 6, 7) == [] and manager.tables[0][1] == shared
    # A full block that is shared is never written, so never copied.
    assert manager.tables[0][0] == manager.tables[1][0]


def test_a_fork_at_the_end_of_a_block_copies_nothing():
    manager = BlockManager(8, 4)
    manager.grow(0, 0, 8)
    manager.fork(0, 1)
    assert manager.needs(1, 8, 9) == 1 and manager.grow(1, 8, 9) == []
    assert manager.tables[1][:2] == manager.tables[0]


def test_blocks_are_reused_in_the_order_of_their_return():
    pool = BlockPool(4)
    assert pool.take(4) == [0, 1, 2, 3]
    pool.release([2])
    pool.release([0])
    assert pool.take(2) == [2, 0]


def test_a_refused_wish_takes_nothing():
    manager = BlockManager(3, 2)
    manager.grow(0, 0, 4)
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 of 3 free"):
        manager.grow(1, 0, 3)
    assert manager.num_free == 1 and 1 not in manager.tables


REFUSED = [
    (lambda: BlockManager(0, 4), "num_blocks: got 0; accepted: 1 or more"),
    (lambda: BlockManager(4, 0), "block_size: got 0; accepted: 1 or more tokens"),
    (lambda: BlockPool(2).release([1]), "block 1 is free already; accepted: one that has an owner"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_child_must_be_new():
    manager = BlockManager(4, 4)
    manager.grow(0, 0, 1)
    manager.grow(1, 0, 1)
    with pytest.raises(ValueError, match="child: sequence 1 has blocks; accepted: a new one"):
        manager.fork(0, 1)
