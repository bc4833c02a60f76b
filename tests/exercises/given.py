"""In words, what a learner's function was given, and what the line that failed was working on."""

import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lessons.toolbox.exercises.loading import frames_in, short_path

MOST = 200  # characters of a list of values
NAME = re.compile(r"(?<![\w.\"'])([A-Za-z_]\w*)")


def arguments_of(function: Callable, args: tuple, kwargs: dict[str, Any]) -> str:
    """`q [2, 3] float32, window = 4`, by the names that the function has for them."""
    return _listed(_named(function, args, kwargs))


def _named(function: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{f"argument {n}": x for n, x in enumerate(args)}, **kwargs}


def numbers_of(function: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, float]:
    """The numbers among the arguments, in them, and their sizes: {`q.shape[0]`: 5}."""
    found: dict[str, float] = {}
    for name, value in _named(function, args, kwargs).items():
        if isinstance(value, Tensor):
            found |= {f"{name}.shape[{d}]": size for d, size in enumerate(value.shape)}
            continue
        inner = {**value} if isinstance(value, dict) else getattr(value, "__dict__", {})
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            inner = value._asdict()
        found |= {f"{name}.{key}": x for key, x in inner.items() if _is_number(x)}
        if _is_number(value):
            found[name] = value
        elif isinstance(value, (list, tuple)):
            found[f"len({name})"] = len(value)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def place_of(error: BaseException, path: Path) -> str:
    """Where an exception passed through a file: file, line and its text; "" if it did not."""
    for _, line in frames_in(error, path)[-1:]:
        return f"{short_path(path)}, line {line}: `{_text_of(path, line)}`"
    return ""


def values_at(error: BaseException, path: Path) -> str:
    """What the names in that line stand for: `scores [8, 4] float32, mask [4, 5] bool`."""
    for frame, line in frames_in(error, path)[-1:]:
        text = _text_of(path, line)
        names = dict.fromkeys(NAME.findall(text))
        return _listed({name: frame.f_locals[name] for name in names if name in frame.f_locals})
    return ""


def _text_of(path: Path, line: int) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[line - 1].strip() if line <= len(lines) else ""


def _listed(named: dict[str, Any]) -> str:
    said = [text for name, value in named.items() if (text := _said(name, value))]
    text = ", ".join(said)
    return text if len(text) <= MOST else text[:MOST].rsplit(", ", 1)[0] + ", …"


def _said(name: str, value: Any) -> str:
    """One value by its name; "" for what tells nothing, as a module or a function."""
    if isinstance(value, (types.ModuleType, type)) or callable(value):
        return ""
    if isinstance(value, Tensor):
        return f"{name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if type(value).__module__.startswith("triton") or type(value).__module__ == "numpy":
        shape = getattr(value, "shape", None)
        sizes = [getattr(size, "value", size) for size in shape] if shape else []
        return f"{name} {sizes}" if sizes else ""
    if value is None or isinstance(value, (bool, int, float, str)):
        text = repr(value)
        return f"{name} = {text}" if len(text) <= 40 else f"{name}: {len(value)} characters"
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        text = repr(value)
        if len(text) <= 40 and "tensor(" not in text and "object at" not in text:
            return f"{name} = {text}"
        tensors = [list(x.shape) for x in value if isinstance(x, Tensor)]
        inside = f" of tensors {tensors[0]}" if tensors and len(tensors) == len(value) else ""
        return f"{name}: {type(value).__name__} of {len(value)}{inside}"
    if isinstance(value, torch.dtype):
        return f"{name} = {value}"
    # a check may watch what it hands out: the learner knows the class that it watches
    known = next(c for c in type(value).__mro__ if not c.__module__.startswith("tests."))
    return f"{name}: a {(known if known is not object else type(value)).__name__}"
