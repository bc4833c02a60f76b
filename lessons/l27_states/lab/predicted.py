"""How long this lesson's kernels take on an H200, predicted from their compiled code.

    python -m lessons.l27_states.lab.predicted

writes results/counted/l27_predicted.json, which MORE.md quotes. A layer of Qwen3-Next: 32 heads of
128 x 128. The time model runs a sample of the programs (lessons/PROFILING.md); nothing is timed.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from lessons.l27_states import optimized, prompts
from lessons.l27_states.lab.specs import KEY_DIM, VALUE_DIM
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.measure.hardware import lookup

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l27_predicted.json"
GPU = "h200"
HEADS = 32
BATCHES, TOKENS = (1, 8, 64), (1024, 4096)


def rows(count: int) -> list[torch.Tensor]:
    """q, k: [count, HEADS, KEY_DIM], v: [count, HEADS, VALUE_DIM], log_decay, beta: [count, HEADS],
    zeros, because values do not matter.
    """
    sizes = KEY_DIM, KEY_DIM, VALUE_DIM
    wide = [torch.zeros(count, HEADS, size, dtype=torch.bfloat16) for size in sizes]
    return [*wide, torch.zeros(count, HEADS), torch.zeros(count, HEADS)]


def of_step(batch: int) -> tuple[Callable, int]:
    """A step, and the bytes that it has to move."""
    states = torch.zeros(batch, HEADS, KEY_DIM, VALUE_DIM)
    return (
        lambda: optimized.gated_delta_step(*rows(batch), states, torch.arange(batch)),
        2 * states.nbytes,
    )


def of_prompt(tokens: int) -> tuple[Callable, int]:
    """A prompt without a state before it, and the bytes of q, k, v and the output."""
    states = torch.zeros(1, HEADS, KEY_DIM, VALUE_DIM)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    rest = states, torch.zeros(1, dtype=torch.int64), starts, torch.zeros(1, dtype=torch.bool)
    given = rows(tokens)
    moved = sum(x.nbytes for x in given[:3]) + given[2].nbytes
    return lambda: prompts.gated_delta_prompts(*given, *rest, max_seqlen=tokens), moved


def kernels_of(run: Callable) -> dict:
    """Each kernel that `run` launches: {its name: what is predicted of it}. To be called where
    kernels are compiled for a chip.
    """
    from lessons.toolbox.profile.points import profiled_sample
    from lessons.toolbox.profile.time_model import predict

    found = {}
    for profile in profiled_sample(run, GPU):
        guess = predict(profile)
        found[profile.kernel.name] = {
            "predicted_s": float(guess.seconds) * profile.launches,
            "limit": guess.limit,
            **profile.assembled,
        }
    return found


def predicted(kind: str, count: int) -> dict:
    """kind: "step" or "prompt". To be called where kernels are compiled for a chip."""
    run, moved = {"step": of_step, "prompt": of_prompt}[kind](count)
    kernels = kernels_of(run)
    return {
        "predicted_s": sum(each["predicted_s"] for each in kernels.values()),
        "floor_s": moved / lookup(GPU).memory_bytes_per_s,
        "kernels": kernels,
    }


def main() -> None:
    record = {
        "what": "predicted by lessons/toolbox/profile for an H200, not measured",
        "command": "python -m lessons.l27_states.lab.predicted",
    }
    for kind, counts in (("step", BATCHES), ("prompt", TOKENS)):
        for count in counts:
            found = call(f"{__spec__.name}:predicted", kind, count, chip=90)
            record.setdefault(kind, {})[str(count)] = found
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            print(kind, count, f"{1e6 * found['predicted_s']:.1f} µs", flush=True)


if __name__ == "__main__":
    main()
