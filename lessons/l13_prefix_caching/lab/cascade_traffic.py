"""The bytes that decode attention moves where sequences share a prefix: by formula, lesson 1's way.

    python -m lessons.l13_prefix_caching.lab.cascade_traffic

Read apart, each sequence loads the prefix again. Read together, each tile of query rows does. The
formulas count what programs ask of memory. An L2 cache that holds a prefix makes the first number
smaller, so they are an upper bound of the gain. A test counts the same in Triton's interpreter.
"""

from typing import NamedTuple

from lessons.l13_prefix_caching.cascade_kernels import sequences_in_a_tile


class Shared(NamedTuple):
    """B sequences of `suffix` own tokens after `prefix` shared ones; one layer."""

    batch: int
    prefix: int
    suffix: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    itemsize: int = 2  # bytes of an element

    @property
    def row_bytes(self) -> int:
        """K and V of one token."""
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def query_bytes(self) -> int:
        """q once, and the result once."""
        return 2 * self.batch * self.num_heads * self.head_dim * self.itemsize


class Moved(NamedTuple):
    """Bytes of one call. partials: written by one kernel and read by the next."""

    keys_and_values: int
    partials: int
    queries: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def separate_bytes(shape: Shared) -> Moved:
    """Each sequence reads prefix and suffix."""
    keys = shape.batch * (shape.prefix + shape.suffix) * shape.row_bytes
    return Moved(keys, 0, shape.query_bytes)


def cascade_bytes(shape: Shared, num_splits: int = 2) -> Moved:
    """Each tile of rows reads the prefix, each sequence its suffix. num_splits: results of a
    sequence that are merged, two at least: one of the prefix, one of the suffix.
    """
    group = shape.num_heads // shape.num_kv_heads
    tiles = -(-shape.batch // sequences_in_a_tile(group, shape.head_dim))
    keys = (tiles * shape.prefix + shape.batch * shape.suffix) * shape.row_bytes
    one = shape.batch * shape.num_heads * (shape.head_dim + 1) * 4  # float32, with its log-sum-exp
    # twice, because they are written and read; the queries are read by both kernels
    return Moved(keys, 2 * num_splits * one, shape.query_bytes * 3 // 2)


def gain(shape: Shared, num_splits: int = 2) -> float:
    """How many times fewer bytes are moved together than apart; below 1: more."""
    return separate_bytes(shape).total / cascade_bytes(shape, num_splits).total


def main() -> None:
    print("Llama-3-8B's heads, one layer, 16 bits, 200 own tokens: MB apart, together, gain")
    for batch in (1, 2, 8, 32, 128):
        for prefix in (128, 2048, 8192):
            shape = Shared(batch, prefix, 200)
            apart, together = separate_bytes(shape).total, cascade_bytes(shape).total
            print(
                f"{batch:4} sequences, {prefix:5} shared: {apart / 1e6:8.1f} {together / 1e6:8.1f} "
                f"{apart / together:6.2f}"
            )


if __name__ == "__main__":
    main()
