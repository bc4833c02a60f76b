"""Checks of lesson 23's exercises. Each exists because it rejects a named wrong answer
(wrong/l23.py).
"""

import math
import tempfile
from functools import cache
from pathlib import Path

import torch

from lessons.l20_parallelism.processes.ranks import Ranks
from lessons.toolbox.kernels.order import program_order
from tests.exercises.checking import (
    assert_equal,
    assert_largest_tensor,
    call,
    check,
    compare,
    compare_ranks,
    note,
)
from tests.exercises.checks_l23_test import (  # noqa: F401 (pytest finds them here)
    test_calls_are_few_and_small,
    test_inputs_are_the_same_each_time,
    test_right_ones_are_accepted,
    test_wrong_ones_are_rejected,
)
from tests.exercises.kernel_work import kernel_does_it
from tests.exercises.ranks_apart import assert_apart

# ---------------------------------------------------------------- 23.1 the kernel

TILE = 16


def aligned(experts, num_experts, stale=0):
    """pairs and tile_experts of a list with the expert of each pair; −1: of another rank. stale:
    so many unused tiles at the end, with the numbers of all pairs in them, of this rank's too.
    """
    pairs, tiles = [], []
    for expert in range(num_experts):
        own = [pair for pair, wanted in enumerate(experts) if wanted == expert]
        for start in range(0, len(own), TILE):
            tile = own[start : start + TILE]
            pairs += tile + [len(experts)] * (TILE - len(tile))
            tiles.append(expert)
    pairs += [place % len(experts) for place in range(stale * TILE)]
    tiles += [-1] * stale
    return torch.tensor(pairs, dtype=torch.int32), torch.tensor(tiles, dtype=torch.int32)


@cache
def _rows(seed, tokens, top_k, num_experts, size, outputs, held=None, stale=0, lonely=False):
    """Inputs of expert_rows and the right rows. held: how many of the experts this rank has.
    lonely: all tokens want the same experts.
    """
    g = torch.Generator().manual_seed(seed)
    favour = torch.rand(1 if lonely else tokens, num_experts, generator=g).expand(tokens, -1)
    experts = favour.topk(top_k, dim=-1).indices.flatten().tolist()
    if held is not None:
        experts = [expert if expert < held else -1 for expert in experts]
    pairs, tile_experts = aligned(experts, num_experts, stale)
    inputs = dict(
        x=torch.randn(tokens, size, generator=g),
        weight=torch.randn(num_experts, outputs, size, generator=g),
        pairs=pairs,
        tile_experts=tile_experts,
        router=torch.rand(tokens, top_k, generator=g) + 0.1,
    )
    inputs["router"][1::2] *= -1  # any number may be a weight
    x, weight = inputs["x"].double(), inputs["weight"].double()
    want = torch.zeros(tokens * top_k, outputs, dtype=torch.float64)
    for pair, expert in enumerate(experts):
        if expert >= 0:
            token, place = divmod(pair, top_k)
            want[pair] = inputs["router"][token, place].double() * (weight[expert] @ x[token])
    return inputs, want


ROW_CASES = {  # name: (arguments of _rows after the seed, why)
    "one_choice": (dict(tokens=5, top_k=1, num_experts=3, size=16, outputs=16), "k = 1"),
    "top_2": (dict(tokens=6, top_k=2, num_experts=4, size=16, outputs=16), "as Mixtral"),
    "tails": (
        dict(tokens=4, top_k=2, num_experts=3, size=21, outputs=19),
        "sizes that are no multiples of a block",
    ),
    "wide": (dict(tokens=3, top_k=2, num_experts=3, size=40, outputs=36), "several blocks"),
    "two_tiles": (
        dict(tokens=20, top_k=2, num_experts=3, size=16, outputs=16, lonely=True),
        "an expert with more rows than a tile has",
    ),
    "of_another_rank": (
        dict(tokens=6, top_k=2, num_experts=4, size=16, outputs=16, held=2),
        "rows of other ranks' experts stay zero",
    ),
    "unused_tiles": (
        dict(tokens=6, top_k=2, num_experts=4, size=16, outputs=16, held=2, stale=2),
        "tiles that are not used hold old numbers",
    ),
}


@check("23.1", {case: why for case, (_, why) in ROW_CASES.items()}, seconds=10)
def test_rows(impl, case, seed):
    inputs, want = _rows(seed, **ROW_CASES[case][0])
    compare(impl, dict(inputs), want, atol=2e-4, dtype=torch.float32)


@check("23.1", seconds=10)
def test_rows_in_any_order(impl, seed):
    """Tiles that are not used come first once, and last once."""
    inputs, want = _rows(seed, **ROW_CASES["unused_tiles"][0])
    for backwards in (False, True):
        with program_order(seed, backwards):
            compare(impl, dict(inputs), want, atol=2e-4, dtype=torch.float32)


