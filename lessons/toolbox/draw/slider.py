"""A figure with sliders in a notebook, and a still figure where no front end can move them.

    slider(draw_speed, cost_ratio=(0.0, 0.6, 0.05, 0.1))          # low, high, step, where it starts
    slider(draw_spike, chunked=[256, 512, 1024], start={"chunked": 512})

The still is stored with the notebook, so GitHub, nbviewer and a printed page show it too.
"""

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence


def slider(
    draw: Callable,
    *,
    start: Mapping[str, object] | None = None,
    still: Callable[[], object] | None = None,
    **ranges: Sequence,
) -> None:
    """Show draw(name=value, ...) and redraw it whenever a slider moves.

    ranges: {parameter of draw: (low, high, step, start)}, whole numbers if all four are; or a list
    of the values to choose from, of which `start` names the first shown (default: the first).
    draw returns a figure, or prints. still: a function that draws what a page shows on which
    nothing moves; None: draw at the start. Raises ValueError for anything else.
    """
    start = dict(start or {})
    for name, values in ranges.items():
        _check(name, values, start)
        start.setdefault(name, values[3] if isinstance(values, tuple) else values[0])
    picture = still() if still else draw(**start)
    if not _has_front_end():
        _show(picture)
        return
    try:
        import ipywidgets
        from IPython.display import display
    except ImportError:
        _show(picture)
        return
    controls = {name: _control(ipywidgets, name, v, start[name]) for name, v in ranges.items()}

    output = ipywidgets.Output()

    def redraw(_change=None):
        with output:
            output.clear_output(wait=True)
            _show(draw(**{name: control.value for name, control in controls.items()}))

    for control in controls.values():
        control.observe(redraw, names="value")
    with output:
        _show(draw(**start) if still else picture)
    box = ipywidgets.VBox([*controls.values(), output])
    bundle = box._repr_mimebundle_()
    if hasattr(picture, "savefig"):  # what a front end without widgets shows instead
        bundle["image/png"] = _png(picture)
    display(bundle, raw=True)


def _check(name: str, values: Sequence, start: dict) -> None:
    accepted = f"accepted: {name}=(low, high, step, start) or {name}=[value, ...]"
    if isinstance(values, tuple):
        if len(values) != 4 or not values[0] <= values[3] <= values[1] or values[2] <= 0:
            raise ValueError(f"{name} is {values}; {accepted}, low <= start <= high, step > 0")
    elif not isinstance(values, list) or not values:
        raise ValueError(f"{name} is {values!r}; {accepted}")
    elif start.get(name, values[0]) not in values:
        raise ValueError(f"start[{name!r}] is {start[name]!r}; accepted: one of {values}")


def _has_front_end() -> bool:
    """Whether a slider can be moved: Jupyter, VS Code or Colab, not a run without a page."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return False
    return (
        "JPY_SESSION_NAME" in os.environ
        or "__vsc_ipynb_file__" in shell.user_ns
        or "google.colab" in sys.modules
    )


def _control(ipywidgets, name: str, values: Sequence, start):
    look = {"description": name.replace("_", " "), "continuous_update": False}
    look["style"] = {"description_width": "initial"}
    if isinstance(values, list):
        return ipywidgets.SelectionSlider(options=values, value=start, **look)
    low, high, step, _ = values
    whole = all(isinstance(value, int) for value in values)
    kind = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
    return kind(value=start, min=low, max=high, step=step, **look)


def _show(figure) -> None:
    """Display a figure in a notebook; nothing elsewhere, and nothing if draw only printed."""
    if figure is None or "IPython" not in sys.modules:
        return
    from IPython.display import display

    display(figure)


def _png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
