"""How long a layer's experts take on an H200 for many tokens, predicted from their compiled code.

    python -m lessons.l23_experts.lab.prefill

writes results/counted/l23_prefill.json, which MORE.md quotes. Nothing is timed: see
lessons/PROFILING.md. A sample of the programs runs, so the sort runs in PyTorch.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from lessons.l23_experts import optimized
from lessons.l23_experts.lab.orders import memory_bytes
from lessons.l23_experts.lab.sampled import chosen_evenly, profiled
from lessons.l23_experts.more import wide
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.measure.hardware import CHIPS

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l23_prefill.json"
# num_experts, top_k, hidden_size, width of an expert
LAYERS = {"Mixtral 8x7B": (8, 2, 4096, 14336), "Qwen3-30B-A3B": (128, 8, 2048, 768)}
TOKENS = (1024, 4096)
WAYS = {"kernels.py": optimized, "more/wide.py": wide}


def chosen_of(num_tokens: int, layer: str) -> Tensor:
    """[T, k], the same at each call: the most rows of an expert decide how many tiles there are."""
    num_experts, top_k, *_ = LAYERS[layer]
    return chosen_evenly(num_tokens, num_experts, top_k)


def inputs_of(num_tokens: int, layer: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, chosen, gate_up, down: zeros, because values do not matter."""
    num_experts, _, size, inner = LAYERS[layer]
    new = dict(dtype=torch.bfloat16)
    gate_up = torch.zeros(num_experts, 2 * inner, size, **new)
    down = torch.zeros(num_experts, size, inner, **new)
    return torch.zeros(num_tokens, size, **new), chosen_of(num_tokens, layer), gate_up, down


def flops_of(num_tokens: int, layer: str) -> int:
    """Of the three products of each pair of a token and an expert."""
    _, top_k, size, inner = LAYERS[layer]
    return 6 * num_tokens * top_k * size * inner


def predicted(way: str, layer: str, num_tokens: int) -> dict:
    """What the record holds of one way. To be called where kernels are compiled."""
    from lessons.toolbox.profile.time_model import predict

    inputs = inputs_of(num_tokens, layer)
    found = {}
    for profile in profiled(lambda: WAYS[way].expert_rows(*inputs), WAYS[way]):
        guess = predict(profile)
        found[profile.kernel.name] = {
            "predicted_s": float(guess.seconds),
            "limit": guess.limit,
            "l2_share": round(float(guess.busy["L2 cache"]), 3),
            "programs": profile.grid[0] * profile.grid[1],
            **profile.assembled,
        }
    seconds = sum(each["predicted_s"] for each in found.values())
    rate = flops_of(num_tokens, layer) / seconds
    return {
        "predicted_s": seconds,
        "tflops": rate / 1e12,
        "peak_share": rate / CHIPS["h200"].bf16_flops_per_s,
        "kernels": found,
    }


def record_of(layer: str, num_tokens: int) -> dict:
    """Both ways, and what memory has to give for the second product in either order of tiles."""
    found = {way: call(f"{__spec__.name}:predicted", way, layer, num_tokens, chip=90)
             for way in WAYS}  # fmt: skip
    chosen, (num_experts, _, size, inner) = chosen_of(num_tokens, layer), LAYERS[layer]
    return found | {"order": memory_bytes(chosen, num_experts, size, inner)}


def main() -> None:
    record = {
        "what": "predicted by lessons/toolbox/profile for an H200, not measured",
        "command": "python -m lessons.l23_experts.lab.prefill",
        **{layer: {str(n): record_of(layer, n) for n in TOKENS} for layer in LAYERS},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
