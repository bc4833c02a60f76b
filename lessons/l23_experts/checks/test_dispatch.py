"""Dispatch and combine, in each form that is served, equal lesson 6's loop in one process; what
they send is counted; planted slips are seen.
"""

import pytest
import torch

from lessons.l11_cuda_graphs.optimized import CudaGraphs
from lessons.l11_cuda_graphs.simulator import CaptureError, SimulatedGraphs
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import run_ranks
from lessons.l23_experts import grouped, optimized
from lessons.l23_experts.lab.moe_cases import DEVICE
from lessons.l23_experts.lab.moe_ranks import (
    CONFIGS,
    SIZE,
    Case,
    assert_equal,
    new_moe,
    run_case,
    run_cases,
    tokens_of,
)
from lessons.l23_experts.more import naive_fp8
from lessons.l23_experts.ranks import experts
from lessons.l23_experts.ranks.dispatch import (
    MAX_TOKENS,
    CountedDispatchMoE,
    FixedSlotsMoE,
    GatherScatterMoE,
    combined,
)
from lessons.l23_experts.ranks.wire import Float8, Plain, read_message, write_message
from lessons.toolbox.proof.numerics import assert_same_bits

pytestmark = pytest.mark.usefixtures("seed")
SERVED = ("broadcast", "gathered", "counted", "slots")
SPLITS = {1: (13,), 2: (9, 4), 4: (5, 0, 7, 1), 8: (3, 1, 0, 0, 6, 2, 4, 1)}


def whole_layer(case):
    """What one process computes: [T, hidden_size], routed experts on rows as the wire rounds
    them.
    """
    moe, x = new_moe(CONFIGS[case.config], case.seed, case.dtype), tokens_of(case)
    rows = x
    if case.row == "Float8":
        rows = naive_fp8.dequantized(*naive_fp8.quantize_groups(x)).to(x.dtype)
    weights, chosen = moe.gate(x)
    out = torch.zeros_like(x) if moe.shared_experts is None else moe.shared_experts(x)
    for token, places in enumerate(chosen.tolist()):
        for place, expert in enumerate(places):
            share = weights[token, place] * moe.experts[expert](rows[token])
            out[token] += share.to(out.dtype)
    return out


def right_cases(size, seed):
    split, wide = SPLITS[size], torch.float64
    cases = [Case(form, config, seed, wide, split) for form in SERVED for config in CONFIGS]
    cases += [Case(form, "deepseek_v3", seed, wide, split, row="Float8") for form in SERVED]
    for dtype in (torch.float32, torch.bfloat16):
        cases += [Case(form, "qwen3_moe", seed, dtype, split) for form in SERVED]
    one_has_all = (0,) * (size - 1) + (4,)
    cases += [Case(form, "mixtral", seed, wide, one_has_all) for form in SERVED]
    return cases + [Case(form, "mixtral", seed, wide, (0,) * size) for form in SERVED]


