"""What the command prints and draws."""

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from lessons.l26_kv_transfer.costs import GB
from lessons.toolbox.draw.figure import number, save
from reference.simulator.cluster import Failure
from reference.simulator.costs import Deployment, Tiers, new_deployment
from reference.simulator.plan import Needed, gpus_needed, over_rates, over_replicas
from reference.simulator.policies import POLICIES, Policy, simulate
from reference.simulator.recorded import parse_trace
from reference.simulator.served import Slo, percentile
from reference.simulator.tiers import DISK, HOST, NOWHERE, POOL
from reference.simulator.traces import Trace, at_rate, rate_of

DRAWN = ("static", "continuous", "chunked", "disaggregated")
LOADS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.4, 1.8)  # of what the replicas do in an offline job
BUSY_REPLICAS = 4
MOST_POINTS = 8  # numbers of replicas in the figure
WHERE = {
    POOL: "were in the pool",
    HOST: "came from host memory",
    DISK: "came from the disk",
    NOWHERE: "were computed",
}
MOST_OF_A_JOB = 600  # requests from which the capacity is found


@contextmanager
def progress(what: str) -> Iterator:
    """A bar on a terminal, of what has run for two seconds; on_done for `simulate`."""
    with tqdm(desc=what, unit=" requests", delay=2, leave=False, disable=None) as bar:
        yield lambda row: bar.update()


def policy_of(args: argparse.Namespace, name: str) -> Policy:
    """A policy with the options of the command line."""
    places, budget = args.max_num_seqs, args.max_num_batched_tokens
    return Policy(name, args.router, places, budget, prefill_replicas=args.prefill)


