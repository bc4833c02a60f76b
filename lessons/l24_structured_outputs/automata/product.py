"""The texts that fit two expressions at once, and those that fit one but not the other.

Both automata read the same text side by side, so a state of the product is a pair of states. There
may be as many pairs as the product of their sizes, so the pairs are bounded. Expressions that call
rules have a stack and no such product.

Source: Rabin and Scott 1959, *Finite Automata and Their Decision Problems*, theorem 6.
"""

from lessons.l24_structured_outputs.automata.automaton import NoText, compile_grammar
from lessons.l24_structured_outputs.automata.minimize import merge_equal
from lessons.l24_structured_outputs.automata.nfa import MOST_POSITIONS, TooLarge
from lessons.l24_structured_outputs.languages.syntax import (
    ROOT,
    Expression,
    Grammar,
    Machine,
)

MOST_WORK = 250_000  # ranges of bytes that all products look at: about half a second
MOST_MERGED = 50_000  # edges that the search for equal positions looks at
NOTHING = Machine(((),), (False,))


class Products:
    """Makes products, of which a caller needs many: together they are bounded."""

    def __init__(self):
        self.known: dict[Expression, Machine] = {}
        self.work = 0

    def both(self, one: Expression, other: Expression) -> Machine:
        """The texts that fit both. Neither calls a rule. Raises TooLarge."""
        return self.product(self.machine_of(one), self.machine_of(other))

    def but_not(self, one: Expression, other: Expression) -> Machine:
        """The texts that fit `one` and not `other`. Neither calls a rule. Raises TooLarge."""
        return self.product(self.machine_of(one), opposite(self.machine_of(other)))

    def machine_of(self, expression: Expression) -> Machine:
        """The deterministic automaton of an expression without calls. Raises TooLarge."""
        if expression not in self.known:
            self.known[expression], work = deterministic(expression)
            self.count(work)
        return self.known[expression]

    def product(self, one: Machine, other: Machine) -> Machine:
        """Both at once: a pair is final where both states are."""
        numbers = {(0, 0): 0}
        pairs, edges = [(0, 0)], []
        while len(edges) < len(pairs):
            left, right = pairs[len(edges)]
            found = []
            for low, high, targets in shared_ranges(one.edges[left], other.edges[right]):
                if targets not in numbers:
                    numbers[targets] = len(pairs)
                    pairs.append(targets)
                found.append((low, high, numbers[targets]))
            edges.append(tuple(found))
            self.count(1 + len(one.edges[left]) + len(other.edges[right]))
            if len(pairs) > MOST_POSITIONS:
                raise TooLarge
        is_final = tuple(one.is_final[left] and other.is_final[right] for left, right in pairs)
        return Machine(tuple(edges), is_final)

    def count(self, work: int) -> None:
        """Raise TooLarge once too much was looked at."""
        self.work += work
        if self.work > MOST_WORK:
            raise TooLarge


def deterministic(expression: Expression) -> tuple[Machine, int]:
    """The smallest deterministic automaton of an expression without calls, and a measure of the
    work that it took. Raises TooLarge.
    """
    try:
        automaton = compile_grammar(Grammar({ROOT: expression}))
    except NoText:
        return NOTHING, 1
    work = automaton.work + merge_equal(automaton, MOST_MERGED) // 2
    bytes_of = [automaton.class_of.index(c) for c in range(automaton.num_classes)] + [256]
    # A class is one range of bytes, because classes are cut from 0 to 255 in order.
    edges = tuple(
        tuple((bytes_of[c], bytes_of[c + 1] - 1, target) for c, target in sorted(edges.items()))
        for edges in automaton.edges
    )
    return Machine(edges, tuple(automaton.is_final)), work


def is_read(machine: Machine, data: bytes) -> bool:
    """Whether a text fits."""
    state = 0
    for byte in data:
        targets = (target for low, high, target in machine.edges[state] if low <= byte <= high)
        state = next(targets, None)
        if state is None:
            return False
    return machine.is_final[state]


def opposite(machine: Machine) -> Machine:
    """All other texts of bytes: every byte leads somewhere, and what was final is not."""
    dead = len(machine.edges)
    edges = []
    for ranges in (*machine.edges, ()):
        full, start = [], 0
        for low, high, target in (*ranges, (256, 256, dead)):
            if start < low:
                full.append((start, low - 1, dead))
            if low < 256:
                full.append((low, high, target))
            start = high + 1
        edges.append(tuple(full))
    return Machine(tuple(edges), (*(not final for final in machine.is_final), True))


def shared_ranges(one: tuple, other: tuple) -> list[tuple[int, int, tuple[int, int]]]:
    """The bytes of two sorted lists of ranges, each with both targets."""
    found, n, m = [], 0, 0
    while n < len(one) and m < len(other):
        low, high = max(one[n][0], other[m][0]), min(one[n][1], other[m][1])
        if low <= high:
            found.append((low, high, (one[n][2], other[m][2])))
        if one[n][1] == high:
            n += 1
        else:
            m += 1
    return found
