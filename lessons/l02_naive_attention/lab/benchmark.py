"""Attention over longer and longer prompts, and its softmax alone: what N×N scores cost, in one
pass and in many. Then sampling, row by row and as a batch.

    python -m lessons.toolbox.measure.bench 02

On a CPU the kernel would be interpreted and is not timed: PyTorch's versions of the same steps
stand for it.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lessons.l02_naive_attention import naive, optimized
from lessons.l02_naive_attention.lab.traffic import kernel_pass
from lessons.l02_naive_attention.lab.workload import (
    EVERYTHING,
    TOP_P,
    as_a_batch,
    flashinfer_top_p,
    on_kernels,
    row_by_row,
    step_of,
    transformers_top_p,
    vllm_top_p,
)
from lessons.toolbox.measure.bench import Benchmark, Unavailable, compiled, on_gpu
from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.measure.hardware import measured_ceilings, time_floor_s

# on a GPU: Llama-3-8B's
HEADS, KV_HEADS, HEAD_DIM = {"cpu": (8, 2, 64), "cuda": (32, 8, 128)}[default_device().type]
CONTEXTS = {"cpu": [128, 256, 512, 1024, 2048], "cuda": [128, 256, 512, 1024, 2048, 4096, 8192]}[
    default_device().type
]
DTYPE = default_dtype()
# compiled by PyTorch, where ours cannot be timed
ONE_PASS = {"cpu": "optimized", "cuda": "library"}[default_device().type]


def prompt(tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q: [tokens, HEADS, HEAD_DIM]; k, v: [tokens, KV_HEADS, HEAD_DIM], normally distributed."""
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return tuple(
        torch.randn(tokens, count, HEAD_DIM, device=device, dtype=DTYPE) for count in heads
    )


def sdpa(backend: SDPBackend, repeat: bool = False):
    """A provider for one of PyTorch's own attentions. repeat: it wants a KV head for each query
    head, so copy them each call.
    """

    def make(q: Tensor, k: Tensor, v: Tensor):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, T, D]
        group = q.shape[1] // k.shape[1] if repeat else 1

        def call() -> Tensor:
            keys, values = (x.repeat_interleave(group, 1) if repeat else x for x in (k, v))
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(
                    q, keys, values, is_causal=True, enable_gqa=not repeat
                )
            return out[0].transpose(0, 1)

        try:
            call()
        except RuntimeError as error:
            known = "No viable backend" in str(error) or "No available kernel" in str(error)
            raise Unavailable(
                "no such kernel here" if known else str(error).splitlines()[0]
            ) from None
        return call

    return make


def attention_floor_s(tokens: int) -> float:
    """Seconds for q, k, v and the output once, and for the half of the products that a causal mask
    leaves.
    """
    moved = 2 * tokens * (HEADS + KV_HEADS) * HEAD_DIM * DTYPE.itemsize
    return time_floor_s(moved, 2 * HEADS * HEAD_DIM * tokens**2, measured_ceilings(), DTYPE)


def softmax_bytes(tokens: int) -> float:
    """The N×N scores that a causal mask shows read once, all probabilities written once."""
    one_pass = kernel_pass(HEADS, tokens, tokens, DTYPE.itemsize)
    return one_pass.read_bytes + one_pass.written_bytes


def masked_softmax(scores: Tensor) -> Tensor:
    """Scale, mask and softmax as naive.attention does them. scores: [H, T, T] -> [H, T, T]."""
    sees = naive.causal_mask(*scores.shape[1:], device=scores.device)
    return naive.masked_softmax(scores * HEAD_DIM**-0.5, sees)


def logits_floor_s(numel: int) -> float:
    """Seconds to read as many float32 logits once, at the measured bandwidth."""
    return time_floor_s(4 * numel, 0, measured_ceilings(), torch.float32)


ROWS, VOCAB_SIZE = 32, 4096
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
SHAPE = f"{HEADS} query heads, {KV_HEADS} KV heads of {HEAD_DIM}, one prompt, causal"
TOLERANCE = 2e-2 if DTYPE.itemsize == 2 else 1e-4
# Measured as well, but more lines than five are not read. They lie on those that are drawn.
NOT_DRAWN = ["SDPA math", "SDPA efficient", "SDPA cuDNN"]
if default_device().type == "cuda":
    NOT_DRAWN += ["naive, head by head", "heads as rows, PyTorch"]
