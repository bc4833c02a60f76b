"""Proves the workload, the fitted cost, the numbers of the README, and the pictures."""

import random
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from lessons.l11_cuda_graphs.lab.testing import new_model
from lessons.l14_continuous_batching.lab import cost, figures, pictures, workload
from lessons.l14_continuous_batching.lab.cost import Sample, StepCost, fit, measured_steps
from lessons.l14_continuous_batching.lab.occupancy import gain, offline, place_rows
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.proof.pages import pages

README = pages(Path(__file__).parents[1])


# ---------------------------------------------------------------- workload


@pytest.mark.parametrize(
    "lengths, mean, variation",
    [
        (workload.uniform(50, 500), 275, 450 / 12**0.5 / 275),
        (workload.geometric(40), 40, (1 - 1 / 40) ** 0.5),
        (workload.bimodal(10, 100, 0.1), 19, 27 / 19),
    ],
)
def test_lengths_have_the_moments_of_their_distribution(lengths, mean, variation):
    drawn = workload.draw(lengths, 20_000, seed=random.randrange(10**6))
    assert fmean(drawn) == pytest.approx(mean, rel=0.05)
    assert workload.variation(drawn) == pytest.approx(variation, rel=0.08)
    assert min(drawn) >= 1


def test_arrivals_are_independent_and_repeat():
    times = workload.poisson(4.0, 20_000, seed=3)
    assert times == workload.poisson(4.0, 20_000, seed=3) == sorted(times)
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.05)
    gaps = [b - a for a, b in pairwise(times)]
    assert workload.variation(gaps) == pytest.approx(1, rel=0.05)


def test_the_gain_tends_to_the_longest_over_the_mean():
    """Uniform from 1 to 9 on 2 places: the longest of two is 6.48 on average, the mean 5."""
    drawn = workload.draw(workload.uniform(1, 9), 4000, seed=5)
    waves = [max(drawn[i : i + 2]) for i in range(0, len(drawn), 2)]
    assert gain(drawn, 2) == pytest.approx(fmean(waves) / fmean(drawn), rel=0.01)
    assert gain([7] * 12, 4) == 1


def test_a_request_keeps_its_place():
    table = place_rows(offline("continuous", [3, 1, 2], 2), 2)
    assert table == [[0, 0, 0], [1, 2, 2]]


# ---------------------------------------------------------------- cost


def test_a_fit_finds_the_cost_that_made_the_steps():
    truth = StepCost(2e-3, 3e-5, 4e-8)
    shapes = [(1, 10), (8, 400), (32, 9000), (512, 512), (64, 64)]
    samples = [Sample(t, n, truth.seconds(t, n)) for t, n in shapes]
    found = fit(samples)
    assert (found.fixed_s, found.token_s, found.context_s) == pytest.approx(
        (2e-3, 3e-5, 4e-8), rel=1e-6
    )
    assert found.worst_error(samples) < 1e-6
    with pytest.raises(ValueError, match="3 or more"):
        fit(samples[:2])


def test_steps_of_a_model_are_measured(seed):
    samples = measured_steps(new_model(), ((1, 1, 7), (3, 1, 20), (2, 5, 0)), budget_s=0.01)
    assert [(s.tokens, s.context) for s in samples] == [(1, 8), (3, 63), (10, 10)]
    assert all(s.seconds > 0 for s in samples)


def test_the_recorded_steps_have_a_cost():
    samples, machine = cost.recorded_samples()
    found = fit(samples)
    assert min(found.fixed_s, found.token_s, found.context_s) > 0 and machine["torch"]


# ---------------------------------------------------------------- what the text says


@pytest.mark.sample(4, of="pictures")
def test_the_numbers_of_the_readme(monkeypatch):
    monkeypatch.setattr(figures, "DRAWS", 15)
    assert figures.job_gain() == pytest.approx(1.36, abs=0.05) and "1.36×" in README
    static, continuous = figures.idle_shares()
    assert static == pytest.approx(0.33, abs=0.03) and "33 %" in README
    assert continuous == pytest.approx(0.10, abs=0.03) and "10 %" in README


