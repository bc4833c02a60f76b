"""What a trace tells of blocks: who owns them, what the prefix cache remembers, and where else
lesson 26's tiers have their K and V. Only what has changed since the step before.
"""

Key = bytes  # a hash of all tokens up to the end of a block (lesson 26)

LOOKS = 20  # after which a block that no tier shows is taken for lost
SAVING, LOADING = "saving", "loading"
HOST, FOLDER = "host", "folder"


class Blocks:
    """Tables and cache of an engine's blocks, and the places of its tiers, if it has any."""

    def __init__(self, blocks):
        self.blocks = blocks
        self.tables: dict[int, list[int]] = {}
        self.cached: set[int] = set()
        connector = getattr(blocks, "connector", None)
        self.places = None if getattr(connector, "tier", None) is None else Places(blocks)

    def changes(self) -> dict:
        """For the record of a step."""
        found = dict(tables=self.changed_tables(), **self.changed_cache())
        return found if self.places is None else found | dict(places=self.places.changed())

    def look(self) -> None:
        """Note the saves that a step has begun, because many end before the next one begins."""
        if self.places is not None:
            copies = self.places.look()
            self.places.begun |= {key for key, copy in copies.items() if copy == SAVING}

    def changed_tables(self) -> dict[int, list[int] | None]:
        """The tables that are not as they were; None for one that is gone."""
        # Where layers are in groups, the blocks of all groups.
        tables = self.blocks.tables.items()
        now = {row: list(getattr(table, "pages", table)) for row, table in tables}
        gone = {row: None for row in self.tables if row not in now}
        changed = {row: table for row, table in now.items() if self.tables.get(row) != table}
        self.tables = now
        return gone | changed

    def changed_cache(self) -> dict[str, list[int]]:
        """Blocks that the prefix cache remembers, and did not before; those that it forgot."""
        cache = getattr(self.blocks, "cache", ())  # without prefix caching there is none
        now = {block for block in range(self.blocks.num_blocks) if block in cache}
        before, self.cached = self.cached, now
        return dict(remembered=sorted(now - before), forgotten=sorted(before - now))


class Places:
    """Where each block is that a copy was ever made of, known by a number in the order in which
    they appeared.

    A place is [block of the pool or -1, "saving", "loading" or "", "host", "folder" or ""].
    """

    def __init__(self, blocks):
        self.cache, self.connector = blocks.cache, blocks.connector
        tier = self.connector.tier
        self.host = getattr(tier, "rows", {})
        self.folder = getattr(tier, "below", None) if hasattr(tier, "rows") else tier
        self.used_bytes = 0
        self.numbers: dict[Key, int] = {}
        self.in_pool: dict[Key, tuple[int, bytes | None]] = {}  # block, and what it held then
        self.in_folder: set[Key] = set()
        self.unsure: dict[Key, int] = {}  # how often they were looked for
        self.were: dict[Key, list] = {}
        self.begun: set[Key] = set()  # being copied when the step before ended

    def look(self) -> dict[Key, str]:
        """{key: which copy of it is under way}. Meets new keys."""
        moving = {}
        for job in list(self.connector.copying):
            for key, block in zip(job.keys, job.blocks):
                self.numbers.setdefault(key, len(self.numbers))
                if not job.has_ended:
                    moving[key] = LOADING if job.is_load else SAVING
                held = None if job.is_load else self.cache.hash_of.get(block)
                if self.in_pool.get(key, (-1, None))[0] != block:
                    self.in_pool[key] = block, held
                self.unsure[key] = 0
        return moving

    def block_of(self, key: Key, is_loading: bool) -> int:
        """The block of the pool that holds it, -1: none."""
        block, held = self.in_pool[key]
        now = self.cache.hash_of.get(block)
        if held is None and not is_loading and now is not None:
            held = now
            self.in_pool[key] = block, held
        return block if held is not None and now == held else -1

    def check_folder(self) -> None:
        """Which blocks have a file. Asked only of those that may have got or lost one."""
        if self.folder is None:
            return
        used, before = getattr(self.folder, "used_bytes", 0), self.used_bytes
        self.used_bytes = used
        if used < before:  # room was made
            self.in_folder = {key for key in self.in_folder if self.folder.has(key)}
        for key, looks in list(self.unsure.items()):
            if key in self.host:
                continue
            if key in self.in_folder or self.folder.has(key):
                self.in_folder.add(key)
                del self.unsure[key]
            else:
                self.unsure[key] = looks + 1
                if looks > LOOKS:
                    del self.unsure[key]

    def changed(self) -> dict[int, list]:
        """{number: place} of those that are somewhere else than they were."""
        moving = dict.fromkeys(self.begun, SAVING) | self.look()
        self.begun.clear()
        self.check_folder()
        found = {}
        for key, number in self.numbers.items():
            tier = HOST if key in self.host else FOLDER if key in self.in_folder else ""
            copy = moving.get(key, "")
            place = [self.block_of(key, copy == LOADING), copy, tier]
            if place != self.were.get(key):
                if tier != HOST and self.were.get(key, place)[2] == HOST:
                    self.unsure[key] = 0  # it may have gone down into a file
                found[number] = self.were[key] = place
        return found
