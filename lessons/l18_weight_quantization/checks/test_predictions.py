"""The record of methods.py has every method, and says what the lesson says."""

import pytest
import torch

from lessons.l18_weight_quantization.lab.methods import METHODS, main, recorded, rounded
from lessons.l18_weight_quantization.lab.quality import bits_per_weight
from lessons.l18_weight_quantization.naive import round_to_nearest


@pytest.fixture(scope="module")
def found() -> dict:
    return recorded()


@pytest.fixture(scope="module")
def rows(found) -> dict:
    return {row["name"]: row for row in found["rows"]}


def test_every_method_is_counted(rows):
    assert list(rows) == [method.name for method in METHODS]
    assert all((row["way"], row["format"]) == m[1:3] for row, m in zip(rows.values(), METHODS))


def test_bits_are_those_of_the_formats(rows):
    for shared in ("row", "g128", "g32"):
        ways = {rows[name]["bits"] for name in rows if name.endswith(f"int4-{shared}")}
        assert len(ways) == 1  # methods differ in the loss alone
    assert rows["int4-g128-symmetric"]["bits"] == 4.125
    assert rows["nf4"]["bits"] == 4.5 and rows["mxfp4"]["bits"] == 4.25
    assert rows["gguf-q8_0"]["bits"] == 8.5 and rows["gguf-q4_0"]["bits"] == 4.5


def test_methods_that_read_text_lose_less_at_the_same_bits(rows):
    """Each interval lies below the one before, although GPTQ's matrix is further from the
    original.
    """
    for shared in ("row", "g128"):
        plain, scaled, solved = (rows[f"{way}int4-{shared}"] for way in ("", "awq-", "gptq-"))
        assert solved["kl"]["high"] < scaled["kl"]["low"]
        assert scaled["kl"]["high"] < plain["kl"]["low"]
        assert scaled["added_loss"]["high"] < plain["added_loss"]["low"]
        assert solved["weight_error"] > plain["weight_error"]


def test_what_the_figure_of_losses_says(rows):
    """INT8 next to nothing, one scale for a matrix most of all, GPTQ with one scale a row about as
    much as rounding with groups of 32.
    """
    added = {name: row["added_loss"] for name, row in rows.items()}
    assert abs(added["int8-row"]["mean"]) < 0.001
    four_bits = [loss["mean"] for name, loss in added.items() if "int4" in name]
    assert added["int4-tensor"]["mean"] == max(four_bits) > 5 * sorted(four_bits)[-2]
    solved, plain = added["gptq-int4-row"], added["int4-g32"]
    assert plain["low"] < solved["mean"] < plain["high"] < solved["high"]


def test_training_gives_back_and_merging_into_4_bits_takes_away(found):
    qat, qlora = found["qat"], found["qlora"]
    assert qat["qat"]["kl"]["high"] < qat["rounded"]["kl"]["low"]
    assert qlora["adapted"]["mean"] < qlora["float"]["mean"] < qlora["nf4"]["mean"]
    assert qlora["merged_bf16"]["mean"] == pytest.approx(qlora["adapted"]["mean"], abs=1e-3)
    assert qlora["merged_nf4"]["mean"] > qlora["adapted"]["mean"]
    assert qlora["learned"] < 0.04 * qlora["weights"]


def test_a_method_builds_a_twin():
    layer = torch.nn.Sequential(torch.nn.Linear(32, 8))
    method = rounded("name", "INT4 g16", lambda weight: round_to_nearest(weight, 4, 16, True))
    assert bits_per_weight(method.build(layer, torch.empty(0))) == 5


def test_an_unknown_name_is_refused(capsys):
    assert main(["gptq-int3"]) == 2
    assert capsys.readouterr().err.startswith("NAME: got gptq-int3; accepted: fp8-row, ")
