"""Attention over the context: the score matrix, tiles, kernels and libraries; causal and full, all
heads and grouped; 8 bits.

    python -m lessons.toolbox.measure.bench 09

On a CPU the kernels are interpreted and not timed: `tiled_attention`, the same tiles in PyTorch,
stands in their place.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention import naive as lesson2
from lessons.l09_flash_attention.fa1 import flash_attention_fa1
from lessons.l09_flash_attention.hopper.fp8 import attention_fp8, flash_attention_fp8
from lessons.l09_flash_attention.hopper.specialized.triton_flash import (
    TILES,
    flash_attention_specialized,
)
from lessons.l09_flash_attention.lab import peers
from lessons.l09_flash_attention.lab.traffic import Shape
from lessons.l09_flash_attention.naive import attention, tiled_attention
from lessons.l09_flash_attention.optimized import flash_attention
from lessons.l09_flash_attention.tiles import Tiles, capability, has_e4m3
from lessons.l09_flash_attention.worklog.cuda_flash import flash_attention_cuda
from lessons.toolbox.measure.bench import Benchmark, Unavailable, on_gpu
from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.measure.hardware import this_machine, time_floor_s

ON_GPU = default_device().type == "cuda"
DTYPE = default_dtype()
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
# Llama-3-8B's, and the embedded model's
HEADS, GROUPED, HEAD_DIM = (32, 8, 128) if ON_GPU else (6, 2, 64)
CONTEXTS = [2**n for n in (range(11, 16) if ON_GPU else range(7, 12))]
CPU_TILES = Tiles(256, 256)  # large, because each step of the loop costs Python's time
LONGEST_FA1 = 4096  # keys: one program a head, all others wait
LONGEST_CUDA = 8192  # keys: no tensor cores


def shape_of(context: int, kv_heads: int, causal: bool) -> Shape:
    return Shape(context, context, HEADS, kv_heads, HEAD_DIM, DTYPE.itemsize, causal)


def floor_s(shape: Shape) -> float:
    """Seconds that the chip needs for both products of the pairs that are seen, and to move q, k, v
    and the output once.
    """
    return time_floor_s(shape.least_bytes, shape.flops, this_machine(), DTYPE)


def inputs_of(kv_heads: int, causal: bool):
    def inputs(context: int, device: torch.device):
        q = torch.randn(context, HEADS, HEAD_DIM, dtype=DTYPE, device=device)
        k, v = torch.randn(2, context, kv_heads, HEAD_DIM, dtype=DTYPE, device=device)
        return q, k, v, causal

    return inputs


def all_scores(q: Tensor, k: Tensor, v: Tensor, causal: bool):
    """Lesson 2's attention: every [Hq, T, T] intermediate in memory."""
    return lambda: lesson2.attention(q, k, v, causal=causal)


def tiles_in_pytorch(q: Tensor, k: Tensor, v: Tensor, causal: bool):
    if q.is_cuda:
        raise Unavailable("stands in for the kernel on a CPU")
    return lambda: tiled_attention(q, k, v, causal=causal, tiles=CPU_TILES)[0]


@on_gpu
def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool):
    # made once, as an engine does for all its layers
    starts = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    return lambda: flash_attention(q, k, v, starts, starts, causal=causal, max_seqlen_q=len(q))[0]


def hopper(stages: int):
    """The provider whose rings have so many tiles."""

    @on_gpu
    def provider(q: Tensor, k: Tensor, v: Tensor, causal: bool):
        if torch.cuda.get_device_capability(q.device)[0] != 9:
            raise Unavailable("needs a Hopper GPU")
        from lessons.l09_flash_attention.hopper.gluon_flash import flash_attention_hopper

        return lambda: flash_attention_hopper(q, k, v, causal=causal, stages=stages)[0]

    return provider


@on_gpu
def split_loop(q: Tensor, k: Tensor, v: Tensor, causal: bool):
    if capability(q.device) not in TILES:
        raise Unavailable("needs a Hopper or Blackwell GPU")
    return lambda: flash_attention_specialized(q, k, v, causal=causal)[0]


@on_gpu
def fa1(q: Tensor, k: Tensor, v: Tensor, causal: bool):
    if len(k) > LONGEST_FA1:
        raise Unavailable(f"beyond {LONGEST_FA1} keys one program a head takes seconds")
    return lambda: flash_attention_fa1(q, k, v, causal=causal)[0]


@on_gpu
def cuda(q: Tensor, k: Tensor, v: Tensor, causal: bool):
    if len(k) > LONGEST_CUDA:
        raise Unavailable(
            f"beyond {LONGEST_CUDA} keys arithmetic without tensor cores takes seconds"
        )
    return lambda: flash_attention_cuda(q, k, v, causal=causal)[0]


