"""What splits by length gain where the sequences of a step have different lengths: predictions of
lesson 10's model of the machine, not measurements.

    python -m lessons.l12_paged_kv.lab.ragged
        writes results/counted/l12_ragged.json

One layer on an H200: of Llama-3-8B, decoding (through a table or not: the list is the same) or with
trees of 8 nodes, and of DeepSeek-V2-Lite, whose 16 heads read latents. A step's bound is its keys
and values read once at the full bandwidth.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from lessons.l10_flash_decoding.lab.occupancy import (
    BLOCK_N,
    COMBINE_START_S,
    Piece,
    run,
    slots,
)
from lessons.l10_flash_decoding.splits import (
    bounds_by_length,
    cdiv,
    choose_num_splits,
    pays_by_length,
    split_bounds,
)
from lessons.toolbox.measure.hardware import CHIPS, Chip

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l12_ragged.json"
LONG, SHORT = 32768, 512  # tokens


@dataclass(frozen=True)
class Work:
    """What one layer's attention reads and merges."""

    shape: str
    num_programs: int  # that read a split of a sequence
    key_bytes: int  # of one key and value, for one of these programs
    rows: int  # results of a split: query heads, and nodes of a tree
    width: int  # values of a result
    block_n: int = BLOCK_N

    @property
    def partial_bytes(self) -> int:
        """What is written of a split, and read again by the merge: float32, with a log-sum-exp."""
        return self.rows * (self.width + 1) * 4


DECODE = Work("heads 32/8, head_dim 128", 8, 2 * 128 * 2, 32, 128)
TREES = Work("heads 32/8, head_dim 128, trees of 8 nodes", 8, 2 * 128 * 2, 8 * 32, 128)
LATENTS = Work("16 heads, latents of 512 + 64", 1, 576 * 2, 16, 512, 32)


def lognormal(count: int, seed: int = 1) -> list[int]:
    """Lengths with a median of about 1100 tokens, at most LONG: many short ones and a few long."""
    draws = random.Random(seed)
    return [max(1, min(LONG, int(draws.lognormvariate(7, 1.2)))) for _ in range(count)]


BATCHES = {
    "1 of 32k, 63 of 512": [LONG] + [SHORT] * 63,
    "1 of 32k, 7 of 512": [LONG] + [SHORT] * 7,
    "1 of 128k, 255 of 256": [4 * LONG] + [256] * 255,
    "64 lognormal": lognormal(64),
    "16 lognormal": lognormal(16),
    "64 of 512": [SHORT] * 64,
    "20 of 4096": [4096] * 20,
    "8 of 4096": [4096] * 8,
    "1 of 32k": [LONG],
}
# Latents of a token are a quarter as long as Llama's K and V, so four times as many are read.
LONGER = {
    "1 of 128k, 63 of 2048": [4 * LONG] + [4 * SHORT] * 63,
    "1 of 128k, 7 of 2048": [4 * LONG] + [4 * SHORT] * 7,
    "256 lognormal": lognormal(256),
    "256 of 1024": [1024] * 256,
}


Bounds = list[list[tuple[int, int]]]  # (start, end) of each sequence's splits


def equal_bounds(context_lens: list[int], chip: Chip, work: Work = DECODE) -> Bounds:
    """The same number of splits for all sequences."""
    programs = len(context_lens) * work.num_programs
    longest = cdiv(max(context_lens), work.block_n)
    num_splits = choose_num_splits(programs, longest, slots(chip))
    return [split_bounds(n, num_splits, block_n=work.block_n) for n in context_lens]


def listed_bounds(context_lens: list[int], chip: Chip, work: Work = DECODE) -> Bounds:
    """Splits by length."""
    return bounds_by_length(context_lens, work.num_programs, slots(chip), work.block_n)


def chosen_bounds(context_lens: list[int], chip: Chip, work: Work = DECODE) -> Bounds:
    """As the engine chooses for a step."""
    pays = pays_by_length(context_lens, work.num_programs, slots(chip))
    return (listed_bounds if pays else equal_bounds)(context_lens, chip, work)


def pieces_of(bounds: Bounds, chip: Chip, longest_first: bool, work: Work = DECODE) -> list[Piece]:
    """When the programs of the decode kernel run, KV heads first. longest_first: as in a list."""
    sizes = [end - start for cut in bounds for start, end in cut if end > start]
    if longest_first:
        sizes.sort(reverse=True)
    return run([n * work.key_bytes for n in sizes for _ in range(work.num_programs)], chip)


def predicted_s(bounds: Bounds, chip: Chip, longest_first: bool, work: Work = DECODE) -> float:
    """Seconds of the decode kernel, and of the merge if a sequence is cut; launches not counted."""
    end_s = max(piece.end_s for piece in pieces_of(bounds, chip, longest_first, work))
    places = sum(map(len, bounds))
    if places == len(bounds):
        return end_s
    return end_s + COMBINE_START_S + 2 * places * work.partial_bytes / chip.memory_bytes_per_s


def bound_s(context_lens: list[int], chip: Chip, work: Work = DECODE) -> float:
    """Seconds in which the memory gives all keys and values once."""
    return sum(context_lens) * work.num_programs * work.key_bytes / chip.memory_bytes_per_s


def prediction(context_lens: list[int], chip: Chip = CHIPS["h200"], work: Work = DECODE) -> dict:
    """Programs and µs of a step, with equal splits and as the engine chooses."""
    equal, chosen = equal_bounds(context_lens, chip, work), chosen_bounds(context_lens, chip, work)
    is_list = pays_by_length(context_lens, work.num_programs, slots(chip))
    bound, before = bound_s(context_lens, chip, work), predicted_s(equal, chip, False, work)
    after = predicted_s(chosen, chip, is_list, work)
    return {
        "sequences": len(context_lens),
        "tokens": sum(context_lens),
        "by_length": is_list,
        "equal_splits": len(equal[0]),
        "splits_of_the_longest": max(map(len, chosen)),
        "bound_us": round(1e6 * bound, 2),
        "equal_us": round(1e6 * before, 2),
        "chosen_us": round(1e6 * after, 2),
        "equal_to_bound": round(before / bound, 3),
        "chosen_to_bound": round(after / bound, 3),
        "chosen_to_equal": round(after / before, 3),
    }


def predictions() -> dict:
    """What the record holds."""
    return {
        "what": "predicted by lessons/l10_flash_decoding/lab/occupancy.py, not measured",
        "command": "python -m lessons.l12_paged_kv.lab.ragged",
        "chip": CHIPS["h200"].name,
        "shape": f"one layer, {DECODE.shape}, 16 bits, tiles of {BLOCK_N} keys",
        "batches": {name: prediction(lengths) for name, lengths in BATCHES.items()},
        "trees": of_other_work(TREES, BATCHES),
        "latents": of_other_work(LATENTS, LONGER),
    }


def of_other_work(work: Work, batches: dict[str, list[int]]) -> dict:
    """What the record holds of trees and of latents."""
    found = {name: prediction(lengths, work=work) for name, lengths in batches.items()}
    return {"shape": work.shape, "batches": found}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(predictions(), indent=1) + "\n", encoding="utf-8")
    record = predictions()
    for kind in (record, record["trees"], record["latents"]):
        print(kind["shape"])
        for name, found in kind["batches"].items():
            print(f"{name:24s}", found)
