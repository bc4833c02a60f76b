"""Lesson 24: excerpts are lines of the sources, and the README quotes what the code says."""

import json
from pathlib import Path

import torch

from lessons.l01_roofline.planner.models import find_model
from lessons.l24_structured_outputs import naive
from lessons.l24_structured_outputs.lab.pictures import PATTERN, TOKENS
from lessons.l24_structured_outputs.lab.testing import embedded_vocabulary
from lessons.l24_structured_outputs.languages.reading import compile_structure
from lessons.l24_structured_outputs.matcher import Matcher
from lessons.l24_structured_outputs.optimized import TokenMasks
from lessons.toolbox.measure.hardware import CHIPS
from solutions.l24_structured_outputs import token_mask
from tests.excerpts import plain_readme, stray_excerpts

ROOM = Path(__file__).parents[1] / "lessons/l24_structured_outputs"
README = plain_readme(ROOM)
RESULTS = ROOM.parents[1] / "results/cpu"


def test_the_excerpts_are_lines_of_the_sources():
    assert not stray_excerpts(ROOM)


def test_the_readme_quotes_the_step_of_a_model():
    """The bottleneck: a step reads all weights once, but for the input embedding (lesson 1)."""
    weights = 2 * find_model("llama-3-8b").params_read(1)
    memory = CHIPS["h100"].memory_bytes_per_s
    assert f"takes at least {1e3 * weights / memory:.1f} ms" in README
    assert f"it reads {weights / 1e9:.1f} GB of weights at {memory / 1e12:.2f} TB/s" in README


def test_the_readme_quotes_what_a_mask_does_to_probabilities():
    """By enumeration: 90% begin with a, of which 1% go on with b; the others are all cd."""
    free = {"ab": 0.9 * 0.01, "cd": 0.1 * 1.0}
    assert f"ab has `0.9 · 0.01 = {free['ab']:.3f}` and cd has `{free['cd']}`" in README
    assert f"of the answers that fit `{free['ab'] / sum(free.values()):.0%}` are ab" in README
    # masked: both first letters fit, and each leaves one that fits after it
    matcher, masked = Matcher(compile_structure("choice", list(free))), {}
    for text, first in (("ab", 0.9), ("cd", 0.1)):
        after = matcher.step(matcher.start, ord(text[0]))
        fitting = [byte for byte in range(256) if matcher.step(after, byte) is not None]
        assert fitting == [ord(text[1])]
        masked[text] = first * 1.0
    assert f"With the mask `{masked['ab']:.0%}` are" in README


class Counting(Matcher):
    """Counts the bytes that are followed, and the times that the automaton is asked."""

    followed = asked = 0

    def step(self, state, byte):
        self.followed += 1
        return super().step(state, byte)

    def step_class(self, state, byte_class):
        self.asked += 1
        return super().step_class(state, byte_class)


def lookups(pattern: str, tokens: list[bytes]) -> tuple[int, int]:
    """Bytes that are followed from the first state: token by token, and each beginning once."""
    counts = []
    for mask in (naive.token_mask, token_mask):
        matcher = Counting(compile_structure("regex", pattern))
        mask(matcher, matcher.start, tokens)
        counts.append(matcher.followed)
    return tuple(counts)


def test_the_figure_of_masks_shows_what_its_description_says():
    """The two ends of the gain, and that it grows with the vocabulary."""
    series = json.loads((RESULTS / "l24_masks.json").read_text())["series"]
    tried, walked = (
        [point["median_s"] for point in series[label]["points"]]
        for label in ("every token", "trie, a new state")
    )
    gains = [slow / fast for slow, fast in zip(tried, walked)]
    assert gains == sorted(gains)
    assert f"takes {gains[0]:.0f} to {gains[-1]:.0f} times as long as walking the trie" in README


def test_the_readme_quotes_the_examples_of_masks():
    """Steps 1, 3 and 5, and the quiz."""
    logits = torch.tensor([2.0, 1.0, 0.0])
    free = ", ".join(f"{p:.3f}" for p in logits.softmax(0).tolist())
    logits[0] = -torch.inf
    masked = ", ".join(f"{p:.3f}" for p in logits.softmax(0).tolist()[1:])
    assert f"softmax ({free})" in README and f"softmax (0, {masked})" in README

    tried, shared = lookups(PATTERN, [token.encode() for token in TOKENS])
    assert f"from state 0: one by one {tried} look-ups, in the trie {shared}" in README
    tried, shared = lookups("abc", [b"a", b"ab", b"abc", b"b"])
    assert f"1 + 2 + 3 + 1 = {tried}, and {shared} in the trie" in README

    nested = Matcher(compile_structure("grammar", 'root ::= "x" | "[" root "]"'))
    assert nested.read(b"[[x]") is nested.read(b"[x")
    assert nested.read(b"[[x") is not nested.read(b"[x")
    words = -(-128_256 // 32)
    assert f"40 · {4 * words:,} bytes are {40 * 4 * words / 1e3:.0f} KB" in README


def test_the_readme_quotes_the_masks():
    """Steps 3 and 4, what was counted, and the quiz."""
    vocabulary = embedded_vocabulary()
    automaton = compile_structure("regex", '"[^"\n]*"')
    masks, tried = TokenMasks(automaton, vocabulary), Counting(automaton)
    masks.matcher = Counting(automaton)
    inside, tried.followed = tried.read(b'"'), 0
    allowed = naive.token_mask(tried, inside, vocabulary.tokens)
    inside, masks.matcher.asked = masks.matcher.read(b'"'), 0
    assert masks.mask(inside).equal(allowed)
    nodes = len(vocabulary.trie[0]) - 1  # without the empty text
    assert f"the `{len(vocabulary)}` tokens of our embedded model" in README
    assert f"trying every token follows `{tried.followed:,}` bytes" in README
    assert f"The trie has `{nodes:,}` nodes" in README
    assert f"the automaton is asked `{masks.matcher.asked}` times" in README
    words = -(-128_256 // 32)
    assert f"128,256 tokens are {words} words, or {4 * words / 1e3:.0f} KB" in README
    assert f"151,936 / 8 = {151_936 // 8:,} bytes, {151_936 / 8e3:.0f} KB" in README
    assert f"The logits are {4 * 151_936 / 1e3:.0f} KB, 32 times as many" in README
