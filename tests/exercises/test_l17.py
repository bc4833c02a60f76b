"""Checks of lesson 17's exercises. Each exists because it rejects a named wrong answer
(wrong/l17.py).
"""

import math
import random

import torch

from tests.exercises.checking import assert_same_work, check, compare
from tests.exercises.test_l16 import first_above


def random_parents(draws: random.Random, nodes: int) -> list[int]:
    """A random tree."""
    return [-1] + [draws.randrange(node) for node in range(1, nodes)]


# ---------------------------------------------------------------- 17.1 predict


def numbers_of(parents, held):
    """The four answers, by walking up from every node."""
    ways = []
    for node in range(len(parents)):
        way = [node]
        while parents[way[-1]] >= 0:
            way.append(parents[way[-1]])
        ways.append(way)
    positions = [held + len(way) - 1 for way in ways]
    slots = list(range(held, held + len(parents)))
    entries = len(parents) * held + sum(map(len, ways))
    return positions, slots, entries, max(map(len, ways))


TREE_CASES = {  # name: (parents, held, why)
    "example": ([-1, 0, 0, 1], 10, "the docstring's"),
    "chain": ([-1, 0, 1, 2], 7, "lesson 16 is a tree, too"),
    "root_alone": ([-1], 3, "a plain step"),
    "siblings": ([-1, 0, 0, 0, 0], 5, "all at one position, in slots of their own"),
    "fresh": ([-1, 0, 0, 1, 1], 0, "nothing was held"),
}


@check("17.1", {case: why for case, (*_, why) in TREE_CASES.items()}, seconds=5)
def test_numbers(impl, case, seed):
    parents, held, _ = TREE_CASES[case]
    compare(impl, dict(parents=parents, held=held), want=numbers_of(parents, held))


@check("17.1", seconds=5)
def test_random_trees(impl, seed):
    draws = random.Random(seed)
    for _ in range(20):
        parents, held = random_parents(draws, draws.randint(1, 12)), draws.randint(0, 100)
        compare(impl, dict(parents=parents, held=held), want=numbers_of(parents, held))


# ---------------------------------------------------------------- 17.2 Medusa's heads


def guessed(hidden, weights, biases, lm_head, tokens):
    """Position by position."""
    guesses = torch.zeros(len(weights), len(hidden), dtype=torch.int64)
    losses = torch.zeros(len(weights), dtype=hidden.dtype)
    for i in range(len(weights)):
        surprise = []
        for t in range(len(hidden)):
            inner = weights[i] @ hidden[t] + biases[i]
            x = hidden[t] + inner / (1 + torch.exp(-inner))
            logits = lm_head @ x
            guesses[i, t] = int(logits.argmax())
            if t + i + 2 < len(tokens):
                p = torch.exp(logits - logits.max())
                surprise.append(-math.log(float(p[tokens[t + i + 2]] / p.sum())))
        losses[i] = sum(surprise) / len(surprise)
    return guesses, losses


