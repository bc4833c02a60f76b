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
from lessons.l23_experts.lab import large, traffic, wire_error
from lessons.l23_experts.lab.balance import EXPERT_BYTES, LAYERS, RANKS
from lessons.l23_experts.lab.benchmark import CPU_CACHE_BYTES, Shape, floor_bytes, layer_bytes
from lessons.l23_experts.ranks.large import row_bytes
from lessons.l23_experts.ranks.load import Load, capacity_of, load_of
from lessons.l23_experts.ranks.placement import place, replicate
from lessons.l23_experts.ranks.traffic import Layer, expected_ranks, slot_bytes, token_bytes
from lessons.l23_experts.ranks.wire import Float8, Plain
from lessons.toolbox.measure.hardware import CHIPS
from tests.excerpts import plain_readme, stray_excerpts

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "lessons/l23_experts"
README = plain_readme(ROOM)
TEXT = (ROOM / "README.md").read_text(encoding="utf-8")  # with the sources of numbers
MORE = (ROOM / "MORE.md").read_text(encoding="utf-8")
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
    """Steps 3, 4 and 7, and the quiz."""
    pairs, experts, _ = align_in_python(torch.tensor([[1, 0], [1, 2], [1, 0]]), 3, 2)
    tiles = "  |  ".join(f"{first} {second}" for first, second in pairs.view(-1, 2).tolist())
    assert f"tiles     {tiles}\n" in README and NOT_USED not in experts
    assert f"expert     {'       '.join(map(str, experts.tolist()))}\n" in README
    assert f"here min(6, ⌊(6 + 3) / 2⌋) = {most_tiles(6, 3, 2)}" in README
    assert f"(10 + 4 · 3) / 4 = 5.5, so {most_tiles(10, 4, 4)}." in README
    load = Load((6, 2, 1, 1, 2, 2, 1, 1))
    assert "  ".join(map(str, load.counts)) + f"        the busiest has {load.imbalance}" in README
    ranks = load.of_ranks(4)
    assert "     ".join(
        map(str, ranks.counts)
    ) + f"          the busiest has {ranks.imbalance}" in (README)
    placement = place(load.counts, 12, 4)
    assert replicate((9, 3, 2, 2), 6) == [3, 1, 1, 1] and "copies have 3 pairs each" in README
    copies = "  ".join(str(len(slots)) for slots in placement.slots_of)
    assert f"copies of each expert    {copies}  " in README
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


def test_the_texts_quote_what_travels():
    """Step 6, the quiz, and MORE.md."""
    rows = {name: traffic.row_of(traffic.layer_of(name), 8) for name in traffic.NAMES}
    qwen3, v3 = rows["Qwen3-30B-A3B"], traffic.layer_of("DeepSeek-V3")
    assert f"Qwen3-30B-A3B, P = 8: {qwen3['ranks']:.1f} ranks for 8 experts" in README
    for name in ("Mixtral 8x7B", "Qwen3-30B-A3B"):
        numbers = (rows[name][form] / 1e3 for form in ("an expert", "a rank", "a rank, FP8"))
        assert f"| {name} | " + " | ".join(f"{number:.1f}" for number in numbers) in README
    row, of_mixtral = 2 * MIXTRAL.hidden_size, traffic.layer_of("Mixtral 8x7B")
    one, two = (token_bytes(of_mixtral, times, Plain()) for times in (1, 2))
    assert f"H = 4096, k = 2:  {row} + 16 + {row} = {one:,} bytes" in README
    assert f"bytes, and 2 rows are {two / 1e3:.1f} kB" in README
    in_fp8 = token_bytes(of_mixtral, 1, Float8()) - 16 - row
    assert in_fp8 == 4096 + 4 * 4096 / 128 and "H + 4 · H / 128 in FP8, and 8 for each" in README
    most = [rows["DeepSeek-V3"]["an expert"]]
    most += [token_bytes(v3, 4, form) for form in (Plain(), Float8())]
    numbers = " | ".join(f"{number / 1e3:.1f}" for number in most)
    assert f"| DeepSeek-V3, at most 4 ranks | {numbers} |" in README
    sent = expected_ranks(Layer(8, 2, MIXTRAL.hidden_size), 2) / 2 * 256
    assert f"256 · 22 / 28 = {sent:.0f} rows of {ROW_BYTES} bytes" in README
    assert f"there: {sent * ROW_BYTES / 1e6:.1f} MB" in README
    assert f"tokens: {2 * sent * ROW_BYTES / 1e6:.1f} MB in all" in README
    there, back = slot_bytes(v3, 128, Float8())
    assert f"{there / 1e6:.0f} MB in FP8 there, and {back / 1e6:.0f} MB back" in MORE
    for name in ("DeepSeek-V3", "DeepSeek-V3, any groups"):
        assert f"{rows[name]['ranks']:.2f}" in MORE
    torch.manual_seed(0)
    assert f"router reaches {traffic.drawn_ranks(v3, 8)[0]:.2f} with" in MORE


def test_deepeps_times_fit_its_bandwidths():
    """Its low-latency kernels: 128 tokens, 8 experts each, FP8 there and BF16 back."""
    there, back = (128 * 8 * form.row_bytes(7168, torch.bfloat16) for form in (Float8(), Plain()))
    for moved, seconds, published in ((there, 77e-6, 98), (back, 114e-6, 127)):
        assert moved / seconds / 1e9 == pytest.approx(published, rel=0.02)
    assert f"{there / 1e6:.1f} MB in 77 µs, so {there / 77e3:.0f} GB/s" in MORE
    assert f"{back / 1e6:.1f} MB in 114 µs: {back / 114e3:.0f} GB/s" in MORE


def test_more_quotes_the_error_of_fp8():
    torch.manual_seed(0)
    errors, model = wire_error.layer_errors(Float8()), wire_error.model_errors(Float8())
    assert f"random row {100 * errors['rows'].mean:.1f} % in the mean" in MORE
    assert f"makes of it {100 * errors['output'].mean:.1f} %" in MORE
    assert f"off by {100 * model.logits.mean:.1f} %" in MORE
    assert f"Its {model.first_difference} greedy tokens stay the same" in MORE


def test_more_quotes_copies_and_many_gpus():
    """Numbers of MORE.md that no comment holds."""
    balance = json.loads((ROOT / "results/counted/l23_balance.json").read_text(encoding="utf-8"))
    copies_gb = 32 * EXPERT_BYTES * LAYERS / RANKS / 1e9
    assert f"32 for 32 GPUs are {copies_gb:.1f} GB on each" in MORE
    moves = balance["moves"]["from modules to lessons"]["as EPLB numbers ranks"]
    assert "which takes half a second at 50 GB/s" in MORE and 0.4 < moves["gb_a_gpu"] / 50 < 0.5
    assert f"and moves {moves['experts']}." in MORE
    both = [balance["stale"][f"placed for both, serving {text}"] for text in ("lessons", "modules")]
    leaves = [row[way] for row in both for way in ("0", "32", "64", "128")]
    assert "leave 1.2 to 1.3 for either" in MORE
    assert min(leaves) > 1.15 and max(leaves) < 1.35
    there, back = row_bytes(7168)
    assert f"A row has {there} bytes on its way there" in MORE
    assert f"and {back:,} back" in MORE
    assert f"prints {large.INPUT.value:,.0f} input tokens/s" in MORE
    assert f"of which {100 * large.CACHE_HITS} % came from a cache" in MORE
    assert f"from {large.OUTPUT.value:,.0f} output tokens/s" in MORE
