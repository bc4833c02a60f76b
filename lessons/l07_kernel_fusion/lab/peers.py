"""What the benchmark compares with: PyTorch's compiler, Liger-Kernel, and a copy of as many bytes;
and the inputs of each size.

On a GPU the sizes are those of large models beyond the L2 cache; on a CPU small ones, in float32.
"""

import os
import shutil
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.batch import new_batch
from lessons.l05_gqa.optimized import IN_GROUPS
from lessons.toolbox.measure.bench import Unavailable, needs, on_gpu
from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.measure.hardware import copy_bandwidth, read_bandwidth
from lessons.toolbox.model.config import ModelConfig

ON_GPU = default_device().type == "cuda"
DTYPE = default_dtype()
TOLERANCE = 3e-2 if ON_GPU else 1e-4  # relative; 16 bits on a GPU, 32 on a CPU
EPS = 1e-5
# of a tensor whose rows vary in length: 128 MiB in 16 bits, 4 MiB in 32
VALUES = 2**26 if ON_GPU else 2**20
HIDDEN = 4096  # values in a row of the residual stream
INNER = 14336 if ON_GPU else 4096  # values in a row of the MLP
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LAYERS, CONTEXT = 8, 256  # of the decoder whose step is timed
THREADS = "" if ON_GPU else f" · threads {torch.get_num_threads()}"


# ---------------------------------------------------------------- inputs and floors


def rows(count: int, size: int, device: torch.device) -> Tensor:
    """[count, size], normal."""
    return torch.randn(count, size, device=device).to(DTYPE)


def weight(size: int, device: torch.device) -> Tensor:
    """[size], around 1."""
    return (1 + 0.1 * torch.randn(size, device=device)).to(DTYPE)


@lru_cache
def copy_floor_s(moved_bytes: int) -> float:
    """Seconds that this machine takes to copy as many bytes, reads and writes counted."""
    return moved_bytes / copy_bandwidth(default_device(), moved_bytes)


# ---------------------------------------------------------------- PyTorch's compiler


def compiled(function: Callable) -> Callable:
    """A provider: torch.compile of a function, for one size at a time. Raises Unavailable where it
    has no C++ compiler.
    """

    def make(*inputs):
        if not ON_GPU and not any(
            shutil.which(name)
            for name in (os.environ.get("CXX", ""), "g++", "clang++", "cl")
            if name
        ):
            raise Unavailable("torch.compile needs a C++ compiler on a CPU: install g++ or clang")
        torch.compiler.reset()  # because it gives up on a function after eight sizes
        run = torch.compile(function, dynamic=False)
        inputs = own(inputs)
        return lambda: run(*inputs)

    return make


def eager(function: Callable) -> Callable:
    """A provider: the function as it is."""

    def make(*inputs):
        inputs = own(inputs)
        return lambda: function(*inputs)

    return make


def own(inputs: tuple) -> tuple:
    """Copies of the tensors, any shape, because add_rms_norm changes its residual, which the other
    providers want as it was.
    """
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in inputs)


# ---------------------------------------------------------------- Liger-Kernel


def liger(call: Callable) -> Callable:
    """A provider: call(Liger's functions, *inputs), on a GPU that has Liger-Kernel installed."""

    @on_gpu
    def make(*inputs):
        with needs("liger-kernel"):
            from liger_kernel.ops import fused_add_rms_norm, rms_norm, swiglu
        functions = (
            rms_norm.LigerRMSNormFunction,
            fused_add_rms_norm.LigerFusedAddRMSNormFunction,
            swiglu.LigerSiLUMulFunction,
        )
        inputs = own(inputs)
        return lambda: call(functions, *inputs)

    return make


# offset 0 and casting mode "llama": the rounding of ours; in_place False concerns their backward
# pass.
liger_rms_norm = liger(lambda f, x, weight, eps: f[0].apply(x, weight, eps, 0.0, "llama", False))
liger_add_rms_norm = liger(
    lambda f, x, residual, weight, eps: f[1].apply(x, residual, weight, eps, 0.0, "llama", False)[0]
)
liger_silu_mul = liger(lambda f, gate, up: f[2].apply(gate, up))


# ---------------------------------------------------------------- a decode step


@lru_cache
def model_of(hidden_size: int) -> Decoder:
    """A decoder with random weights on the default device, as wide as asked, with a small
    vocabulary.
    """
    config = ModelConfig(
        "llama",
        4096,
        hidden_size,
        LAYERS,
        hidden_size // 64,
        max(1, hidden_size // 256),
        64,
        3 * hidden_size,
        2**12,
        tie_word_embeddings=True,
    )
    with torch.device(default_device()):
        return Decoder(config).to(DTYPE).eval().requires_grad_(False)


def weight_bytes(hidden_size: int) -> int:
    """What a step reads of the model, in bytes: all of it, because the embedding is the output
    head.
    """
    return sum(p.nbytes for p in model_of(hidden_size).parameters())


@lru_cache
def read_floor_s(hidden_size: int) -> float:
    """Seconds to read the model's weights once."""
    return weight_bytes(hidden_size) / read_bandwidth(default_device(), weight_bytes(hidden_size))


def step(twin: Callable) -> Callable:
    """A provider: one token through twin(model) over a cache of CONTEXT others."""

    @torch.inference_mode()
    def make(token: Tensor, hidden_size: int):
        model = twin(model_of(hidden_size))
        pool = IN_GROUPS.new_cache(model, 1, CONTEXT + 1)
        context = new_batch([(range(CONTEXT), 0)], CONTEXT + 1, token.device)
        model(context.tokens, pool.attending(context))
        batch = new_batch([(token.tolist(), CONTEXT)], CONTEXT + 1, token.device)

        @torch.inference_mode()
        def run():
            return model.logits(model(batch.tokens, pool.attending(batch)))

        return run

    return make
