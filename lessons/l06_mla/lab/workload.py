"""What the benchmark runs: one attention layer of DeepSeek-V2-Lite with random weights, because no
time depends on them.

16 heads, latents of 512 + 64, no low rank of q.
"""

from functools import lru_cache

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.generate import Rung
from lessons.l06_mla.deepseek import MLAttention, latent
from lessons.l06_mla.lab.counts import decode_bytes
from lessons.l06_mla.naive import LatentPool
from lessons.l06_mla.optimized import ABSORBED
from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.measure.hardware import default_working_set_bytes, read_bandwidth
from lessons.toolbox.model.config import MLAConfig, ModelConfig

ON_GPU = default_device().type == "cuda"
DTYPE = default_dtype()
TOLERANCE = 3e-2 if ON_GPU else 1e-4  # relative; 16 bits on a GPU, 32 on a CPU
CONFIG = ModelConfig(
    "deepseek_v2",
    102400,
    2048,
    1,
    16,
    16,
    192,
    10944,
    163840,
    v_head_dim=128,
    mla=MLAConfig(None, 512, 128, 64, 128),
)
CACHED = 8192 if ON_GPU else 2048  # tokens before the new ones of the chunk
THREADS = "" if ON_GPU else f" · threads {torch.get_num_threads()}"
SHAPE = f"one layer: hidden 2048, 16 heads, latent 512 + 64{THREADS}"


class OneLayer(Decoder):
    """As much of a DeepseekDecoder as a cache of latents needs: the attention of one layer."""

    def __init__(self):
        torch.nn.Module.__init__(self)  # not Decoder's, because one layer is enough
        self.config = CONFIG
        layer = torch.nn.Module()
        layer.self_attn = MLAttention(CONFIG)
        self.layers = torch.nn.ModuleList([layer])

    @property
    def attention(self) -> MLAttention:
        return self.layers[0].self_attn

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


@lru_cache
def one_layer() -> OneLayer:
    """The layer on the default device, in DTYPE."""
    with torch.device(default_device()):
        return OneLayer().to(DTYPE).eval().requires_grad_(False)


@torch.inference_mode()
def layer_inputs(
    new_tokens: int, cached: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [new_tokens, hidden_size]; the cached tokens' c_kv: [cached, 1, rank] and k_pe: [cached,
    1, rope].
    """
    x = torch.randn(new_tokens + cached, CONFIG.hidden_size, dtype=DTYPE, device=device)
    return x[:new_tokens], *one_layer().attention.latents(x[new_tokens:])


def pool_of(c_kv: Tensor, k_pe: Tensor, room: int, rung: Rung = ABSORBED) -> LatentPool:
    """A pool that holds c_kv: [cached, 1, rank] and k_pe: [cached, 1, rope], with room for `room`
    tokens more.
    """
    pool = rung.new_cache(latent(one_layer()), 1, len(c_kv) + room)
    pool.k_slots[0, : len(c_kv)] = torch.cat([c_kv, k_pe], dim=-1)
    # Every angle 0, for the library too: the cost is the same, and the rows above need no turning.
    half = pool.cos_sin_cache.shape[1] // 2
    pool.cos_sin_cache[:, :half], pool.cos_sin_cache[:, half:] = 1, 0
    return pool


@lru_cache
def bandwidth(working_set_bytes: int) -> float:
    """Bytes/s at which this machine reads a working set again and again."""
    return read_bandwidth(default_device(), working_set_bytes)


def step_bytes(context: int) -> int:
    """The least that a decode step of the layer reads, in bytes: its weights and the latents."""
    weights = sum(p.numel() for p in one_layer().parameters()) * DTYPE.itemsize
    return weights + decode_bytes(1, context, bytes_per_value=DTYPE.itemsize)


def read_floor_s(size_bytes: int) -> float:
    """Seconds to read so much: from memory on a GPU; from the caches where it fits on a CPU, whose
    caches stay warm.
    """
    return size_bytes / bandwidth(
        default_working_set_bytes(default_device()) if ON_GPU else size_bytes
    )
