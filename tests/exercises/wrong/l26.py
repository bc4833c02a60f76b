"""Wrong answers to lesson 26's exercises: slips of tiers, copies and routers, and a hint for each."""

from itertools import pairwise

import torch

from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 26.1 the cheapest way

answers.slips(
    "26.1",
    """
    moved_once: The token is moved there and back: two copies.
    - 2 * kv_bytes / bytes_per_s
    + kv_bytes / bytes_per_s

    moving_is_free: The GPU waits for both copies, and its seconds cost.
    - moved_s * gpu_dollars_per_s, kv_bytes * dollars
    + 0.0, kv_bytes * dollars

    seconds_as_dollars: moved_s is in seconds. Dollars are what the GPU's seconds cost.
    - moved_s * gpu_dollars_per_s, kv_bytes * dollars
    + moved_s, kv_bytes * dollars

    whole_gpu: The token keeps kv_bytes of the GPU's memory, not all of it.
    - kv_bytes / gpu_bytes * gpu_dollars_per_s
    + gpu_dollars_per_s

    never_computes: Computing it again is a way, too: dollars once, and none a second.
    - lines.append(("compute", compute_s * gpu_dollars_per_s, 0.0))
    +

    next_by_rate: Of the ways that cost less a second, the next is the one whose line is met first.
    - since, best = min(later)
    + since, best = max(later, key=lambda pair: pair[1][2])

    always_from_the_gpu: After the first crossing compare with the way that is the cheapest now, not
        with the GPU.
    - ((line[1] - best[1]) / (best[2] - line[2]), line) for line in lines if line[2] < best[2]
    + ((line[1] - lines[0][1]) / (lines[0][2] - line[2]), line) for line in lines
    + if line[2] < best[2]

    until_it_computes: Computing need not be the cheapest one day: stop when no way costs less a
        second.
    - if not later:
    + if best[0] == "compute":

    parallel_ones_meet: Two ways that cost the same a second never meet: of these the one that costs
        less once is cheaper for ever.
    - if line[2] < best[2]
    + if line[2] <= best[2] and line != best

    dearer_ones_too: A way that costs more a second than the present one never becomes cheaper.
    - if line[2] < best[2]
    + if line[2] != best[2] and line[1] > best[1]
    """,
)


@answers.wrong("26.1", "A way that is never the cheapest is left out.")
def all_of_them(kv_bytes, compute_s, gpu_dollars_per_s, gpu_bytes, tiers):
    lines = as_lines(kv_bytes, compute_s, gpu_dollars_per_s, gpu_bytes, tiers)
    order = sorted(lines, key=lambda name: -lines[name][1])
    found = [(order[0], 0.0)]
    for before, name in pairwise(order):
        (once, rate), (more, less) = lines[before], lines[name]
        found.append((name, (more - once) / (rate - less) if rate > less else 0.0))
    return found


@answers.wrong("26.1", "Ways may change within a second: look right after a crossing, not later.")
def one_second_later(kv_bytes, compute_s, gpu_dollars_per_s, gpu_bytes, tiers):
    lines = as_lines(kv_bytes, compute_s, gpu_dollars_per_s, gpu_bytes, tiers)
    values, found = list(lines.values()), [("gpu", 0.0)]
    meets = [(b[0] - a[0]) / (a[1] - b[1]) for a in values for b in values if b[1] < a[1]]
    for pause in sorted(meet for meet in meets if meet > 0):
        best = min(lines, key=lambda name: lines[name][0] + lines[name][1] * (pause + 1))
        if best != found[-1][0]:
            found.append((best, pause))
    return found


def as_lines(kv_bytes, compute_s, gpu_dollars_per_s, gpu_bytes, tiers):
    lines = {"gpu": (0.0, kv_bytes * gpu_dollars_per_s / gpu_bytes)}
    for name, dollars, rate in tiers:
        lines[name] = (2 * kv_bytes * gpu_dollars_per_s / rate, kv_bytes * dollars)
    return lines | {"compute": (compute_s * gpu_dollars_per_s, 0.0)}


