"""Random histories of replicas that tell of their blocks, over connections that lose batches, send
some twice and in any order, and of a router that follows; beside them an oracle that knows all.
"""

import random
from collections import Counter

from reference.features import block_events as events_module
from reference.features.block_events import MEDIUMS, EventLog, Follower, from_json, to_json
from reference.router.block_index import BlockIndex

KEYS = [bytes([number]) * 16 for number in range(12)]


class House:
    """A replica and the connection to it. true: what it has now; at: what it had at the end of each
    batch.
    """

    def __init__(self, buffer_steps: int):
        self.buffer_steps = buffer_steps
        self.begin()

    def begin(self) -> None:
        """A life: at first, or after a restart."""
        self.log = EventLog(16, self.buffer_steps)
        self.true = {medium: set() for medium in MEDIUMS}
        self.at = {}
        self.read = ("", 0)  # how far its sender has come
        self.under_way = []
        self.note()

    def note(self) -> None:
        if not self.log.open:
            self.at[self.log.epoch, self.log.seq] = {m: set(keys) for m, keys in self.true.items()}

    def change(self, draw: random.Random, is_event: bool = False) -> None:
        """A block comes or goes; perhaps it was there, or gone, already."""
        medium, key = draw.choice(MEDIUMS), draw.choice(KEYS)
        is_new = key not in self.true[medium] if is_event else draw.random() < 0.5
        if is_new:
            self.true[medium].add(key)
            self.log.stored(medium, key)
        else:
            self.true[medium].discard(key)
            self.log.removed(medium, key)
        self.note()

    def send(self) -> None:
        batches = self.log.since(*self.read)
        self.note()
        for batch in batches:
            self.read = batch.epoch, batch.seq
            self.under_way.append(to_json(batch))


class History:
    """Drives all of them. most: of the index. follower: how the router follows."""

    def __init__(self, draw: random.Random, most: int = 10**6, follower=Follower, index=BlockIndex):
        self.draw, self.new_follower = draw, follower
        self.houses = {name: House(draw.choice([1, 3, 100])) for name in "abc"}
        self.index = index(most)
        self.followers = {name: follower() for name in self.houses}
        self.seen = Counter()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            name, house = self.draw.choice(list(self.houses.items()))
            what = self.draw.choices(["change", "send", "arrive", "restart"], [12, 5, 6, 0.3])[0]
            if what == "change":
                house.change(self.draw)
            elif what == "send":
                house.send()
            elif what == "restart":
                house.begin()
                self.connect(name)
            elif house.under_way:
                self.arrive(name, self.draw.randrange(len(house.under_way)))
            self.seen[what] += 1
            self.check()
        for name, house in self.houses.items():
            self.end(name, house)

    def end(self, name: str, house: House) -> None:
        """From now on nothing is lost, and an event more shows what was."""
        house.under_way.clear()
        house.change(self.draw, is_event=True)
        follower = self.followers[name]
        if follower.is_behind:
            house.read = ("", 0)
        house.send()
        for _ in range(100):  # a follower that asks again and again never ends
            if house.under_way:
                self.arrive(name, 0, is_reliable=True)
                self.check()
        assert not follower.is_behind, "it never hears all"
        assert (follower.epoch, follower.seq) == (house.log.epoch, house.log.seq)

    def connect(self, name: str) -> None:
        """The connection is new: what was under way is lost, and the whole state is asked for."""
        house = self.houses[name]
        house.under_way.clear()
        house.read = ("", 0)
        self.followers[name] = self.new_follower()
        self.index.drop(name)
        house.send()

    def arrive(self, name: str, which: int, is_reliable: bool = False) -> None:
        house, follower = self.houses[name], self.followers[name]
        chance = 1.0 if is_reliable else self.draw.random()
        found = house.under_way[which]
        if chance >= 0.2:  # else it comes again
            house.under_way.pop(which)
        if 0.2 <= chance < 0.3:
            self.seen["lost"] += 1
            return
        batch = from_json(found)
        was_behind = follower.is_behind
        events = follower.take(batch)
        if events is not None:
            self.index.apply(name, events)
        elif follower.is_behind:
            self.seen["gap"] += not was_behind
            house.read = ("", 0)  # it asks for the whole state, on the same unreliable way
            house.send()

    def known(self, name: str) -> dict[str, set[bytes]]:
        """What the router believes."""
        found = {medium: set() for medium in MEDIUMS}
        for key, holders in self.index.holders.items():
            for medium in holders.get(name, ()):
                found[medium].add(key)
        return found

    def check(self) -> None:
        """Who is not behind knows exactly what there was at its number, but for what the index has
        no room for.
        """
        assert self.index.count <= self.index.most
        pairs = sum(len(holders) for holders in self.index.holders.values())
        assert pairs == self.index.count == sum(map(len, self.index.keys.values()))
        for name, house in self.houses.items():
            follower = self.followers[name]
            known = self.known(name)
            if follower.is_behind:
                self.seen["behind"] += 1
                continue
            was = house.at[follower.epoch, follower.seq]
            if self.index.forgotten:
                assert all(known[medium] <= was[medium] for medium in MEDIUMS)
                self.seen["forgotten"] += 1
            else:
                assert known == was, f"{name} at {follower.seq}"
                self.check_lookup(name, was)

    def check_lookup(self, name: str, was: dict[str, set[bytes]]) -> None:
        keys = self.draw.sample(KEYS, 5)
        found = []
        for key in keys:
            tiers = [medium for medium in MEDIUMS if key in was[medium]]
            if not tiers:
                break
            found.append(tiers[0])
        self.seen["hits"] += len(found)
        assert self.index.mediums(name, keys) == found


def run_histories(draw: random.Random, count: int, steps: int = 60, **how) -> Counter:
    """So many histories. Raises AssertionError at the first that is wrong."""
    seen = Counter()
    before, events_module.MOST_EVENTS = events_module.MOST_EVENTS, 3
    try:
        for _ in range(count):
            history = History(draw, draw.choice([4, 10**6, 10**6]), **how)
            history.run(steps)
            seen += history.seen
    finally:
        events_module.MOST_EVENTS = before
    return seen
