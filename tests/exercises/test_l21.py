"""Checks of lesson 21's exercises. Each exists because it rejects a named wrong answer
(wrong/l21.py).
"""

import copy
import random
from functools import cache

import torch

from solutions.l21_multi_lora import LayerAdapter
from tests.exercises.checking import (
    assert_entries,
    assert_equal,
    assert_largest_tensor,
    call,
    check,
    compare,
    note,
)
from tests.exercises.kernel_work import kernel_does_it

# ---------------------------------------------------------------- 21.1 predict

GB = 10**9
QKVO = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
LLAMA = [*QKVO, (14336, 4096), (14336, 4096), (4096, 14336)]  # of Llama-3-8B
LLAMA_BYTES = 16_060_522_496
LARGE = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192)]
LARGE += [(28672, 8192), (28672, 8192), (8192, 28672)]  # of Llama-3-70B
LARGE_BYTES = 141_107_412_992
PLAN_NAMES = ("shapes", "num_layers", "rank", "num_adapters", "base_bytes", "memory_bytes")
PLAN_CASES = {  # name: (arguments, the answer, why)
    "example": (([(6, 4), (2, 4)], 3, 2, 4, 1000, 3500), (192, 13, 3, 1.768), "the docstring's"),
    "llama_3_8b": (
        (LLAMA, 32, 16, 16, LLAMA_BYTES, 80 * GB),
        (83_886_080, 762, 4, 1 + 16 * 83_886_080 / LLAMA_BYTES),
        "84 MB beside 16 GB",
    ),
    "llama_3_70b": (
        (LARGE, 80, 64, 1, LARGE_BYTES, 160 * GB),
        (1_656_750_080, 11, 1, 1 + 1_656_750_080 / LARGE_BYTES),
        "1.7 GB each, and little room beside 141 GB",
    ),
    "attention_alone": (
        ([QKVO[0], QKVO[1]], 32, 8, 1, LLAMA_BYTES, 24 * GB),
        (6_815_744, 1164, 1, 1 + 6_815_744 / LLAMA_BYTES),
        "q_proj and v_proj, as the paper does it, in a card of 24 GB",
    ),
    "large_adapters": (
        ([(8, 8)], 1, 1, 40, 100, 1000),
        (32, 28, 10, 13.8),
        "merging makes no model larger; a step reads 40 adapters, although 28 fit at a time",
    ),
    "no_adapter": (
        ([(8, 8)], 1, 1, 0, 100, 100),
        (32, 0, 1, 1.0),
        "no adapter in the batch, no room",
    ),
}
PLAN_LABELS = (
    "the bytes of an adapter",
    "how many adapters fit",
    "how many merged models fit",
    "how many times as many bytes",
)


@check("21.1", {case: why for case, (*_, why) in PLAN_CASES.items()}, seconds=5)
def test_plan(impl, case, seed):
    numbers, want, _ = PLAN_CASES[case]
    got = call(impl, dict(zip(PLAN_NAMES, numbers)))
    assert isinstance(got, tuple) and len(got) == 4, (
        f"your result is {got!r}, expected a tuple of four"
    )
    assert_entries(got, want, PLAN_LABELS, rtol=1e-9)


# ---------------------------------------------------------------- 21.2 one matrix


def eighths(generator, *shape, most=12):
    """Multiples of 1/8 whose products and sums have no rounding in float32."""
    return torch.randint(-most, most + 1, shape, generator=generator) / 8


def carrying(weight, adapter, sign):
    """weight + sign · scaling · B A, rank by rank, in float64."""
    total = weight.double().clone()
    if adapter is None:
        return total
    a, b = adapter.lora_a.double(), adapter.lora_b.double()
    rank = a.shape[0]
    scaling = adapter.lora_alpha / (rank**0.5 if adapter.use_rslora else rank)
    for r in range(rank):
        total += sign * scaling * torch.outer(b[:, r], a[r])
    return total


def adapter_of(seed, rank, alpha, outputs, inputs, most=12, **options):
    g = torch.Generator().manual_seed(seed)
    a, b = eighths(g, rank, inputs, most=most), eighths(g, outputs, rank, most=most)
    return LayerAdapter(a, b, alpha, **options)


