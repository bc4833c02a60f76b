"""The rungs of the ladder, in order: which lesson, what it is called, and where its generate()
lives.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from lessons.l02_naive_attention.decoder import Decoder
from lessons.toolbox.model.config import ModelConfig


def every_model(config: ModelConfig) -> bool:
    """The lower rungs serve any decoder: latent attention comes to them expanded."""
    return True


def heads_of_kv(config: ModelConfig) -> bool:
    """Caches that rotate whole heads, and kernels that read them, need keys of their own: all but
    DeepSeek.
    """
    return config.mla is None


def latent_kv(config: ModelConfig) -> bool:
    """Lesson 6 keeps latents: DeepSeek alone has them."""
    return config.mla is not None


@dataclass(frozen=True)
class Rung:
    """One step of the ladder. `serves` tells whether it has anything to show on a model of this
    shape.
    """

    lesson: str
    name: str
    target: str  # "module:function"
    has_cache: bool = True
    serves: Callable[[ModelConfig], bool] = every_model

    @property
    def generate(self):
        """The function, looked up at each call, so that a learner's drop-in counts."""
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)


RUNGS = (
    Rung(
        "02", "no cache: recompute", "lessons.l02_naive_attention.naive:generate", has_cache=False
    ),
    Rung(
        "02",
        "no cache, fused softmax",
        "lessons.l02_naive_attention.optimized:generate",
        has_cache=False,
    ),
    Rung("03", "KV cache, concatenated", "lessons.l03_kv_cache.naive:generate"),
    Rung("03", "KV cache, preallocated", "lessons.l03_kv_cache.optimized:generate"),
    Rung(
        "04",
        "rotated on the way into the cache",
        "lessons.l04_positions.optimized:generate",
        serves=heads_of_kv,
    ),
    Rung("05", "KV heads repeated", "lessons.l05_gqa.naive:generate", serves=heads_of_kv),
    Rung("05", "KV heads read in groups", "lessons.l05_gqa.optimized:generate", serves=heads_of_kv),
    Rung(
        "06", "latents, expanded at every step", "lessons.l06_mla.naive:generate", serves=latent_kv
    ),
    Rung("06", "latents, absorbed", "lessons.l06_mla.optimized:generate", serves=latent_kv),
    Rung("07", "fused layers", "lessons.l07_kernel_fusion.optimized:generate", serves=heads_of_kv),
    Rung(
        "09",
        "prompts by FlashAttention",
        "lessons.l09_flash_attention.optimized:generate",
        serves=heads_of_kv,
    ),
    Rung(
        "10", "steps in splits", "lessons.l10_flash_decoding.optimized:generate", serves=heads_of_kv
    ),
    Rung(
        "11",
        "32 requests in lockstep",
        "lessons.l11_cuda_graphs.naive:generate",
        serves=heads_of_kv,
    ),
    Rung(
        "11",
        "in lockstep, CUDA graphs",
        "lessons.l11_cuda_graphs.optimized:generate",
        serves=heads_of_kv,
    ),
)


class RungFailed(Exception):
    """A rung raised, on a learner's code perhaps: one line for the person at the keyboard, its
    cause for a debugger.
    """


def call_rung(rung: Rung, model: Decoder, prompts, limits, on_token):
    """The rung's generate, with the arguments in the order in which peers take them. Raises
    RungFailed, whatever it raised.
    """
    try:
        return rung.generate(model, prompts, limits, on_token=on_token)
    except Exception as error:
        raise RungFailed(f"{rung.name} failed: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
