"""Figures must be readable: no text cut off, covered or small; limits drawn; impossible points
flagged; files reproducible.
"""

import ast
import itertools
import random
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from lessons.toolbox.draw import figure, plotting
from lessons.toolbox.draw.plotting import ROLES

PICTURES = sorted((Path(__file__).resolve().parents[2] / "lessons").glob("l*/lab/*.svg"))
MACHINE = {
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "date": "2026-11-20",
    "cores": 16,
}
CAPTION = plotting.caption(
    MACHINE, dtype="bfloat16", shape="B=1, Hq=32, Hkv=8, D=128", repetitions=50
)
X = [64, 128, 256, 512, 1024, 2048]


def band(medians):
    return [None if m is None else (m, 0.95 * m, 1.1 * m) for m in medians]


def line_plot(**changes):
    arguments = {
        "title": "KV cache: a step slows 3x, recomputing slows 180x, over a 32x longer context, "
        "which is the point",
        "xlabel": "context (tokens)",
        "ylabel": "one step (ms)",
        "caption": CAPTION,
        "floor": [0.3] * 6,
    }
    series = {
        "naive: recompute": ("naive", band([4.6, 9.3, 24.8, 61, 229, 841])),
        "KV cache": ("optimized", band([0.4, 0.42, 0.45, 0.55, 0.7, 1.3])),
    }
    arguments |= {"series": series} | changes
    return plotting.class_plot(X, arguments.pop("series"), **arguments)


def clustered():
    """Six lines that end within a pixel of each other, above a floor there too: labels must make
    room.
    """
    ends = {
        f"variant number {i} of six": (role, band([1 + i, 2, 3, 4, 5, 9 + 0.001 * i]))
        for i, role in enumerate(("naive", "optimized", "optimized", "library", "library", "naive"))
    }
    return plotting.class_plot(
        X,
        ends,
        title="All end together",
        xlabel="batch",
        ylabel="time (ms)",
        caption=CAPTION,
        floor=[0.5] * 5 + [9],
    )


def roof():
    points = {
        f"kernel {i}": ("optimized" if i % 2 else "naive", 2.0 ** (i / 3), 1e12 * 2 ** (i / 3))
        for i in range(8)
    }
    return plotting.roofline(
        points,
        bandwidths={"data sheet": 4.8e12, "measured": 4.3e12},
        peaks={"BF16": 989e12, "FP32": 67e12},
        title="Eight kernels under one roof",
        caption=CAPTION,
    )


def grouped():
    return plotting.bars(
        ["batch 1", "batch 64"],
        {"naive": ("naive", [90.0, None]), "optimized": ("optimized", [0.2, 0.3])},
        title="Grouped",
        ylabel="time (ms)",
        caption=CAPTION,
    )


def near():
    return plotting.bars(
        ["batch 1", "batch 64"],
        {"naive": ("naive", [9.0, None]), "optimized": ("optimized", [2, 3])},
        title="Near",
        ylabel="time (ms)",
        caption=CAPTION,
    )


def schedule():
    rows = {
        f"request {i}": [
            (i, i + 2, "prefill", "a text too long for its bar"),
            (i + 2, i + 6, "decode", "ok"),
        ]
        for i in range(6)
    }
    return plotting.gantt(rows, title="A schedule", xlabel="time (ms)", caption=CAPTION)


def pages():
    tables = {"child 1": [3, 7, 1], "child 2": [3, 7, 2], "child 3": [3, 9]} | {
        f"request {i}": [10 + i] for i in range(6)
    }
    return plotting.block_map(
        tables,
        num_blocks=32,
        title="Two shared blocks",
        caption=CAPTION,
        block_size=16,
        context_lens={owner: 16 * len(t) - 5 for owner, t in tables.items()},
    )


def mask(size=13):
    tokens = ["return" if i % 3 == 0 else "a" for i in range(size)]
    return plotting.mask_image(
        np.tril(np.ones((size, size), bool)),
        title="Causal",
        caption=CAPTION,
        row_labels=tokens,
        col_labels=tokens,
    )


FIGURES = [
    line_plot,
    clustered,
    roof,
    grouped,
    near,
    schedule,
    pages,
    mask,
    lambda: mask(90),
]