PROVIDERS = {
    "all scores": ("naive", all_scores),
    "FA-1 order": ("naive", fa1),
    "CUDA C++ twin": ("naive", cuda),
    "flash_attention": ("optimized", flash),
    "Triton, split": ("optimized", split_loop),
    "Hopper, Gluon": ("optimized", hopper(2)),
    "Hopper, Gluon, rings of 3": ("optimized", hopper(3)),
    "tiles in PyTorch": ("optimized", tiles_in_pytorch),
    **{f"SDPA {name}": ("library", peers.sdpa(name)) for name in peers.BACKENDS},
    "FlexAttention": ("library", peers.flex),
    "FlashInfer": ("library", peers.flashinfer),
    "flash-attn": ("library", peers.flash_attn),
}


def attention_benchmark(mask: str, heads: str, title: str) -> Benchmark:
    kv_heads, causal = {"mha": HEADS, "gqa": GROUPED}[heads], mask == "causal"
    return Benchmark(
        name=f"l09_{mask}_{heads}",
        title=title,
        x_name="tokens (queries and keys)",
        x_values=CONTEXTS,
        quick_x_values=CONTEXTS[:3],
        inputs=inputs_of(kv_heads, causal),
        providers=PROVIDERS,
        ylabel=f"{mask} attention",
        metric="flops",
        flops=lambda n: shape_of(n, kv_heads, causal).flops,
        bytes_moved=lambda n: shape_of(n, kv_heads, causal).least_bytes,
        floor_s=lambda n: floor_s(shape_of(n, kv_heads, causal)),
        floor_label="matrix products alone",
        dtype=DTYPE_NAME,
        shape=f"heads {HEADS}/{kv_heads}, head_dim {HEAD_DIM}"
        + ("" if ON_GPU else f" · threads {torch.get_num_threads()}"),
        tolerance=2e-2 if ON_GPU else 1e-4,
    )


# ---------------------------------------------------------------- 8 bits


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool):
    """The 16-bit kernel on a GPU, PyTorch tiles on a CPU: what the 8 bits are compared with."""
    return flash(q, k, v, causal) if q.is_cuda else tiles_in_pytorch(q, k, v, causal)


def eight_bits(q: Tensor, k: Tensor, v: Tensor, causal: bool):
    """With the rounding of q, k and v timed as well; on a CPU PyTorch rounds, and nothing becomes
    faster.
    """
    if not q.is_cuda:
        return lambda: attention_fp8(q, k, v, causal=causal)
    if not has_e4m3(q.device):
        raise Unavailable("needs a GPU of compute capability 8.9 or newer")
    return lambda: flash_attention_fp8(q, k, v, causal=causal)


def fp8_error(tokens: int, outliers: float, seed: int = 0) -> float:
    """Relative error of attention in E4M3 on random inputs. outliers: how much larger one channel
    of k is than the others.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, 2, 64, generator=generator) for _ in range(3))
    k[..., 3] *= outliers
    right = attention(q.double(), k.double(), v.double())[0]
    return float((attention_fp8(q, k, v) - right).norm() / right.norm())


BENCHMARKS = [
    attention_benchmark(
        "causal",
        "gqa",
        "Causal, grouped heads: tiles are {speedup:.1f}x as fast as all scores at {x} tokens",
    ),
    attention_benchmark(
        "causal", "mha", "Causal, no grouped heads: {speedup:.1f}x as fast at {x} tokens"
    ),
    attention_benchmark(
        "full", "gqa", "Without a mask, grouped heads: {speedup:.1f}x as fast at {x} tokens"
    ),
    attention_benchmark(
        "full", "mha", "Without a mask, no grouped heads: {speedup:.1f}x as fast at {x} tokens"
    ),
    Benchmark(
        name="l09_fp8",
        title="8 bits are rounded first, which takes time as well",
        x_name="tokens (queries and keys)",
        x_values=CONTEXTS[:-1],
        quick_x_values=CONTEXTS[:2],
        inputs=inputs_of(GROUPED, True),
        providers={
            "16 or 32 bits": ("naive", exact),
            "E4M3, rounding included": ("optimized", eight_bits),
        },
        ylabel="causal attention",
        flops=lambda n: shape_of(n, GROUPED, True).flops,
        dtype=f"{DTYPE_NAME} and float8_e4m3",
        shape=f"heads {HEADS}/{GROUPED}, head_dim {HEAD_DIM}",
        tolerance=0.2,
    ),
]
