"""What serving costs is computed from the rounds that were run."""

import pytest

from reference import speed_serving


def test_a_ratio_compares_two_of_one_round():
    """The machine was twice as slow in the second round; the overhead was a tenth in each."""
    rounds = [
        {"engine alone": 100.0, "async engine": 90.0, "server": 80.0},
        {"engine alone": 50.0, "async engine": 45.0, "server": 25.0},
        {"engine alone": 100.0, "async engine": 91.0, "server": 70.0},
    ]
    gaps = [0.01] * 98 + [0.5] * 3
    record = speed_serving.summarize(rounds, {"whole": gaps})
    assert record["overhead"] == pytest.approx({"async engine": 0.1, "server": 0.3})
    assert record["tokens_per_s"]["engine alone"] == 100 and record["rounds"] == rounds
    burst = record["bursts"]["whole"]
    assert burst["median_itl_s"] == 0.01 and burst["p99_over_median"] == pytest.approx(50)


@pytest.mark.parametrize("name", ["streams", "input-len", "output-len", "rounds"])
def test_mistakes_are_one_line(name, capsys):
    with pytest.raises(SystemExit) as end:
        speed_serving.main([f"--{name}", "0"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert f"--{name} must be at least 1, got 0" in said