@pytest.mark.parametrize(
    "draw",
    FIGURES,
    ids=[
        "class",
        "clustered",
        "roofline",
        "dots",
        "bars",
        "gantt",
        "pages",
        "mask",
        "mask90",
    ],
)
def test_every_text_is_inside_uncovered_and_large(draw):
    fig = draw()
    assert plotting.texts_outside(fig) == []
    assert plotting.overlapping_texts(fig) == []
    sizes = {t.get_text(): t.get_fontsize() for t in fig.findobj(Text) if t.get_text()}
    assert sizes and min(sizes.values()) >= 11


def test_the_checks_themselves_see_bad_labels():
    fig = line_plot()
    fig.axes[0].annotate(
        "cut off",
        (2048, 1),
        (300, 0),
        textcoords="offset points",
        annotation_clip=False,
        in_layout=False,
    )
    fig.text(0.5, 0.5, "first of a pair", in_layout=False)
    fig.text(0.51, 0.5, "second of a pair", in_layout=False)
    assert plotting.texts_outside(fig) == ["cut off"]
    assert ("first of a pair", "second of a pair") in plotting.overlapping_texts(fig)


def test_labels_move_as_little_as_possible_and_never_overlap():
    for _ in range(50):
        sizes = [random.uniform(5, 30) for _ in range(6)]
        centres = sorted(random.uniform(0, 300) for _ in sizes)
        moved = figure._spread(centres, sizes, 0, 300)
        edges = [(m - s / 2, m + s / 2) for m, s in zip(moved, sizes)]
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(edges))
        assert edges[0][0] >= -1e-9 and edges[-1][1] <= 300 + 1e-9
    assert figure._spread([50, 100], [10, 10], 0, 200) == pytest.approx([50, 100]), (
        "labels with room stay where they are"
    )
    assert figure._spread([100, 100], [10, 10], 0, 200) == pytest.approx([95, 105]), (
        "a tie moves both by half"
    )


def test_roles_differ_in_colour_marker_and_dash_and_are_those_of_the_course():
    assert [ROLES[r].colour for r in ("naive", "optimized", "library", "floor")] == [
        "#D55E00",
        "#0072B2",
        "#009E73",
        "#444444",
    ]
    assert [ROLES[r].markers[0] for r in ("naive", "optimized", "library")] == ["o", "s", "^"]
    for part in ("colour", "dash", "hatch"):
        assert len({getattr(role, part) for role in ROLES.values()}) == len(ROLES)
    ax = line_plot(
        series={label: ("optimized", band([1, 2, 3, 4, 5, 6 + i])) for i, label in enumerate("ab")}
    ).axes[0]
    drawn = [
        line for line in ax.lines if len(line.get_xdata()) == 6 and line.get_marker() != "None"
    ]
    assert len(drawn) == 2 and drawn[0].get_marker() != drawn[1].get_marker(), (
        "two series of one role differ in marker"
    )


def test_axes_log2_labelled_x_and_log_y_only_beyond_30x():
    wide = line_plot().axes[0]
    assert (
        wide.get_yscale() == "log"
        and wide.get_xscale() == "log"
        and wide.xaxis.get_transform().base == 2
    )
    assert [t.get_text() for t in wide.get_xticklabels()] == [
        "64",
        "128",
        "256",
        "512",
        "1024",
        "2048",
    ]
    narrow = line_plot(series={"a": ("naive", band([1, 2, 3, 4, 5, 6]))}, floor=None).axes[0]
    assert narrow.get_yscale() == "linear" and narrow.get_ylim()[0] == 0
    assert "lower is better" in narrow.get_ylabel()


@pytest.mark.parametrize(
    "better, impossible, allowed", [("lower", 0.2, 0.29), ("higher", 0.4, 0.31)]
)
def test_a_point_beyond_the_limit_is_ringed_and_named(better, impossible, allowed):
    def ringed(value):
        points = band([0.3 if better == "higher" else 0.5] * 5 + [value])
        fig = line_plot(series={"kernel": ("optimized", points)}, better=better)
        rings = [
            line
            for line in fig.axes[0].lines
            if to_hex(line.get_markeredgecolor()) == to_hex(figure.FLAG)
        ]
        return sum(len(ring.get_xdata()) for ring in rings), fig.get_supxlabel()

    count, text = ringed(impossible)
    assert count == 1 and "CHECK" in text and "2048" in text
    count, text = ringed(allowed)
    assert count == 0 and "CHECK" not in text, "within 5 % is clock noise"


