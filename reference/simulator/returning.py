"""Chats that come back: which replica gets them, and where their K and V wait meanwhile.

    python -m reference.simulator.returning

simulates two H100s, and writes results/simulated/l26_chats.json. Nothing is measured.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lessons.l26_kv_transfer.costs import GB
from lessons.toolbox.command import OneLineParser, run_command
from reference.simulator.costs import NO_TIERS, Tiers, new_deployment
from reference.simulator.policies import Policy, simulate
from reference.simulator.served import percentile
from reference.simulator.tiers import DISK, HOST, NOWHERE, POOL
from reference.simulator.workloads import chats

RECORD = Path(__file__).parents[2] / "results" / "simulated" / "l26_chats.json"
REPLICAS = 2
OPTIONS = "rate=6,requests=900,turns=8,pause=30,prompt=8000,turn=200,output=150"


class Way(NamedTuple):
    """A router, and tiers."""

    name: str
    router: str
    tiers: Tiers = NO_TIERS


WAYS = (
    Way("round robin", "round-robin"),
    Way("the fewest requests", "least-loaded"),
    Way("by the prefix", "prefix-aware"),
    Way("by the prefix, 40 GB of host memory", "prefix-aware", Tiers(40 * GB)),
    Way("by the prefix, 200 GB of host memory", "prefix-aware", Tiers(200 * GB)),
    Way("by the prefix, 40 GB of host memory, 400 GB of disk", "prefix-aware",
        Tiers(40 * GB, 400 * GB)),
    Way("round robin, 200 GB of host memory", "round-robin", Tiers(200 * GB)),
)  # fmt: skip


def simulated(way: Way, options: str = OPTIONS) -> dict:
    """One run: shares of the prompts' tokens by where they were, and TTFT."""
    deployment = new_deployment(tiers=way.tiers)
    served = simulate(chats(options), deployment, Policy(router=way.router), REPLICAS)
    total = sum(served.found.values())
    shares = {tier: round(served.found.get(tier, 0) / total, 4)
              for tier in (POOL, HOST, DISK, NOWHERE)}  # fmt: skip
    seconds = {f"ttft_p{p}_ms": round(1e3 * percentile(served.ttft_s, p), 1) for p in (50, 99)}
    return {"way": way.name} | shares | seconds


def run() -> int:
    """Simulate all, write, print."""
    rows = [simulated(way) for way in tqdm(WAYS, disable=None)]
    about = f"{new_deployment().name}; {REPLICAS} replicas; chats:{OPTIONS}"
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(", ".join(f"{name}: {value}" for name, value in row.items()))
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command line, which takes no arguments; returns the exit code."""
    prog = "python -m reference.simulator.returning"
    OneLineParser(prog, description=__doc__.split("\n")[0]).parse_args(argv)
    return run_command("reference.simulator.returning", run)


if __name__ == "__main__":
    sys.exit(main())
