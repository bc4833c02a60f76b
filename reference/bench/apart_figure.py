"""The table and the figure of apart.py, from its record."""

from lessons.toolbox.draw.figure import (
    ClassFigure,
    caption,
    draw_lines,
    frame,
    label_column,
    style,
)

LOOKS = {"mixed": "naive", "apart": "optimized"}
PANELS = {"ttft_s": "ms to the first token", "itl_s": "ms between tokens"}
SHOWN = "p99"
ALT = (
    "Two panels over the requests a second: the 99th percentile of the milliseconds to the first "
    "token and of those between tokens, for mixed serving and for prefill and decode apart."
)


def milliseconds(entry: dict, what: str, percentile: str) -> list[float]:
    """A percentile at each rate."""
    return [1000 * (at[what][percentile] or 0.0) for at in entry["rates"]]


def print_table(record: dict, console) -> None:
    """A row for each way and rate."""
    from rich.table import Table

    table = Table(
        title=f"{record['requests']} requests a rate, prompts of {record['long']} and "
        f"{record['short']} tokens; two servers each; ms"
    )
    table.add_column("way")
    for name in ("requests/s", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "sent", "failed"):
        table.add_column(name, justify="right")
    for entry in record["entries"]:
        for at in entry["rates"]:
            values = [at[what][p] for what in PANELS for p in ("p50", "p90", "p99")]
            cells = ["" if value is None else f"{1000 * value:.1f}" for value in values]
            counts = f"{at['sent']:.0f}", str(at["failed"])
            table.add_row(entry["name"], f"{at['rate']:g}", *cells, *counts)
    console.print(table)


@style()
def draw_apart(record: dict) -> ClassFigure:
    """The 99th percentiles over the rate."""
    entries = {entry["name"]: entry for entry in record["entries"]}
    itl = {name: milliseconds(entry, "itl_s", SHOWN)[-1] for name, entry in entries.items()}
    rate = record["entries"][0]["rates"][-1]["rate"]
    share = f"{itl['apart'] / itl['mixed']:.2f}" if itl["mixed"] else "?"
    fig, axes = frame(
        f"At {rate:g} requests/s, with prefill and decode apart, the 99th percentile between "
        f"tokens is {share} of mixed serving's",
        caption(
            record["fingerprint"],
            model=record["model"],
            long=record["long"],
            short=record["short"],
            connector=record["connector"],
        ),
        (12, 5.4),
        (1, 1),
    )
    for ax, (what, label) in zip(axes, PANELS.items()):
        series = {
            name: (
                [at["rate"] for at in entries[name]["rates"]],
                milliseconds(entries[name], what, SHOWN),
            )
            for name in LOOKS
        }
        labels = draw_lines(ax, series, LOOKS.values())
        ax.set_ylim(bottom=0)
        ax.grid(True, axis="y")
        ax.set_xlabel("requests/s")
        ax.set_ylabel(f"{label}, {SHOWN}\n(lower is better)")
        label_column(ax, labels)
    return fig
