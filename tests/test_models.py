"""The embedded models are what models/README.md says they are."""

import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.toolbox.model.checkpoint import load_config, load_tokenizer
from lessons.toolbox.model.corpus import copies, corpus, long_lines
from models import answers
from models import train as training
from models.answers import goes_round, parses_so_far, repeats_a_line
from models.evaluate import model_card
from models.stop import Stop
from models.text import PHASES, batches, windows
from models.tokenizer import begins_every_text
from tests.training_cases import train_small_models

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
    first, *ids = tokenizer(text)["input_ids"]
    assert first == tokenizer.bos_token_id and tokenizer.decode(ids) == text


def test_the_tokenizer_says_what_begins_a_text():
    """The rule that train_tokenizer writes is that of the committed files."""
    backend = load_tokenizer("models/tiny").backend_tokenizer
    committed = backend.to_str()
    backend.post_processor = begins_every_text(0)
    assert backend.to_str() == committed


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
        tokens = tokenizer(text)["input_ids"]
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


# ---------------------------------------------------------------- the next training


def test_a_training_goes_on_where_it_was_interrupted():
    stream = np.arange(2000)
    whole = itertools.islice(windows(stream, rows=4, length=16, seen=0), 100)
    resumed = itertools.islice(windows(stream, rows=4, length=16, seen=40 * 4 * 16), 60)
    assert all(torch.equal(a, b) for a, b in zip(itertools.islice(whole, 40, None), resumed))


@pytest.mark.sample(3, of="processes")
def test_an_interrupted_training_ends_with_the_weights_of_one_that_was_not(tmp_path, monkeypatch):
    """Cut off anywhere, or asked to stop."""

    def seconds():
        if next(ticks) == stop_at:
            raise KeyboardInterrupt
        return 0.0

    def weights(folder):
        return load_file(tmp_path / folder / "model.safetensors")

    train_small_models(monkeypatch, tmp_path)
    monkeypatch.setattr(training, "SAVED_EVERY_S", -1)
    # not in the module time itself, because other threads of this process read that clock
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=seconds))
    asked = Stop()
    asked.is_asked = True
    for folder, stops in (("whole", [-1]), ("in_parts", [11, 20, -1]), ("asked", [-2, -2, -1])):
        monkeypatch.setitem(training.FOLDERS, "tiny", tmp_path / folder)
        for stop_at in stops:
            ticks = itertools.count()
            ends = {
                -1: nullcontext(),
                -2: pytest.raises(SystemExit, match="the same command goes on"),
            }
            with ends.get(stop_at) or pytest.raises(KeyboardInterrupt):
                how = training.Options(0.03, tokens_per_step=2048, compiles=False)
                training.train("tiny", how, stop=asked if stop_at == -2 else None)
    assert not list((tmp_path / "build").iterdir()), "what it kept to go on is gone"
    for name, whole in weights("whole").items():
        assert torch.equal(whole, weights("in_parts")[name]), name
        assert torch.equal(whole, weights("asked")[name]), name


def test_a_training_reads_both_texts_in_the_shares_of_its_phases():
    step, steps, own = 8192, 100, 2**20
    text = {"own": np.arange(own), "wide": own + np.arange(2**20)}
    facts, budget, found = {"tokens_seen": 0}, step * steps, []
    for spent, batch in batches(text, step, facts, budget):
        found.append((spent, batch))
        facts["tokens_seen"] += batch[:, 1:].numel()
    assert len(found) == steps
    for spent, batch in found:
        phase = next(phase for phase in PHASES if spent < phase.until)
        assert batch.shape == (step // phase.length, phase.length + 1)
        assert (batch[:, 0] < own).float().mean() == phase.own
    first = torch.cat([batch.flatten() for spent, batch in found if spent < 0.55])
    assert first.unique().numel() > 0.98 * first.numel(), "no token twice before all were read"
    facts["tokens_seen"] = 70 * step  # in a later phase, as if it had been interrupted
    assert torch.equal(next(batches(text, step, facts, budget))[1], found[70][1])


def test_an_epoch_reads_each_token_once_and_the_next_one_cuts_elsewhere():
    stream, rows, length = np.arange(1601), 5, 16
    batches = list(itertools.islice(windows(stream, rows, length, seen=0), 40))
    first, second = torch.cat(batches[:19]), torch.cat(batches[19:38])
    for epoch in (first, second):
        assert len(epoch[:, :-1].unique()) == epoch[:, :-1].numel()
    assert {int(n) % length for n in first[:, 0]} != {int(n) % length for n in second[:, 0]}


def test_a_copy_of_a_held_out_module_is_not_trained_on():
    held_out = corpus()[1]
    secret = {line for text in held_out for line in long_lines(text)}
    assert all(copies("import os\n" + text.replace("\n", "  \n"), secret) for text in held_out)
    # A module about sound files tells the same as one that is held out, so a few may go.
    assert sum(copies(text, secret) for text in corpus()[0][:50]) < 5


@pytest.mark.parametrize(
    ("source", "is_python"),
    [
        ("def f(x):\n    if x:\n        return [x,\n    and cut of", True),
        ('def f():\n    """A text that goes\n    on and', True),
        ("    def method(self):\n        return self.x\n\n    def", True),
        ("    def method(self):\n        return self.x\n\n\nclass B:\n    y = 1\n", True),
        ("def f(x:\n    return x)\n\ny = 1\n", False),
        ("def f(x):\nreturn x\n\n", False),
    ],
)
def test_python_as_far_as_it_goes(source, is_python):
    assert parses_so_far(source) == is_python


def test_a_repeated_line_is_one_that_says_something():
    assert repeats_a_line("self.file.close()\n" * 3) and not repeats_a_line("return x\n" * 9)


def test_an_answer_goes_round_within_a_line():
    assert goes_round("x = the inverse of the inverse of the inverse of the inverse of the inverse")
    assert goes_round("return a, k, l, l, l, l, l")
    assert not goes_round("def f(x):\n" * 4), "a line that is repeated is the other figure"
    assert not goes_round("# " + 40 * "-") and not goes_round("x = [0, 0, 0]")


def test_real_answers_are_what_follows_the_prompts(monkeypatch, tmp_path):
    (tmp_path / "prompts.json").write_text(json.dumps([{"prompt": "def f("}, {"prompt": "absent"}]))
    monkeypatch.setattr(answers, "HERE", tmp_path)
    texts = ["a = 1\n", "b = 2\ndef f(x):\n    return x + 10\n"]
    found = answers.real_answers(load_tokenizer("models/tiny"), texts, length=3)
    assert len(found) == 1 and texts[1][6:].startswith(found[0]) and len(found[0]) > len("def f(")
