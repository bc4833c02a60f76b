"""What the ladder shows: regimes that their records bear out, no gain for a rung that stands in, a
title and a table that say what ran.
"""

import io
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from lessons.toolbox.draw import plotting
from reference.ladder import ladder_report, regimes
from reference.ladder.contest import Contender
from reference.ladder.rungs import WITH_HEADS, WITH_LATENTS

REPOSITORY = Path(__file__).parents[1]
PADDED = "transformers generate, padded batch"
RUNGS = {(step.lesson, step.name) for step in WITH_HEADS + WITH_LATENTS}
# the first rung, the naive sides of two lessons, and the engine, which is all of the lessons
WITHOUT = {
    ("02", "no cache: recompute"),
    ("05", "KV heads repeated"),
    ("06", "latents, expanded at every step"),
    ("12-15", "the engine"),
}
# rung: its record on a CPU, the two series, x
ON_CPU = {
    "KV cache, concatenated": ("l03_decode_step", "recompute", "concatenate", 2048),
    "KV cache, preallocated": ("l03_decode_step", "concatenate", "preallocated", 4096),
    "rotated on the way into the cache": (
        "l04_rope_cache",
        "step by step",
        "in place, PyTorch",
        16384,
    ),
    "KV heads read in groups": ("l05_kv_heads", "K and V repeated", "read in groups", 8),
    "latents, absorbed": ("l06_decode_step", "decompress every step", "absorbed", 4096),
    "prompts by FlashAttention": ("l09_causal_gqa", "all scores", "tiles in PyTorch", 2048),
    "32 requests in lockstep": ("l11_lockstep", "one after the other", "in lockstep", 16),
    "prefix cache": ("l13_first_token", "full prefill", "radix tree", 1024),
    "continuous batching": ("l14_mix", "static, padded", "continuous", 128),
    "chunked prefill": ("l15_worst_gap", "prompts first, whole", "beside the last chunk", 1024),
    "n-grams, verified": ("l16_batch", "one token a pass", "n-grams, K = 4", 1),
}
# predicted until a benchmark of theirs is recorded
MAYBE_RECORDED = ("continuous batching", "chunked prefill", "n-grams, verified")


# ---------------------------------------------------------------- regimes


@pytest.fixture
def cpu_results(tmp_path):
    """results/ with the CPU's records alone, whatever GPUs were recorded since."""
    shutil.copytree(REPOSITORY / "results/cpu", tmp_path / "results/cpu")
    return tmp_path / "results"


def test_every_rung_but_the_naive_sides_has_a_regime():
    assert set(regimes.REGIMES) == RUNGS - WITHOUT
    for lesson, name in sorted(RUNGS):
        regime = regimes.regime_of(lesson, name)
        assert (regime is None) == ((lesson, name) in WITHOUT), name
        if regime:
            assert 0 < len(regime["label"]) <= 24 and regime["gain"] > 1
            assert regime["device"] and regime["source"]


def test_measured_gains_are_those_of_their_records(cpu_results):
    measured = {}
    for lesson, name in RUNGS - WITHOUT:
        regime = regimes.regime_of(lesson, name, cpu_results)
        if regime["measured"]:
            measured[name] = regime
    recorded = {
        name: series
        for name, series in ON_CPU.items()
        if name not in MAYBE_RECORDED or (cpu_results / f"cpu/{series[0]}.json").exists()
    }
    assert set(measured) == set(recorded)
    for name, (record, before, after, x) in recorded.items():
        series = json.loads((cpu_results / f"cpu/{record}.json").read_text())["series"]
        seconds = [
            next(p["median_s"] for p in series[which]["points"] if p["x"] == x)
            for which in (before, after)
        ]
        assert measured[name]["gain"] == pytest.approx(seconds[0] / seconds[1], abs=1e-3), name
        assert plotting.size_number(x) in measured[name]["label"]
        assert measured[name]["device"] == "CPU"


def test_what_no_gpu_has_measured_is_predicted_for_an_h200(cpu_results):
    predicted = {}
    for record in cpu_results.glob("cpu/l1[456]_*.json"):
        record.unlink()
    for lesson, name in RUNGS - WITHOUT:
        regime = regimes.regime_of(lesson, name, cpu_results)
        if not regime["measured"]:
            assert regime["device"] == ("any device" if lesson == "12" else "H200")
            predicted[name] = regime["gain"]
    # one program per KV head reads 64 KiB a microsecond, alone; in splits the memory is the limit
    alone_s = 65536 * 2 * 128 * 2 / (65536 / 1e-6)
    shared_s = 8 * 65536 * 2 * 128 * 2 / 4.8e12
    assert 0.9 * alone_s / shared_s < predicted.pop("steps in splits") < alone_s / shared_s
    # lesson 2 counts 22 bytes for each score, 3.5 of them in the fused softmax's place
    assert predicted.pop("no cache, fused softmax") == pytest.approx(22 / 3.5, rel=0.01)
    gain = launch_bound_gain()
    assert 0.95 * gain < predicted.pop("fused layers") < gain
    # 128 steps a wave of four; in 4 · 184 / 8 full steps at the least, the longest answer alone 128
    assert 1 < predicted.pop("continuous batching") < 4 * 128 / 128
    # the whole prompt's FLOPs, and at most a sixteenth of them with the longest context
    assert 32768 / 2048 / 2 < predicted.pop("chunked prefill") < 32768 / 2048
    # chats of 500 tokens on average, half of them there, where 2048 were reserved
    assert 2048 / 500 < predicted.pop("paged cache") < 2048 / 250
    # 1 + 0.8 + 0.8² + 0.8³ + 0.8⁴ tokens in the time of one
    assert predicted.pop("n-grams, verified") == pytest.approx((1 - 0.8**5) / 0.2, rel=1e-3)
    assert set(predicted) == {"in lockstep, CUDA graphs"}


