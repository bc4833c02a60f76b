"""Proves that the trees of suffix decoding draft what a search through all texts finds, while
requests grow, are preempted, end and are evicted; and that no draft or memory exceeds its limit.
"""

import random
from collections import Counter
from itertools import islice
from unittest.mock import patch

import pytest

from lessons.l02_naive_attention.request import Request
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l16_speculative_sampling.more import suffixes
from lessons.l16_speculative_sampling.more.suffixes import (
    Guess,
    Limits,
    Node,
    SuffixCache,
    SuffixDrafter,
    SuffixTree,
    Text,
    best_guess,
    likely_path,
    scan,
)


def oracle(texts: list[list[int]], context: list[int], count: int, limits: Limits) -> Guess:
    """The page's rule, from a list of all places of each string. Nothing of the module is used."""
    best = Guess([], 0.0)
    for matched in range(1, len(context) + 1):
        tokens, chance, score = [], 1.0, 0.0
        room = min(count, limits.max_spec_factor * matched + 1e-9, limits.max_tree_depth - matched)
        while len(tokens) + 1 <= room:
            string = context[-matched:] + tokens
            after = [
                text[at + len(string)]
                for text in texts
                for at in range(len(text) - len(string))
                if text[at : at + len(string)] == string
            ]
            if not after:
                break
            counts = Counter(after)
            # Of the most frequent ones that which comes last in the list.
            token = next(t for t in reversed(after) if counts[t] == max(counts.values()))
            chance *= counts[token] / len(after)
            if chance < limits.min_token_prob:
                break
            tokens.append(token)
            score += chance
        if score >= best.score:
            best = Guess(tokens, score)
    return best


def random_text(rng: random.Random, alphabet: int) -> list[int]:
    return [rng.randrange(alphabet) for _ in range(rng.randrange(1, 20))]


def random_limits(rng: random.Random) -> Limits:
    # No product of shares is 0.11 or 0.37, which rounding could then decide.
    least = rng.choice([0, 0.11, 0.37, 1])
    return Limits(rng.randint(1, 9), rng.randint(0, 3), rng.choice([0, 0.7, 1, 2]), least)


class Story:
    """Requests that come, grow, are preempted, end, and end twice. Each draft is compared with the
    oracle's.
    """

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.limits, self.alphabet = random_limits(self.rng), self.rng.choice([1, 2, 3, 6])
        self.cache = SuffixCache(self.limits)
        self.texts: dict[int, list[int]] = {}  # prompt and answer of those under way
        self.prompts: dict[int, int] = {}  # their length
        self.answers: list[list[int]] = []

    def grow(self, row: int) -> None:
        """A request that is new has a prompt first."""
        text = self.texts.setdefault(row, [])
        text += random_text(self.rng, self.alphabet)
        self.prompts.setdefault(row, len(text))
        count = self.rng.randint(1, 8)
        own = oracle([text], text, count, self.limits)
        others = oracle(self.answers, text, count, self.limits)
        # Shares of different trees may differ in the last bit.
        want = others if others.score > own.score + 1e-9 else own
        assert self.cache.draft(row, list(text), count) == want.tokens
        found = scan([text], text, count, self.limits)
        assert found.tokens == own.tokens and found.score == pytest.approx(own.score)

    def preempt(self, row: int) -> None:
        """It may go on with the next `grow`."""
        self.cache.forget(row)

    def end(self, row: int) -> None:
        """Twice, as a request does of which another answer is aborted afterwards."""
        answer = self.texts.pop(row)[self.prompts.pop(row) :]
        if row in self.cache.own and self.limits.max_cached_requests:
            self.answers = [*self.answers, answer][-self.limits.max_cached_requests :]
        self.cache.end(row, answer)
        self.cache.end(row, answer)

    def run(self) -> None:
        """Raises AssertionError."""
        for _ in range(14):
            row, chance = self.rng.randrange(3), self.rng.random()
            if row not in self.texts or chance < 0.5:
                self.grow(row)
            else:
                (self.preempt if chance < 0.6 else self.end)(row)
            assert [text.tokens for text in self.cache.kept] == self.answers
            assert set(self.cache.own) <= set(self.texts)
        while self.cache.kept:
            self.cache.answers.remove(self.cache.kept.popleft())
        assert self.cache.answers.num_nodes == 0, "an answer that has gone is still counted"


def check_stories(rounds: int = 150) -> None:
    for seed in range(rounds):
        Story(seed).run()


def test_drafts_are_those_of_a_search_through_all_texts():
    check_stories()


# ---------------------------------------------------------------- planted slips


def oldest_first(node):
    """Of equal counts the one that came first wins."""
    while children := node.children:
        token = max(children, key=lambda token: children[token].count)
        yield token, children[token].count / sum(child.count for child in children.values())
        node = children[token]
    yield from true_path(node)


def counts_ends(node):
    """The end of a text counts as something that followed."""
    for token, _ in true_path(node):
        child = node.child(token)
        yield token, child.count / node.count
        node = child


def forgets_the_first(self):
    """What followed the first occurrence is lost."""
    self.count += 1
    if self.children is None:
        self.children, self.text = {}, []


