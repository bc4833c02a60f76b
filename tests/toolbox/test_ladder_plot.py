"""The ladder's picture: bars only for what ran, hollow where speed means nothing here, gains marked
as measured or predicted, every text legible.
"""

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from lessons.toolbox.draw import plotting

RUNG = {"lesson": "05", "tokens_per_s": 300.0, "identical": True, "stand_in": False}
RUNG |= {"not_run": None, "regime": None}


def measured_ladder(rungs=24, peers=6, gain=6.2):
    """Rungs of every kind in turn, with names and regimes as long as the course's longest."""
    kinds = (
        {"regime": {"label": "8 KV heads of 32, 8k tokens", "gain": gain, "measured": True}},
        {"stand_in": "PyTorch stands in for a kernel"},
        {"stand_in": True, "regime": {"label": "context 64k", "gain": 9.0, "measured": False}},
        {"tokens_per_s": None, "not_run": "CUDA graphs need a GPU"},
        {"identical": False},
    )
    steps = [
        RUNG | {"name": f"rotated on the way into cache {i}", "tokens_per_s": 40.0 + 30 * i}
        for i in range(rungs)
    ]
    others = [
        {"name": f"transformers continuous batching {i}", "tokens_per_s": 100.0 + 150 * i}
        for i in range(peers)
    ]
    return plotting.ladder_plot(
        [step | kinds[i % len(kinds)] for i, step in enumerate(steps)],
        others,
        title="24 rungs: 18× the tokens per second of the first",
        caption="NVIDIA H200 · dtype bfloat16 · 32 requests · 2026-11-20",
        predicted_for="H200",
    )


@pytest.mark.parametrize(
    "rungs, peers, gain", [(1, 0, 6.2), (12, 3, 6.2), (24, 6, 6.2), (12, 3, 18), (12, 3, 110)]
)
def test_every_text_is_inside_uncovered_and_large(rungs, peers, gain):
    fig = measured_ladder(rungs, peers, gain)
    assert plotting.texts_outside(fig) == []
    assert plotting.overlapping_texts(fig) == []
    assert min(t.get_fontsize() for t in fig.findobj(Text) if t.get_text()) >= 11


def bars_of(fig):
    return {round(p.get_y() + 0.35): p for p in fig.axes[0].patches}


def test_a_rung_has_a_bar_only_if_it_ran_and_a_solid_one_only_if_its_speed_means_something():
    fig = measured_ladder(5, 2)
    bars = bars_of(fig)
    assert sorted(bars) == [0, 1, 2, 4], "the fourth rung did not run"
    assert [bars[row].get_width() for row in bars] == [40, 70, 100, 160]
    hollow = [to_hex(bars[row].get_facecolor()) == "#ffffff" for row in bars]
    assert hollow == [False, True, True, False]
    assert all(bar.get_x() == 0 for bar in bars.values()) and fig.axes[0].get_xlim()[0] == 0
    assert fig.axes[0].get_xscale() == "linear"
    texts = {t.get_text().strip() for t in fig.findobj(Text)}
    assert "not run: CUDA graphs need a GPU" in texts
    assert {"40 ✓", "70 ✓ tokens only", "100 ✓ tokens only", "160 ✗ tokens differ"} <= texts
    assert "because PyTorch stands in for a kernel: lesson 05" in fig.get_supxlabel()


def test_a_gain_is_filled_if_measured_and_hollow_if_predicted():
    fig = measured_ladder(5, 0)
    gains = [line for line in fig.axes[1].lines if line.get_marker() != "None"]
    found = [(*line.get_xdata(), *line.get_ydata(), line.get_marker()) for line in gains]
    assert found == [(6.2, 0, "s"), (9.0, 2, "o")]
    assert [to_hex(line.get_markerfacecolor()) for line in gains] == ["#0072b2", "#ffffff"]
    assert fig.axes[1].get_xscale() == "log" and not fig.axes[1].patches
    texts = {t.get_text() for t in fig.findobj(Text)}
    assert {"6.2× measured here", "9× predicted, H200", "8 KV heads of 32, 8k tokens"} <= texts


def test_a_gain_names_its_own_device_where_it_is_known():
    regime = {"label": "context 4096", "gain": 2.5, "measured": True, "device": "CPU"}
    rungs = [
        RUNG | {"name": "a", "regime": regime},
        RUNG | {"name": "b", "regime": regime | {"measured": False, "device": "H200"}},
    ]
    texts = {
        t.get_text() for t in plotting.ladder_plot(rungs, title="t", caption="c").findobj(Text)
    }
    assert {"2.5× measured, CPU", "2.5× predicted, H200"} <= texts


def test_peers_are_lines_with_their_speed_and_those_that_did_not_run_are_named():
    peers = [
        {"name": "fast", "tokens_per_s": 500.0, "not_run": None},
        {"name": "slow", "tokens_per_s": 30.0, "not_run": None},
        {"name": "vLLM", "tokens_per_s": None, "not_run": "needs a GPU"},
    ]
    fig = plotting.ladder_plot([RUNG | {"name": "a"}], peers, title="t", caption="c")
    assert [line.get_xdata()[0] for line in fig.axes[0].lines] == [500, 30]
    assert fig.axes[0].get_xlim()[1] > 500, "a peer faster than every rung stays in the picture"
    texts = {t.get_text().strip() for t in fig.findobj(Text)}
    assert {"fast: 500", "slow: 30"} <= texts
    assert fig.get_supxlabel() == "c · not run: vLLM (needs a GPU)"


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: plotting.ladder_plot([], title="", caption=""), "0 rungs, 0 peers; accepted: 1 "),
        (lambda: measured_ladder(25, 9), "25 rungs, 9 peers; accepted: 1 to 24 rungs, up to 8"),
        (
            lambda: plotting.ladder_plot(
                [RUNG | {"name": "a", "tokens_per_s": None}], title="", caption=""
            ),
            "rung 'a' has neither tokens_per_s nor not_run",
        ),
    ],
)
def test_bad_input_is_one_clear_line(call, words):
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_step_that_shows_nothing_points_to_its_regime():
    regime = {"label": "long context", "gain": 5.0, "measured": True}
    flat = RUNG | {"step": 0.97, "regime": regime}
    rungs = [
        flat | {"name": "flat"},
        flat | {"name": "nowhere", "tokens_per_s": 301.0, "regime": None},
        flat | {"name": "steep", "tokens_per_s": 302.0, "step": 1.2},
        flat | {"name": "hollow", "tokens_per_s": 303.0, "stand_in": True},
        flat | {"name": "wrong", "tokens_per_s": 304.0, "identical": False},
    ]
    figure = plotting.ladder_plot(rungs, title="t", caption="c")
    texts = {t.get_text() for t in figure.findobj(Text)}
    assert {"300 ✓ pays there →", "301 ✓", "302 ✓", "303 ✓ tokens only"} <= texts
    assert "304 ✗ tokens differ" in texts
