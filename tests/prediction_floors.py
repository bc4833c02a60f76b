"""What the predicted times of results/counted have to be above: bytes that a kernel must move and
products that it must make, worked out from shapes by hand, apart from the code that predicts.

A prediction runs a sample of a launch's programs, and a sample may meet the wrong ones. Then a time
can come out that no chip reaches.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from lessons.toolbox.measure.hardware import lookup

RECORDS = Path(__file__).parents[1] / "results" / "counted"
# Of a data sheet's bandwidth: the fastest copy that an H200 gave (results/README.md)
COPY = 4.43 / 4.8
UNITS = {
    "predicted_s": 1,
    "seconds": 1,
    "kernel_s": 1,
    "predicted_us": 1e-6,
    "equal_us": 1e-6,
    "chosen_us": 1e-6,
}
# A model of networks, whose numbers stand beside published ones: tests/test_l23_experts.py.
NO_KERNELS = ("l23_large.json",)
Path_ = tuple  # keys and indices, from a record's root to a time


@dataclass(frozen=True)
class Work:
    """read, stored: bytes that cross the memory's bus; flops: of the matrix units. bits: of their
    operands. share: of the data sheet's bandwidth that can be reached.
    """

    read: float = 0
    stored: float = 0
    flops: float = 0
    bits: int = 16
    chip: str = "h200"
    share: float = COPY

    @property
    def floor_s(self) -> float:
        """What half of the L2 holds may be stored later, as in the time model."""
        chip = lookup(self.chip)
        moved = self.read + max(0.0, self.stored - chip.l2_bytes / 2)
        rate = {16: chip.bf16_flops_per_s, 8: chip.fp8_flops_per_s, 4: 2 * chip.fp8_flops_per_s}
        return max(moved / (self.share * chip.memory_bytes_per_s), self.flops / rate[self.bits])


Held = Iterator[tuple[Path_, Work]]


def attention(queries: int, keys: int, causal: bool) -> float:
    """FLOPs of 32 heads of 128. causal: the queries are the last of the keys."""
    pairs = queries * (keys - queries) + queries * (queries + 1) / 2 if causal else queries * keys
    return 4 * 128 * 32 * pairs


def eight_bits(record: dict) -> Held:
    for name in record["kernels"]:
        bits = 8 if "8 bits" in name else 16
        for part in ("causal", "full"):
            for tokens in (8192, 16384):
                flops = attention(tokens, tokens, part == "causal")
                read, stored = 48 * 128 * tokens * bits / 8, 32 * 128 * tokens * 2
                path = "kernels", name, part, str(tokens), "predicted_s"
                yield path, Work(read, stored, flops, bits)


def specialized(record: dict) -> Held:
    for part in ("causal", "full"):
        for name in record[part]:
            flops = attention(8192, 8192, part == "causal")
            yield (part, name, "predicted_us"), Work(48 * 128 * 8192 * 2, 0, flops)


def latents(sequences: int, context: int, heads: int, row: int = 1152, **more) -> Work:
    """A step over rows of so many bytes, with 512 values and 64 rotary ones."""
    keys = sequences * context
    return Work(keys * row, flops=2 * (576 + 512) * keys * heads, **more)


def latent_times(record: dict) -> Held:
    for name, found in record["kernels"].items():
        yield ("kernels", name, "predicted_us"), latents(66, 8192, 128)
        for context in found["at"]:
            path = "kernels", name, "at", context, "predicted_us"
            yield path, latents(66, int(context), 128)
    for name in record["few heads"]:
        yield ("few heads", name, "predicted_us"), latents(64, 4096, 16)


def ragged(record: dict) -> Held:
    """Lesson 10's model counts the data sheet's bandwidth."""
    for part, token_bytes in (((), 4096), (("trees",), 4096), (("latents",), 1152)):
        for name, batch in at(record, (*part, "batches")).items():
            for time in ("equal_us", "chosen_us"):
                work = Work(batch["tokens"] * token_bytes, share=1)
                yield (*part, "batches", name, time), work


MATRICES = {
    "gate, up": (28672, 4096),
    "down": (4096, 14336),
    "q, k, v": (6144, 4096),
    "o": (4096, 4096),
    "Qwen3-32B: gate, up": (51200, 5120),
    "Qwen3-32B: down": (5120, 25600),
    "Qwen3-32B: q, k, v": (10240, 5120),
    "Qwen3-32B: o": (5120, 8192),
}


def four_bits(record: dict) -> Held:
    for index, each in enumerate(record["calls"]):
        (n, k), rows = MATRICES[each["matrix"]], each["rows"]
        read = n * k * (1 / 2 + 2 / 128) + 2 * rows * k
        yield ("calls", index, "predicted_s"), Work(read, 2 * rows * n, 2 * rows * n * k)


def block_scaled(record: dict) -> Held:
    formats = {"nvfp4": (4, 9 / 16), "mxfp4": (4, 17 / 32), "fp8": (8, 1), "bf16": (16, 2)}
    for shape in record["predicted"]:
        tokens, outputs, inputs = map(int, re.findall(r"\d+", shape))
        for name, (bits, size) in formats.items():
            read, stored = (tokens + outputs) * inputs * size, 2 * tokens * outputs
            work = Work(read, stored, 2 * tokens * outputs * inputs, bits, "b200")
            yield ("predicted", shape, name, "seconds"), work


def latent_rows(record: dict) -> Held:
    for heads in (16, 128):
        for name, row in (("16 bits", 1152), ("fp8_ds_mla", 656)):
            yield from whole_and_parts(
                record, ("predicted", str(heads), name), latents(64, 4096, heads, row), "mla"
            )


def products(record: dict) -> Held:
    for shape in record["predicted"]:
        new, tokens = map(int, re.findall(r"\d+", shape))
        for name in record["predicted"][shape]:
            bits = 8 if name == "products" else 16
            cache = 2 * 8 * 128 * tokens * (2 if name == "16-bit cache" else 1)
            work = Work(cache + 32 * 128 * new * 2, 0, attention(new, tokens, True), bits)
            yield from whole_and_parts(record, ("predicted", shape, name), work, "prefill")


def adapters(record: dict) -> Held:
    """16 adapters of rank 16: A for q, k and v, and their B."""
    for rows in record:
        for way in record[rows]:
            work = Work(2 * 16 * 16 * (3 * 4096 + 4096 + 1024 + 1024))
            yield (rows, way, "predicted_s"), work


def experts(layer: tuple[int, int, int, int], tokens: int, size: float, bits: int = 16) -> Work:
    """layer: experts, those of a token, width, inner width. size: bytes of a weight."""
    count, top_k, width, inner = layer
    scores = torch.rand(tokens, count, generator=torch.Generator().manual_seed(23))
    used = len(scores.topk(top_k).indices.unique())
    flops = 6 * tokens * top_k * width * inner
    return Work(3 * used * width * inner * size, 0, flops, bits)


def part_of(work: Work, kernel: str) -> Work:
    """Of an experts' layer, what one of its kernels does; others round or sort."""
    part = 2 / 3 if "gate_up" in kernel else 1 / 3 if "down" in kernel else 0
    return Work(part * work.read, 0, part * work.flops, work.bits)


