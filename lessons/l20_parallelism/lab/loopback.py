"""An instrument that knows nothing of our counters: the bytes that Linux saw on the loopback
interface while ranks on this machine all-reduced.

    python -m lessons.l20_parallelism.lab.loopback

`Wire` counts what a rank asks for, and collectives.py says what an algorithm should send. Gloo
sends through TCP, the kernel counts the bytes of each interface in /proc/net/dev, and P ranks
together should have sent about P · 2 (P − 1) / P · n. Other programs of the machine are counted
too, and so are TCP's headers and acknowledgements, so a little more comes out.
"""

import argparse
import sys
from pathlib import Path

import torch

from lessons.l20_parallelism.processes.collectives import WAYS
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import run_ranks
from lessons.toolbox.command import OneLineParser, run_command

DEV = Path("/proc/net/dev")


def loopback_bytes(text: str | None = None) -> int:
    """Bytes that have been sent over `lo` since the system started. text: of /proc/net/dev; None
    reads it. Raises ValueError where there is none.
    """
    if text is None:
        if not DEV.exists():
            raise ValueError(f"{DEV} is missing; accepted: a Linux machine")
        text = DEV.read_text(encoding="ascii")
    for line in text.splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])  # eight columns of what was received come before it
    raise ValueError(f"{DEV} has no interface lo; accepted: a machine with a loopback interface")


def reduce_rank(world: Group, num_bytes: int, repetitions: int, way: str | None) -> int:
    """Bytes over the loopback during the all-reduces, as rank 0 sees it. way: None is gloo's
    own.
    """
    x = torch.ones(num_bytes // 4)
    before = loopback_bytes()
    world.barrier()  # after the look, because no rank may begin before it
    for _ in range(repetitions):
        x = (
            world.all_reduce(x) / world.size
            if way is None
            else WAYS[way].run(x, world) / world.size
        )
    world.barrier()
    return loopback_bytes() - before


def measured(size: int, num_bytes: int, repetitions: int = 1, way: str | None = None) -> float:
    """Bytes on the loopback interface per all-reduce of num_bytes by `size` ranks, all together."""
    return run_ranks(size, reduce_rank, num_bytes, repetitions, way)[0] / repetitions


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(
        prog="python -m lessons.l20_parallelism.lab.loopback",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--megabytes", type=int, default=16, help="of the tensor")
    args = parser.parse_args(arguments)

    def run() -> int:
        loopback_bytes()
        n = args.megabytes * 10**6
        for way in (None, *WAYS):
            bytes_seen = measured(args.ranks, n, way=way)
            expected = args.ranks * WAYS[way or "ring"].bytes_sent(args.ranks, n)
            name = way or "gloo's own"
            print(
                f"{name:>10}: {bytes_seen / 1e6:7.1f} MB on lo; {expected / 1e6:7.1f} MB if each "
                f"rank sends as much as the busiest{' of a ring' if way is None else ''}"
            )
        return 0

    return run_command("loopback", run)


if __name__ == "__main__":
    sys.exit(main())
