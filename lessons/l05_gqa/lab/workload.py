"""What the benchmark runs: shapes, random inputs, a random model, and the bytes that they are. No
time depends on the numbers.

On a CPU sizes are small, float32, and the model has the shape of models/tiny; on a GPU they are
those that the goal names.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.lab.workload import CONFIG, DTYPE, ON_GPU, read_floor_s
from lessons.l05_gqa.lab.traffic import cached_bytes
from lessons.toolbox.measure.device import default_device

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3-8B
BATCH, CONTEXT = (16, 4096) if ON_GPU else (1, 1024)
CONTEXTS = [2**n for n in (range(10, 16) if ON_GPU else range(8, 14))]
SEQUENCES = [1, 2, 4, 8, 16, 32, 64] if ON_GPU else [1, 2, 4, 8]
MODEL_CONTEXT = 8192 if ON_GPU else 2048  # of the whole model's step
MODEL_KV_HEADS = [
    n for n in range(1, CONFIG.num_attention_heads + 1) if CONFIG.num_attention_heads % n == 0
]
DTYPE_NAME = str(DTYPE).removeprefix("torch.")


def inputs_of(
    batch: int, context: int, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q: [B, Hq, D]; k, v: [B, context, Hkv, D]; context_lens: [B], all full."""
    q, k, v = (
        torch.randn(batch, *shape, HEAD_DIM, dtype=DTYPE, device=default_device())
        for shape in ((num_heads,), (context, num_kv_heads), (context, num_kv_heads))
    )
    return q, k, v, torch.full((batch,), context, dtype=torch.int32, device=default_device())


def floor_of(batch: int, context: int, num_kv_heads: int) -> tuple[int, float]:
    """Bytes of K and V of one layer, and the seconds to read them once."""
    moved = batch * cached_bytes(context, num_kv_heads, HEAD_DIM, DTYPE.itemsize)
    return moved, read_floor_s(moved)


def shape_of(heads: str, **sizes: int) -> str:
    """The facts of a plot's caption."""
    facts = [
        f"one layer, heads {heads}, head_dim {HEAD_DIM}",
        *(f"{name} {size}" for name, size in sizes.items()),
    ]
    return ", ".join(facts) + ("" if ON_GPU else f" · threads {torch.get_num_threads()}")


# ---------------------------------------------------------------- a whole model's step


@lru_cache
def model_of(num_kv_heads: int) -> Decoder:
    """A decoder with random weights on the default device that differs in its KV heads alone."""
    with torch.device(default_device()):
        return (
            Decoder(replace(CONFIG, num_key_value_heads=num_kv_heads))
            .to(DTYPE)
            .eval()
            .requires_grad_(False)
        )


def model_inputs(num_kv_heads: int, device: torch.device) -> tuple[Decoder, Tensor, Tensor]:
    """The model, and random K and V of MODEL_CONTEXT - 1 tokens, each [layers, tokens, Hkv, D]."""
    shape = (CONFIG.num_hidden_layers, MODEL_CONTEXT - 1, num_kv_heads, CONFIG.head_dim)
    return model_of(num_kv_heads), *(
        torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2)
    )


def model_floor_s(num_kv_heads: int) -> float:
    """Seconds to read all weights and all K and V once."""
    model = model_of(num_kv_heads)
    kv = MODEL_CONTEXT * model.config.kv_bytes_per_token(DTYPE.itemsize)
    return read_floor_s(kv + sum(p.nbytes for p in model.parameters()))
