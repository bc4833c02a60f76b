# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=01
# Generated from solutions/l01_roofline.py, checksum 061cccfa08c8. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 01: bytes of a KV cache, the roofline of a linear layer, a stopwatch that
lies, the price of a token.
"""

import math
import time
from collections.abc import Callable
from statistics import quantiles

from lessons.l01_roofline.optimized import Timing
from lessons.l01_roofline.planner.models import ModelShape
from lessons.toolbox.exercises.exercise import exercise


@exercise(
    "1.1",
    "Bytes that one token leaves in the KV cache",
    minutes=15,
    difficulty=1,
    replaces="lessons.l01_roofline.calculators:kv_bytes_per_token",
)
def kv_bytes_per_token(model: ModelShape, bits_per_value: float = 16) -> float:
    """Bytes of cache that one token of one sequence needs, all layers together.

    model: its fields have config.json's names: num_hidden_layers, num_attention_heads,
        num_key_value_heads, head_dim, hidden_size, kv_lora_rank, qk_rope_head_dim, …
    bits_per_value: 16 for bfloat16, 8 for FP8, 4.25 for 4 bits and their scales.
    Each layer caches k and v of every KV head. Where kv_lora_rank is above 0, it caches instead
    one row of kv_lora_rank + qk_rope_head_dim values, which all heads share (lesson 6 says why).
    Errors: none to raise.

    Example: 2 layers, 4 query heads, 2 KV heads, head_dim 8, 16 bits: 2 layers · (16 values of k +
    16 of v) · 2 bytes = 128
    """
    raise NotImplementedError("Exercise 1.1: Bytes that one token leaves in the KV cache")


@exercise("1.2", "The roofline of a linear layer", minutes=20, difficulty=2)
def linear_floor(
    tokens: int,
    in_features: int,
    out_features: int,
    bits_per_weight: float,
    bandwidth: float,
    peak: float,
) -> tuple[float, str]:
    """The least milliseconds for y = x Wᵀ, and what bounds them: "memory" or "compute" (on a tie
    "memory").

    x: [tokens, in_features] is read, W: [out_features, in_features] is read once, y: [tokens,
    out_features] is written. Elements of x and y have 16 bits, those of W bits_per_weight. A
    multiply and an add are two FLOPs. bandwidth: bytes/s; peak: FLOP/s. Moving and computing
    overlap perfectly. Errors: none to raise.

    Example: 2 tokens, 3 -> 4 features, 16 bits, 1000 bytes/s, 1000 FLOP/s
        bytes: 2·(2·3 + 3·4 + 2·4) = 52 -> 52 ms
        FLOPs: 2·2·3·4 = 48 -> 48 ms                        so (52.0, "memory")
    Guess first: from how many tokens on is a 4096 -> 4096 layer compute-bound on an H200 (4.8e12
    bytes/s, 989.5e12 FLOP/s)?
    """
    raise NotImplementedError("Exercise 1.2: The roofline of a linear layer")


@exercise(
    "1.3",
    "Find the bugs: a benchmark that never waited",
    minutes=20,
    difficulty=2,
    replaces="lessons.l01_roofline.optimized:honest_ms",
)
def honest_ms(
    launch: Callable[[], object],
    synchronize: Callable[[], object],
    warmup: int = 3,
    repetitions: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Milliseconds that the work of one `launch` takes on a device that queues it: Timing(median,
    p20, p80).

    launch(): puts one piece of work into the device's queue and returns at once.
    synchronize(): returns when the device is idle. clock(): seconds. The device may be busy when
    you are called. `warmup` launches come first and are not counted (the first one compiles), then
    `repetitions` (2 or more), each timed from an idle device to an idle device. p20 and p80: the
    20 % and 80 % quantiles. quantiles(times, n=10, method="inclusive") gives the nine deciles: [1]
    is p20, [4] the median, [7] p80.
    Raises ValueError for fewer than 2 repetitions.

    Example: a first launch of 500 ms and then 5 ms each, warmup=1 -> about Timing(5, 5, 5)

    The code below runs, and its numbers look splendid. It has four bugs. Delete the first line and
    find them.
    """
    raise NotImplementedError("Exercise 1.3: Find the bugs: a benchmark that never waited")
    if repetitions < 2:
        raise ValueError(f"repetitions is {repetitions}; accepted: 2 or more")
    times = []
    for _ in range(warmup + repetitions):
        start = clock()
        launch()
        times.append((clock() - start) * 1e3)
    deciles = quantiles(times, n=10, method="inclusive")
    return Timing(median=sum(times) / len(times), p20=deciles[1], p80=deciles[7])


@exercise("1.4", "Units: what a million tokens cost on a full GPU", minutes=20, difficulty=2)
def full_gpu_cost(
    memory_gb: float,
    weights_gb: float,
    kv_kib_per_token: float,
    context: int,
    bandwidth_tb_per_s: float,
    dollars_per_hour: float,
) -> float:
    """Dollars per 10⁶ generated tokens when as many sequences decode together as fit; math.inf if
    not even one fits.

    memory_gb, weights_gb: GB of 10⁹ bytes, as on data sheets. kv_kib_per_token: KiB of 2¹⁰ bytes,
    as the formula gives. bandwidth_tb_per_s: 10¹² bytes/s. context: tokens in the cache of every
    sequence. Only memory traffic counts: a decode step reads the weights once and the cache of
    every sequence, and gives each sequence one token. Errors: none to raise.

    Example: 80 GB, 16 GB of weights, 128 KiB, 4096 tokens, 3.35 TB/s, $3 an hour
        64·10⁹ / (4096 · 131072) = 119.2, so 119 sequences
        a step reads 16·10⁹ + 119 · 536870912 = 79.9·10⁹ bytes: 23.8 ms
        119 tokens in 23.8 ms are 4990 a second; a million take 200 s, at $3 an hour $0.167
    """
    raise NotImplementedError("Exercise 1.4: Units: what a million tokens cost on a full GPU")
