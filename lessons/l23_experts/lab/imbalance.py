"""How uneven the load of experts and ranks is, and what a capacity drops: an even router, a skewed
one, and the skewed one after its bias was trained to balance it.

    python -m lessons.l23_experts.lab.imbalance --experts 64 --top-k 8 --ranks 8

All three are lesson 6's Router with random weights, over random tokens, because the course's own
models have no experts. The skewed router prefers some experts for all tokens; the bias is
DeepSeek-V3's, which raises experts that had fewer tokens than the mean. So the numbers show what
the mechanisms do, not what a trained model has.
"""

import argparse
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l06_mla.moe import Router
from lessons.l20_parallelism.shards.sharding import experts_of
from lessons.l23_experts.ranks.load import capacity_of, load_of
from lessons.toolbox.command import OneLineParser
from lessons.toolbox.model.config import MoEConfig

WIDTH = 64  # of the random tokens
SKEW = 1.0  # how much the favourites gain, in standard deviations of the logits
BATCHES = (1, 8, 64, 512, 4096)
CAPACITY_FACTORS = (1.0, 1.25, 2.0)
STEPS, SPEED, STEP_TOKENS = 300, 0.005, 1024  # of the bias; V3 trains with a speed of 0.001


class SkewedRouter(Router):
    """A router that prefers some experts for all tokens."""

    def __init__(self, config: MoEConfig, skew: float):
        super().__init__(WIDTH, config)
        self.preference = skew * torch.randn(config.n_routed_experts)

    def logits(self, x: Tensor) -> Tensor:  # [T, WIDTH] -> [T, E]
        return super().logits(x) + self.preference


def new_router(num_experts: int, top_k: int, skew: float) -> SkewedRouter:
    """A sigmoid router with a bias of zeros, all experts in one group."""
    config = MoEConfig(
        num_experts, top_k, 1, scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True
    )
    return SkewedRouter(config, skew).requires_grad_(False)


def balance(router: Router, steps: int = STEPS) -> None:
    """Train the bias alone: after each batch up for experts below the mean, down for those above.

    Source: DeepSeek-V3 (2024), section 2.1.2.
    """
    num_experts, bias = router.config.n_routed_experts, router.e_score_correction_bias
    for _ in range(steps):
        _, chosen = router(torch.randn(STEP_TOKENS, WIDTH))
        counts = torch.bincount(chosen.flatten(), minlength=num_experts).float()
        bias.add_(SPEED * (counts.mean() - counts).sign())


class Row(NamedTuple):
    """Of a batch: the busiest over the mean, of experts and of ranks; how many experts are read;
    the share of pairs dropped at each of CAPACITY_FACTORS.
    """

    num_tokens: int
    experts: float
    ranks: float
    read: int
    dropped: tuple[float, ...]


def row_of(router: Router, num_tokens: int, ranks: int) -> Row:
    """A batch of random tokens."""
    config = router.config
    load = load_of(router(torch.randn(num_tokens, WIDTH))[1], config.n_routed_experts)
    top_k, num_experts = config.num_experts_per_tok, config.n_routed_experts
    capacities = (capacity_of(num_tokens, top_k, num_experts, f) for f in CAPACITY_FACTORS)
    pairs = num_tokens * top_k
    dropped = tuple(load.dropped(capacity) / pairs for capacity in capacities)
    read = sum(count > 0 for count in load.counts)
    return Row(num_tokens, load.imbalance, load.of_ranks(ranks).imbalance, read, dropped)


def routers(num_experts: int, top_k: int) -> dict[str, Router]:
    """The three, by name. The balanced one has the skewed one's weights."""
    skewed, balanced = new_router(num_experts, top_k, SKEW), new_router(num_experts, top_k, 0)
    balanced.weight, balanced.preference = skewed.weight, skewed.preference
    balance(balanced)
    even = new_router(num_experts, top_k, 0)
    return {"even": even, "skewed": skewed, "skewed, then balanced": balanced}


def main(arguments: list[str] | None = None) -> int:
    """Print a table for each router."""
    parser = OneLineParser(
        prog="python -m lessons.l23_experts.lab.imbalance",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8, help="experts of a token")
    parser.add_argument("--ranks", type=int, default=8, help="that the experts are spread over")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    check(parser, given)
    torch.manual_seed(given.seed)
    print(f"{given.experts} experts on {given.ranks} ranks, {given.top_k} of them for each token")
    print("busiest over the mean, experts that are read, pairs dropped at a capacity factor")
    factors = "".join(f"{factor:>8}" for factor in CAPACITY_FACTORS)
    for name, router in routers(given.experts, given.top_k).items():
        print(f"\n{name}\n  tokens  experts   ranks   read{factors}")
        for num_tokens in BATCHES:
            row = row_of(router, num_tokens, given.ranks)
            dropped = "".join(f"{share:8.1%}" for share in row.dropped)
            print(f"{row.num_tokens:8} {row.experts:8.2f} {row.ranks:7.2f} {row.read:6}{dropped}")
    return 0


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End with one line for counts that do not fit each other."""
    try:
        experts_of(given.experts, 0, given.ranks)
        new_router(given.experts, given.top_k, 0)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