BUGS = {
    "a rank's experts alone": (
        "broadcast",
        "self.group.all_reduce(self.shares(message, x, weights))",
        "self.shares(message, x, weights)",
    ),
    "the sums of another rank": (
        "broadcast",
        "sums.split(counts)[self.group.rank]",
        "sums[: len(x)]",
    ),
    "the experts' numbers are those of all ranks": (
        "gathered",
        "chosen - self.own.start",
        "chosen",
    ),
    "padding comes before the tokens": (
        "gathered",
        "(0, 0, 0, height - len(x))",
        "(0, 0, height - len(x), 0)",
    ),
    "a rank's share alone": (
        "gathered",
        "self.group.reduce_scatter(self.shares(message, x, weights))",
        "self.shares(message, x, weights).view(self.group.size, height, -1)[self.group.rank]",
    ),
    "combined in the order of tokens": (
        "counted",
        "return combined(shares, token, to_each, x)",
        "return combined(shares, token.sort().values, to_each, x)",
    ),
    "the weight is applied twice": (
        "counted",
        "numbers, weights[token])",
        "numbers, weights[token] ** 2)",
    ),
    "the first choice sends nobody": (
        "counted",
        "wanted.scatter_(1, self.rank_of[chosen], True)",
        "wanted.scatter_(1, self.rank_of[chosen[:, 1:]], True)",
    ),
    "a token once for each expert": (
        "counted",
        "return wanted.T.nonzero(as_tuple=True)",
        "rank, pair = self.rank_of[chosen].flatten().sort(stable=True)\n"
        "        return rank, pair // chosen.shape[1]",
    ),
    "experts of other ranks are run as well": (
        "counted",
        "torch.where(there, self.number_of[chosen[token]], NOWHERE)",
        "self.number_of[chosen[token]]",
    ),
    "a rank's experts begin one later": (
        "counted",
        "first = (counts.cumsum(0) - counts)[ranks]",
        "first = (counts.cumsum(0) - counts)[ranks] - (ranks > 0).long()",
    ),
    "the slots of another sender": (
        "slots",
        "slot < full[:, None]",
        "slot < full.roll(len(self.own))[:, None]",
    ),
    "slots by expert, then by sender": (
        "slots",
        ".repeat(self.group.size)[:, None]",
        ".repeat_interleave(self.group.size)[:, None]",
    ),
    "one slot too few": ("slots", "slot < full[:, None]", "slot + 1 < full[:, None]"),
    "the scale of another token": (
        "counted",
        "torch.cat([as_bytes(values), as_bytes(scales)], 1)",
        "torch.cat([as_bytes(values), as_bytes(scales.roll(1, 0))], 1)",
    ),
}


def bug_cases(seed):
    return [
        Case(form, "deepseek_v3", seed, torch.float64, SPLITS[4], row="Float8", bug=(old, new))
        for form, old, new in BUGS.values()
    ]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
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
        assert [len(result["out"]) for result in of_ranks] == list(case.split)
        assert_equal(case, torch.cat([result["out"] for result in of_ranks]), whole_layer(case))
        if size > 1:
            check_wire(case, size, of_ranks)
    for at, (case, bug) in enumerate(zip(wrong, BUGS), len(cases)):
        out = torch.cat([result[at]["out"] for result in results])
        with pytest.raises(AssertionError):
            assert_equal(case, out, whole_layer(case))
            pytest.fail(f"unseen: {bug}", pytrace=False)


