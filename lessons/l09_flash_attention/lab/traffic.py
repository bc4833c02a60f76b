"""The bytes that attention moves to and from memory, and the memory that it needs: by formula.

    python -m lessons.l09_flash_attention.lab.traffic [--tokens 8192] [--gpu h200]
        naive, FA-1 and FA-2 order, one layer

The formulas count what a program asks of memory; an L2 cache that is hit on the way makes less of
it. The toolbox's `Accesses` measures the same in Triton's interpreter, and a test holds the two
together.

Source: Dao et al. 2022, FlashAttention, theorem 2: Θ(N² d² / M) against Θ(N d + N²), with M
elements of fast memory.
"""

import argparse
import math
import sys
from dataclasses import dataclass

import torch

from lessons.l02_naive_attention.lab.traffic import versions
from lessons.l09_flash_attention.tiles import Tiles, key_range
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.measure.passes import total_bytes


@dataclass(frozen=True)
class Shape:
    """One attention call: a sequence of num_queries queries and num_keys keys, itemsize bytes an
    element.
    """

    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int = 2
    causal: bool = True
    window: int | None = None

    @property
    def flops(self) -> int:
        """Both matrix products over the pairs that a query sees: 2 · 2 · D each. Diagonal tiles
        compute more.
        """
        return 4 * self.head_dim * self.num_heads * self.pairs

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one head that are seen."""
        if not self.causal:
            return self.num_queries * self.num_keys
        # the key at which each query stands
        last = range(self.num_keys - self.num_queries, self.num_keys)
        return sum(max(0, min(at + 1, self.window or at + 1)) for at in last)

    @property
    def least_bytes(self) -> int:
        """q, k, v and the output once."""
        return (
            2
            * (self.num_queries * self.num_heads + self.num_keys * self.num_kv_heads)
            * self.head_dim
            * self.itemsize
        )


def fa2_bytes(shape: Shape, tiles: Tiles) -> tuple[int, int]:
    """(read, written) by flash_kernel: q once, k and v once for each tile of queries of each head,
    out and lse once.

    Without a mask about N / block_m · N · 2 D · b a head: block_m is as large as fast memory
    allows, so this is theorem 2.
    """
    row = shape.head_dim * shape.itemsize
    queries = shape.num_queries * shape.num_heads
    keys = sum(
        _rows(shape, start_m, tiles) for start_m in range(0, shape.num_queries, tiles.block_m)
    )
    return queries * row + shape.num_heads * keys * 2 * row, queries * (row + 4)


def _rows(shape: Shape, start_m: int, tiles: Tiles) -> int:
    """Rows of k that a tile of queries loads: whole tiles, cut off at the last key."""
    begin, _, end = key_range(
        start_m, shape.num_queries, shape.num_keys, tiles, shape.causal, shape.window
    )
    return (
        min(shape.num_keys, math.ceil(end / tiles.block_n) * tiles.block_n) - begin
        if end > begin
        else 0
    )


def fa1_bytes(shape: Shape, tiles: Tiles) -> tuple[int, int]:
    """(read, written) by fa1_kernel: k and v once for each query head; at every visit q, out, m and
    l in, out, m and l back.

    out, m and l are float32, because they are rounded at every visit.
    """
    row, kept = shape.head_dim * shape.itemsize, shape.head_dim * 4 + 8
    visits = 0  # of queries, summed over the tiles of keys
    for start_n in range(0, shape.num_keys, tiles.block_n):
        first = (
            max(0, start_n + shape.num_queries - shape.num_keys) // tiles.block_m * tiles.block_m
            if shape.causal
            else 0
        )
        visits += max(0, shape.num_queries - first)
    return shape.num_heads * (
        shape.num_keys * 2 * row + visits * (row + kept)
    ), shape.num_heads * visits * kept


def naive_bytes(shape: Shape) -> int:
    """What lesson 2's attention moves of its scores, counted there operation by operation, and q,
    k, v and the output once.
    """
    found = versions(
        shape.num_keys,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        {2: torch.bfloat16, 4: torch.float32}[shape.itemsize],
    )
    return total_bytes(found["naive.attention"]) + shape.least_bytes


# ---------------------------------------------------------------- memory that has to exist


def naive_memory_bytes(shape: Shape) -> int:
    """The least beside q, k, v and the output: scores and probabilities of all heads at the same
    time.
    """
    return 2 * shape.num_heads * shape.num_queries * shape.num_keys * shape.itemsize


def flash_memory_bytes(shape: Shape) -> int:
    """What flash_attention allocates beside q, k, v and the output: the log-sum-exp of each query
    and head.
    """
    return 4 * shape.num_queries * shape.num_heads


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lessons.l09_flash_attention.lab.traffic", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--tokens", type=int, default=8192, help="length of the prompt (default: 8192)"
    )
    parser.add_argument("--gpu", default="h200", help="whose memory the times take")
    options = parser.parse_args(argv)
    try:
        chip, shape = lookup(options.gpu), Shape(options.tokens, options.tokens, 32, 8, 128)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    tiles = Tiles(128, 64)
    print(
        f"{options.tokens} tokens, 32/8 heads of 128, bfloat16, causal, tiles of 128 x 64, one "
        f"layer"
    )
    for name, moved in (
        ("naive (lesson 2)", naive_bytes(shape)),
        ("FA-1 order", sum(fa1_bytes(shape, tiles))),
        ("FA-2 order", sum(fa2_bytes(shape, tiles))),
        ("q, k, v and output once", shape.least_bytes),
    ):
        print(
            f"{name:24}{moved / 1e9:9.3g} GB{1e3 * moved / chip.memory_bytes_per_s:9.3g} ms at "
            f"{chip.name}'s bandwidth"
        )
    peak = chip.bf16_flops_per_s or chip.fp16_flops_per_s or chip.fp32_flops_per_s
    print(
        f"{'both matrix products':24}{shape.flops / 1e12:9.3g} "
        f"TFLOP{1e3 * shape.flops / peak:6.3g} ms at its peak"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