def launch_bound_gain():
    """What fused layers gain where a step waits for its launches alone."""
    from lessons.l07_kernel_fusion.lab.launches import MODELS, eager_launches, fused_launches

    config = MODELS["Llama-3.2-1B"]
    return len(eager_launches(config)) / len(fused_launches(config))


def test_a_gpus_record_comes_first_and_only_it_counts_where_pytorch_stands_in(cpu_results):
    for name in ("l10_context", "l03_decode_step"):
        record = json.loads((cpu_results / f"cpu/{name}.json").read_text())
        record["device_type"], record["fingerprint"]["device"] = "cuda", "NVIDIA H100"
        for series in record["series"].values():
            for point in series["points"]:
                if point["status"] == "ok":
                    point["median_s"] = 2.0 if series["role"] == "naive" else 0.5
        folder = cpu_results / f"gpu_{name}"
        folder.mkdir()
        (folder / f"{name}.json").write_text(json.dumps(record))
    for lesson, rung in (("10", "steps in splits"), ("03", "KV cache, preallocated")):
        regime = regimes.regime_of(lesson, rung, cpu_results)
        assert (regime["gain"], regime["measured"], regime["device"]) == (4.0, True, "H100")


def test_a_missing_or_broken_record_gives_none(tmp_path):
    rung = ("03", "KV cache, concatenated")
    assert regimes.regime_of(*rung, tmp_path) is None
    (tmp_path / "cpu").mkdir()
    for text in ("{", "{}"):
        (tmp_path / "cpu/l03_decode_step.json").write_text(text)
        assert regimes.regime_of(*rung, tmp_path) is None
    assert regimes.regime_of("99", "a rung of yours", tmp_path) is None


