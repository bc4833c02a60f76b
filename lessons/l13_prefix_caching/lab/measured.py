"""Time to the first token and in all, for every kind of traffic, and cold and warm.

    python -m lessons.l13_prefix_caching.lab.measured [--model models/tiny] [--out results/cpu]

With --out it writes l13_traces.json and l13_cold_warm.json there. Each run is repeated, without and
with a cache in turns, and the median counts. Seconds are of one processor, on which one thread
runs.
"""

import argparse
import random
import sys
from pathlib import Path
from statistics import median

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l13_prefix_caching.cache import NoCache
from lessons.l13_prefix_caching.generate import WaveRunner
from lessons.l13_prefix_caching.lab.cold_and_warm import five_ways
from lessons.l13_prefix_caching.lab.traffic import TRACES, serve_trace
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l13_prefix_caching.optimized import RadixTree
from lessons.toolbox.command import OneLineParser, check_writable, run_command
from lessons.toolbox.measure.device import fingerprint
from lessons.toolbox.measure.records import write_json

NUM_BLOCKS = 2048
CACHES = {"no cache": NoCache, "hash blocks": HashBlocks, "radix tree": RadixTree}


def traces(model: Decoder, repeats: int) -> dict:
    """{trace: {cache: seconds and rates}}. Raises AssertionError where a cache changes an
    answer.
    """
    found = {}
    for name, trace in TRACES.items():
        runs = {label: [] for label in CACHES}
        for _ in range(repeats):
            for label, new_cache in CACHES.items():
                runner = WaveRunner(model, NUM_BLOCKS, new_cache=new_cache)
                runs[label].append(serve_trace(runner, trace(random.Random(13))))
        answers = runs["no cache"][0].answers
        assert all(run.answers == answers for served in runs.values() for run in served), name
        found[name] = {
            label: {
                "ttft_s": median(run.mean_ttft_s for run in served),
                "total_s": median(run.total_s for run in served),
                "rate_per_request": served[0].hits.rate_per_request,
                "rate_per_token": served[0].hits.rate_per_token,
            }
            for label, served in runs.items()
        }
    return found


def cold_and_warm(model: Decoder, repeats: int) -> dict:
    """{way: tokens computed, and seconds}."""
    five_ways(model)  # warms the processor's caches up
    runs = [five_ways(model, seed) for seed in range(repeats)]
    return {
        name: {
            "computed": way.computed,
            "ttft_s": median(run[name].ttft_s for run in runs),
            "total_s": median(run[name].total_s for run in runs),
        }
        for name, way in runs[0].items()
    }


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = OneLineParser(
        "python -m lessons.l13_prefix_caching.lab.measured", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--out", type=Path, default=None, help="folder for the two records")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    return run_command("measured", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Measure, print and record. Raises ValueError for options that cannot work."""
    if options.repeats < 1:
        raise ValueError(f"--repeats: got {options.repeats}; accepted: 1 or more")
    if options.out:
        check_writable(options.out)
    torch.set_num_threads(1)
    model = Decoder.from_pretrained(options.model)
    for name, measure in {"l13_traces": traces, "l13_cold_warm": cold_and_warm}.items():
        series = measure(model, options.repeats)
        print(name)
        for label, found in series.items():
            print(f"  {label}: {found}", flush=True)
        if options.out:
            # a record like those of the harness, but its series have no x
            facts = {"schema": 1, "name": name, "fingerprint": fingerprint()}
            facts |= {"repeats": options.repeats, "clock": "processor time, one thread"}
            write_json(options.out / f"{name}.json", facts | {"series": series})
    return 0


if __name__ == "__main__":
    sys.exit(main())
