"""Checks of lesson 26's exercises. Each exists because it rejects a named wrong answer
(wrong/l26.py).
"""

import random
import tempfile
from pathlib import Path

import torch

from lessons.l03_kv_cache.lab.testing import far_apart
from tests.exercises.checking import (
    assert_equal,
    assert_largest_tensor,
    call,
    check,
    compare,
    note,
)
from tests.exercises.kernel_work import kernel_does_it

# ---------------------------------------------------------------- 26.1 the cheapest way


def lower_edge(kv_bytes, compute_s, gpu_dollars_per_s, gpu_bytes, tiers):
    """By definition: where two lines meet, look which way is the cheapest a little later."""
    lines = {"gpu": (0.0, kv_bytes / gpu_bytes * gpu_dollars_per_s)}
    for name, dollars, bytes_per_s in tiers:
        lines[name] = (2 * kv_bytes / bytes_per_s * gpu_dollars_per_s, kv_bytes * dollars)
    lines["compute"] = (compute_s * gpu_dollars_per_s, 0.0)
    meets = {
        (a[0] - b[0]) / (b[1] - a[1])
        for a in lines.values()
        for b in lines.values()
        if a[1] != b[1]
    }
    pauses = sorted({0.0, *(pause for pause in meets if pause > 0)})
    found = []
    for pause, following in zip(pauses, [*pauses[1:], 2 * pauses[-1] + 1]):
        middle = (pause + following) / 2
        best = min(lines, key=lambda name: lines[name][0] + lines[name][1] * middle)
        if not found or found[-1][0] != best:
            found.append((best, pause))
    return found


H100 = 2.5 / 3600, 80e9
WAY_CASES = {  # name: (arguments, why)
    "example": ((100.0, 10.0, 1.0, 1000.0, [("host", 0.0002, 100.0)]), "the docstring's"),
    "two_tiers": (
        (131072.0, 27e-6, *H100, [("host", 1.2e-16, 64e9), ("disk", 4e-18, 11e9)]),
        "Llama-3-8B: four ways, and each has its time",
    ),
    "slow_disk": (
        (524288.0, 25e-6, *H100, [("host", 1.2e-16, 64e9), ("disk", 4e-18, 3e9)]),
        "a disk that is slower than the GPU is never the cheapest",
    ),
    "no_tier": ((100.0, 10.0, 1.0, 1000.0, []), "keep it, or compute it again"),
    "dear_tier": (
        (100.0, 10.0, 1.0, 1000.0, [("host", 0.02, 1e6)]),
        "a tier that costs more a second than the GPU's memory",
    ),
    "skipped": (
        (100.0, 50.0, 1.0, 1000.0, [("host", 0.0008, 100.0), ("disk", 0.0001, 90.0)]),
        "a tier that is cheaper than the GPU one day, but by then another is cheaper still",
    ),
    "fast_compute": (
        (100.0, 0.5, 1.0, 1000.0, [("host", 0.0002, 100.0)]),
        "a token that is computed sooner than it is moved",
    ),
    "unordered": (
        (131072.0, 27e-6, *H100, [("disk", 4e-18, 11e9), ("host", 1.2e-16, 64e9)]),
        "tiers in any order",
    ),
    "free_tier": (
        (100.0, 10.0, 1.0, 1000.0, [("host", 0.0, 100.0)]),
        "a tier that costs nothing a second, so that computing is never the cheapest",
    ),
    "soon": (
        (100.0, 0.01, 1.0, 1000.0, [("host", 0.0002, 1e6)]),
        "three ways within half a second",
    ),
    "same_price": (
        (100.0, 50.0, 1.0, 1000.0, [("far", 0.0002, 90.0), ("near", 0.0002, 100.0)]),
        "two tiers of the same price, of which one has the slower link",
    ),
}
WAY_NAMES = ("kv_bytes", "compute_s", "gpu_dollars_per_s", "gpu_bytes", "tiers")


def compare_ways(impl, arguments):
    got = call(impl, dict(zip(WAY_NAMES, arguments)))
    want = lower_edge(*arguments)
    assert isinstance(got, list), f"your result is a {type(got).__name__}, expected a list"
    note(got)
    names = [name for name, _ in want]
    assert [name for name, _ in got] == names, f"your ways are {got}; expected {want}"
    for (name, mine), (_, right) in zip(got, want):
        assert_equal(float(mine), float(right), atol=1e-9, rtol=1e-6, label=f"from when on {name}")