def test_floor_is_drawn_and_missing_points_leave_a_gap():
    fig = line_plot(series={"kernel": ("optimized", band([1, 2, None, 4, None, None]))})
    floor = [line for line in fig.axes[0].lines if line.get_linestyle() == "--"]
    assert len(floor) == 1 and list(floor[0].get_ydata()) == [0.3] * 6
    kernel = next(line for line in fig.axes[0].lines if line.get_marker() == "s")
    assert list(np.isfinite(kernel.get_ydata())) == [True, True, False, True, False, False]


def test_values_that_span_over_30x_are_dots_because_a_bar_on_a_log_axis_has_no_true_length():
    def shapes(fig):
        ax = fig.axes[0]
        return len(ax.patches), len(ax.lines), ax.get_xscale()

    assert shapes(near()) == (3, 0, "linear")
    assert shapes(grouped()) == (0, 3, "log")
    texts = [t.get_text() for t in grouped().findobj(Text)]
    assert {"naive: 90", "optimized: 0.2", "not run", "0.3"} <= set(texts)


def test_without_adjusttext_a_roofline_is_still_drawn(monkeypatch):
    monkeypatch.setitem(sys.modules, "adjustText", None)
    fig = roof()
    texts = {t.get_text() for t in fig.findobj(Text)}
    assert {f"kernel {i}" for i in range(8)} <= texts
    assert len(fig.axes[0].patches) == 0, "no leaders, because nothing moved"
    assert plotting.texts_outside(fig) == []


def test_a_sliver_of_a_schedule_keeps_its_colour():
    rows = {"lane": [(0, 1, "thin"), (1, 1000, "thick")]}
    fig = plotting.gantt(rows, title="t", xlabel="time", caption="c")
    thin, thick = fig.axes[0].patches
    assert thin.get_edgecolor() == thin.get_facecolor() and not thin.get_hatch()
    assert to_hex(thick.get_edgecolor()) == "#ffffff" and thick.get_hatch()


def test_roofline_flags_a_point_above_the_roof_only():
    def text(flops):
        return plotting.roofline(
            {"k": ("naive", 2.0, flops)},
            bandwidths={"HBM": 1e12},
            peaks={"BF16": 1e14},
            title="t",
            caption=CAPTION,
        ).get_supxlabel()

    assert "CHECK" in text(2.2e12) and "CHECK" not in text(2.05e12)


def test_pages_and_masks_say_what_they_show():
    texts = {t.get_text() for t in pages().findobj(Text)}
    # in use: 1, 2, 3, 7, 9 and 10 to 15
    assert {"3×", "A1", "B1", "A: child 1", "free: 21 of 32"} <= texts
    assert "visible: 91 of 169 (54%)" in {t.get_text() for t in mask().findobj(Text)}


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: line_plot(better="faster"), "better='faster'"),
        (
            lambda: line_plot(series={"a": ("fast", band([1] * 6))}),
            "role of 'a' is 'fast'; accepted: naive",
        ),
        (
            lambda: line_plot(series={"a": ("naive", band([1]))}),
            "series 'a' has 1 points; accepted: one per x, 6",
        ),
        (lambda: line_plot(series={"a": ("naive", [None] * 6)}, floor=None), "no measured point"),
        (
            lambda: plotting.block_map({"a": [4]}, num_blocks=4, title="", caption=""),
            "block 4 of owner 'a'; accepted: 0 to",
        ),
        (lambda: plotting.mask_image(np.ones(3), title="", caption=""), r"mask has shape \(3,\)"),
        (
            lambda: plotting.gantt({"r": [(2, 1, "k")]}, title="", xlabel="", caption=""),
            "end >= start",
        ),
        (lambda: plotting.save(line_plot(), "unused", alt=" "), "alt is empty"),
    ],
)
def test_bad_input_is_one_clear_line(call, words):
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_caption_names_machine_facts_and_date_and_leaves_versions_to_the_record():
    assert CAPTION == (
        "NVIDIA H200 · dtype bfloat16 · shape B=1, Hq=32, Hkv=8, D=128 · repetitions 50 · "
        "2026-11-20"
    )
    assert plotting.caption({}, dtype=None) == "unknown device"


