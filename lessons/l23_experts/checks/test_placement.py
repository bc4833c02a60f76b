"""Redundant experts: greedy placements against the best one, loads, and outputs that stay."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.naive import generate
from lessons.l06_mla.moe import MoEDecoder
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import run_ranks
from lessons.l23_experts.grouped import grouped
from lessons.l23_experts.lab import placed_ranks
from lessons.l23_experts.lab.moe_ranks import CONFIGS, SIZE, new_moe
from lessons.l23_experts.naive import layer_config
from lessons.l23_experts.ranks import naive_placement, placement
from lessons.l23_experts.ranks.dispatch import (
    CountedDispatchMoE,
    FixedSlotsMoE,
    GatherScatterMoE,
)
from lessons.l23_experts.ranks.experts import CapacityMoE, ExpertParallelMoE, SplitTokensMoE
from lessons.l23_experts.ranks.load import load_of
from lessons.l23_experts.ranks.placed import placed, placed_model
from lessons.l23_experts.ranks.placement import (
    Placement,
    by_number,
    in_order,
    in_turn,
    moved,
    pack,
    place,
    place_by_nodes,
    renumbered,
    replicate,
)
from lessons.toolbox.model.config import MoEConfig
from lessons.toolbox.proof.planted import with_bug

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

README_LOADS = (6, 2, 1, 1, 2, 2, 1, 1)
loads_of = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def test_by_hand():
    """Step 7's example: eight experts on four ranks, packed by load, and with four copies more."""
    assert in_order(8, 4).load_of_ranks(README_LOADS).counts == (8, 2, 4, 2)
    assert place(README_LOADS, 8, 4).load_of_ranks(README_LOADS).imbalance == 7 / 4
    assert replicate(README_LOADS, 12) == [4, 2, 1, 1, 1, 1, 1, 1]
    found = place(README_LOADS, 12, 4)
    assert found.load_of_ranks(README_LOADS).counts == (4, 4, 4, 4)
    assert found.of_rank(2) == (0, 0, 6) and found.num_doubled == 2


@settings(deadline=None, max_examples=60)
@given(loads_of, st.integers(0, 8))
def test_no_other_copies_have_a_smaller_largest_load(loads, extra):
    loads, extra = loads[:4], min(extra, 4)
    num_slots = len(loads) + extra

    def largest(copies):
        return max(load / count for load, count in zip(loads, copies))

    best = min(map(largest, naive_placement.all_copies(len(loads), num_slots)))
    copies = replicate(loads, num_slots)
    assert sum(copies) == num_slots and largest(copies) == best


