"""Layers that see a window give their pages back: which page is kept when, and how many requests
that makes room for. All of it is counted, nothing is measured.

    python -m lessons.l27_states.lab.windows          the table, for an H200 and 32,768 tokens
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from matplotlib.patches import Patch, Rectangle

from lessons.l01_roofline.planner.formats import bits_of
from lessons.l01_roofline.planner.models import ModelShape
from lessons.l01_roofline.planner.plan import Plan, make_plan
from lessons.l01_roofline.planner.windows import WINDOWED
from lessons.toolbox.draw.figure import PALETTE, ClassFigure, frame, style
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.model.window_groups import blocks_for, first_page, groups_of

CONTEXT, CHIP = 32_768, "h200"
SIZE, WINDOW, TIMES = 4, 10, range(4, 45, 4)  # of the picture, in tokens


class Row(NamedTuple):
    """A model, its groups, and how many requests fit at once with and without them."""

    name: str
    full_layers: int
    window_layers: int
    window: int
    layers_each: int
    groups: int
    in_groups: int
    in_one: int


def plan_of(shape: ModelShape) -> Plan:
    """One GPU. gpt-oss has its experts in MXFP4, as it is published; the others have 16 bits."""
    bits = bits_of(shape, "mxfp4") if shape.name.startswith("gpt-oss") else 16
    return make_plan(shape, lookup(CHIP), 1, CONTEXT, gpus=1, bits_per_weight=bits)


def rows() -> Iterator[Row]:
    """Of every model with windows in lesson 1's planner."""
    for shape in WINDOWED.values():
        plan, groups = plan_of(shape), groups_of(shape.layer_windows)
        in_one = replace(plan, model=replace(shape, num_window_layers=0)).sequences
        full = shape.num_hidden_layers - shape.num_window_layers
        yield Row(
            shape.name,
            full,
            shape.num_window_layers,
            shape.window,
            groups.layers_each,
            len(groups.windows),
            plan.sequences,
            in_one,
        )


def table() -> str:
    """The rows in Markdown."""
    lines = [
        "| | full + window layers | window | groups of | requests at once | in one group |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows():
        lines.append(
            f"| {row.name} | {row.full_layers} + {row.window_layers} | {row.window} | "
            f"{row.groups} × {row.layers_each} | {row.in_groups} | {row.in_one} |"
        )
    return "\n".join(lines)


@style()
def draw_pages() -> ClassFigure:
    """Which pages a sequence has after each few tokens, in a full group and in one of a window."""
    last, groups = TIMES[-1], {"a full layer": None, f"a window of {WINDOW}": WINDOW}
    full, kept = (
        blocks_for(last, SIZE) - first_page(window, last, SIZE) for window in groups.values()
    )
    fig, axes = frame(
        f"After {last} tokens a full layer keeps {full} pages. A layer with a window of {WINDOW} "
        f"keeps {kept}, and will never keep more",
        f"counted · pages of {SIZE} tokens; a row is a sequence after so many tokens; the numbers "
        "are the pages of its table",
        (12, 5.6),
        (1, 1),
    )
    for ax, (title, window) in zip(axes, groups.items()):
        for row, held in enumerate(TIMES):
            first = first_page(window, held, SIZE)
            for page in range(blocks_for(held, SIZE)):
                is_gone = page < first
                look = dict(facecolor="white", ls=":") if is_gone else dict(facecolor=PALETTE[0])
                ax.add_patch(Rectangle((page, row), 0.92, 0.86, edgecolor="#888888", lw=1, **look))
                colour = "#888888" if is_gone else "white"
                ax.text(page + 0.46, row + 0.43, str(page), ha="center", va="center", fontsize=8,
                        color=colour)  # fmt: skip
        ax.set(xlim=(-0.2, full + 0.2), ylim=(len(TIMES), -0.1), xticks=[])
        ax.set_yticks([row + 0.43 for row in range(len(TIMES))], [f"{held}" for held in TIMES])
        ax.set_title(title, loc="left", fontsize=12)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    axes[0].set_ylabel("tokens so far")
    looks = dict(facecolor=PALETTE[0], label="kept"), dict(facecolor="white", label="given back")
    patches = [Patch(edgecolor="#888888", **look) for look in looks]
    axes[1].legend(handles=patches, loc="upper right", frameon=False)
    return fig


def main() -> int:
    """Print the table."""
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
