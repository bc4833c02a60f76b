"""reference.bench.speed_drafts in small: its record, and that other tokens cannot pass."""

import json

import pytest
import torch

from reference.bench import speed_drafts
from reference.speculation.verification import Verifier


@pytest.fixture(autouse=True)
def threads():
    """As they were."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def measured(out, *more, method="ngram") -> int:
    few = ["--batch", "2", "--requests", "2", "--rounds", "1", "--tokens", "6"]
    return speed_drafts.main([*few, "--method", method, "--out", str(out), *more])


def test_a_method_is_measured_beside_the_plain_engine(tmp_path):
    assert measured(tmp_path) == 0
    record = json.loads((tmp_path / "speed_drafts.json").read_text())
    plain, ngram = record["entries"]
    assert (plain["method"], ngram["method"]) == (speed_drafts.PLAIN, "ngram")
    assert plain["tokens_per_pass"] == 1 <= ngram["tokens_per_pass"]
    assert plain["faster_by_wall"]["median"] == 1 and ngram["faster_by_wall"]["median"] > 0
    assert ngram["identical"] and 0 <= ngram["acceptance_rate"] <= 1


def test_a_tree_is_measured_beside_a_chain(tmp_path):
    """Chosen by the heads' own acceptance; and texts find a row by its name."""
    assert {"medusa", "medusa-tree", "eagle", "eagle-tree"} <= set(speed_drafts.METHODS)
    assert measured(tmp_path, method="medusa-tree") == 0
    record = json.loads((tmp_path / "speed_drafts.json").read_text())
    config = record["configs"]["medusa-tree"]
    assert config["method"] == "medusa" and config["speculative_token_tree"] == "auto"
    assert [entry["name"] for entry in record["entries"]][-1] == "medusa-tree at 2"
    assert record["entries"][-1]["identical"]


def test_other_tokens_fail_the_command(tmp_path, monkeypatch, capsys):
    def wrong(self, logits, rows, drafts):
        found = compare(self, logits, rows, drafts)
        return [([(tokens[0] + 1) % 4096], [0]) for tokens, _ in found]

    compare = Verifier.compare
    monkeypatch.setattr(Verifier, "compare", wrong)
    assert measured(tmp_path) == 1
    assert "FAILED, ngram at 2: differs" in capsys.readouterr().err


def test_a_wrong_argument_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        measured(tmp_path, "--tokens", "0")
    assert "--tokens must be at least 1, got 0" in capsys.readouterr().err
