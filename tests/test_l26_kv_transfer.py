"""Lesson 26: excerpts are lines of the sources, and its texts quote what the code says."""

import json
from pathlib import Path

import pytest

from lessons.l01_roofline.calculators import attention_flops, weight_bytes
from lessons.l01_roofline.planner.models import find_model
from lessons.l15_chunked_prefill.lab.costs import EFFICIENCY, OVERHEAD_S
from lessons.l26_kv_transfer import costs
from lessons.l26_kv_transfer.costs import (
    CONTEXT,
    LINKS,
    MODELS,
    cheapest,
    in_words,
    token_of,
    ways,
)
from lessons.l26_kv_transfer.lab.pictures import PICTURES
from lessons.l26_kv_transfer.lab.simulated import (
    APART,
    MANY,
    MIXED,
    earlier_up_to,
    rows_of,
)
from lessons.l26_kv_transfer.optimized import piece_for
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.measure.hardware import CHIPS
from reference.simulator.returning import OPTIONS
from reference.simulator.workloads import chats
from tests.excerpts import plain_readme, stray_excerpts

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "lessons/l26_kv_transfer"
README = plain_readme(ROOM)
LLAMA, H100 = find_model("llama-3-8b"), CHIPS["h100"]
TOKEN = token_of(LLAMA)


def said(text: str) -> None:
    assert text in README, text


def test_the_excerpts_are_lines_of_the_sources():
    assert not stray_excerpts(ROOM)


def test_the_bottleneck():
    room = 0.9 * H100.memory_bytes - weight_bytes(LLAMA)
    tokens = room / TOKEN.kv_bytes
    said(f"{room / 1e9:.1f} GB of K and V, which is {tokens:,.0f} tokens")
    said(f"or {tokens // CONTEXT:.0f} chats of {CONTEXT} tokens")
    said(f"its prefill takes {1e3 * CONTEXT * TOKEN.compute_s:.0f} ms")
    moved_ms = 1e3 * CONTEXT * TOKEN.move_s(LINKS["PCIe 5.0"])
    said(f"Its {CONTEXT * TOKEN.kv_bytes / 1e9:.2f} GB of K and V would have crossed PCIe in")
    said(f"in {moved_ms:.1f} ms")


def test_steps_1_and_2():
    said(f"= {TOKEN.kv_bytes:,.0f} bytes")
    move_s = TOKEN.move_s(LINKS["PCIe 5.0"])
    said(f"/ 64 GB/s = {1e6 * move_s:.2f} µs")
    body = 2 * (LLAMA.active_params - LLAMA.embedding_params)
    seen = attention_flops(LLAMA, CONTEXT * (CONTEXT + 1) / 2) / CONTEXT
    said(f"({body / 1e9:.1f} + {seen / 1e9:.1f}) GFLOP / ({100 * EFFICIENCY:.0f} % of")
    said(f"{H100.bf16_flops_per_s / 1e12:.1f} TFLOP/s) = {1e6 * TOKEN.compute_s:.1f} µs")
    said(f"moving is {TOKEN.compute_s / move_s:.0f} times faster")


@pytest.mark.parametrize("model", MODELS)
def test_the_table_of_links(model):
    token = token_of(*MODELS[model])
    cells = [f"{token.kv_bytes / 1024:.1f}", f"{1e6 * token.compute_s:.1f}"]
    shown = ("PCIe 5.0", "NVMe", "100 Gb/s", "25 Gb/s")
    cells += [f"{1e6 * token.move_s(LINKS[link]):.1f}" for link in shown]
    slowest = token.kv_bytes / token.compute_s
    said(f"| {model} | {' | '.join(cells)} | {8 * slowest / 1e9:.0f} |")
    if model == "Llama-3-8B, GQA":
        said(f"W_link = κ / t_again, {slowest / 1e9:.1f} GB/s here")


def test_the_crossings():
    found = dict(cheapest(ways(TOKEN)))
    pauses = [in_words(found[name]) for name in ("host", "disk", "compute")]
    assert pauses == ["2.5 s", "15 min", "99 min"]
    said("After 2.5 seconds host memory is cheaper, after 15 minutes a disk. After 99 minutes")
    said(f"2 · 80 GB / 64 GB/s = {costs.memory_in_and_out_s():.1f} s")
    slower = cheapest(ways(TOKEN, disk_link=7e9))
    assert "disk" not in dict(slower)
    said("With a disk of `7 GB/s` instead of 14, the disk is never the cheapest way")
    said(f"2 · 141 / 64 = {costs.memory_in_and_out_s(CHIPS['h200']):.1f} s")


