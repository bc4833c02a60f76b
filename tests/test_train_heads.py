"""The training of lesson 17's heads: what it reads, and that each loss asks for what drafting will
do.
"""

from functools import partial

import numpy as np
import pytest
import torch

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l12_paged_kv.lab.testing import CONFIG, new_model
from lessons.l17_tree_speculation.heads.heads import tapped_features
from lessons.l17_tree_speculation.heads.heads_files import fingerprint, save_heads
from lessons.l17_tree_speculation.lab.testing import random_heads
from models import heads_attention, train_heads
from models.heads_attention import OwnSteps
from models.train_heads import (
    HEAD_DECAY,
    OWN_STEPS,
    WINDOW,
    Vocabulary,
    begin_as_eagle,
    eagle_loss,
    medusa_loss,
    mtp_loss,
    run_target,
    windows_to_keep,
)

pytestmark = pytest.mark.usefixtures("seed")
ROWS, LENGTH = 2, 9


def test_windows_are_half_of_the_standard_library_and_no_token_comes_twice():
    own = np.arange(9 * WINDOW, dtype=np.uint16)
    text = dict(own=own, wide=np.arange(30 * WINDOW, dtype=np.uint16))
    windows = windows_to_keep(text, 14)
    assert windows.shape == (14, WINDOW) and len(set(windows.flatten().tolist())) == 14 * WINDOW
    of_own = windows[:, 0] < len(own)
    assert of_own.sum() == 7 and len(set(of_own.tolist()[:7])) == 2, "mixed"


@pytest.fixture
def target():
    return new_model(sliding_windows=())  # as models/tiny


@pytest.fixture
def tokens():
    return torch.randint(CONFIG.vocab_size, (ROWS, LENGTH))


def test_features_are_those_of_each_window_alone(target, tokens):
    """[rows, length, three taps and the hidden state]."""
    taps = train_heads.tap_depths(CONFIG.num_hidden_layers)
    for row, found in zip(tokens, run_target(target, tokens)):
        hidden, tapped = tapped_features(target, row, whole_sequence(target, LENGTH), taps)
        torch.testing.assert_close(found, torch.cat([tapped, hidden], dim=-1))


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_draft_is_trained_on_what_it_will_draft(target, tokens, kind, step, monkeypatch):
    """Its own steps, all positions at once, against one chain after the other."""
    monkeypatch.setattr(heads_attention, "default_device", lambda: torch.device("cpu"))
    draft = random_heads(target, kind)
    size = CONFIG.hidden_size
    read = slice(3 * size) if kind == "eagle3" else slice(3 * size, None)
    tapped = run_target(target, tokens)[:, :-1, read]
    embedded = target.embed_tokens(tokens)[:, 1:]

    attend, features = OwnSteps(draft.config, ROWS, LENGTH - 1), draft.features(tapped)
    for _ in range(step + 1):
        out = draft(embedded.flatten(0, 1), features.flatten(0, 1), attend)
        out = out.unflatten(0, (ROWS, LENGTH - 1))
        features = out.roll(1, dims=1)

    for row in range(ROWS):
        for last in range(step, LENGTH - 1):
            chain = draft.features(tapped[row, : last - step + 1])
            for _ in range(step + 1):
                count = len(chain)
                whole = whole_sequence(target, count)
                made = draft(
                    embedded[row, :count], chain, lambda q, k, v, whole=whole: whole(0, q, k, v)
                )
                chain = torch.cat([chain, made[-1:]])
            torch.testing.assert_close(out[row, last], made[-1])


