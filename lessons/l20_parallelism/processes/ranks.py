"""Ranks in one process, for exercises and for reading: what they hold is a list with an entry of
each.

    parts = ranks.all_reduce([x0 @ w0, x1 @ w1])     # both entries are now the sum

group.py has the same collectives between processes.
"""

import torch
from torch import Tensor


class Ranks:
    """`size` ranks. calls: (name of the collective, numbers that a rank puts in), in order; where
    the ranks put in different amounts, the largest.
    """

    def __init__(self, size: int):
        self.size = size
        self.calls: list[tuple[str, int]] = []

    def all_reduce(self, parts: list[Tensor]) -> list[Tensor]:
        """Every rank gets the sum of all parts, which have one shape: [...] each -> the same."""
        self._write_down("all_reduce", [part.numel() for part in parts])
        total = sum(parts[1:], parts[0])
        return [total.clone() for _ in parts]

    def reduce_scatter(self, parts: list[Tensor]) -> list[Tensor]:
        """Every rank gets its share of the sum's rows: [size · R, ...] each -> [R, ...] each."""
        self._write_down("reduce_scatter", [part.numel() for part in parts])
        total = sum(parts[1:], parts[0])
        return [rows.clone() for rows in total.chunk(self.size)]

    def all_gather(self, parts: list[Tensor], dim: int = -1) -> list[Tensor]:
        """Every rank gets all parts side by side along `dim`, in the order of the ranks: by default
        [..., C] each -> [..., size · C].
        """
        self._write_down("all_gather", [part.numel() for part in parts])
        whole = torch.cat(parts, dim)
        return [whole.clone() for _ in parts]

    def all_to_all(self, parts: list[list[Tensor]]) -> list[list[Tensor]]:
        """parts[a][b]: from rank a to rank b. In the result [b][a] is what rank b got from rank
        a.
        """
        numbers = [sum(part.numel() for part in own) for own in parts]
        self._write_down("all_to_all", numbers)
        return [[own[rank].clone() for own in parts] for rank in range(self.size)]

    def _write_down(self, name: str, numbers: list[int]) -> None:
        if len(numbers) != self.size:
            raise ValueError(f"{name} has {len(numbers)} parts for {self.size} ranks")
        self.calls.append((name, max(numbers)))
