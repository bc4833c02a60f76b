"""The text that the embedded models learn: the modules of Python's own standard library.

It comes with every Python, so a lesson can train on it or measure a loss without a download. Some
modules are held out: no model of the course was trained on them, nor on their tests. A longer
training also reads the sources of libraries that the course installs, whose licences allow it.
"""

import importlib.util
import random
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


# Libraries that the course installs, by the name that is imported -> licence, which is permissive.
LIBRARIES = {
    "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "sympy": "BSD-3-Clause",
    "scipy": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
    "matplotlib": "PSF-2.0",
    "networkx": "BSD-3-Clause",
    "pip": "MIT",
    "fontTools": "MIT",
    "huggingface_hub": "Apache-2.0",
    "setuptools": "MIT",
    "IPython": "BSD-3-Clause",
    "mpmath": "BSD-3-Clause",
    "tornado": "Apache-2.0",
    "accelerate": "Apache-2.0",
    "prompt_toolkit": "BSD-3-Clause",
    "rich": "MIT",
    "triton": "MIT",
    "jedi": "MIT",
    "fsspec": "BSD-3-Clause",
    "pygments": "BSD-2-Clause",
    "peft": "Apache-2.0",
    "pydantic": "MIT",
    "_pytest": "MIT",
    "PIL": "MIT-CMU",
    "fastapi": "MIT",
    "websockets": "BSD-3-Clause",
    "jupyter_server": "BSD-3-Clause",
    "anyio": "MIT",
    "gguf": "MIT",
    "jinja2": "BSD-3-Clause",
    "packaging": "Apache-2.0",
    "pyparsing": "MIT",
    "babel": "BSD-3-Clause",
    "click": "BSD-3-Clause",
    "urllib3": "MIT",
    "zmq": "BSD-3-Clause",
    "bs4": "MIT",
    "ipywidgets": "BSD-3-Clause",
    "jsonschema": "MIT",
    "jupyter_client": "BSD-3-Clause",
    "psutil": "BSD-3-Clause",
    "ipykernel": "BSD-3-Clause",
    "traitlets": "BSD-3-Clause",
    "dateutil": "BSD-3-Clause",
    "httpx": "BSD-3-Clause",
    "nbconvert": "BSD-3-Clause",
    "uvicorn": "BSD-3-Clause",
    "starlette": "BSD-3-Clause",
    "markdown_it": "MIT",
    "requests": "Apache-2.0",
    "yaml": "MIT",
    "mistune": "BSD-3-Clause",
    "prometheus_client": "Apache-2.0",
    "attr": "MIT",
    "pexpect": "ISC",
    "nbformat": "BSD-3-Clause",
    "referencing": "MIT",
    "h11": "MIT",
}
GENERATED = (
    "automatically generated"  # in a file's beginning: a copy of another file, with other names
)
LONGEST = 100_000  # characters; what is longer was generated, or is a table
LONG_LINE = 30  # characters; shorter lines stand in any module
# A file is a copy if more than this share of its long lines, and no fewer than so many, are held
# out.
COPIED, FEWEST_COPIED = 0.1, 5


def corpus() -> tuple[list[str], list[str]]:
    """The standard library's modules as (train, held_out) lists of source texts, in a fixed
    order.
    """
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


def libraries() -> list[str]:
    """The sources of LIBRARIES, as many as are installed, in an order drawn once: texts that hold
    nothing of the held-out modules, not even under another name.
    """
    secret = {line for text in corpus()[1] for line in long_lines(text)}
    texts = {}
    for name in LIBRARIES:
        found = importlib.util.find_spec(name)
        if found is None or not found.submodule_search_locations:
            continue
        for path in sorted(Path(found.submodule_search_locations[0]).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if GENERATED in text[:500] or "\ufffd" in text:
                continue
            if 200 <= len(text) <= LONGEST and not copies(text, secret):
                texts[text] = name
    order = list(texts)
    random.Random(0).shuffle(order)  # or a model would learn one library after the other
    return order


def long_lines(text: str) -> list[str]:
    """Its lines of LONG_LINE characters or more, without what stands around them."""
    return [line.strip() for line in text.splitlines() if len(line.strip()) >= LONG_LINE]


def copies(text: str, secret: set[str]) -> bool:
    """Whether too many of its long lines are in `secret`."""
    lines = long_lines(text)
    copied = sum(line in secret for line in lines)
    return copied >= FEWEST_COPIED and copied > COPIED * len(lines)


def token_stream(texts: list[str]) -> np.ndarray:
    """Every text as one array of ids: [tokens] int64. The tokenizer begins each of them with
    END.
    """
    tokenizer = load_tokenizer("models/tiny")
    parts = [np.empty(0, np.int64)]
    for first in range(0, len(texts), 256):  # some at a time, because an encoding holds much beside
        for encoded in tokenizer.backend_tokenizer.encode_batch(texts[first : first + 256]):
            parts.append(np.array(encoded.ids, dtype=np.int64))
    return np.concatenate(parts)