def entropy(p: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(p).sum(-1).mean()


@pytest.mark.parametrize("slip", [0, 1])
def test_medusas_heads_learn_what_comes_later(target, tokens, slip):
    """Heads that know what the target will say cost no more than its entropy; others more."""
    hidden = run_target(target, tokens)[..., -CONFIG.hidden_size :]
    vocabulary = Vocabulary(target.lm_head.weight)

    def heads(hidden):
        return torch.stack([hidden.roll(-(index + 1 + slip), dims=1) for index in range(2)])

    least = sum(
        HEAD_DECAY**index * entropy(vocabulary.probabilities(hidden[:, index + 1 :]))
        for index in range(2)
    )
    found = medusa_loss(heads, vocabulary, None, None, hidden)
    assert bool(found > least + 1e-3) == bool(slip)
    if not slip:
        torch.testing.assert_close(found, least)


class Knowing:
    """A draft that says `answer`, [T, hidden_size], and remembers what it read."""

    config, kind = CONFIG, "mtp"

    def __init__(self, answer: torch.Tensor):
        self.answer = answer

    def __call__(self, embeddings, features, attend):
        self.embeddings, self.features = embeddings, features
        return self.answer

    def hidden(self, features):
        return features


@pytest.mark.parametrize("slip", [0, 1])
def test_eagle_learns_the_next_feature_and_what_it_says(target, tokens, slip):
    hidden = run_target(target, tokens)[..., -CONFIG.hidden_size :].float()
    embedded = target.embed_tokens(tokens).float()
    draft = Knowing(hidden[:, 1:].roll(-slip, dims=1).flatten(0, 1))
    vocabulary = Vocabulary(target.lm_head.weight.float())
    found = eagle_loss(draft, vocabulary, embedded, None, hidden)
    least = entropy(vocabulary.probabilities(hidden[:, 1:]))
    assert bool(found > least + 1e-3) == bool(slip)
    torch.testing.assert_close(draft.embeddings, embedded[:, 1:].flatten(0, 1))
    noise = draft.features - hidden[:, :-1].flatten(0, 1)
    assert 0 < noise.abs().max() <= 0.1 * hidden.std() + 1e-6


@pytest.mark.parametrize("slip", [0, 1])
def test_mtp_learns_what_the_target_says_of_the_token_after_the_next(target, tokens, slip):
    """One that knows it costs no more than its entropy, in the pass over the target's features and
    in those over its own.
    """
    hidden = run_target(target, tokens)[..., -CONFIG.hidden_size :].float()
    embedded = target.embed_tokens(tokens).float()
    draft = Knowing(hidden[:, 1:].roll(-slip, dims=1).flatten(0, 1))
    draft.features = lambda tapped: tapped
    vocabulary = Vocabulary(target.lm_head.weight.float())
    found = mtp_loss(draft, vocabulary, embedded, None, hidden)
    least = sum(
        HEAD_DECAY**step * entropy(vocabulary.probabilities(hidden[:, step + 1 :]))
        for step in range(OWN_STEPS["mtp"])
    )
    assert bool(found > least + 1e-3) == bool(slip)
    torch.testing.assert_close(draft.embeddings, embedded[:, 1:].flatten(0, 1))


@torch.inference_mode()
def test_mtp_begins_near_eagle(target, tokens, tmp_path, monkeypatch):
    """Its norms start at the size of what they norm, so both say much the same at first."""
    eagle = random_heads(target, "eagle", scale=1.0)
    save_heads(tmp_path / "tiny-eagle", eagle, dict(target_fingerprint=fingerprint(target)))
    monkeypatch.setattr(train_heads, "HERE", tmp_path)
    hidden = run_target(target, tokens)[..., -CONFIG.hidden_size :]
    draft, fresh = (random_heads(target, "mtp") for _ in range(2))
    begin_as_eagle(draft, target, hidden)
    attend = heads_attention.windowed_attend(CONFIG, ROWS, LENGTH - 1)
    inputs = target.embed_tokens(tokens)[:, 1:].flatten(0, 1), hidden[:, :-1].flatten(0, 1)
    want = eagle(*inputs, partial(attend, 0)).flatten()
    near, far = (
        torch.cosine_similarity(each(*inputs, partial(attend, 0)).flatten(), want, dim=0)
        for each in (draft, fresh)
    )
    assert near > 0.9 and far.abs() < 0.5
