"""Where a text is in a grammar: which bytes may come next, and whether it may end.

A regular expression needs a position and no more. JSON needs a memory of what has been opened, so a
position in a called rule also knows its *frame*: which rule returns, and to which state of the
text. Frames point to older states and these to older ones, so together they are a stack. Where a
grammar is ambiguous there are several stacks, and they share what they have in common.

A `State` never changes, and equal states are one object. That has three uses: states can be keys of
a cache, a step back is the old state itself, and branches (drafts, forks) need no copy.

Sources: Earley 1970, *An Efficient Context-Free Parsing Algorithm* (states refer to where a rule
began); Aycock and Horspool 2002, *Practical Earley Parsing* (rules that fit the empty text); Tomita
1986 (stacks that share their parts).
"""

from lessons.l24_structured_outputs.automata.automaton import Automaton
from lessons.l24_structured_outputs.languages.syntax import ROOT

MOST_ITEMS = 2000  # of a state. JSON needs a handful; only an ambiguous grammar gets so many
MOST_STEPS = 100_000  # items that one byte, or one mask, may follow: about 50 ms
MOST_KEPT = 5000  # states; then the table of equal states begins anew

Frame = tuple[str, "State"]  # the rule that returns, and the state from which it was called
Item = tuple[int, Frame | None]  # a position, and its frame; None: of the root


class TooAmbiguous(ValueError):
    """The text can be read in too many ways."""

    def __init__(self):
        super().__init__(
            "the grammar is too ambiguous: this text has too many readings at once; accepted: "
            "rules without several ways to read the same text"
        )


class State:
    """Where a text is. items: all positions that it may be in, called rules included. callers: for
    each rule that begins here, where it returns to. may_end: whether the text fits as it is.
    """

    __slots__ = ("callers", "items", "may_end")

    def __init__(self, automaton: Automaton, kernel: tuple[Item, ...]):
        self.may_end = any(f is None and automaton.is_final[p] for p, f in kernel)
        self.callers: dict[str, list[Item]] = {}
        found: dict[Item, None] = dict.fromkeys(kernel)
        waiting = list(kernel)
        while waiting:
            position, frame = waiting.pop()
            for rule, after in automaton.calls[position]:
                self.callers.setdefault(rule, []).append((after, frame))
                # The last call of a rule returns to where the rule itself returns. Without this,
                # the stack of `list ::= item "," list` would grow with the text.
                inner = frame if has_ended(automaton, after) else (rule, self)
                item = automaton.start[rule], inner
                if item not in found:
                    found[item] = None
                    waiting.append(item)
            if len(found) > MOST_ITEMS:
                raise TooAmbiguous
        self.items = tuple(found)


def has_ended(automaton: Automaton, position: int) -> bool:
    """Whether nothing of the rule can follow."""
    return not automaton.edges[position] and not automaton.calls[position]


class Matcher:
    """The states of one automaton. start: of the empty text."""

    def __init__(self, automaton: Automaton):
        self.automaton = automaton
        self.first = frozenset([(automaton.start[ROOT], None)])
        self.start = State(automaton, tuple(self.first))
        self.forget()
        self.steps = 0  # items that were followed so far

    def forget(self) -> None:
        """Begin the table of equal states anew. States that a caller holds stay valid."""
        # A text that comes back to the first position is where the empty text is.
        self.known = {self.first: self.start}

    def step(self, state: State, byte: int) -> State | None:
        """The state after one more byte; None: the byte does not fit. Raises TooAmbiguous."""
        return self.step_class(state, self.automaton.class_of[byte])

    def step_class(self, state: State, byte_class: int) -> State | None:
        """As `step`, for any byte of a class."""
        automaton = self.automaton
        waiting = [
            (automaton.edges[position][byte_class], frame)
            for position, frame in state.items
            if byte_class in automaton.edges[position]
        ]
        self.steps += len(state.items)
        most = self.steps + MOST_STEPS
        found: set[Item] = set()
        while waiting:
            item = waiting.pop()
            if item in found:
                continue
            found.add(item)
            if len(found) > MOST_ITEMS or self.steps > most:
                raise TooAmbiguous
            position, frame = item
            if frame is not None and automaton.is_final[position]:
                rule, caller = frame
                waiting += caller.callers[rule]
                self.steps += len(caller.callers[rule])
        # What has returned and cannot go on says nothing about the future.
        kernel = frozenset(
            item for item in found if item[1] is None or not has_ended(automaton, item[0])
        )
        return self.state_of(kernel) if kernel else None

    def state_of(self, kernel: frozenset[Item]) -> State:
        """The one state with these items."""
        if kernel not in self.known:
            if len(self.known) >= MOST_KEPT:
                self.forget()
            self.known[kernel] = State(self.automaton, tuple(kernel))
            self.steps += len(self.known[kernel].items)
        return self.known[kernel]

    def read(self, data: bytes, state: State | None = None) -> State | None:
        """The state after some bytes; None: they do not fit."""
        state = self.start if state is None else state
        for byte in data:
            state = self.step(state, byte)
            if state is None:
                return None
        return state

    def fits(self, text: str) -> bool:
        """Whether a whole text fits."""
        state = self.read(text.encode())
        return state is not None and state.may_end