@check("26.1", {case: why for case, (_, why) in WAY_CASES.items()}, seconds=5)
def test_ways(impl, case, seed):
    compare_ways(impl, WAY_CASES[case][0])


@check("26.1", seconds=5)
def test_random_ways(impl, seed):
    draws = random.Random(seed)
    for _ in range(40):
        prices = [draws.choice((0.0, 1e-16, 10 ** draws.uniform(-18, -14))) for _ in range(3)]
        tiers = [
            (name, price, 10 ** draws.uniform(9, 11))
            for name, price in zip(("host", "disk", "shelf")[: draws.randint(0, 3)], prices)
        ]
        compute_s = 10 ** draws.uniform(-6, -3)
        gpu = H100[0], draws.choice((H100[1], 1e6))  # in a small one all ways change within seconds
        compare_ways(impl, (draws.choice((65536.0, 524288.0)), compute_s, *gpu, tiers))


# ---------------------------------------------------------------- 26.2 the kernel


def pool(seed, layers, num_blocks, page, blocks, piece=16, gap=3, between=0):
    """Pages of NaN, but for those that are asked for; `gap` values after the blocks of a layer, and
    `between` after each block.
    """
    g = torch.Generator().manual_seed(seed)
    stride = page + between
    memory = torch.full((layers, num_blocks * stride + gap), float("nan"))
    pages = memory[:, : num_blocks * stride].view(layers, num_blocks, stride)[..., :page]
    for block in set(blocks):
        pages[:, block] = torch.randn(layers, page, generator=g)
    return dict(pages=pages, blocks=torch.tensor(blocks, dtype=torch.int64), piece=piece)


PACK_CASES = {  # name: (arguments of pool, why)
    "one_piece": (dict(layers=2, num_blocks=3, page=16, blocks=[1]), "a page is a piece"),
    "order": (dict(layers=2, num_blocks=6, page=16, blocks=[5, 0, 3]), "blocks in any order"),
    "pieces": (dict(layers=3, num_blocks=4, page=48, blocks=[2, 1]), "a page is three pieces"),
    "last_piece": (
        dict(layers=2, num_blocks=4, page=37, blocks=[0, 3]),
        "the last piece is not full, and what follows it is another's",
    ),
    "small_page": (dict(layers=4, num_blocks=5, page=6, blocks=[4, 2, 0]), "less than a piece"),
    "twice": (dict(layers=2, num_blocks=4, page=20, blocks=[3, 3, 1]), "a block is there twice"),
    "blocks_apart": (
        dict(layers=2, num_blocks=4, page=16, blocks=[3, 1], between=5),
        "a block's stride is more than PAGE",
    ),
    "no_gap": (dict(layers=3, num_blocks=3, page=16, blocks=[2, 0], gap=0), "layers are dense"),
    "small_pieces": (
        dict(layers=2, num_blocks=3, page=21, blocks=[2, 1], piece=4),
        "a piece has as many values as the caller says",
    ),
    "large_pieces": (
        dict(layers=2, num_blocks=3, page=40, blocks=[1, 2], piece=64),
        "a piece that is larger than a page",
    ),
}


def by_indexing(pages, blocks, piece):
    return pages[:, blocks].transpose(0, 1).contiguous()


@check("26.2", {case: why for case, (_, why) in PACK_CASES.items()}, seconds=30)
def test_packed_values(impl, case, seed):
    inputs = pool(seed, **PACK_CASES[case][0])
    compare(impl, inputs, want=by_indexing(**inputs), atol=0.0, dtype=torch.float32)


@check("26.2", seconds=30)
def test_packed_example(impl, seed):
    pages = torch.arange(12.0).view(2, 3, 2)
    inputs = dict(pages=pages, blocks=torch.tensor([2, 0]), piece=16)
    want = torch.tensor([[[4.0, 5], [10, 11]], [[0, 1], [6, 7]]])
    compare(impl, inputs, want=want, atol=0.0, dtype=torch.float32)


