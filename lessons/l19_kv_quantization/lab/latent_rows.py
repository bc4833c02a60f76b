"""What FP8 does to DeepSeek's latents: errors counted on random numbers and on a random model, and
times predicted for an H200; nothing is timed.

    python -m lessons.l19_kv_quantization.lab.latent_rows  # writes results/counted/l19_latents.json

- errors: of attention's result, relative to float64 over latents that were never rounded;
- logits: of a model with random weights, because no trained one with latents is embedded. So this
  tells the size of the error, and nothing of the quality of answers;
- predicted: one layer of a decode step (lessons/PROFILING.md), with lesson 12's kernel over 16 bits
  and over rows.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention, whole_sequence
from lessons.l06_mla.deepseek import DeepseekDecoder, absorbed
from lessons.l12_paged_kv.kernels.latents import paged_mla_decode
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.kernels.latents.naive import LatentRows
from lessons.l19_kv_quantization.kernels.latents.optimized import coded_mla_decode
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.model.config import MLAConfig, ModelConfig

OUT = Path(__file__).parents[3] / "results" / "counted" / "l19_latents.json"
RANK, ROPE, SCALE = 512, 64, 192**-0.5
TOKENS, SEEDS, FACTOR = 512, 4, 30.0
SEQUENCES, CONTEXT, BLOCK = 64, 4096, 64
KINDS = ("random", "an outlier channel", "large rotary values", "sharp attention")
ROWS = LatentRows(RANK, ROPE, torch.bfloat16)
FP8 = FORMATS["fp8"]


def in_rows(x: Tensor) -> Tensor:
    """x: [T, 1, 576] after a row of fp8_ds_mla."""
    return ROWS.dequantize(ROWS.quantize(x), torch.float32)


def one_scale(x: Tensor) -> Tensor:
    """The same with one scale for all 576 values: kv_cache_dtype "fp8"."""
    return FP8.dequantize(*FP8.quantize(x)).float()


def all_rounded(x: Tensor) -> Tensor:
    """Rows whose rotary values have a scale and codes, too."""
    rotary = FP8.dequantize(*FP8.quantize(x[..., RANK:]))
    return torch.cat([in_rows(x)[..., :RANK], rotary.float()], dim=-1)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "16 bits": lambda x: x.float(),
    "fp8": one_scale,
    "fp8_ds_mla": in_rows,
    "rotary values rounded, too": all_rounded,
}


def inputs_of(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """q: [1, 16, 576] and latents: [T, 1, 576], float32."""
    generator = torch.Generator().manual_seed(seed)
    q, latents = (torch.randn(n, h, RANK + ROPE, generator=generator)
                  for n, h in ((1, 16), (TOKENS, 1)))  # fmt: skip
    if kind == "an outlier channel":
        latents[..., 3] *= FACTOR
        q[..., 3] /= FACTOR
    if kind == "large rotary values":
        latents[..., RANK:] *= 4
    if kind == "sharp attention":
        q *= 4
    return q, latents


def errors() -> dict[str, dict[str, float]]:
    """{kind of inputs: {way: relative error}}, over SEEDS draws."""
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        sums = dict.fromkeys(WAYS, 0.0)
        for seed in range(SEEDS):
            q, latents = inputs_of(kind, seed)
            exact = latents.double()
            want = attention(q.double(), exact, exact[..., :RANK], SCALE)
            for name, way in WAYS.items():
                k = way(latents.bfloat16()).double()
                out = attention(q.double(), k, k[..., :RANK], SCALE)
                sums[name] += float((out - want).norm() / want.norm()) / SEEDS
        found[kind] = {name: round(error, 6) for name, error in sums.items()}
    return found


def random_model() -> Decoder:
    """Four layers with DeepSeek's latents and random weights, float32."""
    torch.manual_seed(19)
    config = ModelConfig(
        "deepseek_v2",
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=96,
        v_head_dim=32,
        intermediate_size=512,
        max_position_embeddings=TOKENS,
        mla=MLAConfig(128, RANK, 32, ROPE, 32),
    )
    model = DeepseekDecoder(config).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(std=weight.shape[-1] ** -0.5)
        else:
            weight.fill_(1.0)
    return model


@torch.inference_mode()
def logits() -> dict[str, float]:
    """{way: relative error of the logits of 256 tokens}."""
    model = absorbed(random_model())
    tokens = torch.randint(0, 512, (256,), generator=torch.Generator().manual_seed(1))

    def over(way: Callable, q: Tensor, k: Tensor, v: Tensor, *arguments, **options) -> Tensor:
        k = way(k.bfloat16())
        return attention(q, k, k[..., :RANK], *arguments, **options)

    def of(attend_to: Callable) -> Tensor:
        return model.logits(model(tokens, whole_sequence(model, len(tokens), attend_to)))

    want = of(attention)
    found = {name: of(partial(over, way)) for name, way in WAYS.items()}
    return {name: round(float((x - want).norm() / want.norm()), 6) for name, x in found.items()}


def predicted(heads: int) -> dict[str, dict]:
    """{way: what is predicted of a step's layer}. To be called where kernels are compiled for a
    chip.
    """
    from lessons.toolbox.profile.points import profiled_sample
    from lessons.toolbox.profile.time_model import predict

    count = SEQUENCES * CONTEXT // BLOCK
    generator = torch.Generator().manual_seed(19)
    table = torch.randperm(count, generator=generator).to(torch.int32).view(SEQUENCES, -1)
    lens = torch.full((SEQUENCES,), CONTEXT, dtype=torch.int32)
    q = torch.zeros(SEQUENCES, heads, RANK + ROPE, dtype=torch.bfloat16)
    latents = torch.zeros(count, BLOCK, RANK + ROPE, dtype=torch.bfloat16)
    rows = torch.zeros(count, BLOCK, ROWS.row_bytes, dtype=torch.uint8)
    runs = {
        "16 bits": lambda: paged_mla_decode(q, latents, table, lens, SCALE),
        "fp8_ds_mla": lambda: coded_mla_decode(q, rows, table, lens, ROWS, SCALE),
    }
    found = {}
    for name, run in runs.items():
        guesses = {each.kernel.name: predict(each) for each in profiled_sample(run, "h200")}
        width = ROWS.row_bytes if name != "16 bits" else 2 * (RANK + ROPE)
        seconds = sum(float(guess.seconds) for guess in guesses.values())
        found[name] = {
            "bytes": SEQUENCES * CONTEXT * width,
            "predicted_s": seconds,
            "bytes_per_s": round(SEQUENCES * CONTEXT * width / seconds),
            "kernels": {
                key: {"predicted_s": float(guess.seconds), "limit": guess.limit}
                for key, guess in guesses.items()
            },
        }
    return found


def main() -> None:
    record = {
        "command": "python -m lessons.l19_kv_quantization.lab.latent_rows",
        "what": "errors counted on a CPU; times predicted for an H200, not measured",
        "shape": f"{SEQUENCES} sequences of {CONTEXT} tokens, pages of {BLOCK}",
        "tokens": TOKENS,
        "factor": FACTOR,
        "errors": errors(),
        "logits": logits(),
        "predicted": {},
    }
    for heads in (16, 128):
        record["predicted"][str(heads)] = call(f"{__spec__.name}:predicted", heads, chip=90)
        OUT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
