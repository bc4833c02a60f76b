"""models/tiny-hybrid is what models/HYBRID.md says it is."""

import json
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from lessons.l06_mla.deepseek import load_decoder
from lessons.toolbox.model.checkpoint import load_config
from models.hybrid_card import CONTEXTS, FIGURES, NAMES, PAGE, card
from models.hybrid_measures import copied, sequence_bytes, stream
from models.networks import MIXES
from models.tokenizer import FOLDERS
from models.train_hybrid import folder_of
from reference.features.states.generate import whole_sequence

FOLDER = folder_of("hybrid")


@pytest.fixture(scope="module")
def figures():
    return json.loads(FIGURES.read_text(encoding="utf-8"))


def test_the_page_is_written_from_the_record(figures):
    assert PAGE.read_text(encoding="utf-8") == card(figures)


def test_its_size_and_its_layers(figures):
    found = figures["models"]["hybrid"]
    size = (FOLDER / "model.safetensors").stat().st_size
    assert size == found["weight_bytes"] <= 12_000_000
    state = load_config(FOLDER).state
    assert [i in state.layers for i in range(4)] == [
        kind == "linear_attention" for kind in MIXES["hybrid"]
    ]
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (FOLDER / file).read_bytes() == (FOLDERS["tiny"] / file).read_bytes()


def test_the_controls_have_seen_as_many_tokens(figures):
    found = figures["models"]
    for name in set(found) - {"tiny"}:
        for fact in ("tokens_seen", "steps", "layers"):
            assert found[name][fact] == found["hybrid"][fact], (name, fact)
    assert found["hybrid"]["tokens_seen"] < found["tiny"]["tokens_seen"]
    assert list(found) == [name for name in NAMES if name in found]


def test_our_loader_finds_the_loss_of_the_record(figures):
    """On a sample of the held-out tokens; a broken checkpoint is off by several nats."""
    model, text = load_decoder(FOLDER), torch.from_numpy(stream().astype("int64"))
    losses = []
    for start in range(0, len(text) - 257, 15000):
        window = text[start : start + 257]
        with torch.inference_mode():
            logits = model.logits(model(window[:-1], whole_sequence(model, 256)))
        losses.append(cross_entropy(logits.float(), window[1:]))
    expected = figures["models"]["hybrid"]["held_out_loss_nats"]
    assert float(torch.stack(losses).mean()) == pytest.approx(expected, abs=0.4)


def test_the_bytes_of_a_sequence(figures):
    """By the definition: K and V of one layer, and three states that do not grow."""
    heads, dim, kv_heads, size = 4, 64, 2, 64
    states = 3 * (heads * dim * dim * 4 + (2 * 2 * dim + heads * dim) * 3 * 2)
    for context in CONTEXTS:
        expected = states + 2 * kv_heads * size * 2 * context
        assert sequence_bytes(str(FOLDER), context) == expected
        assert figures["sequence_bytes"]["hybrid"][str(context)] == expected
        every = figures["sequence_bytes"]["attention"][str(context)]
        assert every == 4 * (expected - states)
    assert figures["sequence_bytes"]["tiny"]["512"] == 512 * 6 * 2 * 2 * 64 * 2


def test_what_its_states_keep(figures):
    """The page says that two heads remember, both in the last layer with a state."""
    shares = figures["kept_shares"]
    assert [len(row) for row in shares] == [4, 4, 4]
    remember = [(i, j) for i, row in enumerate(shares) for j, each in enumerate(row) if each > 0.5]
    assert len(remember) == 2 and {layer for layer, _ in remember} == {2}


class Copies:
    """A model that says the token that followed the last time, and knows nothing else."""

    def __init__(self, distance: int):
        self.model, self.lm_head = self, self
        self.back = distance

    def __call__(self, hidden=None, input_ids=None, use_cache=None):
        if input_ids is None:
            return hidden
        logits = torch.zeros(1, input_ids.shape[1], 4096)
        for t in range(self.back - 1, input_ids.shape[1]):
            logits[0, t, input_ids[0, t - self.back + 1]] = 50.0
        self.last_hidden_state = logits
        return self


def test_what_a_copy_is_by_a_model_that_can_do_nothing_else():
    text = stream()
    assert copied(Copies(24 + 32), text, 32) == {"right": 1.0, "loss": 0.0}
    wrong = copied(Copies(24 + 31), text, 32)
    assert wrong["right"] == 0 and wrong["loss"] > math.log(4096)


def test_lesson_27_quotes_the_record(figures):
    lesson = (PAGE.parents[1] / "lessons/l27_states/README.md").read_text(encoding="utf-8")
    paragraph = next(line for line in lesson.split("\n") if line.startswith("**A trained one.**"))
    models, kept = figures["models"], figures["sequence_bytes"]
    for name in ("hybrid", "attention"):
        quoted = (
            f"{models[name]['held_out_loss_nats']:.2f}",
            f"{100 * models[name]['copies']['128']['right']:.0f} %",
            f"{kept[name]['32768'] / 1e6:.1f}",
        )
        for number in quoted:
            assert f"`{number}" in paragraph, number
    assert f"{models['hybrid']['tokens_seen'] / 1e6:.1f} million" in paragraph
