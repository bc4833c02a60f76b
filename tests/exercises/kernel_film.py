"""A check that shows what a learner's kernel read and wrote: values, and a picture in letters below
the message.

Its film is Triton's interpreter's, because that goes on where a half-finished kernel leaves its
tensors, and takes milliseconds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lessons.toolbox.draw.film import film_text
from lessons.toolbox.draw.film_panels import name_of
from lessons.toolbox.kernels.film import Access, Film
from lessons.toolbox.measure.device import interpreting
from lessons.toolbox.proof.traps import poisoned_empty
from tests.exercises.checking import assert_equal, call, compare

KEY = "(R loaded, W stored, + touched before, ! outside, · untouched)"
VERBS = {"load": "loads", "store": "stores", "atomic": "changes"}


def assert_solves(
    impl: Callable, inputs: dict[str, Any], want: Tensor, atol: float = 0.0
) -> Film | None:
    """Call impl(**inputs), whose kernel has to store all of `want`: [...], and nothing else.

    Returns the film of its accesses (None where kernels are compiled). A failure names the first
    rule that is broken and shows the program that broke it.
    """
    if not interpreting():
        with poisoned_empty():
            compare(impl, inputs, want, atol=atol)
        return None
    with poisoned_empty(), Film() as film:
        got = call(impl, inputs)
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    if isinstance(got, Tensor):
        tensors["out"] = got
    _assert_inside(film, tensors)
    if isinstance(got, Tensor) and got.shape == want.shape:
        _assert_stored(film, got, tensors)
    try:
        assert_equal(got, want, atol=atol, label="out")
    except AssertionError as error:
        if not isinstance(got, Tensor) or got.shape != want.shape:
            raise
        wrong = (got.double() - want.double()).abs().nan_to_num(torch.inf, torch.inf).argmax()
        raise AssertionError(
            f"{error}{_picture(film, tensors, _who_stored(film, got, wrong))}"
        ) from None
    return film


def assert_loads_once(film: Film | None, x: Tensor, name: str) -> None:
    """Every element of x: [...] is loaded by exactly one program, once."""
    if film is None:
        return
    counts = torch.zeros(x.shape, dtype=torch.int64)
    for access in film.accesses:
        if access.kind == "load":
            counts += access.elements(x)
    if (counts == 1).all():
        return
    picture = _picture(film, {name: x}, film.programs()[0])
    left_out, most = int((counts == 0).sum()), int(counts.max())
    assert not left_out, (
        f"your kernel leaves out {left_out} of {x.numel()} elements of {name}, expected each to be "
        f"loaded once{picture}"
    )
    raise AssertionError(
        f"your kernel loads elements of {name} {most} times, expected once{picture}"
    )


def _assert_inside(film: Film, tensors: dict[str, Tensor]) -> None:
    wild = [access for access in film.accesses if len(access.outside)]
    if not wild:
        return
    worst = min(wild, key=lambda access: access.program)
    raise AssertionError(
        f"program {name_of(worst.program, film.dimensions())} {VERBS[worst.kind]} "
        f"{len(worst.outside)} {'element' if len(worst.outside) == 1 else 'elements'} outside the "
        f"tensors: which places does its mask have to exclude?"
        f"{_picture(film, tensors, worst.program)}"
    )


def _assert_stored(film: Film, out: Tensor, tensors: dict[str, Tensor]) -> None:
    shown = _picture(film, tensors, film.programs()[0]) if film.accesses else ""
    assert _stores(film), f"your kernel stores nothing: a result leaves it by tl.store alone{shown}"
    stored = sum(access.elements(out) for access in _stores(film))
    missing = (stored == 0).nonzero().tolist()
    assert not missing, (
        f"no program stores {len(missing)} of the {out.numel()} elements of out; the first one is "
        f"out{missing[0]}{shown}"
    )


def _stores(film: Film) -> list[Access]:
    return [access for access in film.accesses if access.kind == "store"]


def _who_stored(film: Film, out: Tensor, at: Tensor) -> tuple[int, int, int]:
    return next(access.program for access in _stores(film) if access.elements(out).flatten()[at])


def _picture(film: Film, tensors: dict[str, Tensor], program: tuple[int, int, int]) -> str:
    text = film_text(film, tensors, programs=[program], most=4, max_rows=9)
    return f"\n{text}\n{KEY}"
