"""The lesson's one picture: which KV head each query head reads, and how many heads' worth of K and
V a step moves.

    python -m lessons.l05_gqa.lab.pictures
        writes heads.svg beside this file (counted, not measured)
"""

from pathlib import Path

from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from lessons.toolbox.draw.figure import PALETTE, ClassFigure, frame, key, save_svg, style

QUERY_HEADS = 6
WAYS = {"MHA": 6, "GQA": 2, "MQA": 1, "GQA, repeated": 2}  # KV heads


def heads_moved(way: str) -> int:
    """How many heads' worth of K and V a step moves: each read once; repeated ones read, written
    and read again.
    """
    return WAYS[way] + (2 * QUERY_HEADS if "repeated" in way else 0)


def kv_head_of(query_head: int, num_kv_heads: int) -> int:
    """The KV head that a query head reads."""
    return query_head // (QUERY_HEADS // num_kv_heads)


@style()
def draw() -> ClassFigure:
    """Four diagrams beside each other; a colour is a KV head, and so are the query heads that read
    it.
    """
    fig, ax = frame(
        f"The same {QUERY_HEADS} query heads move {heads_moved('MHA')}, {heads_moved('GQA')} or "
        f"{heads_moved('MQA')} KV heads a step; repeating moves {heads_moved('GQA, repeated')} for "
        f"GQA's {heads_moved('GQA')}",
        "one token, one layer; a head is its K and V in the cache · counted, not measured",
        (12, 4.6),
    )

    def box(x, y, head, hatch=""):
        ax.add_patch(
            Rectangle(
                (x, y), 0.84, 0.62, facecolor=PALETTE[head], hatch=hatch, edgecolor="white", lw=1
            )
        )

    def line(x, y, to_x, to_y):
        ax.add_patch(
            FancyArrowPatch(
                (x, y), (to_x, to_y), arrowstyle="-", color="#777777", lw=1.2, shrinkA=0, shrinkB=0
            )
        )

    for n, (way, num_kv_heads) in enumerate(WAYS.items()):
        left, copied = n * (QUERY_HEADS + 1.2), "repeated" in way
        width = QUERY_HEADS / num_kv_heads
        for h in range(QUERY_HEADS):
            head = kv_head_of(h, num_kv_heads)
            middle = left + (head + 0.5) * width - 0.08
            box(left + h, 0, head)
            if copied:
                box(left + h, 1.5, head, "//")
                line(left + h + 0.42, 0.62, left + h + 0.42, 1.5)
                line(left + h + 0.42, 2.12, middle, 3)
            else:
                line(left + h + 0.42, 0.62, middle, 3)
        for head in range(num_kv_heads):
            box(left + (head + 0.5) * width - 0.5, 3, head)
        kept = f"{num_kv_heads} KV head{'s' * (num_kv_heads > 1)} kept"
        ax.text(
            left,
            4.0,
            f"{way}: {kept},\n{heads_moved(way)} moved a step",
            va="top",
            fontweight="bold",
        )
    for y, text in ((0.31, "query heads"), (1.81, "copies"), (3.31, "KV heads\nin the cache")):
        ax.text(-0.4, y, text, ha="right", va="center")
    ax.set_xlim(-3.6, len(WAYS) * (QUERY_HEADS + 1.2) - 0.8)
    ax.set_ylim(5.2, -0.2)
    ax.axis("off")
    key(
        ax,
        [
            Patch(
                facecolor=PALETTE[0],
                edgecolor="white",
                label="one colour: a KV head and the query heads that read it",
            ),
            Patch(
                facecolor="#999999",
                hatch="//",
                edgecolor="white",
                label="written by repeat_interleave, then read",
            ),
        ],
    )
    return fig


if __name__ == "__main__":
    save_svg(draw(), Path(__file__).parent / "heads.svg")
