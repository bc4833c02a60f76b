"""Layers of experts on several ranks equal lesson 6's loop in one process. What a limit drops is
counted and told.
"""

import pytest
import torch
from torch import nn

from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import run_ranks
from lessons.l20_parallelism.shards.sharding import experts_of
from lessons.l23_experts import grouped
from lessons.l23_experts.lab.moe_ranks import (
    CONFIGS,
    Case,
    assert_equal,
    new_moe,
    run_case,
    run_cases,
    tokens_of,
)
from lessons.l23_experts.ranks.experts import ExpertParallelMoE
from lessons.l23_experts.ranks.load import capacity_of, load_of

pytestmark = pytest.mark.usefixtures("seed")
FOUR = (5, 0, 7, 1)  # tokens of four ranks; one has none


# ---------------------------------------------------------------- on several ranks


def whole_layer(case):
    """What one process computes: [T, hidden_size]."""
    with torch.no_grad():
        return new_moe(CONFIGS[case.config], case.seed, case.dtype)(tokens_of(case))


def together(case, results):
    """The ranks' outputs as one: [T, hidden_size]. Of replicated tokens all ranks must have the
    same.
    """
    outs = [result["out"] for result in results]
    if case.form == "replicated":
        assert all(torch.equal(out, outs[0]) for out in outs)
        return outs[0]
    return torch.cat(outs)


