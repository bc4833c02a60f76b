"""How many bytes an adapter has, how many fit beside a model, and what a decode step reads of them.

    python -m lessons.l21_multi_lora.lab.sizes --model llama-3-8b --gpu h100

prints a table by rank. All numbers are computed from shapes; nothing is timed.
"""

import argparse
import sys
from collections.abc import Sequence

from lessons.l01_roofline.planner.models import ModelShape, find_model
from lessons.toolbox.measure.hardware import CHIPS

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
VALUE_BYTES = 2
RANKS = (8, 16, 32, 64, 128, 256)


def linear_shapes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """{name: (N, K)} of the linear layers of a dense block with a gated MLP."""
    width, inner = shape.hidden_size, shape.intermediate_size
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    return {
        "q_proj": (heads * shape.head_dim, width),
        "k_proj": (kv_heads * shape.head_dim, width),
        "v_proj": (kv_heads * shape.head_dim, width),
        "o_proj": (width, heads * shape.head_dim),
        "gate_proj": (inner, width),
        "up_proj": (inner, width),
        "down_proj": (width, inner),
    }


def adapter_bytes(shape: ModelShape, rank: int, names: Sequence[str] = ALL_LINEAR) -> int:
    """A and B of all blocks, in 16 bits."""
    shapes = linear_shapes(shape)
    numbers = sum(rank * (outputs + inputs) for outputs, inputs in (shapes[n] for n in names))
    return VALUE_BYTES * shape.num_hidden_layers * numbers


def base_bytes(shape: ModelShape) -> int:
    """All weights of the base, in 16 bits."""
    return VALUE_BYTES * shape.params


def adapters_that_fit(shape: ModelShape, rank: int, memory_bytes: float) -> int:
    """Adapters beside one base, if nothing else is in the memory."""
    return int((memory_bytes - base_bytes(shape)) // adapter_bytes(shape, rank))


def step_factor(shape: ModelShape, rank: int, num_adapters: int) -> float:
    """Bytes of weights and adapters that a decode step reads, over those of the weights alone."""
    return 1 + num_adapters * adapter_bytes(shape, rank) / base_bytes(shape)


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="llama-3-8b", help="a name of lesson 1's planner")
    parser.add_argument("--gpu", default="h100", choices=sorted(CHIPS), help="default h100")
    given = parser.parse_args(arguments)
    try:
        shape = find_model(given.model)
    except ValueError as error:
        parser.error(str(error))
    if shape.num_experts or shape.kv_lora_rank:
        parser.error(f"--model is {given.model}; accepted: a dense model without latents")
    memory = CHIPS[given.gpu].memory_bytes
    print(f"{shape.name}, {base_bytes(shape) / 1e9:.1f} GB, on a GPU of {memory / 1e9:.0f} GB")
    print("rank        MB   share of the base   fit beside it   a step with 16 reads")
    for rank in RANKS:
        size = adapter_bytes(shape, rank)
        fit = max(0, adapters_that_fit(shape, rank, memory))
        share = size / base_bytes(shape)
        factor = step_factor(shape, rank, 16)
        print(f"{rank:4} {size / 1e6:9.1f} {share:19.2%} {fit:15} {factor:21.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
