"""From the film of a launch to panels: which elements of which tensor an access touched, as a grid.
Use it through `toolbox.draw.film`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lessons.toolbox.kernels.film import Access, Film, Program, why_no_film
from lessons.toolbox.kernels.relaunch import compiled, launches_of
from lessons.toolbox.measure.device import interpreting

ROW = 16  # a long vector is drawn in rows of so many elements
MAX_ROWS_OUTSIDE = 3
EMPTY, UNTOUCHED, BEFORE, LOAD, STORE, ATOMIC, OUTSIDE = range(-1, 6)  # states of an element
STATES = {"load": LOAD, "store": STORE, "atomic": ATOMIC}
Launch = Callable[[], object] | Film


@dataclass(frozen=True)
class Panel:
    """One access of one tensor, ready to be drawn."""

    number: int  # in the order of the program, from 1
    access: Access
    name: str
    cells: np.ndarray  # [rows, columns] of the states above
    outside: int

    @property
    def title(self) -> str:
        """Two short lines, and more where something lies outside, or compiled code was recorded."""
        lines = [f"{self.number}. {self.access.kind}", self.name]
        lines += [f"{self.outside} outside"] if self.outside else []
        lines += [self.sectors] if self.access.sectors else []
        lines += [f"{self.access.together} a lane"] if self.access.together > 1 else []
        return "\n".join(lines)

    @property
    def sectors(self) -> str:
        """How many sectors its warps asked for, and where fewer would do, how many."""
        asked, needed = self.access.sectors, self.access.needed
        plural = "s" * (asked != 1)
        return f"{asked} sector{plural}" if asked == needed else f"{asked}/{needed} sectors"


def record(
    launch: Launch, tensors: Mapping[str, Tensor] | None = None
) -> tuple[Film, dict[str, Tensor]] | None:
    """Run launch() and return its film and the tensors to draw. None, after one line that says
    why, where nothing can be recorded.

    tensors: {name: [...]}; without it all tensor arguments of the kernels. What launch() returns
    is drawn as well, as `out`. A Film that was recorded before may stand in launch's place. Where
    kernels are interpreted, launch() is, and the film is what the compiled kernels do with the same
    arguments; `relaunch.compiled` says when it stays the interpreter's.
    """
    if isinstance(launch, Film):
        return launch, _named(launch, tensors)
    if reason := why_no_film():
        print(f"No film of loads and stores: {reason}.")
        if "not installed" not in reason:
            launch()
        return None
    if not interpreting():
        with Film() as film:
            result = launch()
        return film, _named(film, tensors, result)
    with launches_of() as launches, Film() as film:
        result = launch()
    return compiled(film, launches), _named(film, tensors, result)


def _named(film: Film, tensors: Mapping[str, Tensor] | None, result=None) -> dict[str, Tensor]:
    if tensors is None:
        return {name.removesuffix("_ptr"): x for name, x in film.arguments.items()}
    named = dict(tensors)
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"tensors[{name!r}] is {type(x).__name__}; accepted: a tensor")
    results = result if isinstance(result, (tuple, list)) else [result]
    results = [x for x in results if isinstance(x, Tensor)]
    for number, x in enumerate(results):
        if all(x.data_ptr() != other.data_ptr() for other in named.values()):
            named["out" if len(results) == 1 else f"out {number}"] = x
    return named


def panels(
    film: Film, tensors: Mapping[str, Tensor], program: Program, kernel: str | None = None
) -> list[Panel]:
    """The accesses of one program to the tensors, in order. tensors: {name: [...]}."""
    views = {name: as_rows(x) for name, x in tensors.items()}
    shapes = {name: view.shape for name, view in views.items()}
    seen = {name: np.zeros(shape, bool) for name, shape in shapes.items()}
    found = []
    for access in film.accesses:
        if access.program != program or kernel not in (None, access.kernel):
            continue
        name, hit = _whose(access, tensors)
        if name is None:
            continue
        rows, columns = shapes[name]
        cells = np.full(rows * columns, EMPTY)
        cells[: hit.size] = np.where(hit, STATES[access.kind], 0)
        cells = cells.reshape(rows, columns)
        cells[(cells == UNTOUCHED) & seen[name]] = BEFORE
        seen[name] |= cells > BEFORE
        cells = _with_outside(cells, access, tensors[name], hit.size)
        found.append(Panel(len(found) + 1, access, name, cells, len(access.outside)))
    return found


def as_rows(x: Tensor) -> np.ndarray:
    """The grid in which x: [..., columns] is drawn; a long vector is cut into rows of ROW."""
    columns = max(1, x.shape[-1] if x.dim() else 1)
    if x.dim() <= 1 and columns > ROW:
        columns = ROW * max(1, -(-columns // 4096))  # at most 256 rows
    return np.empty((-(-max(1, x.numel()) // columns), columns), bool)


def _whose(access: Access, tensors: Mapping[str, Tensor]) -> tuple[str | None, np.ndarray]:
    """The tensor that the access touches most, and which of its elements: [numel] bool."""
    hits = {name: access.elements(x).flatten().numpy() > 0 for name, x in tensors.items()}
    name = max(hits, key=lambda name: hits[name].sum(), default=None)
    if name is None or hits[name].any():
        return name, hits.get(name)
    if len(access.addresses) or not len(access.outside):
        return None, np.zeros(0, bool)
    behind = {n: abs(int(access.offsets_outside(x)[0]) - x.numel()) for n, x in tensors.items()}
    name = min(behind, key=behind.get)
    return name, hits[name]


def _with_outside(cells: np.ndarray, access: Access, x: Tensor, size: int) -> np.ndarray:
    """More cells behind the last element, for what lies right behind a contiguous tensor."""
    columns = cells.shape[1]
    behind = access.offsets_outside(x)
    behind = behind[(behind >= size) & (behind < cells.size + MAX_ROWS_OUTSIDE * columns)]
    if not x.is_contiguous() or not len(behind):
        return cells
    rows = max(len(cells), -(-(int(behind.max()) + 1) // columns))
    more = np.full((rows, columns), EMPTY)
    more[: len(cells)] = cells
    more.reshape(-1)[behind] = OUTSIDE
    return more


def chosen(film: Film, programs: Iterable[int | tuple] | None, kernel: str | None) -> list[Program]:
    """The programs to draw: as asked for, or the first and the last."""
    if kernel is not None and kernel not in film.kernels():
        raise ValueError(f"kernel is {kernel!r}; accepted: {', '.join(film.kernels())}")
    known = film.programs(kernel)
    if programs is None:
        return list(dict.fromkeys(known[:1] + known[-1:]))
    wanted = []
    for program in programs:
        full = (program, 0, 0) if isinstance(program, int) else (*program, 0, 0)[:3]
        if full not in known:
            names = ", ".join(name_of(p, film.dimensions()) for p in known[:8]) + (
                ", ..." if len(known) > 8 else ""
            )
            raise ValueError(f"programs has {program}, which touches nothing; accepted: {names}")
        wanted.append(full)
    return wanted


def name_of(program: Program, dimensions: int = 1) -> str:
    """As short as a grid of so many dimensions allows: 3, or (3, 1)."""
    while len(program) > dimensions and program[-1] == 0:
        program = program[:-1]
    return str(program[0]) if len(program) == 1 else str(program)