@settings(deadline=None, max_examples=200)
@given(loads_of, st.integers(1, 6), st.integers(0, 3))
def test_ranks_differ_by_the_largest_copy_at_most(loads, size, more):
    """Each expert is somewhere, ranks have equally many slots, and nothing gets lost."""
    num_slots = (-(-len(loads) // size) + more) * size
    found = place(loads, num_slots, size)
    assert len(found.experts) == num_slots and set(found.experts) == set(range(len(loads)))
    ranks = found.load_of_ranks(loads).counts
    assert sum(ranks) == pytest.approx(sum(loads))
    largest = max(load / len(slots) for load, slots in zip(loads, found.slots_of))
    assert max(ranks) - min(ranks) <= largest + 1e-9


SMALL = [(4, 6, 2), (4, 6, 3), (3, 6, 2), (5, 6, 3), (4, 4, 2)]


@pytest.mark.parametrize("num_experts, num_slots, size", SMALL)
def test_greedy_is_near_the_best(num_experts, num_slots, size):
    """By trying all placements of a few experts: never more than twice the best (it cannot be,
    because ranks differ by a copy at most), and hardly more in the mean.
    """
    draw, ratios = random.Random(23), []
    for _ in range(12):
        loads = [draw.randrange(1, 30) for _ in range(num_experts)]
        best = naive_placement.best_placement(loads, num_slots, size)
        greedy = place(loads, num_slots, size)
        ratios.append(
            max(greedy.load_of_ranks(loads).counts) / max(best.load_of_ranks(loads).counts)
        )
    assert min(ratios) >= 1 - 1e-12 and max(ratios) < 1.5 and sum(ratios) / len(ratios) < 1.15


def test_groups_stay_on_their_node():
    """64 experts in 8 groups on 4 nodes: a node's experts are two whole groups."""
    draw = random.Random(23)
    loads = [draw.expovariate(1) for _ in range(64)]
    found = place_by_nodes(loads, 96, 16, 4, 8)
    slots = [found.experts[node * 24 : (node + 1) * 24] for node in range(4)]
    groups = [{expert // 8 for expert in node} for node in slots]
    assert all(len(own) == 2 for own in groups) and len(set().union(*groups)) == 8
    anywhere = place(loads, 96, 16).load_of_ranks(loads).imbalance
    assert (
        anywhere
        <= found.load_of_ranks(loads).imbalance
        < in_order(64, 16).load_of_ranks(loads).imbalance
    )
    assert place_by_nodes(loads, 96, 16, 1, 1) == place(loads, 96, 16)


# ---------------------------------------------------------------- which copy a token takes


def test_copies_take_turns(seed):
    chosen = torch.rand(50, 9).topk(3).indices
    found = place(load_of(chosen, 9).counts, 15, 5)
    slots = in_turn(chosen, found.copies())
    assert slots.tolist() == naive_placement.in_turn_by_hand(chosen.tolist(), found)
    assert torch.equal(torch.tensor(found.experts)[slots], chosen)
    counts = Counter(slots.flatten().tolist())
    for own in found.slots_of:
        rows = [counts[slot] for slot in own]
        assert max(rows) - min(rows) <= 1
    assert torch.equal(torch.tensor(found.experts)[by_number(chosen, found.copies())], chosen)


def test_a_pattern_of_tokens_defeats_their_numbers():
    """Even tokens choose expert 0 and odd ones expert 1. Each has two copies, of which by number
    one gets all.
    """
    chosen, found = torch.tensor([[0], [1]] * 8), Placement((0, 1, 0, 1), 2)
    by_slot = [load_of(choose(chosen, found.copies()), 4).counts for choose in (by_number, in_turn)]
    assert by_slot == [(8, 0, 0, 8), (4, 4, 4, 4)]


# ---------------------------------------------------------------- moving


def test_moves_are_counted_by_rank():
    before, after = Placement((0, 1, 2, 0), 2), Placement((2, 0, 0, 1), 2)
    assert moved(before, before) == 0 == moved(before, Placement((1, 0, 0, 2), 2))
    assert moved(before, after) == 2
    assert renumbered(before, after) == Placement((0, 1, 2, 0), 2)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6))
def test_other_numbers_of_ranks_move_less_and_balance_the_same(number):
    draw = random.Random(number)
    first, second = ([draw.expovariate(1) for _ in range(24)] for _ in range(2))
    before, after = place(first, 32, 8), place(second, 32, 8)
    kept = renumbered(before, after)
    assert moved(before, kept) <= moved(before, after)
    assert sorted(kept.load_of_ranks(second).counts) == sorted(after.load_of_ranks(second).counts)


# ---------------------------------------------------------------- outputs stay


def placement_for(moe, x: torch.Tensor, size: int) -> Placement:
    """One with copies of the experts that x: [T, H] uses most."""
    num_experts = moe.gate.config.n_routed_experts
    counts = load_of(moe.gate(x)[1], num_experts).counts
    return place(counts, (-(-num_experts // size) + 2) * size, size)


FORMS = (
    ExpertParallelMoE,
    SplitTokensMoE,
    GatherScatterMoE,
    CountedDispatchMoE,
    FixedSlotsMoE,
)


@pytest.mark.parametrize("choose", [in_turn, by_number])
@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_a_placement_changes_no_output(config, choose, seed):
    moe, x = new_moe(CONFIGS[config], seed, torch.float64), torch.randn(13, SIZE).double()
    wanted = moe(x)
    twin = placed(moe, placement_for(moe, x, 4), choose)
    alone = Group.alone()
    layers = [twin, CapacityMoE(twin, alone, 100.0)]
    layers += [form(twin, alone) for form in FORMS]
    for layer in layers:
        torch.testing.assert_close(layer(x), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moe(x), wanted, rtol=0, atol=0)  # the layer itself stays


def test_ranks_with_copies_equal_one_process(seed):
    """Four ranks, by a sum over all tokens and by rows that travel."""
    configs = list(CONFIGS)
    ranks = run_ranks(4, placed_ranks.run_placed, configs, seed)
    for config, results in zip(configs, zip(*ranks)):
        moe, x, placement = placed_ranks.case_of(config, seed, 4)
        assert placement.per_rank * 4 > len(placement.slots_of)  # there are copies
        wanted = moe(x)
        summed, *own = zip(*results)
        for out in (*summed, *map(torch.cat, own)):
            torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


def test_a_model_keeps_its_tokens(seed):
    """Two layers of experts, each with a placement of its own."""
    moe = MoEConfig(6, 2, 24, norm_topk_prob=True)
    config = replace(layer_config(32, moe), num_hidden_layers=2, max_position_embeddings=32)
    model = MoEDecoder(config).double().eval().requires_grad_(False)
    loads = [[1, 9, 2, 3, 1, 1], [5, 1, 1, 1, 7, 1]]
    twin = placed_model(model, [place(own, 8, 4) for own in loads])
    assert [len(layer.mlp.experts) for layer in twin.layers] == [8, 8]
    prompts = [[1, 2, 3], [7, 5]]
    assert generate(twin, prompts, 8) == generate(model, prompts, 8)
    assert generate(grouped(twin), prompts, 8) == generate(model, prompts, 8)


def test_what_cannot_be_is_refused():
    for wrong, why in (
        (lambda: Placement((0, 2), 1), "experts: got"),
        (lambda: Placement((0, 1, 2), 2), "size: got 2"),
        (lambda: place([1, 2, 3], 2, 1), "num_slots: got 2"),
        (lambda: place([1, 2, 3], 5, 2), "num_slots: got 5"),
        (lambda: place([1, -2], 2, 1), "loads: got"),
        (lambda: place_by_nodes([1] * 8, 8, 4, 2, 3), "num_groups: got 3"),
        (lambda: place_by_nodes([1] * 9, 12, 3, 2, 9), "num_groups: got 9"),
    ):
        with pytest.raises(ValueError, match=why) as caught:
            wrong()
        assert "\n" not in str(caught.value)
    moe = new_moe(CONFIGS["mixtral"], 1, torch.float32)
    with pytest.raises(ValueError, match=r"placement: got '9 experts'; accepted: 8, the layer's"):
        placed(moe, in_order(9, 3))


# ---------------------------------------------------------------- planted bugs

BUGS = {
    "copies for the busiest, however many it has": (
        "loads[expert] / copies[expert])\n        copies",
        "loads[expert])\n        copies",
    ),
    "the whole load for each copy": (
        "pack([loads[expert] / copies[expert] for",
        "pack([loads[expert] for",
    ),
    "lightest first": ("key=lambda item: -weights[item]", "key=lambda item: weights[item]"),
    "the heaviest rank": ("lightest = min(free", "lightest = max(free"),
    "one slot too many on a rank": ("< capacity)", "<= capacity)"),
    "a turn for all experts together": ("place - torch.searchsorted(expert, expert)", "place"),
    "pairs in the order of experts": ("slots[order] = ", "slots[:] = "),
    "slots counted as ranks": ("set(after.of_rank(rank)) - set", "set(after.experts) - set"),
}


def checks(module) -> None:
    """What the tests above ask for, of a copy of placement.py."""
    draw = random.Random(5)
    loads = [draw.expovariate(1) ** 2 for _ in range(24)]
    found = module.place(loads, 32, 8)
    assert len(found.experts) == 32
    assert (
        found.load_of_ranks(loads).imbalance <= place(loads, 32, 8).load_of_ranks(loads).imbalance
    )
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(40, 24, generator=generator).topk(3).indices
    hand = naive_placement.in_turn_by_hand(chosen.tolist(), found)
    assert module.in_turn(chosen, found.copies()).tolist() == hand
    other = module.place(loads[::-1], 32, 8)
    assert module.moved(found, other) == moved(found, other)


def test_a_right_copy_passes(tmp_path):
    checks(with_bug(placement, tmp_path, '"""Redundant experts', '"""Copies of experts'))


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path):
    buggy = with_bug(placement, tmp_path, *BUGS[bug])
    with pytest.raises((AssertionError, ValueError, IndexError)):
        checks(buggy)


def test_pack_by_hand():
    """10 and five 1s in two packs of three: the pack with 10 has to take two more."""
    packs = pack([1, 10, 1, 1, 1, 1], 2)
    assert sorted(map(len, packs)) == [3, 3]
    assert sorted(sum([1, 10, 1, 1, 1, 1][item] for item in own) for own in packs) == [3, 12]
