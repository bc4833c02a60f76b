"""Who owns which page, where layers are in groups: a table for each group, one pool for all.

A group whose layers have a window gives pages back as its sequence grows. A page is behind the
window when no token that is still to run sees any of its keys. Tokens that are drafted and not
accepted are not held, so what they see is never given back.

    groups = groups_of((4, None))                   # one layer with a window of 4, one without
    blocks = GroupBlocks(groups, 8, 12, 2)          # steps of 8 tokens; 12 pages of 2 tokens
    blocks.grow(0, 0, 8)                            # 4 pages in each group
    blocks.grow(0, 8, 9)                            # the window's first two are free again

Nothing here touches a tensor. Read `GroupBlocks.grow` beside lesson 12's.
"""

from collections.abc import Iterable

from lessons.l12_paged_kv.blocks import BlockManager, Copy, OutOfBlocks
from lessons.toolbox.model.window_groups import WindowGroups, first_page, most_of_group

GONE = -1  # in the place of a page that was given back


class GroupTable(list):
    """The pages of a sequence. As a list those of the first group, which keeps everything where a
    model has such layers. `groups`: of each group, that one first.
    """

    def __init__(self, tables: Iterable[list[int]]):
        first, *others = tables
        super().__init__(first)
        self.groups: list[list[int]] = [self, *others]

    def __contains__(self, page: int) -> bool:
        return any(list.__contains__(table, page) for table in self.groups)

    @property
    def pages(self) -> list[int]:
        """All that it has, group by group."""
        return [page for table in self.groups for page in table if page != GONE]


