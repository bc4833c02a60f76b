"""The embedded models are what models/README.md says they are."""

import json
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.toolbox.model.checkpoint import load_config, load_tokenizer
from lessons.toolbox.model.corpus import corpus
from models.evaluate import model_card

MODELS = Path(__file__).parents[1] / "models"


@pytest.fixture(scope="module")
def figures():
    return json.loads((MODELS / "figures.json").read_text())


def parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(load_config(f"models/{name}")).parameters())


def test_sizes():
    assert parameters("tiny") <= 12_000_000 and parameters("tiny") >= 8 * parameters("tiny-draft")
    assert (MODELS / "tiny/model.safetensors").stat().st_size <= 25_000_000
    assert load_config("models/tiny").max_position_embeddings >= 2048
    assert (
        load_config("models/tiny").num_key_value_heads
        < load_config("models/tiny").num_attention_heads
    )


def test_both_models_share_one_tokenizer():
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (MODELS / "tiny" / file).read_bytes() == (MODELS / "tiny-draft" / file).read_bytes()
    sizes = {load_config(f"models/{name}").vocab_size for name in ("tiny", "tiny-draft")}
    assert sizes == {len(load_tokenizer("models/tiny"))}


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n\treturn x  # ünï😀\n\n\n    pass   \n", "", "0123456789" * 3, "\x00\r\n'''"],
)
def test_the_tokenizer_loses_nothing(text):
    tokenizer = load_tokenizer("models/tiny")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_card_is_generated_from_the_figures(figures):
    assert (MODELS / "README.md").read_text() == model_card(figures)
    assert figures["tiny"]["parameters"] == parameters("tiny") and figures["draft"][
        "parameters"
    ] == parameters("tiny-draft")


@torch.inference_mode()
def logits(model, tokens):
    ids = torch.tensor(tokens)
    return model.logits(model(ids, whole_sequence(model, len(ids))))


@torch.inference_mode()
def test_the_recorded_quality_is_that_of_the_weights(figures):
    """Loss on the ladder's prompts (code from held-out modules), and the draft's agreement, near
    the recorded figures.
    """
    tokenizer = load_tokenizer("models/tiny")
    texts = [r["prompt"] for r in json.loads((MODELS / "prompts.json").read_text())]
    tiny, draft = (Decoder.from_pretrained(f"models/{name}") for name in ("tiny", "tiny-draft"))
    losses, agree = [], []
    for text in texts:
        tokens = [0, *tokenizer(text)["input_ids"]]
        rows, draft_rows = logits(tiny, tokens)[:-1], logits(draft, tokens)[:-1]
        losses.append(
            torch.nn.functional.cross_entropy(rows, torch.tensor(tokens[1:]), reduction="none")
        )
        agree.append(rows.argmax(-1) == draft_rows.argmax(-1))
    # These few thousand tokens are a sample of the held-out ones; a broken checkpoint is off by
    # several nats.
    assert float(torch.cat(losses).mean()) == pytest.approx(
        figures["tiny"]["held_out_loss_nats"], abs=0.4
    )
    assert float(torch.cat(agree).float().mean()) == pytest.approx(
        figures["draft"]["greedy_agreement_with_tiny"], abs=0.12
    )


def test_requests_differ_in_length_and_fit_the_context():
    tokenizer = load_tokenizer("models/tiny")
    requests = json.loads((MODELS / "prompts.json").read_text())
    lengths = [len(tokenizer(r["prompt"])["input_ids"]) for r in requests]
    assert len(requests) == 32 and min(lengths) < 32 and max(lengths) > 256
    assert len({r["max_new_tokens"] for r in requests}) > 16
    assert all(n + r["max_new_tokens"] < 2048 for n, r in zip(lengths, requests))


def test_held_out_modules_are_not_trained_on():
    train, held_out = corpus()
    assert len(held_out) >= 15 and not {hash(t) for t in held_out} & {hash(t) for t in train}
    assert not any("def heappushpop(heap, item):" in text for text in train)
