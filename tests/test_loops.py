"""How models/loops.py teaches the target to leave a loop: which copies count, and what is asked of
them.
"""

import json

import numpy as np
import pytest
import torch

from lessons.toolbox.model.checkpoint import load_tokenizer
from models import loops
from models.answers import repeats_a_line
from models.loops import (
    FADING,
    LENGTH,
    Loop,
    batch_of,
    copies_of_lines,
    fading_loss,
    made_loops,
    prefixes,
)

TWICE = ["def f(x):", "\n    ", "new = g(", "x, 0)", "\n    ", "new = g(", "x, 0)", "\n"]


@pytest.fixture(scope="module")
def pieces():
    tokenizer = load_tokenizer("models/tiny")
    return [tokenizer.decode([token]) for token in range(len(tokenizer))]


@pytest.fixture(scope="module")
def texts():
    line = "def {0}{1}(x):\n    y = x + {1}\n    return y or {0}\n\n\n"
    return {name: "".join(line.format(name, i) for i in range(400)) for name in ("own", "wide")}


@pytest.fixture(scope="module")
def streams(texts):
    tokenizer = load_tokenizer("models/tiny")
    return {name: np.array(tokenizer(text)["input_ids"]) for name, text in texts.items()}


def ends_of(pieces) -> np.ndarray:
    return np.array(["\n" in piece for piece in pieces])


# ---------------------------------------------------------------- the model's own loops


def test_the_third_copy_of_a_line_is_found_and_no_other():
    copy = ["new = g(", "x, 0)"]
    written = [*TWICE[:-1], "\n    ", *copy, "\n\n        ", *copy, "\n", "    ", *copy, "\n"]
    assert max(copies_of_lines(TWICE, 0)) == -1
    assert repeats_a_line("".join(written[:11])) and not repeats_a_line("".join(TWICE))
    marked = {at: place for at, place in enumerate(copies_of_lines(written, 0)) if place >= 0}
    assert marked == {8: 5, 9: 6, 11: 8, 12: 9}, "the fifth has one token more: nothing to compare"
    assert copies_of_lines(written, 9)[:11] == [-1] * 11, (
        "a copy in the prompt is not the model's fault"
    )
    assert max(copies_of_lines(written[:10], 0)) == -1, "a line that was cut may have gone on"


def test_short_lines_may_stand_often():
    assert max(copies_of_lines(["return x", "\n"] * 5, 0)) == -1
    assert copies_of_lines(["return x or y", "\n"] * 4, 0) == [-1, -1, -1, -1, 2, -1, 4, -1]


def test_prefixes_are_whole_lines_of_both_texts(pieces, texts, streams):
    tokenizer = load_tokenizer("models/tiny")
    found = prefixes(streams, ends_of(pieces), np.random.default_rng(0))
    for at, row in enumerate(found):
        assert row[0] == 0 and 0 not in row[1:]
        source, prefix = texts[("wide", "own")[at % 2]], tokenizer.decode(row[1:]).lstrip()
        assert source[source.index(prefix) + len(prefix)] == "\n"
    lengths = [len(row) for row in found]
    assert min(lengths) < 30 and 120 < max(lengths) <= 201


# ---------------------------------------------------------------- loops that are made


def test_a_made_loop_is_text_and_then_a_block_of_it_again_and_again(pieces, texts, streams):
    tokenizer = load_tokenizer("models/tiny")
    for at, loop in enumerate(made_loops(streams, ends_of(pieces), 24, np.random.default_rng(0))):
        assert len(loop.tokens) == len(loop.before) == LENGTH + 1 and loop.tokens[0] == 0
        third = next(place for place, before in enumerate(loop.before) if before >= 0)
        length = third - loop.before[third]
        assert tokenizer.decode(loop.tokens[1 : third - length]) in texts[("wide", "own")[at % 2]]
        assert (
            loop.tokens[third - 2 * length : third - length] == loop.tokens[third - length : third]
        )
        for place in range(third, LENGTH + 1):
            assert loop.before[place] == place - length
            assert loop.tokens[place] == loop.tokens[place - length]
        copy = tokenizer.decode(loop.tokens[third - length : third])
        assert copy.startswith("\n") and copy.strip(), "whole lines"


def test_a_window_without_lines_makes_no_loop():
    window, ends_line = np.ones(LENGTH, np.uint16), np.zeros(4, bool)
    assert loops.repeated(window, ends_line, np.random.default_rng(0)) is None


# ---------------------------------------------------------------- what is asked


def faded(factor: float, vocab: int = 7):
    """Log-probabilities that give each token of the third copy and those after it `factor` times
    what the copy in front of it got, and all other tokens of the text 0.8.
    """
    tokens, before = [0, 1, *[2, 3, 4] * 5], [-1] * 8 + list(range(5, 14))
    ids, places, in_front = batch_of([Loop(tokens, before)])
    assert places[0].tolist() == [-1] * 7 + list(range(4, 13))
    assert in_front[0].tolist() == [True] * 7 + [False] * 9
    p = torch.full((16,), 0.8)
    for place in range(7, 16):
        p[place] = factor * p[place - 3]
    probabilities = ((1 - p) / (vocab - 1))[:, None].repeat(1, vocab)
    probabilities[torch.arange(16), ids[0, 1:]] = p
    return probabilities.log()[None], ids, places


def test_copies_that_fade_as_they_should_cost_nothing():
    assert fading_loss(*faded(FADING)).item() == pytest.approx(0, abs=1e-6)
    for factor in (1.0, 0.9 * FADING, 0.0):
        assert fading_loss(*faded(factor)) > 0.01


def test_second_copies_and_text_are_left_alone_by_it():
    logprobs, *loop = faded(FADING)
    changed = logprobs.clone()
    changed[:, :4] = torch.randn(4, 7).log_softmax(-1)  # of the text and the first copy
    assert fading_loss(changed, *loop).item() == pytest.approx(0, abs=1e-6)


def test_the_copy_in_front_is_not_pulled():
    logprobs, *loop = faded(1.0)
    logprobs.requires_grad_()
    fading_loss(logprobs, *loop).backward()
    assert logprobs.grad[:, :7].abs().max() == 0 and logprobs.grad[:, 7:].abs().max() > 0


def test_padding_is_neither_faded_nor_held():
    short, long = Loop([0, 5, 5, 5], [-1, -1, -1, 2]), Loop([0, *[6] * 7], [-1] * 8)
    ids, before, in_front = batch_of([short, long])
    assert ids.tolist() == [[0, 5, 5, 5, 0, 0, 0, 0], long.tokens]
    assert before.tolist() == [[-1, -1, 1, -1, -1, -1, -1], [-1] * 7]
    assert in_front.tolist() == [[True, True, False, False, False, False, False], [True] * 7]


def test_a_target_that_has_learned_it_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "training.json").write_text(json.dumps({"loop_updates": 3}))
    monkeypatch.setattr(loops, "FOLDERS", {"tiny": tmp_path})
    loops.leave_loops(5)
    assert "in 3 updates" in capsys.readouterr().out
