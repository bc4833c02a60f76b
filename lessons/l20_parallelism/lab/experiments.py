"""What two ranks gain on this machine, and what they say to each other.

    python -m lessons.l20_parallelism.lab.experiments [--out results/cpu] [--repeats 9]

A random model of 62 million weights runs on one rank, on two shards and on two stages, in turn,
with one thread each. Counted: the bytes of the collectives. Timed: steps, what part of a step a
rank spends in collectives (waiting for the other rank is in it), and what happens when a collective
of one half of the tokens runs beside the products of the other half. With --out it writes
l20_ranks.json there. Seconds are of a wall clock, because a rank that waits uses no processor.
"""

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.l20_parallelism.lab.rank_times import time_ranks
from lessons.l20_parallelism.lab.testing import random_model
from lessons.l20_parallelism.optimized import shard
from lessons.l20_parallelism.pipeline import MicroBatch, bubble, run_micro_batches
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Links, Mesh, new_links
from lessons.toolbox.model.config import ModelConfig

CONFIG = ModelConfig("llama", 8192, 1024, 4, 16, 4, 64, 2816, 1024)
LENGTHS = (1, 16, 256)  # new tokens of a step
NUM_PROMPTS, PROMPT = 8, 32  # of the pipeline
MICRO_BATCHES = (1, 2, 4, 8)
HALF, ROUNDS = 128, 4  # tokens of half a step, and how often it goes on


class TimedGroup(Group):
    """A group that knows how long its all-reduces and all-gathers took. seconds: since it was 0."""

    seconds = 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        start = perf_counter()
        x = super().all_reduce(x)
        self.seconds += perf_counter() - start
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        start = perf_counter()
        x = super().all_gather(x, dim)
        self.seconds += perf_counter() - start
        return x