@check("23.1", seconds=5)
def test_rows_example(impl, seed):
    pairs, tile_experts = aligned([1, 0], 2)
    inputs = dict(
        x=torch.tensor([[1.0], [2.0]]),
        weight=torch.tensor([[[10.0]], [[100.0]]]),
        pairs=pairs,
        tile_experts=tile_experts,
        router=torch.tensor([[0.5], [1.0]]),
    )
    compare(impl, inputs, torch.tensor([[50.0], [20.0]]), atol=1e-4)


@check("23.1", seconds=30)
def test_rows_without_copies(impl, seed):
    inputs, _ = _rows(seed, tokens=6, top_k=2, num_experts=4, size=40, outputs=16)
    because = "read a row of x and an expert where they are stored"
    assert_largest_tensor(6 * 2 * 40, because, impl, **inputs)


@check("23.1", {"far": "the last expert is after number 2³¹ of the weights"}, seconds=30)
def test_rows_of_a_far_expert(impl, case, seed):
    """In a sparse file, which takes no more room than its values."""
    inputs, _ = _rows(seed, tokens=3, top_k=1, num_experts=1, size=16, outputs=16)
    count = 2**31 // (16 * 16) + 2
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "weight")
        numbers = torch.from_file(path, shared=True, size=count * 16 * 16, dtype=torch.float32)
        weight = numbers.view(count, 16, 16)
        weight[-1] = inputs["weight"][0]
        last = torch.tensor([count - 1], dtype=torch.int32)
        got = note(impl(**{**inputs, "weight": weight, "tile_experts": last}))
    want = inputs["router"] * (inputs["x"] @ inputs["weight"][0].T)
    assert_equal(got, want, atol=2e-4, dtype=torch.float32)


test_the_kernel_does_it = kernel_does_it(
    "23.1", lambda seed: _rows(seed, tokens=3, top_k=2, num_experts=3, size=16, outputs=16)[0]
)


# ---------------------------------------------------------------- 23.2 experts on other ranks


def routed(x, logits, experts, top_k, capacity, size):
    """The rule, pair by pair, in float64."""
    matrices = [matrix.double() for own in experts for matrix in own]
    taken, dropped, outs = [0] * len(matrices), 0, []
    for own_x, own_logits in zip(x, logits):
        out = torch.zeros_like(own_x, dtype=torch.float64)
        for token, row in enumerate(own_logits.double()):
            best = sorted(range(len(row)), key=lambda expert: -float(row[expert]))[:top_k]
            total = sum(math.exp(row[expert] - row[best[0]]) for expert in best)
            for expert in best:
                if taken[expert] == capacity:
                    dropped += 1
                    continue
                taken[expert] += 1
                weight = math.exp(row[expert] - row[best[0]]) / total
                out[token] += weight * (matrices[expert] @ own_x[token].double())
        outs.append(out)
    return outs, dropped


@cache
def _layer(seed, tokens, num_experts, top_k, capacity, hidden=3, skew=0.0):
    """Arguments of experts_on_ranks and what is right. tokens: of each rank. skew: how much all
    tokens prefer expert 0.
    """
    g = torch.Generator().manual_seed(seed)
    size = len(tokens)
    logits = [2 * torch.randn(count, num_experts, generator=g) for count in tokens]
    for own in logits:
        own[:, 0] += skew
    held = num_experts // size
    inputs = dict(
        x=[torch.randn(count, hidden, generator=g) for count in tokens],
        logits=logits,
        experts=[torch.randn(held, hidden, hidden, generator=g) for _ in tokens],
        top_k=top_k,
        capacity=capacity,
    )
    return inputs, routed(**inputs, size=size)


LAYER_CASES = {  # name: (arguments of _layer after the seed, why)
    "alone": (dict(tokens=(4,), num_experts=3, top_k=2, capacity=99), "one rank, weights sum to 1"),
    "one_choice": (dict(tokens=(3, 3), num_experts=4, top_k=1, capacity=99), "k = 1"),
    "two_ranks": (dict(tokens=(4, 3), num_experts=8, top_k=2, capacity=99), "as Mixtral"),
    "same_rank": (
        dict(tokens=(5, 4), num_experts=4, top_k=3, capacity=99),
        "two experts of a token live on one rank",
    ),
    "four_ranks": (
        dict(tokens=(2, 0, 3, 1), num_experts=8, top_k=2, capacity=99),
        "ranks with different numbers of tokens",
    ),
    "full": (
        dict(tokens=(4, 4), num_experts=4, top_k=2, capacity=3, skew=9.0),
        "expert 0 has room for 3 rows",
    ),
    "scarce": (
        dict(tokens=(9, 7), num_experts=4, top_k=3, capacity=3),
        "each expert has room for 3 rows, and more tokens want it, as any of their choices",
    ),
    "no_room": (dict(tokens=(2, 2), num_experts=2, top_k=2, capacity=0), "no row finds room"),
}


