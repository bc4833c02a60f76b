"""The shipped heads of lesson 17: small, for the shipped target, and their card is what is
measured.
"""

import json

import pytest

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l17_tree_speculation.heads.heads import KINDS
from lessons.l17_tree_speculation.heads.heads_files import fingerprint, load_heads
from lessons.l17_tree_speculation.lab.experiments import NODES, recorded
from lessons.l17_tree_speculation.trees.tree import best_tree, expected_tokens
from lessons.toolbox.model.checkpoint import REPOSITORY

MODELS = REPOSITORY / "models"


@pytest.fixture(scope="module")
def target() -> Decoder:
    if not (MODELS / "tiny/model.safetensors").exists():
        pytest.skip("NOT RUN: models/tiny is not there")
    return Decoder.from_pretrained("models/tiny")


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_of_the_shipped_target(kind, target):
    heads = load_heads(f"models/tiny-{kind}", target)
    assert heads.kind == kind
    config = json.loads((MODELS / f"tiny-{kind}/config.json").read_text())
    assert config["target_fingerprint"] == fingerprint(target)
    assert config["training"]["seed"] == 0 and config["training"]["tokens_seen"] > 0


def test_all_heads_together_are_small():
    sizes = [(MODELS / f"tiny-{kind}/model.safetensors").stat().st_size for kind in KINDS]
    assert sum(sizes) <= 17_000_000


def test_the_card_is_what_the_script_writes():
    from models.heads_card import card

    assert (MODELS / "HEADS.md").read_text(encoding="utf-8") == card()


@pytest.mark.parametrize("kind", KINDS)
def test_heads_know_how_often_they_are_right(kind):
    """What was counted last, so a tree chosen by it is worth as much as lesson 17's."""
    config = json.loads((MODELS / f"tiny-{kind}/config.json").read_text())
    entry = recorded()["kinds"][kind]
    assert config["acceptance"] == entry["acceptance"]
    tree = best_tree(config["acceptance"], NODES)
    worth = expected_tokens(tree, config["acceptance"])
    assert worth == pytest.approx(entry["expected"][str(NODES)], abs=1e-3)
