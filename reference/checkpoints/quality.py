"""What a checkpoint costs in quality, beside the one that it was made from.

    python -m reference.checkpoints.quality MODEL --reference MODEL [--windows 24]

MODEL is any checkpoint that the course loads, quantized or not: a folder, a hub name, or a .gguf
file. Both models must have the same tokenizer. Lesson 18's lab/quality.py explains the five
measures.
"""

import argparse

from lessons.l18_weight_quantization.lab.quality import (
    WINDOWS,
    bits_per_weight,
    greedy_answers,
    held_out_windows,
    predictions,
    quality,
    table,
)
from lessons.toolbox.command import run_command
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.checkpoint import load_tokenizer
from reference.checkpoints.any_checkpoint import load_any


def main(argv: list[str] | None = None) -> int:
    """The command; every failure is one line."""
    return run_command("quality", lambda: run(argv))


def run(argv: list[str] | None) -> int:
    """Measure and print. Raises CheckpointError for a model that cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m reference.checkpoints.quality",
        description=__doc__.split("\n")[0],
    )
    parser.add_argument("model")
    parser.add_argument("--reference", required=True)
    parser.add_argument("--windows", type=int, default=WINDOWS)
    options = parser.parse_args(argv)
    device = default_device()
    reference, model = (load_any(name, device) for name in (options.reference, options.model))
    windows = held_out_windows(load_tokenizer(options.reference), options.windows)
    answers = greedy_answers(reference, windows)
    print(f"{bits_per_weight(model):.3f} bits a weight in the linear layers, as loaded")
    print(table(quality(model, windows, predictions(reference, windows), answers)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
