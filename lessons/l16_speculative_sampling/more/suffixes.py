"""Suffix decoding: draft what followed most often when a text ended like this one.

Two texts are searched: the request's own (prompt and answer so far), and the answers of earlier
requests. `scan` is the naive way: it walks over all of them for every token that it drafts.
`SuffixTree` counts once, when a token arrives, and then looks up a few nodes.

    texts  a b c  ·  a b d  ·  a b c        what follows "b": c twice, d once, so c with 2/3

Source: Oliaro et al. 2025, SuffixDecoding (arXiv 2411.04975). The names of the limits are vLLM's.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from lessons.l02_naive_attention.request import Request
from lessons.l16_speculative_sampling.drafts import Drafts


class Limits(NamedTuple):
    """How far a draft may go. The names and the values are those of vLLM, where each begins with
    `suffix_decoding_`.

    max_tree_depth: tokens of a match and its draft together. max_cached_requests: earlier answers
    that are kept; the oldest goes first. max_spec_factor: drafted tokens for each matched one.
    min_token_prob: a draft ends before a token that is less likely to stay.
    """

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1

    def room(self, matched: int) -> int:
        """How many tokens may follow so many that match."""
        # A little more than 0, because 0.7 · 10 is 6.999… in binary.
        longest = int(self.max_spec_factor * matched + 1e-6)
        return min(longest, self.max_tree_depth - matched)


LIMITS = Limits()


class Guess(NamedTuple):
    """A draft, and how many of its tokens should stay: the sum of their estimated probabilities."""

    tokens: list[int]
    score: float


Path = Iterator[tuple[int, float]]  # tokens that may follow, each with its share after the last


def guess_along(path: Path, most: int, least: float) -> Guess:
    """At most `most` tokens of a path, none of which stays with less probability than `least`."""
    tokens, chance, score = [], 1.0, 0.0
    for token, share in islice(path, most):
        chance *= share  # a token stays if all before it do, because the first slip ends a draft
        if chance < least:
            break
        tokens.append(token)
        score += chance
    return Guess(tokens, score)


def best_guess(paths: Sequence[Path], count: int, limits: Limits) -> Guess:
    """The draft of at most `count` tokens with the largest score; of equal ones that of the longest
    match. paths: what may follow the last token, the last two, the last three, ….
    """
    best = Guess([], 0.0)
    for matched in range(len(paths), 0, -1):
        most = min(count, limits.room(matched))
        if most > best.score:  # else it cannot win, because a token adds 1 at most
            guess = guess_along(paths[matched - 1], most, limits.min_token_prob)
            best = max(best, guess, key=lambda one: one.score)
    return best


# ---------------------------------------------------------------- naive: look everywhere


def scanned_path(texts: list[list[int]], pattern: list[int]) -> Path:
    """What followed `pattern` most often, then what followed both, and so on; of several the newest
    first. A walk over all texts for each token.
    """
    while True:
        counts, newest, size = Counter(), {}, len(pattern)
        for number, text in enumerate(texts):
            for end in range(size, len(text)):
                if text[end - size : end] == pattern:
                    counts[text[end]] += 1
                    newest[text[end]] = number, end
        if not counts:
            return
        token = max(counts, key=lambda token: (counts[token], newest[token]))
        yield token, counts[token] / counts.total()
        pattern = [*pattern, token]


def scan(texts: list[list[int]], context: list[int], count: int, limits: Limits) -> Guess:
    """The best draft of at most `count` tokens that may follow `context`."""
    longest = min(len(context), limits.max_tree_depth)
    patterns = [context[-size:] for size in range(1, longest + 1)]
    return best_guess([scanned_path(texts, pattern) for pattern in patterns], count, limits)


# ---------------------------------------------------------------- fast: count as tokens arrive


class Node:
    """A string that occurs in the texts. count: how often. children: by the token that follows, the
    newest last.

    While it has occurred once, it has no children: what follows is read in the text, from `at` on.
    So text that never repeats costs one node a token, however deep the tree is; text that does, one
    a token for each level of the tree, and one below the last.
    """

    __slots__ = ("at", "children", "count", "text")

    def __init__(self, text: list[int], at: int):
        self.count, self.children = 1, None
        self.text, self.at = text, at

    def child(self, token: int) -> "Node | None":
        """What a token leads to; None: it never followed."""
        if self.children is not None:
            return self.children.get(token)
        follows = self.at < len(self.text) and self.text[self.at] == token
        return Node(self.text, self.at + 1) if follows else None

    def occur_again(self) -> None:
        """Its first occurrence gets a child, because the second may go on otherwise."""
        self.count += 1
        if self.children is None:
            self.children = {}
            if self.at < len(self.text):
                self.children[self.text[self.at]] = Node(self.text, self.at + 1)
            self.text = []


def likely_path(node: Node) -> Path:
    """From a node to its likeliest child, and on; of several the newest first."""
    while children := node.children:
        token = max(reversed(children), key=lambda token: children[token].count)
        # Of the children, not of `node.count`, because the end of a text counts for none.
        yield token, children[token].count / sum(child.count for child in children.values())
        node = children[token]
    for at in range(node.at, len(node.text)):  # of a string that occurred once
        yield node.text[at], 1.0


class Text:
    """A text in a tree. ends: the nodes of its last token, its last two, … that occurred before."""

    def __init__(self):
        self.tokens: list[int] = []
        self.ends: list[Node] = []


class SuffixTree:
    """All strings of at most `depth` tokens in some texts, with their counts."""

    def __init__(self, depth: int):
        self.depth = depth
        self.root = Node([], 0)
        self.root.children = {}

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Let tokens follow a text. A text that is new comes in by its first ones."""
        for token in tokens:
            text.tokens.append(token)
            # A string that ends at `token` is one that ended before it, made longer by one.
            longer, text.ends = [self.root, *text.ends[: self.depth - 1]], []
            for node in longer:
                child = node.children.pop(token, None)
                if child is None:  # longer strings through it are read in the text
                    child = Node(text.tokens, len(text.tokens))
                else:
                    child.occur_again()
                    text.ends.append(child)
                node.children[token] = child  # the newest, because it was taken out

    def remove(self, text: Text) -> None:
        """Take a text's strings out again."""
        for start in range(len(text.tokens)):
            node = self.root
            for token in text.tokens[start : start + self.depth]:
                child = node.children[token]
                child.count -= 1
                if child.count == 0:  # then so are all that pass through it
                    del node.children[token]
                    break
                node = child

    def ends_like(self, context: list[int]) -> list[Node]:
        """The nodes of its last token, its last two, …, as far as they occur."""
        nodes = []
        for token in context[-self.depth :]:
            found = [node.child(token) for node in (self.root, *nodes)]
            nodes = [node for node in found if node is not None]
        return nodes

    @property
    def num_nodes(self) -> int:
        """Nodes in memory, the root not among them."""
        count, left = -1, [self.root]
        while left:
            count, node = count + 1, left.pop()
            left += (node.children or {}).values()
        return count