@check("23.2", {case: why for case, (_, why) in LAYER_CASES.items()}, seconds=5)
def test_layer(impl, case, seed):
    inputs, (want, dropped) = _layer(seed, **LAYER_CASES[case][0])
    compare_layer(impl, inputs, want, dropped)


def compare_layer(impl, inputs, want, dropped):
    ranks = Ranks(len(want))
    got = call(impl, dict(inputs, ranks=ranks))
    note(got)
    assert isinstance(got, tuple) and len(got) == 2, (
        f"your result is a {type(got).__name__}, expected a tuple: results, dropped rows"
    )
    compare_ranks(got[0], want)
    assert_equal(got[1], dropped, label="the number of dropped rows")
    names = {name for name, _ in ranks.calls}
    assert names == {"all_to_all"}, (
        f"your collectives are {sorted(names) or 'none'}; rows travel by all_to_all only"
    )


@check("23.2", seconds=5)
def test_layer_example(impl, seed):
    inputs = dict(
        x=[torch.tensor([[1.0]]), torch.tensor([[2.0]])],
        logits=[torch.tensor([[0.0, 5.0]])] * 2,
        experts=[torch.tensor([[[10.0]]]), torch.tensor([[[100.0]]])],
        top_k=1,
        capacity=1,
    )
    compare_layer(impl, inputs, [torch.tensor([[100.0]]), torch.tensor([[0.0]])], 1)


@check("23.2", seconds=5)
def test_layer_wire(impl, seed):
    """Each row travels to its experts and back, and nothing else does."""
    inputs, _ = _layer(seed, tokens=(6, 6), num_experts=4, top_k=2, capacity=99)
    ranks = Ranks(2)
    call(impl, dict(inputs, ranks=ranks))
    numbers = [count for _, count in ranks.calls]
    pairs, hidden = 6 * 2, 3
    # the answers of a rank are as many as the rows that came to it, at most all pairs
    most = pairs * (hidden + 1) + 2 * pairs * (hidden + 1)
    assert sum(numbers) <= most, (
        f"your collectives carry {sum(numbers)} numbers of a rank; at most {most} are needed"
    )


APART = {  # name: (what, other entries, whether a rank sends something else, why)
    "x": ("x", lambda own: 2 * own + 1, True, "rows are those of the rank's own tokens"),
    "experts": ("the experts", lambda own: own + 1, True, "a rank runs its own experts"),
    "logits": ("the logits", lambda own: 1.5 * own, False, "a rank weighs its own tokens' rows"),
}


@check("23.2", {case: why for case, (*_, why) in APART.items()}, seconds=5)
def test_ranks_are_apart(impl, case, seed):
    inputs, _ = _layer(seed, tokens=(6, 5, 4), num_experts=6, top_k=4, capacity=99)
    what, other, works, _ = APART[case]

    def change(rank):
        entries = list(inputs[case])
        entries[rank] = other(entries[rank])
        return {**inputs, case: entries}

    assert_apart(impl, inputs, 3, change, what=what, results=lambda got: got[0], works=works)


# ---------------------------------------------------------------- 23.4 dispatch and combine


@cache
def _spread(seed, tokens, num_experts, top_k, hidden=3, favourite=None):
    """Arguments of once_for_each_rank, and what is right, pair by pair in float64. favourite: a
    rank whose experts all tokens choose first.
    """
    g = torch.Generator().manual_seed(seed)
    size = len(tokens)
    held = num_experts // size
    merit = [torch.rand(count, num_experts, generator=g) for count in tokens]
    if favourite is not None:
        for own in merit:
            own[:, favourite * held : (favourite + 1) * held] += 1
    inputs = dict(
        x=[torch.randn(count, hidden, generator=g) for count in tokens],
        weights=[torch.randn(count, top_k, generator=g) for count in tokens],
        chosen=[own.topk(top_k).indices for own in merit],
        experts=[torch.randn(held, hidden, hidden, generator=g) for _ in tokens],
    )
    matrices = [matrix.double() for own in inputs["experts"] for matrix in own]
    want = []
    for x, weights, chosen in zip(inputs["x"], inputs["weights"], inputs["chosen"]):
        out = torch.zeros_like(x, dtype=torch.float64)
        for token, places in enumerate(chosen.tolist()):
            for place, expert in enumerate(places):
                out[token] += weights[token, place].double() * (
                    matrices[expert] @ x[token].double()
                )
        want.append(out)
    return inputs, want