def test_the_toy_of_step_4():
    """A GPU of 1 dollar a second with 10 bytes, one byte, one second a copy."""
    hbm, host, compute = (
        costs.Way("HBM", 0.0, 0.1),
        costs.Way("host", 2.0, 0.02),
        costs.Way("compute", 5.0, 0.0),
    )
    assert costs.crossing_s(hbm, host) == pytest.approx(25)
    assert costs.crossing_s(host, compute) == pytest.approx(150)
    assert [name for name, _ in cheapest([hbm, host, compute])] == ["HBM", "host", "compute"]


def test_pages_of_a_block():
    record = json.loads((ROOT / "results/counted/l26_gather.json").read_text(encoding="utf-8"))
    one = record[0]
    said(f"{one['copies']} pages of {one['bytes'] // one['copies'] // 1024} KiB")
    said(f"{one['copies']} copies take {1e6 * one['copies_s']:.0f} µs")
    said(f"The block's 2 MiB need {1e6 * one['pcie_s']:.0f} µs on PCIe")
    assert one["bytes"] == 2**21 == 16 * TOKEN.kv_bytes
    for row in record:
        assert row["kernel_s"] < row["pcie_s"] < row["copies_s"]  # as the figure's description
        assert 9 < row["copies_s"] / row["pcie_s"] < 11
        if row["blocks"] >= 64:
            assert 1.8 < row["kernel_s"] / (row["floor_s"] / 2) < 2.4


def test_short_prompts_and_the_quiz():
    saved_ms = 1e3 * 100 * token_of(LLAMA, context=100).compute_s
    step_ms = 1e3 * OVERHEAD_S
    said(f"prefilled in `{saved_ms + step_ms:.1f} ms`, of which `{step_ms:.0f} ms`")
    said(f"save `{saved_ms:.1f} ms` at most")
    token = token_of("llama-2-7b", 8)
    said(f"Half of 165 Gb/s: {8 * token.kv_bytes / token.compute_s / 1e9:.0f} Gb/s")
    moved = 32768 * TOKEN.kv_bytes
    said(f"= {moved / 1e9:.2f} GB; 100 Gb/s = 12.5 GB/s; {moved / LINKS['100 Gb/s']:.2f} s")


def test_the_panels_are_what_their_description_says():
    slower = {
        name: sum(token_of(*MODELS[name]).move_s(rate) > token_of(*MODELS[name]).compute_s
                  for rate in LINKS.values())
        for name in MODELS
    }  # fmt: skip
    assert slower["Llama-2-7B, MHA"] == 3 and slower["DeepSeek-V3, MLA"] == 0
    said("For Llama-2-7B three of five links are slower than computing")


@pytest.mark.parametrize("name", PICTURES)
def test_figures_are_legible_and_drawn_anew(name):
    figure = PICTURES[name][0]()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    svg = (ROOM / f"lab/{name}.svg").read_text(encoding="utf-8")
    title = figure.get_suptitle()
    assert " ".join(title.split())[:40] in " ".join(svg.split())


# ---------------------------------------------------------------- MORE.md


def test_the_table_of_waiting():
    for waiting in (1, 0.5, 0):
        found = dict(cheapest(ways(TOKEN, waiting=waiting)))
        cells = [in_words(found[name]) if name in found else "–" for name in ("host", "disk")]
        if not waiting:
            assert found["disk"] == 0
            cells[1] = "0 s"
        said(f"| {waiting:g} | {' | '.join(cells)} | {in_words(found['compute'])} |")


def test_context_and_models_in_more():
    short, long = (token_of(LLAMA, context=context) for context in (512, 131072))
    times = [token.compute_s / token.move_s(LINKS["NVMe"]) for token in (short, long)]
    said(f"computing takes {times[0]:.1f} times as long as reading from our disk")
    said(f"in one of 131,072 tokens {times[1]:.1f} times")
    seconds = {name: CONTEXT * token_of(name).compute_s for name in ("llama-3-8b", "llama-3-70b")}
    said(f"For Llama-3-8B it is {seconds['llama-3-8b']:.2f} s (step 2), for Llama-3-70B")
    said(f"{seconds['llama-3-70b']:.1f} s.")
    said("It is 50 times slower than HBM")
    assert 50 <= H100.memory_bytes_per_s / LINKS["PCIe 5.0"] < 55


