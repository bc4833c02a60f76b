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

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.rope import rope_inv_freq
from lessons.l04_positions.alibi import alibi_slopes
from lessons.l04_positions.lab import extrapolation, figures, uptraining
from lessons.l04_positions.lab import pictures as picture
from lessons.l04_positions.lab.traffic import fused_bytes
from lessons.l04_positions.naive import (
    half_from_interleaved,
    inverse_frequencies,
    new_cos_sin_cache,
)
from lessons.toolbox.draw.plotting import overlapping_texts, texts_outside
from lessons.toolbox.model.config import ModelConfig, RopeScaling
from lessons.toolbox.proof.pages import pages
from solutions.l04_positions import rotation_bytes

ROOT = Path(__file__).resolve().parents[1]
README = pages(ROOT / "lessons" / "l04_positions")
RECORD = ROOT / "results" / "cpu" / "l04_extrapolation.json"


def test_readme_quotes_the_bytes():
    step_by_step, fused = rotation_bytes(32, 8, 128, torch.bfloat16)
    assert f"`{fused:,}` bytes in 16 bits" in README
    assert f"moves `{step_by_step} bytes`, where `{fused}` are enough" in README
    assert f"`{step_by_step / fused:.1f} times` as much" in README
    # the lesson's count, without table, position and slot
    assert fused == fused_bytes(1, 32, 8, 128, 2) - 4 * 128 - 16


def test_readme_worked_examples():
    assert f"cos 2 = {math.cos(2):.3f}".replace("-", "−") in README
    assert ", ".join(f"{slope:.3f}" for slope in alibi_slopes(12)[8:]) in README
    first, last = 2 * math.pi / inverse_frequencies(128)[[0, -1]]
    assert f"from {first:.2f} to {last:,.0f} tokens" in README
    order = half_from_interleaved(torch.arange(8), 1).tolist()
    assert f"interleaved to half:   {' '.join(map(str, order))}" in README


def test_readme_example_of_a_stretch():
    """A pair with 2.5 turns within the trained context keeps half and an eighth of the other
    half.
    """
    kept = 0.5 + 0.5 / 8
    assert f"0.5 + 0.5 / 8 = {kept} of its frequency" in README
    theta = (2.5 * 2 * math.pi / 8192) ** -2  # so that the second of two pairs turns 2.5 times
    config = replace(figures.LLAMA_3, rope_theta=theta, head_dim=4, v_head_dim=4)
    stretched = replace(config, rope_scaling=figures.SCALINGS["Llama 3.1, 8×"])
    plain, slowed = (rope_inv_freq(c, torch.device("cpu"))[1] for c in (config, stretched))
    assert float(slowed / plain) == pytest.approx(kept, rel=1e-4)


def test_readme_example_of_yarn():
    """Pairs 20, 33 and 46 keep all, 0.625 and a quarter of their frequencies; scores are
    sharper.
    """
    yarn = RopeScaling("yarn", 4.0, original_max_position_embeddings=4096)
    config = replace(figures.LLAMA_3, rope_theta=10000.0, head_dim=128, rope_scaling=None)
    device = torch.device("cpu")
    plain, slowed = (rope_inv_freq(c, device) for c in (config, replace(config, rope_scaling=yarn)))
    kept = [round(float(share), 4) for share in (slowed / plain)[[20, 21, 33, 45, 46]]]
    assert kept[0] == 1 > kept[1] > kept[2] == 0.625 > kept[3] > kept[4] == 0.25
    assert "it keeps 0.5 + 0.5 / 4 = 0.625" in README
    assert f"which is {0.1 * math.log(4) + 1:.3f} for a factor of 4" in README


def mixed_layouts(x: torch.Tensor, position: int) -> torch.Tensor:
    """The museum's mistake: a table for neighbours beside a rotation that cuts at the middle."""
    angles = position * inverse_frequencies(4, 100.0).repeat_interleave(2)
    first, second = x.chunk(2)
    return x * angles.cos() + torch.cat([-second, first]) * angles.sin()


def test_the_museum_is_right():
    x = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    for query, key in ((3, 1), (103, 101)):
        score = float(mixed_layouts(x, query) @ mixed_layouts(x, key))
        assert f"`{score:.3f}`" in README
    assert f"first slope becomes `{2 ** (-8 / 12):.3f}`" in README
    assert float(alibi_slopes(12)[0]) == 0.5


