"""What the sampling benchmarks sample: a step of logits, requests with their own settings, and the
three ways to do it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_sampling import (
    SamplingBatch,
    read_tokens,
    sample_batch,
)
from lessons.l02_naive_attention.batched.requests import by_kernels
from lessons.l02_naive_attention.lab import peers
from lessons.l02_naive_attention.sampling import SamplingParams, probabilities, sample
from lessons.toolbox.measure.bench import needs, on_gpu

TOP_P = SamplingParams(temperature=0.8, top_p=0.95)
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=50,
    top_p=0.95,
    min_p=0.02,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.2,
)
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 100


@dataclass(frozen=True)
class Step:
    """The logits of a decode step, [B, V], and what each row has seen."""

    logits: Tensor
    prompts: list[list[int]]
    outputs: list[list[int]]


def step_of(rows: int, vocab_size: int, device: torch.device) -> Step:
    """Random logits of a spread like a language model's, random tokens."""
    logits = 2 * torch.randn(rows, vocab_size, device=device)
    prompts = torch.randint(vocab_size, (rows, PROMPT_TOKENS)).tolist()
    outputs = torch.randint(vocab_size, (rows, OUTPUT_TOKENS)).tolist()
    return Step(logits, prompts, outputs)


def allowed(step: Step, params: SamplingParams) -> Tensor:
    """Which tokens each row may draw, [B, V] bool on the CPU.

    Two samplers draw different tokens, so the harness compares whether they draw allowed ones. The
    tests prove the distribution.
    """
    rows = [
        probabilities(logits.cpu(), params, prompt, output)
        for logits, prompt, output in zip(step.logits, step.prompts, step.outputs)
    ]
    return torch.stack(rows) > 0


def are_allowed(tokens: list[int], mask: Tensor) -> list[bool]:
    """Whether each row's token is in the mask, [B, V]."""
    return mask[range(len(tokens)), tokens].tolist()


def row_by_row(params: SamplingParams):
    """A provider: sampling.sample."""

    def make(step: Step):
        rows = [params.seeded() for _ in step.logits]
        mask = allowed(step, params)

        def call() -> list[bool]:
            tokens = sample(step.logits, rows, step.prompts, step.outputs)
            return are_allowed(tokens, mask)

        return call

    return make


def as_a_batch(params: SamplingParams):
    """A provider: sample_batch, read on the host."""

    def make(step: Step):
        rows = [params] * len(step.logits)
        mask = allowed(step, params)
        batch = SamplingBatch.of(rows, step.prompts, step.outputs, step.logits.device)

        def call() -> list[bool]:
            # append would change the penalties, and so what is allowed
            batch.drawn += 1
            return are_allowed(read_tokens(sample_batch(step.logits, batch)), mask)

        return call

    return make


def transformers_top_p(step: Step):
    """A provider: transformers' processors, which sort the batch, and torch.multinomial."""
    with needs("transformers"):
        from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper
    processors = [TemperatureLogitsWarper(TOP_P.temperature), TopPLogitsWarper(TOP_P.top_p)]
    mask = allowed(step, TOP_P)

    def call() -> list[bool]:
        scores = step.logits
        for processor in processors:
            scores = processor(None, scores)
        tokens = scores.softmax(dim=-1).multinomial(1).squeeze(1)
        return are_allowed(tokens.tolist(), mask)

    return call


def on_kernels(params: SamplingParams):
    """A provider: the kernels of batched/fused.py, read on the host."""

    @on_gpu
    def make(step: Step):
        mask = allowed(step, params)
        rows = [params] * len(step.logits)
        batch = by_kernels(SamplingBatch.of(rows, step.prompts, step.outputs, step.logits.device))

        def call() -> list[bool]:
            batch.drawn += 1
            return are_allowed(read_tokens(sample_batch(step.logits, batch)), mask)

        return call

    return make


def a_peer(draw: Callable[[Tensor, SamplingParams], Tensor], package: str):
    """A provider: a function of peers.py, read on the host."""

    @on_gpu
    def make(step: Step):
        mask = allowed(step, TOP_P)
        with needs(package):
            draw(step.logits, TOP_P)
        return lambda: are_allowed(draw(step.logits, TOP_P).tolist(), mask)

    return make


flashinfer_top_p = a_peer(peers.flashinfer_top_p, "flashinfer-python")
vllm_top_p = a_peer(peers.vllm_top_p, "vllm")