def deployment_of(args: argparse.Namespace) -> Deployment:
    """A replica with the options of the command line."""
    tiers = Tiers(*(GB * each for each in (args.host_gb, args.disk_gb)),
                  *(GB * each for each in (args.host_link, args.disk_link)))  # fmt: skip
    return new_deployment(
        args.model,
        args.gpu,
        args.gpus_per_replica,
        args.step_cost,
        tiers,
        args.link * GB / 8,
        by_layer=args.send == "layers",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate, print the table, draw. Returns the exit code."""
    deployment = deployment_of(args)
    slo, trace = Slo.parse(args.slo), parse_trace(args.trace)
    if args.out is not None:
        at_rate(trace, 1.0)  # raises if the trace has no rate: better now than after the table
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    names = POLICIES if args.policy == "all" else (args.policy,)
    rows = {}
    for name in names:
        with progress(name) as on_done:
            rows[name] = row_of(args, trace, deployment, policy_of(args, name), slo, on_done)
    print_table(rows, trace, deployment, slo, args, console)
    if args.out is not None:
        enough = [row.replicas for row in rows.values() if row.is_enough]
        draw(args, trace, deployment, slo, min(enough, default=args.replicas or 4), console)
    return 0


def row_of(args, trace: Trace, deployment: Deployment, policy: Policy, slo: Slo, on_done) -> Needed:
    """One run on the replicas that were asked for, or on the fewest that are enough."""
    if args.replicas is None:
        return gpus_needed(trace, deployment, policy, slo, args.attain, args.most_replicas, on_done)
    dying = [Failure(at_s, replica) for at_s, replica in args.failures or ()]
    served = simulate(trace, deployment, policy, args.replicas, dying, on_done)
    is_enough = served.attained(slo) >= args.attain
    return Needed(args.replicas, args.replicas * deployment.gpus, served, is_enough)


def print_table(
    rows: dict[str, Needed], trace: Trace, deployment: Deployment, slo: Slo, args, console: Console
) -> None:
    """A line for each policy, and what has to be known about them."""
    table = Table(
        title=f"{len(trace)} requests, {arrivals(trace)}: {escape(args.trace)}",
        box=box.SIMPLE,
        pad_edge=False,
    )
    table.add_column("policy")
    for heading in ("GPUs\nneeded" if args.replicas is None else "GPUs", "TTFT, s\nmedian",
                    "TTFT, s\np99", "ITL, ms\nmedian", "ITL, ms\np99", "tokens/s",
                    "keep the\nobjective", "goodput\nrequests/s"):  # fmt: skip
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        table.add_row(name, *cells(row, slo, args.replicas is None))
    console.print(table)
    notes = [
        f"Simulated: {deployment.name}; {deployment.num_blocks} blocks of "
        f"{deployment.block_size} tokens{deployment.in_layers} a replica.",
        f"Objective: the first token within {slo.ttft_s:g} s, and 99 of 100 next tokens within "
        f"{1e3 * slo.itl_s:g} ms; {args.attain:.0%} of the requests have to keep it.",
    ]
    for name, row in rows.items():
        if args.replicas is None and not row.is_enough:
            notes.append(
                f"{name}: no number of GPUs that was tried is enough; the line shows {row.gpus}."
            )
        if found := row.served.found:
            total = sum(found.values())
            shares = ", ".join(
                f"{found[tier] / total:.0%} {said}" for tier, said in WHERE.items() if tier in found
            )
            notes.append(f"{name}: of the tokens of prompts {shares}.")
    for note in notes:
        console.print(note, style="dim", markup=False)


def arrivals(trace: Trace) -> str:
    """How they arrive, in words."""
    return f"{number(rate_of(trace))} a second" if rate_of(trace) < math.inf else "all at once"


def cells(row: Needed, slo: Slo, searched: bool) -> list[str]:
    """The numbers of a line."""
    served = row.served
    return [
        str(row.gpus) if row.is_enough or not searched else "none",
        *(number(percentile(served.ttft_s, percent)) for percent in (50, 99)),
        *(milliseconds(percentile(served.itl_s, percent)) for percent in (50, 99)),
        number(served.tokens_per_s),
        f"{served.attained(slo):.1%}",
        number(served.goodput(slo)),
    ]


def milliseconds(seconds: float) -> str:
    """As a cell: a dash for NaN, because answers of one token have no gaps."""
    return "-" if math.isnan(seconds) else number(1e3 * seconds)


def draw(
    args, trace: Trace, deployment: Deployment, slo: Slo, replicas: int, console: Console
) -> None:
    """Both figures, as PNG and SVG, into --out. Where two replicas are plenty, the trace is sped up
    in the second one until about four are busy, because else there is nothing to see.
    """
    # Here, because matplotlib takes a second that the table need not pay.
    from reference.simulator import figures

    policies = [policy_of(args, name) for name in DRAWN]
    replicas = max(2, replicas)
    capacity = capacity_per_s(trace, deployment, policy_of(args, "chunked"))
    setting = f"{deployment.name} · {len(trace)} requests of {args.trace}"
    rates = [load * replicas * capacity for load in LOADS]
    with progress("latencies") as on_done:
        runs = over_rates(trace, deployment, policies, replicas, rates, slo, on_done)
    many = f"{setting} at other rates · {replicas * deployment.gpus} GPUs"
    drawn = [(figures.draw_latencies(rates, runs, slo, many), "latencies", figures.LATENCY_ALT)]
    rate = max(rate_of(trace), BUSY_REPLICAS * capacity)
    most = max(2 * replicas, 2 * BUSY_REPLICAS)
    counts = sorted({max(1, round(most * i / MOST_POINTS)) for i in range(1, MOST_POINTS + 1)})
    faster = at_rate(trace, rate)
    with progress("goodput") as on_done:
        goodput = over_replicas(faster, deployment, policies, counts, slo, on_done)
    gpus = [count * deployment.gpus for count in counts]
    limits = f"{setting} at {number(rate)}/s · TTFT {slo.ttft_s:g} s, ITL {slo.itl_s:g} s"
    drawn.append(
        (figures.draw_goodput(gpus, goodput, rate, limits), "goodput", figures.GOODPUT_ALT)
    )
    for figure, name, alt in drawn:
        png, _ = save(figure, args.out / name, alt=alt)
        console.print(f"figure: {png}", markup=False)


def capacity_per_s(trace: Trace, deployment: Deployment, policy: Policy) -> float:
    """Requests/s that one replica ends when it never waits for one."""
    job = [request._replace(arrival_s=0.0) for request in trace[:MOST_OF_A_JOB]]
    return len(job) / simulate(job, deployment, policy).makespan_s
