"""What the ladder shows: the table, the sample, ladder.json (schema in the README) and the figure
drawn from it.

    # draw the figure again, anywhere
    python -m reference.ladder.ladder_report build/ladder.json
"""

import argparse
import json
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lessons.toolbox.draw import plotting
from lessons.toolbox.draw.figure import number
from lessons.toolbox.measure import device as devices
from reference.ladder.regimes import regime_of

SCHEMA = 2  # of ladder.json
NOISE = 0.1  # of a rung's speed: its passes differ by as much
STAND_INS = "PyTorch stands in for kernels and graphs"  # on a CPU


# ---------------------------------------------------------------- ladder.json


def record(rungs, peers, model, path: str, requests: int, bandwidth: float) -> dict:
    """The content of ladder.json. Speeds in tokens/s."""
    fingerprint = devices.fingerprint()
    return {
        "schema": SCHEMA,
        "device": fingerprint["device"],
        "versions": {k: v for k, v in fingerprint.items() if k != "device"},
        "model": {
            "path": path,
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "requests": requests,
        },
        "read_bytes_per_s": bandwidth,
        "peers": [contender_entry(peer) for peer in peers],
        "rungs": rung_entries(rungs),
    }


def rung_entries(rungs) -> list[dict]:
    """`speedup` is over the first rung. `step` is over the nearest rung below whose speed means
    something on this device.
    """
    entries, below = [], rungs[0]
    for rung in rungs:
        entries.append(
            {
                **contender_entry(rung),
                "lesson": rung.lesson,
                "speedup": ratio(rung, rungs[0]),
                "step": ratio(rung, below),
                "stand_in": rung.stand_in,
                "regime": regime_of(rung.lesson, rung.name),
                "kv_bytes_per_token": rung.kv_bytes_per_token,
                "roofline_share": round(rung.roofline_share, 4),
                "tokens": rung.tokens,
            }
        )
        if rung.runs and not rung.stand_in:
            below = rung
    return entries


def contender_entry(contender) -> dict:
    """What rungs and peers have in common. A contender that did not run has no speeds."""
    return {
        "name": contender.name,
        "tokens_per_s": rounded(contender.tokens_per_s),
        "tokens_per_cpu_s": rounded(contender.tokens_per_cpu_s),
        "requests": len(contender.served),
        "in_batches": contender.in_batches,
        "identical": contender.identical,
        "verdict": contender.verdict,
        "not_run": contender.not_run,
        "runs": [rounded(speed) for speed in contender.runs],
    }


def ratio(contender, other) -> float | None:
    """How many times the tokens/s of `other`; None where one of the two did not run."""
    if not contender.runs or not other.runs:
        return None
    return rounded(contender.tokens_per_s / other.tokens_per_s)


def rounded(value: float | None) -> float | None:
    """Two decimals; None stays None."""
    return None if value is None else round(value, 2)


def load(path: Path) -> dict:
    """The content of a ladder.json. Raises ValueError in one line for any other file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; accepted: the ladder.json of `make demo`") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no ladder.json of this version: run `make demo` again")
    return data


# ---------------------------------------------------------------- the table


def print_table(data: dict, console: Console) -> None:
    """The table of rungs and peers, and below it what a reader has to know: roofline, regimes,
    stand-ins, subsets, verdicts.
    """
    model = data["model"]
    table = Table(
        title=f"The ladder: {model['requests']} requests, greedy, {model['dtype']}, "
        f"{data['device']}",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for heading in ("rung", "tokens/s", "× rung\nbelow", "×\nfirst", "KV B/\ntoken"):
        table.add_column(heading, justify="left" if heading == "rung" else "right")
    for heading in ("of\nroofline", "same\ntokens"):
        table.add_column(heading, justify="right")
    table.add_column("gain in its\nown regime")
    for rung in data["rungs"]:
        table.add_row(*rung_cells(rung, model["requests"]))
    table.add_section()
    for peer in data["peers"]:
        speed, first = peer["tokens_per_s"], data["rungs"][0]["tokens_per_s"]
        gain = f"{speed / first:.2f}" if speed else ""
        name = starred(peer, model["requests"])
        table.add_row(name, speed_cell(peer), "", gain, "", "", same_cell(peer), "")
    console.print(table)
    for note in notes(data):
        console.print(note, style="dim", markup=False, highlight=False)
    for entry in data["rungs"] + data["peers"]:
        if entry["verdict"]:
            console.print(f"{entry['name']}: {entry['verdict']}", markup=False)
        if entry["not_run"]:
            console.print(f"{entry['name']}: not run ({entry['not_run']})", markup=False)


def rung_cells(rung: dict, requests: int) -> list[str]:
    """A rung's row. A rung that stands in for another device has no gains to show."""
    step, speedup = rung["step"], rung["speedup"]
    if rung["stand_in"]:
        gains = ["tokens only", ""]
    else:
        gains = ["" if gain is None else f"{gain:.2f}" for gain in (step, speedup)]
    regime = rung["regime"]
    about = "" if regime is None or regime["measured"] else "~"
    return [
        f"{rung['lesson']} {starred(rung, requests)}",
        speed_cell(rung),
        *gains,
        number(rung["kv_bytes_per_token"]),
        f"{rung['roofline_share']:.0%}",
        same_cell(rung),
        f"{about}{number(regime['gain'])}× {regime['label']}" if regime else "",
    ]