@answers.alternative("26.1")
def by_a_stack(kv_bytes, compute_s, gpu_dollars_per_s, gpu_bytes, tiers):
    """Lines from steep to flat; a line that is met too late is taken off again."""
    lines = as_lines(kv_bytes, compute_s, gpu_dollars_per_s, gpu_bytes, tiers)
    found = []
    for name in sorted(lines, key=lambda one: (-lines[one][1], lines[one][0])):
        once, rate = lines[name]
        since = 0.0
        if found and lines[found[-1][0]][1] == rate:
            continue  # parallel, and it costs more once
        while found:
            other, begins = found[-1]
            more, steeper = lines[other]
            since = max(0.0, (once - more) / (steeper - rate))
            if since > begins:
                break
            found.pop()
            since = 0.0
        found.append((name, since))
    return found


@answers.alternative("26.1")
def by_all_crossings(kv_bytes, compute_s, gpu_dollars_per_s, gpu_bytes, tiers):
    lines = as_lines(kv_bytes, compute_s, gpu_dollars_per_s, gpu_bytes, tiers)
    values = list(lines.values())
    meets = [(a[0] - b[0]) / (b[1] - a[1]) for a in values for b in values if a[1] < b[1]]
    found = [(min(lines, key=lambda name: (lines[name][0], lines[name][1])), 0.0)]
    for pause in sorted(meet for meet in meets if meet > 0):
        later = pause * (1 + 1e-9)
        best = min(lines, key=lambda name: lines[name][0] + lines[name][1] * later)
        if best != found[-1][0]:
            found.append((best, pause))
    return found


# ---------------------------------------------------------------- 26.2 the kernel

answers.slips(
    "26.2",
    """
    block_of_the_row: Row r holds the block that is named there, not block r.
    - block = tl.load(blocks_ptr + row)
    + block = row

    first_layer: Each layer has pages of its own.
    - pages_ptr + layer * stride_layer
    + pages_ptr

    dense_blocks: Layers are stride_layer apart, because a slot follows their blocks.
    - layer * stride_layer + block * stride_block
    + layer * stride_block * 4 + block * stride_block

    pages_are_dense: After a block there may be a gap: a block is stride_block after the one before.
    - block * stride_block
    + block * PAGE

    block_in_32_bits: Block · stride may be more than 2³¹: keep the block in 64 bits.
    - block = tl.load(blocks_ptr + row)
    + block = tl.load(blocks_ptr + row).to(tl.int32)

    lanes_are_clamped: Lanes after the end of a page are masked. Yours load its last value once
        more.
    - inside = value < PAGE
    + value = tl.minimum(value, PAGE - 1)
    + inside = value < PAGE

    strides_swapped: The layer goes with stride_layer, the block with stride_block.
    - layer * stride_layer + block * stride_block
    + block * stride_layer % (stride_layer * tl.num_programs(1)) + layer * stride_block

    first_piece: Every program copies the first piece. Which piece is yours?
    - piece * BLOCK + tl.arange(0, BLOCK)
    + tl.arange(0, BLOCK)

    pieces_of_16: A piece has BLOCK values, and the caller says how many these are.
    - piece * BLOCK + tl.arange(0, BLOCK)
    + piece * 16 + tl.arange(0, BLOCK)

    no_last_piece: The last piece is not full, and it has to be copied.
    - inside = value < PAGE
    + inside = value < PAGE // BLOCK * BLOCK

    lanes_of_the_next_page: Lanes after the end of a page write into the next one, whose program may
        have been there before: mask the store by the page.
    - tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)
    + at = (row * tl.num_programs(1) + layer) * PAGE + value
    + is_there = at < tl.num_programs(0) * tl.num_programs(1) * PAGE
    + tl.store(target, tl.load(source, mask=inside, other=0.0), mask=is_there)

    rows_of_pages: A row holds all layers, one page after the other.
    - (row * tl.num_programs(1) + layer) * PAGE + value
    + (layer * tl.num_programs(0) + row) * PAGE + value
    """,
)


