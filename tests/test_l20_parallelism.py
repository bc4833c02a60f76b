"""Lesson 20: proves that the first picture fits, that excerpts stand in the sources, and that the README
quotes what the code says.
"""

import json
from pathlib import Path

import pytest
import torch

from lessons.l01_roofline.calculators import kv_bytes_per_token, weight_bytes
from lessons.l01_roofline.models import find_model
from lessons.l06_mla.deepseek import decoder_class
from lessons.l15_chunked_prefill.lab.costs import LINKS_BYTES_PER_S, PCIE_BYTES_PER_S
from lessons.l20_parallelism.collectives import WAYS, fewest_bytes
from lessons.l20_parallelism.lab import cuts, experiments
from lessons.l20_parallelism.load import load_of
from lessons.l20_parallelism.pipeline import bubble, decode_bubble
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.measure.hardware import CHIPS
from tests.excerpts import plain_readme, stray_excerpts

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "lessons/l20_parallelism"
README = plain_readme(ROOM)
SMALL, LARGE = find_model("llama-3-8b"), find_model("llama-3-70b")
HUGE, MIXTRAL = find_model("llama-3-405b"), find_model("mixtral-8x7b")
H100, NVLINK = CHIPS["h100"], LINKS_BYTES_PER_S["NVLink"]
ALPHA_S, VALUE_BYTES = 5e-6, 2


def test_the_first_picture_fits():
    figure = cuts.draw_cuts()
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_the_excerpts_stand_in_the_sources():
    assert not stray_excerpts(ROOM)


def test_the_record_has_the_bytes_of_the_formula():
    """And the formula is the text's: two sums a layer, one for the embedding, and the logits."""
    record = json.loads((ROOT / "results/cpu/l20_ranks.json").read_text(encoding="utf-8"))
    for length in experiments.LENGTHS:
        found = record["series"]["shards"][f"{length} token{'s' * (length > 1)}"]
        wanted = experiments.bytes_of_a_step(experiments.CONFIG, length, 2, 4)
        assert found["bytes"] == found["formula_bytes"] == wanted
        assert found["collectives"] == sums_of(experiments.CONFIG) + 1
    with torch.device("meta"):
        model = decoder_class(experiments.CONFIG)(experiments.CONFIG)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert f"a random model of {weights / 1e6:.0f} million weights" in README


def sums_of(model) -> int:
    """All-reduces of a pass."""
    return 2 * model.num_hidden_layers + 1


def row_bytes(model, tokens: int = 1) -> int:
    """n: the tensor of a sum."""
    return tokens * model.hidden_size * VALUE_BYTES


def reading_s(model, size: int) -> float:
    """A decode step of one row on `size` H100s, by its weights alone."""
    return VALUE_BYTES * model.params_read(1) / size / H100.memory_bytes_per_s


def adding_s(model, size: int, way: str = "one_shot") -> float:
    """The sums of a decode step of one row."""
    steps, sent = WAYS[way].steps(size), WAYS[way].bytes_sent(size, row_bytes(model))
    return sums_of(model) * (steps * ALPHA_S + sent / NVLINK)


def test_the_readme_quotes_the_examples():
    """Steps 1 and 2, by the picture's code, and what a nonlinear function forbids."""
    (h0, part0), (h1, part1) = cuts.parts_of(cuts.X, cuts.A, cuts.B)
    assert (h0.item(), h1.item()) == (3, 2)
    assert "h₀ = 3" in README and "h₁ = 2" in README and "relu(x Aᵀ) = (3, 2)" in README
    assert part0.tolist() == [3, 0] and part1.tolist() == [4, 8]
    assert "3 · (1, 0) = (3, 0)" in README and "2 · (2, 4) = (4, 8)" in README
    whole = torch.relu(cuts.A @ cuts.X) @ cuts.B.T
    assert whole.tolist() == [7, 8] and "h Bᵀ = (3 + 4, 8) = (7, 8)" in README
    assert max(2 - 1, 0) == 1 != max(2, 0) + max(-1, 0) == 2
    assert "relu(2 − 1) is 1, and relu(2) + relu(−1) is 2" in README


def test_the_readme_quotes_the_wire():
    """Steps 5 to 9, where it loses, the museum and the quiz."""
    assert f"P = 8: {fewest_bytes(8, 1):.2f} n" in README
    assert f"n is {row_bytes(LARGE):,} bytes" in README
    sent = sums_of(LARGE) * fewest_bytes(8, row_bytes(LARGE))
    assert f"the {sums_of(LARGE)} sums send {sent / 1e6:.1f} MB on 8 ranks" in README
    assert f"this is {1e3 * sent / NVLINK:.3f} ms" in README
    assert f"PCIe (64 GB/s) {1e3 * sent / PCIE_BYTES_PER_S:.2f} ms" in README
    assert (NVLINK, PCIE_BYTES_PER_S) == (450e9, 64e9)
    read = VALUE_BYTES * LARGE.params_read(1)
    assert f"decode step reads {read / 1e9:.1f} of them" in README
    assert (
        f"in {1e3 * reading_s(LARGE, 1):.1f} ms. One user gets {1 / reading_s(LARGE, 1):.0f}"
        in (README)
    )
    assert (
        f"reads {read / 1e9:.1f} / 8 GB, which takes {1e3 * reading_s(LARGE, 8):.1f} ms" in README
    )
    for way, rounds in (("ring", 14), ("one_shot", 1)):
        assert WAYS[way].steps(8) == rounds
        assert f"which is {1e3 * sums_of(LARGE) * rounds * ALPHA_S:.1f} ms" in README
    for size in (2, 4, 8):
        read_s, add_s = reading_s(LARGE, size), adding_s(LARGE, size)
        times = reading_s(LARGE, 1) / (read_s + add_s)
        row = f"| {size} | {1e3 * read_s:.1f} ms | {1e3 * add_s:.1f} ms | {1e3 * (read_s + add_s):.1f}"
        assert f"{row} ms | {times:.2f} | {times / size:.0%} |" in README
    ring = reading_s(LARGE, 8) / (reading_s(LARGE, 8) + adding_s(LARGE, 8, "ring"))
    assert f"with one shot and {ring:.0%} with a ring" in README


