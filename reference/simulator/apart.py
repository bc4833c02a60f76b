"""Prompts and answers mixed or apart, on equal hardware: four H100s, over the load.

    python -m reference.simulator.apart

simulates long and short prompts, and writes results/simulated/l26_apart.json, from which lesson 26
draws its figure and takes its table. Nothing is measured.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from lessons.toolbox.command import OneLineParser, run_command
from reference.simulator.costs import new_deployment
from reference.simulator.policies import Policy, simulate
from reference.simulator.served import Served, percentile
from reference.simulator.traces import at_rate, poisson

RECORD = Path(__file__).parents[2] / "results" / "simulated" / "l26_apart.json"
REPLICAS, REQUESTS, OUTPUT = 4, 400, 200
# {prompt tokens in the mean: requests/s}
LOADS = {4096: (4, 8, 12, 16, 20), 256: (20, 40, 80, 120, 160)}


@dataclass(frozen=True)
class Way:
    """prefill: replicas that compute prompts; None: all do everything. gbit: Gb/s of each link,
    over which K and V travel layer by layer.
    """

    name: str
    budget: int = 512
    prefill: int | None = None
    gbit: float = 400

    def policy(self) -> Policy:
        """As the simulator takes it."""
        if self.prefill is None:
            return Policy("chunked", max_num_batched_tokens=self.budget)
        return Policy("disaggregated", prefill_replicas=self.prefill)


WAYS = (
    Way("mixed, chunks of 512"),
    Way("mixed, chunks of 1024", budget=1024),
    Way("apart 1:3, 400 Gb/s", prefill=1),
    Way("apart 2:2, 400 Gb/s", prefill=2),
    Way("apart 2:2, 25 Gb/s", prefill=2, gbit=25),
    Way("apart 3:1, 400 Gb/s", prefill=3),
)


def row_of(served: Served) -> dict[str, float]:
    """Milliseconds of the first token, the second after it, and all next ones; tokens/s."""
    seen = {
        "ttft": served.ttft_s,
        "second": served.gaps_s[served.first][served.counts > 1],
        "itl": served.itl_s,
    }
    found = {
        f"{name}_p{percent}_ms": round(1e3 * percentile(values, percent), 2)
        for name, values in seen.items()
        for percent in (50, 99)
    }
    return found | {"tokens_per_s": round(served.tokens_per_s, 1)}


def simulated(prompt: int, rate: float, way: Way, requests: int = REQUESTS) -> dict:
    """One run: what it was, and what came out."""
    trace = at_rate(poisson(f"prompt={prompt},output={OUTPUT},requests={requests}"), rate)
    deployment = replace(new_deployment(by_layer=True), link_bytes_per_s=way.gbit * 1e9 / 8)
    served = simulate(trace, deployment, way.policy(), REPLICAS)
    return {"prompt": prompt, "rate": rate, "way": way.name} | row_of(served)


def run() -> int:
    """Simulate all, write, print."""
    todo = [(prompt, rate, way) for prompt in LOADS for rate in LOADS[prompt] for way in WAYS]
    rows = [simulated(*each) for each in tqdm(todo, disable=None)]
    about = (
        f"{new_deployment().name}; {REPLICAS} replicas, {REQUESTS} requests, answers of {OUTPUT}"
    )
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"{'prompt':>6} {'rate':>5} {'':24} {'TTFT, ms':>15} {'2nd token':>15} {'ITL':>15}")
    for row in rows:
        cells = [f"{row[f'{name}_p{p}_ms']:7.0f}" for name in ("ttft", "second", "itl")
                 for p in (50, 99)]  # fmt: skip
        print(f"{row['prompt']:6} {row['rate']:5} {row['way']:24}", *cells)
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command line, which takes no arguments; returns the exit code."""
    prog = "python -m reference.simulator.apart"
    OneLineParser(prog, description=__doc__.split("\n")[0]).parse_args(argv)
    return run_command("reference.simulator.apart", run)


if __name__ == "__main__":
    sys.exit(main())
