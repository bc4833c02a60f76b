"""What experts cost on an H200 whose codes stay codes, beside the same in 16 bits: predicted from
their compiled code.

    python -m lessons.l23_experts.lab.codes

writes results/counted/l23_codes.json, which MORE.md quotes. Nothing is timed: see
lessons/PROFILING.md. A sample of the programs runs, so the sort runs in PyTorch.
"""

import json
from pathlib import Path

import torch

from lessons.l18_weight_quantization.weights import MXFP4_BLOCK, TILE
from lessons.l23_experts import optimized
from lessons.l23_experts.lab.sampled import chosen_evenly, profiled
from lessons.l23_experts.more import fp8, mxfp4
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.measure.hardware import CHIPS

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l23_codes.json"
# The format's layer: num_experts, top_k, hidden_size, width of an expert
LAYERS = {"mxfp4": (32, 4, 2880, 2880), "fp8": (128, 8, 2048, 768)}
TOKENS = (16, 2048)


def stacks(form: str) -> tuple:
    """gate_up and down of a format, zeros. form: "16 bits", "mxfp4" or "fp8" and its layer's
    name.
    """
    kind, _, layer = form.rpartition(" of ")
    num_experts, _, size, inner = LAYERS[layer]

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_experts, *shape, dtype=dtype)

    found = []
    for rows, columns, parts in ((2 * inner, size, 2), (size, inner, 1)):
        if kind == "mxfp4":
            codes = zeros(rows, columns // 2, dtype=torch.uint8)
            exponents = zeros(columns // MXFP4_BLOCK, rows, dtype=torch.uint8)
            found.append(mxfp4.Stack(codes, exponents, zeros(rows, dtype=torch.bfloat16)))
        elif kind == "fp8":
            tiles = parts * -(-rows // parts // TILE), -(-columns // TILE)
            values = zeros(rows, columns, dtype=torch.float8_e4m3fn)
            found.append(fp8.Stack(values, zeros(*tiles, dtype=torch.float32)))
        else:
            found.append(zeros(rows, columns, dtype=torch.bfloat16))
    return tuple(found)


BITS = {"16 bits": 16, "mxfp4": 4.25, "fp8": 8 + 32 / TILE**2}


def chosen_of(layer: str, num_tokens: int) -> torch.Tensor:
    """[T, k], the same at each call."""
    num_experts, top_k, *_ = LAYERS[layer]
    return chosen_evenly(num_tokens, num_experts, top_k)


def floor_s(form: str, num_tokens: int) -> float:
    """What an H200's memory takes for the weights of the experts that are chosen, alone."""
    kind, _, layer = form.rpartition(" of ")
    *_, size, inner = LAYERS[layer]
    num_bytes = len(chosen_of(layer, num_tokens).unique()) * 3 * size * inner * BITS[kind] / 8
    return num_bytes / CHIPS["h200"].memory_bytes_per_s


def predicted(form: str, num_tokens: int) -> dict:
    """What the record holds of one form. To be called where kernels are compiled."""
    from lessons.toolbox.profile.time_model import predict

    kind, _, layer = form.rpartition(" of ")
    size, chosen = LAYERS[layer][2], chosen_of(layer, num_tokens)
    x = torch.zeros(num_tokens, size, dtype=torch.bfloat16)
    ops = {"mxfp4": mxfp4, "fp8": fp8}.get(kind, optimized)
    kernels = []
    for profile in profiled(lambda: ops.expert_rows(x, chosen, *stacks(form)), ops):
        guess = predict(profile)
        found = {"name": profile.kernel.name, "predicted_s": float(guess.seconds)}
        kernels.append(found | {"limit": guess.limit, **profile.assembled})
    seconds = sum(each["predicted_s"] for each in kernels)
    return {"predicted_s": seconds, "floor_s": floor_s(form, num_tokens), "kernels": kernels}


def main() -> None:
    record = {
        "what": "predicted by lessons/toolbox/profile for an H200, not measured",
        "command": "python -m lessons.l23_experts.lab.codes",
    }
    for layer in LAYERS:
        for num_tokens in TOKENS:
            record.setdefault(layer, {})[str(num_tokens)] = {
                kind: call(f"{__spec__.name}:predicted", f"{kind} of {layer}", num_tokens, chip=90)
                for kind in ("16 bits", layer)
            }
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            print(layer, num_tokens, flush=True)


if __name__ == "__main__":
    main()
