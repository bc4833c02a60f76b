"""reference.bench.speed_formats in small: its record."""

import json

import pytest
import torch

from reference.bench import speed_formats


@pytest.fixture(autouse=True)
def threads():
    """As they were."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def measured(out, *more) -> int:
    few = ["--batch", "2", "--requests", "2", "--rounds", "1", "--tokens", "4"]
    return speed_formats.main([*few, "--out", str(out), *more])


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", ["int4", "Q8_0", "cache in int8"])
def test_a_format_is_measured_beside_float32(format, tmp_path):
    assert measured(tmp_path, "--format", format) == 0
    record = json.loads((tmp_path / "speed_formats.json").read_text())
    asked = {key: record[key] for key in ("schema", "threads", "model", "tokens", "rounds")}
    assert asked == dict(schema=1, threads=1, model="models/tiny", tokens=4, rounds=1)
    assert record["fingerprint"]["cpu"]
    plain, own = record["entries"]
    assert (plain["format"], own["format"]) == (speed_formats.PLAIN, format)
    assert plain["agreement"] == plain["faster_by_cpu"]["median"] == 1
    assert 0 <= own["agreement"] <= 1 and own["faster_by_cpu"]["median"] > 0


def test_a_wrong_argument_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        measured(tmp_path, "--rounds", "0")
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