def expert_codes(record: dict) -> Held:
    layers = {"mxfp4": ((32, 4, 2880, 2880), 17 / 32), "fp8": ((128, 8, 2048, 768), 1)}
    for name, (layer, size) in layers.items():
        for tokens in record[name]:
            for form in ("16 bits", name):
                bits = 8 if form == "fp8" else 16
                work = experts(layer, int(tokens), 2 if form == "16 bits" else size, bits)
                yield (name, tokens, form, "predicted_s"), work
                for index, kernel in enumerate(record[name][tokens][form]["kernels"]):
                    some = part_of(work, kernel["name"])
                    yield (name, tokens, form, "kernels", index, "predicted_s"), some


def expert_prompts(record: dict) -> Held:
    layers = {"Mixtral 8x7B": (8, 2, 4096, 14336), "Qwen3-30B-A3B": (128, 8, 2048, 768)}
    for name, layer in layers.items():
        for tokens in record[name]:
            for way in ("kernels.py", "more/wide.py"):
                work = experts(layer, int(tokens), 2)
                yield (name, tokens, way, "predicted_s"), work
                for kernel in record[name][tokens][way]["kernels"]:
                    some = part_of(work, kernel)
                    yield (name, tokens, way, "kernels", kernel, "predicted_s"), some


def gathers(record: list) -> Held:
    for index, row in enumerate(record):
        yield (index, "kernel_s"), Work(row["bytes"], row["bytes"], chip="h100")


