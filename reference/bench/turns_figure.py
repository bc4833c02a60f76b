"""The table and the figure of turns.py, from its record."""

from lessons.toolbox.draw.figure import (
    ROLES,
    ClassFigure,
    caption,
    draw_lines,
    frame,
    label_column,
    style,
)

LOOKS = {
    "no cache": "naive",
    "prefix cache": "library",
    "host memory": "optimized",
    "host memory and files": "floor",
}
ALT = "Milliseconds to the first token over the turn of a chat, for four ways of keeping K and V."


def milliseconds(entry: dict, of: str = "ttft_s") -> list[float]:
    """The median of each turn. of: "ttft_s", or "cpu_s" for the processor's."""
    return [1000 * turn["median"] for turn in entry[of]]


def later(entry: dict, of: str = "ttft_s") -> float:
    """Milliseconds to the first token from the second turn on: the mean of the medians."""
    found = milliseconds(entry, of)[1:]
    return sum(found) / len(found)


def print_table(record: dict, console) -> None:
    """A row for each way."""
    from rich.table import Table

    table = Table(
        title=f"{record['chats']} chats of {record['turns']} turns, of which one in "
        f"{record['fits']} fits into the pool; ms to the first token"
    )
    table.add_column("way")
    columns = ("first turn", "last turn", "from the 2nd on", "of no cache", "of its CPU time")
    for name in (*columns, "found elsewhere"):
        table.add_column(name, justify="right")
    whole, worked = (later(record["entries"][0], of) for of in ("ttft_s", "cpu_s"))
    for entry in record["entries"]:
        turns, asked = milliseconds(entry), entry["asked_tokens"]
        table.add_row(
            entry["name"],
            f"{turns[0]:.1f}",
            f"{turns[-1]:.1f}",
            f"{later(entry):.1f}",
            f"{later(entry) / whole:.2f}",
            f"{later(entry, 'cpu_s') / worked:.2f}",
            f"{entry['found_tokens'] / asked:.0%}" if asked else "",
        )
    console.print(table)


@style()
def draw_turns(record: dict) -> ClassFigure:
    """Milliseconds to the first token over the turn, with the range of the middle 60 %."""
    entries = {entry["name"]: entry for entry in record["entries"]}
    share = later(entries["host memory"]) / later(entries["no cache"])
    fig, ax = frame(
        f"From the second turn on, a chat's first token takes {share:.2f} of the time with host "
        "memory that it takes without a cache",
        caption(
            record["fingerprint"],
            model=record["model"],
            chats=record["chats"],
            in_the_pool=record["chats"] // record["fits"],
        ),
        (10, 5.4),
    )
    turns = range(1, record["turns"] + 1)
    series = {name: (turns, milliseconds(entries[name])) for name in LOOKS}
    labels = draw_lines(ax, series, LOOKS.values())
    for name, role in LOOKS.items():
        bands = entries[name]["ttft_s"]
        low, high = ([1000 * turn[edge] for turn in bands] for edge in ("p20", "p80"))
        ax.fill_between(turns, low, high, color=ROLES[role].colour, alpha=0.15, lw=0)
    ax.set_ylim(bottom=0)
    ax.set_xticks(turns)
    ax.grid(True, axis="y")
    ax.set_xlabel("turn of the chat")
    ax.set_ylabel("ms to the first token\n(lower is better)")
    label_column(ax, labels)
    return fig
