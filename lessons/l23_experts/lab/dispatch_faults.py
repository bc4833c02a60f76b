"""What goes wrong among ranks that dispatch tokens: one is slow, one dies, one gets all tokens.

    python -m lessons.l23_experts.lab.dispatch_faults

starts four processes for each, and prints what the others see.
"""

import os
import signal
import sys
import time

import torch
from torch import Tensor

from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import RankError, run_ranks
from lessons.l23_experts.lab.moe_ranks import CONFIGS, SIZE, new_moe
from lessons.l23_experts.ranks.dispatch import CountedDispatchMoE
from lessons.toolbox.command import OneLineParser

RANKS, TOKENS, STEPS = 4, 16, 8


def new_layer(world: Group) -> CountedDispatchMoE:
    """A layer of eight experts, the same on every rank."""
    return CountedDispatchMoE(new_moe(CONFIGS["mixtral"], 0, torch.float32), world)


def own_tokens(world: Group) -> Tensor:
    """[TOKENS, SIZE] of this rank."""
    return torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(world.rank))


@torch.no_grad()
def slow_rank(world: Group, slow: int, delay_s: float) -> tuple[float, float]:
    """(seconds in the layer, seconds in all) of STEPS steps, in each of which rank `slow` comes
    delay_s later, as if its attention took longer.
    """
    layer, x = new_layer(world), own_tokens(world)
    world.barrier()
    inside, start = 0.0, time.perf_counter()
    for _ in range(STEPS):
        if world.rank == slow:
            time.sleep(delay_s)
        entered = time.perf_counter()
        layer(x)
        inside += time.perf_counter() - entered
    return inside, time.perf_counter() - start


@torch.no_grad()
def dead_rank(world: Group, dead: int) -> Tensor:
    """[TOKENS, SIZE], but rank `dead` is killed between dispatch and combine, while its experts
    run.
    """
    layer, x = new_layer(world), own_tokens(world)
    if world.rank == dead:
        layer.experts.forward = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return layer(x)


@torch.no_grad()
def one_gets_all(world: Group, busy: int) -> tuple[Tensor, Tensor, str]:
    """What the layer makes of this rank's tokens, what lesson 6's makes of them, and what the layer
    says about the load. Every token chooses the two experts of rank `busy`.
    """
    moe, x = new_moe(CONFIGS["mixtral"], 0, torch.float32), own_tokens(world).abs()
    moe.gate.weight.fill_(-1.0)
    moe.gate.weight[2 * busy : 2 * busy + 2] = torch.tensor([[1.0], [2.0]])
    layer = CountedDispatchMoE(moe, world)
    return layer(x), moe(x), layer.load.told("rank")


def main(arguments: list[str] | None = None) -> int:
    """Run all three."""
    parser = OneLineParser(
        prog="python -m lessons.l23_experts.lab.dispatch_faults",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument("--delay-ms", type=float, default=20.0, help="of the slow rank, a step")
    given = parser.parse_args(arguments)
    print(f"a slow rank: rank 1 comes {given.delay_ms:g} ms late to each of {STEPS} steps")
    for rank, times in enumerate(run_ranks(RANKS, slow_rank, 1, given.delay_ms / 1e3)):
        print(f"  rank {rank}: {times[0] / times[1]:4.0%} of {1e3 * times[1]:.0f} ms in the layer")
    start = time.perf_counter()
    try:
        run_ranks(RANKS, dead_rank, 2)
    except RankError as error:
        print(f"a dead rank: after {time.perf_counter() - start:.1f} s, with the start: {error}")
    out, expected, told = run_ranks(RANKS, one_gets_all, 3)[0]
    print(f"one gets all: {told}; largest error {float((out - expected).abs().max()):.0e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