BENCHMARKS = [
    Benchmark(
        name="l02_attention",
        title="At {x} tokens naive attention takes {naive_growth:.0f}x as long as at {first}",
        x_name="tokens of the prompt",
        x_values=CONTEXTS,
        quick_x_values=CONTEXTS[:3],
        inputs=prompt,
        providers={
            "naive": ("naive", lambda q, k, v: lambda: naive.attention(q, k, v)),
            "naive, head by head": (
                "naive",
                lambda q, k, v: lambda: naive.attention_per_head(q, k, v),
            ),
            "fused softmax kernel": (
                "optimized",
                on_gpu(lambda q, k, v: lambda: optimized.attention(q, k, v)),
            ),
            "heads as rows, PyTorch": (
                "optimized",
                lambda q, k, v: lambda: optimized.attention_torch(q, k, v),
            ),
            "naive, torch.compile": ("library", compiled(naive.attention)),
            "SDPA math": ("library", sdpa(SDPBackend.MATH)),
            "SDPA flash": ("library", sdpa(SDPBackend.FLASH_ATTENTION)),
            "SDPA efficient": ("library", sdpa(SDPBackend.EFFICIENT_ATTENTION, repeat=True)),
            "SDPA cuDNN": ("library", sdpa(SDPBackend.CUDNN_ATTENTION)),
        },
        ylabel="time",
        floor_s=attention_floor_s,
        floor_label="roofline: q, k, v, o and causal FLOPs",
        dtype=DTYPE_NAME,
        shape=SHAPE,
        tolerance=TOLERANCE,
        not_drawn=NOT_DRAWN,
    ),
    Benchmark(
        name="l02_softmax",
        title="Scale, mask, softmax over {x}×{x} scores: one pass is {speedup:.1f}x as fast as "
        "many",
        x_name="tokens of the prompt",
        x_values=CONTEXTS[1:],
        quick_x_values=CONTEXTS[1:3],
        inputs=lambda n, device: (torch.randn(HEADS, n, n, device=device, dtype=DTYPE),),
        providers={
            "step by step": ("naive", lambda scores: lambda: masked_softmax(scores)),
            "one pass: Triton kernel": (
                "optimized",
                on_gpu(lambda scores: lambda: optimized.fused_softmax(scores, HEAD_DIM**-0.5)),
            ),
            "fused by torch.compile": (ONE_PASS, compiled(masked_softmax)),
        },
        metric="bandwidth",
        ylabel="bandwidth",
        bytes_moved=softmax_bytes,
        floor_s=lambda n: time_floor_s(softmax_bytes(n), 0, measured_ceilings(), DTYPE),
        floor_label="measured copy or read",
        dtype=DTYPE_NAME,
        shape=f"{HEADS} heads",
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l02_sampling",
        title="{x} rows, temperature and top-p: the batch is {speedup:.1f}x as fast as row by row",
        x_name="rows of the batch",
        x_values=[1, 2, 4, 8, 16, 32, 64],
        quick_x_values=[1, 8],
        inputs=lambda rows, device: (step_of(rows, VOCAB_SIZE, device),),
        providers={
            "row by row": ("naive", row_by_row(TOP_P)),
            "batch": ("optimized", as_a_batch(TOP_P)),
            "kernels": ("optimized", on_kernels(TOP_P)),
            "transformers' processors": ("library", transformers_top_p),
            "FlashInfer": ("library", flashinfer_top_p),
            "vLLM's Triton kernel": ("library", vllm_top_p),
        },
        ylabel="time of a step's sampling",
        floor_s=lambda rows: logits_floor_s(rows * VOCAB_SIZE),
        floor_label="logits read once",
        shape=f"vocabulary of {VOCAB_SIZE}, temperature 0.8, top_p 0.95",
        tolerance=0,
    ),
    Benchmark(
        name="l02_sampling_vocabulary",
        title="A vocabulary of {x}, temperature and top-p: the batch is {speedup:.1f}x as fast",
        x_name="tokens of the vocabulary",
        x_values=[4096, 8192, 16384, 32768, 65536, 131072],
        quick_x_values=[4096, 16384],
        inputs=lambda vocab_size, device: (step_of(ROWS, vocab_size, device),),
        providers={
            "row by row": ("naive", row_by_row(TOP_P)),
            "batch": ("optimized", as_a_batch(TOP_P)),
            "row by row, every setting": ("naive", row_by_row(EVERYTHING)),
            "batch, every setting": ("optimized", as_a_batch(EVERYTHING)),
            "transformers' processors": ("library", transformers_top_p),
        },
        ylabel="time of a step's sampling",
        floor_s=lambda vocab_size: logits_floor_s(ROWS * vocab_size),
        floor_label="logits read once",
        shape=f"{ROWS} rows, temperature 0.8, top_p 0.95",
        tolerance=0,
    ),
]
