"""Lesson 23: proves that excerpts are in the sources, and that the README quotes what the code
says.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from lessons.l01_roofline.planner.models import find_model
from lessons.l23_experts.align import NOT_USED, align_in_python, most_tiles
from lessons.l23_experts.lab.benchmark import CPU_CACHE_BYTES, Shape, floor_bytes, layer_bytes
from lessons.l23_experts.ranks.load import Load, capacity_of, load_of
from lessons.l23_experts.ranks.placement import place
from lessons.toolbox.measure.hardware import CHIPS
from tests.excerpts import plain_readme, stray_excerpts

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "lessons/l23_experts"
README = plain_readme(ROOM)
TEXT = (ROOM / "README.md").read_text(encoding="utf-8")  # with the sources of numbers
MIXTRAL, H100, VALUE_BYTES = find_model("mixtral-8x7b"), CHIPS["h100"], 2
QWEN3 = dict(num_experts=128, top_k=8, size=2048, inner=768)  # as in lab/benchmark.py
LAUNCH_S, LAUNCHES = 6e-6, 10  # lesson 11's assumption; operations of an expert in lesson 6's loop
ROW_BYTES = VALUE_BYTES * MIXTRAL.hidden_size


def test_the_excerpts_are_in_the_sources():
    assert not stray_excerpts(ROOM, ROOT / "lessons/l06_mla/moe.py")


def read_by(tokens: int) -> float:
    """Experts of Mixtral that so many tokens read, if its router were even."""
    num_experts, top_k = MIXTRAL.num_experts, MIXTRAL.num_experts_per_tok
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def test_the_readme_quotes_bytes_and_rows():
    """The bottleneck, steps 1 and 2, and the quiz."""
    weights = 3 * QWEN3["size"] * QWEN3["inner"]
    read_s = VALUE_BYTES * weights / H100.memory_bytes_per_s
    assert f"experts of {weights / 1e6:.1f} million weights" in README
    assert f"reads one expert in 16 bits in {1e6 * read_s:.1f} µs" in README
    assert f"(lesson 11): {1e6 * LAUNCHES * LAUNCH_S:.0f} µs" in README
    assert read_s < LAUNCHES * LAUNCH_S / 10  # idle more than nine tenths of the time
    experts = "    ".join(f"T = {tokens}: {read_by(tokens):.1f}" for tokens in (8, 64))
    assert read_by(1) == 2 and f"T = 1: 2    {experts}" in README
    torch.manual_seed(0)
    drawn = [load_of(torch.rand(8, 8).topk(2).indices, 8).counts for _ in range(1000)]
    seen = sum(count > 0 for counts in drawn for count in counts) / len(drawn)
    assert seen == pytest.approx(read_by(8), rel=0.01)
    weights = 3 * MIXTRAL.hidden_size * MIXTRAL.moe_intermediate_size
    size = VALUE_BYTES * weights
    assert f"has {weights / 1e6:.1f} million weights, {size / 1e6:.0f} MB in 16 bits" in README
    assert f"one token reads {2 * size / 1e9:.2f} GB in each layer" in README
    assert f"64 tokens read {8 * size / 1e9:.2f} GB" in README
    times = [1e3 * count * size / H100.memory_bytes_per_s for count in (2, 8)]
    assert f"these are {times[0]:.2f} and {times[1]:.2f} ms" in README
    ridge = round(H100.bf16_flops_per_s / H100.memory_bytes_per_s)
    assert f"can do {ridge} FLOPs in the time of a byte" in README
    qwen3 = ridge * 128 / 8
    assert f"{ridge} rows · 8 / 2   = {ridge * 8 / 2:.0f} tokens" in README
    assert f"{ridge} rows · 128 / 8 = {qwen3:.0f} tokens" in README
    assert f"Each expert has {8192 * 2 // 8} rows" in README
    assert f"64 · 2 / 16 = {64 * 2 // 16}." in README


def test_the_h200_figure_shows_what_its_description_says():
    """Who is lowest, who is highest and where; and no number of the text is of a noisy point."""
    record = json.loads((ROOT / "results/h200/l23_mixtral.json").read_text())
    times = {
        label: {point["x"]: point["median_s"] for point in series["points"] if "median_s" in point}
        for label, series in record["series"].items()
    }
    for tokens in record["x"]:
        ours, grouped, transformers, loop = (
            times[label][tokens]
            for label in (
                "all experts at once",
                "PyTorch grouped_mm",
                "transformers",
                "expert by expert",
            )
        )
        assert ours < grouped < transformers
        assert (loop > transformers) == (2 <= tokens <= 256)
    assert "the loop is highest from 2 to 256 tokens" in README
    sources = " ".join(re.findall(r"<!-- results/h200/l23_mixtral.json#(.*?) -->", TEXT))
    quoted = re.findall(r"series.([\w ]+).points.x=(\d+)", sources)
    assert len(quoted) == 8
    for label, tokens in quoted:
        points = {point["x"]: point for point in record["series"][label]["points"]}
        assert not [flag for flag in points[int(tokens)]["flags"] if flag.startswith("noisy")]


@pytest.mark.parametrize("name", ("l23_mixtral", "l23_many_experts"))
def test_no_cpu_figure_draws_a_floor_that_the_cache_beats(name):
    """What fits into the CPU's cache need not come from memory, so only its arithmetic counts."""
    record = json.loads((ROOT / f"results/cpu/{name}.json").read_text())
    peak = record["flops"][-1] / record["floor_s"][-1]  # 512 tokens are limited by arithmetic
    for moved, flops, floor_s in zip(record["bytes"], record["flops"], record["floor_s"]):
        if moved <= CPU_CACHE_BYTES:
            assert floor_s == pytest.approx(flops / peak)
    assert "CHECK" not in (ROOT / f"results/cpu/{name}.svg").read_text(encoding="utf-8")
    points = [p for series in record["series"].values() for p in series["points"]]
    assert not [p for p in points if any("beats" in flag for flag in p.get("flags", ()))]


