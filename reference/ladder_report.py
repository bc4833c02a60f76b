"""What the ladder shows: the table, the sample, ladder.json (schema in the README) and the figure
drawn from it.

    python -m reference.ladder_report build/ladder.json      # draw the figure again, anywhere
"""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lessons.toolbox.draw import plotting
from lessons.toolbox.measure import device as devices

STAND_INS = "PyTorch in their place, and in that of graphs"  # on a CPU


def record(rungs, peers, model, path: str, requests: int, bandwidth: float) -> dict:
    """The content of ladder.json. Speeds in tokens/s; `speedup` is over the first rung, `step` over
    the rung below.
    """
    fingerprint = devices.fingerprint()
    entries = []
    for i, r in enumerate(rungs):
        entries.append(
            {
                "name": r.name,
                "lesson": r.lesson,
                "tokens_per_s": round(r.tokens_per_s, 2),
                "tokens_per_cpu_s": round(r.tokens_per_cpu_s, 2),
                "stand_in": r.stand_in,
                "speedup": round(r.tokens_per_s / rungs[0].tokens_per_s, 2),
                "step": round(r.tokens_per_s / rungs[max(i - 1, 0)].tokens_per_s, 2),
                "kv_bytes_per_token": r.kv_bytes_per_token,
                "roofline_share": round(r.roofline_share, 4),
                "requests": len(r.served),
                "tokens": r.tokens,
                "identical": r.identical,
                "verdict": r.verdict,
                "runs": [round(x, 2) for x in r.runs],
            }
        )
    return {
        "device": fingerprint["device"],
        "versions": {k: v for k, v in fingerprint.items() if k != "device"},
        "model": {
            "path": path,
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "requests": requests,
        },
        "read_bytes_per_s": bandwidth,
        "peers": [
            {
                "name": p.name,
                "tokens_per_s": p.tokens_per_s and round(p.tokens_per_s, 2),
                "tokens_per_cpu_s": p.tokens_per_cpu_s and round(p.tokens_per_cpu_s, 2),
                "requests": len(p.served),
                "identical": p.identical,
                "verdict": p.verdict,
                "not_run": p.not_run,
                "runs": [round(x, 2) for x in p.runs],
            }
            for p in peers
        ],
        "rungs": entries,
    }


def print_table(data: dict, console: Console) -> None:
    """The table of rungs and peers, and below it what a reader has to know: roofline, subsets,
    verdicts.
    """
    table = Table(
        title=f"The ladder: {data['model']['requests']} requests, greedy, "
        f"{data['model']['dtype']}, {data['device']}"
    )
    for heading in (
        "lesson",
        "rung",
        "tokens/s",
        "× rung below",
        "× first",
        "KV bytes/token",
        "of roofline",
        "identical",
    ):
        table.add_column(
            heading, justify="left" if heading == "rung" else "right", no_wrap=heading != "rung"
        )
    total = data["model"]["requests"]
    for r in data["rungs"]:
        star = "" if r["requests"] == total else " *"
        table.add_row(
            r["lesson"],
            r["name"] + star,
            f"{r['tokens_per_s']:.1f}",
            f"{r['step']:.2f}",
            f"{r['speedup']:.2f}",
            f"{r['kv_bytes_per_token']:,}",
            f"{r['roofline_share']:.0%}",
            "✓" if r["identical"] else "✗",
        )
    table.add_section()
    first = data["rungs"][0]["tokens_per_s"]
    for p in data["peers"]:
        speed = p["tokens_per_s"]
        table.add_row(
            "",
            p["name"],
            f"{speed:.1f}" if speed else "not run",
            "",
            f"{speed / first:.2f}" if speed else "",
            "",
            "",
            "" if p["identical"] is None else "✓" if p["identical"] else "✗",
        )
    console.print(table)
    console.print(
        f"Memory roofline: one read of the weights and of the request's K and V a token, at the "
        f"{data['read_bytes_per_s'] / 1e9:.1f} GB/s at which this machine reads a model of this "
        f"size.",
        style="dim",
    )
    if data["versions"].get("interpreted"):
        console.print(
            "Without a GPU the lessons' PyTorch paths stand in for graphs, and for kernels, which "
            "are proved in the "
            "interpreter.",
            style="dim",
        )
    for served in sorted({r["requests"] for r in data["rungs"]} - {total}):
        names = [r["name"] for r in data["rungs"] if r["requests"] == served]
        console.print(
            f"* served {served} of {total} requests, as long as all of them on average: "
            f"{', '.join(names)}"
        )
    for entry in data["rungs"] + data["peers"]:
        if entry["verdict"]:
            console.print(f"{entry['name']}: {entry['verdict']}")
        if entry.get("not_run"):
            console.print(f"{entry['name']}: not run ({entry['not_run']})")


def print_sample(tokenizer, prompts, rungs, console: Console) -> None:
    """The answer of the last rung that repeats itself least (greedy decoding of a small model likes
    to), prompt dimmed.
    """
    outputs = rungs[-1].outputs
    index = max(outputs, key=lambda i: (len(set(outputs[i])), -i))
    console.rule(
        "a sample, the least repetitive answer: the prompt, then what the model wrote", align="left"
    )
    console.print(
        tokenizer.decode(prompts[index], skip_special_tokens=True),
        style="dim",
        end="",
        markup=False,
        highlight=False,
    )
    console.print(
        tokenizer.decode(outputs[index], skip_special_tokens=True),
        style="bold",
        markup=False,
        highlight=False,
    )


def draw(data: dict, path_without_suffix: Path) -> None:
    """The waterfall figure, PNG and SVG, from the content of ladder.json."""
    rungs, model, versions = data["rungs"], data["model"], data["versions"]
    runs = [len(r["runs"]) for r in rungs]
    best = max(rungs, key=lambda r: r["tokens_per_s"])
    same = "the same tokens" if all(r["identical"] for r in rungs) else "NOT the same tokens"
    fig = plotting.waterfall(
        rungs,
        references={p["name"]: p["tokens_per_s"] for p in data["peers"] if p["tokens_per_s"]},
        title=f"{best['name']}: {best['speedup']:.1f}× the tokens per second of the first rung, "
        f"{same}",
        caption=plotting.caption(
            {"device": data["device"], **versions},
            model=f"{model['parameters'] / 1e6:.0f}M parameters",
            dtype=model["dtype"],
            requests=model["requests"],
            runs=f"median of {min(runs)}" + (f" to {max(runs)}" if max(runs) > min(runs) else ""),
            kernels=STAND_INS if versions.get("interpreted") else None,
        ),
    )
    plotting.save(
        fig,
        path_without_suffix,
        alt=f"Bar chart of tokens per second for {len(rungs)} rungs; {best['name']} is fastest",
    )


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text()), source.with_suffix(""))