def test_what_is_in_flight_in_more():
    """A program's loads, and by Little's law what keeps memory busy."""
    piece, num_warps = piece_for(32768 // 8, 2)
    assert piece * 8 == 8 * 1024 and piece * 8 // (32 * num_warps) == 4 * 16
    said("A thread has four loads of 16 bytes under way, so a program has 8 KiB")
    needed = H100.memory_bytes_per_s * 0.7e-6 / H100.sm_count
    said(f"about {needed / 1e3:.0f} kB on each SM")
    record = json.loads((ROOT / "results/counted/l26_gather.json").read_text(encoding="utf-8"))
    said(f"about {1e6 * record[0]['kernel_s'] / record[0]['launches']:.0f} µs a launch")
    assert 20 < record[-1]["pcie_s"] / record[-1]["kernel_s"] < 25  # "a twentieth"


def test_the_prices_in_more():
    for price in costs.PRICES:
        said(f"{price.dollars:g} dollars" if price.dollars != 2.5 else "2.50 dollars an hour")
    said(f"| {costs.KEPT_YEARS} years |")


def test_apart_in_readme_and_more():
    """How many GPUs and links 20 prompts a second need, and what short prompts win and lose."""
    token = token_of(LLAMA, context=4096)
    prompt_s = 4096 * token.compute_s + OVERHEAD_S
    said(f"takes {prompt_s:.2f} s of a GPU. So 20 a second need {20 * prompt_s:.1f} GPUs")
    sent_s = 4096 * token.move_s(LINKS["25 Gb/s"])
    said(f"needs the link for {sent_s:.2f} s, so two links carry {2 / sent_s:.1f} prompts a second")
    runs = {prompt: [rows_of(prompt, way) for way in (MIXED, APART)] for prompt in (4096, 256)}
    for mixed, apart in zip(*runs[256]):
        if mixed["rate"] == 80:
            earlier = mixed["ttft_p50_ms"] - apart["ttft_p50_ms"]
            later = apart["second_p50_ms"] - mixed["second_p50_ms"]
            assert round(earlier) == round(later) == 7
    said("the first token comes `7 ms` earlier, and the second one `7 ms` later after it")
    mixed, apart = (rows[1] for rows in runs[4096])
    assert mixed["rate"] == 8, "where it wins"
    assert apart["ttft_p99_ms"] < mixed["ttft_p99_ms"] and apart["itl_p99_ms"] < mixed["itl_p99_ms"]
    many = rows_of(4096, MANY)[-1]
    assert many["rate"] == 20 and many["second_p99_ms"] > 5000, "seconds"
    mixed, apart = (rows[-1] for rows in runs[4096])
    assert apart["ttft_p99_ms"] > 2 * mixed["ttft_p99_ms"], "first tokens wait"
    said(f"Apart 2:2 has the earlier first tokens up to {earlier_up_to(4096):g} requests/s")
    for mixed, apart in zip(*runs[4096]):
        assert apart["second_p99_ms"] > mixed["second_p99_ms"], "later second tokens everywhere"


def test_chats_in_more():
    """Twice as much in the pool, most of the rest, nothing of a tier that the pool outgrows."""
    rows = json.loads((ROOT / "results/simulated/l26_chats.json").read_text(encoding="utf-8"))
    by = {row["way"]: row for row in rows["rows"]}
    around, prefix = by["round robin"], by["by the prefix"]
    small, large = (by[f"by the prefix, {size} GB of host memory"] for size in (40, 200))
    assert prefix["pool"] == pytest.approx(2 * around["pool"], rel=0.05)
    assert small["host"] == 0 and small["computed"] == prefix["computed"]
    seen, first, best = {}, 0, 0
    trace = chats(OPTIONS)
    for request in trace:
        first += request.prefix not in seen
        best += seen.get(request.prefix, 0)
        seen[request.prefix] = request.prompt_tokens + request.output_tokens - 1
    share = best / sum(request.prompt_tokens for request in trace)
    said(f"At best {100 * share:.0f} of 100 can be found, because of the {len(trace)} requests")
    said(f"{first} are the first of their chat")
    assert share - 0.03 < large["pool"] + large["host"] < share, "nearly all that can be found"
    assert by["round robin, 200 GB of host memory"]["computed"] > 1.5 * large["computed"]
    room = 0.9 * H100.memory_bytes - weight_bytes(LLAMA)
    said(f"(40 GB beside {room / 1e9:.0f})")
    prompts = [request.prompt_tokens for request in trace]
    assert sum(prompts) / len(prompts) == pytest.approx(9000, rel=0.05)
