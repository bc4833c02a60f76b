"""Symmetric memory and shared tokens, as pictures, and what happens to a sum without its first
wait.
"""

import time

import torch
from matplotlib.axes import Axes

from lessons.l20_parallelism.lab.figures import box, words
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.symmetric import added, shared_on_cpu
from lessons.l20_parallelism.ring_attention import striped
from lessons.toolbox.draw.figure import PALETTE, ClassFigure, frame, style

READ, WRITTEN, OTHER = PALETTE[0], PALETTE[5], "#F4F4F4"
RANKS, TOKENS, SHOWN = 4, 12, 1  # SHOWN: whose reads and writes the picture has


def sum_with_a_late_rank(world: Group, waits: bool) -> list[float]:
    """What one rank adds up, of 1 + 10 and 2 + 20. Rank 0 writes its numbers late, and both
    buffers hold 100 from before. waits: whether the ranks wait for each other before they add.
    """
    memory = shared_on_cpu(world, 8)
    x = torch.tensor([1.0, 2.0]) if world.rank == 0 else torch.tensor([10.0, 20.0])
    buffers = memory.views(x)
    buffers[world.rank].fill_(100)
    memory.barrier()
    if world.rank == 0:
        time.sleep(0.1)
    buffers[world.rank].copy_(x)
    if waits:
        memory.barrier()
    return added(buffers).tolist()


def table(ax: Axes, left: float, title: str, colours: list[list[str]], names: list[str]) -> None:
    """Cells in the colours [row][column], one row for each rank, under names of the columns."""
    words(ax, left + len(names) / 2, -1.5, title, fontweight="bold")
    for column, name in enumerate(names):
        words(ax, left + column + 0.5, -0.45, name)
    for row, cells in enumerate(colours):
        for column, colour in enumerate(cells):
            box(ax, left + column, row, 1, 0.9, fc=colour)


@style()
def draw_shared_memory() -> ClassFigure:
    """What one of four ranks reads and writes in the buffers of all."""
    everything = [[READ] * RANKS] * RANKS
    read = [[READ if piece == SHOWN else OTHER for piece in range(RANKS)]] * RANKS
    written = [[WRITTEN if piece == SHOWN else OTHER for piece in range(RANKS)]] * RANKS
    fig, ax = frame(
        f"One shot: rank {SHOWN} reads all. Two shots: it reads a piece of each, and writes "
        f"the sum to all",
        f"the buffers of {RANKS} ranks, each in {RANKS} pieces · between reading and writing no "
        f"wait is needed, because no other rank reads piece {SHOWN}",
        (12, 4.6),
    )
    names = [f"piece {piece}" for piece in range(RANKS)]
    steps = [
        (f"one shot: rank {SHOWN} reads", everything),
        (f"two shots: rank {SHOWN} reads", read),
        ("and writes", written),
    ]
    for number, (title, colours) in enumerate(steps):
        table(ax, number * (RANKS + 1), title, colours, names)
    for rank in range(RANKS):
        words(ax, -0.2, rank + 0.45, f"buffer of rank {rank}", ha="right")
    ax.set(xlim=(-3.2, 3 * RANKS + 2.2), ylim=(RANKS + 0.1, -2.2))
    ax.axis("off")
    return fig


@style()
def draw_shared_tokens() -> ClassFigure:
    """Which tokens of one KV head each of four ranks stores."""
    copies = [[READ] * TOKENS] * RANKS
    shared = []
    for rank in range(RANKS):
        own = striped(TOKENS, rank, RANKS).tolist()
        shared.append([READ if token in own else OTHER for token in range(TOKENS)])
    kept = [sum(row.count(READ) for row in rows) for rows in (copies, shared)]
    fig, ax = frame(
        f"{TOKENS} tokens of one KV head on {RANKS} ranks: {kept[0]} rows as copies, "
        f"{kept[1]} if the ranks share them",
        "blue: stored · token i is on rank i mod 4, so the next token goes to the next rank",
        (12, 4.2),
    )
    names = [str(token) for token in range(TOKENS)]
    table(ax, 0, "tensor parallelism: each rank has a copy", copies, names)
    table(ax, TOKENS + 1, "decode context parallelism: shared tokens", shared, names)
    for rank in range(RANKS):
        words(ax, -0.3, rank + 0.45, f"rank {rank}", ha="right")
    ax.set(xlim=(-2.6, 2 * TOKENS + 1.4), ylim=(RANKS + 0.1, -2.2))
    ax.axis("off")
    return fig


SHARED_MEMORY_ALT = (
    "Three tables of four buffers with four pieces each. In one shot rank 1 reads all sixteen "
    "cells. In two shots it reads piece 1 of each buffer, and then writes piece 1 of each."
)
SHARED_TOKENS_ALT = (
    "Two tables of four ranks and twelve tokens. On the left every cell is stored. On the right "
    "each rank stores every fourth token, one further than the rank above it."
)
