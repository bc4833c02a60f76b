"""Lesson 4 beyond its equivalence tests: its README says what the code computes, its figures can be
read.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention.rope import rope_inv_freq
from lessons.l04_positions.alibi import alibi_slopes
from lessons.l04_positions.lab import extrapolation, figures
from lessons.l04_positions.lab import pictures as picture
from lessons.l04_positions.lab.traffic import fused_bytes
from lessons.l04_positions.naive import inverse_frequencies, new_cos_sin_cache
from lessons.toolbox.draw.plotting import overlapping_texts, texts_outside
from solutions.l04_positions import rotation_bytes

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "lessons" / "l04_positions" / "README.md").read_text(encoding="utf-8")
RECORD = ROOT / "results" / "cpu" / "l04_extrapolation.json"


def test_readme_quotes_the_bytes():
    step_by_step, fused = rotation_bytes(32, 8, 128, torch.bfloat16)
    assert f"{step_by_step} bytes" in README
    assert f"where {fused} are enough: {step_by_step / fused:.1f} times" in README.replace(
        "\n", " "
    )
    # the lesson's count, without table, position and slot
    assert fused == fused_bytes(1, 32, 8, 128, 2) - 4 * 128 - 16


def test_readme_worked_example():
    assert f"cos 2 = **{math.cos(2):.3f}**".replace("-", "−") in README
    assert f"**{', '.join(f'{slope:.3f}' for slope in alibi_slopes(12)[8:])}**" in README


def test_readme_quiz():
    slowest = 2 * math.pi / float(inverse_frequencies(128)[-1])
    assert f"2π · 10000^(126/128) = {slowest:.0f}" in README
    stretched = replace(figures.LLAMA_3, rope_scaling=figures.SCALINGS["Llama 3.1, 8×"])
    plain = rope_inv_freq(figures.LLAMA_3, torch.device("cpu"))
    alone = int((rope_inv_freq(stretched, torch.device("cpu")) == plain).sum())
    assert f"{alone}: those that make more than 4 turns" in README
    assert int((8192 * plain / (2 * math.pi) > 4).sum()) == alone
    table = new_cos_sin_cache(inverse_frequencies(128).float(), 1024)
    assert f"{128 * table.nbytes / 2**20:.0f}: 131072 · 128 · 4 bytes" in README


@pytest.mark.parametrize(
    "draw",
    [
        figures.clock_hands,
        figures.decay_curve,
        figures.alibi_images,
        figures.stretch_plot,
        picture.draw,
    ],
)
def test_figures_can_be_read(draw):
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_the_record_beyond_the_trained_context():
    """Its figure can be read, and it is what the README tells: no weight changed, YaRN holds,
    linear alone does not.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    figure = figures.extrapolation_plot(record)
    assert not texts_outside(figure) and not overlapping_texts(figure)
    beyond = {
        label: [p["loss"] for p in series["points"] if p["x"] > record["trained_context"]]
        for label, series in record["series"].items()
    }
    assert all(
        yarn < plain < linear
        for plain, linear, yarn in zip(*(beyond[label] for label in extrapolation.SCALINGS))
    )


def test_loss_by_position_in_small():
    """Chunks, cache and scaling: the loss of `losses` is that of the model run at once."""
    from lessons.l02_naive_attention.decoder import Decoder
    from lessons.l02_naive_attention.naive import whole_sequence
    from lessons.toolbox.model.config import ModelConfig

    config = ModelConfig("llama", 29, 16, 1, 2, 1, 8, 16, 200)
    model = Decoder(config).eval().requires_grad_(False)
    tokens = torch.randint(29, (301,))
    twin = extrapolation.stretched(model, "linear", 2.0)
    assert twin.config.max_position_embeddings == 400 and model.config.rope_scaling is None
    logits = twin.logits(twin(tokens[:-1], whole_sequence(twin, 300)))
    want = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
    torch.testing.assert_close(extrapolation.losses(twin, tokens), want, atol=1e-4, rtol=0)
    assert len(extrapolation.held_out_tokens()) > 50_000


def test_command_line(capsys):
    assert extrapolation.main(["--windows", "0"]) == 2
    assert re.search("--windows: got 0; accepted: 1 or more", capsys.readouterr().err)
