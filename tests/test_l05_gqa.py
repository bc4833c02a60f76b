"""Lesson 5 beyond its equivalence tests: its README says what the code says, its figures can be
read, its quality is sound.
"""

import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lessons.l01_roofline.calculators import kv_bytes_per_token, sequences_that_fit, weight_bytes
from lessons.l01_roofline.planner.models import MODELS
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l05_gqa.arguments import MAX_GROUP
from lessons.l05_gqa.convert import first_head, mean_head, merged
from lessons.l05_gqa.lab import figures, quality, traffic
from lessons.l05_gqa.lab import pictures as picture
from lessons.l05_gqa.lab.specs import KERNELS
from lessons.toolbox.draw.plotting import overlapping_texts, texts_outside
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.measure.hardware import CHIPS
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.proof.pages import pages

ROOT = Path(__file__).resolve().parents[1]
README = " ".join(pages(ROOT / "lessons" / "l05_gqa").split())
CONFIG = ModelConfig(
    "llama",
    vocab_size=31,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=16,
    max_position_embeddings=600,
)


# ---------------------------------------------------------------- what the README says


def test_the_table_of_models_is_what_the_command_prints(capsys):
    assert traffic.main([]) == 0
    printed = capsys.readouterr().out
    assert "read in groups           32   1 x" in printed and "288   9 x" in printed
    for line in traffic.table(8192, "h200"):
        assert line in printed and " ".join(line.split()) in README, line


def test_the_numbers_of_the_readme():
    """Each is computed here and must be in the text, so that neither can change alone."""
    llama, chip = MODELS["llama-3-8b"], CHIPS["h200"]
    token = 2 * llama.num_hidden_layers * llama.num_key_value_heads * llama.head_dim * 2
    small = (
        traffic.cached_bytes(10, 2, 4, 2),
        traffic.cached_bytes(10, 6, 4, 2),
        traffic.repeated_bytes(10, 6, 2, 4, 2),
    )
    floor_us = 16 * traffic.cached_bytes(4096, 8, 128, 2) / chip.memory_bytes_per_s * 1e6
    without, with_cores = (
        rate / chip.memory_bytes_per_s for rate in (chip.fp32_flops_per_s, chip.bf16_flops_per_s)
    )
    big = traffic.repeated_bytes(1, 64, 8, 1, 1) / traffic.cached_bytes(1, 8, 1, 1)
    read_ms = 2 * 2**30 / 4.3e12 * 1e3
    batch_gb = 32 * 4096 * token / 1e9
    for quoted in (
        f"read {batch_gb:.1f} GB of K and V a step",
        f"it would be {4 * batch_gb:.1f} GB",
        f"= {small[0]} bytes. MHA with 6: {small[1]}",
        f"= {small[2]} bytes, {small[2] / small[0]:.0f} times GQA and "
        f"{small[2] / small[1]:.1f} times MHA",
        f"below {without:.0f} without and below {with_cores:.0f} with tensor cores",
        f"below {without:.0f} FLOP/byte without, {with_cores:.0f} with tensor cores",
        f"once are `{floor_us:.0f} µs` on an H200",
        f"More than {MAX_GROUP} query heads",
        f"</summary>{big:.0f}: 2·8 + 1",
        f"</summary>{2 * 32 * 128 * 2 // 1024}: 2 · 32",
        f"As MHA {2 * 32 * 40 * 128 * 2 // 1024}",
        f"</summary>{read_ms:.2f}, and 9 times that: {9 * read_ms:.1f}.",
    ):
        assert quoted in README, quoted


def test_the_museum_is_right():
    big, falcon = MODELS["llama-2-70b"], MODELS["falcon-40b"]
    rows = {row.model.name: row for row in traffic.rows(8192, CHIPS["h200"].memory_bytes)}
    found = rows["llama-2-70b"]
    as_mha, as_it_is = found.mha_bytes / 1024, found.kv_bytes / 1024
    assert f"{as_mha:.0f} KiB a token instead of {as_it_is:.0f}, {as_mha / as_it_is:.0f}" in README
    assert (big.num_attention_heads, MODELS["llama-2-7b"].num_key_value_heads) == (64, 32)
    assert (falcon.num_attention_heads, falcon.num_key_value_heads) == (128, 8)
    assert rows["falcon-40b"].kind == "GQA"
    llama = MODELS["llama-3-8b"]
    full = sequences_that_fit(
        CHIPS["h200"].memory_bytes, weight_bytes(llama), kv_bytes_per_token(llama), 8192
    )
    planned = rows["llama-3-8b"].sequences
    assert f"makes {planned} sequences of Llama-3-8B instead of `{full}`" in README


def test_fitting_by_hand():
    """100 bytes of memory are 90; weights of 100 need two GPUs, which leaves 80 for caches of 8."""
    assert traffic.fitting(100, 100.0, 1.0, 8) == (2, 10)
    assert traffic.fitting(100, 50.0, 1.0, 8) == (1, 5)
    assert traffic.fitting(100, 85.0, 1.0, 8) == (2, 11)  # one would hold the weights alone


def test_the_mean_of_the_example():
    heads = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    distance = {
        merge: float(((heads - merge(heads)[:, None]) ** 2).sum())
        for merge in (mean_head, first_head)
    }
    assert distance == {mean_head: 2, first_head: 4}
    assert "squared distances 1 + 1 = 2. First head 1: 0 + 4 = 4" in README


