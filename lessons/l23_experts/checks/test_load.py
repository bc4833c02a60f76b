"""Loads by hand, and what the table of them shows."""

import pytest
import torch

from lessons.l20_parallelism.shards.sharding import experts_of
from lessons.l23_experts.lab import imbalance
from lessons.l23_experts.ranks.load import Load, capacity_of, load_of


def test_load_by_hand():
    """Eight experts on four ranks; the busiest expert has three times the mean, its rank twice."""
    load = Load((6, 2, 1, 1, 2, 2, 1, 1))
    assert (load.mean, load.imbalance) == (2.0, 3.0)
    assert load.of_ranks(4).counts == (8, 2, 4, 2) and load.of_ranks(4).imbalance == 2.0
    assert load.dropped(2) == 4 and load.dropped(6) == 0
    chosen = torch.tensor([[0, 1], [0, 2]])
    assert load_of(chosen, 4).counts == (2, 1, 1, 0)
    assert Load((0, 0)).imbalance == 1.0
    assert capacity_of(40, 2, 8, 1.0) == 10 and capacity_of(5, 2, 8, 1.25) == 2


def test_experts_of_ranks():
    assert [list(experts_of(8, rank, 4)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [len(experts_of(10, rank, 4)) for rank in range(4)] == [2, 3, 2, 3]
    with pytest.raises(ValueError, match=r"ranks: got 9; accepted: 1 to 8"):
        experts_of(8, 0, 9)


def test_a_bias_balances_a_skewed_router(seed):
    """DeepSeek-V3's: hardly any pair is dropped, and no weight of the sum changed."""
    even, skewed, balanced = imbalance.routers(16, 2).values()
    rows = [imbalance.row_of(router, 2048, 4) for router in (even, skewed, balanced)]
    assert rows[1].experts > 2 > 1.4 > rows[2].experts
    assert rows[1].dropped[-1] > 0 == rows[2].dropped[-1] == rows[0].dropped[-1]
    assert torch.equal(skewed.weight, balanced.weight)


def test_the_table_of_loads(capsys):
    assert imbalance.main(["--experts", "6", "--top-k", "2", "--ranks", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "6 experts on 3 ranks, 2 of them for each token"
    assert sum(line.lstrip().startswith("4096") for line in lines) == 3
    for wrong in (["--ranks", "7"], ["--top-k", "7"]):
        with pytest.raises(SystemExit):
            imbalance.main(["--experts", "6", *wrong])
        assert len(capsys.readouterr().err.splitlines()) == 1
