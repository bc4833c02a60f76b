"""The training of the draft for parallel drafting: all chains of masks of a window in one pass, and
each mask learns what drafting will ask of it.
"""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models import train_pard
from models.steps import rejected
from models.train_pard import COUNT, KEPT, LEAST_KEPT, Chains, Read, drop_tokens, pard_loss

pytestmark = pytest.mark.usefixtures("seed")
LENGTH, MASK, VOCAB = 12, 5, 40


def small_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, vocab_size=VOCAB)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).double()


def new_read() -> Read:
    columns = torch.randperm(VOCAB)[:25]
    hidden, head = torch.randn(LENGTH, 24), torch.randn(VOCAB, 24)
    tokens = torch.randint(VOCAB, (LENGTH,))
    return Read(tokens, hidden.double(), head.double()[columns], columns)


def test_a_mask_is_kept_only_after_all_masks_before_it():
    length = 200
    chains = drop_tokens(length)
    kept = set(zip(chains.anchors.tolist(), chains.depths.tolist()))
    assert len(kept) == len(chains.anchors), "no row twice"
    for anchor, depth in kept:
        assert depth == 0 or (anchor, depth - 1) in kept
        assert anchor + depth < length, "the target has read no token there"
    counts = torch.bincount(chains.depths).tolist()
    asked = [int(max(KEPT**depth, LEAST_KEPT) * length) for depth in range(COUNT)]
    # A few less where a chain would leave the window.
    assert all(most - COUNT <= count <= most for count, most in zip(counts, asked))


def rows_in_one_pass(model, read: Read, chains: Chains, monkeypatch):
    """(wanted, student) as the loss gets them: [T, columns] each."""
    seen = []
    monkeypatch.setattr(train_pard, "rejected", lambda *both: seen.extend(both))
    pard_loss(model, read, chains, MASK)
    return [found[0] for found in seen]


def largest_error(model, read: Read, chains: Chains, monkeypatch) -> float:
    """Between the pass over all chains and each chain alone, after its text."""
    wanted, student = rows_in_one_pass(model, read, chains, monkeypatch)
    worst = 0.0
    for row, (anchor, depth) in enumerate(zip(chains.anchors.tolist(), chains.depths.tolist())):
        alone = torch.tensor([*read.tokens[: anchor + 1], *[MASK] * depth])
        logits = model(input_ids=alone[None], use_cache=False).logits[0, -1]
        target = read.head @ read.hidden[anchor + depth]
        for ours, theirs in ((student, logits[read.columns]), (wanted, target)):
            worst = max(worst, float((ours[row] - theirs).abs().max()))
    return worst


@torch.no_grad()
def test_a_mask_is_trained_on_what_it_will_draft(monkeypatch):
    model, read = small_model(), new_read()
    assert largest_error(model, read, drop_tokens(LENGTH, 5), monkeypatch) < 1e-5


class SeesOtherChains(Chains):
    """Causal by position alone."""

    @property
    def sees(self):
        return self.positions <= self.positions[:, None]


class SeesTheAnswer(Chains):
    """A mask sees the text up to its own place."""

    @property
    def sees(self):
        is_text = (self.depths == 0) & (self.positions <= self.positions[:, None])
        return is_text | super().sees


class InARow(Chains):
    """Positions by order, as if masks followed the whole window."""

    @property
    def positions(self):
        return torch.arange(len(self.anchors)).clamp(max=LENGTH - 1)


@pytest.mark.parametrize("slip", [SeesOtherChains, SeesTheAnswer, InARow])
@torch.no_grad()
def test_slips_of_the_mask_are_found(slip, monkeypatch):
    chains = slip(*drop_tokens(LENGTH, 5))
    assert largest_error(small_model(), new_read(), chains, monkeypatch) > 1e-3


def test_masks_learn():
    """A few steps on one window: fewer of their guesses would be rejected."""
    model, read, losses = small_model().float(), new_read(), []
    read = Read(read.tokens, read.hidden.float(), read.head.float(), read.columns)
    optimizer, chains = torch.optim.AdamW(model.parameters(), lr=1e-2), drop_tokens(LENGTH, 5)
    for _ in range(30):
        losses.append(loss := pard_loss(model, read, chains, MASK))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]


def test_equal_logits_are_never_rejected():
    logits = torch.randn(1, 7, 9)
    assert abs(float(rejected(logits, logits))) < 1e-6


def test_what_is_written_says_its_mask(tmp_path, monkeypatch):
    """An ordinary checkpoint, which names the mask as vLLM's drafts do."""
    draft = tmp_path / "draft"
    draft.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (draft / name).write_text("{}")
    monkeypatch.setattr(train_pard, "FOLDER", tmp_path / "pard")
    monkeypatch.setattr(train_pard, "FOLDERS", {"draft": draft})
    model = small_model().float()
    model.config.pard_token = MASK
    train_pard.write(model, dict(minutes=1))
    config = json.loads((tmp_path / "pard" / "config.json").read_text())
    assert config["pard_token"] == MASK and config["architectures"] == ["LlamaForCausalLM"]
    assert (tmp_path / "pard" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "pard" / "training.json").read_text()) == dict(minutes=1)