def starred(entry: dict, requests: int) -> str:
    """The name, with a star if it ran and served fewer requests than there are."""
    is_subset = entry["tokens_per_s"] is not None and entry["requests"] < requests
    return f"{entry['name']} *" if is_subset else entry["name"]


def speed_cell(entry: dict) -> str:
    """Tokens/s as the table shows them."""
    speed = entry["tokens_per_s"]
    return "not run" if speed is None else f"{speed:.1f}"


def same_cell(entry: dict) -> str:
    """Whether the tokens are the first rung's; empty where nothing ran."""
    return {True: "✓", False: "✗", None: ""}[entry["identical"]]


def notes(data: dict) -> list[str]:
    """The lines under the table that are true of this run."""
    found = [
        f"Memory roofline: one read of the weights and of the request's K and V a token, at the "
        f"{data['read_bytes_per_s'] / 1e9:.1f} GB/s at which this machine reads a model of this "
        f"size."
    ]
    regimes = [rung["regime"] for rung in data["rungs"] if rung["regime"]]
    for measured, text in ((True, "were recorded on"), (False, "marked ~ are predicted for")):
        names = {regime["device"] for regime in regimes if regime["measured"] is measured}
        if names:
            found.append(f"Gains in a rung's own regime {text}: {', '.join(sorted(names))}.")
    if any(rung["stand_in"] for rung in data["rungs"]):
        found.append(
            f"tokens only: without a GPU {STAND_INS}, so the rung shows that its tokens are right "
            f"and its speed says nothing. The kernels are proved in the interpreter."
        )
    total = data["model"]["requests"]
    ran = [entry for entry in data["rungs"] + data["peers"] if entry["tokens_per_s"] is not None]
    for count in sorted({entry["requests"] for entry in ran} - {total}):
        names = [entry["name"] for entry in ran if entry["requests"] == count]
        found.append(
            f"* served {count} of {total} requests, as long as all of them on average: "
            f"{', '.join(names)}"
        )
    return found


def print_sample(tokenizer, prompts, rungs, console: Console) -> None:
    """The answer of the last rung that repeats itself least (greedy decoding of a small model likes
    to), prompt dimmed.
    """
    outputs = rungs[-1].outputs
    index = max(outputs, key=lambda i: (len(set(outputs[i])), -i))
    console.rule(
        "a sample, the least repetitive answer: the prompt, then what the model wrote", align="left"
    )
    for tokens, style, end in ((prompts[index], "dim", ""), (outputs[index], "bold", "\n")):
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        console.print(text, style=style, end=end, markup=False, highlight=False)


# ---------------------------------------------------------------- the figure


def headline(rungs: list[dict]) -> str:
    """The figure's title: the fastest rung, whether the tokens are the same, and the largest step.

    A rung that stands in for another device is never the fastest, and no step is counted to it. Of
    rungs that are equal but for noise, the lowest is named, because what it does made them fast.
    """
    ran = [rung for rung in rungs if rung["tokens_per_s"] is not None]
    solid = [rung for rung in ran if not rung["stand_in"]]
    fastest = max(rung["tokens_per_s"] for rung in solid)
    best = next(rung for rung in solid if rung["tokens_per_s"] >= (1 - NOISE) * fastest)
    step = max(solid, key=lambda rung: rung["step"])
    same = "the same tokens"
    if any(rung["identical"] is False for rung in ran):
        same = "NOT the same tokens"
    elif any(rung["verdict"] for rung in ran):
        same = "the same tokens but for ties"
    text = f"{best['name']}: {best['speedup']:.1f}× the tokens/s of the first rung, {same}"
    if step["step"] <= 1:
        return text
    return f"{text}\nThe largest step: {step['name']}, {step['step']:.1f}×"


def figure_of(data: dict) -> plotting.ClassFigure:
    """The figure, from the content of ladder.json."""
    model = data["model"]
    rungs = [
        {**rung, "stand_in": STAND_INS if rung["stand_in"] else None} for rung in data["rungs"]
    ]
    # a reason without the name of its exception
    peers = [
        {**peer, "not_run": peer["not_run"] and peer["not_run"].split(": ", 1)[-1]}
        for peer in data["peers"]
    ]
    return plotting.ladder_plot(
        rungs,
        peers,
        title=headline(data["rungs"]),
        caption=f"{data['device']} · {model['dtype']} · {Path(model['path']).name}, "
        f"{model['parameters'] / 1e6:.0f}M parameters",
    )


def draw(data: dict, path_without_suffix: Path) -> None:
    """Save the figure as PNG and SVG."""
    rungs = data["rungs"]
    alt = f"A row for each of {len(rungs)} rungs: tokens per second, and the gain in its own regime"
    title = headline(rungs).replace("\n", ". ")
    plotting.save(figure_of(data), path_without_suffix, alt=f"{alt}. {title}")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m reference.ladder.ladder_report",
        description="Draw the ladder's figure again.",
    )
    parser.add_argument("source", type=Path, help="a ladder.json; the figure lands beside it")
    source = parser.parse_args(argv).source
    try:
        draw(load(source), source.with_suffix(""))
    except (ValueError, OSError) as error:
        print(f"ladder_report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
