"""The draft learns to be accepted: the loss is what the lesson calls 1 - α, and the stage keeps the
rest.
"""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from models import steps
from models import train as training
from tests.training_cases import train_small_models


class Says:
    """A network that says the same logits after every token."""

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


@pytest.mark.usefixtures("seed")
def test_the_loss_is_how_often_a_drafted_token_is_rejected(monkeypatch):
    student, teacher = torch.randn(2, 50)
    batch = torch.zeros(3, 9, dtype=torch.long)
    monkeypatch.setattr(steps, "DIVERGENCE", 0.0)
    wanted = []
    for temperature in (1.0, 1 / 3):
        p, q = ((x.double() / temperature).softmax(-1) for x in (teacher, student))
        wanted.append(1 - torch.minimum(p, q).sum())
    found = steps.acceptance_loss(Says(student), batch, Says(teacher))
    assert float(found) == pytest.approx(float(sum(wanted) / 2), abs=1e-6)
    assert float(steps.acceptance_loss(Says(teacher), batch, Says(teacher))) == pytest.approx(
        0, abs=1e-6
    )


def test_a_token_that_the_student_finds_hopeless_still_has_a_gradient():
    """The minimum alone has next to none there."""

    def push(weight):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steps, "DIVERGENCE", weight)
            logits = torch.tensor([0.0, -30.0], requires_grad=True)
            batch = torch.zeros(1, 2, dtype=torch.long)
            steps.acceptance_loss(Says(logits), batch, Says(torch.tensor([-9.0, 9.0]))).backward()
            return -float(logits.grad[1])

    assert push(0.0) < 1e-6
    assert push(0.1) == pytest.approx(0.1, rel=0.01)


def test_the_stage_begins_with_the_draft_and_keeps_what_was_said_of_it(tmp_path, monkeypatch):
    train_small_models(monkeypatch, tmp_path)
    how = training.Options(million_tokens=0.006, tokens_per_step=2048, compiles=False)
    with pytest.raises(SystemExit, match="there is no draft"):
        training.train("acceptance", how)
    facts, weights = [], []
    for name in ("tiny", "draft", "acceptance", "acceptance"):
        training.train(name, how)
        facts.append(
            json.loads((tmp_path / "draft/training.json").read_text()) if name != "tiny" else {}
        )
        weights.append(load_file(tmp_path / training.STAGES[name].model / "model.safetensors"))
    _, distilled, accepted, again = facts
    minutes = accepted["acceptance_minutes"]
    assert accepted == distilled | {"acceptance_tokens": 6144, "acceptance_minutes": minutes}
    assert again == accepted, "it has learned it already"
    moved = [float((weights[2][key] - old).abs().max()) for key, old in weights[1].items()]
    assert 0 < max(moved) < 0.1, "a little away from where it was"
    assert all(torch.equal(weights[2][key], weights[3][key]) for key in weights[2])
    assert math.isfinite(minutes)
