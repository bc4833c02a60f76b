"""What choosing keys costs beside reading them all, and from which context on it pays.

    python -m lessons.l28_sparse_attention.costs          the table, for an H100

Everything is a lower bound from a data sheet, nothing is measured. The work of a layer is for
new tokens that each have a context of N keys. Full attention reads all latents. Sparse attention
reads all *index keys*, finds the top k of their scores, and reads k latents. So both grow with N,
by different amounts a key, and sparse attention begins with a handicap: k latents, and two launches
more.
"""

import math
from typing import NamedTuple

from lessons.l07_kernel_fusion.lab.launches import LAUNCH_S
from lessons.l28_sparse_attention.indexer import V32
from lessons.toolbox.measure.hardware import CHIPS, Chip
from lessons.toolbox.model.arguments import check_whole, is_number, refuse

H100 = CHIPS["h100"]
LATENT_BYTES = 2  # of each number, 16 bits
SCORE_BYTES = 4  # float32
PASSES = 5  # in which top_k.py reads a row of scores
L2_BYTES_PER_CLOCK = 64  # that one SM takes from L2, by NVIDIA's figures for A100 and H100
EXTRA_LAUNCHES = 2  # the indexer and the top k


class Shape(NamedTuple):
    """A layer of DeepSeek-V3.2, by default."""

    heads: int = 128
    rank: int = 512
    rope: int = 64
    nope: int = 128  # of an expanded head; v is as wide
    index_heads: int = V32.index_n_heads
    index_dim: int = V32.index_head_dim
    top_k: int = V32.index_topk

    @property
    def row_bytes(self) -> int:
        """Of a latent."""
        return (self.rank + self.rope) * LATENT_BYTES

    @property
    def row_flops(self) -> int:
        """Of absorbed heads over a latent: its score, and its share of the sum."""
        return 2 * self.heads * (2 * self.rank + self.rope)

    @property
    def index_row_bytes(self) -> int:
        """Of an index key in FP8 and its scale."""
        return self.index_dim + 4

    @property
    def index_row_flops(self) -> int:
        """Of the products of all index heads, in FP8."""
        return 2 * self.index_heads * self.index_dim

    @property
    def pair_flops(self) -> int:
        """Of expanded heads over a key, as a prompt has them."""
        return 2 * self.heads * (self.nope + self.rope + self.nope)


V32_LAYER = Shape()


class Part(NamedTuple):
    """Work of a layer: bytes, FLOPs in 16 bits and in 8."""

    bytes: float
    flops: float = 0.0
    fp8_flops: float = 0.0

    def seconds(self, chip: Chip = H100) -> float:
        """The lower bound: what takes longer, memory or products."""
        products = self.flops / chip.bf16_flops_per_s
        if self.fp8_flops:
            products += self.fp8_flops / chip.fp8_flops_per_s
        return max(self.bytes / chip.memory_bytes_per_s, products)


def full(context: float, batch: int = 1, shape: Shape = V32_LAYER) -> Part:
    """All latents of `batch` sequences of this context, one new token each."""
    rows = batch * context
    return Part(rows * shape.row_bytes, rows * shape.row_flops)


def sparse(context: float, batch: int = 1, shape: Shape = V32_LAYER) -> dict[str, Part]:
    """The three parts: every index key, every score, and the latents that were chosen."""
    rows = batch * context
    scores = rows * SCORE_BYTES
    return {
        "indexer": Part(rows * shape.index_row_bytes + scores, 0.0, rows * shape.index_row_flops),
        "top k": Part(PASSES * scores),
        "chosen rows": full(min(context, shape.top_k), batch, shape),
    }


def top_k_s(context: float, batch: int = 1, chip: Chip = H100) -> float:
    """Seconds of the top k where each row is read by one SM, no faster than L2 feeds it."""
    one_row = PASSES * context * SCORE_BYTES / (L2_BYTES_PER_CLOCK * chip.clock_hz)
    return max(math.ceil(batch / chip.sm_count) * one_row, PASSES * batch * context * SCORE_BYTES
               / chip.memory_bytes_per_s)  # fmt: skip


