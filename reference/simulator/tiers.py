"""Host memory and a disk beside a replica, on its virtual clock: lesson 26's block manager decides
what is saved and what is loaded, as in the engine, and only a copy is replaced by its time.

A load takes κ / W of each link that its blocks cross, and loads of a replica wait for each other.
So do saves, in the other direction of the same links. A block is found from the moment on at which
its copy has arrived. Left out: what copies take from the model's own bandwidth.
"""

from collections.abc import Sequence
from itertools import takewhile

from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l14_continuous_batching.clock import VirtualClock
from lessons.l26_kv_transfer.blocks import TieredBlockManager
from lessons.l26_kv_transfer.connector import Job, KVConnector
from lessons.l26_kv_transfer.tiers import Key, Lru
from reference.simulator.costs import Deployment

POOL, HOST, DISK, NOWHERE = "pool", "host", "disk", "computed"  # where K and V of a prompt were


class Link:
    """One direction of a link: what is put on it waits for what is on it."""

    def __init__(self):
        self.free_s = 0.0
        self.busy_s = 0.0

    def send(self, seconds: float, from_s: float) -> float:
        """When something that needs the link for so many seconds, from then on, has arrived."""
        self.free_s = max(self.free_s, from_s) + seconds
        self.busy_s += seconds
        return self.free_s


class VirtualTiers(KVConnector):
    """Keys of blocks in host memory and on a disk, and the links to both.

    ready_s: when a copy in a tier has arrived there. came: {block of the pool: (key, tier)}, of
    those that loads brought.
    """

    def __init__(self, deployment: Deployment, clock: VirtualClock):
        tiers, gpus = deployment.tiers, deployment.gpus
        block = deployment.token._replace(
            kv_bytes=deployment.token.kv_bytes * deployment.block_size
        )
        self.clock = clock
        self.host, self.disk = Lru(), Lru()
        self.host_room, self.disk_room = (
            int(gpus * room // block.kv_bytes) for room in (tiers.host_bytes, tiers.disk_bytes)
        )
        self.host_s = block.move_s(gpus * tiers.host_bytes_per_s)
        self.disk_s = block.move_s(gpus * tiers.disk_bytes_per_s)
        self.links = {name: Link() for name in ("to host", "from host", "to disk", "from disk")}
        self.ready_s: dict[Key, float] = {}
        self.loads: list[tuple[float, Job]] = []  # (when it ends, job), in this order
        self.came: dict[int, tuple[Key, str]] = {}

    @property
    def next_event_s(self) -> float:
        """When a load ends; infinity: none is under way."""
        return self.loads[0][0] if self.loads else float("inf")

    # ------------------------------------------------------------ lesson 26's KVConnector

    def matched(self, keys: Sequence[Key]) -> int:
        return sum(1 for _ in takewhile(self.has, keys))

    def has(self, key: Key) -> bool:
        """Whether a copy has arrived in a tier."""
        return self.ready_s.get(key, float("inf")) <= self.clock.now_s

    def start_load(self, keys: Sequence[Key], blocks: Sequence[int]) -> Job:
        job = Job(list(keys), list(blocks), is_load=True)
        there_s = self.clock.now_s
        for key, block in zip(keys, blocks):
            tier = HOST if key in self.host.keys else DISK
            self.came[block] = key, tier
            from_s = self.clock.now_s
            if tier == DISK:
                from_s = self.links["from disk"].send(self.disk_s, from_s)
            there_s = self.links["from host"].send(self.host_s, from_s)
        for key in keys:  # now that all were found, because the first may push out the last
            self.use(key)
        job.arrived = len(job.keys)
        self.loads.append((there_s, job))
        return job

    def start_save(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:
        """Saves at once, and never owns a block: a copy takes a small part of a step."""
        for key in keys:
            if key not in self.ready_s:
                self.ready_s[key] = self.links["to host"].send(self.host_s, self.clock.now_s)
                self.host.add(key)
                self.push_out()

    def finished(self) -> list[Job]:
        ended = [job for end_s, job in self.loads if end_s <= self.clock.now_s]
        self.loads = self.loads[len(ended) :]
        return ended

    def wait(self) -> None:
        if self.loads:
            self.clock.now_s = max(self.clock.now_s, self.loads[0][0])

    def close(self) -> None:
        """Nothing is open."""

    # ------------------------------------------------------------ lesson 26's tiers

    def use(self, key: Key) -> None:
        """A block was found: it is the last to go from where it is. From the disk it comes up."""
        if key in self.host.keys:
            self.host.use(key)
        elif key in self.disk.keys:
            self.disk.use(key)
            self.host.add(key)
            self.push_out()

    def push_out(self) -> None:
        """What host memory has no room for goes to the disk, and from there away."""
        while len(self.host.keys) > self.host_room:
            key = self.host.evict()
            if key in self.disk.keys:
                continue  # it came from there
            if self.disk_room:
                self.ready_s[key] = self.links["to disk"].send(self.disk_s, self.ready_s[key])
                self.disk.add(key)
            else:
                del self.ready_s[key]
        while len(self.disk.keys) > self.disk_room:
            key = self.disk.evict()
            if key not in self.host.keys:
                del self.ready_s[key]


class VirtualTieredBlocks(TieredBlockManager):
    """Lesson 26's block manager over virtual tiers, which tells where a prompt's blocks were."""

    def __init__(self, deployment: Deployment, clock: VirtualClock):
        size = deployment.block_size
        tiers = VirtualTiers(deployment, clock)
        super().__init__(deployment.num_blocks, size, HashBlocks(size), tiers)

    def tier_of(self, block: int) -> str:
        """Where a block was before a request began with it: counted once as loaded, then as the
        pool's.
        """
        key, tier = self.connector.came.pop(block, (None, POOL))
        return tier if self.cache.hash_of.get(block) == key else POOL
