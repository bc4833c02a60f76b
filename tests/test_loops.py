"""How models/loops.py teaches the target to leave a loop: which lines count, and what is pushed where."""

import json

import numpy as np
import pytest
import torch

from lessons.toolbox.model.checkpoint import load_tokenizer
from models import loops
from models.evaluate import repeats_a_line
from models.loops import MARGIN, Answer, batch_of, leaving_loss, prefixes, third_copies

pytestmark = pytest.mark.usefixtures("seed")
TWICE = ["def f(x):", "\n    ", "new = g(", "x, 0)", "\n    ", "new = g(x", ", 0)", "\n"]


def test_the_third_copy_of_a_line_is_found_and_no_other():
    pieces = [*TWICE, "    ", "new = g(x, 0)", "\n\n    ", "new = g(x, 0)", "\n"]
    assert third_copies(TWICE, 0) == []
    assert third_copies(pieces, 0) == [(8, 10)], "where it begins, and the newline behind it"
    assert repeats_a_line("".join(pieces[:10])) and not repeats_a_line("".join(TWICE))
    assert third_copies(pieces, 9) == [], "a copy in the prompt is nobody's fault"
    assert third_copies(pieces[:10], 0) == [], "an answer that was cut may have gone on differently"


def test_short_lines_may_stand_often():
    assert third_copies(["return x", "\n"] * 5, 0) == []
    assert third_copies(["return x or y", "\n"] * 5, 0) == [(4, 5)]


def test_prefixes_are_whole_lines_of_both_texts():
    tokenizer = load_tokenizer("models/tiny")
    pieces = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    texts = {
        name: "".join(f"def {name}{i}(x):\n    y = x + {i}\n    return y\n\n\n" for i in range(400))
        for name in ("own", "wide")
    }
    streams = {name: np.array(tokenizer(text)["input_ids"]) for name, text in texts.items()}
    found = prefixes(streams, pieces, np.random.default_rng(0))
    for at, row in enumerate(found):
        text = texts[("wide", "own")[at % 2]]
        assert row[0] == 0 and 0 not in row[1:]
        place = text.index(tokenizer.decode(row[1:]).lstrip())
        assert text[place + len(tokenizer.decode(row[1:]).lstrip())] == "\n"
    lengths = [len(row) for row in found]
    assert min(lengths) < 30 and 120 < max(lengths) <= 201


def loop_and_logprobs(margins: list[float]):
    """An answer whose third copy's tokens (places 6 to 8) have these margins over the best other one."""
    answer, vocab = Answer([0, 5, 1, 2, 1, 2, 1, 2, 3], [(6, 8)]), 7
    logits = torch.zeros(1, 8, vocab)
    for place, token in enumerate(answer.tokens[1:]):
        logits[0, place, token] = 4.0
    for place, margin in zip((5, 6, 7), margins):
        logits[0, place, answer.tokens[place + 1]] = margin
    return answer, logits.requires_grad_()


def test_the_weakest_token_of_the_third_copy_is_pushed_and_no_other():
    answer, logits = loop_and_logprobs([2.0, 0.5, 3.0])
    loss = leaving_loss(logits.log_softmax(-1), torch.tensor([answer.tokens]), [answer])
    assert loss.item() == pytest.approx(0.5 + MARGIN, rel=0.02)
    loss.backward()
    pushed = logits.grad.abs().amax(2)[0]
    assert pushed.argmax() == 6 and (pushed[[0, 1, 2, 3, 4, 5, 7]] == 0).all()
    assert logits.grad[0, 6, 2] > 0, "a step down makes the token less likely"


def test_a_loop_that_would_be_left_costs_nothing():
    answer, logits = loop_and_logprobs([2.0, -2.0, 3.0])
    loss = leaving_loss(logits.log_softmax(-1), torch.tensor([answer.tokens]), [answer])
    assert loss.item() < 1e-3


def test_what_stands_in_front_of_the_third_copies_is_held():
    answer = loop_and_logprobs([1.0, 1.0, 1.0])[0]
    longer = Answer([0, 5, *[1, 2] * 4, 4, 3], [(6, 8), (8, 10)])
    ids, begun = batch_of([answer, longer])
    assert ids.tolist() == [[*answer.tokens, 0, 0, 0], longer.tokens]
    assert begun.tolist() == [[0] * 5 + [1] * 3 + [-1] * 3, [0] * 5 + [1, 1] + [2] * 4]


def test_a_target_that_has_learned_it_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "training.json").write_text(json.dumps({"loop_updates": 3}))
    monkeypatch.setattr(loops, "FOLDERS", {"tiny": tmp_path})
    loops.leave_loops(5)
    assert "in 3 updates" in capsys.readouterr().out