def sparse_s(
    context: float,
    batch: int = 1,
    shape: Shape = V32_LAYER,
    chip: Chip = H100,
    launch_s: float = 0.0,
    one_sm_a_row: bool = False,
) -> float:
    """Seconds of the three parts after each other, and of the launches that full attention does not
    have. one_sm_a_row: as top_k.py works.
    """
    parts = sparse(context, batch, shape)
    seconds = {name: part.seconds(chip) for name, part in parts.items()}
    if one_sm_a_row:
        seconds["top k"] = top_k_s(context, batch, chip)
    return sum(seconds.values()) + EXTRA_LAUNCHES * launch_s


def crossing(
    batch: int = 1,
    shape: Shape = V32_LAYER,
    chip: Chip = H100,
    launch_s: float = 0.0,
    one_sm_a_row: bool = False,
) -> float:
    """From which context on sparse attention is faster; infinity if it never is. Beyond k keys both
    times are straight lines, so two points of each tell all. Raises ValueError.
    """
    check_whole(batch=batch)
    if not is_number(launch_s, 0):
        refuse("launch_s", launch_s, "seconds, 0 or more")

    def lead(context: float) -> float:
        """By how much full attention is slower."""
        options = batch, shape, chip, launch_s, one_sm_a_row
        return full(context, batch, shape).seconds(chip) - sparse_s(context, *options)

    begin, step = lead(shape.top_k), lead(2 * shape.top_k) - lead(shape.top_k)
    return shape.top_k * (1 - begin / step) if step > 0 else math.inf


def most(shape: Shape = V32_LAYER, chip: Chip = H100) -> float:
    """How many times faster it is at most, however long the context: the indexer and the top k read
    something of every key.
    """
    parts = sparse(1.0, 1, shape)
    rest = parts["indexer"].seconds(chip) + parts["top k"].seconds(chip)
    return full(1.0, 1, shape).seconds(chip) / rest


def prompt_s(tokens: float, shape: Shape = V32_LAYER, chip: Chip = H100) -> tuple[float, float]:
    """(full, sparse) seconds of products of a whole prompt, causal.

    Full attention expands the heads. Sparse attention works on latents as they are, because each
    query has other keys; that is more FLOPs for each of them.
    """
    pairs = tokens * tokens / 2
    chosen = pairs if tokens <= shape.top_k else shape.top_k * (tokens - shape.top_k / 2)
    bf16, fp8 = chip.bf16_flops_per_s, chip.fp8_flops_per_s
    full_s = pairs * shape.pair_flops / bf16
    return full_s, pairs * shape.index_row_flops / fp8 + chosen * shape.row_flops / bf16


def prompt_crossing(shape: Shape = V32_LAYER, chip: Chip = H100) -> float:
    """The prompt from which on sparse attention has less to multiply. The quadratic equation of
    `prompt_s`: a · n²/2 = b · (n − k/2), of which the larger root is meant.
    """
    gain = shape.pair_flops / chip.bf16_flops_per_s - shape.index_row_flops / chip.fp8_flops_per_s
    ratio = shape.top_k * shape.row_flops / chip.bf16_flops_per_s / gain
    return ratio + math.sqrt(ratio * ratio - ratio * shape.top_k)


def main() -> int:
    print("one layer of DeepSeek-V3.2 on an H100, µs for a sequence (lower bounds)")
    print(f"{'context':>8}{'full':>8}{'indexer':>9}{'top k':>7}{'chosen':>8}{'times':>7}")
    for context in (2048, 4096, 16384, 65536, 131072):
        every = full(context).seconds()
        parts = [1e6 * part.seconds() for part in sparse(context).values()]
        print(
            f"{context:8}{1e6 * every:8.2f}{parts[0]:9.2f}{parts[1]:7.2f}{parts[2]:8.2f}"
            f"{1e6 * every / sum(parts):7.1f}"
        )
    print(f"pays from {crossing():,.0f} tokens on, at most {most():.1f} times")
    for batch in (1, 8, 32, 128):
        late = crossing(batch, launch_s=LAUNCH_S, one_sm_a_row=True)
        print(
            f"batch {batch}, with launches of {1e6 * LAUNCH_S:.0f} µs and a row an SM: "
            f"from {late:,.0f}"
        )
    print(f"a prompt pays from {prompt_crossing():,.0f} tokens on")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