@check("26.2", seconds=30)
def test_nothing_but_the_result_is_allocated(impl, seed):
    """Pages with gaps, so that a dense copy of the pool is larger than the result."""
    inputs = pool(seed, layers=2, num_blocks=9, page=16, blocks=[4])
    got = assert_largest_tensor(2 * 16 + 1, "read the pages where they are", impl, **inputs)
    assert_equal(got, by_indexing(**inputs), dtype=torch.float32)


@check("26.2", {"far": "the third block is after value 2³¹ of the memory"}, seconds=30)
def test_packed_far_apart(impl, case, seed):
    """In a sparse file, which takes no more room than its values."""
    inputs = pool(seed, layers=2, num_blocks=3, page=16, blocks=[2, 0], gap=0)
    want = by_indexing(**inputs)
    with tempfile.TemporaryDirectory() as folder:
        far = far_apart(inputs["pages"], 1, Path(folder) / "pages")
        got = note(impl(far, inputs["blocks"], inputs["piece"]))
    assert_equal(got, want, dtype=torch.float32)


# without the mask of the last piece its lanes would load other values again
test_the_kernel_does_it = kernel_does_it(
    "26.2", lambda seed: pool(seed, 2, 2, 20, [1, 0], gap=0), once=("pages",)
)


# ---------------------------------------------------------------- 26.3 the index


class ByLists:
    """The laws, on two plain lists, the least recently used block first."""

    def __init__(self, host_blocks, disk_blocks):
        self.most = dict(host=host_blocks, disk=disk_blocks)
        self.tiers = dict(host=[], disk=[])

    def tier_of(self, name):
        return next((tier for tier in ("host", "disk") if name in self.tiers[tier]), None)

    def store(self, name):
        for tier in self.tiers.values():
            if name in tier:
                tier.remove(name)
        self.put("host", name)

    def put(self, tier, name):
        self.tiers[tier].append(name)
        if len(self.tiers[tier]) > self.most[tier]:
            oldest = self.tiers[tier].pop(0)
            if tier == "host":
                self.put("disk", oldest)

    def match(self, names):
        found = []
        for name in names:
            if self.tier_of(name) is None:
                break
            found.append((name, self.tier_of(name)))
        for name, tier in reversed(found):
            self.tiers[tier].remove(name)
            self.tiers[tier].append(name)
        return found

    def load(self, name):
        tier = self.tier_of(name)
        if tier is None:
            raise KeyError(name)
        self.store(name)
        return tier


def tried(index, action, *arguments):
    """What a call gives, or that it raised KeyError."""
    try:
        return getattr(index, action)(*arguments)
    except KeyError:
        return "KeyError"


def compare_history(impl, quotas, history):
    """history: [(method, argument)]. Afterwards every name is asked for by itself."""
    mine, right = impl(*quotas), ByLists(*quotas)
    said = []
    names = sorted({n for _, a in history for n in ([a] if isinstance(a, str) else a)})
    for action, argument in [*history, *(("match", [name]) for name in names)]:
        given = argument if isinstance(argument, str) else list(argument)
        got, want = tried(mine, action, given), tried(right, action, argument)
        said.append(f"{action}({argument})")
        assert given == (argument if isinstance(argument, str) else list(argument)), (
            f"{action} changed its argument"
        )
        label = f"{action}({argument}), with at most {quotas}, after {', '.join(said[-9:-1])}"
        assert_equal(note(got), want, label=label)


