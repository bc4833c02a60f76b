"""What the benchmark runs: models with random weights, caches filled with random rows, one step's
inputs, and its bytes.

On a CPU the models have the shape of models/tiny; on a GPU also that of Llama-3-8B, with four of
its layers.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.lab.workload import DTYPE, ON_GPU, read_floor_s
from lessons.l11_cuda_graphs.lab.pictures import TINY
from lessons.l11_cuda_graphs.naive import LOCKSTEP
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import ModelConfig

# 4 layers of 32
LLAMA_8B = ModelConfig("llama", 128256, 4096, 4, 32, 8, 128, 14336, 8192, rope_theta=5e5)
LLAMA_CONTEXT, TINY_CONTEXT = 4096, 512  # tokens of each sequence
BATCHES = [1, 2, 4, 8, 16, 32, 64] if ON_GPU else [1, 2, 4, 8, 16]
WIDTHS = [128, 256, 512, 1024, 2048, 4096, 8192] if ON_GPU else [64, 128, 256, 512, 1024]
WIDE_CONTEXT = 64


def widened(hidden_size: int) -> ModelConfig:
    """TINY with another hidden size, heads and MLP growing with it: as many operations, other
    weights.
    """
    heads = hidden_size // 64
    return replace(
        TINY,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        intermediate_size=8 * hidden_size // 3 // 64 * 64,
    )


@lru_cache(maxsize=1)
def model_of(config: ModelConfig, dtype: torch.dtype = DTYPE) -> Decoder:
    """A decoder with random weights on the default device; one at a time is kept."""
    with torch.device(default_device()):
        return Decoder(config).to(dtype).eval().requires_grad_(False)


def step_of(config: ModelConfig, batch: int, context: int) -> tuple[Decoder, KVPool, Tensor]:
    """A model, a pool whose blocks hold `context` - 1 random tokens each, and the inputs of their
    next step: [4, B].
    """
    model = model_of(config)
    pool = LOCKSTEP.new_cache(model, batch, context)
    pool.k_slots.normal_()
    pool.v_slots.normal_()
    tokens = torch.randint(config.vocab_size, (batch,))
    lengths = torch.full((batch,), context)
    last_slots = (torch.arange(batch) + 1) * context - 1
    return model, pool, torch.stack([tokens, lengths - 1, last_slots, lengths])


def step_bytes(config: ModelConfig, batch: int, context: int, dtype: torch.dtype = DTYPE) -> int:
    """The least that a step reads: all weights but the rows of the embedding that are not looked
    up, and every sequence's cache.
    """
    with torch.device("meta"):
        model = Decoder(config)
    weights = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.embed_tokens.weight.numel()
    return dtype.itemsize * weights + batch * context * config.kv_bytes_per_token(dtype.itemsize)


def step_floor_s(
    config: ModelConfig, batch: int, context: int, dtype: torch.dtype = DTYPE
) -> float:
    """Seconds to read weights and caches once, at this machine's bandwidth."""
    return read_floor_s(step_bytes(config, batch, context, dtype))


def shape_of(config: ModelConfig, **facts: int) -> str:
    """The facts of a plot's caption."""
    threads = () if ON_GPU else (f"threads {torch.get_num_threads()}",)
    return " · ".join(
        [
            f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, heads "
            f"{config.num_attention_heads}/"
            f"{config.num_key_value_heads}, head_dim {config.head_dim}",
            *(f"{name} {value}" for name, value in facts.items()),
            *threads,
        ]
    )
