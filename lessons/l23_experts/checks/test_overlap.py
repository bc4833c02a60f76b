"""Time lines by hand and by ticks, and two halves that really take turns."""

import random
from itertools import pairwise

import pytest
import torch

from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import run_ranks
from lessons.l23_experts.lab import halves as lab
from lessons.l23_experts.ranks import halves, overlap
from lessons.l23_experts.ranks.dispatch import (
    BroadcastMoE,
    CountedDispatchMoE,
    FixedSlotsMoE,
    GatherScatterMoE,
)
from lessons.l23_experts.ranks.experts import SplitTokensMoE
from lessons.l23_experts.ranks.halves import Line, Turns, in_turns
from lessons.l23_experts.ranks.overlap import (
    COMPUTE,
    NETWORK,
    Part,
    busy_s,
    end_of,
    gain,
    schedule,
)
from lessons.toolbox.proof.planted import with_bug

BYTE_S = 2e-6  # 10 tokens' rows, 4 experts each, take 40 ms


def parts_of(
    attention: float, dispatch: float, experts: float, combine: float, least: float = 0.0
) -> list[Part]:
    """Seconds a token; least: of experts, however few tokens."""
    return [
        Part("attention", COMPUTE, (), attention),
        Part("dispatch", NETWORK, ("attention",), dispatch),
        Part("experts", COMPUTE, ("dispatch",), experts, least),
        Part("combine", NETWORK, ("experts",), combine),
    ]


def by_ticks(parts: list[Part], num_layers: int, batches: list[int]) -> int:
    """The end of a schedule, second by second: a lane that is free takes what is ready, the earlier
    layer first, then the earlier part, then the earlier batch. Durations have to be whole.
    """
    done: dict[tuple, int] = {}
    started: set[tuple] = set()
    free = {COMPUTE: 0, NETWORK: 0}
    total = num_layers * len(parts) * len(batches)
    for now in range(100_000):
        if len(started) == total:
            return max(done.values())
        for layer in range(num_layers):
            for number, part in enumerate(parts):
                for batch, tokens in enumerate(batches):
                    key = batch, layer, number
                    names = [n for n, other in enumerate(parts) if other.name in part.needs]
                    needs = [(batch, layer, n) for n in names]
                    if not names and layer:
                        needs = [(batch, layer - 1, n) for n in range(len(parts))]
                    is_ready = all(done.get(need, now + 1) <= now for need in needs)
                    if key not in started and is_ready and free[part.lane] <= now:
                        started.add(key)
                        seconds = part.seconds(tokens)
                        done[key] = free[part.lane] = now + round(seconds)
    raise AssertionError("it never ends")


def test_by_hand():
    """Attention 2, dispatch 3, experts 2, combine 3 seconds for two tokens: ten in one batch; the
    halves' parts take half as long, and the second half's combine ends at seven.
    """
    parts = parts_of(1, 1.5, 1, 1.5)
    assert end_of(schedule(parts, 1, [2])) == 10
    two = schedule(parts, 1, [1, 1])
    assert [(p.batch, p.name, p.start_s, p.end_s) for p in two] == [
        (0, "attention", 0, 1),
        (0, "dispatch", 1, 2.5),
        (1, "attention", 1, 2),
        (0, "experts", 2.5, 3.5),
        (1, "dispatch", 2.5, 4),
        (0, "combine", 4, 5.5),
        (1, "experts", 4, 5),
        (1, "combine", 5.5, 7),
    ]
    assert gain(parts, 1, 2) == 10 / 7
    assert busy_s(two, COMPUTE) == 4 and busy_s(two, NETWORK) == 6


@pytest.mark.parametrize("number", range(12))
def test_a_schedule_is_that_of_ticks(number):
    draw = random.Random(number)
    parts = parts_of(*(draw.randrange(1, 4) for _ in range(4)), draw.randrange(0, 12))
    parts.append(Part("shared", COMPUTE, ("attention",), draw.randrange(1, 3)))
    batches = [draw.randrange(1, 4) for _ in range(draw.randrange(1, 4))]
    num_layers = draw.randrange(1, 4)
    pieces = schedule(parts, num_layers, batches)
    assert end_of(pieces) == by_ticks(parts, num_layers, batches)
    for lane in (COMPUTE, NETWORK):  # one thing at a time
        spans = sorted((p.start_s, p.end_s) for p in pieces if p.lane == lane)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert max(busy_s(pieces, lane) for lane in (COMPUTE, NETWORK)) <= end_of(pieces)


def test_when_halves_win_and_when_they_lose():
    """They hide a network that is as busy as the GPU; they lose if experts are read twice."""
    assert gain(parts_of(1, 1, 1, 1), 8, 64) > 1.8
    assert gain(parts_of(1, 0.01, 1, 0.01), 8, 64) == pytest.approx(1, abs=0.03)
    assert gain(parts_of(0.1, 0.1, 0.1, 0.1, least=100), 8, 64) < 0.6


@pytest.mark.parametrize("least", [0.0, 60.0])
@pytest.mark.parametrize("network", [0.2, 1.0, 3.0])
def test_over_many_layers_the_busier_lane_decides(network, least):
    """MORE.md's rule, for 64 tokens in 32 layers: within a tenth, where each part of a half finds
    one of the other half to hide behind.
    """
    parts = parts_of(1.0, network, 1.0, network, least)
    one, two = (end_of(schedule(parts, 32, batches)) / 32 for batches in ([64], [32, 32]))
    computes = 64 + max(64, least)
    assert one == pytest.approx(computes + 2 * 64 * network)
    halves = 2 * (32 + max(32, least))
    assert two == pytest.approx(max(halves, 2 * 64 * network), rel=0.1)
    assert (two < one) == (halves < one)


