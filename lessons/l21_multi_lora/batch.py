"""Which adapter each row of a step belongs to: sorted once a step, read by every layer.

    batch = AdapterBatch.of([0, -1, 2, 0], device)      # rows 0 and 3 use slot 0, row 1 uses no
                                                        adapter

The decoder never sees it. It is in an AdapterContext that the LoRALinears of a model share, and
the caller of a pass puts it there before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

NO_ADAPTER = -1
BLOCK_M = 16  # rows of a tile: the fewest that a matrix unit takes


class Segment(NamedTuple):
    """The rows of one adapter: order[first : first + count]."""

    slot: int
    first: int
    count: int


@dataclass
class AdapterBatch:
    """The rows of a step by their adapters.

    row_slots: [T] int64, the slot of each row, −1 for none. order: [T] int32, the rows that have an
    adapter, those of a slot side by side; what comes after them is not read. tiles: [num_tiles,
    3] int32, rows of (slot, first, count): at most block_m rows of one segment; a count of 0 is
    padding. segments: the same, unsliced, for the host. Without a row that has an adapter it is
    empty.
    """

    row_slots: Tensor
    order: Tensor
    tiles: Tensor
    segments: tuple[Segment, ...]
    block_m: int

    @classmethod
    def of(
        cls,
        row_slots: Sequence[int],
        device: torch.device | str = "cpu",
        block_m: int = BLOCK_M,
        num_tiles: int | None = None,
    ) -> "AdapterBatch":
        """row_slots: one for each row. num_tiles: pad the tiles to so many, for a CUDA graph, whose
        grid never changes (`most_tiles`); None: as many as there are.
        """
        order = [row for row, slot in enumerate(row_slots) if slot != NO_ADAPTER]
        order.sort(key=row_slots.__getitem__)  # stable, so rows of a slot keep their order
        segments, tiles, first = [], [], 0
        for at in range(1, len(order) + 1):
            if at < len(order) and row_slots[order[at]] == row_slots[order[first]]:
                continue
            slot = row_slots[order[first]]
            segments.append(Segment(slot, first, at - first))
            starts = range(first, at, block_m)
            tiles += [(slot, start, min(block_m, at - start)) for start in starts]
            first = at
        if num_tiles is not None:
            tiles += [(0, 0, 0)] * (num_tiles - len(tiles))
        order += [0] * (len(row_slots) - len(order))
        return cls(
            torch.tensor(row_slots, dtype=torch.int64).to(device),
            torch.tensor(order, dtype=torch.int32).to(device),
            torch.tensor(tiles, dtype=torch.int32).view(-1, 3).to(device),
            tuple(segments),
            block_m,
        )

    @property
    def num_rows_with_adapter(self) -> int:
        """Rows that a correction is added to."""
        return sum(segment.count for segment in self.segments)

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The segments as if all were as long as the longest, for products in batches.

        Returns slots: [segments], ascending; rows: [segments · longest], each segment's own rows
        and then its first one again; is_real: [segments · longest], which are not such padding,
        None if all are not.
        """
        longest = max(segment.count for segment in self.segments)
        at = torch.arange(longest)
        places = [seg.first + at * (at < seg.count) for seg in self.segments]
        slots = torch.tensor([segment.slot for segment in self.segments])
        rows = self.order[torch.cat(places).to(self.order.device)]
        if longest * len(slots) == self.num_rows_with_adapter:
            return slots.to(rows.device), rows, None
        is_real = torch.cat([at < segment.count for segment in self.segments])
        return slots.to(rows.device), rows, is_real.to(rows.device)

    def copy_in(self, other: "AdapterBatch") -> None:
        """Another step's rows into these tensors, for a CUDA graph that reads them."""
        for mine, new in zip(self.tensors, other.tensors):
            mine.copy_(new)
        self.segments = other.segments
        self.__dict__.pop("padded", None)  # it was made of the old ones

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What kernels read."""
        return self.row_slots, self.order, self.tiles


def most_tiles(num_rows: int, num_slots: int, block_m: int = BLOCK_M) -> int:
    """Tiles that so many rows can fall into: each slot adds at most one that is not full."""
    return min(num_rows, num_rows // block_m + num_slots)


class AdapterContext:
    """What the LoRALinears of a model share: the rows of the step under way. None: no row has an
    adapter, and the layers are what they were before.
    """

    def __init__(self):
        self.batch: AdapterBatch | None = None

    @contextmanager
    def over(self, batch: AdapterBatch | None) -> Iterator[None]:
        """Inside it the layers add what `batch` says."""
        before, self.batch = self.batch, batch
        try:
            yield
        finally:
            self.batch = before