def heads_for(seed: int, count: int, length: int = 9, size: int = 6, vocab_size: int = 11) -> dict:
    """Arguments of medusa: random heads over a random text."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return dict(
        hidden=normal(length, size),
        weights=normal(count, size, size),
        biases=normal(count, size),
        lm_head=normal(vocab_size, size),
        tokens=torch.randint(vocab_size, (length,), generator=generator),
    )


@check("17.2", seconds=5)
def test_heads_example(impl, seed):
    inputs = dict(
        hidden=torch.tensor([[1.0, 0], [0, 1], [0, 1]], dtype=torch.float64),
        weights=torch.zeros(1, 2, 2, dtype=torch.float64),
        biases=torch.zeros(1, 2, dtype=torch.float64),
        lm_head=torch.eye(2, dtype=torch.float64),
        tokens=torch.tensor([0, 1, 1]),
    )
    loss = torch.tensor([math.log(1 + math.e)], dtype=torch.float64)
    compare(impl, inputs, want=(torch.tensor([[0, 1, 1]]), loss), atol=1e-9)


@check("17.2", {"one": "one head", "four": "each has weights of its own"}, seconds=10)
def test_heads(impl, case, seed):
    count = 1 if case == "one" else 4
    for at in range(5):
        inputs = heads_for(5 * seed + at, count)
        compare(impl, inputs, want=guessed(**inputs), atol=1e-9)


@check("17.2", {"high": "logits near 1000", "low": "logits near -1000"}, seconds=5)
def test_heads_far_from_zero(impl, case, seed):
    """Only the distances between logits count; exp of the logits themselves is inf, or 0."""
    inputs = heads_for(seed, count=2)
    inputs["hidden"][:, 0], inputs["lm_head"][:, 0] = 50.0, 20.0 if case == "high" else -20.0
    inputs["weights"][:, 0], inputs["biases"][:, 0] = 0.0, 0.0
    inputs["weights"][:, :, 0] = 0.0
    compare(impl, inputs, want=guessed(**inputs), atol=1e-9)


@check("17.2", seconds=5)
def test_heads_of_a_short_text(impl, seed):
    """The last head has a single token to learn from."""
    inputs = heads_for(seed, count=3, length=5)
    compare(impl, inputs, want=guessed(**inputs), atol=1e-9)


# ---------------------------------------------------------------- 17.3 find the bugs


def walked(p, q, parents, tokens, u) -> list[int]:
    """The rule in plain numbers."""
    emitted, node = [], 0
    while True:
        over = [float(x) for x in p[node]]
        share = [float(x) for x in q[node]]
        children = [child for child in range(len(parents)) if parents[child] == node]
        stayed = None
        for child in children:
            token = tokens[child]
            if float(u[child, 0]) * share[token] < over[token]:
                stayed = child
                break
            over = [max(0.0, a - b) for a, b in zip(over, share)]
            total = sum(over)
            over = [a / total for a in over]
            share[token] = 0.0
            total = sum(share)
            share = [b / total if total > 0 else 0.0 for b in share]
        if stayed is None:
            weights = torch.tensor(over, dtype=torch.float64)
            return [*emitted, first_above(weights, float(u[node, 1]))]
        emitted.append(tokens[stayed])
        node = stayed


def drawn_tree(draws: random.Random, parents: list[int], vocab_size: int = 6) -> dict:
    """Arguments of verify_drawn: siblings drawn without replacement, NaN in q after leaves."""
    generator = torch.Generator().manual_seed(draws.randrange(2**31))
    count = len(parents)

    def rows():
        logits = 1.5 * torch.randn(count, vocab_size, generator=generator, dtype=torch.float64)
        return logits.softmax(-1)

    p, q, tokens = rows(), rows(), [vocab_size + 3] + [0] * (count - 1)
    for node in range(count):
        children = [child for child in range(count) if parents[child] == node]
        if not children:
            q[node] = torch.nan
            continue
        drawn = torch.multinomial(q[node], len(children), generator=generator)
        for child, token in zip(children, drawn.tolist()):
            tokens[child] = token
    u = torch.rand(count, 2, generator=generator, dtype=torch.float64)
    # Often near 1, so that several siblings are asked.
    u[:, 0] = 1 - (1 - u[:, 0]) * (0.4 if draws.random() < 0.5 else 1)
    return dict(p=p, q=q, parents=parents, tokens=tokens, u=u)


SHAPES = {  # name: (parents, why)
    "root_alone": ([-1], "no children: drawn from p"),
    "chain": ([-1, 0, 1, 2], "lesson 16's rule"),
    "siblings": ([-1, 0, 0, 0], "what is left of p and of q"),
    "tree": ([-1, 0, 0, 0, 1, 1, 2, 4], "all of it"),
}


@check("17.3", seconds=5)
def test_verification_example(impl, seed):
    p = torch.tensor([[0.2, 0.2, 0.6]] * 3, dtype=torch.float64)
    q = torch.tensor([[0.5, 0.25, 0.25]] * 3, dtype=torch.float64)
    u = torch.tensor([[0.0, 0.5], [0.9, 0.1], [0.9, 0.1]], dtype=torch.float64)
    compare(impl, dict(p=p, q=q, parents=[-1, 0, 0], tokens=[9, 0, 1], u=u), want=[2])


@check("17.3", {shape: why for shape, (_, why) in SHAPES.items()}, seconds=10)
def test_verification(impl, case, seed):
    draws = random.Random(seed)
    for _ in range(80):
        inputs = drawn_tree(draws, SHAPES[case][0])
        compare(impl, inputs, want=walked(**inputs))


@check("17.3", {"0": "u = 0", "1": "u just below 1"}, seconds=10)
def test_verification_at_the_ends(impl, case, seed):
    """Numbers at the ends of [0, 1), and drafted tokens that the target never takes."""
    draws, end = random.Random(seed), 0.0 if case == "0" else 1 - 2**-53
    for _ in range(30):
        inputs = drawn_tree(draws, SHAPES["tree"][0])
        p, tokens = inputs["p"], inputs["tokens"]
        for node, parent in enumerate(inputs["parents"]):
            if node and draws.random() < 0.4:
                p[parent, tokens[node]] = 0
        for node in range(len(p)):
            p[node, draws.randrange(p.shape[1])] += 0.5  # never all 0
            p[node] /= p[node].sum()
        inputs["u"][:, draws.randrange(2)] = end
        compare(impl, inputs, want=walked(**inputs))


@check("17.3", seconds=5)
def test_more_siblings_than_the_draft_has_tokens(impl, seed):
    """q has two tokens, and both were drawn: nothing is left of it, and p is still a
    distribution.
    """
    p = torch.tensor([[0.1, 0.2, 0.7]] * 3, dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5, 0.0]] * 3, dtype=torch.float64)
    u = torch.tensor([[0.0, 0.9], [0.95, 0.0], [0.95, 0.0]], dtype=torch.float64)
    compare(impl, dict(p=p, q=q, parents=[-1, 0, 0], tokens=[9, 0, 1], u=u), want=[2])


# ---------------------------------------------------------------- 17.4 one path


def kept(cache, block_table, block_size, held, path, tokens, last, left, stop):
    """Row by row, from a copy."""
    after = cache.clone()

    def slot(place):
        return block_table[place // block_size] * block_size + place % block_size

    for place, node in enumerate(path):
        after[slot(held + place)] = cache[slot(held + node)]
    emitted = []
    for token in [tokens[node] for node in path[1:]] + [last]:
        if len(emitted) < left and not (emitted and emitted[-1] in stop):
            emitted.append(token)
    return after, held + len(emitted), emitted


def pass_of(
    draws: random.Random, left: int = 99, stops: str = "", contiguous: bool = False
) -> dict:
    """Arguments of keep_path. stops: "one" token of the path, "several", "late": the one after
    the path, or "elsewhere": the root's and those of nodes that do not stay.
    """
    block_size, held, nodes = draws.randint(1, 4), draws.randint(0, 9), draws.randint(3, 9)
    blocks = -(-(held + nodes) // block_size)
    table = draws.sample(range(blocks + 3), blocks)
    if contiguous:
        table = list(range(blocks))
    path = [0, *sorted(draws.sample(range(1, nodes), draws.randint(0, nodes - 1)))]
    tokens = draws.sample(range(100), nodes)
    last = draws.randint(100, 120)
    emitted = [*(tokens[node] for node in path[1:]), last]
    stop = {
        "one": {draws.choice(emitted)},
        "several": set(draws.sample(emitted, min(3, len(emitted)))),
        "late": {last},
        "elsewhere": {tokens[node] for node in range(nodes) if node not in path[1:]},
    }
    generator = torch.Generator().manual_seed(draws.randrange(2**31))
    return dict(
        cache=torch.randn((blocks + 3) * block_size, 4, generator=generator, dtype=torch.float64),
        block_table=table,
        block_size=block_size,
        held=held,
        path=path,
        tokens=tokens,
        last=last,
        left=left,
        stop={999} | stop.get(stops, set()),
    )


PATH_CASES = {  # name: (options of pass_of, why)
    "contiguous": (dict(contiguous=True), "the path moves together"),
    "paged": (dict(), "places become slots through the table"),
    "nearly_done": (dict(left=2), "no sequence emits more than is left"),
    "stop": (dict(stops="one"), "nothing comes after a stop token"),
    "stops": (dict(stops="several", left=3), "whichever of them comes first"),
    "stop_too_late": (
        dict(stops="late", left=2),
        "a pass that has emitted all that is left does not reach the stop token",
    ),
    "stops_elsewhere": (
        dict(stops="elsewhere"),
        "the root was emitted before, and nodes that do not stay are not emitted",
    ),
}


@check("17.4", seconds=5)
def test_path_example(impl, seed):
    cache = torch.arange(16, dtype=torch.float64).view(8, 2)
    for stop, left in ((set(), 9), ({9}, 9), (set(), 1)):
        inputs = dict(
            cache=cache,
            block_table=[3, 0, 1],
            block_size=2,
            held=1,
            path=[0, 2],
            tokens=[7, 8, 9],
            last=5,
            left=left,
            stop=stop,
        )
        compare(impl, inputs, want=kept(**inputs))


@check("17.4", {case: why for case, (_, why) in PATH_CASES.items()}, seconds=10)
def test_path(impl, case, seed):
    draws = random.Random(seed)
    for _ in range(25):
        inputs = pass_of(draws, **PATH_CASES[case][0])
        compare(impl, inputs, want=kept(**inputs))


def path_of(count: int) -> dict:
    """A long path through a cache of 256 dimensions."""
    cache = torch.randn(4 * count, 256, dtype=torch.float64)
    inputs = dict(cache=cache, block_table=list(range(count)), block_size=4, held=3)
    path = [0, *range(2, 2 * count, 2)]
    tokens = list(range(2 * count))
    return inputs | dict(path=path, tokens=tokens, last=1, left=999, stop=set())


@check("17.4")
def test_no_loop_over_slots_or_dimensions(impl, seed):
    """A path of 40 nodes takes as many operations as one of 10."""
    few, many = path_of(10), path_of(40)
    assert_same_work(
        "one indexing moves all rows of a path", lambda: impl(**few), lambda: impl(**many)
    )
