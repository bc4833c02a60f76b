"""A few lines of a function, printed from its source, so that a notebook never shows old code.

excerpt(naive.stopwatch_ms, "start =")                     from this line to the end
excerpt(optimized.scale_copy_kernel, "lane =", "store")    to the first line that holds "store"
"""

import inspect
import textwrap


def excerpt(function, first: str, last: str | None = None) -> None:
    """Print the lines of `function` (a Triton kernel, too) from the first one that holds `first` to
    the next one that holds `last`; None: to the end. Raises ValueError if there is no such line.
    """
    lines = inspect.getsource(getattr(function, "fn", function)).rstrip().splitlines()
    start = _line(lines, first, 0, "first")
    end = len(lines) - 1 if last is None else _line(lines, last, start, "last")
    print(textwrap.dedent("\n".join(lines[start : end + 1])))


def _line(lines: list[str], text: str, start: int, name: str) -> int:
    for number in range(start, len(lines)):
        if text in lines[number]:
            return number
    raise ValueError(f"{name} is {text!r}; accepted: a part of a line from line {start + 1} on")