def check_wire(case, size, results):
    """What each form sends, in bytes: those of its own rank are counted, too."""
    config, wide = CONFIGS[case.config], torch.promote_types(case.dtype, torch.float32)
    top_k, back = config.num_experts_per_tok, SIZE * case.dtype.itemsize
    row = SIZE + 4 if case.row == "Float8" else back
    message = row + top_k * (4 + wide.itemsize)  # with the experts' numbers and their weights
    for rank, result in enumerate(results):
        sent, calls = result["bytes"], result["calls"]
        if case.form == "broadcast":
            total, turns = sum(case.split), sum(map(bool, case.split))
            sent = {name: found for name, found in sent.items() if found}
            full = {"broadcast": total * message, "all_reduce": total * back} if total else {}
            assert sent == {"all_gather": 8} | full
            assert calls.get("broadcast", 0) == turns
        if case.form == "gathered":
            height = max(case.split)
            gathered = {"all_gather": 8 + height * message, "reduce_scatter": size * height * back}
            assert sent == (gathered if height else {"all_gather": 8})
        if case.form == "counted":
            rows = result["rows_sent"]
            there, here = sum(rows[rank]), sum(sender[rank] for sender in rows)
            assert calls == {"all_gather": 1, "all_to_all": 2}
            assert sent == {"all_gather": 8 * size, "all_to_all": there * message + here * back}
            assert there == distinct_ranks(case, rank, size)
        if case.form == "slots":
            count = config.n_routed_experts
            own = len(range(count * rank // size, count * (rank + 1) // size))
            there, here = count * MAX_TOKENS, size * own * MAX_TOKENS
            assert calls == {"all_to_all": 3}
            assert sent == {"all_to_all": 8 * count + there * row + here * back}


def distinct_ranks(case, rank, size):
    """Pairs of a token of this rank and a rank that has some of its experts, one by one."""
    moe = new_moe(CONFIGS[case.config], case.seed, case.dtype)
    count = moe.gate.config.n_routed_experts
    places = [range(count * r // size, count * (r + 1) // size) for r in range(size)]
    _, chosen = moe.gate(tokens_of(case).split(case.split)[rank])
    return sum(
        any(expert in place for expert in row) for row in chosen.tolist() for place in places
    )


def test_ranks_are_added_in_their_order():
    """Of three numbers whose sum depends on the order. Each rank has tokens 0 and 1."""
    shares = torch.tensor([[1.0], [2.0**25], [2.0], [-(2.0**25)], [3.0], [3.0]])
    token, x = torch.tensor([0, 1, 0, 1, 0, 1]), torch.zeros(3, 1)
    got = combined(shares, token, [2, 2, 2], x)
    assert_same_bits(got, torch.tensor([[6.0], [3.0], [0.0]]))
    backwards = combined(shares.flip(0), token.flip(0), [2, 2, 2], x)
    assert backwards[0] == 6 and backwards[1] != 3


@pytest.mark.parametrize("form", [Plain(), Float8()], ids=["16 bits", "FP8"])
@pytest.mark.parametrize("tokens, size", [(0, 256), (3, 300), (5, 128), (2, 7)])
def test_a_message_is_read_as_it_was_written(form, tokens, size):
    x, weights = torch.randn(tokens, size).bfloat16(), torch.rand(tokens, 3)
    chosen = torch.randint(-1, 70000, (tokens, 3))
    message = write_message(form, x, chosen, weights)
    assert message.dtype == torch.uint8
    assert message.shape == (tokens, form.row_bytes(size, x.dtype) + 3 * 8)
    rows, numbers, read = read_message(form, message, x, weights)
    assert torch.equal(numbers, chosen) and torch.equal(read, weights)
    assert rows.dtype == x.dtype
    is_exact = isinstance(form, Plain)
    expected = x if is_exact else naive_fp8.rounded(x).bfloat16()
    assert torch.equal(rows, expected)


@torch.inference_mode()
def test_a_graph_records_slots_and_nothing_that_waits_for_counts(seed, monkeypatch):
    """Its replays follow the router's new choices. The other forms ask how many rows there are."""
    monkeypatch.setattr(grouped, "ops_for", lambda *_: optimized)
    monkeypatch.setattr(experts, "ops_for", lambda *_: optimized)
    case = Case("slots", "deepseek_v3", seed, split=(3,))
    moe, x = new_moe(CONFIGS[case.config], seed, case.dtype).to(DEVICE), tokens_of(case).to(DEVICE)
    layer, on_gpu = FixedSlotsMoE(moe, Group.alone(), 4), DEVICE.type == "cuda"
    graphs = CudaGraphs(DEVICE) if on_gpu else SimulatedGraphs(warm_ups=0)
    graph, out = graphs.capture(lambda: layer(x))
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_equal(case, out, moe(x))
    for form in () if on_gpu else (GatherScatterMoE, CountedDispatchMoE):
        waiting = form(moe, Group.alone())
        with pytest.raises(CaptureError, match="waits for the GPU"):
            SimulatedGraphs(warm_ups=0).capture(lambda layer=waiting: layer(x))


def test_more_tokens_than_slots_are_refused():
    moe = new_moe(CONFIGS["mixtral"], 0, torch.float32)
    with pytest.raises(
        ValueError, match="tokens of x: got 5; accepted: at most 4, which is max_tokens"
    ):
        FixedSlotsMoE(moe, Group.alone(), 4)(torch.randn(5, SIZE))
    with pytest.raises(ValueError, match="max_tokens: got 0"):
        FixedSlotsMoE(moe, Group.alone(), 0)
