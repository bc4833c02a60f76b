"""What the benchmark runs: a model with random weights, its inputs, and how many bytes they are.

No time depends on the weights.

On a CPU the model has the shape of models/tiny, on a GPU that of Llama-3.2-1B.
"""

from functools import lru_cache

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.optimized import PREALLOCATED
from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.measure.hardware import default_working_set_bytes, read_bandwidth
from lessons.toolbox.model.config import ModelConfig

ON_GPU = default_device().type == "cuda"
DTYPE = default_dtype()
TOLERANCE = 3e-2 if ON_GPU else 1e-4  # relative; 16 bits on a GPU, 32 on a CPU
LLAMA_3_2_1B = ModelConfig(
    "llama", 128256, 2048, 16, 32, 8, 64, 8192, 2**17, tie_word_embeddings=True
)
EMBEDDED = ModelConfig("llama", 4096, 384, 6, 6, 2, 64, 1024, 2**17, tie_word_embeddings=True)
CONFIG = LLAMA_3_2_1B if ON_GPU else EMBEDDED
CONTEXT = 4096 if ON_GPU else 1024  # tokens of each sequence of the batch
CHUNK = 512  # tokens of a prompt in one pass, because the scores of all would grow with its square
HEADS = f"{CONFIG.num_attention_heads}/{CONFIG.num_key_value_heads}"
THREADS = "" if ON_GPU else f" · threads {torch.get_num_threads()}"
SHAPE = (
    f"{CONFIG.num_hidden_layers} layers, hidden {CONFIG.hidden_size}, heads {HEADS}, "
    f"head_dim {CONFIG.head_dim}{THREADS}"
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
    working_set = default_working_set_bytes(default_device()) if ON_GPU else read_bytes
    return read_bytes / bandwidth(working_set)


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


def context_of(count: int, device: torch.device) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """tokens: [count], and K and V of all but the last, layer by layer: [([count - 1, Hkv, D],
    [count - 1, Hkv, D])].
    """
    tokens = random_tokens(count, device)
    pool = pool_of(tokens[:-1].tolist(), count)
    k_cache, v_cache = pool.blocks(pool.k_slots), pool.blocks(pool.v_slots)
    held = count - 1
    past = []
    for layer in range(CONFIG.num_hidden_layers):
        past.append((k_cache[layer, 0, :held], v_cache[layer, 0, :held]))
    return tokens, past


@torch.inference_mode()
def pool_of(tokens: list[int], room: int) -> KVPool:
    """A pool for one sequence of `room` tokens at most, which holds `tokens`."""
    model = model_of(DTYPE)
    pool = PREALLOCATED.new_cache(model, 1, room)
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        batch = new_batch([(chunk, start)], pool.block_size, model.device)
        model(batch.tokens, pool.attending(batch))
    return pool


def batch_inputs(sequences: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q: [B, Hq, D]; k, v: [B, CONTEXT, Hkv, D]; context_lens: [B]."""
    kv_shape = (sequences, CONTEXT, CONFIG.num_key_value_heads, CONFIG.head_dim)
    q_shape = (sequences, CONFIG.num_attention_heads, CONFIG.head_dim)
    q = torch.randn(q_shape, dtype=DTYPE, device=device)
    k = torch.randn(kv_shape, dtype=DTYPE, device=device)
    v = torch.randn(kv_shape, dtype=DTYPE, device=device)
    return q, k, v, torch.full((sequences,), CONTEXT, dtype=torch.int32, device=device)


def batch_bytes(sequences: int) -> int:
    """K and V of one layer, in bytes."""
    per_layer = CONFIG.kv_bytes_per_token(DTYPE.itemsize) // CONFIG.num_hidden_layers
    return sequences * CONTEXT * per_layer