def test_save_writes_both_files_whole_with_alt_and_reproducibly(tmp_path):
    first, again = (
        plotting.save(line_plot(), tmp_path / "a" / "plot", alt="Recomputing slows < 180x"),
        plotting.save(line_plot(), tmp_path / "b" / "plot.v2", alt="Recomputing slows < 180x"),
    )
    assert [p.name for p in (*first, *again)] == [
        "plot.png",
        "plot.svg",
        "plot.v2.png",
        "plot.v2.svg",
    ]
    assert (
        first[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        and b"Recomputing slows < 180x" in first[0].read_bytes()
    )
    assert "Recomputing slows &lt; 180x" in first[1].read_text()
    assert (
        first[1].read_bytes() == again[1].read_bytes()
        and first[0].read_bytes() == again[0].read_bytes()
    )


def test_a_picture_takes_its_alt_text_from_the_page_that_shows_it(tmp_path, capsys):
    (tmp_path / "lab").mkdir()
    (tmp_path / "README.md").write_text("![Others rise](lab/other.svg) ![It rises](lab/one.svg)")
    figure.save_svg(line_plot(), tmp_path / "lab/one.svg")
    assert "<title>It rises</title>" in (tmp_path / "lab/one.svg").read_text()
    figure.save_svg(line_plot(), tmp_path / "lab/one.svg", alt="More of it")
    assert "<title>More of it</title>" in (tmp_path / "lab/one.svg").read_text()
    assert capsys.readouterr().out == "one.svg\n" * 2
    with pytest.raises(ValueError, match=r"alt of two\.svg is None; accepted: a text"):
        figure.save_svg(line_plot(), tmp_path / "lab/two.svg")


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: f"{path.parts[-3][:3]} {path.stem}")
@pytest.mark.sample(10)
def test_a_committed_picture_is_called_what_its_page_says_or_its_program(path):
    title = ElementTree.parse(path).find("{http://www.w3.org/2000/svg}title").text
    programs = [ast.parse(file.read_text("utf-8")) for file in path.parent.glob("*.py")]
    own = {node.value for tree in programs for node in ast.walk(tree) if hasattr(node, "value")}
    assert title == figure.alt_of(path) or title in own


def test_no_global_state_leaks_in_or_out(monkeypatch):
    import matplotlib.pyplot as plt

    before, shown = dict(matplotlib.rcParams), plt.get_fignums()
    with matplotlib.rc_context(
        {"figure.facecolor": "black", "font.size": 5, "text.color": "white"}
    ):
        fig = line_plot()
    assert to_hex(fig.get_facecolor()) == "#ffffff"
    assert all(t.get_fontsize() >= 11 for t in fig.findobj(Text) if t.get_text())
    assert dict(matplotlib.rcParams) == before and plt.get_fignums() == shown
    assert fig._repr_png_()[:4] == b"\x89PNG", "Jupyter shows it without pyplot"


def test_money_is_not_a_formula():
    fig = line_plot(title="costs $1 instead of $3")
    assert fig.get_suptitle() == "costs $1 instead of $3" and not fig._suptitle.get_parse_math()


@pytest.mark.parametrize(
    "sizes, shown",
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 16], [1, 2, 3, 4, 5, 6, 7, 8, 9, 16]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16], [1, 2, 4, 8, 16]),
        ([2**n for n in range(4, 15)], [16, 64, 256, 1024, 4096, 16384]),
        ([3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23], [3, 7, 11, 15, 19, 23]),
    ],
)
def test_of_many_sizes_powers_of_two_are_labelled(sizes, shown):
    series = {"naive": ("naive", band([1.0] * len(sizes)))}
    words = {"title": "a title", "xlabel": "size", "ylabel": "ms", "caption": CAPTION}
    (ax,) = plotting.class_plot(sizes, series, **words).axes
    assert list(ax.get_xticks()) == shown
