"""Lesson 20: proves that its own pictures fit, that excerpts are in the sources, and that the
README quotes what the code says.
"""

import json
from functools import partial
from math import exp, log, log2
from pathlib import Path

import pytest
import torch

from lessons.l01_roofline.calculators import kv_bytes_per_token, weight_bytes
from lessons.l01_roofline.planner.models import find_model
from lessons.l20_parallelism.lab import cuts, experiments, price, small_sums
from lessons.l20_parallelism.lab.rank_times import time_ranks
from lessons.l20_parallelism.pipeline import bubble, decode_bubble
from lessons.l20_parallelism.planner import context as sharing
from lessons.l20_parallelism.planner.links import (
    LL,
    SIMPLE,
    all_reduce_times,
    machine_of,
    nvls_bytes,
)
from lessons.l20_parallelism.planner.planner import plan
from lessons.l20_parallelism.planner.scaling import decode_step, prefill
from lessons.l20_parallelism.planner.shares import Layout
from lessons.l20_parallelism.processes.collectives import WAYS, fewest_bytes
from lessons.l20_parallelism.processes.group import Group
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.measure.hardware import CHIPS
from tests.excerpts import plain_readme, stray_excerpts
from tests.test_pages import guide

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "lessons/l20_parallelism"
README = plain_readme(ROOM)
SMALL, LARGE = find_model("llama-3-8b"), find_model("llama-3-70b")
HUGE = find_model("llama-3-405b")
H100, VALUE_BYTES = CHIPS["h100"], 2
NVLINK, PCIE = machine_of(H100), machine_of(H100, inside="pcie5")
TEACHING = (ROOT / "lessons/TEACHING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("draw", [price.draw_price, partial(price.draw_price, 2, "pcie4", 64)])
def test_the_pictures_fit(draw):
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_the_excerpts_are_in_the_sources():
    assert not stray_excerpts(ROOM)


def test_the_record_has_the_bytes_of_the_formula():
    """And the formula is the text's: two sums a layer, one for the embedding, and the logits."""
    record = json.loads((ROOT / "results/cpu/l20_ranks.json").read_text(encoding="utf-8"))
    for length in experiments.LENGTHS:
        found = record["series"]["shards"][f"{length} token{'s' * (length > 1)}"]
        wanted = experiments.bytes_of_a_step(experiments.CONFIG, length, 2, 4)
        assert found["bytes"] == found["formula_bytes"] == wanted
        assert found["collectives"] == sums_of(experiments.CONFIG) + 1
    config = experiments.CONFIG
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)  # q and o, k and v
    width = heads * config.head_dim + 3 * config.intermediate_size
    weights = config.hidden_size * (config.num_hidden_layers * width + 2 * config.vocab_size)
    assert f"a random model of {weights / 1e6:.0f} million weights" in README


def test_the_record_of_small_sums_is_the_command_s():
    """Its sizes and its ways; one shot beats gloo at each, so the text may say so."""
    record = json.loads((ROOT / "results/cpu/l20_small_sums.json").read_text(encoding="utf-8"))
    sums = record["series"]["sums"]
    assert list(sums) == [str(size) for size in small_sums.SIZES]
    assert all(found["one_shot_fastest_s"] < found["gloo_fastest_s"] for found in sums.values())
    assert f"fastest of {record['repeats']} rounds" in README


@pytest.mark.parametrize("command", [experiments, small_sums])
def test_a_measurement_that_cannot_be_is_refused_in_one_line(command, capsys):
    assert command.main(["--repeats", "0"]) == 2
    name = command.__name__.rpartition(".")[2]
    assert capsys.readouterr().err == f"{name}: --repeats: got 0; accepted: 1 or more\n"


def squares_of(world: Group, repeats: int) -> dict:
    """What a rank found."""
    return {f"rank {world.rank}": repeats**2}