@pytest.mark.sample(4, of="pictures")
def test_the_table_of_the_readme():
    """Offline against online, as the schedulers give it with the predicted cost."""
    found = figures.offline_against_online()
    for (way, load), (rate, median_s, p95_s) in found.items():
        where = "offline" if load is None else f"{load:.0%} load".replace("%", " %")
        row = f"| {where} | {way} | {rate:,.0f} | {median_s:.2f} | {p95_s:.2f} |"
        assert row in README, row
    for way in ("dynamic", "continuous"):
        assert f"{figures.lone_latency_s(way):.2f} s" in README
    medians_s = {way: found[way, 0.2][1] for way in figures.WAYS}
    assert round(medians_s["dynamic"] / medians_s["continuous"]) == 9
    assert round(medians_s["static"] / medians_s["continuous"]) == 15


def test_which_mixes_gain_more_than_ten_times():
    """By the formula: of the figure's mixes those whose long answers are 80 to 400 times as long as
    the short ones. And the gains of the figure are those that the text quotes.
    """
    above = []
    for short, long, share in pictures.MIXES:
        mean = share * long + (1 - share) * short
        longest = long - (long - short) * (1 - share) ** pictures.PLACES
        above += [long / short] * (longest / mean > 10)
    assert above == [80, 160, 400]
    picture = (pictures.HERE / "gain.svg").read_text(encoding="utf-8")
    for quoted in ("3.9×", "19×"):
        assert quoted in README and quoted in picture


def test_geometric_lengths_gain_by_the_harmonic_numbers():
    """E[max of B] / E[length], which many draws come near."""
    for places, said in ((4, "2.1× on 4 places"), (32, "4.06×"), (64, "4.7× on 64")):
        limit = sum(1 / place for place in range(1, places + 1))
        quoted = said.split("×")[0]
        digits = len(quoted.split(".")[1])
        assert said in README and f"{limit:.{digits}f}" == quoted
        drawn = workload.draw(workload.geometric(400), 200 * places, seed=14)
        waves = [max(drawn[i : i + places]) for i in range(0, len(drawn), places)]
        assert fmean(waves) / fmean(drawn) == pytest.approx(limit, rel=0.06)


def test_waves_reach_a_third_of_the_tokens(monkeypatch):
    """Where more arrives than full places can answer, with the recorded cost of a step."""
    monkeypatch.setattr(pictures, "LOADS", (1.2,))
    samples, _ = cost.recorded_samples()
    _, _, found = pictures.load_curves(fit(samples))
    tokens_per_s = {way: rates[0] for way, (rates, _) in found.items()}
    for way in ("static", "dynamic"):
        assert tokens_per_s[way] / tokens_per_s["continuous"] == pytest.approx(1 / 3, abs=0.03)


# ---------------------------------------------------------------- pictures


@pytest.mark.parametrize("long, share_long", [(200, 0.05), (10, 0.5), (1000, 0.01)])
@pytest.mark.sample(4, of="pictures")
def test_the_slider_draws_the_formula(long, share_long):
    figure = figures.draw_gain_by_places(long, share_long)
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_a_text_film_shows_idle_places():
    assert figures.text_film("static", [1, 3, 2], 2) == "A··CC\nBBB··"
    assert figures.text_film("continuous", [1, 3, 2], 2) == "ACC\nBBB"


@pytest.mark.parametrize("name", pictures.PICTURES)
@pytest.mark.sample(4, of="pictures")
def test_pictures_are_drawn_whole(name, monkeypatch):
    """With fewer requests than the committed ones, to save time."""
    monkeypatch.setattr(pictures, "REQUESTS", 640)
    monkeypatch.setattr(pictures, "LOAD_REQUESTS", 48)
    pictures.gains.cache_clear()
    draw, alt = pictures.PICTURES[name]
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert alt in (pictures.HERE / f"{name}.svg").read_text(encoding="utf-8")
    pictures.gains.cache_clear()
