"""Wrong arguments of public functions, refused in one line: the name, the value, what is accepted.

These checks run once, where an object is made or a request is read, never in a step.
"""

import functools
import inspect
import reprlib
import sys
from collections.abc import Callable

LONGEST_LINE = 300  # characters
_short = reprlib.Repr()
_short.maxstring = 80  # 30 would cut names of keys


def shown(value) -> str:
    """A value for an error: one short line, however long it is."""
    try:
        return " ".join(_short.repr(value).split())
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"an integer of {value.bit_length()} bits"


def one_line(message: str, longest: int = LONGEST_LINE) -> str:
    """`message` as one printable line. Of a longer one both ends are kept."""
    line = " ".join(message.split())
    # because a name in a file may hold what a terminal obeys or cannot print
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    if len(line) <= longest:
        return line
    end = longest // 3
    return f"{line[: longest - end - 5]} ... {line[-end:]}"


def refuse(name: str, value, accepted: str) -> None:
    """Raise the ValueError of a wrong argument."""
    raise ValueError(f"{name}: got {shown(value)}; accepted: {accepted}")


def is_whole(value, low: int = 1, high: int = 2**31 - 1) -> bool:
    """Whether it is an int from `low` to `high`. True and False are integers to Python, and
    mistakes here.
    """
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value, low: float = -sys.float_info.max, high: float = sys.float_info.max) -> bool:
    """Whether it is an int or a float from `low` to `high`. NaN is not; by default neither is
    infinity.
    """
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and low <= value <= high


def check_whole(low: int = 1, **values: int) -> None:
    """Raise ValueError that names the first value that is no int from `low` to 2³¹ - 1."""
    for name, value in values.items():
        if not is_whole(value, low):
            refuse(name, value, f"a whole number, {low} or more and below 2**31")


def check_counts(arguments, *names: str, low: int = 1, optional: bool = False) -> None:
    """Raise ValueError that names the first of these attributes that is no whole number from `low`
    on. optional: it may be None.
    """
    accepted = f"{'None, or ' if optional else ''}a whole number, {low} or more and below 2**31"
    for name in names:
        value = getattr(arguments, name)
        if not is_whole(value, low) and not (optional and value is None):
            refuse(name, value, accepted)


def check_positive(**values: float) -> None:
    """Raise ValueError that names the first value that is no positive, finite number."""
    for name, value in values.items():
        if not is_number(value, 0) or value == 0:
            refuse(name, value, "a positive, finite number")


def check_kind(kind: type | tuple[type, ...], what: str, **values) -> None:
    """Raise ValueError that names the first value that is no `kind`, and says `what` is
    accepted.
    """
    for name, value in values.items():
        if not isinstance(value, kind):
            refuse(name, value, what)


def named(config, names: str) -> dict:
    """{name: value} of some fields, their names between blanks, for a check that names the wrong
    one.
    """
    return {name: getattr(config, name) for name in names.split()}


def with_other_names(read: Callable[[list[str], dict], None]):
    """Decorator of a function or a class. Arguments that it does not have go to read(its own names,
    {name: value}), which refuses them or lets them be, instead of Python's TypeError.
    """

    def decorated(target):
        call = target.__init__ if isinstance(target, type) else target
        known = [name for name in inspect.signature(call).parameters if name != "self"]

        @functools.wraps(call)
        def checked(*values, **named):
            others = {name: value for name, value in named.items() if name not in known}
            if others:
                read(known, others)
                named = {name: value for name, value in named.items() if name in known}
            return call(*values, **named)

        if not isinstance(target, type):
            return checked
        target.__init__ = checked
        return target

    return decorated
