"""The rungs of the ladder, in order: which lesson, what it is called, and what runs it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from lessons.l02_naive_attention import naive as recompute
from lessons.l02_naive_attention import optimized as fused_softmax
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.cache import AttentionOps
from lessons.l03_kv_cache.generate import Rung, generate
from lessons.l03_kv_cache.naive import CONCATENATED
from lessons.l03_kv_cache.optimized import PREALLOCATED
from lessons.l04_positions.optimized import ROTATED_ON_THE_WAY
from lessons.l05_gqa.naive import REPEATED
from lessons.l05_gqa.optimized import IN_GROUPS
from lessons.l06_mla.naive import EXPANDED, LATENTS_TORCH, LatentPool
from lessons.l06_mla.optimized import ABSORBED, LATENTS_06, AbsorbedPool
from lessons.l07_kernel_fusion.fused_decoder import FUSED_LAYERS
from lessons.l09_flash_attention.naive import LESSON_09_TORCH
from lessons.l09_flash_attention.optimized import FLASH_PROMPTS, LESSON_09
from lessons.l10_flash_decoding.mla import LATENTS_10
from lessons.l10_flash_decoding.naive import LESSON_10_TORCH
from lessons.l10_flash_decoding.optimized import IN_SPLITS
from lessons.l11_cuda_graphs import naive as lockstep
from lessons.l11_cuda_graphs import optimized as graphs
from lessons.l12_paged_kv import generate as paged
from lessons.l13_prefix_caching import generate as prefixes
from lessons.l14_continuous_batching import loop as continuous
from lessons.l15_chunked_prefill import generate as chunked
from lessons.l16_speculative_sampling import generate as speculative
from lessons.toolbox.exercises.drop_ins import blamed
from lessons.toolbox.model.config import ModelConfig
from reference.features.states import generate as hybrid
from reference.ladder import engine_rung
from reference.ladder.contest import first_line


@dataclass(frozen=True)
class Step:
    """One rung of the ladder.

    run(model, prompts, max_new_tokens, sampling, on_token) -> the generated tokens of each prompt.
    stand_in: what PyTorch stands in for on a CPU, so that this rung's speed there says nothing.
    keeps_latents: its cache holds DeepSeek's latents; the other caches hold k and v of all heads.
    """

    lesson: str
    name: str
    run: Callable
    has_cache: bool = True
    in_batches: bool = False
    stand_in: str | None = None
    keeps_latents: bool = False


def cached(lesson: str, rung: Rung, stand_in: str | None = None) -> Step:
    """A rung of lesson 3's loop as a step of the ladder."""
    run = partial(generate, rung=rung)
    keeps_latents = issubclass(rung.cache, LatentPool)
    return Step(lesson, rung.name, run, stand_in=stand_in, keeps_latents=keeps_latents)


def with_latents(name: str, kernels: AttentionOps, stand_ins: AttentionOps) -> Rung:
    """A rung above lesson 6 on a model with latents: fused layers, absorbed queries."""
    return Rung(name, kernels, stand_ins, prepare=lockstep.fused_latents, cache=AbsorbedPool)


BELOW = (
    Step("02", "no cache: recompute", recompute.generate, has_cache=False),
    Step(
        "02",
        "no cache, fused softmax",
        fused_softmax.generate,
        has_cache=False,
        stand_in="the softmax kernel",
    ),
    cached("03", CONCATENATED),
    cached("03", PREALLOCATED),
    cached("04", ROTATED_ON_THE_WAY, "the kernel that rotates and stores"),
    cached("05", REPEATED),
    cached("05", IN_GROUPS),
)
IN_BATCHES = (
    Step("11", "32 requests in lockstep", lockstep.generate, in_batches=True),
    Step(
        "11",
        "in lockstep, CUDA graphs",
        graphs.generate,
        in_batches=True,
        stand_in="eager steps for a graph",
    ),
    Step("12", "paged cache", paged.generate, in_batches=True),
    Step("13", "prefix cache", prefixes.generate, in_batches=True),
    Step("14", "continuous batching", continuous.generate, in_batches=True),
    Step("15", "chunked prefill", chunked.generate, in_batches=True),
    Step("16", "n-grams, verified", speculative.generate, in_batches=True),
    Step("12-15", "the engine", engine_rung.generate, in_batches=True),
)
FUSED, FLASH, SPLITS = "the fused kernels", "the flash kernel", "programs that wait for SMs"
WITH_HEADS = (
    *BELOW,
    cached("07", FUSED_LAYERS, FUSED),
    cached("09", FLASH_PROMPTS, FLASH),
    cached("10", IN_SPLITS, SPLITS),
    *IN_BATCHES,
)
LATENTS_09 = LATENTS_06._replace(prefill=LESSON_09.prefill)
LATENTS_09_TORCH = LATENTS_TORCH._replace(prefill=LESSON_09_TORCH.prefill)
LATENTS_10_TORCH = LATENTS_09_TORCH._replace(decode=LESSON_10_TORCH.decode)
WITH_LATENTS = (
    *BELOW,
    cached("06", EXPANDED),
    cached("06", ABSORBED),
    cached("07", with_latents(FUSED_LAYERS.name, LATENTS_06, LATENTS_TORCH), FUSED),
    cached("09", with_latents(FLASH_PROMPTS.name, LATENTS_09, LATENTS_09_TORCH), FLASH),
    cached("10", with_latents(IN_SPLITS.name, LATENTS_10, LATENTS_10_TORCH), SPLITS),
    *(replace(step, keeps_latents=True) for step in IN_BATCHES),
)


# The lessons whose subject is a kernel of attention. It neither caps scores nor adds sinks, so on a
# model that asks for these PyTorch would run in its place, and the rung show nothing of its lesson.
ATTENTION_KERNELS = ("no cache, fused softmax", REPEATED.name, IN_GROUPS.name)
ATTENTION_KERNELS += (FLASH_PROMPTS.name, IN_SPLITS.name)


# The rungs between them hold K and V alone.
WITH_STATES = (
    Step("27", BELOW[0].name, hybrid.generate, has_cache=False),
    Step("27", hybrid.HELD.name, hybrid.generate_held),
    replace(IN_BATCHES[-1], lesson="12-27"),
)


def rungs_of(config: ModelConfig) -> tuple[Step, ...]:
    """The ladder of a model: from lesson 6 on, one with latents has rungs of its own, one that caps
    its scores lacks some, and one with states most.
    """
    if config.state is not None:
        return WITH_STATES
    if config.has_score_rules:
        return tuple(step for step in WITH_HEADS if step.name not in ATTENTION_KERNELS)
    return WITH_HEADS if config.mla is None else WITH_LATENTS


def left_out(config: ModelConfig) -> str | None:
    """Which rungs the ladder of this model lacks, and why, in one line."""
    if config.state is not None:
        return f"not run: lessons 3 to 16, whose caches hold no states as {config.model_type}'s"
    if not config.has_score_rules:
        return None
    return (
        f"not run, because their kernels do not cap scores or add sinks as {config.model_type} "
        f"does: {', '.join(ATTENTION_KERNELS)}; all others attend in PyTorch"
    )


class RungFailed(ValueError):
    """A rung raised, on a learner's code perhaps: one line for the person at the keyboard, its
    cause for a debugger.
    """


def call_rung(rung: Step, model: Decoder, prompts, limits, on_token):
    """The rung, with the arguments in the order in which peers take them. Raises RungFailed,
    whatever it raised.
    """
    try:
        return rung.run(model, prompts, limits, on_token=on_token)
    except Exception as error:
        raise RungFailed(f"{rung.name} failed: {blamed(error) or first_line(error)}") from error
