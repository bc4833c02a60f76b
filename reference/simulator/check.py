"""The simulator against the real engine on this machine: the same steps, and how far off its times
are.

    python -m reference.simulator.check

The engine serves a trace on a clock that is moved by the CPU seconds of each step, so nothing waits
and nothing else on the machine counts. One trace calibrates the three numbers of lesson 14's cost
of a step. For another trace the simulator then predicts all times from its arrivals and lengths
alone.
"""

import argparse
import random
import sys
from dataclasses import dataclass, field
from time import process_time

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from lessons.l14_continuous_batching.lab.cost import Sample, StepCost, fit
from lessons.l14_continuous_batching.sequence import Step
from lessons.toolbox.command import OneLineParser, run_command
from reference.engine.assembly import new_engine
from reference.engine.engine import Engine
from reference.engine.engine_args import EngineArgs
from reference.engine.sampling_params import SamplingParams
from reference.simulator.costs import Deployment, FittedCost
from reference.simulator.policies import Policy, new_cluster
from reference.simulator.served import Served, percentile
from reference.simulator.traces import Trace, TracedRequest, at_rate, poisson

PLACES, BUDGET, BLOCK_SIZE = 16, 64, 16
NUM_BLOCKS = 60  # so that requests are preempted
Chunks = list[tuple[int, int]]  # (row, tokens)


@dataclass
class Measured:
    """What the engine did. steps: the chunks of each; samples: what each took."""

    steps: list[Chunks] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    token_s: dict[int, list[float]] = field(default_factory=dict)


def real_prompt(request: TracedRequest, row: int, vocab_size: int) -> list[int]:
    """Token ids for a request: equal to another's only in a shared prefix."""
    shared = random.Random(request.prefix).choices(range(1, vocab_size), k=request.prefix_tokens)
    own = request.prompt_tokens - request.prefix_tokens
    return shared + random.Random(row).choices(range(1, vocab_size), k=own)


def serve_by_engine(engine: Engine, trace: Trace, step_s=None) -> Measured:
    """Serve a trace. step_s: seconds of a step on the clock; None: the CPU seconds that it
    needed.
    """
    found, now_s, coming = Measured(), 0.0, 0
    schedule = engine.scheduler.schedule

    def watched() -> Step:
        step = schedule()
        found.steps.append([(chunk.sequence.row, chunk.count) for chunk in step.chunks])
        found.samples.append(Sample(step.num_tokens, step.num_context_tokens, 0.0))
        return step

    engine.scheduler.schedule = watched
    vocab_size = engine.runner.model.config.vocab_size
    while coming < len(trace) or engine.has_unfinished_requests:
        if not engine.has_unfinished_requests:
            now_s = max(now_s, trace[coming].arrival_s)
        while coming < len(trace) and trace[coming].arrival_s <= now_s:
            request = trace[coming]
            params = SamplingParams(
                temperature=0, max_tokens=request.output_tokens, ignore_eos=True, detokenize=False
            )
            engine.add_request(str(coming), real_prompt(request, coming, vocab_size), params)
            coming += 1
        begin = process_time()
        outputs = engine.step()
        took_s = step_s or process_time() - begin
        now_s += took_s
        found.samples[-1] = found.samples[-1]._replace(seconds=took_s)
        for output in outputs:
            times = found.token_s.setdefault(int(output.request_id), [])
            times.append(now_s)
    engine.scheduler.schedule = schedule
    return found


def predict(trace: Trace, cost: StepCost) -> tuple[list[Chunks], Served]:
    """The steps and times of the same engine, simulated."""
    deployment = Deployment("this machine", FittedCost(cost), NUM_BLOCKS, block_size=BLOCK_SIZE)
    policy = Policy("chunked", max_num_seqs=PLACES, max_num_batched_tokens=BUDGET)
    cluster = new_cluster(policy, deployment, 1, trace)
    (replica,) = cluster.pools[0].replicas
    replica.history = []
    served = cluster.run(trace)
    return [chunks for _, chunks in replica.history], served