def states(record: dict) -> Held:
    for batch in record["step"]:
        moved = int(batch) * 32 * 128 * 128 * 4
        yield from whole_and_parts(record, ("step", batch), Work(moved, moved), "state_step")
    for tokens in record["prompt"]:
        one = int(tokens) * 32 * 128 * 2
        yield from whole_and_parts(record, ("prompt", tokens), Work(3 * one, one))


def sparse(record: dict) -> Held:
    """A layer of DeepSeek-V3.2: an indexer of 64 heads of 128, 2048 chosen keys for 128 heads."""
    for batch in record["32768"]:
        count = int(batch)
        keys = count * 32768
        parts = {
            "index_kernel": Work(keys * (128 + 4), 0, 2 * 64 * 128 * keys),
            "top_k_kernel": Work(keys * 4),
            "sparse_mla_kernel": latents(count, 2048, 128),
            "combine_kernel": Work(),
        }
        read, flops = (sum(getattr(x, y) for x in parts.values()) for y in ("read", "flops"))
        yield ("32768", batch, "predicted_s"), Work(read, 0, flops)
        for kernel, work in parts.items():
            yield ("32768", batch, "kernels", kernel, "predicted_s"), work


def whole_and_parts(record: dict, path: Path_, work: Work, does_it: str = "nothing") -> Held:
    """A time, and those of its kernels: one whose name holds `does_it` does the work, and of others
    nothing is known.
    """
    yield (*path, "predicted_s"), work
    for kernel in at(record, (*path, "kernels")):
        yield (*path, "kernels", kernel, "predicted_s"), work if does_it in kernel else Work()


FLOORS: dict[str, Callable[[dict], Held]] = {
    "l09_eight_bits.json": eight_bits,
    "l09_specialized.json": specialized,
    "l12_latents.json": latent_times,
    "l12_ragged.json": ragged,
    "l18_tensor_cores.json": four_bits,
    "l19_block_scaled.json": block_scaled,
    "l19_latents.json": latent_rows,
    "l19_products.json": products,
    "l21_together.json": adapters,
    "l23_codes.json": expert_codes,
    "l23_prefill.json": expert_prompts,
    "l26_gather.json": gathers,
    "l27_predicted.json": states,
    "l28_predicted.json": sparse,
}


# ---------------------------------------------------------------- records


@cache
def record_of(name: str):
    return json.loads((RECORDS / name).read_text(encoding="utf-8"))


def at(node, path: Path_):
    for key in path:
        node = node[key]
    return node


def seconds(node, path: Path_) -> float:
    return at(node, path) * UNITS[path[-1]]


def times_in(node, path: Path_ = ()) -> Iterator[Path_]:
    """Where a record has predicted times."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in pairs:
        if isinstance(value, (dict, list)):
            yield from times_in(value, (*path, key))
        elif key in UNITS:
            yield (*path, key)


def below_the_floor(record, held: Callable[[dict], Held]) -> list[str]:
    """Complaints on times that no chip reaches. A record may be rounded to a thousandth."""
    return [
        f"{path}: {seconds(record, path):.4g} s, where the floor is {work.floor_s:.4g}"
        for path, work in held(record)
        if seconds(record, path) < 0.999 * work.floor_s
    ]
