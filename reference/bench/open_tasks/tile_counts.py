"""In a process that compiles for Hopper: what lesson 9's kernel does with each of some tiles.

Reads {"task": {...}, "tiles": [{...}, ...]} from stdin and prints, as its last line, a list of
objects: the numbers of tiles.NUMBERS, "limit", and "off"; or "error". tiles.py starts it.
"""

import json
import sys

import torch
from torch import Tensor

from lessons.l09_flash_attention.naive import attention
from lessons.l09_flash_attention.optimized import flash_attention
from lessons.l09_flash_attention.tiles import Tiles
from lessons.toolbox.gpu.arguments import WATCHERS
from lessons.toolbox.gpu.counters import counting
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.model.arguments import one_line
from lessons.toolbox.profile.counted import KernelProfile, profiles
from lessons.toolbox.profile.time_model import predict
from reference.bench.open_tasks.tiles import Task

QUERIES, KEYS = 70, 150  # of the case that is held against float64: no tile fits them


def inputs(task: Task, queries: int, keys: int, heads: int) -> list[Tensor]:
    """q, k, v in bfloat16: [T, H, D]."""
    generator = torch.Generator().manual_seed(9)
    kv_heads = max(1, heads * task.kv_heads // task.heads)
    return [
        torch.randn(tokens, count, task.head_dim, generator=generator).bfloat16()
        for tokens, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    ]


def off(task: Task, tiles: Tiles) -> float:
    """The largest error of a small case, for values of about 1."""
    q, k, v = inputs(task, QUERIES, KEYS, 2)
    got, _ = flash_attention(q, k, v, window=task.window, tiles=tiles)
    want, _ = attention(q.double(), k.double(), v.double(), window=task.window)
    return float((got.double() - want).abs().max())


def profile_of(task: Task, tiles: Tiles) -> KernelProfile:
    """Of the task's own shape, all programs."""
    seen: list = []
    given = inputs(task, task.queries, task.keys, task.heads)
    WATCHERS.append(seen.append)
    try:
        with counting():
            flash_attention(*given, window=task.window, tiles=tiles)
    finally:
        WATCHERS.remove(seen.append)
    (found,) = profiles(seen, lookup(task.gpu))
    return found


def numbers(task: Task, tiles: Tiles) -> dict:
    """Of one choice."""
    profile, error = profile_of(task, tiles), off(task, tiles)
    predicted = predict(profile)
    return {
        "instructions": int(profile.total["issued"]),
        "sectors": int(profile.total["sectors"]),
        "registers": profile.assembled["registers"],
        "spill_bytes": profile.assembled["spill_bytes"],
        "shared_bytes": profile.shared_bytes,
        "predicted_us": 1e6 * float(predicted.seconds),
        "limit": predicted.limit,
        "off": error,
    }


def main() -> int:
    asked = json.load(sys.stdin)
    task, found = Task(**asked["task"]), []
    for one in asked["tiles"]:
        try:
            found.append(numbers(task, Tiles(**one)))
        except Exception as error:  # whatever the compiler says of these tiles
            found.append({"error": one_line(f"{type(error).__name__}: {error}", 160)})
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
