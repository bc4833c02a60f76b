"""The text that the embedded models learned: the modules of Python's own standard library.

It comes with every Python, so a lesson can train on it or measure a loss without a download. Some
modules are held out: no model of the course was trained on them, nor on their tests.
"""

import sysconfig
from pathlib import Path

import numpy as np

from lessons.toolbox.model.checkpoint import load_tokenizer

END = "<|endoftext|>"

# Never trained on, nor are their tests: varied, readable modules that a learner may know.
HELD_OUT = (
    "bisect",
    "calendar",
    "cmd",
    "colorsys",
    "csv",
    "fileinput",
    "fractions",
    "graphlib",
    "heapq",
    "netrc",
    "queue",
    "sched",
    "shlex",
    "statistics",
    "string",
    "textwrap",
    "timeit",
    "wave",
    "zipapp",
)
# Tables and prose, not code that a reader would call code.
SKIPPED = (
    "encodings/",
    "pydoc_data/",
    "lib2to3/tests/data/",
    "idlelib/",
    "test/encoded_modules/",
    "site-packages/",
    "dist-packages/",
    "turtledemo/",
    "config-",
)


def corpus() -> tuple[list[str], list[str]]:
    """The standard library's modules as (train, held_out) lists of source texts, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out, seen = [], [], set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(name.startswith(s) or f"/{s}" in name for s in SKIPPED):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # deliberately broken test fixtures
        if len(text) < 200 or text in seen:
            continue
        seen.add(text)
        is_held_out = path.stem.removeprefix("test_") in HELD_OUT
        if is_held_out and not name.startswith("test/") and path.parent == root:
            held_out.append(text)
        elif not is_held_out:
            train.append(text)
    return train, held_out


def token_stream(texts: list[str]) -> np.ndarray:
    """Every text, each preceded by the end-of-text token, as one array of ids: [tokens] int64."""
    tokenizer = load_tokenizer("models/tiny")
    end = tokenizer.convert_tokens_to_ids(END)
    stream = []
    for encoded in tokenizer.backend_tokenizer.encode_batch(texts):
        stream += [end, *encoded.ids]
    return np.array(stream, dtype=np.int64)
