"""Positions that no text tells apart are made one, so that fewer masks are needed.

`[0-9]+(,[0-9]+)*` has six positions after the subset construction, because a first digit and a
later one come from different states. Two are enough: after a digit, and not.

Source: Moore 1956, *Gedanken-experiments on Sequential Machines* (refine until nothing changes).
"""

from lessons.l24_structured_outputs.automata.automaton import Automaton

MOST_WORK = 150_000  # edges looked at: about a tenth of a second


def merge_equal(automaton: Automaton, most: int = MOST_WORK) -> int:
    """Make equal positions one, in place. An automaton for which more than `most` edges would be
    looked at stays as it is. Returns how many were.
    """
    size = sum(1 + len(edges) for edges in automaton.edges)
    group: list[int] = [int(is_final) for is_final in automaton.is_final]
    count = len(set(group))
    rounds = most // size
    for n in range(rounds):
        # Two positions stay together if every byte and every call leads them to the same group.
        numbers: dict[tuple, int] = {}
        group = [
            numbers.setdefault(row_of(automaton, position, group), len(numbers))
            for position in range(len(group))
        ]
        if len(numbers) == count:
            keep_groups(automaton, group, count)
            return (n + 1) * size
        count = len(numbers)
    return rounds * size


def row_of(automaton: Automaton, position: int, group: list[int]) -> tuple:
    """What is known of a position: its group, and the groups to which it leads."""
    edges = sorted((c, group[target]) for c, target in automaton.edges[position].items())
    calls = sorted((rule, group[target]) for rule, target in automaton.calls[position])
    return group[position], tuple(edges), tuple(calls)


def keep_groups(automaton: Automaton, group: list[int], count: int) -> None:
    """One position for each group."""
    member = [0] * count
    for position, number in enumerate(group):
        member[number] = position
    automaton.edges = [{c: group[to] for c, to in automaton.edges[at].items()} for at in member]
    automaton.calls = [[(r, group[to]) for r, to in automaton.calls[at]] for at in member]
    automaton.is_final = [automaton.is_final[at] for at in member]
    automaton.start = {rule: group[at] for rule, at in automaton.start.items()}
