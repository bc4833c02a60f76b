"""What bench_serving says of a run: vLLM's lines and the keys of its JSON, so that the two can be
laid side by side, and three lines of our own below them.

Source of names and order: vLLM, vllm/benchmarks/serve.py.
"""

import math
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lessons.l22_serving.load import Objectives, Served, attainment, duration_s, percentile
from lessons.toolbox.measure.records import write_json
from lessons.toolbox.model.arguments import is_number, refuse
from reference.bench.bench_load import LoadRun

MS = 1000.0
METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
WIDTH = 50  # characters of a line
SHORTEST_S = 1e-9  # of a run in which all failed at once


@dataclass(frozen=True)
class Setting:
    """What was asked for. request_rate: requests/s, None: no limit; price_per_hour: of the machine,
    in dollars.
    """

    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    objectives: Objectives | None = None
    percentiles: tuple[float, ...] = (99.0,)
    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    price_per_hour: float | None = None


def parse_goodput(pairs: list[str] | None) -> Objectives | None:
    """--goodput ttft:200 tpot:50, in milliseconds. Raises ValueError."""
    if not pairs:
        return None
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = -1.0
        if (
            name not in ("ttft", "tpot", "e2el")
            or not is_number(milliseconds, 0)
            or not milliseconds
        ):
            accepted = "ttft:MS, tpot:MS or e2el:MS, with a positive number of milliseconds"
            refuse("--goodput", pair, accepted)
        limits[f"{name}_s"] = milliseconds / MS
    return Objectives(**limits)


def summarize(run: LoadRun, setting: Setting) -> dict:
    """The record of a run. Percentiles are of all requests, or of all gaps between tokens,
    together. Rates are over the seconds of the clock, from the first arrival to the last end.
    """
    history = run.history
    done = [served for served in history if not served.why_not]
    seconds = max(duration_s(history), SHORTEST_S)
    generated = sum(served.num_tokens for served in done)
    prompts = sum(served.prompt_tokens for served in done)
    record = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(history) - len(done),
        "total_input_tokens": prompts,
        "total_output_tokens": generated,
        "request_throughput": len(done) / seconds,
        "request_goodput": None,
        "output_throughput": generated / seconds,
        "total_token_throughput": (prompts + generated) / seconds,
        "max_output_tokens_per_s": peak_tokens_per_s(done),
        "max_concurrent_requests": peak_in_system(history),
        "failures": dict(Counter(served.why_not for served in history if served.why_not)),
        "closed_loop": run.closed_loop,
        "mean_send_delay_ms": MS * float(np.mean(run.late_s)),
        "max_send_delay_ms": MS * max(run.late_s),
        "request_rate": setting.request_rate,
        "burstiness": setting.burstiness,
        "max_concurrency": setting.max_concurrency,
    }
    if setting.objectives is not None:
        share = attainment(history, setting.objectives)
        record["slo_attainment"] = share
        record["request_goodput"] = share * len(history) / seconds
    if setting.price_per_hour is not None:
        record["price_per_hour"] = setting.price_per_hour
        record["cost_per_million_output_tokens"] = cost(setting.price_per_hour, generated / seconds)
    for name, seconds_of in samples(done).items():
        record |= statistics_ms(name, seconds_of, setting.percentiles)
        every = [MS * percentile(seconds_of, percent) for percent in range(101)]
        record[f"distribution_{name}_ms"] = every if seconds_of else []
    return record


def details(run: LoadRun) -> dict:
    """Each request's own numbers, for --save-detailed; times in seconds, as vLLM has them."""
    return {
        "input_lens": [served.prompt_tokens for served in run.history],
        "output_lens": [served.num_tokens for served in run.history],
        "ttfts": [served.ttft_s if served.token_s else None for served in run.history],
        "itls": [served.itl_s for served in run.history],
        "errors": [served.why_not for served in run.history],
    }


def samples(done: list[Served]) -> dict[str, list[float]]:
    """{metric: all its values in seconds}. A single token has no time per output token, as vLLM
    counts it: 0 would only make the others look better.
    """
    return {
        "ttft": [served.ttft_s for served in done],
        "tpot": [served.tpot_s for served in done if served.num_tokens > 1],
        "itl": [gap for served in done for gap in served.itl_s],
        "e2el": [served.e2el_s for served in done],
    }


def statistics_ms(name: str, values_s: list[float], percentiles: tuple[float, ...]) -> dict:
    """Mean, median, standard deviation and percentiles, in milliseconds; None without values."""
    found = {"mean": None, "median": None, "std": None} | {
        f"p{percent:g}": None for percent in percentiles
    }
    if values_s:
        found = {
            "mean": float(np.mean(values_s)),
            "median": percentile(values_s, 50),
            "std": float(np.std(values_s)),
        } | {f"p{percent:g}": percentile(values_s, percent) for percent in percentiles}
    return {
        f"{statistic}_{name}_ms": None if value is None else MS * value
        for statistic, value in found.items()
    }


def peak_in_system(history: list[Served]) -> int:
    """The most requests that were there at once. Who ends when another comes has gone."""
    changes = [(served.arrival_s, 1) for served in history]
    changes += [(served.end_s, -1) for served in history]
    number = most = 0
    for _, change in sorted(changes):
        number += change
        most = max(most, number)
    return most


