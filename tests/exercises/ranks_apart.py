"""Whether each simulated rank uses its own entries alone.

All ranks are in one process, so nothing but its author's word keeps a rank from reading the entries
of another. But then what it computes depends on them, and that can be seen: run it, keep what the
collectives gave, run it again with other entries of one rank and the collectives that give the same
as before. What another rank puts in, and what it has at the end, must be what it was.
"""

from collections.abc import Callable, Iterable
from typing import Any

from lessons.l20_parallelism.processes.ranks import Ranks
from tests.exercises.checking import alike, note, unspoiled

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def assert_apart(
    impl: Callable,
    inputs: dict[str, Any],
    size: int,
    change: Callable[[int], dict[str, Any]],
    *,
    what: str,
    results: Callable[[Any], Iterable] = lambda got: got,
    works: bool = True,
) -> None:
    """impl(**inputs, ranks=…) keeps its `size` ranks apart. change(rank): the inputs with other
    entries of this rank, `what` in words; they must not change what is routed where.

    results: of each rank, from what was returned. works: what the rank itself puts into collectives
    has to change, because it depends on these entries.
    """
    first = Kept(size)
    with unspoiled(inputs):
        before = list(results(note(impl(**inputs, ranks=first))))
    for rank in range(size):
        again = Again(first, rank, what)
        with unspoiled(changed := change(rank)):
            after = list(results(impl(**changed, ranks=again)))
        assert len(again.calls) == len(first.calls), (
            f"with other {what} of rank {rank} your function has {len(again.calls)} collectives, "
            f"not {len(first.calls)}"
        )
        for other, (mine, then) in enumerate(zip(after, before)):
            assert other == rank or alike(mine, then), (
                f"the result of rank {other} follows {what} of rank {rank}, which came through no "
                "collective. A rank may use its own entries only"
            )
        assert again.moved or not works, (
            f"what rank {rank} puts into the collectives does not depend on {what} of rank {rank}: "
            "which rank does its work?"
        )


class Kept(Ranks):
    """Keeps what went into each collective, and what came out."""

    def __init__(self, size: int):
        super().__init__(size)
        self.kept: list[tuple[str, list, list]] = []

    def _run(self, name: str, parts: list, *options, **named) -> list:
        got = getattr(Ranks, name)(self, parts, *options, **named)
        self.kept.append((name, parts, got))
        return got


class Again(Ranks):
    """Gives what came out before. Raises AssertionError if a rank other than `changed` puts in
    something else.
    """

    def __init__(self, first: Kept, changed: int, what: str):
        super().__init__(first.size)
        self.first, self.changed, self.what, self.moved = first, changed, what, False

    def _run(self, name: str, parts: list, *options, **named) -> list:
        at = len(self.calls)
        self.calls.append((name, 0))
        known = self.first.kept[at] if at < len(self.first.kept) else ("", [], [])
        assert name == known[0], (
            f"with other {self.what} of rank {self.changed} your collective {at} is {name}"
        )
        for rank, (mine, before) in enumerate(zip(parts, known[1])):
            same = alike(mine, before)
            self.moved |= rank == self.changed and not same
            assert same or rank == self.changed, (
                f"what rank {rank} puts into {name} follows {self.what} of rank {self.changed}. A "
                "rank may use its own entries only, and what came through a collective"
            )
        return known[2]


def _collective(name: str) -> Callable:
    return lambda self, parts, *options, **named: self._run(name, parts, *options, **named)


for kind in (Kept, Again):
    for name in COLLECTIVES:
        setattr(kind, name, _collective(name))
