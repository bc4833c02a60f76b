"""Thompson's machine of an expression: states with edges by bytes, by calls of rules, and for
nothing.

Source: Thompson 1968, *Regular Expression Search Algorithm*.
"""

from lessons.l24_structured_outputs.languages.syntax import (
    Call,
    Chars,
    Choice,
    Expression,
    Machine,
    Repeat,
    Sequence,
)
from lessons.l24_structured_outputs.languages.utf8 import byte_sequences

MOST_STATES = 20_000  # of all rules of a grammar
MOST_POSITIONS = 10_000  # of its deterministic automaton


class TooLarge(ValueError):
    """A grammar whose automaton would take too long to make, or too much memory."""

    def __init__(self):
        super().__init__(
            f"the grammar is too large: its automaton needs more than {MOST_STATES} states or "
            f"{MOST_POSITIONS} positions; accepted: fewer or smaller repetitions and alternatives"
        )


class Nfa:
    """The machine of all rules. ends: {rule: its first state, its last}."""

    def __init__(self):
        self.ends: dict[str, tuple[int, int]] = {}
        self.edges: list[list[tuple[int, int, int]]] = []  # (first byte, last byte, target)
        self.calls: list[list[tuple[str, int]]] = []
        self.empty: list[list[int]] = []

    def new_state(self) -> int:
        """A state without edges."""
        if len(self.edges) >= MOST_STATES:
            raise TooLarge
        self.edges.append([])
        self.calls.append([])
        self.empty.append([])
        return len(self.edges) - 1

    def add_rule(self, name: str, rule: Expression) -> set[str]:
        """States for a rule. Returns the rules that it calls."""
        start = self.new_state()
        self.ends[name] = start, self.add(rule, start)
        return {called for calls in self.calls[start:] for called, _ in calls}

    def add(self, part: Expression, start: int) -> int:
        """States for `part` after `start`; returns the one in which it ends."""
        if isinstance(part, Sequence):
            for each in part.parts:
                start = self.add(each, start)
            return start
        if isinstance(part, Repeat):
            return self.add_repeat(part, start)
        end = self.new_state()
        if isinstance(part, Choice):
            for each in part.parts:
                self.empty[self.add(each, start_behind(self, start))].append(end)
        elif isinstance(part, Call):
            self.calls[start].append((part.rule, end))
        elif isinstance(part, Machine):
            self.add_machine(part, start, end)
        else:
            self.add_chars(part, start, end)
        return end

    def add_repeat(self, part: Repeat, start: int) -> int:
        """Copies of a part, the last ones optional, or a loop."""
        for _ in range(part.low):
            start = self.add(part.part, start)
        if part.high is None:
            loop = start_behind(self, start)
            self.empty[self.add(part.part, loop)].append(loop)
            return start_behind(self, loop)
        skips = [start]
        for _ in range(part.high - part.low):
            start = self.add(part.part, start_behind(self, start))
            skips.append(start)
        end = self.new_state()
        for state in skips:
            self.empty[state].append(end)
        return end

    def add_machine(self, machine: Machine, start: int, end: int) -> None:
        """Copies of its states, the final ones with a way to the end."""
        states = [self.new_state() for _ in machine.edges]
        self.empty[start].append(states[0])
        for state, edges, is_final in zip(states, machine.edges, machine.is_final):
            self.edges[state] = [(low, high, states[target]) for low, high, target in edges]
            if is_final:
                self.empty[state].append(end)

    def add_chars(self, chars: Chars, start: int, end: int) -> None:
        """Byte sequences that end alike share their states."""
        shared = {(): end}
        for ranges in byte_sequences(chars.ranges):
            for at in range(len(ranges) - 1, 0, -1):
                if ranges[at:] not in shared:
                    state = self.new_state()
                    self.edges[state].append((*ranges[at], shared[ranges[at + 1 :]]))
                    shared[ranges[at:]] = state
            self.edges[start].append((*ranges[0], shared[ranges[1:]]))


def start_behind(nfa: Nfa, state: int) -> int:
    """A new state that is reached for nothing. A loop or a branch must not share its first
    state.
    """
    new = nfa.new_state()
    nfa.empty[state].append(new)
    return new


def skip_nullable(nfa: Nfa) -> None:
    """Let a call of a rule that the empty text fits be skipped.

    From each rule's first state, follow what is reached for nothing. A call holds its state back
    until the called rule is known to end so; each state is visited once.
    """
    rule_of_end = {end: name for name, (_, end) in nfa.ends.items()}
    held: dict[str, list[int]] = {}
    found: set[str] = set()
    reached: set[int] = set()
    waiting = [start for start, _ in nfa.ends.values()]
    while waiting:
        state = waiting.pop()
        if state in reached:
            continue
        reached.add(state)
        waiting += nfa.empty[state]
        for rule, after in nfa.calls[state]:
            (waiting if rule in found else held.setdefault(rule, [])).append(after)
        if state in rule_of_end:
            found.add(rule_of_end[state])
            waiting += held.pop(rule_of_end[state], [])
    for state, calls in enumerate(nfa.calls):
        nfa.empty[state] += [after for rule, after in calls if rule in found]


def byte_classes(nfa: Nfa) -> tuple[bytes, int]:
    """Bytes that no edge tells apart are one class. Returns the class of each byte, and how many
    there are.
    """
    cuts = {0}
    for edges in nfa.edges:
        for low, high, _ in edges:
            cuts |= {low, high + 1}
    firsts = sorted(cuts - {256})
    class_of = bytearray(256)
    for number, (first, beyond) in enumerate(zip(firsts, [*firsts[1:], 256])):
        class_of[first:beyond] = bytes([number]) * (beyond - first)
    return bytes(class_of), len(firsts)