class SuffixCache:
    """A tree for each request under way, and one for the answers of those that have ended."""

    def __init__(self, limits: Limits = LIMITS):
        self.limits = limits
        self.answers = SuffixTree(limits.max_tree_depth)
        self.kept: deque[Text] = deque()
        self.own: dict[int, tuple[SuffixTree, Text]] = {}  # by the request's number

    def draft(self, row: int, tokens: list[int], count: int) -> list[int]:
        """At most `count` tokens that may follow `tokens`, all that request `row` has."""
        if row not in self.own:
            self.own[row] = SuffixTree(self.limits.max_tree_depth), Text()
        tree, text = self.own[row]
        tree.extend(text, tokens[len(text.tokens) :])
        guesses = [
            best_guess([likely_path(node) for node in nodes], count, self.limits)
            for nodes in (text.ends, self.answers.ends_like(tokens))
        ]
        return max(guesses, key=lambda guess: guess.score).tokens  # of equal ones its own

    def forget(self, row: int) -> None:
        """Drop the tree of a request that goes on elsewhere, or gave up."""
        self.own.pop(row, None)

    def end(self, row: int, answer: list[int]) -> None:
        """A request has ended: its answer is kept, and the oldest goes if there are too many."""
        # A request may end twice, and one that is unknown was never asked for a draft.
        if self.own.pop(row, None) is None or self.limits.max_cached_requests == 0:
            return
        if len(self.kept) == self.limits.max_cached_requests:
            self.answers.remove(self.kept.popleft())
        text = Text()
        self.answers.extend(text, answer)
        text.ends = []  # it grows no more
        self.kept.append(text)


class SuffixDrafter:
    """For this lesson's `generate`: `draft=SuffixDrafter()`. Its answers outlive the call, for the
    next one. It serves one call at a time.
    """

    def __init__(self, limits: Limits = LIMITS):
        self.cache = SuffixCache(limits)

    def propose(self, requests: list[Request], counts: list[int]) -> Drafts:
        """As `NgramDrafter`, certain of its tokens: q is 1 at each."""
        found = [self.cache.draft(r.row, r.tokens, count) for r, count in zip(requests, counts)]
        return Drafts(found, None)

    def forget(self, request: Request) -> None:
        """It has finished."""
        self.cache.end(request.row, request.output)