SWITCH_CASES = {  # name: (rank and alpha and options of old, the same of new, why)
    "to": (None, (4, 160.0), "the base gets an adapter"),
    "from": ((4, 16.0), None, "and is the base again"),
    "between": ((2, 8.0), (8, 4.0), "the old one goes, the new one comes"),
    "rank_1": (None, (1, 2.0), "r = 1: alpha itself"),
    "rslora": (None, (8, 8.0, dict(use_rslora=True)), "alpha / √r"),
    "mixed": ((6, 8.0, dict(use_rslora=True)), (2, 2.0), "each by its own rule"),
    "neither": (None, None, "no adapter before and none after"),
}


@check("21.2", {case: why for case, (*_, why) in SWITCH_CASES.items()}, seconds=5)
def test_switch(impl, case, seed):
    outputs, inputs = 6, 4
    weight = eighths(torch.Generator().manual_seed(seed), outputs, inputs)
    pair = []
    for at, spelled in enumerate(SWITCH_CASES[case][:2]):
        if spelled is None:
            pair.append(None)
            continue
        rank, alpha, *options = spelled
        options = options[0] if options else {}
        pair.append(adapter_of(2 * seed + at, rank, alpha, outputs, inputs, **options))
    old, new = pair
    want = carrying(weight, new, 1)
    merged = carrying(weight, old, 1).float()
    compare_switch(impl, merged, old, new, want)


@check("21.2", seconds=5)
def test_switch_square(impl, seed):
    """N = K = r, where a wrong order of the factors has the right shape."""
    g = torch.Generator().manual_seed(seed)
    weight, new = eighths(g, 4, 4), adapter_of(seed + 9, 4, 8.0, 4, 4)
    compare_switch(impl, weight, None, new, carrying(weight, new, 1))


@check("21.2", seconds=5)
def test_switch_bfloat16(impl, seed):
    """The sum is rounded once. Nearly nothing is left of it, so a correction that was rounded
    before it is added loses all.
    """
    new = adapter_of(seed, 4, 1.0, 16, 16, most=60)
    weight = -carrying(torch.zeros(16, 16), new, 1).bfloat16()
    want = carrying(weight, new, 1).bfloat16()
    compare_switch(impl, weight, None, new, want)


@check("21.2", seconds=5)
def test_switch_bfloat16_between(impl, seed):
    """What is left when the old one has gone has more bits than bfloat16, and the new one needs
    them.
    """
    old, new = (adapter_of(2 * seed + at, 4, 1.0, 16, 16, most=60) for at in range(2))
    weight = carrying(carrying(torch.zeros(16, 16), old, 1), new, -1).bfloat16()
    want = carrying(carrying(weight, old, -1), new, 1).bfloat16()
    compare_switch(impl, weight, old, new, want)


def compare_switch(impl, weight, old, new, want):
    """Call and compare; neither weight nor the adapters may have changed."""
    parts = [t for a in (old, new) if a is not None for t in (a.lora_a, a.lora_b)]
    before = [part.clone() for part in parts]
    got = call(impl, dict(weight=weight, old=old, new=new))
    # √r has no end in binary digits, so a few roundings of float32 are in the correction
    assert_equal(got, want, atol=4e-5 if want.dtype == torch.float64 else 0.0, dtype=weight.dtype)
    assert all(torch.equal(a, b) for a, b in zip(before, parts)), (
        "your function changed a matrix of an adapter in place; other layers' matrices need it"
    )


@check("21.2", seconds=5)
def test_switch_refuses_dora(impl, seed):
    adapter = adapter_of(seed, 2, 4.0, 3, 5)
    dora = adapter_of(seed, 2, 4.0, 3, 5, use_dora=True)
    weight = torch.zeros(3, 5)
    for old, new in ((None, dora), (dora, None), (dora, adapter), (dora, dora)):
        try:
            got = note(impl(weight, old, new))
        except ValueError as error:
            assert "use_dora" in str(error), f"your ValueError says {error}; name use_dora"
            continue
        except Exception as error:
            kind = type(error).__name__
            raise AssertionError(
                f"your function raises {kind}: {error}; raise ValueError that names use_dora"
            ) from None
        raise AssertionError(
            f"your function returned a {type(got).__name__} for an adapter with use_dora; it "
            "cannot be merged by A and B alone, so raise ValueError"
        )


# ---------------------------------------------------------------- 21.3 the kernel