def small_engine(model: str) -> Engine:
    """An engine of the sizes above."""
    return new_engine(
        EngineArgs(
            model,
            device="cpu",
            max_num_seqs=PLACES,
            max_num_batched_tokens=BUDGET,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=NUM_BLOCKS,
        )
    )


def check_trace(rate_per_s: float, count: int, seed: int) -> list[TracedRequest]:
    """Requests for the embedded model: prompts of 48 to 144 tokens, some with a shared
    beginning.
    """
    sizes = f"requests={count},prompt=64,output=40,prefixes=3,prefix=32"
    return poisson(f"rate={rate_per_s},seed={seed},{sizes}")


def errors(trace: Trace, measured: Measured, served: Served) -> dict[str, tuple[float, float]]:
    """{quantity: (measured, predicted)}, in seconds."""
    rows = range(len(trace))
    first = np.array([measured.token_s[row][0] - trace[row].arrival_s for row in rows])
    gaps = np.concatenate([np.diff(measured.token_s[row]) for row in rows])
    last = max(times[-1] for times in measured.token_s.values())
    return {
        "TTFT, median": (percentile(first, 50), percentile(served.ttft_s, 50)),
        "TTFT, 90th percentile": (percentile(first, 90), percentile(served.ttft_s, 90)),
        "ITL, median": (percentile(gaps, 50), percentile(served.itl_s, 50)),
        "ITL, 99th percentile": (percentile(gaps, 99), percentile(served.itl_s, 99)),
        "until the last token": (last, served.makespan_s),
    }


def in_lockstep(trace: Trace, model: str) -> tuple[list[Chunks], list[Chunks], int]:
    """(the engine's steps, the simulator's, preemptions) where a step takes a second on both
    clocks, so that noise changes no decision. A request arrives every four steps.
    """
    slow = [r._replace(arrival_s=float(round(r.arrival_s))) for r in at_rate(trace, 0.25)]
    real = serve_by_engine(small_engine(model), slow, step_s=1.0).steps
    simulated, served = predict(slow, StepCost(1.0, 0.0, 0.0))
    return real, simulated, int(served.preemptions.sum())


def run(args: argparse.Namespace) -> int:
    """Calibrate, predict, measure, print. Exit code 1 if the steps differ."""
    import torch

    torch.set_num_threads(1)
    console = Console(highlight=False)
    engine = small_engine(args.model)
    serve_by_engine(engine, check_trace(args.rate, 4, seed=9))  # nothing is cold any more
    calibrated = serve_by_engine(engine, check_trace(args.rate, args.requests, seed=1))
    cost = fit(calibrated.samples)
    trace = check_trace(args.rate, args.requests, seed=2)
    measured = serve_by_engine(small_engine(args.model), trace)
    _, served = predict(trace, cost)
    real, simulated, preempted = in_lockstep(trace, args.model)
    same = sum(a == b for a, b in zip(real, simulated))
    console.print(
        f"{same} of {max(len(real), len(simulated))} steps have the engine's chunks, with "
        f"{preempted} preemptions"
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("ms", "measured", "predicted", "error"):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for name, (real_s, predicted_s) in errors(trace, measured, served).items():
        off = f"{predicted_s / real_s - 1:+.0%}"
        table.add_row(name, f"{1e3 * real_s:.1f}", f"{1e3 * predicted_s:.1f}", off)
    console.print(table)
    console.print(f"{args.requests} requests, CPU seconds; a step is {cost}", style="dim")
    return 0 if same == len(simulated) == len(real) else 1


def main(arguments: list[str] | None = None) -> int:
    """The command; every mistake is one line."""
    parser = OneLineParser(
        prog="python -m reference.simulator.check", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default="models/tiny", help="folder of a small checkpoint")
    parser.add_argument("--rate", type=float, default=12.0, help="requests/s on the clock")
    parser.add_argument("--requests", type=int, default=24)
    return run_command("reference.simulator.check", lambda: run(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
