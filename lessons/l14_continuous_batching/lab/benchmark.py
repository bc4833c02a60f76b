"""Seconds of a whole job: static waves, waves whose rows leave, and continuous batching, beside
transformers; over the batch size, and over how unequal the answers are.

    python -m lessons.toolbox.measure.bench 14
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.sampling import GREEDY
from lessons.l03_kv_cache.lab.workload import ON_GPU, read_floor_s
from lessons.l11_cuda_graphs.naive import batch_loop, eager_step
from lessons.l14_continuous_batching import loop, naive
from lessons.l14_continuous_batching.lab.workload import TASKS, TEMPLATE, task_requests
from lessons.toolbox.measure.bench import Benchmark, needs
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.checkpoint import load_tokenizer

TINY = Path(__file__).parents[3] / "models" / "tiny"
JOB = 32  # requests of the text-to-code job
MIX_PLACES, MIX_REQUESTS, SHORT = 8, 32, 8  # of the mix: one answer in MIX_PLACES is long
EXACT = replace(GREEDY, ignore_eos=True)  # so that an answer has the length that the mix says
SHAPE = "models/tiny" + ("" if ON_GPU else f" · threads {torch.get_num_threads()}")


@lru_cache
def tiny() -> tuple[Decoder, object]:
    """The embedded model in float32 on the default device, and its tokenizer."""
    model = Decoder.from_pretrained(str(TINY)).to(default_device())
    return model, load_tokenizer(str(TINY))


def job(batch: int, device: torch.device) -> tuple:
    """(prompts, limits, sampling, batch) of the text-to-code job."""
    prompts, limits = task_requests(tiny()[1], JOB)
    return prompts, limits, GREEDY, batch


def mix(long: int, device: torch.device) -> tuple:
    """(prompts, limits, sampling, places): in each wave of MIX_PLACES one answer has `long`
    tokens.
    """
    prompts, _ = task_requests(tiny()[1], MIX_REQUESTS)
    limits = [long if i % MIX_PLACES == 0 else SHORT for i in range(MIX_REQUESTS)]
    return prompts, limits, EXACT, MIX_PLACES


# ---------------------------------------------------------------- providers


def static(prompts, limits, sampling, batch):
    """Waves padded to a rectangle; all wait for the longest."""
    model, _ = tiny()
    return lambda: naive.generate(model, prompts, limits, sampling, max_num_seqs=batch)


def lockstep(prompts, limits, sampling, batch):
    """Lesson 11's waves: rows leave, and no request comes in."""
    model, _ = tiny()
    return lambda: batch_loop(eager_step, model, prompts, limits, sampling, max_batch=batch)


def continuous(prompts, limits, sampling, batch):
    """Places are filled after every step."""
    model, _ = tiny()
    return lambda: loop.generate(model, prompts, limits, sampling, max_num_seqs=batch)


def peers():
    """lab/peers.py, where transformers is installed."""
    with needs("transformers"):
        from lessons.l14_continuous_batching.lab import peers
    return peers


def by_generate(prompts, limits, sampling, batch):
    """transformers' generate(), padded on the left."""
    model, module = tiny()[0], peers()
    return lambda: module.generate_in_waves(model, prompts, limits, batch)


def by_pipeline(prompts, limits, sampling, batch):
    """transformers' pipeline, from texts."""
    (model, tokenizer), module = tiny(), peers()
    texts = [
        TEMPLATE.format(name=name, args=args, task=task)
        for name, args, task, _ in (TASKS[i % len(TASKS)] for i in range(len(prompts)))
    ]
    return lambda: module.generate_by_pipeline(model, tokenizer, texts, limits, batch)


# ---------------------------------------------------------------- the floor


def floor_s(prompts, limits, sampling, batch) -> float:
    """Seconds to read what any schedule on so many places must read: the weights once a step, in as
    few steps as there may be, and each token's context once.
    """
    model, _ = tiny()
    steps = max(max(limits), -(-sum(limits) // batch))
    weights = sum(p.numel() for p in model.parameters()) * model.dtype.itemsize
    context = sum(n * len(p) + n * (n - 1) // 2 for p, n in zip(prompts, limits))
    kv = model.config.kv_bytes_per_token(model.dtype.itemsize)
    return steps * read_floor_s(weights) + context * kv * read_floor_s(2**26) / 2**26


BENCHMARKS = [
    Benchmark(
        name="l14_offline",
        title="An offline job at {x} places: continuous batching is {speedup:.1f}x faster than "
        "padded waves",
        x_name="places (batch size)",
        x_values=[1, 2, 4, 8, 16, 32],
        quick_x_values=[8, 32],
        inputs=job,
        providers={
            "static, padded": ("naive", static),
            "waves, rows leave": ("naive", lockstep),
            "continuous": ("optimized", continuous),
            "transformers generate": ("library", by_generate),
            "transformers pipeline": ("library", by_pipeline),
        },
        ylabel=f"time for {JOB} text-to-code tasks",
        floor_s=lambda batch: floor_s(*job(batch, default_device())),
        floor_label="weights once a step, fewest steps",
        dtype="float32",
        shape=SHAPE,
        tolerance=0.0,
    ),
    Benchmark(
        name="l14_mix",
        title="One answer in eight has {x} tokens, the others 8: continuous batching is "
        "{speedup:.1f}x faster",
        x_name="tokens of the long answers",
        x_values=[8, 16, 32, 64, 128],
        quick_x_values=[8, 32],
        inputs=mix,
        providers={
            "static, padded": ("naive", static),
            "waves, rows leave": ("naive", lockstep),
            "continuous": ("optimized", continuous),
        },
        ylabel=f"time for {MIX_REQUESTS} requests",
        floor_s=lambda long: floor_s(*mix(long, default_device())),
        floor_label="weights once a step, fewest steps",
        dtype="float32",
        shape=f"{SHAPE}, {MIX_PLACES} places",
        tolerance=0.0,
    ),
]
