"""What dispatch costs: how many ranks a token reaches, bytes, the error of FP8, and what a rank
that is slow, dead or busy does to the others.
"""

import time

import pytest
import torch

from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import RankError, run_ranks
from lessons.l23_experts.lab import dispatch_faults, traffic, wire_error
from lessons.l23_experts.lab.moe_ranks import SIZE, new_moe
from lessons.l23_experts.ranks.dispatch import CountedDispatchMoE
from lessons.l23_experts.ranks.traffic import Layer, expected_ranks, slot_bytes, token_bytes
from lessons.l23_experts.ranks.wire import Float8, Plain
from lessons.toolbox.model.config import MoEConfig

DELAY_S = 0.05  # of a slow rank
V3 = traffic.layer_of("DeepSeek-V3")
pytestmark = pytest.mark.usefixtures("seed")


# ---------------------------------------------------------------- ranks of a token


def drawn(layer: Layer, size: int, num_tokens: int) -> float:
    """The mean number of ranks, by drawing groups and then experts in them with equal chances."""
    groups = torch.rand(num_tokens, layer.num_groups).topk(layer.kept_groups).indices
    kept = torch.zeros(num_tokens, layer.num_groups).scatter_(1, groups, 1)
    kept = kept.repeat_interleave(layer.num_experts // layer.num_groups, 1)
    chosen = (torch.rand(num_tokens, layer.num_experts) * kept).topk(layer.top_k).indices
    reached = torch.zeros(num_tokens, size)
    return float(reached.scatter_(1, chosen // (layer.num_experts // size), 1).sum(1).mean())


LAYERS = {
    "mixtral": (Layer(8, 2, 1), (1, 2, 4, 8)),
    "qwen3": (Layer(128, 8, 1), (2, 8, 32, 128)),
    "deepseek": (Layer(256, 8, 1, 8, 4), (1, 2, 4, 8, 16, 64)),
    "few": (Layer(12, 4, 1, 4, 2), (2, 4, 12)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_formula_is_the_mean_of_draws(name):
    layer, sizes = LAYERS[name]
    for size in sizes:
        expected = expected_ranks(layer, size)
        assert drawn(layer, size, 8192) == pytest.approx(expected, rel=0.02), size
        assert 1 <= expected <= min(size, layer.top_k) + 1e-9


def test_the_formula_by_hand():
    """Of 4 experts 2 are chosen, on two ranks: 6 pairs, of which 2 are of one rank."""
    assert expected_ranks(Layer(4, 2, 1), 2) == pytest.approx((4 * 2 + 2 * 1) / 6)
    with pytest.raises(ValueError, match="size: got 3; accepted: a divisor of 8"):
        expected_ranks(Layer(8, 2, 1), 3)


def test_a_router_that_keeps_groups_reaches_few_ranks():
    """Lesson 6's router keeps 4 of 8 groups, so 4 of 8 ranks, and 2 where a rank has two groups.

    It keeps the groups with the best experts, so nearly all of them are used, more than by chance.
    """
    mean, most = traffic.drawn_ranks(V3, 8)
    assert most == 4
    assert expected_ranks(V3, 8) + 0.2 < mean <= 4
    free = V3._replace(num_groups=1, kept_groups=1)
    mean, most = traffic.drawn_ranks(free, 8)
    assert mean == pytest.approx(expected_ranks(free, 8), rel=0.02) and most > 5


def test_rows_sent_are_those_of_the_formula(seed):
    """What the layer itself sends, in bytes that a Group counts."""
    config, size, num_tokens = MoEConfig(16, 4, 6, norm_topk_prob=True), 4, 4096
    group = Group(list(range(size)), 1)
    layer = CountedDispatchMoE(new_moe(config, seed, torch.bfloat16), group, Float8())
    chosen = torch.rand(num_tokens, 16).topk(4).indices
    rank, token = layer.sends(chosen)
    pairs = rank * num_tokens + token
    assert torch.equal(pairs, pairs.unique()), "by rank, then by token, each pair once"
    of_layer = Layer(16, 4, SIZE)
    assert len(rank) / num_tokens == pytest.approx(expected_ranks(of_layer, size), rel=0.02)
    there = Float8().row_bytes(SIZE, torch.bfloat16) + 4 * 8
    assert token_bytes(of_layer, 1, Float8()) == there + 2 * SIZE


def test_slots_are_reserved_for_all():
    there, back = slot_bytes(V3, 128, Float8())
    assert there == 256 * 128 * (7168 + 4 * 56) and back == 256 * 128 * 7168 * 2


def test_the_tables_are_printed(capsys):
    assert traffic.main([]) == 0
    said = capsys.readouterr().out
    assert "DeepSeek-V3               3.63" in said and "4 at most" in said
    with pytest.raises(SystemExit):
        traffic.main(["--ranks", "3"])
    assert "size: got 3; accepted: a divisor of 8" in capsys.readouterr().err


# ---------------------------------------------------------------- the error of FP8


def test_fp8_rounds_each_value_by_two_percent_or_so():
    """E4M3 keeps 3 bits after the point: rounding is off by 1/32 to 1/16 at most, 2 to 3 % in the
    mean of a row.
    """
    errors = wire_error.layer_errors(Float8())
    assert 0.02 < errors["rows"].mean < 0.03 and errors["rows"].worst < 0.04
    assert 0.01 < errors["output"].mean < 0.05
    plain = wire_error.layer_errors(Plain())
    assert plain["rows"].worst == 0 and plain["output"].worst < 1e-5


def test_a_small_model_over_the_wire():
    plain, fp8 = (wire_error.model_errors(form) for form in (Plain(), Float8()))
    assert plain.logits.worst < 1e-4 and plain.first_difference == wire_error.STEPS
    assert 1e-4 < fp8.logits.mean < 0.1 and fp8.likeliest > 0.7


# ---------------------------------------------------------------- faults


def test_a_slow_rank_makes_all_wait():
    """The others spend its delay in the layer, and it spends little there itself."""
    times = run_ranks(4, dispatch_faults.slow_rank, 1, DELAY_S)
    for rank, (inside, total) in enumerate(times):
        assert total >= DELAY_S * dispatch_faults.STEPS
        if rank != 1:
            assert inside >= 0.9 * DELAY_S * dispatch_faults.STEPS and inside > 0.8 * total
    assert times[1][0] < min(times[rank][0] for rank in (0, 2, 3))


def test_a_dead_rank_is_named():
    """Killed while the others wait for its results."""
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(4, dispatch_faults.dead_rank, 2)
    assert str(caught.value) == "rank 2 died (signal 9)"
    assert time.monotonic() - start < 60  # seconds on an idle machine; 120 if it were waited for


def test_one_rank_that_gets_all_tokens_is_right_and_told():
    for out, expected, told in run_ranks(4, dispatch_faults.one_gets_all, 3):
        assert torch.allclose(out, expected, atol=1e-5)
        assert told == "rank 3 has 64 of 64 rows, 4.0 times the mean"
