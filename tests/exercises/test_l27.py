"""Checks of lesson 27's exercises. Each exists because it rejects a named wrong answer
(wrong/l27.py).
"""

import math
import random

import torch
from torch.nn.functional import normalize

from tests.exercises.checking import (
    assert_equal,
    assert_same_work,
    call,
    check,
    compare,
    note,
)
from tests.exercises.kernel_work import kernel_does_it

# ---------------------------------------------------------------- 27.1 the recurrence


def tokens(seed, count=9, key_dim=4, value_dim=3, by_channel=True, dtype=torch.float64):
    """q, k of length 1, v, log_decay, beta and a state that is not zero."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return dict(
        q=normalize(draw(count, key_dim), dim=-1),
        k=normalize(draw(count, key_dim), dim=-1),
        v=draw(count, value_dim),
        log_decay=-draw(count, key_dim).exp() if by_channel else -0.3 * draw(count).exp(),
        beta=draw(count).sigmoid(),
        state=draw(key_dim, value_dim),
    )


def entry_by_entry(q, k, v, log_decay, beta, state):
    """The statement of 27.1, number by number, in float64. log_decay may also be [T]."""
    rows, columns = state.shape
    s = [[float(x) for x in row] for row in state]
    out = torch.zeros(v.shape, dtype=torch.float64)
    for t in range(len(q)):
        for i in range(rows):
            fade = math.exp(float(log_decay[t, i] if log_decay.ndim == 2 else log_decay[t]))
            s[i] = [fade * x for x in s[i]]
        read = [sum(s[i][j] * float(k[t, i]) for i in range(rows)) for j in range(columns)]
        for i in range(rows):
            for j in range(columns):
                s[i][j] += float(k[t, i]) * float(beta[t]) * (float(v[t, j]) - read[j])
        for j in range(columns):
            out[t, j] = sum(s[i][j] * float(q[t, i]) for i in range(rows))
    return out, torch.tensor(s, dtype=torch.float64)


DELTA_CASES = {  # name: (arguments of tokens, why)
    "one_token": (dict(count=1), "a decode step"),
    "prompt": (dict(), "each token meets what those before it left"),
    "square": (
        dict(key_dim=4, value_dim=4),
        "keys are rows and values columns, also if both are 4",
    ),
    "no_token": (dict(count=0), "an empty piece of a prompt leaves the state as it is"),
}


@check("27.1", {case: why for case, (_, why) in DELTA_CASES.items()})
def test_delta_values(impl, case, seed):
    inputs = tokens(seed, **DELTA_CASES[case][0])
    compare(impl, inputs, want=entry_by_entry(**inputs), atol=1e-9)


@check("27.1")
def test_delta_example(impl, seed):
    k = torch.eye(2, dtype=torch.float64)
    fade = torch.tensor([math.log(0.5), 0.0], dtype=torch.float64)
    inputs = dict(
        q=k,
        k=k,
        v=torch.tensor([[3.0, 3], [1, 1]], dtype=torch.float64),
        log_decay=fade.expand(2, 2),
        beta=torch.ones(2, dtype=torch.float64),
        state=torch.tensor([[4.0, 0], [0, 2]], dtype=torch.float64),
    )
    want = torch.tensor([[3.0, 3], [1, 1]]), torch.tensor([[1.5, 1.5], [1, 1]])
    compare(impl, inputs, want=tuple(x.double() for x in want), atol=1e-12)


@check("27.1")
def test_a_cut_changes_nothing(impl, seed):
    """A prompt in two pieces: the second begins with the state of the first."""
    inputs = tokens(seed, count=8)
    want = entry_by_entry(**inputs)
    state, found = inputs.pop("state"), []
    for rows in (slice(0, 3), slice(3, 8)):
        piece = {name: x[rows] for name, x in inputs.items()}
        out, state = call(impl, dict(**piece, state=state))
        found.append(out)
    assert_equal(torch.cat(found), want[0], atol=1e-9)
    assert_equal(state, want[1], atol=1e-9, label="the state after both pieces")


# ---------------------------------------------------------------- 27.2 a chunk

CHUNK_CASES = {  # name: (arguments of tokens, why)
    "one_token": (dict(count=1), "a chunk may have one token"),
    "chunk": (dict(count=16), "what a token writes depends on all tokens before it"),
    "more_values": (dict(count=7, key_dim=2, value_dim=5), "Dk, Dv and C are three numbers"),
}


@check("27.2", {case: why for case, (_, why) in CHUNK_CASES.items()})
def test_chunk_values(impl, case, seed):
    inputs = tokens(seed, by_channel=False, **CHUNK_CASES[case][0])
    compare(impl, inputs, want=entry_by_entry(**inputs), atol=1e-9)


@check("27.2")
def test_chunk_example(impl, seed):
    def column(*values):
        return torch.tensor(values, dtype=torch.float64)[:, None]

    inputs = dict(
        q=column(1.0, 1),
        k=column(1.0, 1),
        v=column(4.0, 6),
        log_decay=column(0.0, math.log(0.5))[:, 0],
        beta=column(0.5, 0.5)[:, 0],
        state=column(2.0),
    )
    compare(impl, inputs, want=(column(3.0, 3.75), column(3.75)), atol=1e-12)


@check("27.2", {"forgets": "exp(G_t − G_s) is infinite where s > t, and infinity times 0 is NaN"})
def test_chunk_that_forgets(impl, case, seed):
    inputs = tokens(seed, count=12, by_channel=False)
    inputs["log_decay"] = torch.full((12,), -200.0, dtype=torch.float64)
    compare(impl, inputs, want=entry_by_entry(**inputs), atol=1e-9)


@check("27.2", {"same_key": "64 equal keys: powers of A grow to 10¹⁷ before they cancel"})
def test_chunk_of_equal_keys(impl, case, seed):
    inputs = tokens(seed, count=64, by_channel=False)
    inputs["k"] = inputs["k"][:1].expand(64, -1).contiguous()
    inputs["beta"] = torch.ones(64, dtype=torch.float64)
    inputs["log_decay"] = torch.zeros(64, dtype=torch.float64)
    compare(impl, inputs, want=entry_by_entry(**inputs), atol=1e-9)


@check("27.2")
def test_chunk_has_no_loop(impl, seed):
    few, many = (tokens(seed, count=count, by_channel=False) for count in (4, 32))
    assert_same_work("for 32 tokens instead of 4", lambda: impl(**few), lambda: impl(**many))


# ---------------------------------------------------------------- 27.3 the convolution


def piece(seed, count=9, channels=3, width=4, state=True, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, channels, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(channels, width, generator=g, dtype=torch.float64).to(dtype)
    before = torch.randn(channels, width - 1, generator=g, dtype=torch.float64).to(dtype)
    return dict(x=x, weight=weight, state=before if state else None)


def by_definition(x, weight, state):
    """Number by number: the inputs so far, then a sum over the last W of them."""
    (count, channels), width = x.shape, weight.shape[1]
    y = torch.zeros_like(x)
    after = torch.zeros(channels, width - 1, dtype=x.dtype)
    for c in range(channels):
        before = [0.0] * (width - 1) if state is None else state[c].tolist()
        inputs = before + x[:, c].tolist()
        for t in range(count):
            y[t, c] = sum(float(weight[c, i]) * inputs[t + i] for i in range(width))
        after[c] = torch.tensor(inputs[len(inputs) - width + 1 :], dtype=x.dtype)
    return y, after


PIECE_CASES = {  # name: (arguments of piece, why)
    "whole": (dict(), "a piece that is longer than the state"),
    "start": (dict(state=False), "nothing was before: zeros"),
    "step": (dict(count=1), "a decode step keeps W − 2 inputs of the old state"),
    "short": (dict(count=2), "two tokens, three places: one old input stays"),
    "short_start": (dict(count=2, state=False), "and it may be a zero"),
    "as_long": (dict(count=3), "the state is exactly the piece"),
    "narrow": (dict(width=2), "a state of one input"),
    "one_channel": (dict(channels=1), "one channel"),
    "wide": (dict(width=7), "W is weight's, and may be more than 4"),
    "half_start": (
        dict(state=False, dtype=torch.float16),
        "y and the state have the dtype of x, zeros too",
    ),
}


@check("27.3", {case: why for case, (_, why) in PIECE_CASES.items()})
def test_piece_values(impl, case, seed):
    inputs = piece(seed, **PIECE_CASES[case][0])
    atol = 0.05 if inputs["x"].dtype == torch.float16 else 1e-9
    compare(impl, inputs, want=by_definition(**inputs), atol=atol)


@check("27.3")
def test_piece_example(impl, seed):
    inputs = dict(
        x=torch.tensor([[7.0]]),
        weight=torch.tensor([[1.0, 10, 100]]),
        state=torch.tensor([[5.0, 6]]),
    )
    compare(impl, inputs, want=(torch.tensor([[765.0]]), torch.tensor([[6.0, 7]])))


@check("27.3")
def test_any_cut(impl, seed):
    """Pieces of 1, 2, 1 and 5 tokens are one prompt."""
    inputs = piece(seed, state=False)
    want, state, found, begin = by_definition(**inputs), None, [], 0
    for count in (1, 2, 1, 5):
        part = dict(x=inputs["x"][begin : begin + count], weight=inputs["weight"], state=state)
        y, state = call(impl, part)
        found.append(y)
        begin += count
    assert_equal(torch.cat(found), want[0], atol=1e-9)
    assert_equal(state, want[1], atol=1e-9, label="the state after the last piece")


@check("27.3")
def test_the_state_has_memory_of_its_own(impl, seed):
    """The caller writes into x and into the old state afterwards."""
    for count in (9, 1):
        inputs = piece(seed, count=count)
        _, want = by_definition(**inputs)
        given = {name: x.clone() for name, x in inputs.items()}
        _, after = impl(**given)
        for x in given.values():
            x.fill_(1000.0)
        assert_equal(note(after), want, atol=1e-9, label="the state after its inputs changed")


@check("27.3")
def test_piece_has_no_loop(impl, seed):
    few, many = piece(seed, count=5, channels=2), piece(seed, count=40, channels=20)
    because = "for 8 times as many tokens and 10 times as many channels"
    assert_same_work(because, lambda: impl(**few), lambda: impl(**many))


# ---------------------------------------------------------------- 27.4 the kernel


def steps(seed, batch=3, heads=2, rows=4, columns=8, slots=None, num_slots=5):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g)

    slots = [4, 0, 3][:batch] if slots is None else slots
    return dict(
        x=draw(batch, heads, rows),
        dt=draw(batch, heads).exp(),
        a=-draw(heads).exp(),
        b=draw(batch, columns),
        c=draw(batch, columns),
        d=draw(heads),
        states=draw(num_slots, heads, rows, columns),
        slots=torch.tensor(slots, dtype=torch.int64),
    )


def row_by_row(x, dt, a, b, c, d, states, slots):
    """In float64, one sequence and head after the other."""
    after = states.double()
    y = torch.zeros(x.shape, dtype=torch.float64)
    for n, slot in enumerate(slots.tolist()):
        for h in range(x.shape[1]):
            fade, weight = math.exp(float(dt[n, h]) * float(a[h])), float(dt[n, h])
            added = weight * torch.outer(x[n, h].double(), b[n].double())
            after[slot, h] = fade * after[slot, h] + added
            y[n, h] = after[slot, h] @ c[n].double() + float(d[h]) * x[n, h].double()
    return y, after


STEP_CASES = {  # name: (arguments of steps, why)
    "one": (dict(batch=1, heads=1, slots=[2]), "one sequence, one head"),
    "batch": (dict(), "slots in any order"),
    "odd": (dict(rows=3, columns=5), "sizes that are no powers of two: masks"),
    "square": (dict(rows=8, columns=8), "rows are x, columns are b, also if both are 8"),
    "first_slots": (dict(slots=[0, 1, 2]), "slots that look like the rows"),
    "tall": (dict(rows=16, columns=2, heads=3), "more rows than columns"),
}


@check("27.4", {case: why for case, (_, why) in STEP_CASES.items()}, seconds=30)
def test_step_values(impl, case, seed):
    inputs = steps(seed, **STEP_CASES[case][0])
    compare(impl, inputs, want=row_by_row(**inputs), atol=1e-4, rtol=1e-4, dtype=torch.float32)


@check("27.4", seconds=30)
def test_step_example(impl, seed):
    inputs = dict(
        x=torch.tensor([[[3.0]]]),
        dt=torch.tensor([[0.5]]),
        a=torch.zeros(1),
        b=torch.tensor([[2.0, 4]]),
        c=torch.ones(1, 2),
        d=torch.tensor([10.0]),
        states=torch.tensor([[0.0, 0], [5, 6]]).view(2, 1, 1, 2),
        slots=torch.tensor([1]),
    )
    want = torch.tensor([[[50.0]]]), torch.tensor([[0.0, 0], [8, 12]]).view(2, 1, 1, 2)
    compare(impl, inputs, want=want, atol=1e-5)


test_the_kernel_does_it = kernel_does_it(
    "27.4",
    lambda seed: steps(seed, slots=[2, 0, 1], num_slots=3, rows=3),
    results=lambda got, inputs: {"y": got[0], "the states": got[1]},
    not_loaded=("states",),  # the wrapper's copy of them is
    may=("clone",),
)


# ---------------------------------------------------------------- 27.5 snapshots

SNAPSHOT_NAMES = ("prompt", "later", "intervals", "state_bytes", "token_s", "byte_s")
SNAPSHOT_CASES = {  # name: (arguments, the answer, why)
    "example": (
        (100, [(70, 90), (100, 100)], [50, 100], 10.0, 1.0, 0.5),
        (50, 90.0),
        "the docstring's",
    ),
    "never": ((100, [(30, 90)], [50, 100], 10.0, 1.0, 0.5), (None, 0.0), "nothing is long enough"),
    "no_one": (
        (100, [], [10, 100], 10.0, 1.0, 0.5),
        (None, 0.0),
        "no one comes: bytes for nothing",
    ),
    "free": ((100, [(99, 200)], [10, 1], 10.0, 1.0, 0.0), (1, 99.0), "bytes that cost nothing"),
    "dear": ((100, [(99, 200)], [1, 10, 50], 10.0, 1.0, 0.5), (50, 40.0), "each snapshot costs"),
    "equal": (
        (100, [(60, 200)], [30, 60, 20], 0.0, 1.0, 1.0),
        (60, 60.0),
        "of equal ones the larger, wherever it is in the list",
    ),
    "whole": (
        (64, [(64, 64)], [64, 32], 1.0, 1.0, 1.0),
        (32, 30.0),
        "one token is always computed",
    ),
    "longer": (
        (64, [(64, 500), (64, 65)], [64], 1.0, 1.0, 1.0),
        (64, 127.0),
        "the snapshot after the prompt's last token is of use to who goes on",
    ),
    "twice": (
        (100, [(60, 200), (60, 200)], [60], 10.0, 1.0, 1.0),
        (60, 110.0),
        "two requests that are alike save twice",
    ),
    "zero": ((100, [(50, 200)], [50], 25.0, 1.0, 1.0), (None, 0.0), "to save nothing is no gain"),
    "last": ((100, [(100, 200)], [30], 1.0, 1.0, 1.0), (30, 87.0), "3 snapshots of 30 are in 100"),
}


def by_listing(prompt, later, intervals, state_bytes, token_s, byte_s):
    """All snapshots of each interval, and for each request the longest one that it can use."""
    found = [(0.0, 0, None)]
    for interval in intervals:
        snapshots = [n for n in range(1, prompt + 1) if n % interval == 0]
        gain = -len(snapshots) * state_bytes * byte_s
        for common, length in later:
            usable = [n for n in snapshots if n <= common and n < length]
            gain += max(usable, default=0) * token_s
        if gain > 0:
            found.append((gain, interval, interval))
    gain, _, interval = max(found, key=lambda one: one[:2])
    return interval, gain


@check("27.5", {case: why for case, (*_, why) in SNAPSHOT_CASES.items()}, seconds=5)
def test_snapshots(impl, case, seed):
    arguments, want, _ = SNAPSHOT_CASES[case]
    assert by_listing(*arguments) == want
    compare(impl, dict(zip(SNAPSHOT_NAMES, arguments)), want=want, atol=1e-9)


@check("27.5", seconds=5)
def test_random_snapshots(impl, seed):
    """Numbers of which floating point makes no ties: tokens are whole, and so are costs."""
    draws = random.Random(seed)
    for _ in range(30):
        prompt = draws.randint(1, 200)
        later = [
            (draws.randint(0, prompt), draws.randint(prompt, 260))
            for _ in range(draws.randint(0, 4))
        ]
        intervals = draws.sample(range(1, 120), 4)
        arguments = prompt, later, intervals, float(draws.randint(0, 40)), 1.0, 0.25
        want = by_listing(*arguments)
        compare(impl, dict(zip(SNAPSHOT_NAMES, arguments)), want=want, atol=1e-9)