def corrected(base, x, a, b, row_slots, ranks, scaling):
    """Row by row, in float64."""
    out = base.double().clone()
    for row, slot in enumerate(row_slots.tolist()):
        if slot < 0:
            continue
        rank = int(ranks[slot])
        h = a[slot, :rank].double() @ x[row].double()
        out[row] += float(scaling[slot]) * (h @ b[slot, :rank].double())
    return out


def _rows(seed, **options):
    """Inputs of lora_rows and the result: copies, because an answer might write into them."""
    return copy.deepcopy(_rows_of(seed, **options))


@cache
def _rows_of(seed, row_slots, ranks, size, outputs, stale=float("nan")):
    g = torch.Generator().manual_seed(seed)
    num_slots, most = len(ranks), max(ranks)
    a, b = (torch.randn(num_slots, most, n, generator=g) for n in (size, outputs))
    for slot, rank in enumerate(ranks):
        a[slot, rank:] = stale
        b[slot, rank:] = stale
    rows = len(row_slots)
    inputs = dict(
        base=torch.randn(rows, outputs, generator=g),
        x=torch.randn(rows, size, generator=g),
        a=a,
        b=b,
        row_slots=torch.tensor(row_slots, dtype=torch.int32),
        ranks=torch.tensor(ranks, dtype=torch.int32),
        scaling=torch.tensor([0.5 + slot for slot in range(num_slots)]),
    )
    return inputs, corrected(**inputs)


ROW_CASES = {  # name: (options of _rows, why)
    "one_adapter": (dict(row_slots=(0, 0), ranks=(4,), size=16, outputs=16), "all rows alike"),
    "mixed": (
        dict(row_slots=(2, 0, 1, 2, 0), ranks=(4, 4, 4), size=16, outputs=16),
        "neighbours have different adapters",
    ),
    "without": (
        dict(row_slots=(-1, 1, -1, 0), ranks=(2, 2), size=16, outputs=16),
        "rows without an adapter stay",
    ),
    "no_adapter": (dict(row_slots=(-1, -1), ranks=(2,), size=16, outputs=16), "no row has one"),
    "ranks": (
        dict(row_slots=(0, 1, 2, 1), ranks=(8, 1, 3), size=16, outputs=16),
        "after a rank is NaN",
    ),
    "stale": (
        dict(row_slots=(0, 1, 0), ranks=(6, 2), size=16, outputs=16, stale=1.5),
        "after a rank are the numbers of an earlier adapter",
    ),
    "tails": (
        dict(row_slots=(1, 0), ranks=(3, 2), size=21, outputs=19),
        "sizes that are no multiples of a block",
    ),
    "wide": (dict(row_slots=(1, 0), ranks=(2, 2), size=48, outputs=40), "several blocks"),
    "rank_0": (
        dict(row_slots=(1, 0), ranks=(4, 0), size=16, outputs=16),
        "an adapter that leaves this layer alone",
    ),
}


@check("21.3", {case: why for case, (_, why) in ROW_CASES.items()}, seconds=10)
def test_rows(impl, case, seed):
    inputs, want = _rows(seed, **ROW_CASES[case][0])
    compare(impl, dict(inputs), want, atol=1e-4, dtype=torch.float32)


@check("21.3", seconds=5)
def test_rows_example(impl, seed):
    inputs = dict(
        base=torch.zeros(3, 1),
        x=torch.ones(3, 1),
        a=torch.tensor([[[2.0]], [[3.0]]]),
        b=torch.full((2, 1, 1), 10.0),
        row_slots=torch.tensor([1, -1, 0], dtype=torch.int32),
        ranks=torch.tensor([1, 1], dtype=torch.int32),
        scaling=torch.tensor([1.0, 0.5]),
    )
    compare(impl, inputs, torch.tensor([[15.0], [0.0], [20.0]]), atol=1e-5)


@check("21.3", seconds=10)
def test_rows_without_copies(impl, seed):
    inputs, _ = _rows(seed, row_slots=(0, 1) * 6, ranks=(8, 8), size=16, outputs=16)
    because = "read the adapter of a row where it is"
    assert_largest_tensor(12 * 8 * 16, because, impl, **inputs)


test_the_kernel_does_it = kernel_does_it(
    "21.3",
    lambda seed: _rows(seed, row_slots=(1, 0), ranks=(2, 3), size=16, outputs=16)[0],
    not_loaded=("base",),  # the wrapper's copy of it is
    may=("clone",),
)


