"""How well the embedded model predicts beyond the context it was trained on: as it is, with its
rotations stretched, and with ALiBi's bias in the rotations' place.

    python -m lessons.l04_positions.lab.extrapolation [--windows 4] [--out results/cpu]
        about a quarter of an hour on one core, most of it training

Held-out modules of Python's library, read as one text, in windows of FACTOR times the trained
context. For the first three lines no weight is changed: stretching alone decides what a far token
looks like. A bias means nothing to a model that has never seen one, so for ALiBi the model is
trained on, for SHARE of the tokens that it was trained on before, in windows of 512. A control gets
the same training and keeps its rotations. Loss is in nats per token, averaged over each stretch of
STEP positions.
"""

import argparse
import copy
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.optimized import PREALLOCATED as LESSON_3
from lessons.l04_positions.alibi import ALIBI
from lessons.l04_positions.lab.uptraining import (
    ROWS,
    WINDOW,
    AttendOver,
    biased,
    rotated,
    training_windows,
    uptrained,
)
from lessons.toolbox.measure.device import default_device, fingerprint
from lessons.toolbox.measure.records import write_json
from lessons.toolbox.model.checkpoint import load_tokenizer
from lessons.toolbox.model.config import RopeScaling

ROOT = Path(__file__).resolve().parents[3]
FACTOR, STEP = 4, 512
SCALINGS = {"as trained": None, "linear": "linear", "YaRN": "yarn"}
SHARE = 0.003  # of the tokens that the model was trained on
BIASED = Rung("ALiBi", ALIBI, ALIBI)
# how the model attends while it is trained on, and when it is measured
TRAINED_ON = {"ALiBi": (biased, BIASED), "RoPE": (rotated, LESSON_3)}
ROLES = {
    "as trained": "naive",
    "linear": "library",
    "YaRN": "optimized",
    "ALiBi": "library",
    "RoPE": "naive",
}
ALT = (
    "Loss of the embedded model over the position in held-out text: beyond 2048 tokens it is "
    "higher as trained than with YaRN; with linear scaling alone it is high everywhere; with ALiBi "
    "it starts higher and stays where it is; after the same training with rotations it climbs."
)


def held_out_tokens() -> Tensor:
    """The modules that models/figures.json names as held out, one after the other, as this Python
    has them and with no special token between them: [tokens] int64.
    """
    modules = json.loads((ROOT / "models" / "figures.json").read_text(encoding="utf-8"))[
        "held_out"
    ]["modules"]
    files = (importlib.util.find_spec(name) for name in modules)
    texts = [Path(spec.origin).read_text(encoding="utf-8") for spec in files if spec is not None]
    ids = load_tokenizer("models/tiny")(texts, add_special_tokens=False)["input_ids"]
    return torch.cat([torch.tensor(part) for part in ids])


def stretched(model: Decoder, rope_type: str | None, factor: float) -> Decoder:
    """The same weights, accepting `factor` times the context; rope_type: None leaves the rotations
    as they are.
    """
    context = model.config.max_position_embeddings
    scaling = (
        None
        if rope_type is None
        else RopeScaling(rope_type, factor, original_max_position_embeddings=context)
    )
    twin = copy.copy(model)  # shallow, so every parameter is shared
    twin.config = replace(
        model.config, rope_scaling=scaling, max_position_embeddings=int(factor * context)
    )
    return twin


@torch.inference_mode()
def losses(model: Decoder, tokens: Tensor, rung: Rung = LESSON_3) -> Tensor:
    """The loss of predicting each token from those before it: tokens: [T + 1] -> [T], nats.

    rung: how positions enter, rotations unless given.
    """
    inputs, found = tokens[:-1], []
    pool = rung.new_cache(model, 1, len(inputs))
    # because scores of all at once fill the memory
    for start in range(0, len(inputs), 256):
        new, wanted = inputs[start : start + 256], tokens[start + 1 : start + 257]
        batch = new_batch([(new.tolist(), start)], pool.block_size, model.device)
        logits = model.logits(model(batch.tokens, pool.attending(batch)))
        found.append(cross_entropy(logits.float(), wanted, reduction="none"))
    return torch.cat(found)


def trained_on(model: Decoder, share: float, attend_over: AttendOver) -> Decoder:
    """A copy of the embedded model, trained on `share` of the tokens that it has seen before."""
    training = json.loads((ROOT / "models" / "tiny" / "training.json").read_text(encoding="utf-8"))
    train = training_windows(int(share * training["tokens_seen"]) // WINDOW).to(model.device)
    [(_, better)] = uptrained(model, train, [len(train) // ROWS], attend_over)
    return better.requires_grad_(False)


def by_position(model: Decoder, rows: list[Tensor], step: int, rung: Rung = LESSON_3) -> list[dict]:
    """The mean loss of each `step` positions over rows: [T + 1] each, as the points of a record."""
    mean = torch.stack([losses(model, row, rung) for row in rows]).mean(0).view(-1, step).mean(1)
    return [{"x": (i + 1) * step, "loss": float(loss)} for i, loss in enumerate(mean)]


def measure(
    windows: int = 2,
    factor: int = FACTOR,
    step: int = STEP,
    share: float = SHARE,
    device: torch.device | None = None,
) -> dict:
    """The record: for each way the mean loss of each `step` positions, over so many windows of
    held-out text.
    """
    model = Decoder.from_pretrained("models/tiny", device=device or default_device())
    length = factor * model.config.max_position_embeddings
    tokens = held_out_tokens().to(model.device)
    windows = min(windows, (len(tokens) - 1) // length)
    rows = [tokens[i * length : (i + 1) * length + 1] for i in range(windows)]
    points = {
        label: by_position(stretched(model, rope_type, factor), rows, step)
        for label, rope_type in SCALINGS.items()
    }
    for label, (attend_over, rung) in TRAINED_ON.items():
        twin = stretched(trained_on(model, share, attend_over), None, factor)
        points[label] = by_position(twin, rows, step, rung)
    return {
        "schema": 1,
        "name": "l04_extrapolation",
        "fingerprint": fingerprint(),
        "x": [point["x"] for point in points["as trained"]],
        "trained_context": model.config.max_position_embeddings,
        "factor": factor,
        "windows": windows,
        "share": share,
        "series": {label: {"role": ROLES[label], "points": points[label]} for label in points},
    }


def main(argv: list[str] | None = None) -> int:
    # here, because measuring needs no figure
    from lessons.l04_positions.lab.figures import extrapolation_plot
    from lessons.toolbox.draw.plotting import save

    parser = argparse.ArgumentParser(
        prog="python -m lessons.l04_positions.lab.extrapolation", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--windows", type=int, default=4, help="windows of held-out text (default: 4)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "bench", help="folder for JSON, PNG and SVG"
    )
    options = parser.parse_args(argv)
    if options.windows < 1:
        print(f"--windows: got {options.windows}; accepted: 1 or more", file=sys.stderr)
        return 2
    record = measure(options.windows)
    write_json(options.out / "l04_extrapolation.json", record)
    print(*save(extrapolation_plot(record), options.out / "l04_extrapolation", alt=ALT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