def in_pytorch(pages, blocks, piece=16):
    return pages[:, blocks].transpose(0, 1).contiguous()


attacks(answers, "26.2", in_pytorch)


@triton.jit
def row_kernel(
    pages_ptr,
    packed_ptr,
    blocks_ptr,
    layers,
    stride_layer,
    stride_block,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row, which walks over the layers and the pieces."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks_ptr + row)
    for layer in range(0, layers):
        for start in range(0, PAGE, BLOCK):
            at = start + tl.arange(0, BLOCK)
            source = pages_ptr + layer * stride_layer + block * stride_block + at
            value = tl.load(source, mask=at < PAGE, other=0.0)
            tl.store(packed_ptr + (row * layers + layer) * PAGE + at, value, mask=at < PAGE)


@answers.alternative("26.2")
def row_by_row(pages, blocks, piece=16):
    layers, _, page = pages.shape
    packed = torch.empty(len(blocks), layers, page)
    row_kernel[len(blocks),](
        pages, packed, blocks, layers, *pages.stride()[:2], PAGE=page, BLOCK=piece
    )
    return packed


@triton.jit
def flat_kernel(
    pages_ptr,
    packed_ptr,
    blocks_ptr,
    layers,
    stride_layer,
    stride_block,
    count,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of all values of the result, BLOCK in a program."""
    value = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = value < count
    run = value // PAGE
    block = tl.load(blocks_ptr + run // layers, mask=inside, other=0)
    at = run % layers * stride_layer + block * stride_block + value % PAGE
    tl.store(packed_ptr + value, tl.load(pages_ptr + at, mask=inside, other=0.0), mask=inside)


@answers.alternative("26.2")
def value_by_value(pages, blocks, piece=16):
    layers, _, page = pages.shape
    packed = torch.empty(len(blocks), layers, page)
    count = packed.numel()
    flat_kernel[triton.cdiv(count, piece),](
        pages, packed, blocks, layers, *pages.stride()[:2], count, PAGE=page, BLOCK=piece
    )
    return packed


# ---------------------------------------------------------------- 26.3 the index

answers.slips(
    "26.3",
    """
    in_both_tiers: A block that comes back from the GPU is not on the disk any more.
    - self.disk.pop(name, None)
    - self.host[name] = None
    + self.host[name] = None

    never_recent: Storing a block again makes it the most recent.
    - self.host.move_to_end(name)
    +

    demotes_the_newest: The least recently used block leaves, not the newest.
    - oldest, _ = self.host.popitem(last=False)
    + oldest, _ = self.host.popitem(last=True)

    forgets_instead: What host memory gives away goes to the disk.
    - self.disk[oldest] = None
    +

    endless_disk: The disk has a limit, too.
    - if len(self.disk) > self.disk_blocks:
    -     self.disk.popitem(last=False)
    +

    disk_forgets_the_newest: The disk forgets its oldest block for the one that comes.
    - self.disk.popitem(last=False)
    + self.disk.popitem()

    goes_on_after_a_gap: A prefix ends at its first missing block.
    - break
    + continue

    looking_is_no_use: A block that was found is used, so it becomes recent.
    - (self.host if tier == "host" else self.disk).move_to_end(name)
    + pass

    beginning_goes_first: A prefix must lose its end first: touch its last block first.
    - for name, tier in reversed(found):
    + for name, tier in found:

    two_are_used: Each block that was found is used, however long the prefix is.
    - for name, tier in reversed(found):
    + for name, tier in reversed(found[:2]):

    match_promotes: Looking a block up does not move it. Only `load` does.
    - (self.host if tier == "host" else self.disk).move_to_end(name)
    + self.store(name)

    load_leaves_it: A block that is loaded is host memory's from then on.
    - self.store(name)
    - return tier
    + return tier

    load_from_host_is_no_use: A block that is loaded becomes host memory's most recent one, also if
        it was there.
    - self.store(name)
    - return tier
    + if tier == "disk":
    +     self.store(name)
    + return tier

    makes_room_first: Host memory that holds the block already need not give one away for it.
    - self.disk.pop(name, None)
    - self.host[name] = None
    - self.host.move_to_end(name)
    - if len(self.host) > self.host_blocks:
    + if self.host and len(self.host) >= self.host_blocks:
    - self.disk.popitem(last=False)
    + self.disk.popitem(last=False)
    + self.disk.pop(name, None)
    + self.host[name] = None
    + self.host.move_to_end(name)

    tier_afterwards: Say which tier had the block, before you move it.
    - tier = "host" if name in self.host else "disk"
    - self.store(name)
    + self.store(name)
    + tier = "host" if name in self.host else "disk"

    one_too_many: A tier never holds more than it may.
    - if len(self.host) > self.host_blocks:
    + if len(self.host) > self.host_blocks + 1:
    """,
)


@answers.wrong("26.3", "A block that neither tier has raises KeyError.")
class SilentLoad:
    def __init__(self, host_blocks, disk_blocks):
        self.index = ByAge(host_blocks, disk_blocks)

    def store(self, name):
        self.index.store(name)

    def match(self, names):
        return self.index.match(names)

    def load(self, name):
        return self.index.load(name) if self.index.match([name]) else "disk"


@answers.alternative("26.3")
class ByAge:
    """A number for each block: when it was used last, by tier."""

    def __init__(self, host_blocks, disk_blocks):
        self.most = {"host": host_blocks, "disk": disk_blocks}
        self.where, self.used, self.clock = {}, {}, 0

    def touch(self, name):
        self.clock += 1
        self.used[name] = self.clock

    def settle(self, tier):
        """The oldest block of a tier that is too full; None if it is not."""
        here = [name for name, place in self.where.items() if place == tier]
        return min(here, key=self.used.get) if len(here) > self.most[tier] else None

    def store(self, name):
        self.where[name] = "host"
        self.touch(name)
        if (oldest := self.settle("host")) is not None:
            self.where[oldest] = "disk"
            self.touch(oldest)
        if (oldest := self.settle("disk")) is not None:
            del self.where[oldest], self.used[oldest]

    def match(self, names):
        known = []
        for name in names:
            if name not in self.where:
                break
            known.append((name, self.where[name]))
        for name, _ in known[::-1]:
            self.touch(name)
        return known

    def load(self, name):
        tier = self.where[name]
        self.store(name)
        return tier


@answers.alternative("26.3")
class OnTwoLists:
    def __init__(self, host_blocks, disk_blocks):
        self.quotas, self.host, self.disk = (host_blocks, disk_blocks), [], []

    def both(self):
        return (("host", self.host), ("disk", self.disk))

    def store(self, name):
        for _, tier in self.both():
            tier[:] = [other for other in tier if other != name]
        self.host.append(name)
        while len(self.host) > self.quotas[0]:
            self.disk.append(self.host.pop(0))
        while len(self.disk) > self.quotas[1]:
            self.disk.pop(0)

    def match(self, names):
        found = []
        for name in names:
            tier = next((where for where, tier in self.both() if name in tier), None)
            if tier is None:
                break
            found.append((name, tier))
        for name, where in found[::-1]:
            tier = dict(self.both())[where]
            tier.append(tier.pop(tier.index(name)))
        return found

    def load(self, name):
        for where, tier in self.both():
            if name in tier:
                self.store(name)
                return where
        raise KeyError(name)


# ---------------------------------------------------------------- 26.4 the log

answers.slips(
    "26.4",
    """
    copies_own_nothing: A block that is being copied is not free, also if no request has it.
    - "take": block not in owned and block not in copies,
    + "take": block not in owned,

    freed_block_is_free: Giving a block back does not end the copy of it.
    - owned.remove(block)
    + owned.remove(block)
    + copies.pop(block, None)

    reads_disturb_a_save: A step may read a block that is being saved.
    - all(copies.get(block) != "load" for block in reads)
    + not copies.keys() & set(reads)

    reads_what_is_loaded: A block that is being loaded is not there yet.
    - is_right &= all(copies.get(block) != "load" for block in reads)
    +

    writes_what_is_saved: A step that writes a block while it is saved changes the copy.
    - not copies.keys() & set(writes)
    + all(copies.get(block) != "load" for block in writes)

    writes_what_is_loaded: A step that writes a block while it is loaded loses its own tokens.
    - not copies.keys() & set(writes)
    + all(copies.get(block) != "save" for block in writes)

    saves_what_is_free: Who saves a block must own it when the copy begins.
    - "save": block in owned and block not in copies,
    + "save": block not in copies,

    loads_what_is_copied: One copy of a block at a time.
    - "load": block in owned and block not in copies,
    + "load": block in owned,

    saves_what_is_saved: One copy of a block at a time: it must not be saved twice at once.
    - "save": block in owned and block not in copies,
    + "save": block in owned and copies.get(block) != "load",

    saves_what_is_loaded: One copy of a block at a time: what is being loaded is not there yet.
    - "save": block in owned and block not in copies,
    + "save": block in owned and copies.get(block) != "save",

    all_copies_are_done: "done" ends the copy of one block, not of all.
    - del copies[block]
    + copies.clear()

    a_copy_may_step: A step needs a request that owns the block. A copy is no request.
    - owned >= {*reads, *writes}
    + owned | copies.keys() >= {*reads, *writes}

    done_is_always_right: "done" needs a copy that is under way.
    - "done": block in copies,
    + "done": True,
    - del copies[block]
    + copies.pop(block, None)

    free_needs_no_owner: A block is given back once.
    - "free": block in owned,
    + "free": True,
    - owned.remove(block)
    + owned.discard(block)

    counts_from_one: Events are counted from 0.
    - return number
    + return number + 1
    """,
)


@answers.wrong("26.4", "Freeing a block is right while it is copied: the copy still holds it.")
def free_waits(events):
    copied, busy = set(), by_states(events)
    for number, (kind, *rest) in enumerate(events):
        if kind == "free" and rest[0] in copied:
            return number if busy is None else min(number, busy)
        if kind in ("save", "load"):
            copied.add(rest[0])
        elif kind == "done":
            copied.discard(rest[0])
    return busy


@answers.alternative("26.4")
def by_states(events):
    """(owned, copy) of each block."""
    state = {}
    for number, event in enumerate(events):
        if event[0] == "step":
            for block in [*event[1], *event[2]]:
                owned, copy = state.get(block, (False, ""))
                if not owned or copy == "load" or (copy and block in event[2]):
                    return number
            continue
        kind, block = event
        owned, copy = state.get(block, (False, ""))
        rules = {
            "take": (not owned and not copy, (True, "")),
            "free": (owned, (False, copy)),
            "save": (owned and not copy, (owned, "save")),
            "load": (owned and not copy, (owned, "load")),
            "done": (bool(copy), (owned, "")),
        }
        is_right, state[block] = rules[kind]
        if not is_right:
            return number
    return None


@answers.alternative("26.4")
def with_sets(events):
    owned, saved, loaded = set(), set(), set()
    for number, event in enumerate(events):
        kind, first = event[0], event[1]
        if kind == "step":
            reads, writes = set(event[1]), set(event[2])
            if (reads | writes) - owned or (reads | writes) & loaded or writes & saved:
                return number
        elif kind == "take":
            if first in owned | saved | loaded:
                return number
            owned.add(first)
        elif kind == "done":
            if first not in saved | loaded:
                return number
            saved.discard(first)
            loaded.discard(first)
        elif first not in owned or (kind != "free" and first in saved | loaded):
            return number
        elif kind == "free":
            owned.remove(first)
        else:
            (saved if kind == "save" else loaded).add(first)
    return None


# ---------------------------------------------------------------- 26.5 the router

answers.slips(
    "26.5",
    """
    queue_is_free: A prompt waits for all that the worker has to compute before it.
    - weight * (queue + prompt_blocks - have) + busy
    + weight * (prompt_blocks - have) + busy

    counts_the_hits: Blocks that a worker holds make it cheaper, not dearer.
    - weight * (queue + prompt_blocks - have) + busy
    + weight * (queue + have) + busy

    decodes_are_free: What a worker decodes is load as well.
    - weight * (queue + prompt_blocks - have) + busy
    + weight * (queue + prompt_blocks - have)

    weight_on_both: The weight belongs to the blocks that are computed.
    - weight * (queue + prompt_blocks - have) + busy
    + weight * (queue + prompt_blocks - have + busy)

    dearest_worker: A cost is something to avoid: take the lowest.
    - costs.index(min(costs))
    + costs.index(max(costs))

    lowest_score: A score is something to have: take the highest.
    - found.index(max(found))
    + found.index(min(found))

    blocks_not_shares: A score compares shares, so that prompts of any length count alike.
    - weight * have / prompt_blocks + place
    + weight * have + place

    queue_upside_down: The worker with the least waiting has the place 1.
    - (most - queue) / (most - least) if most > least else 1.0
    + (queue - least) / (most - least) if most > least else 1.0

    place_by_the_most: Places go from 1 for the least waiting to 0 for the most.
    - (most - queue) / (most - least) if most > least else 1.0
    + (most - queue) / most if most else 1.0

    equal_queues_are_bad: If all have the same, all have the place 1.
    - if most > least else 1.0
    + if most > least else 0.0

    last_of_the_equal: Of equal workers the first is taken.
    - costs.index(min(costs))
    + len(costs) - 1 - costs[::-1].index(min(costs))

    last_of_equal_scores: Of equal workers the first is taken, by the score as well.
    - found.index(max(found))
    + len(found) - 1 - found[::-1].index(max(found))

    equal_costs_by_cache: Of equal workers the first is taken, whatever each of them holds.
    - costs.index(min(costs))
    + min(range(len(costs)), key=lambda w: (costs[w], -cached[w]))

    equal_scores_by_queue: Of equal workers the first is taken, whatever waits for each of them.
    - found.index(max(found))
    + max(range(len(found)), key=lambda w: (found[w], -waiting[w]))
    """,
)


@answers.wrong("26.5", "The scores' worker is not the costs' worker: they weigh different things.")
def one_choice(prompt_blocks, cached, waiting, active, weight):
    costs, cheap, found, _ = worker_by_worker(prompt_blocks, cached, waiting, active, weight)
    return costs, cheap, found, cheap


@answers.alternative("26.5")
def worker_by_worker(prompt_blocks, cached, waiting, active, weight):
    span = max(waiting) - min(waiting)
    costs, found = [], []
    for w, have in enumerate(cached):
        costs.append(active[w] + weight * (waiting[w] + prompt_blocks - have))
        place = 1 - (waiting[w] - min(waiting)) / span if span else 1.0
        found.append(place + weight * (have / prompt_blocks))
    cheap = sorted(range(len(costs)), key=lambda w: (costs[w], w))[0]
    good = sorted(range(len(found)), key=lambda w: (-round(found[w], 12), w))[0]
    return costs, cheap, found, good


@answers.alternative("26.5")
def with_running_bests(prompt_blocks, cached, waiting, active, weight):
    low, high = min(waiting), max(waiting)
    costs = [weight * (q + prompt_blocks - c) + a for c, q, a in zip(cached, waiting, active)]
    points = [
        weight * c / prompt_blocks + ((high - q) / (high - low) if high != low else 1.0)
        for c, q in zip(cached, waiting)
    ]
    cheap = good = 0
    for w in range(1, len(costs)):
        cheap = w if costs[w] < costs[cheap] else cheap
        good = w if points[w] > points[good] else good
    return costs, cheap, points, good