INDEX_CASES = {  # name: (quotas, history, why)
    "example": (
        (2, 1),
        [
            ("store", "a"),
            ("store", "b"),
            ("store", "c"),
            ("match", ["b", "a", "x"]),
            ("load", "a"),
            ("match", ["x", "b"]),
        ],
        "the docstring's",
    ),
    "demotion": (
        (2, 2),
        [("store", name) for name in "abcd"] + [("match", ["a", "b", "c", "d"])],
        "host memory that is full gives its oldest to the disk",
    ),
    "forgotten": (
        (1, 1),
        [("store", name) for name in "abc"] + [("match", ["b", "c"]), ("match", ["a"])],
        "the disk has a limit, too",
    ),
    "stored_again": (
        (2, 1),
        [("store", name) for name in "aba"] + [("store", "c"), ("match", ["b"])],
        "a block that is stored again becomes recent, and counts once",
    ),
    "back_from_the_disk": (
        (1, 2),
        [("store", name) for name in "aba"] + [("store", "c"), ("match", ["a", "b"])],
        "a block is in one tier only",
    ),
    "match_is_a_use": (
        (2, 0),
        [("store", "a"), ("store", "b"), ("match", ["a"]), ("store", "c"), ("match", ["a"])],
        "what was asked for stays longer",
    ),
    "ends_go_first": (
        (3, 0),
        [("store", name) for name in "abc"]
        + [("match", ["a", "b", "c"]), ("store", "d"), ("match", ["a", "b", "c"])],
        "a prefix loses its end before its beginning",
    ),
    "whole_prefix": (
        (4, 0),
        [("store", name) for name in "cxab"]
        + [("match", ["a", "b", "c"]), ("store", "d"), ("match", ["c"])],
        "each block of a prefix is used, not its first two alone",
    ),
    "first_missing": (
        (3, 0),
        [("store", "b"), ("store", "c"), ("match", ["a", "b", "c"]), ("match", ["b", "a", "c"])],
        "a prefix ends at its first missing block",
    ),
    "match_moves_nothing": (
        (1, 1),
        [("store", "a"), ("store", "b"), ("match", ["a"]), ("match", ["a", "b"])],
        "only load brings a block back to host memory",
    ),
    "load_promotes": (
        (1, 2),
        [("store", name) for name in "abc"] + [("load", "a"), ("match", ["a", "c", "b"])],
        "a block that is loaded comes to host memory, and another leaves it",
    ),
    "load_of_nothing": ((2, 2), [("store", "a"), ("load", "x")], "KeyError, and nothing changes"),
    "load_is_a_use": (
        (2, 1),
        [("store", "a"), ("store", "b"), ("load", "a"), ("store", "c"), ("match", ["a", "b"])],
        "a block that is loaded from host memory becomes its most recent",
    ),
    "no_disk": (
        (1, 0),
        [("store", "a"), ("store", "b"), ("load", "b"), ("load", "a")],
        "a disk that may hold nothing",
    ),
    "no_host": ((0, 2), [("store", name) for name in "abc"] + [("load", "b")], "a disk alone"),
    "disk_in_order": (
        (1, 2),
        [("store", name) for name in "abc"] + [("match", ["a"]), ("store", "d"), ("match", ["a"])],
        "the disk forgets what it has not been asked for the longest",
    ),
}


@check("26.3", {case: why for case, (*_, why) in INDEX_CASES.items()}, seconds=5)
def test_histories_by_hand(impl, case, seed):
    quotas, history, _ = INDEX_CASES[case]
    compare_history(impl, quotas, history)


@check("26.3", seconds=10)
def test_random_histories(impl, seed):
    draws = random.Random(seed)
    for _ in range(120):
        history = []
        for _ in range(draws.randint(1, 25)):
            action = draws.choice(("store", "store", "match", "load"))
            several = draws.choices("abcdef", k=1 if action != "match" else draws.randint(1, 4))
            named = list(dict.fromkeys(several))  # blocks of one prompt have different names
            history.append((action, named if action == "match" else named[0]))
        compare_history(impl, (draws.randint(0, 5), draws.randint(0, 3)), history)


# ---------------------------------------------------------------- 26.4 the log


def by_the_rules(events):
    """Each rule by itself."""
    requests, copies = set(), {}
    for number, event in enumerate(events):
        kind = event[0]
        if kind == "step":
            _, reads, writes = event
            if any(block not in requests for block in [*reads, *writes]):
                return number
            if any(copies.get(block) == "load" for block in reads):
                return number
            if any(block in copies for block in writes):
                return number
            continue
        block = event[1]
        if kind == "take":
            if block in requests or block in copies:
                return number
            requests.add(block)
        elif kind == "free":
            if block not in requests:
                return number
            requests.discard(block)
        elif kind == "done":
            if block not in copies:
                return number
            copies.pop(block)
        else:
            if block not in requests or block in copies:
                return number
            copies[block] = kind
    return None