def test_bytes_that_a_warm_cache_holds_are_not_in_the_floor():
    shape = Shape(8, 2, 512, 1024)
    small, large = (layer_bytes(tokens, shape) for tokens in (1, 512))
    assert small <= CPU_CACHE_BYTES < large
    assert floor_bytes(1, shape, on_gpu=False) == 0 and floor_bytes(1, shape, on_gpu=True) == small
    assert floor_bytes(512, shape, on_gpu=False) == large


def test_the_readme_quotes_tiles_and_loads():
    """Steps 3, 4, 6 and 7, and the quiz."""
    pairs, experts, _ = align_in_python(torch.tensor([[1, 0], [1, 2], [1, 0]]), 3, 2)
    tiles = "  |  ".join(f"{first} {second}" for first, second in pairs.view(-1, 2).tolist())
    assert f"tiles     {tiles}\n" in README and NOT_USED not in experts
    assert f"expert     {'       '.join(map(str, experts.tolist()))}\n" in README
    assert f"here min(6, ⌊(6 + 3) / 2⌋) = {most_tiles(6, 3, 2)}" in README
    assert f"(10 + 4 · 3) / 4 = 5.5, so {most_tiles(10, 4, 4)}." in README
    travels = 1024 * 2 * ROW_BYTES * 3 / 4
    assert f"1024 · 2 rows of {ROW_BYTES} bytes" in README
    assert f"to others, {travels / 1e6:.1f} MB, and gets as many back" in README
    sent = 256 * 2 * ROW_BYTES / 2
    assert (
        f"{sent / 1e6:.1f} MB. It returns" in README and f"{2 * sent / 1e6:.1f} MB in all" in README
    )
    load = Load((6, 2, 1, 1, 2, 2, 1, 1))
    assert "  ".join(map(str, load.counts)) + f"        the busiest has {load.imbalance}" in README
    ranks = load.of_ranks(4)
    assert "     ".join(
        map(str, ranks.counts)
    ) + f"          the busiest has {ranks.imbalance}" in (README)
    placement = place(load.counts, 12, 4)
    copies = "  ".join(str(len(slots)) for slots in placement.slots_of)
    assert f"copies of each expert    {copies}\n" in README
    ranks = placement.load_of_ranks(load.counts)
    pairs = "     ".join(f"{pairs:.0f}" for pairs in ranks.counts)
    assert f"{pairs}          the busiest has {ranks.imbalance} times the mean" in README
    capacity = capacity_of(8, 2, 8, 1.0)
    assert f"takes {capacity}, so {load.dropped(capacity)} of 16 pairs are dropped" in README
    torch.manual_seed(0)
    for tokens, digits in ((8, 1), (1024, 2)):
        draws = (torch.rand(tokens, 8).topk(2).indices for _ in range(1000))
        loads = [load_of(chosen, 8).of_ranks(4).imbalance for chosen in draws]
        assert f"{sum(loads) / len(loads):.{digits}f} times" in README