class GroupBlocks(BlockManager):
    """A BlockManager of pages. most_tokens: of a step. Other arguments are BlockManager's."""

    def __init__(self, groups: WindowGroups, most_tokens: int, *arguments):
        super().__init__(*arguments)
        self.groups, self.most_tokens = groups, most_tokens
        self.tables: dict[int, GroupTable] = {}
        self.owned = [0] * len(groups.windows)  # pages of each group that have an owner
        self.given_back = 0  # pages that were behind a window, since the beginning

    @property
    def owned_by_kind(self) -> dict[str, int]:
        """Pages that have an owner, by how far back their layers look."""
        found: dict[str, int] = {}
        for window, owned in zip(self.groups.windows, self.owned):
            kind = "full" if window is None else f"window {window}"
            found[kind] = found.get(kind, 0) + owned
        return found

    def blocks_for(self, tokens: int) -> int:
        """How many pages a sequence needs at most on its way to so many tokens."""
        return self.groups.most_pages(tokens, self.block_size, self.most_tokens)

    def blocks_held(self, tokens: int) -> int:
        """How many pages a sequence has that holds so many tokens and runs none."""
        return self.groups.pages_at_rest(tokens, self.block_size)

    def pages(self, sequence: int) -> list[int]:
        """As in lesson 12: those of all groups."""
        return self.tables[sequence].pages

    def table_of(self, sequence: int) -> GroupTable:
        """Its table; an empty one for a new sequence."""
        return self.tables.get(sequence) or GroupTable([] for _ in self.groups.windows)

    def needs(self, sequence: int, held: int, tokens: int) -> int:
        """As in lesson 12, in steps of at most most_tokens. Less than nothing, where more pages are
        given back than taken.
        """
        return self.needs_in_steps(sequence, held, tokens, self.most_tokens)

    def needs_in_steps(self, sequence: int, held: int, tokens: int, most_tokens: int) -> int:
        """`needs` in steps of at most so many tokens."""
        needed, size, owners = 0, self.block_size, self.pool.owners
        for window, table in zip(self.groups.windows, self.table_of(sequence).groups):
            first = first_page(window, held, size)
            most = most_of_group(window, held, tokens, size, most_tokens)
            # A table is longer than it has to be when drafted tokens were not accepted.
            needed += max(0, most - len(table[first:]))
            behind = (page for page in table[:first] if page != GONE)
            needed -= sum(owners[page] == 1 for page in behind)
            needed += self._is_written_shared(table, held, tokens)
        return needed

    def grow(self, sequence: int, held: int, tokens: int) -> list[Copy]:
        """As in lesson 12. What is behind a window is given back first."""
        self.check_free(self.needs_in_steps(sequence, held, tokens, tokens))
        self.tables[sequence] = self.table_of(sequence)
        self.leave_behind(sequence, held)
        copies = []
        for group, table in enumerate(self.tables[sequence].groups):
            if self._is_written_shared(table, held, tokens):
                # Copy on write: the other owners go on reading the page as it is.
                at = held // self.block_size
                (own,) = self.take_for(group, 1)
                copies.append((table[at], own))
                self.give_back(group, [table[at]])
                table[at] = own
            # Where `held` is past the table's end, as in a simulator that skips steps.
            first = first_page(self.groups.windows[group], held, self.block_size)
            table += [GONE] * (first - len(table))
            count = -(-tokens // self.block_size) - len(table)
            table += self.take_for(group, max(0, count))
        return copies

    def receive(self, sequence: int, tokens: int) -> None:
        """As in lesson 12: of a window only what the next token sees."""
        self.check_free(self.blocks_held(tokens))
        tables, pages = [], -(-tokens // self.block_size)
        for group, window in enumerate(self.groups.windows):
            first = first_page(window, tokens, self.block_size)
            tables.append([GONE] * first + self.take_for(group, pages - first))
        self.tables[sequence] = GroupTable(tables)

    def check_free(self, needed: int) -> None:
        """Raise OutOfBlocks unless so many pages are free."""
        if needed > self.num_free:
            raise OutOfBlocks(f"{needed} pages wanted, {self.num_free} of {self.num_blocks} free")

    def leave_behind(self, sequence: int, held: int) -> None:
        """Give back the pages that no token from position `held` on sees."""
        for group, table in enumerate(self.tables[sequence].groups):
            first = first_page(self.groups.windows[group], held, self.block_size)
            at = first = min(first, len(table))
            while at and table[at - 1] != GONE:  # those before were given back earlier
                at -= 1
            behind = table[at:first]
            self.given_back += len(behind)
            self.give_back(group, reversed(behind))  # in the order of `free`
            table[at:first] = [GONE] * len(behind)

    def cut(self, sequence: int, tokens: int) -> None:
        """As in lesson 12, and what is behind a window of the next token goes, too."""
        kept = -(-tokens // self.block_size)
        for group, table in enumerate(self.tables[sequence].groups):
            self.give_back(group, [page for page in reversed(table[kept:]) if page != GONE])
            del table[kept:]
        self.leave_behind(sequence, tokens)

    def fork(self, parent: int, child: int) -> None:
        """As in lesson 12: all pages of all groups are shared."""
        if child in self.tables:
            raise ValueError(f"child: sequence {child} has blocks; accepted: a new one")
        own = self.tables[parent]
        self.pool.share(own.pages)
        self.tables[child] = GroupTable(list(table) for table in own.groups)

    def free(self, sequence: int) -> None:
        """As in lesson 12: of all groups the last page first."""
        tables = self.tables.pop(sequence).groups
        for at in reversed(range(max(map(len, tables)))):
            for group, table in enumerate(tables):
                if at < len(table) and table[at] != GONE:
                    self.give_back(group, [table[at]])

    # ------------------------------------------------------------ counted by group

    def take_for(self, group: int, count: int) -> list[int]:
        """Free pages for a group. Raises OutOfBlocks."""
        pages = self.take(count)
        self.owned[group] += len(pages)
        return pages

    def share_in(self, group: int, pages: Iterable[int]) -> None:
        """One owner more for pages of a group, which may have had none."""
        for page in pages:
            self.owned[group] += self.pool.owners[page] == 0
            self.pool.share([page])

    def give_back(self, group: int, pages: Iterable[int]) -> None:
        """One owner less for pages of a group."""
        for page in pages:
            self.pool.release([page])
            self.owned[group] -= self.pool.owners[page] == 0