# ---------------------------------------------------------------- 21.4 slots and prefixes


def told(events, num_slots, block_size):
    """The rule, by going back through what happened."""
    held, running, started, done = [None] * num_slots, [], [], []
    results, loads = [], 0
    for kind, adapter, prompt in events:
        if kind == "end":
            running.remove(adapter)
            continue
        if adapter not in held:
            if None in held:
                slot = held.index(None)
            else:
                idle = [name for name in held if name not in running]
                if not idle:
                    results.append(None)
                    continue
                latest = {name: at for at, name in enumerate(started)}
                slot = held.index(min(idle, key=latest.get))
            held[slot] = adapter
            loads += 1
        tokens = 0
        for end in range(block_size, len(prompt) + 1, block_size):
            if any(name == adapter and text[:end] == prompt[:end] for name, text in done):
                tokens = end
        running.append(adapter)
        started.append(adapter)
        done.append((adapter, prompt))
        results.append((held.index(adapter), tokens))
    return results, loads


def history(draws, adapters, num_slots, block_size, length=24, room=9):
    """Random events: every end belongs to a request that runs. room: requests at a time."""
    texts = [[draws.randrange(3) for _ in range(9)] for _ in range(2)]
    events, running = [], []
    for _ in range(length):
        if running and (len(running) >= room or draws.random() < 0.45):
            events.append(("end", running.pop(draws.randrange(len(running))), []))
            continue
        adapter = draws.choice(adapters)
        text = draws.choice(texts)[: draws.randint(1, 9)]
        events.append(("start", adapter, text))
        results, _ = told(events, num_slots, block_size)
        if results[-1] is not None:
            running.append(adapter)
    return dict(events=events, num_slots=num_slots, block_size=block_size)


def starts(text):
    """Events by words: "sql" starts with prompt [5, 6, 7, 8], "-sql" ends."""
    return [
        ("end", word[1:], []) if word[0] == "-" else ("start", word, [5, 6, 7, 8])
        for word in text.split()
    ]


SLOT_CASES = {  # name: (events, num_slots, why)
    "in_use": ("sql doc -sql doc", 1, "an adapter in use keeps its slot"),
    "two_users": ("sql sql -sql doc -sql doc", 1, "the first of two users leaves"),
    "least_recent": (
        "sql doc -sql -doc sql -sql test -test doc",
        2,
        "sql was started again after doc, so doc goes",
    ),
    "evicted": ("sql -sql doc -doc sql -sql doc", 1, "who was thrown out is loaded again"),
    "other_text": ("sql -sql doc -doc sql", 2, "the same prompt, another adapter"),
    "moved": (
        "sql doc -sql test -doc -test sql",
        2,
        "sql comes back in another slot, and its K and V are still there",
    ),
    "waits": ("sql doc -sql doc", 1, "who waited has computed nothing"),
}


@check("21.4", {case: why for case, (*_, why) in SLOT_CASES.items()}, seconds=5)
def test_slots(impl, case, seed):
    words, num_slots, _ = SLOT_CASES[case]
    inputs = dict(events=starts(words), num_slots=num_slots, block_size=2)
    compare(impl, inputs, want=told(**inputs))


@check("21.4", seconds=5)
def test_slots_example(impl, seed):
    events = [
        ("start", "sql", [5, 6, 7]),
        ("start", "doc", [5, 6, 7]),
        ("end", "sql", []),
        ("start", "doc", [5, 6, 7]),
        ("end", "doc", []),
        ("start", "sql", [5, 6, 9]),
    ]
    want = ([(0, 0), None, (0, 0), (0, 2)], 3)
    compare(impl, dict(events=events, num_slots=1, block_size=2), want=want)


def histories(seed, num_slots):
    """Arguments of run_slots, and what is right: copies, because an answer might write into
    them.
    """
    return copy.deepcopy(_histories(seed, num_slots))


@cache  # every wrong answer meets the same histories
def _histories(seed, num_slots):
    draws = random.Random(seed)
    found = [history(draws, "abcd", num_slots, draws.randint(1, 3)) for _ in range(30)]
    return [(inputs, told(**inputs)) for inputs in found]


@check("21.4", {"few": "many adapters, two slots", "enough": "a slot for each"}, seconds=10)
def test_histories(impl, case, seed):
    for inputs, want in histories(seed, 2 if case == "few" else 4):
        compare(impl, inputs, want=want)
