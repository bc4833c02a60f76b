"""Pages of groups under everything that an engine does with them, over a memory that knows what
each slot holds: whatever a token sees is there, no page is lost, and none is given back twice.
"""

import functools
import operator
import random
from collections import Counter
from zlib import crc32

import pytest

from lessons.l12_paged_kv.blocks import OutOfBlocks
from lessons.toolbox.model import window_groups
from lessons.toolbox.model.window_groups import groups_of, most_of_group
from reference.features.windows import blocks as blocks_module
from reference.features.windows import caching
from reference.features.windows.blocks import GONE, GroupBlocks, GroupTable
from reference.features.windows.caching import CachingGroupBlocks

pytestmark = pytest.mark.usefixtures("seed")
MODELS = ((3,), (None, 5), (4, 4, 4, None), (None, 2, 7), (1, None), (6, 6), (9, None, 9, 9, 9))
SEEN = ("hit", "hit with pages gone", "copied", "refused", "full", "given back", "came back")
BEGINNINGS = [[(5 * i + j) % 7 for i in range(40)] for j in range(3)]


class World:
    """Sequences over pages, and what every slot holds: (group, hash of the tokens up to it)."""

    def __init__(self):
        self.size, self.most = random.choice([1, 2, 3, 4]), random.choice([1, 3, 8])
        self.groups = groups_of(random.choice(MODELS))
        self.has_cache = random.random() < 0.7
        longest = self.groups.most_pages(40, self.size, self.most)
        kind = CachingGroupBlocks if self.has_cache else GroupBlocks
        pages = random.choice([longest, 2 * longest, 5 * longest])
        self.blocks = kind(self.groups, self.most, pages, self.size)
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}
        self.tokens: dict[int, list[int]] = {}  # what each sequence is to run
        self.held: dict[int, int] = {}
        self.away: dict[int, tuple[int, list]] = {}
        self.names, self.seen = iter(range(10**6)), Counter()

    def act(self) -> None:
        """Something that an engine does."""
        here = list(self.held)
        kind = random.choice(["new", "step", "step", "step", "fork", "free", "swap", "return"])
        if kind == "new" and len(here) < 6:
            self.begin()
        elif kind == "return" and self.away:
            self.come_back(random.choice(list(self.away)))
        elif here:
            act = {"fork": self.fork, "free": self.free, "swap": self.swap}.get(kind, self.step)
            act(random.choice(here))
        self.check_counts()

    def begin(self) -> None:
        row, blocks = next(self.names), self.blocks
        beginning = random.choice(BEGINNINGS)
        prompt = [*beginning[: random.randint(1, 36)], random.randint(0, 6)]
        held = blocks.reuse(row, prompt) if self.has_cache else 0
        if blocks.needs(row, held, len(prompt)) > blocks.num_free:
            if row in blocks.tables:
                blocks.free(row)
            return
        self.tokens[row], self.held[row] = prompt, held
        self.seen["hit"] += held > 0
        self.seen["hit with pages gone"] += held > 0 and GONE in functools.reduce(
            operator.iadd, self.tables(row), []
        )
        self.step(row)

    def step(self, row: int) -> None:
        """The next tokens run; of the last of them only some may stay, as of a draft."""
        tokens, held, blocks = self.tokens[row], self.held[row], self.blocks
        count = random.randint(1, self.most)
        left = len(tokens) - held
        drafted = max(0, min(count - left, 40 - len(tokens)))
        count = min(count, left + drafted)
        if not count:
            return
        run = tokens + [random.randint(0, 6) for _ in range(drafted)]
        if not blocks.can_grow(row, held, held + count):
            with pytest.raises(OutOfBlocks):
                blocks.grow(row, held, held + count)
            self.seen["full"] += 1
            self.free(random.choice(list(self.held)))
            return
        for source, target in blocks.grow(row, held, held + count):
            for at in range(self.size):
                self.memory.pop((target, at), None)
                if (source, at) in self.memory:
                    self.memory[target, at] = self.memory[source, at]
            self.seen["copied"] += 1
        for position in range(held, held + count):
            self.write(row, run, position)
        for position in range(held, held + count):
            self.read(row, run, position)
        # A draft may be wrong in all of its tokens; the newest token that was known stays.
        kept = count - random.randint(0, max(0, drafted - 1)) if drafted else count
        self.seen["refused"] += kept < count
        self.tokens[row] = run[: max(len(tokens), held + kept)]
        self.held[row] = held + kept
        if self.has_cache:
            blocks.remember(row, self.tokens[row][: held + kept])

    def write(self, row: int, run: list[int], position: int) -> None:
        for group, table in enumerate(self.tables(row)):
            page, at = table[position // self.size], position % self.size
            assert self.blocks.pool.owners[page] == 1, "a shared page is written"
            self.memory[page, at] = group, crc32(bytes(run[: position + 1]))

    def read(self, row: int, run: list[int], position: int) -> None:
        for group, table in enumerate(self.tables(row)):
            window = self.groups.windows[group] or position + 1
            for seen in range(max(0, position - window + 1), position + 1):
                found = self.memory.get((table[seen // self.size], seen % self.size))
                assert found == (group, crc32(bytes(run[: seen + 1]))), "another token's K and V"

    def fork(self, row: int) -> None:
        # An engine forks what has just run a prompt, so no page is there for refused tokens.
        if len(self.blocks.tables.get(row, ())) * self.size >= self.held[row] + self.size:
            return
        if row not in self.blocks.tables:
            return
        child = next(self.names)
        self.blocks.fork(row, child)
        self.tokens[child], self.held[child] = list(self.tokens[row]), self.held[row]
        self.seen["forked"] += 1

    def free(self, row: int) -> None:
        if row in self.blocks.tables:  # it may have run nothing yet
            self.blocks.free(row)
        del self.tokens[row], self.held[row]

    def swap(self, row: int) -> None:
        blocks, held = self.blocks, self.held.pop(row)
        if not held:
            self.held[row] = held
            return
        blocks.cut(row, held)
        slots = [(page, at) for page in blocks.pages(row) for at in range(self.size)]
        self.away[row] = held, [self.memory.get(slot) for slot in slots]
        assert len(slots) == self.size * blocks.blocks_held(held)
        blocks.free(row)

    def come_back(self, row: int) -> None:
        held, kept = self.away[row]
        if self.blocks.blocks_for(len(self.tokens[row])) > self.blocks.num_free:
            return
        del self.away[row]
        self.blocks.receive(row, held)
        slots = [(page, at) for page in self.blocks.pages(row) for at in range(self.size)]
        assert len(slots) == len(kept)
        self.memory |= {slot: held for slot, held in zip(slots, kept) if held}
        self.held[row] = held
        self.seen["came back"] += 1

    def tables(self, row: int) -> list[list[int]]:
        table = self.blocks.tables[row]
        assert list(table) == list(table.groups[0])
        return [list(pages) for pages in table.groups]

    def check_counts(self) -> None:
        """Each page has as many owners as tables name it, in one group."""
        owners, group_of = Counter(), {}
        for row in self.blocks.tables:
            for group, table in enumerate(self.tables(row)):
                for page in table:
                    if page != GONE:
                        owners[page] += 1
                        assert group_of.setdefault(page, group) == group, "a page of two groups"
        pool = self.blocks.pool
        assert pool.owners == [owners[page] for page in range(pool.num_blocks)]
        assert pool.num_free == pool.num_blocks - len(owners)
        assert self.blocks.owned == [
            list(group_of.values()).count(group) for group in range(len(self.groups.windows))
        ]
        self.seen["given back"] = self.blocks.given_back


def a_history(steps: int = 150) -> Counter:
    world = World()
    for _ in range(steps):
        world.act()
    for row in list(world.held):
        world.free(row)
    world.check_counts()
    assert world.blocks.num_free == world.blocks.num_blocks
    return world.seen


def test_random_histories(request):
    seen = Counter()
    for _ in range(400 if request.config.getoption("--all") else 40):
        seen += a_history()
    print(seen)
    assert all(seen[name] > 0 for name in SEEN)


# ---------------------------------------------------------------- planted slips

FIRST_PAGE = window_groups.first_page


def too_early(window, held, size):
    """The window has one key less."""
    return FIRST_PAGE(window, held + 1, size)


def never(window, held, size):
    """Nothing is ever behind the window."""
    return 0


def drafted_are_held(self, sequence, held):
    """What is given back is counted from the end of the table, drafted tokens included."""
    LEAVE(self, sequence, len(self.tables[sequence]) * self.block_size)


def first_group_alone(self, parent, child):
    """A fork shares the pages of the first group."""
    own = self.tables[parent]
    self.pool.share(own)
    self.tables[child] = GroupTable(list(table) for table in own.groups)


def any_full_hit(self, tokens):
    """A prefix hits when the first group knows it."""
    names = []
    for name in self.of_group[0].hashes(tokens, (len(tokens) - 1) // self.block_size):
        if name not in self.of_group[0].block_of:
            break
        names.append(name)
    return names


def kept_behind(self, group, pages):
    """Pages that leave are not told to the pool."""


LEAVE, LONGEST = GroupBlocks.leave_behind, caching.GroupCache.longest
SLIPS = {
    "a window of one key less": (blocks_module, "first_page", too_early),
    "refused tokens are held": (GroupBlocks, "leave_behind", drafted_are_held),
    "a fork of one group": (GroupBlocks, "fork", first_group_alone),
    "a hit without the window": (caching.GroupCache, "longest", any_full_hit),
    "a page that nobody has": (GroupBlocks, "give_back", kept_behind),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_planted_slip_is_found(slip, monkeypatch):
    monkeypatch.setattr(*SLIPS[slip])
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError, OutOfBlocks)):
        for _ in range(60):
            a_history()


# ---------------------------------------------------------------- by hand


def test_the_example_of_the_docstring():
    blocks = GroupBlocks(groups_of((4, None)), 8, 12, 2)
    assert blocks.groups.windows == (None, 4) and blocks.groups.layers == ((1,), (0,))
    blocks.grow(0, 0, 8)
    assert blocks.num_free == 4 and blocks.owned == [4, 4]
    blocks.grow(0, 8, 9)  # the token at 8 sees 5 to 8: pages 2, 3 and a new one
    full, window = blocks.tables[0].groups
    assert len(full) == 5 and window[:2] == [GONE, GONE] and GONE not in window[2:]
    assert blocks.owned == [5, 3] and blocks.given_back == 2 and blocks.num_free == 4
    blocks.free(0)
    assert blocks.num_free == 12 and blocks.owned == [0, 0]


def test_a_page_goes_when_its_last_key_is_out_of_sight():
    """Window 4, pages of 2: the token at 5 sees 2 to 5, the one at 4 still sees key 1."""
    assert [FIRST_PAGE(4, held, 2) for held in range(10)] == [0, 0, 0, 0, 0, 1, 1, 2, 2, 3]
    assert [FIRST_PAGE(1, held, 2) for held in range(5)] == [0, 0, 1, 1, 2]
    assert FIRST_PAGE(None, 99, 2) == 0


@pytest.mark.parametrize("window", [None, 1, 2, 5, 16, 17])
@pytest.mark.parametrize("size", [1, 2, 16])
def test_no_way_to_a_length_needs_more_than_is_said(window, size):
    """Counted by walking there in steps of every size, against the formula."""
    for most in (1, 2, 7):
        for tokens in (1, 2, 15, 33):
            said, walked = most_of_group(window, 0, tokens, size, most), 0
            for step in range(1, most + 1):
                for offset in range(step):
                    held = 0
                    while held < tokens:
                        end = min(tokens, held + (offset or step if held == 0 else step))
                        walked = max(walked, -(-end // size) - FIRST_PAGE(window, held, size))
                        held = end
            assert walked <= said <= walked + 1, (most, tokens)


@pytest.mark.parametrize(
    "windows, each, of_group",
    [
        ((128, None) * 18, 18, (None, 128)),  # gpt-oss-120b
        ((128, None) * 12, 12, (None, 128)),
        (((1024,) * 5 + (None,)) * 10 + (1024, 1024), 10, (None, *(1024,) * 6)),  # Gemma 3 27B
        ((4096,) * 32, 32, (4096,)),  # Mistral 7B v0.1
        ((4096, 4096, 4096, None) * 8, 8, (None, *(4096,) * 3)),  # Olmo 3 7B
        ((4,) * 13 + (None,) * 12, 13, (None, 4)),  # one group each, with an empty place
    ],
)
def test_the_groups_of_models(windows, each, of_group):
    groups = groups_of(windows)
    assert groups.layers_each == each and groups.windows == of_group
    assert sorted(layer for layers in groups.layers for layer in layers) == [*range(len(windows))]
    for window, layers in zip(of_group, groups.layers):
        assert {windows[layer] for layer in layers} == {window} and len(layers) <= each
    places = list(groups.place.values())
    assert len(set(places)) == len(windows) and max(at for _, at in places) < each


def test_a_hit_needs_the_last_window_alone():
    """Pages of 2, a window of 4. A prompt of 9 known tokens: the token at 8 sees keys 5 to 8."""
    blocks = CachingGroupBlocks(groups_of((4, None)), 16, 30, 2)
    prompt = [*range(9)]
    blocks.grow(0, 0, 9)
    blocks.remember(0, prompt)
    full, window = (list(table) for table in blocks.tables[0].groups)
    blocks.free(0)
    for page in window[:2]:  # positions 0 to 3, which no one needs
        blocks.cache.forget(page)
    assert blocks.reuse(1, prompt) == 8
    assert blocks.tables[1].groups == [full[:4], [GONE, GONE, *window[2:4]]]
    blocks.free(1)
    blocks.cache.forget(window[2])  # positions 4 and 5
    assert blocks.reuse(2, prompt) == 0, "position 5 is seen, and no shorter prefix has its window"
    blocks.free(2)
    assert blocks.num_free == 30