def test_the_readme_quotes_the_prefill_and_small_models():
    n = row_bytes(LARGE, 4096)
    sent = sums_of(LARGE) * fewest_bytes(8, n)
    compute_s = 2 * LARGE.params_read(1) * 4096 / 8 / H100.bf16_flops_per_s
    assert f"have n = {n / 1e6:.1f} MB. On 8 ranks {sent / 1e9:.1f} GB are sent" in README
    over = f"{1e3 * sent / NVLINK:.0f} ms over NVLink, {1e3 * sent / PCIE_BYTES_PER_S:.0f} ms"
    assert over in README and f"takes {1e3 * compute_s:.0f} ms at the peak" in README
    slow = f"`{1e3 * sent / PCIE_BYTES_PER_S:.0f} ms` on PCIe, beside `{1e3 * compute_s:.0f} ms`"
    assert slow in README
    read_s, add_s = reading_s(SMALL, 8), adding_s(SMALL, 8)
    assert f"reads for `{1e3 * read_s:.2f} ms` and adds up for `{1e3 * add_s:.2f} ms`" in README
    assert f"efficiency is `{100 * read_s / (read_s + add_s):.0f} %`" in README
    best = reading_s(LARGE, 4) / (reading_s(LARGE, 4) + adding_s(LARGE, 4))
    assert f"at `{100 * best:.0f} %` efficiency at most" in README
    quiz = sums_of(SMALL) * fewest_bytes(2, row_bytes(SMALL, 32))
    assert (
        f"{sums_of(SMALL)} sums of 32 · 4096 · 2 bytes" in README
        and f"{quiz / 1e6:.1f} MB" in README
    )
    assert f"{fewest_bytes(4, 8):.0f} MB in {WAYS['ring'].steps(4)} rounds" in README
    assert f"One shot: 3 · 8 = {WAYS['one_shot'].bytes_sent(4, 8):.0f} MB" in README


def test_the_readme_quotes_stages_and_experts():
    shares = "    ".join(f"m = {m}: {bubble(4, m):.0%}" for m in (1, 4, 16))
    assert shares in README
    assert decode_bubble(4, 4) == 0 and decode_bubble(4, 1) == pytest.approx(1 - 1 / 4)
    assert f"leaves `{100 * bubble(4, 1):.0f} %` of four stages idle" in README
    assert f"3 / (12 + 3) = {bubble(4, 12):.0%}" in README
    travels = 1024 * 2 * row_bytes(MIXTRAL) * 3 / 4
    assert f"1024 · 2 rows of {row_bytes(MIXTRAL)} bytes" in README
    assert f"{travels / 1e6:.1f} MB, and as much back" in README
    torch.manual_seed(0)
    for tokens, digits in ((8, 1), (1024, 2)):
        draws = (torch.rand(tokens, 8).topk(2).indices for _ in range(1000))
        loads = [load_of(chosen, 8).of_ranks(4).imbalance for chosen in draws]
        assert f"{sum(loads) / len(loads):.{digits}f} times" in README


def test_the_readme_quotes_the_memory():
    """The bottleneck, steps 3 and 12, and the museum."""
    memory = H100.memory_bytes
    planned = 0.9 * memory
    assert f"{weight_bytes(LARGE) / 1e9:.1f} GB in 16 bits, and an H100 has {memory / 1e9:.0f}" in (
        README
    )
    kept = kv_bytes_per_token(LARGE)
    assert f"stores {kept / 8 / 1024:.0f} KiB for each token instead of {kept / 1024:.0f}" in README
    latents = kv_bytes_per_token(find_model("deepseek-v3"))
    assert f"all {latents / 1024:.1f} KiB" in README
    for model, bits, size, context in ((LARGE, 16, 2, 4096), (HUGE, 8, 8, 16_384)):
        weights = weight_bytes(model, bits) / size
        left = planned - weights
        count = int(left / (kv_bytes_per_token(model) / size * context))
        assert f"{weights / 1e9:.1f}" in README
        assert f"{left / 1e9:.1f} GB are left: {count} sequences of {context:,}" in README.replace(
            "4096 tokens", "4,096 tokens"
        )
    assert weight_bytes(HUGE) / 8 > memory
    assert f"{weight_bytes(HUGE) / 8 / 1e9:.1f} GB a GPU, which does not fit" in README
    assert f"{weight_bytes(HUGE) / 1e9:.1f} GB of weights meet {8 * memory / 1e9:.0f} GB" in README
