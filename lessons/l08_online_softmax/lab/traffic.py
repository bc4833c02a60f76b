"""The bytes of scores and probabilities that each way to softmax moves, and where exp stops being a
number.

    python -m lessons.l08_online_softmax.lab.traffic
        the table of the README, for a batch of logits
"""

import math

import torch

from lessons.l08_online_softmax.optimized import MAX_BLOCK

# How often each way goes over the row: (reads, writes).
PASSES = {
    "three passes": (3, 1),
    "online, two passes": (2, 1),
    "one block": (1, 1),
    "softmax · V in one pass": (1, 0),
}


def softmax_bytes(num_rows: int, num_columns: int, itemsize: int, way: str) -> int:
    """Bytes that a way of PASSES moves to and from memory, if no cache helps. itemsize: bytes of a
    score.
    """
    return sum(PASSES[way]) * num_rows * num_columns * itemsize


def way_of(num_columns: int) -> str:
    """How `optimized.softmax` treats rows of that length."""
    return "one block" if num_columns <= MAX_BLOCK else "online, two passes"


def largest_exponent(dtype: torch.dtype) -> float:
    """The largest x whose exp is finite in a dtype: log of its largest number."""
    return math.log(torch.finfo(dtype).max)


def smallest_exponent(dtype: torch.dtype) -> float:
    """The x below which exp is 0 in a dtype: log of half its smallest subnormal number, which still
    rounds to 0.
    """
    info = torch.finfo(dtype)
    return math.log(info.tiny) + math.log(info.eps / 2)


def main() -> None:
    rows, columns = 64, 128256
    print(f"{rows} rows of {columns} logits, bfloat16")
    for way in PASSES:
        print(f"  {way:26}{softmax_bytes(rows, columns, 2, way) / 1e6:8.1f} MB")
    print("exp is finite up to, and 0 below")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        print(
            f"  {str(dtype).removeprefix('torch.'):10}{largest_exponent(dtype):9.2f}"
            f"{smallest_exponent(dtype):10.2f}"
        )


if __name__ == "__main__":
    main()