SPREAD_CASES = {  # name: (arguments of _spread after the seed, why)
    "alone": (dict(tokens=(4,), num_experts=3, top_k=2), "one rank"),
    "one_choice": (dict(tokens=(3, 4), num_experts=6, top_k=1), "k = 1"),
    "same_rank": (
        dict(tokens=(6, 5), num_experts=8, top_k=3),
        "several experts of a token live on one rank",
    ),
    "all_experts": (dict(tokens=(3, 2), num_experts=4, top_k=4), "each token wants all experts"),
    "four_ranks": (
        dict(tokens=(3, 0, 5, 1), num_experts=8, top_k=3),
        "ranks with different numbers of tokens",
    ),
    "one_gets_all": (
        dict(tokens=(3, 3, 3), num_experts=9, top_k=3, favourite=1),
        "all experts of all tokens are on one rank",
    ),
}


@check("23.4", {case: why for case, (_, why) in SPREAD_CASES.items()}, seconds=5)
def test_spread(impl, case, seed):
    inputs, want = _spread(seed, **SPREAD_CASES[case][0])
    compare_spread(impl, inputs, want)


def compare_spread(impl, inputs, want):
    ranks = Ranks(len(want))
    compare_ranks(call(impl, dict(inputs, ranks=ranks)), want)
    names = {name for name, _ in ranks.calls}
    assert names == {"all_to_all"} or (len(want) == 1 and not names), (
        f"your collectives are {sorted(names) or 'none'}; rows travel by all_to_all only"
    )


@check("23.4", seconds=5)
def test_spread_example(impl, seed):
    inputs = dict(
        x=[torch.tensor([[2.0]]), torch.zeros(0, 1)],
        weights=[torch.tensor([[0.5, 0.25]]), torch.zeros(0, 2)],
        chosen=[torch.tensor([[3, 2]]), torch.zeros(0, 2, dtype=torch.int64)],
        experts=[torch.tensor([[[10.0]], [[20.0]]]), torch.tensor([[[100.0]], [[200.0]]])],
    )
    compare_spread(impl, inputs, [torch.tensor([[250.0]]), torch.zeros(0, 1)])


WIRES = {  # name: (arguments of _spread after the seed, why)
    "several_on_a_rank": (
        dict(tokens=(9, 9), num_experts=8, top_k=4, hidden=40),
        "a row goes once to each rank of its experts",
    ),
    "few_ranks_of_many": (
        dict(tokens=(6, 6, 6, 6, 6, 6), num_experts=6, top_k=2, hidden=40),
        "a row goes to no rank without its experts",
    ),
}


@check("23.4", {case: why for case, (_, why) in WIRES.items()}, seconds=5)
def test_spread_wire(impl, case, seed):
    """What goes to a rank and comes back is a row for each token that has experts there."""
    inputs, _ = _spread(seed, **WIRES[case][0])
    size, hidden, top_k = len(inputs["x"]), 40, inputs["chosen"][0].shape[1]
    held = len(inputs["experts"][0])
    owners = [chosen // held for chosen in inputs["chosen"]]
    goes = [[int((own == other).any(-1).sum()) for other in range(size)] for own in owners]
    ranks = Ranks(size)
    call(impl, dict(inputs, ranks=ranks))
    sent = max(map(sum, goes)) * (hidden + 2 * top_k)
    returned = max(map(sum, zip(*goes))) * hidden
    numbers = sum(count for _, count in ranks.calls)
    assert numbers <= sent + returned, (
        f"your collectives carry {numbers} numbers of a rank; {sent} are needed for its rows with "
        f"their experts and weights, and {returned} for the sums that it sends back"
    )


SPREAD_APART = {  # name: (what, other entries, why)
    "x": ("x", lambda own: 2 * own + 1, "rows are those of the rank's own tokens"),
    "experts": ("the experts", lambda own: own + 1, "a rank runs its own experts"),
    "weights": ("the weights", lambda own: 1.5 * own, "weights travel beside the rows"),
}


@check("23.4", {case: why for case, (*_, why) in SPREAD_APART.items()}, seconds=5)
def test_spread_ranks_are_apart(impl, case, seed):
    inputs, _ = _spread(seed, tokens=(6, 5, 4), num_experts=6, top_k=4)
    what, other, _ = SPREAD_APART[case]

    def change(rank):
        entries = list(inputs[case])
        entries[rank] = other(entries[rank])
        return {**inputs, case: entries}

    assert_apart(impl, inputs, 3, change, what=what)
