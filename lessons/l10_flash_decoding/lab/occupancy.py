"""A model of when the programs of one decode step run on a GPU, and so of its time: predictions,
not measurements.

The model has two limits. The memory gives all programs together at most its bandwidth (data sheet).
One program alone gets what it keeps on its way, over the latency of the memory (Little's law): two
tiles of K and two of V, 64 KiB, every microsecond. The first says what is possible, the second why
eight programs cannot have it. Programs start in order, each in the first free slot; those that run
share the bandwidth equally.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lessons.l10_flash_decoding.splits import PROGRAMS_PER_SM, cdiv, choose_num_splits, split_bounds
from lessons.toolbox.measure.hardware import CHIPS, Chip

BLOCK_N = 64  # keys in a tile at head_dim 128 in 16 bits
IN_FLIGHT_BYTES = 4 * 16 * 1024  # two stages of a tile of K and a tile of V, 16 KiB each
LATENCY_S = 1e-6  # assumed: from asking to having, on a busy memory
COMBINE_START_S = 2e-6  # assumed: from the last split's end to the first combine program


@dataclass(frozen=True)
class Piece:
    """One program: where and when it ran."""

    program: int
    slot: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Decode:
    """One layer's decode step: `batch` sequences of `context` keys each."""

    context: int
    batch: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    itemsize: int = 2  # bytes per value of q, K and V

    @property
    def key_bytes(self) -> int:
        """K and V of one key of one KV head."""
        return 2 * self.head_dim * self.itemsize

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * self.num_kv_heads * self.key_bytes

    def num_splits(self, chip: Chip = CHIPS["h200"]) -> int:
        """What the wrapper chooses on this chip."""
        return choose_num_splits(
            self.batch * self.num_kv_heads, cdiv(self.context, BLOCK_N), slots(chip)
        )

    def partial_bytes(self, num_splits: int) -> int:
        """What the split kernel writes, in bytes, and the combine kernel reads again; nothing with
        one split.
        """
        return (
            0
            if num_splits == 1
            else self.batch * self.num_heads * num_splits * (self.head_dim + 1) * 4
        )


def slots(chip: Chip) -> int:
    """Programs that run at the same time."""
    return chip.sm_count * PROGRAMS_PER_SM


def run(program_bytes: Sequence[float], chip: Chip) -> list[Piece]:
    """When each program runs that reads so many bytes, in the order in which they end."""
    free, running, done = list(range(slots(chip))), [], []
    # served: bytes that a program which runs since the start would have read by now
    now_s = served = 0.0
    waiting = list(enumerate(program_bytes))[::-1]
    while waiting or running:
        while waiting and free:
            program, size = waiting.pop()
            heapq.heappush(running, (served + size, program, heapq.heappop(free), now_s))
        rate = min(IN_FLIGHT_BYTES / LATENCY_S, chip.memory_bytes_per_s / len(running))
        ends_at, program, slot, start_s = heapq.heappop(running)
        # at equal rates the one with the least left ends first
        now_s, served = now_s + (ends_at - served) / rate, ends_at
        heapq.heappush(free, slot)
        done.append(Piece(program, slot, start_s, now_s))
    return done


def split_pieces(
    work: Decode, num_splits: int, split_size: int = 0, chip: Chip = CHIPS["h200"]
) -> list[Piece]:
    """The split kernel's programs: KV heads first, then splits, then sequences, as the grid counts
    them.
    """
    bounds = split_bounds(work.context, num_splits, split_size, block_n=BLOCK_N)
    sizes = [(end - start) * work.key_bytes for start, end in bounds]
    return run([size for size in sizes * work.batch for _ in range(work.num_kv_heads)], chip)


def predicted_s(
    work: Decode,
    num_splits: int | None = None,
    split_size: int | None = None,
    chip: Chip = CHIPS["h200"],
) -> float:
    """Seconds of both kernels, launches not counted. num_splits: by default what the wrapper
    chooses; split_size as there.
    """
    if split_size is not None:
        num_splits = max(1, cdiv(work.context, split_size))
    num_splits = num_splits or work.num_splits(chip)
    split_s = max(piece.end_s for piece in split_pieces(work, num_splits, split_size or 0, chip))
    if num_splits == 1:
        return split_s
    return split_s + COMBINE_START_S + 2 * work.partial_bytes(num_splits) / chip.memory_bytes_per_s


def busy_share(pieces: list[Piece], num_slots: int) -> float:
    """The share of all slots' time, until the last program ends, in which a program runs."""
    return sum(piece.end_s - piece.start_s for piece in pieces) / (
        num_slots * max(piece.end_s for piece in pieces)
    )
