"""The rules of a grammar as deterministic automata over bytes.

Each rule becomes a small machine. From a position in it, a byte leads to one other position at most, and a
call leads to the position behind the called rule. Without calls, as for a regular expression, this one
machine is everything.

Three promises, which hold by construction:

- **Linear time.** A text is read byte by byte and never twice. Engines that backtrack try `(a+)+b` on
  "aaaa" in exponentially many ways; here all ways are followed at once, as one position.
- **Bounded size.** The positions of a deterministic machine can be exponentially many: `(a|b)*a(a|b){n}`
  needs 2ⁿ⁺¹. They are all made now, so a grammar that is too large is refused within about a second,
  before anything is generated.
- **No dead ends.** Positions from which no text can be completed are removed. So whoever follows the
  automaton can always go on to an end.

Sources: Thompson 1968, *Regular Expression Search Algorithm*; Rabin and Scott 1959 (the subset
construction); Cox 2007, *Regular Expression Matching Can Be Simple And Fast*.
"""

from dataclasses import dataclass

from lessons.l22_serving.grammar.syntax import (
    ROOT,
    Call,
    Chars,
    Choice,
    Expression,
    Grammar,
    Repeat,
    Sequence,
)
from lessons.l22_serving.grammar.utf8 import byte_sequences

MOST_STATES = 40_000  # of all rules, before the machines are deterministic
MOST_POSITIONS = 20_000  # afterwards
MOST_WORK = 1_000_000  # entries of sets that the subset construction looks at: about a second


class TooLarge(ValueError):
    """A grammar whose automaton would take too long to make, or too much memory."""

    def __init__(self):
        super().__init__(
            f"the grammar is too large: its automaton needs more than {MOST_STATES} states or "
            f"{MOST_POSITIONS} positions; accepted: fewer or smaller repetitions and alternatives"
        )


@dataclass
class Automaton:
    """Positions of all rules, numbered from 0.

    class_of: for each byte its class; bytes of a class are never told apart. edges[position]: {class:
    position}. calls[position]: (rule, position behind it). is_final: whether the rule may end there.
    start: {rule: position}. accepts_empty: whether the empty text fits ROOT.
    """

    class_of: bytes
    num_classes: int
    edges: list[dict[int, int]]
    calls: list[list[tuple[str, int]]]
    is_final: list[bool]
    start: dict[str, int]
    accepts_empty: bool


def compile_grammar(grammar: Grammar) -> Automaton:
    """The automaton of a grammar. Raises ValueError for a rule that is missing, for a grammar that no
    text fits, and TooLarge.
    """
    check_calls(grammar)
    nullable = nullable_rules(grammar)
    nfa = Nfa(nullable)
    ends = {}
    for name, rule in grammar.rules.items():
        start = nfa.new_state()
        ends[name] = start, nfa.add(rule, start)
    class_of, first_of_class = byte_classes(nfa)
    automaton = Automaton(
        class_of, len(first_of_class), [], [], [], {}, accepts_empty=ROOT in nullable
    )
    subsets = Subsets(nfa, class_of, automaton)
    for name, (start, end) in ends.items():
        subsets.add_rule(name, start, end)
    remove_dead_ends(automaton)
    return automaton


def check_calls(grammar: Grammar) -> None:
    """Raise ValueError for a call of a rule that is not there."""
    if ROOT not in grammar.rules:
        raise ValueError(f"the grammar has no rule {ROOT!r}; accepted: one with it")
    for name, rule in grammar.rules.items():
        waiting = [rule]
        while waiting:
            part = waiting.pop()
            if isinstance(part, Call) and part.rule not in grammar.rules:
                raise ValueError(
                    f"rule {name!r} calls {part.rule!r}, which is not defined; accepted: "
                    f"{', '.join(sorted(grammar.rules)[:10])}"
                )
            waiting += parts_of(part)


def parts_of(expression: Expression) -> tuple[Expression, ...]:
    if isinstance(expression, (Sequence, Choice)):
        return expression.parts
    return (expression.part,) if isinstance(expression, Repeat) else ()


def nullable_rules(grammar: Grammar) -> set[str]:
    """The rules that the empty text fits."""
    found: set[str] = set()

    def is_nullable(part: Expression) -> bool:
        if isinstance(part, Sequence):
            return all(map(is_nullable, part.parts))
        if isinstance(part, Choice):
            return any(map(is_nullable, part.parts))
        if isinstance(part, Repeat):
            return part.low == 0 or is_nullable(part.part)
        return isinstance(part, Call) and part.rule in found

    while more := {n for n, rule in grammar.rules.items() if n not in found and is_nullable(rule)}:
        found |= more
    return found


class Nfa:
    """Thompson's machine: states with edges by byte ranges, by calls, and for nothing at all."""

    def __init__(self, nullable: set[str]):
        self.nullable = nullable
        self.edges: list[list[tuple[int, int, int]]] = []  # (first byte, last byte, target)
        self.calls: list[list[tuple[str, int]]] = []
        self.empty: list[list[int]] = []

    def new_state(self) -> int:
        if len(self.edges) >= MOST_STATES:
            raise TooLarge
        self.edges.append([])
        self.calls.append([])
        self.empty.append([])
        return len(self.edges) - 1

    def add(self, part: Expression, start: int) -> int:
        """States for `part` behind `start`; returns the one in which it ends."""
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
            if part.rule in self.nullable:
                self.empty[start].append(end)
        else:
            self.add_chars(part, start, end)
        return end

    def add_repeat(self, part: Repeat, start: int) -> int:
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
    """A new state that is reached for nothing. A loop or a branch must not share its first state."""
    new = nfa.new_state()
    nfa.empty[state].append(new)
    return new


