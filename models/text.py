"""What the embedded models read in training: which text in which part of it, in windows of tokens.

python -m models.text      # the tokens in a file that is small enough to be carried to a machine
                           # without the libraries: build/training-tokens.xz
"""

import io
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lessons.toolbox.model.corpus import corpus, libraries, token_stream
from models.tokenizer import HERE


class Phase(NamedTuple):
    """A part of a training, until a share of its tokens has been seen."""

    until: float
    text: str  # "wide": the libraries too; "own": the standard library
    length: int  # of a window: RoPE sees every position in the end


PHASES = (Phase(0.6, "wide", 512), Phase(0.88, "own", 512), Phase(1.0, "own", 2048))


PYTHON = sys.version.split()[0]
KEPT = HERE.parent / "build" / "training-tokens.npz"


def streams() -> dict[str, np.ndarray]:
    """Tokens to train on, by Phase.text, and "held_out". Kept in build/, because encoding the
    libraries takes minutes; or carried there, with the "python" whose library it is.
    """
    kept, carried = KEPT, KEPT.with_suffix(".xz")
    if not kept.exists() and carried.exists():
        return unpacked(carried)
    if not kept.exists():
        print("encoding the text, once", flush=True)
        own, held_out = corpus()
        texts = {"own": own, "wide": own + libraries(), "held_out": held_out}
        kept.parent.mkdir(exist_ok=True)
        np.savez(
            kept, **{name: token_stream(part).astype(np.uint16) for name, part in texts.items()}
        )
    return dict(np.load(kept))


def pack(text: dict[str, np.ndarray], file: Path) -> None:
    """Write `streams` so small that it can be carried: compressed, and what begins "wide" once."""
    own = len(text["own"])
    assert np.array_equal(text["wide"][:own], text["own"]), "the libraries come behind"
    with lzma.open(file, "wb") as packed:
        np.savez(packed, wide=text["wide"], held_out=text["held_out"], own=own, python=PYTHON)


def unpacked(file: Path) -> dict[str, np.ndarray]:
    """What `pack` wrote, as `streams` gives it."""
    held = np.load(io.BytesIO(lzma.decompress(file.read_bytes())))
    wide = held["wide"]
    own = {"own": wide[: int(held["own"])], "python": held["python"]}
    return own | {"wide": wide, "held_out": held["held_out"]}


def windows(stream: np.ndarray, rows: int, length: int, seen: int) -> Iterator[Tensor]:
    """Endless [rows, length + 1] batches, from the one after `seen` tokens on: each epoch cuts the
    stream at a new offset and shuffles the pieces.
    """
    epoch, skipped = 0, seen // (rows * length)
    while True:
        rng = np.random.default_rng(epoch)  # of its own, so that a training can go on in any epoch
        starts = np.arange(rng.integers(length), len(stream) - length - 1, length)
        rng.shuffle(starts)
        batches = len(starts) // rows
        for i in range(min(skipped, batches), batches):
            pieces = [stream[s : s + length + 1] for s in starts[i * rows : (i + 1) * rows]]
            yield torch.from_numpy(np.stack(pieces).astype(np.int64))
        epoch, skipped = epoch + 1, max(0, skipped - batches)


def batches(
    text: dict[str, np.ndarray], tokens_per_step: int, facts: dict, budget: float
) -> Iterator[tuple[float, Tensor]]:
    """(share of the budget that is spent, [rows, length + 1]), phase after phase, from facts["tokens_seen"]
    on, which whoever trains on a batch raises before asking for the next.
    """
    for phase in PHASES:
        rows, seen = tokens_per_step // phase.length, facts["tokens_seen"]
        for batch in windows(text[phase.text], rows, phase.length, seen):
            if (spent := facts["tokens_seen"] / budget) >= phase.until:
                break
            yield spent, batch


if __name__ == "__main__":
    pack(streams(), KEPT.with_suffix(".xz"))
