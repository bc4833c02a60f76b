"""Checks of 23.3, a test that the learner writes: which implementations it has to accept, which to
reject, and how it may try them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from solutions.l23_test_of_a_kernel import planted_rows
from tests.exercises.checking import check, note

TILE = 16
MOST_CALLS, MOST_NUMBERS = 20, 100_000


def tiles_of(pairs: Tensor, tile_experts: Tensor, num_pairs: int):
    """(expert, its pairs) of each tile that is used."""
    for expert, places in zip(tile_experts.tolist(), pairs.view(-1, TILE).long()):
        if expert >= 0:
            yield expert, places[places < num_pairs]


def right_rows(x, weight, pairs, tile_experts, router):
    """Tile by tile, in float32."""
    out = torch.zeros(router.numel(), weight.shape[1])
    for expert, own in tiles_of(pairs, tile_experts, len(out)):
        rows = x[own // router.shape[1]] @ weight[expert].T
        out[own] = rows * router.flatten()[own, None]
    return out


def added_backwards(x, weight, pairs, tile_experts, router):
    """From the last column to the first, and from the last tile."""
    tiles = pairs.view(-1, TILE).flip(0).flatten()
    return right_rows(x.flip(1), weight.flip(2), tiles, tile_experts.flip(0), router)


def rounded_a_little(*inputs):
    """As a kernel that adds in another order would, at most."""
    out = right_rows(*inputs)
    signs = 1 - 2 * (torch.arange(out.numel()) % 2).view_as(out)
    return out + 5e-5 * out.abs().max() * signs


# ---------------------------------------------------------------- wrong ones


def row_of_the_pair(x, weight, pairs, tile_experts, router):
    picked = torch.arange(router.numel()) % len(x)
    return right_rows(x[picked], weight, pairs, tile_experts, router.flatten()[:, None])


def first_columns(x, weight, *others):
    return right_rows(x[:, :TILE], weight[:, :, :TILE], *others)


def no_tail_of_columns(x, weight, *others):
    whole = max(TILE, x.shape[1] // TILE * TILE)
    return right_rows(x[:, :whole], weight[:, :, :whole], *others)


def no_tail_of_outputs(x, weight, *others):
    out = right_rows(x, weight, *others)
    out[:, max(TILE, out.shape[1] // TILE * TILE) :] = 0
    return out


def one_block_of_outputs(*inputs):
    out = right_rows(*inputs)
    out[:, TILE:] = 0
    return out


def first_tile_of_an_expert(x, weight, pairs, tile_experts, router):
    again = tile_experts[1:] == tile_experts[:-1]
    once = torch.where(torch.cat([again.new_zeros(1), again]), -1, tile_experts)
    return right_rows(x, weight, pairs, once, router)


def tile_is_the_expert(x, weight, pairs, tile_experts, router):
    experts = torch.arange(len(tile_experts)).clamp(max=len(weight) - 1)
    return right_rows(x, weight, pairs, torch.where(tile_experts < 0, -1, experts), router)


def unused_tiles_run(x, weight, pairs, tile_experts, router):
    return right_rows(x, weight, pairs, tile_experts.clamp(min=0), router)


def first_choice_counts(x, weight, pairs, tile_experts, router):
    first = router[:, :1].expand_as(router).contiguous()
    return right_rows(x, weight, pairs, tile_experts, first)


def router_left_out(x, weight, pairs, tile_experts, router):
    return right_rows(x, weight, pairs, tile_experts, torch.ones_like(router))


def transposed(x, weight, *others):
    is_square = weight.shape[1] == weight.shape[2]
    return right_rows(x, weight.mT if is_square else weight, *others)


def nan_elsewhere(x, weight, pairs, tile_experts, router):
    out = right_rows(x, weight, pairs, tile_experts, router)
    served = [own for _, own in tiles_of(pairs, tile_experts, len(out))]
    is_served = torch.zeros(len(out), dtype=torch.bool)
    is_served[torch.cat(served) if served else []] = True
    return out.masked_fill(~is_served[:, None], torch.nan)


def unused_tiles_store_zeros(x, weight, pairs, tile_experts, router):
    out = right_rows(x, weight, pairs, tile_experts, router)
    old = pairs.view(-1, TILE)[tile_experts < 0].flatten().long()
    out[old[old < len(out)]] = 0
    return out


def one_element(*inputs):
    out = right_rows(*inputs)
    row = int(out.abs().amax(1).nonzero()[-1]) if out.any() else -1
    out[row, -1] += 0.05 * out.abs().max()
    return out


def one_element_of_many(*inputs):
    out = right_rows(*inputs)
    if out.numel() >= 256 and out.any():
        row = int(out.abs().amax(1).nonzero()[0])
        out[row, 0] -= 0.05 * out.abs().max()
    return out


def with_a_dimension(*inputs):
    return right_rows(*inputs)[None]


def rows_moved(*inputs):
    return right_rows(*inputs).roll(1, 0)


def one_percent(*inputs):
    return 1.01 * right_rows(*inputs)


def in_float64(*inputs):
    return right_rows(*inputs).double()


def with_choices_apart(*inputs):
    return right_rows(*inputs).unflatten(0, inputs[4].shape)


def spoils_its_inputs(x, weight, pairs, tile_experts, router):
    router.zero_()
    return right_rows(x, weight, pairs, tile_experts, router)


RIGHT = {  # name: (implementation, why)
    "plain": (right_rows, "tile by tile in float32"),
    "backwards": (added_backwards, "the same, added from the last column on"),
    "rounded": (rounded_a_little, "off by half of what is allowed"),
}
WRONG = {
    "planted": (planted_rows, "planted_rows"),
    "row_of_the_pair": (row_of_the_pair, "pair p reads row p of x: only k above 1 shows it"),
    "first_columns": (first_columns, "columns of x after the first 16 are left out"),
    "no_tail_of_columns": (no_tail_of_columns, "what is left of K after whole blocks is left out"),
    "no_tail_of_outputs": (no_tail_of_outputs, "what is left of N after whole blocks is 0"),
    "one_block_of_outputs": (one_block_of_outputs, "outputs after the first 16 are 0"),
    "first_tile": (first_tile_of_an_expert, "an expert's second tile does not run"),
    "tile_is_the_expert": (tile_is_the_expert, "tile i runs expert i"),
    "unused_tiles_run": (unused_tiles_run, "tiles of expert -1 run expert 0, on old numbers"),
    "first_choice": (first_choice_counts, "all choices of a token get the weight of its first"),
    "router_left_out": (router_left_out, "the router's weights are left out"),
    "transposed": (transposed, "an expert is read transposed, which K = N alone allows"),
    "nan_elsewhere": (nan_elsewhere, "rows of other ranks' experts are NaN, not 0"),
    "unused_tiles_store": (
        unused_tiles_store_zeros,
        "tiles of expert -1 store zeros, into rows of pairs that other tiles have served",
    ),
    "one_element": (one_element, "one element is off, by 5 % of the largest"),
    "one_element_of_many": (
        one_element_of_many,
        "one element of a large result is too small, by 5 % of the largest: a mean hides it",
    ),
    "with_a_dimension": (with_a_dimension, "the result is [1, T · k, N]"),
    "rows_moved": (rows_moved, "row p holds what belongs into row p - 1: the sum is right"),
    "one_percent": (one_percent, "all values are 1 % too large"),
    "in_float64": (in_float64, "the result is float64"),
    "with_choices_apart": (with_choices_apart, "the result is [T, k, N]"),
    "spoils": (spoils_its_inputs, "it writes 0 into the router's weights, and uses them"),
}


class Tried:
    """An implementation that notes what it is given, and complains of what 23.1 excludes."""

    def __init__(self, implementation: Callable[..., Tensor]):
        self.implementation = implementation
        self.calls: list[tuple[Tensor, ...]] = []
        self.complaint = ""

    def __call__(self, x, weight, pairs, tile_experts, router):
        inputs = (x, weight, pairs, tile_experts, router)
        self.calls.append(tuple(tensor.clone() for tensor in inputs))
        self.complaint = self.complaint or complaint_of(*inputs)
        if self.complaint:
            raise ValueError(self.complaint)
        return self.implementation(*inputs)


def complaint_of(x, weight, pairs, tile_experts, router) -> str:
    """What is not as 23.1 says; "" if all is."""
    if not all(part.dtype == torch.float32 for part in (x, weight, router)):
        return "x, weight and router are float32"
    if x.dim() != 2 or weight.dim() != 3 or router.dim() != 2:
        return "x is [T, K], weight [E, N, K] and router [T, k]"
    if len(router) != len(x) or weight.shape[2] != x.shape[1]:
        return "x is [T, K], weight [E, N, K] and router [T, k]: their sizes do not fit"
    if len(pairs) != TILE * len(tile_experts):
        return "pairs has 16 places for each tile"
    if pairs.dtype != torch.int32 or tile_experts.dtype != torch.int32:
        return "pairs and tile_experts are int32"
    if len(tile_experts) and int(tile_experts.max()) >= len(weight):
        return "tile_experts names an expert that weight has not"
    used = [own for _, own in tiles_of(pairs, tile_experts, router.numel())]
    numbers = torch.cat(used) if used else torch.empty(0)
    if len(numbers) != len(numbers.unique()):
        return "a pair is in two places of tiles that are used"
    return ""


def tried(impl: Callable, implementation: Callable, why: str) -> tuple[str | None, Tried]:
    """What a learner's test says of an implementation: its AssertionError, None if it accepts."""
    this, said = Tried(implementation), None
    try:
        impl(this)
    except AssertionError as error:
        said = str(error) or "an AssertionError without a message"
    except ValueError:
        if not this.complaint:
            raise
    assert not this.complaint, f"your test gives inputs that 23.1 excludes: {this.complaint}"
    note(said is None)
    return said, this


