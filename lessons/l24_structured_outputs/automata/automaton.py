"""The rules of a grammar as deterministic automata over bytes.

Each rule becomes a small machine. From a position in it, a byte leads to one other position at
most, and a call leads to the position after the called rule. Without calls, as for a regular
expression, this one machine is everything.

Three promises, which hold by construction:

- **Linear time.** A text is read byte by byte and never twice. Engines that backtrack try `(a+)+b`
  on "aaaa" in exponentially many ways; here all ways are followed at once, as one position.
- **Bounded size.** The positions of a deterministic machine can be exponentially many:
  `(a|b)*a(a|b){n}` needs 2ⁿ⁺¹. They are all made now, so a grammar that is too large is refused
  within about a second, before anything is generated.
- **No dead ends.** Positions from which no text can be completed are removed. So a text that
  follows the automaton can always go on to an end.

Sources: Thompson 1968, *Regular Expression Search Algorithm*; Rabin and Scott 1959 (the subset
construction); Cox 2007, *Regular Expression Matching Can Be Simple And Fast*.
"""

from dataclasses import dataclass

from lessons.l24_structured_outputs.automata.nfa import (
    MOST_POSITIONS,
    Nfa,
    TooLarge,
    byte_classes,
    skip_nullable,
)
from lessons.l24_structured_outputs.languages.syntax import ROOT, Grammar

MOST_WORK = 500_000  # entries of sets that the subset construction looks at: about half a second


class NoText(ValueError):
    """A grammar that no text fits."""

    def __init__(self):
        super().__init__("no text fits the grammar; accepted: one that can be completed")


@dataclass
class Automaton:
    """Positions of all rules, numbered from 0.

    class_of: for each byte its class; bytes of a class are never told apart. edges[position]:
    {class: position}. calls[position]: (rule, position after it). is_final: whether the rule may
    end there. start: {rule: position}. work: entries of sets that its construction looked at.
    """

    class_of: bytes
    num_classes: int
    edges: list[dict[int, int]]
    calls: list[list[tuple[str, int]]]
    is_final: list[bool]
    start: dict[str, int]
    work: int = 0


def compile_grammar(grammar: Grammar) -> Automaton:
    """The automaton of a grammar, of the rules that ROOT needs. Every call is of a rule that is
    there. Raises NoText and TooLarge.
    """
    nfa = Nfa()
    waiting = [ROOT]
    while waiting:
        name = waiting.pop()
        if name not in nfa.ends:
            waiting += nfa.add_rule(name, grammar.rules[name])
    skip_nullable(nfa)
    class_of, num_classes = byte_classes(nfa)
    automaton = Automaton(class_of, num_classes, [], [], [], {})
    subsets = Subsets(nfa, class_of, automaton)
    for name, (start, end) in nfa.ends.items():
        subsets.add_rule(name, start, end)
    automaton.work = subsets.work
    remove_dead_ends(automaton)
    return automaton


class Subsets:
    """The subset construction: a position is a set of states in which the machine may be at
    once.
    """

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
        """A position without edges."""
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
            self.count(len(self.nfa.calls[state]))
            for rule, target in self.nfa.calls[state]:
                by_call.setdefault(rule, set()).add(target)
        return by_byte, by_call

    def count(self, work: int) -> None:
        """Raise TooLarge once too much was looked at."""
        self.work += work
        if self.work > MOST_WORK:
            raise TooLarge


def remove_dead_ends(automaton: Automaton) -> None:
    """Keep edges and calls only where the rule can still be completed. Raises NoText if the root
    cannot.

    A call counts once the called rule is known to have a finite text; so rules become known in
    rounds.
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
        raise NoText
    for position in range(len(automaton.edges)):
        edges, calls = automaton.edges[position], automaton.calls[position]
        automaton.edges[position] = {c: to for c, to in edges.items() if to in alive}
        automaton.calls[position] = [(r, to) for r, to in calls if to in alive and r in known]