def byte_classes(nfa: Nfa) -> tuple[bytes, list[int]]:
    """Bytes that no edge tells apart are one class. Returns the class of each byte, and the first byte
    of each class.
    """
    cuts = {0}
    for edges in nfa.edges:
        for low, high, _ in edges:
            cuts |= {low, high + 1}
    firsts = sorted(cuts - {256})
    class_of = bytearray(256)
    for number, (first, beyond) in enumerate(zip(firsts, [*firsts[1:], 256])):
        class_of[first:beyond] = bytes([number]) * (beyond - first)
    return bytes(class_of), firsts


class Subsets:
    """The subset construction: a position is a set of states in which the machine may be at once."""

    def __init__(self, nfa: Nfa, class_of: bytes, automaton: Automaton):
        self.nfa = nfa
        self.automaton = automaton
        self.work = 0
        self.by_class = [
            [(class_of[low], class_of[high], target) for low, high, target in edges]
            for edges in nfa.edges
        ]

    def add_rule(self, name: str, start: int, end: int) -> None:
        """The positions of one rule."""
        numbers: dict[frozenset[int], int] = {}
        waiting: list[frozenset[int]] = []

        def number_of(states: set[int]) -> int:
            closure = self.closure(states)
            if closure not in numbers:
                numbers[closure] = self.new_position(end in closure)
                waiting.append(closure)
            return numbers[closure]

        self.automaton.start[name] = number_of({start})
        while waiting:
            subset = waiting.pop()
            position = numbers[subset]
            by_byte, by_call = self.moves(subset)
            for byte_class, states in by_byte.items():
                self.automaton.edges[position][byte_class] = number_of(states)
            for rule, states in by_call.items():
                self.automaton.calls[position].append((rule, number_of(states)))

    def new_position(self, is_final: bool) -> int:
        automaton = self.automaton
        if len(automaton.edges) >= MOST_POSITIONS:
            raise TooLarge
        automaton.edges.append({})
        automaton.calls.append([])
        automaton.is_final.append(is_final)
        return len(automaton.edges) - 1

    def closure(self, states: set[int]) -> frozenset[int]:
        """The states, and those that are reached from them for nothing."""
        found, waiting = set(states), list(states)
        while waiting:
            for target in self.nfa.empty[waiting.pop()]:
                if target not in found:
                    found.add(target)
                    waiting.append(target)
        self.count(len(found))
        return frozenset(found)

    def moves(self, subset: frozenset[int]) -> tuple[dict[int, set[int]], dict[str, set[int]]]:
        """Where each class of bytes and each call leads."""
        by_byte: dict[int, set[int]] = {}
        by_call: dict[str, set[int]] = {}
        for state in subset:
            for low, high, target in self.by_class[state]:
                self.count(high - low + 1)
                for byte_class in range(low, high + 1):
                    by_byte.setdefault(byte_class, set()).add(target)
            for rule, target in self.nfa.calls[state]:
                by_call.setdefault(rule, set()).add(target)
        return by_byte, by_call

    def count(self, work: int) -> None:
        self.work += work
        if self.work > MOST_WORK:
            raise TooLarge


def remove_dead_ends(automaton: Automaton) -> None:
    """Keep edges and calls only where the rule can still be completed. Raises ValueError if the root
    cannot.

    A call counts once the called rule is known to have a finite text; so rules become known in rounds.
    """
    sources: list[list[tuple[int, str | None]]] = [[] for _ in automaton.edges]
    for position, edges in enumerate(automaton.edges):
        for target in set(edges.values()):
            sources[target].append((position, None))
        for rule, target in automaton.calls[position]:
            sources[target].append((position, rule))
    # A rule that is not known yet holds back the positions that call it.
    held: dict[str, list[int]] = {}
    start_of = {position: rule for rule, position in automaton.start.items()}
    known: set[str] = set()
    alive: set[int] = set()
    waiting = [position for position, is_final in enumerate(automaton.is_final) if is_final]
    while waiting:
        position = waiting.pop()
        if position in alive:
            continue
        alive.add(position)
        for source, rule in sources[position]:
            if rule is None or rule in known:
                waiting.append(source)
            else:
                held.setdefault(rule, []).append(source)
        if position in start_of:
            known.add(start_of[position])
            waiting += held.pop(start_of[position], [])
    if ROOT not in known:
        raise ValueError("no text fits the grammar; accepted: one that can be completed")
    for position in range(len(automaton.edges)):
        edges, calls = automaton.edges[position], automaton.calls[position]
        automaton.edges[position] = {c: to for c, to in edges.items() if to in alive}
        automaton.calls[position] = [(r, to) for r, to in calls if to in alive and r in known]
