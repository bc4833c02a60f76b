"""What two ranks of this machine save if they add through memory that both see, not by messages.

    python -m lessons.l20_parallelism.lab.small_sums [--out results/cpu] [--repeats 25]

All-reduces of some sizes by gloo, which sends through TCP, and by symmetric.py's one_shot and
two_shot, in turn; then steps of lesson 20's two shards with each of the two. No kernel is timed
here: in the interpreter it would tell the interpreter's time. With --out it writes
l20_small_sums.json there. Seconds are of a wall clock, because a rank that waits uses no processor
with gloo, and all of one with shared memory.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch

from lessons.l20_parallelism.lab import experiments
from lessons.l20_parallelism.lab.rank_times import time_ranks
from lessons.l20_parallelism.lab.testing import random_model
from lessons.l20_parallelism.optimized import shard
from lessons.l20_parallelism.processes import symmetric
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Mesh, new_links

SIZES = (4096, 16384, 65536, 262144, 1048576, 4194304)  # bytes of the tensor
TOGETHER = 20  # all-reduces that are timed as one
LENGTHS = (1, 16)  # new tokens of a step


def rank_sums(world: Group, repeats: int) -> dict:
    """{bytes: seconds of one all-reduce by each way, the median and the fastest} on rank 0."""
    torch.set_num_threads(1)
    memory = symmetric.shared_on_cpu(world, max(SIZES))
    found = {}
    for num_bytes in SIZES:
        x = torch.ones(num_bytes // 4)
        ways: dict[str, Callable] = {
            "gloo": lambda x=x: world.all_reduce(x.clone()),
            "one_shot": partial(symmetric.one_shot, x, memory),
            "two_shot": partial(symmetric.two_shot, x, memory),
        }
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(repeats + 1):  # the first is a warm-up
            for name, way in ways.items():
                seconds = seconds_of(world, way)
                if number:
                    samples[name].append(seconds)
        times = {f"{name}_s": median(seconds) for name, seconds in samples.items()}
        # the least disturbed by what else the machine does
        times |= {f"{name}_fastest_s": min(seconds) for name, seconds in samples.items()}
        ratios = [gloo / shared for gloo, shared in zip(samples["gloo"], samples["one_shot"])]
        found[str(num_bytes)] = times | {"speedup": median(ratios)}
    return found


def seconds_of(world: Group, way: Callable) -> float:
    """Seconds of one call, of TOGETHER that follow each other on all ranks."""
    world.barrier()
    start = perf_counter()
    for _ in range(TOGETHER):
        way()
    return (perf_counter() - start) / TOGETHER


@torch.inference_mode()
def rank_steps(world: Group, repeats: int) -> dict:
    """Steps of LENGTHS tokens on one rank and on two shards, whose sums go through gloo or through
    shared memory: {"1 token": what was measured}.
    """
    torch.set_num_threads(1)
    whole = random_model(experiments.CONFIG, 0)
    by_messages, by_memory = new_links(Mesh(tp=2)), new_links(Mesh(tp=2))
    memory = symmetric.shared_on_cpu(by_memory.tensor, 1 << 20)
    by_memory.tensor = symmetric.SymmetricGroup(by_memory.tensor, memory)
    parts = [whole, shard(whole, by_messages), shard(whole, by_memory)]
    found = {}
    for length in LENGTHS:
        runs = [experiments.one_pass(part, 1, length) for part in parts]
        want, *others = [run() for run in runs]
        assert all(torch.allclose(want, logits, atol=1e-3) for logits in others)
        samples = [
            [experiments.timed(world, run, on_all=run is not runs[0]) for run in runs]
            for _ in range(repeats)
        ]
        one, gloo, shared = (median(column) for column in zip(*samples))
        found[f"{length} token{'s' * (length > 1)}"] = {
            "one_rank_s": one,
            "gloo_s": gloo,
            "shared_memory_s": shared,
            "speedup_gloo": median(a / b for a, b, _ in samples),
            "speedup_shared_memory": median(a / c for a, _, c in samples),
        }
    return found


EXPERIMENTS = {"sums": rank_sums, "steps": rank_steps}


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    record = {"name": "l20_small_sums", "clock": "wall clock, one thread a rank"}
    record |= {"load": os.getloadavg()[0]}  # programs that wanted a core before this one began
    return time_ranks("small_sums", __doc__, EXPERIMENTS, record, 25, argv)


if __name__ == "__main__":
    sys.exit(main())
