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
    own: float  # share of the rows that the standard library gets; the others are of all the text
    length: int  # of a window: short ones cost less attention; RoPE sees every position in the end


# Held-out text is of the standard library. To read that alone in the end is best for a short
# training, and in a long one the model learns it by heart: from its third time on held-out text
# became worse.
PHASES = (Phase(0.55, 0.0, 256), Phase(0.8, 0.5, 256), Phase(0.94, 0.5, 512), Phase(1.0, 0.5, 2048))

OWN_TEXT = (Phase(1.0, 1.0, 512),)  # for a model that is too small to learn it by heart

PYTHON = sys.version.split()[0]
KEPT = HERE.parent / "build" / "training-tokens.npz"


def streams() -> dict[str, np.ndarray]:
    """Tokens of "own" (the standard library), of "wide" (the libraries, too), and "held_out". Kept
    in build/, because encoding the libraries takes a minute; or carried there, with the "python"
    whose library it is.
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
    text: dict[str, np.ndarray],
    tokens_per_step: int,
    facts: dict,
    budget: float,
    phases: tuple[Phase, ...] = PHASES,
) -> Iterator[tuple[float, Tensor]]:
    """(share of the budget that is spent, [rows, length + 1]), phase after phase, from
    facts["tokens_seen"] on, which the training loop raises before it asks for the next batch.
    """
    begun, read = 0, {"own": 0, "wide": 0}  # tokens in front of a phase
    for phase in phases:
        rows = tokens_per_step // phase.length
        own = round(rows * phase.own)
        shares = {name: count for name, count in (("own", own), ("wide", rows - own)) if count}
        done = max(0, facts["tokens_seen"] - begun) // tokens_per_step  # steps of it
        reading = zip(
            *(
                windows(text[name], count, phase.length, read[name] + done * count * phase.length)
                for name, count in shares.items()
            )
        )
        for parts in reading:
            if (spent := facts["tokens_seen"] / budget) >= phase.until:
                break
            yield spent, torch.cat(parts)
        while begun / budget < phase.until:  # as above, so that both round alike
            begun += tokens_per_step
            for name, count in shares.items():
                read[name] += count * phase.length


if __name__ == "__main__":
    pack(streams(), KEPT.with_suffix(".xz"))
