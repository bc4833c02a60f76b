"""The texts that fit two expressions at once, and those that fit one but not the other.

Both automata read the same text side by side, so a state of the product is a pair of states. There
may be as many pairs as the product of their sizes, so the pairs are bounded. Expressions that call
rules have a stack and no such product.

Source: Rabin and Scott 1959, *Finite Automata and Their Decision Problems*, theorem 6.
"""

from lessons.l24_structured_outputs.automata.automaton import compile_grammar
from lessons.l24_structured_outputs.automata.nfa import MOST_POSITIONS, TooLarge
from lessons.l24_structured_outputs.languages.syntax import (
    ROOT,
    Choice,
    Expression,
    Grammar,
    Machine,
)

MOST_RANGES = 200_000  # of bytes that one product looks at: about a tenth of a second
NOTHING = Machine(((),), (False,))


def both(one: Expression, other: Expression) -> Machine:
    """The texts that fit both. Neither calls a rule. Raises TooLarge."""
    return product(machine_of(one), machine_of(other))


def but_not(one: Expression, other: Expression) -> Machine:
    """The texts that fit `one` and not `other`. Neither calls a rule. Raises TooLarge."""
    return product(machine_of(one), opposite(machine_of(other)))


def machine_of(expression: Expression) -> Machine:
    """The deterministic automaton of an expression without calls. Raises TooLarge."""
    if isinstance(expression, Machine):
        return expression
    if expression == Choice(()):
        return NOTHING
    automaton = compile_grammar(Grammar({ROOT: expression}))
    bytes_of = [automaton.class_of.index(c) for c in range(automaton.num_classes)] + [256]
    # A class is one range of bytes, because classes are cut from 0 to 255 in order.
    edges = tuple(
        tuple((bytes_of[c], bytes_of[c + 1] - 1, target) for c, target in sorted(edges.items()))
        for edges in automaton.edges
    )
    return Machine(edges, tuple(automaton.is_final))


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


def product(one: Machine, other: Machine) -> Machine:
    """Both at once: a pair is final where both states are."""
    numbers = {(0, 0): 0}
    pairs, edges, work = [(0, 0)], [], 0
    while len(edges) < len(pairs):
        left, right = pairs[len(edges)]
        found = []
        for low, high, targets in shared_ranges(one.edges[left], other.edges[right]):
            if targets not in numbers:
                numbers[targets] = len(pairs)
                pairs.append(targets)
            found.append((low, high, numbers[targets]))
        edges.append(tuple(found))
        work += 1 + len(one.edges[left]) + len(other.edges[right])
        if len(pairs) > MOST_POSITIONS or work > MOST_RANGES:
            raise TooLarge
    is_final = tuple(one.is_final[left] and other.is_final[right] for left, right in pairs)
    return Machine(tuple(edges), is_final)


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
