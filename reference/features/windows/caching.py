"""A prefix cache over pages of groups: which page of which group holds what after which prefix.

A prompt may begin at token n if every full group has all of its pages before n, and every group
with a window those that token n sees. Older pages of a window are not needed, so they may be lost,
and a hit is still a hit.
"""

from collections.abc import Sequence

from lessons.l13_prefix_caching.cache import CachingBlockManager, PrefixCache
from lessons.l13_prefix_caching.naive import FIRST, HashBlocks
from lessons.toolbox.model.window_groups import WindowGroups, first_page
from reference.features.windows.blocks import GONE, GroupBlocks, GroupTable


class GroupCache(PrefixCache):
    """Lesson 13's names of prefixes, with the pages of each group. {name: page} of each group is
    `of_group[group].block_of`.
    """

    def __init__(self, groups: WindowGroups, block_size: int):
        self.block_size, self.windows = block_size, groups.windows
        self.of_group = [HashBlocks(block_size) for _ in groups.windows]

    def longest(self, tokens: Sequence[int]) -> list[bytes]:
        """The names of the longest prefix that every group knows as far as it has to, and that
        leaves at least one token to compute.
        """
        whole = (len(tokens) - 1) // self.block_size
        known = [0] * len(self.windows)  # pages in a row, the newest included
        names, best = [], 0
        for name in self.of_group[0].hashes(tokens, whole):
            names.append(name)
            for group, cache in enumerate(self.of_group):
                known[group] = known[group] + 1 if name in cache.block_of else 0
            lacks = [len(names) - self.first(group, len(names)) for group in range(len(known))]
            if all(have >= lack for have, lack in zip(known, lacks)):
                best = len(names)
            elif any(w is None and have < len(names) for w, have in zip(self.windows, known)):
                break  # a full group lacks a page, and no longer prefix can do without it
        return names[:best]

    def first(self, group: int, pages: int) -> int:
        """The first page that is seen by the token after so many pages."""
        return first_page(self.windows[group], pages * self.block_size, self.block_size)

    def forget(self, block: int) -> None:
        for cache in self.of_group:
            cache.forget(block)

    def __contains__(self, block: int) -> bool:
        return any(block in cache for cache in self.of_group)


class CachingGroupBlocks(GroupBlocks, CachingBlockManager):
    """GroupBlocks whose new sequences begin with the pages that a cache knows. names: of the whole
    pages of each sequence, because each is made from the one before.
    """

    def __init__(self, groups: WindowGroups, most_tokens: int, num_blocks: int, block_size: int):
        cache = GroupCache(groups, block_size)
        super().__init__(groups, most_tokens, num_blocks, block_size, cache)
        self.names: dict[int, list[bytes]] = {}

    def reuse(self, sequence: int, tokens: Sequence[int]) -> int:
        """As in lesson 13: of a window only what the first new token sees."""
        names, tables = self.cache.longest(tokens), []
        for group, cache in enumerate(self.cache.of_group):
            first = self.cache.first(group, len(names))
            pages = [cache.block_of[name] for name in names[first:]]
            self.share_in(group, pages)
            tables.append([GONE] * first + pages)
        self.tables[sequence], self.names[sequence] = GroupTable(tables), names
        return len(names) * self.block_size

    def remember(self, sequence: int, tokens: Sequence[int]) -> None:
        """As in lesson 13, group by group."""
        names = self.names.setdefault(sequence, [])
        start, whole = len(names), len(tokens) // self.block_size
        before = names[-1] if names else FIRST
        names += self.cache.of_group[0].hashes(tokens, whole, start, before)
        for group, table in enumerate(self.tables[sequence].groups):
            cache = self.cache.of_group[group]
            for at in range(start, whole):
                mine = table[at]
                if mine == GONE:
                    continue
                known = cache.block_of.setdefault(names[at], mine)
                if known == mine:
                    cache.hash_of[mine] = names[at]
                    continue
                # Another sequence computed the same beside this one: it is kept once.
                self.share_in(group, [known])
                self.give_back(group, [mine])
                table[at] = known

    def fork(self, parent: int, child: int) -> None:
        """As in lesson 12."""
        super().fork(parent, child)
        self.names[child] = list(self.names.get(parent, ()))

    def free(self, sequence: int) -> None:
        """As in lesson 12."""
        super().free(sequence)
        self.names.pop(sequence, None)