def test_the_excerpts_stand_in_the_sources():
    room = ROOT / "lessons" / "l05_gqa"
    sources = ["".join((room / name).read_text().split()) for name in ("naive.py", "optimized.py")]
    excerpts = pages(room).split("```python\n")[1:]
    assert len(excerpts) == 3
    for excerpt in excerpts:
        assert any("".join(excerpt.split("```")[0].split()) in source for source in sources)


def test_what_the_compiler_is_said_to_say():
    reports = check_all([spec for spec in KERNELS if "bf16_4x128_n64" in spec.name], [90])
    if (reports[0].error or "").startswith("not run"):
        pytest.skip(reports[0].error)
    said = re.search(
        r"sm_90: (\d+) registers, no spills, (\d+) KiB of shared memory, (\d+) HMMA", README
    )
    found = reports[0]
    assert [int(number) for number in said.groups()[1:]] == [
        found.shared_bytes // 1024,
        found.census["HMMA"],
    ]
    # registers move with the compiler's version
    assert abs(int(said[1]) - found.registers) <= 24 and not found.spill_bytes


@pytest.mark.parametrize(
    "arguments, says",
    [(["--context", "0"], "--context 0; accepted: 1 or more"), (["--gpu", "x"], "chip is 'x'")],
)
def test_a_wrong_argument_gets_one_line(capsys, arguments, says):
    assert traffic.main(arguments) == 2
    assert says in capsys.readouterr().err


# ---------------------------------------------------------------- figures


def test_the_picture_can_be_read():
    figure = picture.draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert [picture.heads_moved(way) for way in picture.WAYS] == [6, 2, 1, 14]
    assert [picture.kv_head_of(h, 2) for h in range(6)] == [0, 0, 0, 1, 1, 1]


def test_the_figures_of_records_can_be_read():
    names = ("l05_quality", "l05_step")
    quality_record, steps = (
        json.loads((ROOT / "results" / "cpu" / f"{name}.json").read_text()) for name in names
    )
    drawn = [
        figures.quality_figure(quality_record, steps),
        figures.sharing_figure(),
        figures.sharing_figure(64, 32768),
    ]
    for figure in drawn:
        assert not texts_outside(figure) and not overlapping_texts(figure)
    said = drawn[0]._suptitle.get_text()
    for point in (
        quality_record["series"]["1 head, mean"]["points"][0],
        quality_record["series"]["1 head, mean"]["points"][-1],
    ):
        assert f"{point['loss']:.2f}" in said


def test_the_slider_says_what_the_table_says():
    """8 KV heads are Llama-3-70B as it is, so the bar and the row of the table are the same."""
    [row] = traffic.rows(8192, CHIPS["h200"].memory_bytes, ("llama-3-70b",))
    said = figures.sharing_figure(8, 8192)._suptitle.get_text()
    assert f"keeps {8192 * row.kv_bytes / 2**30:.3g} GiB" in said
    assert said.endswith(f"room for {row.sequences}")
    with pytest.raises(ValueError, match="kv_heads: got 3; accepted: 1, 2, 4"):
        figures.sharing_figure(3)


# ---------------------------------------------------------------- quality


def new_model() -> Decoder:
    model = Decoder(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
    return model.eval().requires_grad_(False)


def test_the_loss_is_the_mean_of_next_token_losses(seed):
    model, window = new_model(), torch.randint(31, (3, 9))
    by_hand = []
    for row in window:
        hidden = model(row, whole_sequence(model, 9))
        probs = torch.softmax(model.logits(hidden).double(), -1)
        by_hand += [-float(probs[t, row[t + 1]].log()) for t in range(8)]
    assert quality.held_out_loss(model, window) == pytest.approx(
        sum(by_hand) / len(by_hand), rel=1e-5
    )


def test_variants_differ_in_their_kv_heads_alone(seed):
    model, window = new_model(), torch.randint(31, (2, 20))
    found = quality.variants(model)
    assert [variant.config.num_key_value_heads for variant in found.values()] == [6, 3, 2, 1, 1]
    losses = {label: quality.held_out_loss(variant, window) for label, variant in found.items()}
    assert losses["6 heads, repeated"] == pytest.approx(losses["2 heads, as trained"], abs=1e-5)
    # The others really are other models. Rounding to digits would tell two equal losses apart where
    # they are on either side of a boundary.
    others = sorted(loss for label, loss in losses.items() if label != "6 heads, repeated")
    assert all(b - a > 1e-6 for a, b in pairwise(others))


def test_uptraining_learns_and_leaves_the_model_alone(seed):
    """A pattern that repeats: the loss must fall; the model it started from, whose weights others
    share, must not move.
    """
    model = new_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    pattern = torch.tensor(random.choices(range(31), k=16)).repeat(3)
    train = torch.stack([pattern.roll(shift)[:33] for shift in range(48)])
    small = merged(model, 1, mean_head)
    losses = [
        (tokens, quality.held_out_loss(better, train[:4]))
        for tokens, better in quality.uptrained(small, train, [4, 12])
    ]
    assert [tokens for tokens, _ in losses] == [4 * quality.ROWS * 32, 12 * quality.ROWS * 32]
    assert losses[1][1] < quality.held_out_loss(small, train[:4])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