def right_cases(size, seed):
    split = {1: (13,), 2: (9, 4), 4: FOUR}[size]
    return [
        *(Case("replicated", config, seed, torch.float64) for config in CONFIGS),
        *(Case("split", config, seed, torch.float64, split) for config in CONFIGS),
        Case("replicated", "deepseek_v3", seed),
        Case("split", "deepseek_v3", seed, split=split),
        # more places than any expert can need
        Case("capacity", "mixtral", seed, torch.float64, (12 // size,) * size, 8.0),
    ]


OWN = "(chosen >= self.own.start) & (chosen < self.own.stop)"
BUGS = {
    "weights normed over a rank's own experts": (
        "replicated",
        "        if self.own.start:\n",
        f"        weights = weights / (weights * ({OWN})).sum(-1, keepdim=True).clamp(min=1e-9)\n"
        "        if self.own.start:\n",
    ),
    "a rank's offset of experts is forgotten": (
        "replicated",
        "chosen = chosen - self.own.start",
        "pass",
    ),
    "the shared expert is added on every rank": (
        "replicated",
        "own = slice(whole * group.rank // group.size, whole * (group.rank + 1) // group.size)",
        "own = slice(0, whole)",
    ),
    "no sum over the ranks": ("replicated", "self.group.all_reduce(self.part(x))", "self.part(x)"),
    "received rows by expert, then by sender": (
        "split",
        "expert = expert.repeat_interleave(received.flatten())",
        "expert = expert.sort().values.repeat_interleave(received.T.flatten())",
    ),
    "results stay in the order of experts": (
        "split",
        "torch.empty_like(results).index_copy_(0, order, results)",
        "results",
    ),
    "a pair's row, not its token's": ("split", "order // chosen.shape[1]", "order % len(x)"),
    "padding is summed in": (
        "capacity",
        "y.index_copy_(0, pairs.flatten(), results)",
        "y.index_add_(0, pairs.flatten().clamp(max=num_pairs - 1), results)",
    ),
}


def bug_cases(seed):
    split = {"replicated": (), "split": FOUR, "capacity": (3,) * 4}
    return [
        Case(form, "deepseek_v3", seed, torch.float64, split[form], 8.0, (old, new))
        for form, old, new in BUGS.values()
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_equal_one_process_and_bugs_are_seen(size, seed):
    """One start of the ranks for all cases. On four ranks also with each bug planted."""
    cases = right_cases(size, seed)
    wrong = bug_cases(seed) if size == 4 else []
    if size == 1:
        results = [[run_case(Group.alone(), case) for case in cases]]
    else:
        results = run_ranks(size, run_cases, cases + wrong)
    for at, case in enumerate(cases):
        of_ranks = [result[at] for result in results]
        assert_equal(case, together(case, of_ranks), whole_layer(case))
        if size > 1:
            check_wire(case, size, of_ranks)
    for at, (case, bug) in enumerate(zip(wrong, BUGS), len(cases)):
        outs = [result[at]["out"] for result in results]
        out = outs[0] if case.form == "replicated" else torch.cat(outs)
        with pytest.raises(AssertionError):
            assert_equal(case, out, whole_layer(case))
            pytest.fail(f"unseen: {bug}", pytrace=False)


def check_wire(case, size, results):
    """Who says how much: one all-reduce; counts, rows and results; rows and results."""
    config = CONFIGS[case.config]
    row = 12 * case.dtype.itemsize
    for rank, result in enumerate(results):
        if case.form == "replicated":
            assert result["calls"] == {"all_reduce": 1}
            assert result["bytes"] == {"all_reduce": case.num_tokens * row}
        if case.form == "split":
            assert result["calls"] == {"all_to_all": 3}
        if case.form == "capacity":
            own = len(experts_of(config.n_routed_experts, rank, size))
            places = capacity_of(12 // size, config.num_experts_per_tok, 8, 8.0)
            sent, returned = config.n_routed_experts * places, own * places * size
            assert result["calls"] == {"all_to_all": 2}
            assert result["bytes"] == {"all_to_all": (sent + returned) * row}
    if case.form == "split":  # each pair's row twice, and a count of each expert from each rank
        pairs = case.num_tokens * config.num_experts_per_tok
        total = sum(result["bytes"]["all_to_all"] for result in results)
        assert total == 2 * pairs * row + size * 8 * config.n_routed_experts


def test_a_loader_may_leave_other_ranks_experts_out(seed):
    """Only this rank's experts and its strip of the shared one, as lesson 20 leaves them."""
    config = CONFIGS["deepseek_v3"]
    case = Case("replicated", "deepseek_v3", seed)
    outs = []
    for rank in range(2):
        moe, alone = new_moe(config, seed, torch.float32), Group([0, 1], rank)
        alone.all_reduce = lambda x: x
        moe.experts = moe.experts[8 * rank : 8 * rank + 8]
        shared, strip = moe.shared_experts, slice(3 * rank, 3 * rank + 3)
        for name in ("gate_proj", "up_proj"):
            linear = getattr(shared, name)
            linear.weight = nn.Parameter(linear.weight[strip], requires_grad=False)
        shared.down_proj.weight = nn.Parameter(shared.down_proj.weight[:, strip])
        shared.down_proj.in_features = 3
        with torch.no_grad():
            outs.append(ExpertParallelMoE(moe, alone)(tokens_of(case)))
    assert_equal(case, outs[0] + outs[1], whole_layer(case))
    moe.experts = moe.experts[:3]
    with pytest.raises(ValueError, match=r"moe\.experts: got 3; accepted: all 16, or .* own 8"):
        grouped.own_experts(moe, range(8))


# ---------------------------------------------------------------- load and limits


def test_dropped_pairs_are_counted_and_told(seed):
    """With places for the mean only. A pair without a place adds nothing, all others what they
    did.
    """
    case = Case("capacity", "mixtral", seed, torch.float64, (40,), 1.0)
    result = run_case(Group.alone(), case)
    moe, x = new_moe(CONFIGS["mixtral"], seed, torch.float64), tokens_of(case)
    weights, chosen = moe.gate(x)
    seen, kept = [0] * 8, torch.zeros_like(weights, dtype=torch.bool)
    for token, places in enumerate(chosen.tolist()):
        for place, expert in enumerate(places):
            kept[token, place] = seen[expert] < 10  # 40 tokens of 2 experts each, over 8
            seen[expert] += 1
    expected = torch.zeros_like(x)
    for token, place in kept.nonzero().tolist():
        share = moe.experts[chosen[token, place]](x[token])
        expected[token] += weights[token, place] * share
    assert_equal(case, result["out"], expected)
    dropped = int((~kept).sum())
    assert result["dropped"] == dropped == load_of(chosen, 8).dropped(10)
    assert bool(result["said"]) == bool(dropped)
    if dropped:
        assert result["said"][0].startswith(f"dropped {dropped} of 80 pairs")


SILENT = {
    "not counted": ("self.dropped += dropped", "pass"),
    "not told": ("if dropped.is_cpu and dropped:", "if False:"),
}


@pytest.mark.parametrize("bug", SILENT)
def test_silent_drops_are_seen(bug):
    """Three places an expert are 24 for 80 pairs, so most are dropped."""
    case = Case("capacity", "mixtral", 1, torch.float64, (40,), 0.25)
    right = run_case(Group.alone(), case)
    assert right["dropped"] >= 56 and right["said"]
    wrong = run_case(Group.alone(), case._replace(bug=SILENT[bug]))
    assert not wrong["dropped"] or not wrong["said"]