@check("23.3", {case: why for case, (_, why) in RIGHT.items()}, seconds=20)
def test_right_ones_are_accepted(impl, case, seed):
    said, this = tried(impl, *RIGHT[case])
    assert said is None, f"your test rejects an implementation that is right: {said}"
    assert this.calls, "your test never calls the implementation"


@check("23.3", {case: why for case, (_, why) in WRONG.items()}, seconds=60)
def test_wrong_ones_are_rejected(impl, case, seed):
    said, _ = tried(impl, *WRONG[case])
    assert said, "your test accepts this implementation, which is wrong"
    assert "without a message" not in said, "name the case in the message of your AssertionError"


@check("23.3", seconds=20)
def test_calls_are_few_and_small(impl, seed):
    _, this = tried(impl, right_rows, "")
    assert len(this.calls) <= MOST_CALLS, f"{len(this.calls)} calls, expected {MOST_CALLS} at most"
    most = max((sum(part.numel() for part in call) for call in this.calls), default=0)
    assert most <= MOST_NUMBERS, f"a call with {most} numbers, expected {MOST_NUMBERS} at most"


@check("23.3", seconds=20)
def test_inputs_are_the_same_each_time(impl, seed):
    first, second = (tried(impl, right_rows, "")[1].calls for _ in range(2))
    same = len(first) == len(second) and all(
        torch.equal(a, b) for one, two in zip(first, second) for a, b in zip(one, two)
    )
    assert same, "two runs of your test have different inputs: give the generator a seed"