LOG_CASES = {  # name: (events, why)
    "example": (
        [("take", 0), ("step", [], [0]), ("save", 0), ("free", 0), ("take", 0), ("done", 0)],
        "the docstring's",
    ),
    "clean": (
        [
            ("take", 0),
            ("load", 0),
            ("done", 0),
            ("take", 1),
            ("step", [0], [1]),
            ("save", 1),
            ("step", [0, 1], []),
            ("free", 1),
            ("done", 1),
            ("take", 1),
            ("free", 0),
        ],
        "nothing is wrong",
    ),
    "read_too_early": (
        [("take", 0), ("load", 0), ("step", [0], []), ("done", 0)],
        "a step reads a block before its load is done",
    ),
    "read_while_saved": (
        [("take", 0), ("save", 0), ("step", [0], []), ("done", 0), ("step", [], [0])],
        "reading disturbs no save",
    ),
    "written_while_saved": (
        [("take", 0), ("save", 0), ("step", [], [0]), ("done", 0)],
        "half of the copy would be new",
    ),
    "written_while_loaded": (
        [("take", 0), ("load", 0), ("step", [], [0]), ("done", 0)],
        "the load would write over it",
    ),
    "freed_twice": ([("take", 0), ("free", 0), ("free", 0)], "it has no owner any more"),
    "taken_twice": ([("take", 0), ("take", 0)], "it has an owner"),
    "two_copies": (
        [("take", 0), ("save", 0), ("load", 0)],
        "a block is copied in one direction at a time",
    ),
    "saved_after_free": (
        [("take", 0), ("free", 0), ("save", 0), ("done", 0)],
        "the next request may write into it",
    ),
    "two_blocks": (
        [("take", 0), ("take", 1), ("save", 0), ("load", 1), ("done", 0), ("step", [1], [])],
        "the copy of one block is done, and that of the other is not",
    ),
    "saved_twice": (
        [("take", 0), ("save", 0), ("save", 0), ("done", 0)],
        "a copy of it is under way",
    ),
    "saved_while_loaded": (
        [("take", 0), ("load", 0), ("save", 0), ("done", 0)],
        "half of what is saved would be old",
    ),
    "done_twice": ([("take", 0), ("save", 0), ("done", 0), ("done", 0)], "no copy is under way"),
    "freed_while_loaded": (
        [("take", 0), ("load", 0), ("free", 0), ("done", 0), ("take", 0), ("step", [0], [])],
        "an aborted request: its block is free when the load is done",
    ),
    "taken_while_loaded": (
        [("take", 0), ("load", 0), ("free", 0), ("take", 0)],
        "the load would write into another request's block",
    ),
    "step_without_owner": (
        [("take", 0), ("save", 0), ("free", 0), ("step", [0], [])],
        "a copy is an owner, but a step needs a request",
    ),
    "other_block": (
        [("take", 0), ("take", 1), ("load", 1), ("step", [0], [0]), ("step", [0, 1], [])],
        "one block's load does not stop the others",
    ),
}


def compare_log(impl, events):
    """As compare, with the event in words: a number that is one off is another event."""
    got, want = call(impl, dict(events=events)), by_the_rules(events)
    note(got)
    assert got is None or type(got) is int, (
        f"your result is {got!r}, expected the number of an event, or None"
    )
    if got == want and type(got) is type(want):
        return
    if got is None:
        raise AssertionError(f"your function finds no race; {told(events, want)}, breaks a rule")
    right = "no event breaks a rule"
    if want is not None:
        right = f"{told(events, want)}, is the first to break one"
    raise AssertionError(f"your function finds a race in {told(events, got)}; {right}")


def told(events, number):
    return f"event {number}, {events[number] if 0 <= number < len(events) else 'which is none'}"


@check("26.4", {case: why for case, (_, why) in LOG_CASES.items()}, seconds=5)
def test_logs(impl, case, seed):
    compare_log(impl, LOG_CASES[case][0])


@check("26.4", seconds=5)
def test_random_logs(impl, seed):
    """Mostly right, so that the first race is anywhere."""
    draws = random.Random(seed)
    for _ in range(60):
        events = []
        for _ in range(draws.randint(1, 30)):
            event = drawn_event(draws)
            if by_the_rules([*events, event]) is None or draws.random() < 0.04:
                events.append(event)
        compare_log(impl, events)


def drawn_event(draws):
    kind = draws.choice(("take", "free", "save", "load", "done", "step"))
    lists = [draws.sample(range(3), draws.randint(0, 2)) for _ in range(2)]
    return (kind, *lists) if kind == "step" else (kind, draws.randrange(3))