def bytes_of_a_step(config: ModelConfig, num_tokens: int, num_ranks: int, value_bytes: int) -> int:
    """What a rank puts into the collectives of a step: a sum for the embedding, two for each layer,
    and its part of the last token's logits.
    """
    sums = (2 * config.num_hidden_layers + 1) * num_tokens * config.hidden_size
    return value_bytes * (sums + -(-config.vocab_size // num_ranks))


# ---------------------------------------------------------------- what the ranks run


def timed(world: Group, run: Callable[[], object], on_all: bool = True) -> float:
    """Seconds of one call on rank 0, which starts when all ranks are there. on_all: all ranks run
    it; otherwise the others wait.
    """
    world.barrier()
    start = perf_counter()
    if on_all or world.rank == 0:
        run()
    seconds = perf_counter() - start
    world.barrier()
    return seconds


def one_pass(model: Decoder, num_prompts: int, length: int) -> Callable[[], Tensor]:
    """A pass over the prompts into an empty cache, up to the logits after the last token: [1,
    V].
    """
    pool = new_pool(model, num_prompts)
    prompts = [[7 * place % CONFIG.vocab_size for place in range(length)]] * num_prompts

    def run() -> Tensor:
        batch = MicroBatch(prompts, pool).next_pass("cpu")
        hidden = model(batch.tokens, pool.attending(batch))
        return model.logits(hidden[-1:])

    return run


def new_pool(model: Decoder, num_prompts: int, layers: range | None = None) -> KVPool:
    """Room for prompts of any length here, in these layers (None: in all)."""
    return KVPool(model.config, num_prompts, max(LENGTHS), LESSON_03_TORCH, layers=layers)


@torch.inference_mode()
def rank_shards(world: Group, repeats: int) -> dict:
    """Steps of LENGTHS tokens on one rank and on two shards: {"1 token": what was measured}."""
    torch.set_num_threads(1)
    links = new_links(Mesh(tp=2))
    group = TimedGroup(links.tensor.members, links.tensor.rank, links.tensor.handle)
    links.tensor = group
    whole = random_model(CONFIG, 0)
    part = shard(whole, links)
    found = {}
    for length in LENGTHS:
        alone, together = one_pass(whole, 1, length), one_pass(part, 1, length)
        assert torch.allclose(alone(), together(), atol=1e-3)
        samples = []
        for _ in range(repeats):
            alone_s = timed(world, alone, on_all=False)
            group.wire.clear()
            group.seconds = 0.0
            samples.append((alone_s, timed(world, together), group.seconds))
        one_s, two_s, collectives_s = (median(column) for column in zip(*samples))
        found[f"{length} token{'s' * (length > 1)}"] = {
            "one_rank_s": one_s,
            "two_ranks_s": two_s,
            "collectives_s": collectives_s,
            "speedup": median(one / two for one, two, _ in samples),
            "share_of_collectives": median(inside / two for _, two, inside in samples),
            "collectives": sum(group.wire.calls.values()),
            "bytes": sum(group.wire.bytes.values()),
            "formula_bytes": bytes_of_a_step(CONFIG, length, 2, 4),
        }
    return found


@torch.inference_mode()
def rank_stages(world: Group, repeats: int) -> dict:
    """Prompts on one rank and through two stages, by micro-batches: {m: what was measured}."""
    torch.set_num_threads(1)
    links = new_links(Mesh(pp=2))
    whole = random_model(CONFIG, 0)
    part = shard(whole, links)
    alone = one_pass(whole, NUM_PROMPTS, PROMPT)
    found = {}
    for count in MICRO_BATCHES:
        run = stages_pass(part, links, count)
        alone(), run()
        samples = [
            (timed(world, alone, on_all=False), timed_stages(world, run)) for _ in range(repeats)
        ]
        stages = {
            "one_rank_s": median(one for one, _ in samples),
            "two_stages_s": median(two for _, two in samples),
            "speedup": median(one / two for one, two in samples),
            "formula_speedup": 2 * (1 - bubble(2, count)),
        }
        found[str(count)] = stages
    return found


def stages_pass(part: Decoder, links: Links, count: int) -> Callable[[], None]:
    """All prompts through both stages, in `count` micro-batches."""
    share = NUM_PROMPTS // count
    prompts = [[7 * place % CONFIG.vocab_size for place in range(PROMPT)]] * share
    pools = [new_pool(part, share, part.stage_layers) for _ in range(count)]

    def run() -> None:
        batches = [MicroBatch(prompts, pool).next_pass("cpu") for pool in pools]
        passes = [(batch.tokens, pool.attending(batch)) for batch, pool in zip(batches, pools)]
        run_micro_batches(part, links, passes)

    return run


def timed_stages(world: Group, run: Callable[[], None]) -> float:
    """Seconds until the last stage has ended."""
    world.barrier()
    start = perf_counter()
    run()
    world.barrier()  # because the first stage ends before the last one
    return perf_counter() - start


@torch.inference_mode()
def rank_overlap(world: Group, repeats: int) -> dict:
    """Row-parallel products of two halves of the tokens, each with its all-reduce: one after the
    other, and the all-reduce of a half beside the product of the other half.
    """
    torch.set_num_threads(1)
    x = torch.randn(2, HALF, CONFIG.intermediate_size // 2)
    weight = torch.randn(CONFIG.intermediate_size // 2, CONFIG.hidden_size)
    done = torch.randn(HALF, CONFIG.hidden_size)

    def in_turn() -> None:
        for _ in range(ROUNDS):
            for half in x:
                world.all_reduce(half @ weight)

    def overlapped() -> None:
        under_way = None
        for _ in range(ROUNDS):
            for half in x:
                part = half @ weight
                if under_way is not None:
                    under_way.wait()
                under_way = dist.all_reduce(part, async_op=True)
        under_way.wait()

    def products() -> None:
        for _ in range(ROUNDS):
            for half in x:
                half @ weight

    def collectives() -> None:
        for _ in range(2 * ROUNDS):
            world.all_reduce(done)

    ways = {"in_turn": in_turn, "overlapped": overlapped, "products": products}
    ways["collectives"] = collectives
    for run in ways.values():
        run()
    samples = [{name: timed(world, run) for name, run in ways.items()} for _ in range(repeats)]
    found = {f"{name}_s": median(sample[name] for sample in samples) for name in ways}
    hidden = [
        (sample["in_turn"] - sample["overlapped"]) / sample["collectives"] for sample in samples
    ]
    return found | {"hidden_share": median(hidden)}


# ---------------------------------------------------------------- the command


EXPERIMENTS = {"shards": rank_shards, "stages": rank_stages, "overlap": rank_overlap}


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    record = {"name": "l20_ranks", "clock": "wall clock, one thread a rank, gloo"}
    return time_ranks("experiments", __doc__, EXPERIMENTS, record, 9, argv)


if __name__ == "__main__":
    sys.exit(main())
