"""What a user hands to LLM's methods, and the Ctrl-C that may come while they run."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lessons.toolbox.model.arguments import refuse


@contextmanager
def interrupts_noted() -> Iterator[list]:
    """Inside it, the first Ctrl-C only fills the list, because half a step leaves blocks that no
    request owns. A second one raises KeyboardInterrupt.
    """
    noted = []

    def note(number, frame):
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    # Python delivers signals to its main thread only. Another handler belongs to other code.
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def as_list(prompts) -> list:
    """One prompt, or a list of them. Raises ValueError for nothing."""
    is_list = isinstance(prompts, (list, tuple))
    if isinstance(prompts, (str, dict)) or (is_list and prompts and type(prompts[0]) is int):
        return [prompts]
    if not is_list or not prompts:
        refuse("prompts", prompts, "a prompt, or a list of them")
    return list(prompts)


def one_each(name: str, value, count: int) -> list:
    """`value` for each prompt, or the list as it is. Raises ValueError for another length."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(
            f"{name}: got {len(values)} for {count} prompts; accepted: one, or {count}"
        )
    return values