def test_the_excerpts_stand_in_the_sources():
    def unindented(text):  # and as one line, because the formatter breaks a README's lines anew
        return "".join(text.split())

    rooms = ROOT / "lessons" / "l03_kv_cache", ROOT / "lessons" / "l04_positions"
    files = [file for room in rooms for file in room.glob("*.py")]
    sources = [unindented(file.read_text(encoding="utf-8")) for file in files]
    excerpts = [text.split("```")[0] for text in README.split("```python\n")[1:]]
    assert len(excerpts) == 2
    for excerpt in excerpts:
        assert any(unindented(excerpt) in source for source in sources), excerpt


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
        figures.alibi_images,
        figures.stretch_plot,
        figures.two_clocks,
        picture.draw,
    ],
)
@pytest.mark.sample(4, of="pictures")
def test_figures_can_be_read(draw):
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_the_record_beyond_the_trained_context():
    """Its figure can be read, and it is what the README tells: no weight changed, YaRN holds,
    linear alone does not. Right after the trained context doing nothing is as good.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    figure = figures.extrapolation_plot(record)
    assert not texts_outside(figure) and not overlapping_texts(figure)
    beyond = {
        label: [p["loss"] for p in series["points"] if p["x"] > record["trained_context"]]
        for label, series in record["series"].items()
    }
    plain, linear, yarn = (beyond[label] for label in extrapolation.SCALINGS)
    assert all(one < other for one, other in zip(plain, linear))
    near = len(plain) // 6  # up to one and a half times the trained context
    assert all(abs(one - other) < 0.05 for one, other in zip(yarn[:near], plain))
    assert all(one < other for one, other in zip(yarn[near:], plain[near:]))
    rise = {}
    for label, series in record["series"].items():
        within = [p["loss"] for p in series["points"] if p["x"] <= record["trained_context"]]
        rise[label] = sum(beyond[label]) / len(beyond[label]) - sum(within) / len(within)
    # trained on the same windows of 512 tokens: one stays where it was, the other climbs
    assert rise["ALiBi"] < 0 and rise["RoPE"] > 1
    assert (
        extrapolation.ALT in README and f"`{record['share'] * 100:.1f} %` of the tokens" in README
    )
    assert extrapolation.ALT in RECORD.with_suffix(".svg").read_text(encoding="utf-8")
    assert set(record["series"]) == {*extrapolation.SCALINGS, *extrapolation.TRAINED_ON}


def test_loss_by_position_in_small():
    """Chunks, cache and scaling: the loss of `losses` is that of the model run at once."""
    config = ModelConfig("llama", 29, 16, 1, 2, 1, 8, 16, 200)
    model = Decoder(config).eval().requires_grad_(False)
    tokens = torch.randint(29, (301,))
    twin = extrapolation.stretched(model, "linear", 2.0)
    assert twin.config.max_position_embeddings == 400 and model.config.rope_scaling is None
    logits = twin.logits(twin(tokens[:-1], whole_sequence(twin, 300)))
    want = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
    torch.testing.assert_close(extrapolation.losses(twin, tokens), want, atol=1e-4, rtol=0)
    assert len(extrapolation.held_out_tokens()) > 50_000


def test_alibi_is_evaluated_as_it_is_trained(seed):
    """The loss through the cache, chunk by chunk, is that of the training's own attention."""
    config = ModelConfig("llama", 29, 16, 1, 2, 1, 8, 16, 400)
    model = Decoder(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():  # large enough for positions to matter
        if parameter.dim() > 1:
            parameter.normal_(std=2 * parameter.shape[-1] ** -0.5)
    tokens = torch.randint(29, (301,))
    found = extrapolation.losses(model, tokens, extrapolation.BIASED)
    want = uptraining.next_token_loss(model, tokens, uptraining.biased)
    assert float(found.mean()) == pytest.approx(float(want), abs=1e-5)
    rotated = uptraining.next_token_loss(model, tokens, uptraining.rotated)
    by_rotation = extrapolation.losses(model, tokens)
    assert float(by_rotation.mean()) == pytest.approx(float(rotated), abs=1e-5)
    assert (by_rotation - found).abs().max() > 1e-2  # of 300 tokens, so the two differ for sure


def test_two_clocks_say_the_same_wherever_they_stand():
    titles = {figures.two_clocks(at, 2, shift=at)._suptitle.get_text() for at in (3, 30)}
    mean = sum(math.cos(2 * f) for f in inverse_frequencies(8).tolist()) / 4
    assert titles == {f"2 tokens apart: score {mean:.3f} of 1, wherever the two tokens stand"}


def test_command_line(capsys):
    assert extrapolation.main(["--windows", "0"]) == 2
    assert re.search("--windows: got 0; accepted: 1 or more", capsys.readouterr().err)