def test_a_measurement_is_printed_and_recorded(tmp_path, capsys):
    """What the first of two ranks found, with the facts that the command knows."""
    found = {"ranks": {"rank 0": 9}}
    record = {"name": "l20_squares", "clock": "none"}
    given = ["--repeats", "3", "--out", str(tmp_path)]
    assert time_ranks("squares", "Squares.", {"ranks": squares_of}, record, 1, given) == 0
    assert capsys.readouterr().out == "ranks\n  rank 0: 9\n"
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text(encoding="utf-8"))
    assert path.name == "l20_squares.json" and written.pop("fingerprint")
    assert written == record | {"schema": 1, "repeats": 3, "series": found}


def sums_of(model) -> int:
    """All-reduces of a pass."""
    return 2 * model.num_hidden_layers + 1


def row_bytes(model, tokens: int = 1) -> int:
    """n: the tensor of a sum."""
    return tokens * model.hidden_size * VALUE_BYTES


def way_s(way: str, n: float, machine=NVLINK) -> float:
    """A sum of n bytes over 8 H100s, with the better protocol."""
    return min(seconds for seconds, name in all_reduce_times(n, 8, machine) if name == way)


def one_user(model, size: int, machine=NVLINK):
    """A decode step of one row with 1024 tokens of context."""
    return decode_step(model, machine, Layout(tp=size), batch=1, context=1024)


def per_gpu(model, size: int) -> float:
    """The efficiency of that step."""
    return one_user(model, 1).seconds / size / one_user(model, size).seconds


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


def test_the_readme_quotes_the_switch():
    """What NVLS sends, and what is predicted for a prompt of 4096 tokens and for one token."""
    out, ring = nvls_bytes(8, 1), fewest_bytes(8, 1)
    assert f"P = 8: {out:.3f} n instead of {ring:.2f} n" in README
    with_it = machine_of(H100, "nvls4")
    n = row_bytes(LARGE, 4096)
    times = way_s("nvls", n, with_it), way_s("two_shot", n)
    said = f"{1e6 * times[0]:.0f} µs for the {n / 1e6:.1f} MB of a prompt of 4096 tokens"
    assert f"{said}, instead of {1e6 * times[1]:.0f}" in README
    row = row_bytes(LARGE)
    assert min(all_reduce_times(row, 8, with_it))[1] == "one_shot"


def test_the_readme_quotes_the_shared_cache():
    """DeepSeek-V3 on 8 H200s: what a rank stores, what three messages cost, when they pay."""
    v3, h200 = find_model("deepseek-v3"), machine_of(CHIPS["h200"])
    shared, copied = (sharing.cache_bytes_per_token(v3, 8, dcp) / 1024 for dcp in (8, 1))
    assert f"each stores {shared:.1f} KiB of a token instead of {copied:.1f}" in README
    one, many = (1e3 * sharing.talk_s(v3, h200, 8, 8, batch) for batch in (1, 32))
    assert f"we predict {one:.2f} ms of a step of one user, and {many:.2f} ms with 32" in README
    alone, each = (sharing.break_even_context(v3, h200, 8, 8, batch) for batch in (1, 32))
    said = f"from {round(alone, -3):,.0f} tokens of one user on"
    assert f"{said}, or from {round(each, -2):,.0f} tokens each of 32" in README
    shares = [exp(lse) / 3 for lse in (log(2), log(1))]
    assert 3 * shares[0] + 6 * shares[1] == pytest.approx(4)


