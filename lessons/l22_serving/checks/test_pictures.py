"""Proves the pictures whole, and that what their titles say holds, also on smaller runs."""

import pytest

from lessons.l22_serving.lab import experiments, pictures
from lessons.l22_serving.load import percentile
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside

SMALL = {
    "users": lambda: pictures.draw_users(many=60),
    "overload": lambda: pictures.draw_overload((0.5, 2.0), seconds=4.0),
    "knee": lambda: pictures.draw_knee(
        {"Poisson": (0.5, 1.0, 1.2), "bursts": (0.3, 0.9)}, count=50
    ),
    "omission": pictures.draw_omission,
}


@pytest.mark.parametrize("name", pictures.PICTURES)
@pytest.mark.sample(4, of="pictures")
def test_pictures_are_drawn_whole(name, monkeypatch):
    """With fewer requests than the committed ones, to save time."""
    for module in (experiments, pictures):
        monkeypatch.setattr(module, "capacity_per_s", lambda: 20.0)
    figure = SMALL[name]()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    _, alt = pictures.PICTURES[name]
    assert alt in (pictures.HERE / f"{name}.svg").read_text(encoding="utf-8")


@pytest.mark.sample(4, of="pictures")
def test_the_capacity_is_what_full_places_answer():
    """A step of 16 places takes about 12 ms, so an answer of 64 tokens about 0.8 s; and its
    prompt's 512 tokens take some 15 ms of each row's time.
    """
    assert experiments.capacity_per_s(120) == pytest.approx(20, rel=0.1)


def test_omission_is_as_computed_by_hand():
    """A hundred of a thousand arrivals fall into the stall, and wait from 10 s down to 0.1 s; the
    client that waits for its answer sends one of them.
    """
    hidden, seen = experiments.omission().values()
    assert sum(latency > 0.02 for latency in hidden) == 1
    late = sorted(latency for latency in seen if latency > 0.02)
    assert len(late) == 100 and late[-1] == pytest.approx(10.01)
    assert late[0] == pytest.approx(0.11, abs=1e-6)
    assert percentile(hidden, 99) == pytest.approx(0.01) and percentile(seen, 99) > 8.9


def test_each_step_of_the_ladder_helps(monkeypatch):
    """More than the server can answer, for four seconds."""
    monkeypatch.setattr(experiments, "capacity_per_s", lambda: 20.0)
    rows = {row.name: row for row in experiments.ladder(experiments.crowd(seconds=4.0, load=1.6))}
    blocking, many, fair, deadlines, admission = rows.values()
    assert many.goodput_per_s > 4 * blocking.goodput_per_s
    assert many.median_ttft_s < blocking.median_ttft_s / 3
    assert fair.modest_p99_ttft_s < many.modest_p99_ttft_s / 2
    assert deadlines.goodput_per_s >= fair.goodput_per_s
    assert admission.p99_ttft_s < deadlines.p99_ttft_s and admission.refused > 0.1
