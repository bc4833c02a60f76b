"""What attention by products of FP8 costs in exactness and saves in time: counted on random numbers
and on the embedded model, and predicted for an H200; nothing is timed.

    python -m lessons.l19_kv_quantization.lab.products  # writes results/counted/l19_products.json

- errors: of attention's result, relative to float64 over K and V that were never quantized. Codes
  become numbers of 16 bits, or are multiplied with a scale for each token and head, or for each
  head, as vLLM's checkpoints have them.
- quality: lab/quality.py's measures for prompts; agreement: the share of 32 greedy tokens before
  the first that differs, where each token after the prompt is a step of its own.
- predicted: a chunk of new tokens over a context, heads of Llama-3-8B (lessons/PROFILING.md).
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention
from lessons.l03_kv_cache.generate import Rung
from lessons.l06_mla.deepseek import load_decoder
from lessons.l09_flash_attention.tiles import Tiles, tiles_for
from lessons.l12_paged_kv.optimized import paged_prefill
from lessons.l12_paged_kv.runner import PagedRunner, new_pool, paged_rung_of
from lessons.l18_weight_quantization.lab.quality import (
    NEW_TOKENS,
    PROMPT,
    PROMPTS,
    agreed,
    held_out_windows,
    predictions,
    quality,
)
from lessons.l19_kv_quantization.activations.attention.naive import FP8, Coded, products
from lessons.l19_kv_quantization.activations.attention.optimized import fp8_prefill, products_tiles
from lessons.l19_kv_quantization.activations.attention.pool import products_rung_of
from lessons.l19_kv_quantization.formats import E4M3_MAX
from lessons.l19_kv_quantization.lab.quality import (
    MODEL,
    ROOT,
    WINDOW,
    WINDOWS,
    WithCache,
    as_it_is,
    by_row,
)
from lessons.l19_kv_quantization.lab.testing import coded_cache
from lessons.l19_kv_quantization.optimized import quantized_prefill
from lessons.l19_kv_quantization.runner import quantized_rung_of
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.model.checkpoint import load_tokenizer

OUT = ROOT / "results" / "counted" / "l19_products.json"
TOKENS, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 512, 32, 8, 128, 16
SEEDS, FACTOR = 4, 30.0
CHUNKS = ((1024, 1024), (512, 4096))  # new tokens, tokens with them
GPU = "h200"


# ---------------------------------------------------------------- ways to attend


def by_numbers(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window=None) -> Tensor:
    """Codes of K and V become numbers of 16 bits; p is rounded to 16 bits, sums are float32: what
    the kernel over codes does for prompts. Shapes as in lesson 2's `attention`.
    """
    half = torch.bfloat16
    numbers = (FP8.dequantize(*FP8.quantize(x.to(half))) for x in (k, v))
    return in_16_bits(q, *numbers, softmax_scale, window)


def in_16_bits(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window=None) -> Tensor:
    """Operands of bfloat16 and sums of float32."""
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    identity = torch.eye(len(k))[:, None].expand(-1, k.shape[1], -1)
    p = attention(q, k, identity, softmax_scale, window=window)  # the weights themselves
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("qhk,khd->qhd", p.bfloat16().float(), v)


def by_codes(scaled: Callable, q: Tensor, k: Tensor, v: Tensor, softmax_scale, window=None):
    """Products of codes. scaled(x): codes and scales of rows."""
    return products(*(Coded(*scaled(x.float())) for x in (q, k, v)), softmax_scale, window)


def a_scale_a_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [T, H, D] -> codes and scales as Float8.quantize's, but all tokens of a head share one."""
    scales = (x.abs().amax((0, 2), keepdim=True) / E4M3_MAX).expand(len(x), -1, 1)
    codes = (x / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


WAYS = {
    "16-bit cache": in_16_bits,
    "numbers": by_numbers,
    "products": partial(by_codes, FP8.quantize),
    "products, a scale a head": partial(by_codes, a_scale_a_head),
}


def inputs_of(kind: str, seed: int) -> list[Tensor]:
    """q: [T, 8, D], k and v: [T, 2, D] in float32, numbers of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(TOKENS, heads, HEAD_DIM, generator=generator) for heads in (8, 2, 2))
    if kind == "an outlier channel of K":
        k[:, :, 3] *= FACTOR
        q[:, :, 3] /= FACTOR
    if kind == "an outlier token of V":
        v[7] *= FACTOR
    if kind == "sharp attention":
        q *= 4
    return [x.bfloat16().float() for x in (q, k, v)]


KINDS = ("random", "an outlier channel of K", "an outlier token of V", "sharp attention")


def errors() -> dict:
    """{kind of inputs: {way: relative error}}, over SEEDS draws."""
    found = {}
    for kind in KINDS:
        sums: dict[str, list[float]] = {name: [] for name in WAYS}
        for seed in range(SEEDS):
            q, k, v = inputs_of(kind, seed)
            exact = attention(q.double(), k.double(), v.double(), HEAD_DIM**-0.5)
            for name, way in WAYS.items():
                out = way(q, k, v, HEAD_DIM**-0.5).double()
                sums[name].append(float((out - exact).norm() / exact.norm()))
        found[kind] = {name: round(sum(x) / SEEDS, 6) for name, x in sums.items()}
    return found


# ---------------------------------------------------------------- the embedded model


class WithProducts(WithCache):
    """A decoder whose prompts attend in another way."""

    def __init__(self, model: Decoder, way: Callable):
        super().__init__(model, as_it_is, as_it_is)
        self.way = way

    def attention(self, q: Tensor, k: Tensor, v: Tensor, softmax_scale, window=None) -> Tensor:
        return self.way(q, k, v, softmax_scale, window)


@torch.inference_mode()
def answers_of(model: Decoder, windows: Tensor, rung: Rung) -> list[list[int]]:
    """NEW_TOKENS likeliest tokens after the first PROMPT tokens of windows: [count, length + 1]."""
    answers = []
    for prompt in windows[:PROMPTS, :PROMPT].tolist():
        most = PROMPT + NEW_TOKENS
        runner = PagedRunner(model, new_pool(model, -(-most // BLOCK), BLOCK, most, rung))
        answer, logits = [], runner.step({0: prompt})
        while len(answer) < NEW_TOKENS:
            answer.append(int(logits.argmax()))
            logits = runner.step({0: answer[-1:]})
        answers.append(answer)
    return answers


def qualities() -> dict:
    tokenizer, model = load_tokenizer(str(MODEL)), load_decoder(str(MODEL), "cpu").float()
    windows = held_out_windows(tokenizer, WINDOWS, WINDOW)
    reference = list(predictions(model, windows))
    row = partial(by_row, "fp8")
    models = {"numbers": WithCache(model, row, row)}
    models |= {name: WithProducts(model, WAYS[name]) for name in WAYS if "products" in name}
    found = {}
    for name, changed in models.items():
        measures = asdict(quality(changed, windows, reference))
        found[name] = {
            measure: {key: round(value, 6) for key, value in measures[measure].items()}
            for measure in ("added_loss", "kl", "flips")
        }
    wanted = answers_of(model, windows, paged_rung_of(model))
    rungs = {"numbers": quantized_rung_of(model, "fp8"), "products": products_rung_of(model)}
    for name, rung in rungs.items():
        shares = [agreed(*two) for two in zip(answers_of(model, windows, rung), wanted)]
        found[name]["agreement"] = round(sum(shares) / len(shares), 4)
    return found


# ---------------------------------------------------------------- predicted


def chunk_of(new: int, tokens: int) -> tuple:
    """q: [new, 32, 128] after tokens - new others, K and V of all: zeros, because values do not
    matter, in pages in random order.
    """
    count = tokens // BLOCK
    generator = torch.Generator().manual_seed(19)
    table = torch.randperm(count, generator=generator).to(torch.int32)[None]
    lens = torch.tensor([0, new], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    q = torch.zeros(new, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    return q, torch.zeros(count, BLOCK, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16), table, *lens


def predicted(new: int, tokens: int) -> dict:
    """To be called where kernels are compiled for a chip. Tiles are those of Hopper, because the
    wrappers ask for a GPU.
    """
    from lessons.toolbox.profile.points import profiled_sample
    from lessons.toolbox.profile.time_model import predict

    q, cache, *rest = chunk_of(new, tokens)
    codes, scales = coded_cache(FP8, cache)
    pages = q, codes, codes, scales, scales, *rest
    wide: Tiles = tiles_for(90, HEAD_DIM, 2)
    runs = {
        "16-bit cache": lambda: paged_prefill(q, cache, cache, *rest, tiles=wide),
        "numbers": lambda: quantized_prefill(*pages, FP8, tiles=wide),
        "products": lambda: fp8_prefill(*pages, tiles=products_tiles(90, HEAD_DIM)),
    }
    flops = 4 * HEADS * HEAD_DIM * (new * (tokens - new) + new * (new + 1) / 2)
    found = {}
    for name, run in runs.items():
        guesses = [(each, predict(each)) for each in profiled_sample(run, GPU)]
        seconds = sum(float(guess.seconds) for _, guess in guesses)
        found[name] = {
            "predicted_s": seconds,
            "tflops": round(flops / seconds / 1e12, 1),
            "kernels": {
                each.kernel.name: {"predicted_s": float(guess.seconds), "limit": guess.limit}
                for each, guess in guesses
            },
        }
    return found


def main() -> int:
    torch.manual_seed(0)
    record = {
        "command": "python -m lessons.l19_kv_quantization.lab.products",
        "what": "errors and quality counted on a CPU; times predicted for an H200, not measured",
        "model": "models/tiny",
        "tokens": TOKENS,
        "factor": FACTOR,
        "errors": errors(),
        "quality": qualities(),
        "predicted": {
            f"{new} of {tokens}": call(f"{__spec__.name}:predicted", new, tokens, chip=90)
            for new, tokens in CHUNKS
        },
    }
    OUT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {OUT.relative_to(Path(ROOT))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
