"""The lessons' Python in a page, without a server: Brython translates it in the browser.

    python -m book.playground            packs the course's files again, with all tables
    python -m book.playground.packing    packs Brython again; needs `pip install brython==3.15.0`

Two scripts. python.js is Brython and what it needs of the standard library, compressed, because a
page should stay below a megabyte. course_data.js has the files of the course that live.py imports.
Modules that no browser runs, PyTorch first, are there by name (elsewhere.py).

Brython rather than Pyodide: Pyodide is ten times as large, and reads its parts with requests that a
browser refuses to a page which was opened from a folder.

Source: Brython, https://github.com/brython-dev/brython (BSD licence, beside python.js).
"""

import ast
import base64
import gzip
import json
from pathlib import Path

STATIC = Path(__file__).parents[1] / "static/playground"
ROOT = Path(__file__).parents[2]
RUNTIME = STATIC / "python.js"
# What live.py imports, and of that what computes in the browser.
MODULES = """
book.playground.elsewhere book.playground.live
lessons.l02_naive_attention.request lessons.l12_paged_kv.blocks lessons.l13_prefix_caching.cache
lessons.l14_continuous_batching.sequence lessons.l14_continuous_batching.optimized
lessons.l14_continuous_batching.naive lessons.l14_continuous_batching.loop
lessons.l14_continuous_batching.clock lessons.l14_continuous_batching.lab.cost
lessons.l15_chunked_prefill.preemption lessons.l15_chunked_prefill.naive
lessons.l15_chunked_prefill.optimized
"""
# Of the standard library, what these import; the others are absent in a browser, too.
STANDARD = """
__future__ _ast _codecs _collections _collections_abc _colorize _frozen_importlib _functools _imp
_io _io_classes _json _locale _operator _py_abc _thread _tokenize _typing _weakref _weakrefset abc
annotationlib ast bisect browser codecs collections contextlib copy copyreg dataclasses dis enum
errno functools genericpath importlib importlib._bootstrap importlib._bootstrap_external
importlib.machinery inspect io itertools json json.encoder keyword linecache marshal operator os
posix posixpath python_re re reprlib stat sys time token tokenize types typing weakref
"""
ABSENT = ("pathlib", "numpy", "torch")
STAND_IN = """from book.playground.elsewhere import Elsewhere

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Elsewhere(f"{__name__}.{name}")
"""


def source_of(module: str) -> str:
    """The file of a module of the course."""
    return ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")


def unevaluated(source: str) -> str:
    """The same with annotations that stay words, because Brython 3.15 loses its place in some of
    them. The line goes where a __future__ may stand, after the docstring.
    """
    first = ast.parse(source).body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    lines = source.splitlines(keepends=True)
    lines.insert(first.end_lineno if is_docstring else 0, "from __future__ import annotations\n")
    return "".join(lines)


def imported(source: str) -> set[str]:
    """The modules that a file names in its imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            is_package = ROOT.joinpath(*node.module.split(".")).is_dir()
            inside = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(inside if is_package else [node.module])
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def course() -> dict[str, list]:
    """{module: [".py", source, imports]}, and a fourth entry for a package, as Brython wants it."""
    sources = {module: unevaluated(source_of(module)) for module in MODULES.split()}
    for module in set().union(*map(imported, sources.values())):
        first = module.partition(".")[0]
        if module not in sources and (first in ("lessons", "reference") or first in ABSENT):
            sources.setdefault(module, STAND_IN)
    files = {name: [".py", source, []] for name, source in sorted(sources.items())}
    for module in list(files):
        while module := module.rpartition(".")[0]:
            kept = files.get(module, [".py", "", []])
            files[module] = [*kept[:3], 1]
    return dict(sorted(files.items()))


def cost() -> list[float]:
    """What a step takes, by lesson 14's prediction: seconds of a step, a token, and a token of
    context.
    """
    from lessons.l14_continuous_batching.lab.cost import predicted

    found = predicted("llama-3-8b")
    return [float(f"{x:.4g}") for x in (found.fixed_s, found.token_s, found.context_s)]


def table() -> dict:
    """What course_data.js says."""
    return {"cost": cost(), "modules": course()}


# ---------------------------------------------------------------- Brython


def runtime() -> str:
    """python.js: Brython and its licence. Needs the package `brython`."""
    from importlib.metadata import distribution

    found = distribution("brython")
    data = Path(str(found.locate_file("brython/data")))
    library = (data / "brython_stdlib.js").read_text(encoding="utf-8")
    scripts, _ = json.JSONDecoder().raw_decode(library[library.index("{") :])
    kept = {name: scripts[name] for name in STANDARD.split()}
    code = (data / "brython.js").read_text(encoding="utf-8")
    files = json.dumps(kept, separators=(",", ":"))
    text = f"{code}\n__BRYTHON__.use_VFS = true;\n__BRYTHON__.update_VFS({files});\n"
    packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    about = f"Brython {found.version}, and of its standard library what the playground imports."
    return (
        f"/* {about} Compressed by\n"
        "   book/playground/packing.py. Its licence is brython_licence.txt. */\n"
        "window.PLAYGROUND = window.PLAYGROUND || {};\n"
        f'window.PLAYGROUND.python = "{packed}";\n'
    )


if __name__ == "__main__":
    RUNTIME.write_text(runtime(), encoding="utf-8")
    print(f"{RUNTIME.name}: {RUNTIME.stat().st_size // 1024} KB")
