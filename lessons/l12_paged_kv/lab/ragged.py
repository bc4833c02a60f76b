"""What splits by length gain where the sequences of a step have different lengths: predictions of
lesson 10's model of the machine, not measurements.

    python -m lessons.l12_paged_kv.lab.ragged
        writes results/counted/l12_ragged.json

One layer of Llama-3-8B on an H200. A step's bound is K and V read once at the full bandwidth.
"""

import json
import random
from pathlib import Path

from lessons.l10_flash_decoding.lab.occupancy import (
    BLOCK_N,
    COMBINE_START_S,
    Decode,
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
WORK = Decode(context=0)  # its heads
LONG, SHORT = 32768, 512  # tokens


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


def equal_bounds(context_lens: list[int], chip: Chip) -> list[list[tuple[int, int]]]:
    """[(start, end)] of each sequence's splits, their number the same for all."""
    programs, longest = len(context_lens) * WORK.num_kv_heads, cdiv(max(context_lens), BLOCK_N)
    num_splits = choose_num_splits(programs, longest, slots(chip))
    return [split_bounds(n, num_splits, block_n=BLOCK_N) for n in context_lens]


def listed_bounds(context_lens: list[int], chip: Chip) -> list[list[tuple[int, int]]]:
    """The same by length."""
    return bounds_by_length(context_lens, WORK.num_kv_heads, slots(chip), BLOCK_N)


def chosen_bounds(context_lens: list[int], chip: Chip) -> list[list[tuple[int, int]]]:
    """As the engine chooses for a step."""
    pays = pays_by_length(context_lens, WORK.num_kv_heads, slots(chip))
    return (listed_bounds if pays else equal_bounds)(context_lens, chip)


def pieces_of(bounds: list[list[tuple[int, int]]], chip: Chip, longest_first: bool) -> list[Piece]:
    """When the programs of the decode kernel run, KV heads first. longest_first: as in a list."""
    sizes = [end - start for cut in bounds for start, end in cut if end > start]
    if longest_first:
        sizes.sort(reverse=True)
    return run([n * WORK.key_bytes for n in sizes for _ in range(WORK.num_kv_heads)], chip)


def predicted_s(bounds: list[list[tuple[int, int]]], chip: Chip, longest_first: bool) -> float:
    """Seconds of the decode kernel, and of the merge if a sequence is cut; launches not counted."""
    end_s = max(piece.end_s for piece in pieces_of(bounds, chip, longest_first))
    places = sum(map(len, bounds))
    if places == len(bounds):
        return end_s
    partial_bytes = places * WORK.num_heads * (WORK.head_dim + 1) * 4
    return end_s + COMBINE_START_S + 2 * partial_bytes / chip.memory_bytes_per_s


def bound_s(context_lens: list[int], chip: Chip) -> float:
    """Seconds in which the memory gives all K and V once."""
    return sum(context_lens) * WORK.num_kv_heads * WORK.key_bytes / chip.memory_bytes_per_s


def prediction(context_lens: list[int], chip: Chip = CHIPS["h200"]) -> dict:
    """Programs and µs of a step, with equal splits and as the engine chooses."""
    equal, chosen = equal_bounds(context_lens, chip), chosen_bounds(context_lens, chip)
    is_list = pays_by_length(context_lens, WORK.num_kv_heads, slots(chip))
    bound, before = bound_s(context_lens, chip), predicted_s(equal, chip, False)
    after = predicted_s(chosen, chip, is_list)
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
        "shape": f"one layer, heads {WORK.num_heads}/{WORK.num_kv_heads}, head_dim "
        f"{WORK.head_dim}, 16 bits, tiles of {BLOCK_N} keys",
        "batches": {name: prediction(lengths) for name, lengths in BATCHES.items()},
    }


if __name__ == "__main__":
    RECORD.write_text(json.dumps(predictions(), indent=1) + "\n", encoding="utf-8")
    for name, found in predictions()["batches"].items():
        print(f"{name:24s}", found)