def peak_tokens_per_s(done: list[Served]) -> float:
    """The most tokens within a second of the clock. A part that holds several counts as its
    share.
    """
    times = [
        (at, served.num_tokens / len(served.token_s)) for served in done for at in served.token_s
    ]
    seconds = Counter()
    for at, tokens in times:
        seconds[int(at)] += tokens
    return float(max(seconds.values(), default=0))


def cost(price_per_hour: float, tokens_per_s: float) -> float | None:
    """Dollars for a million tokens; None if there were none."""
    return price_per_hour / (tokens_per_s * 3600) * 1e6 if tokens_per_s else None


def save_record(args: Namespace, points: list[dict], more: dict | None = None) -> list[Path]:
    """Write the record and its figures. more: what else belongs into it. Returns the paths."""
    from lessons.toolbox.measure.device import fingerprint  # here, because it imports PyTorch
    from reference.bench.bench_figures import cost_at, knee_of, save_figures

    setting = {
        name: None if value == math.inf else value
        for name, value in vars(args).items()
        if name not in ("api_key", "result_dir", "result_filename", "base_url", "host", "port")
    }
    path = args.result_dir / args.result_filename
    at = knee_of(points) if len(points) > 1 else None
    record = {
        "setting": setting,
        "fingerprint": fingerprint(),
        "knee": at,
        "cost_at_knee": cost_at(points, at),
        "points": points,
        **(more or {}),
    }
    write_json(path, record)
    return [path, *save_figures(record, path)]


# ---------------------------------------------------------------- lines


def report(record: dict, setting: Setting) -> list[str]:
    """The lines that are printed."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines += [line("Successful requests:", record["completed"])]
    lines += [line("Failed requests:", record["failed"])]
    if setting.max_concurrency is not None:
        lines.append(line("Maximum request concurrency:", setting.max_concurrency))
    if setting.request_rate is not None:
        lines.append(line("Request rate configured (RPS):", float(setting.request_rate)))
    lines += [
        line("Benchmark duration (s):", record["duration"]),
        line("Total input tokens:", record["total_input_tokens"]),
        line("Total generated tokens:", record["total_output_tokens"]),
        line("Request throughput (req/s):", record["request_throughput"]),
    ]
    if setting.objectives is not None:
        lines.append(line("Request goodput (req/s):", record["request_goodput"]))
    lines += [
        line("Output token throughput (tok/s):", record["output_throughput"]),
        line("Peak output token throughput (tok/s):", record["max_output_tokens_per_s"]),
        line("Peak concurrent requests:", float(record["max_concurrent_requests"])),
        line("Total Token throughput (tok/s):", record["total_token_throughput"]),
    ]
    for name in setting.metrics:
        short, long = METRICS[name]
        lines.append(long.center(WIDTH, "-"))
        lines.append(line(f"Mean {short} (ms):", record[f"mean_{name}_ms"]))
        lines.append(line(f"Median {short} (ms):", record[f"median_{name}_ms"]))
        for percent in setting.percentiles:
            value = record[f"p{percent:g}_{name}_ms"]
            lines.append(line(f"P{percent:g} {short} (ms):", value))
    return [*lines, *own_lines(record, setting), "=" * WIDTH]


def own_lines(record: dict, setting: Setting) -> list[str]:
    """What vLLM's client does not say."""
    lines = ["Beside that".center(WIDTH, "-")]
    lines.append(line("Max send delay of the client (ms):", record["max_send_delay_ms"]))
    if setting.objectives is not None:
        lines.append(line("Requests that met the SLO (%):", 100 * record["slo_attainment"]))
    if setting.price_per_hour is not None:
        price = record["cost_per_million_output_tokens"]
        lines.append(line("Cost per million output tokens ($):", price))
    if record["closed_loop"]:
        lines.append(
            "closed loop: a server that stalls is asked less, so its tail is longer than this"
        )
    for why, count in sorted(record["failures"].items()):
        lines.append(f"{count} failed: {why}")
    return lines


def line(name: str, value: float | int | None) -> str:
    """One line, as wide as vLLM's."""
    if value is None:
        return f"{name:<40} {'none':<10}".rstrip()
    return (
        f"{name:<40} {value:<10.2f}".rstrip() if isinstance(value, float) else f"{name:<40} {value}"
    )


def summary_of_sweep(points: list[dict]) -> list[str]:
    """A line for each load, and the knee."""
    from reference.bench.bench_figures import TARGET, cost_at, knee_of, load_name, load_of

    lines = [" Sweep ".center(WIDTH, "=")]
    for point in points:
        share = point.get("slo_attainment")
        met = "" if share is None else f"  in time {100 * share:.0f} %"
        lines.append(
            f"{load_of(point):>8g} {load_name(points)}: {point['output_throughput']:.1f} tok/s{met}"
        )
    if "slo_attainment" in points[0]:
        at = knee_of(points)
        said = "below the first load" if at is None else f"{at:.3g} {load_name(points)}"
        lines.append(f"Knee ({TARGET:.0%} in time): {said}")
        if (paid := cost_at(points, at)) is not None:
            lines.append(f"Cost per million output tokens at the knee ($): {paid:.4g}")
    return lines
