"""What fewer KV heads cost in quality: the embedded model's KV heads merged, its loss on held-out
code, and after more training.

    python -m lessons.l05_gqa.lab.quality [--out results/cpu]
        about fifteen minutes on one core -> l05_quality.json

models/tiny has 6 query heads and 2 KV heads. Repeated to 6 it is an MHA model with the same logits;
from there heads are merged. Uptraining is 0.1 % of the tokens that the model was trained on;
Ainslie et al. used 5 %.

Source: Ainslie et al. 2023, GQA, sections 2.1, 3.2 and 3.3.
"""

import argparse
import json
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l04_positions.lab.uptraining import (
    ROWS,
    WINDOW,
    held_out_windows,
    next_token_loss,
    training_windows,
    uptrained,
)
from lessons.l05_gqa.convert import first_head, mean_head, merged, repeated
from lessons.toolbox.measure.device import fingerprint
from lessons.toolbox.measure.records import write_json
from lessons.toolbox.model.checkpoint import REPOSITORY

TINY = REPOSITORY / "models" / "tiny"
SHARE = 0.001  # of the tokens that the model was trained on


@torch.inference_mode()
def held_out_loss(model: Decoder, held_out: Tensor) -> float:
    """Mean over windows, in nats per token. held_out: [N, T + 1] int64."""
    return float(torch.stack([next_token_loss(model, window) for window in held_out]).mean())


def variants(tiny: Decoder) -> dict[str, Decoder]:
    """Models that differ in their KV heads alone, the largest cache first."""
    mha = repeated(tiny, tiny.config.num_attention_heads)
    return {
        "6 heads, repeated": mha,
        "3 heads, mean": merged(mha, 3, mean_head),
        "2 heads, as trained": tiny,
        "1 head, mean": merged(tiny, 1, mean_head),
        "1 head, first": merged(tiny, 1, first_head),
    }


def measure(held_out: Tensor, train: Tensor) -> dict:
    """The record: each variant's KV bytes per token in 16 bits and its losses; points by tokens of
    uptraining.

    held_out, train: [N, T + 1] int64.
    """
    tiny = Decoder.from_pretrained(str(TINY))
    series, steps = {}, len(train) // ROWS
    for label, model in variants(tiny).items():
        points = [{"tokens": 0, "loss": held_out_loss(model, held_out)}]
        # trained, its heads would part; as it is, it is the model with 2
        if label != "6 heads, repeated":
            for tokens, better in track(
                uptrained(model, train, [steps // 4, steps // 2, steps]), label, total=3
            ):
                points.append({"tokens": tokens, "loss": held_out_loss(better, held_out)})
        series[label] = {
            "kv_bytes": model.config.kv_bytes_per_token(2),
            "num_kv_heads": model.config.num_key_value_heads,
            "points": points,
        }
        print(label, points, flush=True)
    trained = json.loads((TINY / "training.json").read_text(encoding="utf-8"))["tokens_seen"]
    return {
        "schema": 1,
        "name": "l05_quality",
        "fingerprint": fingerprint(),
        "trained_on_tokens": trained,
        "held_out_tokens": held_out[:, 1:].numel(),
        "series": series,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lessons.l05_gqa.lab.quality", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=REPOSITORY / "build" / "bench",
        help="folder for l05_quality.json",
    )
    options = parser.parse_args(argv)
    trained = json.loads((TINY / "training.json").read_text(encoding="utf-8"))["tokens_seen"]
    torch.manual_seed(0)
    write_json(
        options.out / "l05_quality.json",
        measure(held_out_windows(24), training_windows(int(SHARE * trained) // WINDOW)),
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