def test_the_readme_quotes_the_wire():
    """The bottleneck, steps 5 to 7 and the museum."""
    alone = one_user(LARGE, 1)
    moved = alone.floor_s * H100.memory_bytes_per_s
    assert f"reads {moved / 1e9:.1f} GB: all weights" in README
    assert f"At 3.35 TB/s that takes {1e3 * alone.seconds:.1f} ms." in README
    assert f"{1 / alone.seconds:.0f} tokens per second at most" in README
    assert f"P = 8: {fewest_bytes(8, 1):.2f} n" in README
    for size in (2, 4, 8):
        assert WAYS["one_shot"].bytes_sent(size, 1) == size - 1
        assert WAYS["doubling"].bytes_sent(size, 1) == WAYS["doubling"].rounds(size) == log2(size)
    n = row_bytes(LARGE)
    assert f"n is {n:,} bytes" in README and f"A pass has {sums_of(LARGE)} sums" in README
    assert f"start {1e6 * LL.base_s:.1f} µs, hop {1e6 * NVLINK.inside.ll_hop_s:.1f} µs" in README
    assert f"W_link {NVLINK.inside.bytes_per_s / 1e9:.0f} GB/s" in README
    assert f"PCIe has {PCIE.inside.bytes_per_s / 1e9:.0f} GB/s." in README
    bulk = f"start of {1e6 * SIMPLE.base_s:.1f} µs and hops of {1e6 * NVLINK.inside.bulk_hop_s:.1f}"
    assert f"{bulk} µs" in README and LL.share == 1 / 4 and SIMPLE.share == 1
    carried_s = WAYS["one_shot"].bytes_sent(8, n) / NVLINK.inside.bytes_per_s
    assert f"takes {1e6 * way_s('one_shot', n):.1f} µs, of which the bytes are" in README
    assert (
        f"the bytes are {1e6 * carried_s:.2f}. A ring takes {1e6 * way_s('ring', n):.1f}" in README
    )
    for size in (2, 4, 8):
        step = one_user(LARGE, size)
        times = [1e3 * x for x in (step.floor_s, step.communication_s, step.seconds)]
        row = " | ".join(f"{ms:.1f} ms" for ms in times)
        speedup = alone.seconds / step.seconds
        assert f"| {size} | {row} | {speedup:.2f} | {speedup / size:.0%} |" in README
    step = one_user(LARGE, 8)
    more_s = sums_of(LARGE) * (way_s("ring", n) - way_s("one_shot", n))
    ring = alone.seconds / 8 / (step.seconds + more_s)
    said = f"{per_gpu(LARGE, 8):.0%} with one shot and {ring:.0%} with a ring"
    assert said in README and guide("scales linearly").count(f"{ring:.0%} with a ring")
    assert f"{per_gpu(LARGE, 8):.0%} by our model" in guide("scales linearly")
    boxes = [decode_step(LARGE, NVLINK, Layout(tp=size), 32, 4096) for size in (8, 16)]
    assert boxes[1].seconds > boxes[0].seconds and "so 16 GPUs decode more slowly than 8" in README
    over_pcie = one_user(LARGE, 8, PCIE)
    assert (
        f"{1e3 * over_pcie.communication_s:.1f} ms instead of {1e3 * step.communication_s:.1f}"
        in (guide("PCIe is too slow"))
    )


def test_the_readme_quotes_the_prefill_and_where_it_loses():
    n = row_bytes(LARGE, 4096)
    fast, slow = (prefill(LARGE, machine, Layout(tp=8), 4096) for machine in (NVLINK, PCIE))
    assert f"have n = {n / 1e6:.1f} MB" in README
    assert f"would now take {1e6 * way_s('one_shot', n):.0f} µs" in README
    assert f"one piece for all take {1e6 * way_s('two_shot', n):.0f} µs" in README
    assert f"computes for {1e3 * fast.floor_s:.1f} ms on 8 GPUs" in README
    assert f"talks for {1e3 * fast.communication_s:.1f} ms. Over PCIe" in README
    assert f"(64 GB/s) it talks for {1e3 * slow.communication_s:.1f} ms" in README
    assert PCIE.inside.bytes_per_s == 64e9
    both = f"{1e3 * slow.communication_s:.0f} ms instead of {1e3 * fast.communication_s:.0f}"
    assert both in guide("PCIe is too slow")
    stages = prefill(LARGE, PCIE, Layout(pp=8), 4096, num_chunks=8)
    assert f"`{1e3 * slow.seconds:.0f} ms` in shards, and `{1e3 * stages.seconds:.0f} ms`" in README
    small = one_user(SMALL, 8)
    both = (
        f"for `{1e3 * small.floor_s:.2f} ms` and talks for `{1e3 * small.communication_s:.2f} ms`"
    )
    assert both in README
    assert f"efficiency is `{100 * per_gpu(SMALL, 8):.0f} %`" in README
    assert f"efficiency of `{100 * per_gpu(LARGE, 4):.0f} %` at most" in README
    latents = kv_bytes_per_token(find_model("deepseek-v3")) / 1024
    assert f"61 · 576 · 2 bytes are {latents:.1f} KiB." in README and "61 layers" in README
    assert f"every eighth token: {latents / 8:.1f} KiB in the mean" in README
    assert f"{fewest_bytes(4, 8):.0f} MB in {WAYS['ring'].rounds(4)} rounds" in README
    assert f"One shot: 3 · 8 = {WAYS['one_shot'].bytes_sent(4, 8):.0f} MB" in README
    step = one_user(LARGE, 8)
    asked = (
        f"({1e3 * step.floor_s:.1f} ms to read, and {1e3 * step.communication_s:.1f} ms in which"
    )
    assert f"{asked} the GPUs talk {sums_of(LARGE)} times.)" in TEACHING


