"""A placement that follows loads: its window, interval and moves, and what the record shows."""

import json

import pytest
import torch

from lessons.l23_experts.lab import stream
from lessons.l23_experts.ranks import balancer
from lessons.l23_experts.ranks.balancer import Balancer, anew, by_few_moves
from lessons.l23_experts.ranks.load import load_of
from lessons.l23_experts.ranks.placement import in_order, moved, place
from lessons.toolbox.proof.planted import with_bug


def steps_of(*experts: int, num_tokens: int = 6) -> list[torch.Tensor]:
    """A step for each: all of its tokens choose this expert and the one after it, of 8."""
    return [torch.tensor([[e, (e + 1) % 8]] * num_tokens) for e in experts]


def check_window(module) -> None:
    """Loads are those of the last two steps, and nothing moves before the interval."""
    found = module.Balancer(in_order(8, 4), 2, 4, module.anew)
    for chosen in steps_of(0, 4, 4):
        found.see(chosen)
    assert found.loads == [0, 0, 0, 0, 12, 12, 0, 0]
    assert found.num_moved == 0 and found.placement == in_order(8, 4)


def check_interval(module) -> None:
    """Every second step a new placement, from all that was seen."""
    found, before = module.Balancer(in_order(8, 4), 9, 2, module.anew), in_order(8, 4)
    seen, total = [], 0
    for number, chosen in enumerate(steps_of(0, 2, 2, 6, 6, 6)):
        found.see(chosen)
        seen.append(chosen)
        if number % 2:
            after = place(load_of(torch.cat(seen), 8).counts, 8, 4)
            total += moved(before, after)
            before = after
        assert found.placement == before and found.num_moved == total
    assert total > 0


def test_a_window_forgets():
    check_window(balancer)


def test_a_balancer_renews_at_its_interval():
    check_interval(balancer)


def test_few_moves_are_kept():
    found = Balancer(in_order(8, 4), 4, 1, by_few_moves(2))
    for number, chosen in enumerate(steps_of(0, 3, 5), 1):
        found.see(chosen)
        assert found.num_moved <= 2 * number
    assert found.num_moved > 0


def test_wrong_windows_are_refused():
    for wrong in (dict(window=0, interval=1), dict(window=1, interval=0)):
        with pytest.raises(ValueError, match="got 0"):
            Balancer(in_order(8, 4), renew=anew, **wrong)


def test_the_record_of_the_stream(capsys):
    """Anew is even within a subject and uneven after a change; few moves are few; a long window is
    better when a subject comes back. And the code makes such records.
    """
    record = json.loads(stream.RECORD.read_text(encoding="utf-8"))
    rules, steps = record["rules"], stream.STEPS
    short, long, few, never = (
        rules[name] for name in ("anew, 8 steps", "anew, 32 steps", "16 moves, 8 steps", "never")
    )
    assert len(short["steps"]) == 3 * steps
    assert max(short["steps"][8:steps]) < 1.25 < min(short["steps"][steps : steps + 8])
    back = slice(2 * steps, 2 * steps + 8)
    assert sum(short["steps"][back]) > sum(never["steps"][back]) > sum(long["steps"][back])
    assert few["moved"] < short["moved"] / 10 and short["mean"] < few["mean"] < never["mean"]
    assert stream.first_placement().per_rank == 9
    few_steps = [torch.rand(64, stream.EXPERTS).topk(8).indices for _ in range(9)]
    stream.show(stream.record_of(few_steps))
    text = capsys.readouterr().out
    assert all(name in text for name in rules)


BUGS = {
    "nothing is forgotten": ("deque(maxlen=window)", "deque()"),
    "the last step alone": (
        "[sum(counts) for counts in zip(*self.recent)]",
        "list(self.recent[-1])",
    ),
    "a step too early": (
        "self.num_steps % self.interval == 0",
        "(self.num_steps + 1) % self.interval == 0",
    ),
    "moves are counted from the start": (
        "moved(self.placement, after)",
        "moved(after, self.placement) * 2",
    ),
    "the first placement for ever": ("self.placement = after", "pass"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path):
    buggy = with_bug(balancer, tmp_path, *BUGS[bug])
    with pytest.raises(AssertionError):
        check_window(buggy)
        check_interval(buggy)
