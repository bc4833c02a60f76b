"""The table and the figure of routes.py, from its record."""

import numpy as np

from lessons.toolbox.draw.figure import (
    ROLES,
    ClassFigure,
    caption,
    draw_lines,
    frame,
    label_column,
    style,
)

ALT = "Percent of the prompts' tokens that were cached, over the turn of a chat, by policy."


def hit_rate(turns: list[dict]) -> float:
    """The share of prompt tokens that a replica's cache had."""
    asked = sum(turn["asked_tokens"] for turn in turns)
    return sum(turn["found_tokens"] for turn in turns) / asked if asked else 0.0


def waits_ms(turns: list[dict], percentile: float) -> float:
    """A percentile of the milliseconds to the first token."""
    found = [wait for turn in turns for wait in turn["ttft_s"]]
    return 1000 * float(np.percentile(found, percentile)) if found else float("nan")


def print_table(record: dict, console) -> None:
    """A row for each policy: from the second turn on, and the part of that after the restart."""
    from rich.table import Table

    table = Table(
        title=f"{record['chats']} chats of {record['turns']} turns at {record['replicas']} "
        "replicas, one of them restarted; from the second turn on"
    )
    table.add_column("policy")
    columns = ("tokens cached", "after the restart", "TTFT p50, ms", "TTFT p99, ms", "failed")
    for name in columns:
        table.add_column(name, justify="right")
    half = record["turns"] // 2
    for entry in record["entries"]:
        later = entry["turns"][1:]
        table.add_row(
            entry["name"],
            f"{hit_rate(later):.0%}",
            f"{hit_rate(entry['turns'][half:]):.0%}",
            f"{waits_ms(later, 50):.0f}",
            f"{waits_ms(later, 99):.0f}",
            str(entry["failed"]),
        )
    console.print(table)


@style()
def draw_routes(record: dict) -> ClassFigure:
    """Percent of the tokens that were cached, over the turn."""
    entries = {entry["name"]: entry["turns"] for entry in record["entries"]}
    later = {name: hit_rate(turns[1:]) for name, turns in entries.items()}
    told = [name for name in entries if name.startswith("kv")]
    best = max(told, key=later.get)
    weight = best.removeprefix("kv, ") + ", " if len(told) > 1 else ""
    fig, ax = frame(
        f"From the second turn on {later[best]:.0%} of the tokens are cached where replicas tell "
        f"what they have ({weight}prefix {later['prefix']:.0%}, round robin "
        f"{later['round-robin']:.0%})",
        caption(
            record["fingerprint"],
            model=record["model"],
            replicas=record["replicas"],
            chats=record["chats"],
        ),
        (10, 5.4),
    )
    turns = range(1, record["turns"] + 1)
    looks = {"round-robin": "naive", "prefix": "library"} | dict.fromkeys(told, "floor")
    looks[best] = "optimized"
    series = {name: (turns, [100 * hit_rate([turn]) for turn in entries[name]]) for name in looks}
    labels = draw_lines(ax, series, looks.values())
    ax.axvline(record["turns"] // 2 + 0.5, color=ROLES["floor"].colour, ls=":", lw=1.2)
    ax.set_ylim(0, 100)
    ax.set_xticks(turns)
    ax.grid(True, axis="y")
    ax.set_xlabel("turn of the chat (dotted: a replica is killed, and started again)")
    ax.set_ylabel("% of prompt tokens cached\n(higher is better)")
    label_column(ax, labels)
    return fig