def test_a_missing_model_gives_none(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lessons.l10_flash_decoding.lab.occupancy", None)
    assert regimes.regime_of("10", "steps in splits", tmp_path) is None


# ---------------------------------------------------------------- the record


def contender(name, speed, lesson=None, stand_in=None, **facts):
    """A contender that served one request, at `speed` tokens/s; None: it did not run."""
    runs = [] if speed is None else [speed]
    found = Contender(name, None, [0], lesson=lesson, runs=runs, cpu_runs=runs, **facts)
    found.stand_in = stand_in
    return found


@pytest.fixture
def data():
    """A ladder of five rungs, one of which stands in and one of which did not run."""
    rungs = [
        contender("no cache: recompute", 40.0, "02"),
        contender("KV cache, concatenated", 200.0, "03"),
        contender("steps in splits", 900.0, "10", stand_in="programs that wait for SMs"),
        contender("in lockstep, CUDA graphs", None, "11", not_run="RuntimeError: no GPU"),
        contender("32 requests in lockstep", 600.0, "11", in_batches=True),
    ]
    peers = [
        contender(PADDED, 150.0, in_batches=True, is_guest=True),
        contender("vLLM", None, not_run="ModuleNotFoundError: vLLM is not installed"),
    ]
    model = SimpleNamespace(parameters=lambda: [torch.zeros(3, 4)], dtype=torch.float32)
    return ladder_report.record(rungs, peers, model, "models/tiny", 32, 5e10)


def test_the_record_says_what_ran_how_and_where_it_would_pay(data):
    data = json.loads(json.dumps(data, allow_nan=False))
    rungs = {rung["name"]: rung for rung in data["rungs"]}
    lockstep, splits = rungs["32 requests in lockstep"], rungs["steps in splits"]
    assert lockstep["in_batches"] is True and splits["in_batches"] is False
    assert splits["stand_in"] == "programs that wait for SMs" and lockstep["stand_in"] is None
    assert lockstep["step"] == 3, "over the cache: a rung that stands in says nothing of speed"
    assert lockstep["speedup"] == 15 and lockstep["requests"] == 1
    assert splits["regime"] == regimes.regime_of("10", "steps in splits")
    assert rungs["no cache: recompute"]["regime"] is None
    graphs = rungs["in lockstep, CUDA graphs"]
    assert graphs["tokens_per_s"] is None and graphs["step"] is None and graphs["not_run"]
    assert set(data["peers"][0]) < set(lockstep)


# ---------------------------------------------------------------- title, figure, table


def rung(name, speed, step, **facts):
    plain = {"stand_in": None, "identical": True, "verdict": ""}
    return {
        "name": name,
        "tokens_per_s": speed,
        "step": step,
        "speedup": speed / 10,
        **plain,
        **facts,
    }


def test_the_title_counts_only_rungs_whose_speed_means_something():
    first, cache = rung("first", 10.0, 1.0), rung("cache", 50.0, 5.0)
    title = ladder_report.headline([first, cache, rung("graphs", 900.0, 18.0, stand_in="graphs")])
    assert title == (
        "cache: 5.0× the tokens/s of the first rung, the same tokens\nThe largest step: cache, 5.0×"
    )
    tie = rung("batch", 100.0, 2.0, verdict="a tie: request 3")
    assert "10.0× the tokens/s of the first rung, the same tokens but for ties\n" in (
        ladder_report.headline([first, cache, tie])
    )
    equal = [rung("lockstep", 100.0, 2.0), rung("paged", 109.0, 1.1)]
    assert ladder_report.headline([first, cache, *equal]).startswith("lockstep: 10.0×")
    faster = rung("paged", 112.0, 1.1)
    assert ladder_report.headline([first, cache, equal[0], faster]).startswith("paged: 11.2×")
    wrong = rung("wrong", 20.0, 0.4, identical=False, verdict="differs")
    assert ", NOT the same tokens\n" in ladder_report.headline([first, cache, wrong])
    assert "step" not in ladder_report.headline([first, rung("slower", 5.0, 0.5)])


def test_the_figure_has_hollow_bars_no_bar_and_every_text_legible(data):
    fig = ladder_report.figure_of(data)
    assert plotting.texts_outside(fig) == [] and plotting.overlapping_texts(fig) == []
    assert len(fig.axes[0].patches) == 4, "no bar for what did not run"
    caption = fig.get_supxlabel()
    assert "float32 · tiny, 0M parameters" in caption
    assert f"because {ladder_report.STAND_INS}: lesson 10" in caption
    assert "not run: vLLM (vLLM is not installed)" in caption


def test_the_table_is_one_line_a_rung_at_132_columns(data):
    text = printed(data)
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    for name in ("02 no cache: recompute *", "10 steps in splits *", "vLLM", f"{PADDED} *"):
        assert name in rows, text
    splits, graphs = rows["10 steps in splits *"], rows["11 in lockstep, CUDA graphs"]
    assert "tokens only" in splits and "4.50" not in splits and "22.50" not in splits
    # measured on a GPU, or predicted with a tilde
    assert re.search(r"\d× context 64k, batch 1", splits)
    assert "not run" in graphs
    assert "3.00" in rows["11 32 requests in lockstep *"]
    assert "at the 50.0 GB/s" in text and "marked ~ are predicted for: H200." in text
    assert "tokens only: without a GPU PyTorch stands in" in text
    assert "in lockstep, CUDA graphs: not run (RuntimeError: no GPU)" in text


def printed(data) -> str:
    console = Console(width=132, record=True, file=io.StringIO())
    ladder_report.print_table(data, console)
    return console.export_text()


def test_every_rung_of_the_course_fits_its_line(data):
    """The longest names, with a star, and the longest regimes."""
    base = data["rungs"][0]
    data["rungs"] = [
        base
        | {"lesson": step.lesson, "name": step.name, "stand_in": step.stand_in}
        | {"regime": regimes.regime_of(step.lesson, step.name), "kv_bytes_per_token": 1_000_000}
        for step in WITH_LATENTS
    ]
    lines = printed(data).splitlines()
    for step in WITH_LATENTS:
        assert any(line.strip().startswith(f"{step.lesson} {step.name} *") for line in lines)


# ---------------------------------------------------------------- drawn again


def test_the_figure_is_drawn_again_from_its_json(data, tmp_path, capsys):
    source = tmp_path / "ladder.json"
    source.write_text(json.dumps(data))
    assert ladder_report.main([str(source)]) == 0
    assert (tmp_path / "ladder.png").stat().st_size > 10_000
    assert "32 requests in lockstep: 15.0×" in (tmp_path / "ladder.svg").read_text()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"device": "CPU", "rungs": []}', "run `make demo` again"),
        ("[]", "run `make demo` again"),
        ("{", "accepted: the ladder.json of `make demo`"),
        ("[" * 100_000, "accepted: the ladder.json"),
        (None, "No such file"),
    ],
)
def test_a_file_of_another_schema_is_one_line(text, said, tmp_path, capsys):
    source = tmp_path / "ladder.json"
    if text is not None:
        source.write_text(text)
    assert ladder_report.main([str(source)]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
