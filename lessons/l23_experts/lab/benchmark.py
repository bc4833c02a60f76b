"""The experts of a layer: lesson 6's loop, all of them in three launches, and the libraries.

    python -m lessons.toolbox.measure.bench 23

l23_mixtral has few large experts, l23_many_experts many small ones. The router is not timed: all
get the same routes, drawn at random and evenly. On a GPU the layers are those of Mixtral 8x7B and
Qwen3-30B-A3B, on a CPU smaller ones. There stand_ins.py replaces the kernels, which would run in
the interpreter.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l23_experts import naive, optimized, stand_ins
from lessons.l23_experts.lab import peers
from lessons.toolbox.measure.bench import Benchmark
from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.measure.hardware import MIB, this_machine, time_floor_s

ON_GPU = default_device().type == "cuda"
DTYPE = default_dtype() if ON_GPU else torch.float32
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
# The last-level cache of the CPU of results/cpu. Its runs follow each other with a warm cache, so
# what fits into it need not come from memory.
CPU_CACHE_BYTES = 32 * MIB

experts = optimized.experts if ON_GPU else stand_ins.experts


class Shape(NamedTuple):
    """A layer: experts, how many of them a token gets, width of the model and of an expert."""

    num_experts: int
    top_k: int
    size: int
    inner: int

    @property
    def expert_bytes(self) -> int:
        """Of the three matrices of one expert."""
        return 3 * self.size * self.inner * DTYPE.itemsize


MIXTRAL = Shape(8, 2, 4096, 14336) if ON_GPU else Shape(8, 2, 512, 1024)
MANY = Shape(128, 8, 2048, 768) if ON_GPU else Shape(64, 8, 256, 128)


# ---------------------------------------------------------------- inputs and floors


@lru_cache(maxsize=1)
def stacks_on(device: torch.device, shape: Shape) -> tuple[Tensor, Tensor]:
    """gate_up: [E, 2I, H] and down: [E, H, I], so that values keep their size."""
    new = dict(dtype=DTYPE, device=device)
    gate_up = torch.randn(shape.num_experts, 2 * shape.inner, shape.size, **new)
    down = torch.randn(shape.num_experts, shape.size, shape.inner, **new)
    return gate_up.mul_(shape.size**-0.5), down.mul_(shape.inner**-0.5)


def chosen_of(num_tokens: int, shape: Shape) -> Tensor:
    """k different experts for each token, [T, k], the same at each call: the floor counts them."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, shape.num_experts, generator=generator)
    return scores.topk(shape.top_k).indices


def inputs_of(num_tokens: int, shape: Shape, device: torch.device) -> tuple:
    """x, weights, chosen, gate_up, down."""
    x = torch.randn(num_tokens, shape.size, dtype=DTYPE, device=device)
    weights = torch.rand(num_tokens, shape.top_k, device=device) + 0.5
    weights /= weights.sum(-1, keepdim=True)
    return x, weights, chosen_of(num_tokens, shape).to(device), *stacks_on(device, shape)


def layer_bytes(num_tokens: int, shape: Shape) -> int:
    """Each expert that some token chose once; x and the result once."""
    touched = len(chosen_of(num_tokens, shape).unique())
    return touched * shape.expert_bytes + 2 * num_tokens * shape.size * DTYPE.itemsize


def layer_flops(num_tokens: int, shape: Shape) -> int:
    """Of three products for each pair of a token and an expert."""
    return 2 * 3 * num_tokens * shape.top_k * shape.size * shape.inner


def floor_bytes(num_tokens: int, shape: Shape, on_gpu: bool = ON_GPU) -> int:
    """Bytes that must come from memory in every run: none where a CPU's cache holds them all."""
    moved = layer_bytes(num_tokens, shape)
    return moved if on_gpu or moved > CPU_CACHE_BYTES else 0


# ---------------------------------------------------------------- providers


def one_after_the_other(x, weights, chosen, gate_up, down):
    """Lesson 6's loop over experts."""
    layer = naive.layer_of(gate_up, down, chosen.shape[1])
    layer.gate = naive.GivenRoutes(weights, chosen)
    return lambda: layer(x)


def all_at_once(*inputs):
    """Tiles of pairs, in one launch a product; on a CPU two products an expert."""
    return lambda: experts(*inputs)


PROVIDERS = {
    "expert by expert": ("naive", one_after_the_other),
    "all experts at once": ("optimized", all_at_once),
    "PyTorch grouped_mm": ("library", peers.grouped_mm),
    "transformers": ("library", peers.transformers_mixtral),
    "vLLM": ("library", peers.vllm_fused_experts),
}


def benchmark(name: str, size: str, shape: Shape) -> Benchmark:
    """Tokens on the x axis, one layer's experts on the y axis."""
    return Benchmark(
        name=name,
        title=f"{shape.num_experts} {size} experts at once, beside one by one: {{where}}",
        x_name="tokens",
        x_values=TOKENS,
        quick_x_values=[TOKENS[0], TOKENS[5]],
        inputs=lambda tokens, device: inputs_of(tokens, shape, device),
        providers=PROVIDERS,
        ylabel="experts of one layer",
        bytes_moved=lambda tokens: layer_bytes(tokens, shape),
        flops=lambda tokens: layer_flops(tokens, shape),
        floor_s=lambda tokens: time_floor_s(
            floor_bytes(tokens, shape), layer_flops(tokens, shape), this_machine(), DTYPE
        ),
        floor_label="roofline of the experts in use",
        shape=f"{shape.top_k} of {shape.num_experts} experts, {shape.size} → {shape.inner}",
        dtype=str(DTYPE).removeprefix("torch."),
        tolerance=2e-2 if ON_GPU else 1e-4,
    )


BENCHMARKS = [
    benchmark("l23_mixtral", "large", MIXTRAL),
    benchmark("l23_many_experts", "small", MANY),
]