def test_parts_are_checked():
    for parts, why in (
        ([Part("a", "disk", (), 1)], "the lane of a: got 'disk'"),
        ([Part("a", COMPUTE, ("b",), 1), Part("b", COMPUTE, (), 1)], "what a needs: got"),
    ):
        with pytest.raises(ValueError, match=why):
            schedule(parts, 1, [1])


# ---------------------------------------------------------------- for real


def test_halves_take_turns_and_hide_the_line(seed):
    """The same bits as each half alone; the line is busy while the other half computes."""
    group = Group.alone()
    model = lab.new_model(group, 3, seed, token_s=4e-3)
    x = lab.tokens_of(10, seed)
    whole, two, spans = lab.both_ways(model, x, group, BYTE_S)
    torch.testing.assert_close(two, whole, rtol=1e-12, atol=1e-12)
    alone = torch.cat([model(half) for half in x.chunk(2)])
    assert torch.equal(two, alone)
    assert lab.hidden_s(spans[0]) == 0 and lab.hidden_s(spans[1]) > 0.03
    order = [span.half for span in spans[1] if span.lane == NETWORK]
    assert order == [0, 1] * (len(order) // 2)
    computing = sorted((s.start_s, s.end_s) for s in spans[1] if s.lane == COMPUTE)
    assert all(a[1] <= b[0] for a, b in pairwise(computing))


FORMS = (SplitTokensMoE, BroadcastMoE, GatherScatterMoE, CountedDispatchMoE, FixedSlotsMoE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_and_two_halves(form, seed):
    """Rows travel between processes, and ranks start their exchanges in the same order."""
    ranks = run_ranks(2, lab.run_halves, form, seed, 1e-7)
    for found in ranks:
        assert torch.equal(found["halves"], found["alone"])
        torch.testing.assert_close(found["halves"], found["whole"], rtol=1e-12, atol=1e-12)
    assert ranks[0]["order"] == ranks[1]["order"] == [0, 1] * (len(ranks[0]["order"]) // 2)


def test_a_half_that_fails_ends_the_others(seed):
    group, line = Group.alone(), Line()
    model = lab.new_model(group, 2, seed)
    bad = lab.tokens_of(4, seed)[:, :-1]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        in_turns(model, [bad, lab.tokens_of(4, seed)], group, line)
    line.close()


def test_turns_skip_those_that_left():
    turns = Turns(3)
    turns.leave(0)
    assert turns.has_turn == 1
    turns.hand_on(1)
    turns.hand_on(2)
    assert turns.has_turn == 1
    turns.leave(1)
    turns.hand_on(2)
    assert turns.has_turn == 2


def test_the_command_draws_both(capsys):
    arguments = ["--layers", "1", "--tokens", "8", "--travel-ms", "4", "--work-ms", "4"]
    assert lab.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if ":" in line] == [
        "one batch",
        "two halves",
        "largest difference of the outputs",
    ]
    assert all(len(line) == 9 + lab.COLUMNS for line in lines if line.startswith("compute"))
    assert lab.main(["--layers", "0"]) == 2


# ---------------------------------------------------------------- planted bugs

BUGS = {
    "a part runs before what it needs": ("all(name in self.ends_s for name", "any(True for name"),
    "the last need that is named decides": (
        "max((self.ends_s[name] for name in part.needs), default",
        "min((self.ends_s[name] for name in part.needs), default",
    ),
    "lanes are never busy": ("free_s[part.lane] = end_s", "free_s[part.lane] = 0.0"),
    "a layer begins when its predecessor's first part ends": (
        "max(self.ends_s.values())",
        "min(self.ends_s.values())",
    ),
    "weights are read for nothing": (
        "max(self.least_s, num_tokens * self.token_s)",
        "num_tokens * self.token_s",
    ),
}


def schedules_are_right(module) -> None:
    """What ticks say, of a copy of overlap.py; also with a part that waits for two others."""
    four = parts_of(1, 3, 2, 2, 9)
    six = [*four, Part("shared", COMPUTE, ("attention",), 1)]
    six.append(Part("norm", COMPUTE, ("shared", "combine"), 1))
    for parts in (four, six):
        copies = [module.Part(*vars(part).values()) for part in parts]
        for batches in ([2], [1, 2], [3, 3]):
            assert module.end_of(module.schedule(copies, 3, batches)) == by_ticks(parts, 3, batches)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_of_the_schedule_is_seen(bug, tmp_path):
    schedules_are_right(overlap)
    with pytest.raises((AssertionError, KeyError)):
        schedules_are_right(with_bug(overlap, tmp_path, *BUGS[bug]))


TURN_BUGS = {
    "a half keeps the turn while its rows travel": (
        "        self.turns.hand_on(self.number)\n",
        "",
    ),
    "all halves compute at once": ("lambda: self.has_turn == number", "lambda: True"),
    "all halves read the first one's rows": (
        "zip(groups, inputs)",
        "zip(groups, [inputs[0]] * len(inputs))",
    ),
}


@pytest.mark.parametrize("bug", TURN_BUGS)
def test_a_planted_bug_of_turns_is_seen(bug, tmp_path, monkeypatch, seed):
    buggy = with_bug(halves, tmp_path, *TURN_BUGS[bug])
    monkeypatch.setattr(lab, "Line", buggy.Line)
    monkeypatch.setattr(lab, "in_turns", buggy.in_turns)
    with pytest.raises(AssertionError):
        test_halves_take_turns_and_hide_the_line(seed)
