"""What the benchmark runs: a model with random weights, because no time depends on them, its
inputs, and the bytes they are.

On a CPU the model has the shape of models/tiny, on a GPU that of Llama-3.2-1B.
"""

from functools import lru_cache

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.optimized import new_kv_cache
from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.measure.hardware import default_working_set_bytes, read_bandwidth
from lessons.toolbox.model.config import ModelConfig

ON_GPU = default_device().type == "cuda"
DTYPE = default_dtype()
TOLERANCE = 3e-2 if ON_GPU else 1e-4  # relative; 16 bits on a GPU, 32 on a CPU
CONFIG = (
    ModelConfig("llama", 128256, 2048, 16, 32, 8, 64, 8192, 2**17, tie_word_embeddings=True)
    if ON_GPU
    else ModelConfig("llama", 4096, 384, 6, 6, 2, 64, 1024, 2**17, tie_word_embeddings=True)
)
CONTEXT = 4096 if ON_GPU else 1024  # tokens of each sequence of the batch
SHAPE = (
    f"{CONFIG.num_hidden_layers} layers, hidden {CONFIG.hidden_size}, heads "
    f"{CONFIG.num_attention_heads}/"
    f"{CONFIG.num_key_value_heads}, head_dim {CONFIG.head_dim}"
    + ("" if ON_GPU else f" · threads {torch.get_num_threads()}")
)


@lru_cache
def model_of(dtype: torch.dtype) -> Decoder:
    """A decoder with random weights on the default device."""
    with torch.device(default_device()):
        return Decoder(CONFIG).to(dtype).eval().requires_grad_(False)


@lru_cache
def bandwidth(working_set_bytes: int) -> float:
    """Bytes/s at which this machine reads a working set again and again."""
    return read_bandwidth(default_device(), working_set_bytes)


def read_floor_s(read_bytes: int) -> float:
    """Seconds to read so many bytes: from memory on a GPU; from the caches where they fit on a CPU,
    whose caches stay warm.
    """
    return read_bytes / bandwidth(
        default_working_set_bytes(default_device()) if ON_GPU else read_bytes
    )


def weight_bytes(dtype: torch.dtype) -> int:
    """What a step reads of the model, in bytes. The embedding is the output head, so all of it."""
    return sum(p.numel() for p in model_of(dtype).parameters()) * dtype.itemsize


def step_bytes(context: int, dtype: torch.dtype = DTYPE) -> int:
    """The least that a step with `context` tokens in the cache reads, in bytes: all weights, all K
    and V.
    """
    return weight_bytes(dtype) + context * CONFIG.kv_bytes_per_token(dtype.itemsize)


def random_tokens(count: int, device: torch.device) -> Tensor:
    """[count] int64."""
    return torch.randint(CONFIG.vocab_size, (count,), device=device)


@torch.inference_mode()
def context_of(count: int, device: torch.device) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """tokens: [count], and K and V of all but the last, layer by layer: [([count - 1, Hkv, D],
    [count - 1, Hkv, D])].
    """
    tokens, cache = random_tokens(count, device), new_kv_cache(model_of(DTYPE), count)
    # in chunks, because a whole prompt's scores grow with its square
    for start in range(0, count - 1, 512):
        positions = torch.arange(start, min(start + 512, count - 1), device=device)
        model_of(DTYPE)(tokens[positions], positions, cache.attend)
    return tokens, [(k[: count - 1], v[: count - 1]) for k, v in zip(cache.keys, cache.values)]


def batch_inputs(sequences: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q: [B, Hq, D]; k, v: [B, CONTEXT, Hkv, D]; context_lens: [B]."""
    q, k, v = (
        torch.randn(sequences, *shape, CONFIG.head_dim, dtype=DTYPE, device=device)
        for shape in (
            (CONFIG.num_attention_heads,),
            (CONTEXT, CONFIG.num_key_value_heads),
            (CONTEXT, CONFIG.num_key_value_heads),
        )
    )
    return q, k, v, torch.full((sequences,), CONTEXT, dtype=torch.int32, device=device)


def batch_bytes(sequences: int) -> int:
    """K and V of one layer, in bytes."""
    return (
        sequences * CONTEXT * CONFIG.kv_bytes_per_token(DTYPE.itemsize) // CONFIG.num_hidden_layers
    )
