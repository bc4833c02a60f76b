"""reference.bench.turns: chats that come back, in small."""

import json

import pytest

from reference.bench import turns
from reference.bench.turns import ANSWER, BLOCK, FIRST, NEXT, blocks_of
from reference.bench.turns_figure import draw_turns, later


def a_record(ttft_ms: dict[str, list[float]]) -> dict:
    entries = []
    for name, values in ttft_ms.items():
        bands = [{key: ms / 1000 for key in ("median", "p20", "p80")} for ms in values]
        entry = {"name": name, "ttft_s": bands, "cpu_s": bands}
        entries.append(entry | {"asked_tokens": 10, "found_tokens": 9})
    return dict(fingerprint={"device": "x"}, model="m", chats=20, turns=3, fits=10, entries=entries)


def test_a_chat_fills_so_many_blocks():
    assert blocks_of(1) == -(-(FIRST + ANSWER) // BLOCK)
    assert blocks_of(8) * BLOCK >= FIRST + 7 * NEXT + 8 * ANSWER > (blocks_of(8) - 1) * BLOCK


def test_the_headline_is_of_the_second_turn_and_later():
    fast = [100.0, 20.0, 30.0]
    record = a_record({"no cache": [100.0, 100.0, 150.0]} | dict.fromkeys(turns.WAYS[1:], fast))
    assert [later(entry) for entry in record["entries"]] == [125, 25, 25, 25]
    assert "takes 0.20 of" in draw_turns(record).get_suptitle()


@pytest.mark.parametrize("arguments", [["--chats", "9"], ["--turns", "1"], ["--threads", "0"]])
def test_sizes_that_cannot_be_measured_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        turns.main(arguments)
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert arguments[0] in said and "at least" in said


def test_chats_that_come_back_in_small(tmp_path, request):
    """All ways give the same tokens, or the command fails."""
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: takes half a minute (make test-all)")
    assert turns.main(["--chats", "10", "--turns", "3", "--out", str(tmp_path)]) == 0
    entries = json.loads((tmp_path / "turns.json").read_text())["entries"]
    assert [entry["name"] for entry in entries] == list(turns.WAYS)
    assert not entries[1]["found_tokens"] and not entries[2]["faults"]
    for entry in entries[2:]:
        first = 10 * ((FIRST - 1) // BLOCK) * BLOCK  # nothing of a chat is there before it begins
        later = entry["asked_tokens"] - first
        # but for blocks that the turn before had not filled
        assert 0.9 * later < entry["found_tokens"] <= later
        assert entry["loaded_blocks"] * BLOCK == entry["found_tokens"]
    assert entries[3]["file_hits"] > 0 and (tmp_path / "turns.svg").exists()