def counts_once(self):
    """Counts are not updated."""
    true_again(self)
    self.count = 1


def of_each_token_alone(path, most, least):
    """The probability of a token without that of those before it."""
    tokens, score = [], 0.0
    for token, share in islice(path, most):
        if share < least:
            break
        tokens.append(token)
        score += share
    return Guess(tokens, score)


def longest_draft(path, most, least):
    """The score is a number of tokens."""
    tokens, _ = true_along(path, most, least)
    return Guess(tokens, float(len(tokens)))


def shortest_match(paths, count, limits):
    """Of equal scores that of the shortest match wins."""
    mosts = [min(count, limits.room(1 + at)) for at in range(len(paths))]
    found = [
        true_along(path, max(0, most), limits.min_token_prob) for path, most in zip(paths, mosts)
    ]
    return max(found, key=lambda guess: guess.score, default=Guess([], 0.0))


def beyond_the_depth(self, matched):
    return int(self.max_spec_factor * matched + 1e-6)


def without_the_factor(self, matched):
    return self.max_tree_depth - matched


def leaves_short_ones(self, text):
    """Only the strings at the beginning of a text are taken out."""
    whole, text.tokens = text.tokens, text.tokens[: self.depth]
    true_remove(self, text)
    text.tokens = whole


def stays_findable(self, text):
    """Evicted, but its strings are still there."""


def not_its_own_text(self, row, tokens, count):
    """The request's own prompt is not searched."""
    self.own.setdefault(row, (SuffixTree(1), Text()))
    nodes = self.answers.ends_like(tokens)
    return best_guess([likely_path(node) for node in nodes], count, self.limits).tokens


def keeps_all(self, row, answer):
    """No answer is ever evicted."""
    if self.own.pop(row, None) is not None:
        self.kept.append(Text())
        self.answers.extend(self.kept[-1], answer)


def keeps_twice(self, row, answer):
    """What ends twice is kept twice."""
    self.own[row] = SuffixTree(1), Text()
    true_end(self, row, answer)


true_path, true_along = suffixes.likely_path, suffixes.guess_along
true_again = Node.occur_again
true_remove, true_end = SuffixTree.remove, SuffixCache.end
SLIPS = [
    (suffixes, "likely_path", oldest_first),
    (suffixes, "likely_path", counts_ends),
    (Node, "occur_again", forgets_the_first),
    (Node, "occur_again", counts_once),
    (suffixes, "guess_along", of_each_token_alone),
    (suffixes, "guess_along", longest_draft),
    (suffixes, "best_guess", shortest_match),
    (Limits, "room", beyond_the_depth),
    (Limits, "room", without_the_factor),
    (SuffixTree, "remove", leaves_short_ones),
    (SuffixTree, "remove", stays_findable),
    (SuffixCache, "draft", not_its_own_text),
    (SuffixCache, "end", keeps_all),
    (SuffixCache, "end", keeps_twice),
]


@pytest.mark.parametrize("owner, name, slip", SLIPS, ids=[slip.__name__ for *_, slip in SLIPS])
def test_a_planted_slip_is_found(owner, name, slip):
    with patch.object(owner, name, slip), pytest.raises((AssertionError, KeyError)):
        check_stories()


# ---------------------------------------------------------------- by hand, and in the loop


def test_the_example_of_the_page():
    """After "a b" came c twice and d once, so c; after "a b c" came e, always."""
    a, b, c, d, e, x = range(6)
    texts, found = [[a, b, c, e], [a, b, d], [a, b, c]], {}
    tree = SuffixTree(24)
    for text in texts:
        tree.extend(Text(), text)
    for least in (0.1, 0.7):
        limits = Limits(min_token_prob=least)
        found[least] = scan(texts, [x, a, b], 4, limits)
        nodes = tree.ends_like([x, a, b])
        assert [node.count for node in nodes] == [3, 3]  # of "b" and of "a b"
        assert best_guess([likely_path(node) for node in nodes], 4, limits) == found[least]
    assert found[0.1] == ([c, e], pytest.approx(2 / 3 + 2 / 3))
    assert found[0.7] == ([], 0)


def test_memory_of_a_text():
    """A node a token while nothing repeats, at most one for each level and one below it else."""
    once, twice = SuffixTree(24), SuffixTree(24)
    once.extend(Text(), range(500))
    assert once.num_nodes == 500
    for _ in range(2):
        twice.extend(Text(), range(500))
    assert 500 < twice.num_nodes <= 25 * 500


def request(row: int, prompt: list[int], output: list[int]) -> Request:
    return Request(row, prompt, 50, SamplingParams(temperature=0), frozenset(), output)


def test_an_earlier_answer_is_drafted_once_it_has_ended():
    drafter, answer = SuffixDrafter(), [11, 12, 13, 14, 15]
    first, second = request(0, [1, 2], answer), request(1, [3], [11, 12])
    drafter.propose([first], [4])
    assert drafter.propose([second], [4]).tokens == [[]]
    drafter.forget(first)
    assert drafter.propose([second], [4]).tokens == [[13, 14]]
    assert drafter.propose([second], [1]).tokens == [[13]]
