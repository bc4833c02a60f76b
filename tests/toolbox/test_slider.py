"""Sliders redraw where a reader can move them; elsewhere the figure does not move."""

import sys
from types import SimpleNamespace

import pytest

from lessons.toolbox.draw import slider as module
from lessons.toolbox.draw.figure import frame, style
from lessons.toolbox.draw.slider import slider


@pytest.fixture
def shown(monkeypatch):
    """What IPython displays, as (positional arguments, options)."""
    import IPython.display

    displayed = []
    monkeypatch.setattr(
        IPython.display, "display", lambda *things, **options: displayed.append((things, options))
    )
    return displayed


@pytest.fixture
def front_end(monkeypatch):
    import IPython

    shell = SimpleNamespace(kernel=object(), user_ns={})
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setenv("JPY_SESSION_NAME", "/a/notebook.ipynb")
    return shell


def drawn(calls):
    def draw(**values):
        calls.append(values)
        with style():
            return frame(str(values), "caption", (4, 3))[0]

    return draw


def test_a_still_where_no_front_end_runs(shown):
    calls = []
    assert slider(drawn(calls), size=(1, 9, 2, 5), share=(0.0, 1.0, 0.1, 0.5)) is None
    assert calls == [{"size": 5, "share": 0.5}]
    ((figure,), options), *rest = shown
    assert hasattr(figure, "savefig") and not options and not rest


def test_a_front_end_gets_widgets_and_the_still_in_their_place(shown, front_end):
    calls = []
    slider(drawn(calls), size=(1, 9, 2, 5), power=[16, 256], start={"power": 256})
    bundle, options = shown[-1][0][0], shown[-1][1]
    assert options == {"raw": True} and bundle["image/png"].startswith(b"\x89PNG")
    model = bundle["application/vnd.jupyter.widget-view+json"]["model_id"]
    from ipywidgets.widgets.widget import _instances  # the public table of them is deprecated

    box = _instances[model]
    size, power, _ = box.children
    assert (size.min, size.max, size.step, size.value) == (1, 9, 2, 5)
    assert isinstance(size.value, int) and size.description == "size"
    assert tuple(power.options) == (16, 256) and power.value == 256
    before = len(calls)
    size.value = 7
    assert calls[before:] == [{"size": 7, "power": 256}]


def test_draw_may_print_instead(shown, capsys):
    slider(lambda n: print("n is", n), n=(0, 3, 1, 2))
    assert capsys.readouterr().out == "n is 2\n" and not shown


def test_outside_of_a_notebook_nothing_is_displayed(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    slider(drawn([]), n=(0, 3, 1, 2))
    assert "IPython" not in sys.modules


def test_without_widgets_the_still(shown, front_end, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    slider(drawn([]), n=(0, 3, 1, 2))
    assert len(shown) == 1 and hasattr(shown[0][0][0], "savefig")


@pytest.mark.parametrize(
    "ranges, message",
    [
        ({"n": (0, 3, 1)}, r"n is \(0, 3, 1\); accepted: n=\(low, high, step, start\) or n=\["),
        ({"n": (0, 3, 1, 4)}, "low <= start <= high"),
        ({"n": (0, 3, 0, 1)}, "step > 0"),
        ({"n": []}, r"n is \[\]"),
        ({"n": 3}, "n is 3"),
        ({"n": [1, 2], "start": {"n": 5}}, r"start\['n'\] is 5; accepted: one of \[1, 2\]"),
    ],
)
def test_wrong_ranges_are_told(ranges, message):
    with pytest.raises(ValueError, match=message):
        slider(lambda n: None, **ranges)


def test_vs_code_and_colab_count_as_front_ends(front_end, monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME")
    assert not module._has_front_end()
    front_end.user_ns["__vsc_ipynb_file__"] = "a.ipynb"
    assert module._has_front_end()
