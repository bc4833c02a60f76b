"""The lesson's one picture: which tokens each pass computes, copies and reads, three ways to
generate the same answer.

    python -m lessons.l03_kv_cache.lab.pictures      writes passes.svg beside this file

What it shows is counted, not measured.
"""

from pathlib import Path

from matplotlib.patches import Patch, Rectangle

from lessons.toolbox.draw.figure import PALETTE, ROLES, ClassFigure, frame, key, save_svg, style

PROMPT, ANSWER = 3, 4
SVG = Path(__file__).parent / "passes.svg"
ALT = (
    "Three grids, one row per pass, one column per token. Recomputing runs 3, 4, 5 and 6 tokens "
    "through the model; concatenating runs 3, 1, 1 and 1, and copies the 3, 4 and 5 tokens before; "
    "preallocating runs the same and copies none."
)
RUN, COPY, READ = "runs through the model", "copied to make room, then read", "read where it is"
LOOK = {RUN: (ROLES["naive"].colour, ""), COPY: (PALETTE[1], "//"), READ: (PALETTE[4], "")}


def passes(way: str) -> list[list[str]]:
    """What happens to each token in each pass: [[RUN | COPY | READ] * tokens] * ANSWER."""
    rows = []
    for held in range(PROMPT, PROMPT + ANSWER):
        new = held if way == "recompute" or held == PROMPT else 1
        rows.append([COPY if way == "concatenate" else READ] * (held - new) + [RUN] * new)
    return rows


@style()
def draw() -> ClassFigure:
    """Three grids beside each other."""
    ways = {way: passes(way) for way in ("recompute", "concatenate", "preallocate")}
    count = {}
    for way, rows in ways.items():
        count[way] = {what: sum(row.count(what) for row in rows) for what in LOOK}
    once, again = count["preallocate"][RUN], count["recompute"][RUN]
    width = PROMPT + ANSWER - 1
    fig, ax = frame(
        f"A cache runs each token once: {once} instead of {again}",
        f"prompt of {PROMPT} tokens, answer of {ANSWER}; nothing is computed from the last · "
        "counted, not measured",
        (11, 4.2),
    )
    for n, (way, rows) in enumerate(ways.items()):
        left = n * (width + 2)
        draw_grid(ax, left, width, rows)
        copied = f", {count[way][COPY]} copied" if count[way][COPY] else ""
        title = f"{way}: {count[way][RUN]} run{copied}"
        ax.text(left, len(rows) + 0.15, title, va="top", fontweight="bold")
    ax.set_xlim(-0.1, 3 * width + 4)
    ax.set_ylim(ANSWER + 0.8, -0.1)
    ax.set_yticks([y + 0.45 for y in range(ANSWER)], [f"pass {y + 1}" for y in range(ANSWER)])
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    patches = []
    for what, (colour, hatch) in LOOK.items():
        patches.append(Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=what))
    patches.append(Patch(facecolor="white", edgecolor="#CCCCCC", label="not yet generated"))
    key(ax, patches)
    return fig


def draw_grid(ax, left: float, width: int, rows: list[list[str]]) -> None:
    """One way to generate: a row of `width` squares for each pass, from x = left on."""
    for y, row in enumerate(rows):
        for x in range(width):
            known = x < len(row)
            colour, hatch = LOOK[row[x]] if known else ("white", "")
            edge = "white" if known else "#CCCCCC"
            look = dict(facecolor=colour, hatch=hatch, edgecolor=edge, lw=1)
            ax.add_patch(Rectangle((left + x, y), 0.94, 0.9, **look))


if __name__ == "__main__":
    save_svg(draw(), SVG, alt=ALT)
