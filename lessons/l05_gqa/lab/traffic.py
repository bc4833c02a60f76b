"""How many bytes of K and V a decode step moves, by formula and by count, and what the KV heads of
real models cost.

    python -m lessons.l05_gqa.lab.traffic [--context 8192] [--gpu h200]
        one layer's step, then the table of models
"""

import argparse
import sys
from dataclasses import dataclass

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lessons.l01_roofline.calculators import (
    gpus_needed,
    kv_bytes_per_token,
    sequences_that_fit,
    weight_bytes,
)
from lessons.l01_roofline.planner.models import MODELS, ModelShape, find_model
from lessons.toolbox.measure.hardware import lookup

TABLE = (
    "gpt-j-6b",
    "llama-2-7b",
    "llama-2-13b",
    "llama-2-70b",
    "mistral-7b",
    "llama-3-8b",
    "llama-3-70b",
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "falcon-40b",
)
MEMORY_SHARE = 0.9  # of each GPU: what lesson 1 plans with, the rest is for everything else


# ---------------------------------------------------------------- a step, by formula


def cached_bytes(num_keys: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """K and V of one layer of one sequence, in bytes: what a step has to read once."""
    return 2 * num_keys * num_kv_heads * head_dim * itemsize


def repeated_bytes(
    num_keys: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> int:
    """What naive.decode_repeated moves: K and V are read, written once per query head, and read
    again. In bytes.
    """
    return cached_bytes(num_keys, num_kv_heads + 2 * num_heads, head_dim, itemsize)


def kernel_loads(
    context_lens: list[int], num_heads: int, readers: int, head_dim: int, window: int | None = None
) -> int:
    """Values that a decode kernel loads for a batch: q once, K, V and the length once for each of
    `readers` programs.

    readers: of a sequence. Hq in lesson 3's kernel, a program per query head; Hkv in this lesson's,
    a program per KV head.
    """
    keys = sum(length if window is None else min(length, window) for length in context_lens)
    return len(context_lens) * (num_heads * head_dim + readers) + 2 * keys * readers * head_dim


# ---------------------------------------------------------------- a step, counted


class KVTraffic(TorchDispatchMode):
    """Within it, the bytes that PyTorch's operations read and write of tensors with `num_elements`
    elements or more.

    Each operation is charged one read of every such input and one write of every such output. Views
    move nothing, and a broadcast input is charged what it occupies, not what it shows. Scratch
    memory inside an operation is not seen.
    """

    def __init__(self, num_elements: int):
        super().__init__()
        self.num_elements, self.read_bytes, self.written_bytes = num_elements, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs, outputs = self._large((args, kwargs)), self._large(out)
        if new := outputs.keys() - inputs.keys():
            self.written_bytes += sum(outputs[storage] for storage in new)
        if new or not outputs:  # what only gives back its input's storage is a view
            self.read_bytes += sum(inputs.values())
        return out

    def _large(self, tree) -> dict[int, int]:
        """{storage: bytes} of the large tensors in an operation's arguments or results."""
        return {
            x.untyped_storage()._cdata: min(x.nbytes, x.untyped_storage().nbytes())
            for x in tree_leaves(tree)
            if isinstance(x, Tensor) and x.numel() >= self.num_elements
        }


# ---------------------------------------------------------------- real models


@dataclass(frozen=True)
class Row:
    """A model's KV heads and what they cost in 16 bits."""

    model: ModelShape
    kv_bytes: float  # a token, all layers
    mha_bytes: float  # the same with a KV head for every query head
    gpus: int  # the fewest that hold the weights and one sequence
    sequences: int  # of the context asked for, beside the weights, on these GPUs

    @property
    def kind(self) -> str:
        """MHA, MQA or GQA."""
        heads, kv_heads = self.model.num_attention_heads, self.model.num_key_value_heads
        return "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"


def rows(context: int, memory_bytes: int, names: tuple[str, ...] = TABLE) -> list[Row]:
    """The models of the table, lesson 1's shapes and calculators. memory_bytes: of one GPU. Raises
    ValueError for a name.
    """
    found = []
    for shape in map(find_model, names):
        kv = kv_bytes_per_token(shape)
        as_mha = kv * shape.num_attention_heads / shape.num_key_value_heads
        found.append(
            Row(shape, kv, as_mha, *fitting(memory_bytes, weight_bytes(shape), kv, context))
        )
    return found


def fitting(
    memory_bytes: int, weights_bytes: float, kv_bytes: float, context: int
) -> tuple[int, int]:
    """(GPUs, sequences): the fewest GPUs that hold the weights and one sequence, and how many
    sequences of `context` tokens they hold. memory_bytes: of one GPU, of which MEMORY_SHARE is
    planned; kv_bytes: of a token.
    """
    usable = MEMORY_SHARE * memory_bytes
    gpus = gpus_needed(weights_bytes + context * kv_bytes, usable)
    return gpus, sequences_that_fit(gpus * usable, weights_bytes, kv_bytes, context)


def table(context: int, gpu: str) -> list[str]:
    """The rows as Markdown. Raises ValueError for an unknown GPU."""
    lines = [
        "| model | query / KV heads | kind | KiB a token | as MHA | "
        f"{lookup(gpu).name} | sequences of {context} |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.model.name} | {row.model.num_attention_heads} / {row.model.num_key_value_heads} | "
        f"{row.kind} | "
        f"{row.kv_bytes / 1024:.0f} | {row.mha_bytes / 1024:.0f} | {row.gpus} | {row.sequences} |"
        for row in rows(context, lookup(gpu).memory_bytes)
    ]
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lessons.l05_gqa.lab.traffic", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--context", type=int, default=8192, help="tokens of each sequence (default: 8192)"
    )
    parser.add_argument("--gpu", default="h200", help="whose memory holds the caches")
    options = parser.parse_args(argv)
    try:
        if options.context < 1:
            raise ValueError(f"--context {options.context}; accepted: 1 or more tokens")
        lines = table(options.context, options.gpu)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    shape = MODELS["llama-3-8b"]
    sizes = options.context, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    ways = {
        "read in groups": cached_bytes(options.context, *sizes[2:], 2),
        "MHA": cached_bytes(options.context, shape.num_attention_heads, shape.head_dim, 2),
        "repeat_interleave": repeated_bytes(*sizes, 2),
    }
    print(
        f"{shape.name}, one layer, one sequence of {options.context} tokens, 16 bits: MiB of K and "
        f"V that a step moves\n"
    )
    for way, count in ways.items():
        print(f"{way:18} {count / 2**20:8.4g}   {count / ways['read in groups']:.3g} x")
    print("", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