def test_the_readme_quotes_stages():
    shares = "    ".join(f"m = {m}: {bubble(4, m):.0%}" for m in (1, 4, 16))
    assert shares in README
    assert decode_bubble(4, 4) == 0 and decode_bubble(4, 1) == pytest.approx(1 - 1 / 4)
    assert f"3 / (12 + 3) = {bubble(4, 12):.0%}" in README


def test_the_readme_quotes_the_memory():
    """The bottleneck, steps 3 and 11, and the museum."""
    memory = H100.memory_bytes
    assert f"{weight_bytes(LARGE) / 1e9:.1f} GB in 16 bits, and an H100 has {memory / 1e9:.0f}" in (
        README
    )
    kept = kv_bytes_per_token(LARGE)
    assert f"stores {kept / 8 / 1024:.0f} KiB for each token instead of {kept / 1024:.0f}" in README
    latents = kv_bytes_per_token(find_model("deepseek-v3"))
    assert f"all {latents / 1024:.1f} KiB" in README
    for model, bits, size, context in ((LARGE, 16, 2, 4096), (HUGE, 8, 8, 16_384)):
        found = plan(model, H100, Layout(tp=size), 1, context, bits)
        assert f"{weight_bytes(model, bits) / size / 1e9:.1f}" in README
        tokens = context if context < 10_000 else f"{context:,}"
        left = f"{found.left_bytes / 1e9:.1f} GB are left: {found.sequences_that_fit(False)}"
        assert f"{left} sequences of {tokens} tokens" in README
        assert found.sequences_that_fit() == found.sequences_that_fit(False) - 1
        assert f"another {found.fullest.buffer_bytes / 1e9:.1f} GB" in README
    for name, layout in {"tp = 8": Layout(tp=8), "tp = 4, pp = 2": Layout(tp=4, pp=2)}.items():
        found = plan(HUGE, H100, layout, 16, 16_384, 8)
        weights = f"{found.fullest.weight_bytes / 1e9:.1f} GB"
        times = f"{found.prefill.seconds:.2f} s | {1e3 * found.decode.seconds:.1f} ms"
        assert f"| {name} | {weights} | {times} | {found.tokens_per_s_per_gpu:.0f} |" in README
    wide, staged = (plan(HUGE, H100, layout, 16, 16_384) for layout in (Layout(16), Layout(8, 2)))
    steps = f"({1e3 * wide.decode.seconds:.1f} ms, and {1e3 * staged.decode.seconds:.1f} ms with"
    assert f"{steps} tp = 8, pp = 2)" in README
    assert f"takes {wide.prefill.seconds:.2f} s instead of {staged.prefill.seconds:.2f}" in README
    fit = wide.sequences_that_fit(), staged.sequences_that_fit()
    assert f"{fit[0]} sequences fit instead of {fit[1]}" in README
    assert weight_bytes(HUGE) / 8 > memory
    assert f"{weight_bytes(HUGE) / 8 / 1e9:.1f} GB a GPU, which does not fit" in README
    assert f"{weight_bytes(HUGE) / 1e9:.1f} GB of weights meet {8 * memory / 1e9:.0f} GB" in README