@check("26.4", {"all": "after a clean log, each event that there is"}, seconds=30)
def test_every_event_after_a_log(impl, case, seed):
    """So each rule meets each state of a block."""
    draws = random.Random(seed)
    every = [(kind, block) for kind in ("take", "free", "save", "load", "done") for block in (0, 1)]
    lists = [[], [0], [1], [0, 1], [1, 0]]
    every += [("step", reads, writes) for reads in lists for writes in lists]
    for _ in range(12):
        log = []
        for _ in range(draws.randint(1, 40)):
            event = draws.choice(every)
            log += [event] if by_the_rules([*log, event]) is None else []
        for event in every:
            compare_log(impl, [*log, event])


# ---------------------------------------------------------------- 26.5 the router


def by_definition(prompt_blocks, cached, waiting, active, weight):
    costs, found = [], []
    for have, queue, busy in zip(cached, waiting, active):
        costs.append(weight * (queue + (prompt_blocks - have)) + busy)
        longest, shortest = max(waiting), min(waiting)
        place = 1.0
        if longest != shortest:
            place = (longest - queue) / (longest - shortest)
        found.append(weight * (have / prompt_blocks) + place)
    lowest = min(range(len(costs)), key=costs.__getitem__)
    highest = max(range(len(found)), key=found.__getitem__)
    return costs, lowest, found, highest


ROUTE_CASES = {  # name: (arguments, why)
    "example": ((10, [2, 5, 8], [0, 0, 0], [10, 5, 9], 1.0), "the docstring's"),
    "heavy": ((10, [2, 5, 8], [0, 0, 0], [10, 5, 9], 4.0), "a large weight follows the cache"),
    "no_weight": ((10, [9, 0, 0], [7, 2, 4], [3, 6, 2], 0.0), "a weight of 0 ignores it"),
    "queues": ((8, [8, 0], [20, 0], [1, 2], 1.0), "a cached prompt after a long queue"),
    "all_equal": ((4, [1, 1, 1], [2, 2, 2], [3, 3, 3], 1.0), "of equal workers the first"),
    "one_worker": ((3, [0], [5], [0], 2.0), "no choice, and no division by zero"),
    "tie": ((6, [0, 3, 3], [0, 4, 4], [9, 1, 1], 1.0), "the second and the third are equal"),
    "between": ((6, [0, 0, 0], [10, 4, 6], [0, 0, 0], 1.0), "places in proportion, not in order"),
    "equal_costs": (
        (6, [4, 6, 0], [1, 0, 0], [6, 9, 3], 1.0),
        "three equal costs, and of each other thing another worker has the best",
    ),
    "equal_scores": (
        (6, [3, 6, 0], [2, 4, 0], [6, 9, 3], 1.0),
        "three equal scores, and of each other thing another worker has the best",
    ),
}
ROUTE_NAMES = ("prompt_blocks", "cached", "waiting", "active", "weight")


def compare_route(impl, arguments):
    got = call(impl, dict(zip(ROUTE_NAMES, arguments)))
    want = by_definition(*arguments)
    note(got)
    assert isinstance(got, tuple) and len(got) == 4, (
        f"your result is {got!r}, expected a tuple of four"
    )
    for label, at in (("costs", 0), ("scores", 2)):
        assert_equal(got[at], want[at], atol=1e-9, label=f"the {label}")
    for label, at in (("the lowest cost", 1), ("the highest score", 3)):
        # no number that could be one too large: a worker
        assert type(got[at]) is int and got[at] == want[at], (
            f"you choose worker {got[at]} for {label}; of {want[at - 1]} it is worker {want[at]}, "
            "the first one that has it"
        )


@check("26.5", {case: why for case, (_, why) in ROUTE_CASES.items()}, seconds=5)
def test_routes(impl, case, seed):
    compare_route(impl, ROUTE_CASES[case][0])


@check("26.5", seconds=5)
def test_random_routes(impl, seed):
    """Quarters as weights, so that costs are exact."""
    draws = random.Random(seed)
    for _ in range(40):
        count, prompt = draws.randint(1, 5), draws.choice((4, 8, 16))
        cached = [draws.randint(0, prompt) for _ in range(count)]
        waiting, active = ([draws.randint(0, 9) for _ in range(count)] for _ in range(2))
        compare_route(impl, (prompt, cached, waiting, active, draws.randint(0, 12) / 4))
