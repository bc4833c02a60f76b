"""What the tables of balance.py show, on fewer tokens; and that the record is of this code."""

import json

import pytest
import torch

from lessons.l23_experts.lab import balance
from lessons.l23_experts.ranks.load import load_of
from lessons.l23_experts.ranks.placement import by_number, in_order, in_turn, place


def test_zipf_is_drawn_without_repetition(seed):
    chosen = balance.zipf()(500)
    assert chosen.shape == (500, balance.TOP_K)
    assert all(len(set(row)) == balance.TOP_K for row in chosen.tolist())
    counts = sorted(load_of(chosen, balance.EXPERTS).counts, reverse=True)
    assert counts[0] > 300 and counts[0] > 3 * counts[20] > 0


def test_ranks_are_judged_by_the_pairs_of_their_slots():
    """Two ranks with two slots each; expert 0 has both of its copies on the first."""
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 2]])
    copies = place((4, 2, 2), 4, 2)
    assert balance.imbalance_of(chosen, in_order(4, 2)) == 1.5
    assert balance.imbalance_of(chosen, copies) == 1.0
    assert balance.imbalance_of(chosen, copies, by_number) >= 1.0


def test_copies_help_and_old_statistics_hurt(monkeypatch, seed):
    monkeypatch.setattr(balance, "STATISTICS", 1024)
    monkeypatch.setattr(balance, "STEP", 1024)
    first, second = balance.zipf(), balance.zipf()
    fresh, stale = balance.rows_of(first), balance.rows_of(first, second)
    assert fresh["in order"] > fresh["0"] > 2 > 1.3 > fresh["32"]
    assert fresh["32, groups on nodes"] < fresh["0"]
    assert stale["32"] > 1.5 > fresh["32"]
    moves = balance.moves_of(first, second)
    as_numbered, kept = moves.values()
    assert as_numbered["experts"] >= kept["experts"] > 0
    size = balance.EXPERT_BYTES * balance.LAYERS * kept["experts"] / balance.RANKS
    assert kept["gb_a_gpu"] == pytest.approx(size / 1e9)


def test_the_record_has_what_the_code_counts():
    """Of the source that needs no model; random numbers may differ between versions of PyTorch."""
    record = json.loads(balance.RECORD.read_text(encoding="utf-8"))
    torch.manual_seed(balance.SEED)
    again = balance.rows_of(balance.zipf())
    written = record["balance"]["zipf"]
    assert again.keys() == written.keys()
    for name, value in again.items():
        assert value == pytest.approx(written[name], rel=0.25), name
    for part in ("balance", "stale"):
        for row in record[part].values():
            assert row["busiest expert"] > row["in order"] > 1 <= row["32"]
    both = record["stale"]["placed for both, serving modules"]["0"]
    assert both < record["stale"]["placed for lessons, serving modules"]["0"]


def test_the_record_of_few_moves():
    """They never move more than they may, and 32 bring most of what a new placement brings."""
    record = json.loads(balance.RECORD.read_text(encoding="utf-8"))
    rows = {int(most): row for most, row in record["mended"].items()}
    assert all(row["experts"] <= most for most, row in rows.items())
    fresh = record["balance"]["lessons"]["32"]
    assert rows[0]["balance"] - rows[32]["balance"] > 0.8 * (rows[0]["balance"] - fresh)
    assert record["moves"]["from modules to lessons"]["as EPLB numbers ranks"]["experts"] == 277


def test_tokens_take_copies_by_turns_unless_told(seed):
    chosen = balance.zipf()(64)
    placement = place(load_of(chosen, balance.EXPERTS).counts, 288, 32)
    wanted = balance.imbalance_of(chosen, placement, in_turn)
    assert balance.imbalance_of(chosen, placement) == wanted


def test_show_prints_every_row(capsys):
    record = json.loads(balance.RECORD.read_text(encoding="utf-8"))
    balance.show(record)
    text = capsys.readouterr().out
    names = [*record["balance"], *record["stale"], *record["moves"]]
    assert all(name in text for name in names)
