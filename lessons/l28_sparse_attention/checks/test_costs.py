"""What choosing costs: each part by its definition, and the crossings by search."""

import math

import pytest

from lessons.l28_sparse_attention import costs
from lessons.l28_sparse_attention.costs import (
    Part,
    Shape,
    crossing,
    full,
    most,
    prompt_crossing,
    prompt_s,
    sparse,
    sparse_s,
    top_k_s,
)
from lessons.toolbox.measure.hardware import CHIPS
from lessons.toolbox.proof.refusals import assert_message

REAL = dict(launch_s=5e-6, one_sm_a_row=True)


def test_rows_by_hand():
    shape = Shape()
    assert shape.row_bytes == 2 * 576 and shape.index_row_bytes == 132
    assert shape.row_flops == 128 * 2 * (576 + 512)
    assert shape.pair_flops == 128 * 2 * (192 + 128)
    assert shape.index_row_flops == 64 * 128 * 2
    parts = sparse(10_000, 3)
    assert parts["indexer"].bytes == 30_000 * 136 and parts["top k"].bytes == 30_000 * 20
    assert parts["chosen rows"] == full(2048, 3)
    assert sparse(100)["chosen rows"] == full(100)


def test_a_part_takes_what_is_slower():
    chip = CHIPS["h100"]
    assert Part(3.35e12).seconds(chip) == pytest.approx(1)
    assert Part(1, 989.5e12, 1979e12).seconds(chip) == pytest.approx(2)


@pytest.mark.parametrize("batch", [1, 8, 32, 132, 133, 500])
@pytest.mark.parametrize("options", [{}, REAL], ids=["bytes", "real"])
def test_the_crossing_is_where_both_are_equal(batch, options):
    at = crossing(batch, **options)
    if at == math.inf:
        return
    for context, sign in ((0.99 * at, -1), (1.01 * at, 1)):
        lead = full(context, batch).seconds() - sparse_s(context, batch, **options)
        assert lead * sign > 0, context


def test_it_never_pays_where_an_index_key_is_as_large_as_a_row():
    assert crossing(shape=Shape(rank=64, rope=2)) == math.inf
    assert crossing(shape=Shape(top_k=10**9)) > 10**9


def test_the_most_is_a_limit():
    ratios = [full(n).seconds() / sparse_s(n) for n in (10**5, 10**7, 10**9)]
    assert ratios == sorted(ratios) and ratios[-1] == pytest.approx(most(), rel=1e-4)


def test_rows_of_scores_on_sms():
    """132 rows take as long as one, one more twice as long; memory is the limit of many."""
    one = top_k_s(131072)
    assert top_k_s(131072, 132) == pytest.approx(max(one, 132 * 131072 * 20 / 3.35e12))
    assert top_k_s(131072, 133) >= 2 * one - 1e-12


def test_a_prompts_crossing_is_where_both_are_equal():
    at = prompt_crossing()
    every, chosen = prompt_s(at)
    assert every == pytest.approx(chosen)
    assert prompt_s(2 * at)[0] > prompt_s(2 * at)[1] and prompt_s(at / 2)[0] < prompt_s(at / 2)[1]


def test_the_table_is_printed(capsys):
    assert costs.main() == 0
    assert "pays from 2,369 tokens on, at most 7.4 times" in capsys.readouterr().out


def test_wrong_numbers_are_refused():
    assert_message(crossing, dict(batch=0), "batch: got 0")
    assert_message(crossing, dict(launch_s=-1.0), "launch_s: got -1.0")
