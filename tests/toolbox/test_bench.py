"""The benchmark harness: nothing wrong is timed, nothing missing is hidden, a record is whole, and
a figure tells its numbers.
"""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from matplotlib.text import Text

from lessons.toolbox.draw import plotting
from lessons.toolbox.measure import bench, records, timing
from lessons.toolbox.measure.bench import Benchmark, Unavailable

LESSON = """
import torch

from lessons.toolbox.measure.bench import Benchmark, Unavailable, on_gpu

def inputs(n, device):
    return (torch.randn(n, n, device=device),)

def naive(x):
    return lambda: torch.stack([row.sum() for row in x])

def optimized(x):
    return lambda: x.sum(dim=1)

def library(x):
    raise Unavailable("peer is not installed")

def greedy(x):
    def call():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB")
    return call if x.shape[0] >= 32 else lambda: x.sum(dim=1)

BENCHMARKS = [Benchmark(
    name="row_sums", title="One call is {speedup:.0f}x faster than a loop at {x} rows",
    x_name="rows", x_values=(16, 32, 64), inputs=inputs, ylabel="row sums", dtype="float32",
    shape="[rows, rows]", bytes_moved=lambda n: 4.0 * n * n,
    floor_s=lambda n: 4.0 * n * n / 1e13, floor_label="memory floor",
    providers={"loop": ("naive", naive), "one call": ("optimized", optimized),
               "peer": ("library", library), "hungry": ("library", greedy),
               "kernel": ("optimized", on_gpu(optimized))})]
"""


@pytest.fixture
def lessons(tmp_path):
    folder = tmp_path / "lessons" / "l03_row_sums"
    folder.mkdir(parents=True)
    (folder / "benchmark.py").write_text(LESSON)
    (tmp_path / "lessons" / "l04_no_benchmark").mkdir()
    yield tmp_path / "lessons"
    sys.modules.pop("lessons.l03_row_sums.benchmark", None)


def build(providers, **changes):
    arguments = {
        "name": "example",
        "title": "t",
        "x_name": "n",
        "x_values": (4, 8),
        "tolerance": 1e-5,
        "inputs": lambda n, device: (torch.randn(n, n, device=device),),
    } | changes
    return Benchmark(providers=providers, **arguments)


def rows(x):
    return lambda: x.sum(dim=1)


@pytest.fixture
def scripted_clock(monkeypatch):
    """Times by script instead of by clock: {label: seconds}; and the list of what was timed."""
    seconds, timed = {}, []

    def interleave(functions, **_):
        timed.append(list(functions))
        return {
            label: timing.Timing(s, 0.9 * s, 1.1 * s, samples_s=(s,) * 7)
            for label in functions
            for s in (seconds.get(label, 1.0),)
        }

    monkeypatch.setattr(timing, "interleave", interleave)
    return seconds, timed


def test_the_command_measures_records_and_draws(lessons, tmp_path, capsys):
    out = tmp_path / "out"
    assert bench.main(["03", "--out", str(out), "--device", "cpu"], root=lessons) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "row_sums.json",
        "row_sums.png",
        "row_sums.svg",
    ]
    record = json.loads((out / "row_sums.json").read_text())
    status = {label: [p["status"] for p in s["points"]] for label, s in record["series"].items()}
    assert status == {
        "loop": ["ok"] * 3,
        "one call": ["ok"] * 3,
        "peer": ["not run"] * 3,
        "kernel": ["not run"] * 3,
        "hungry": ["ok"] + ["out of memory"] * 2,
    }
    point = record["series"]["loop"]["points"][0]
    assert 0 < point["p20_s"] <= point["median_s"] <= point["p80_s"] and point["runs"] > 1
    assert {"device", "torch", "date"} <= set(record["fingerprint"]) and record[
        "dtype"
    ] == "float32"
    assert record["bytes"] == [4.0 * n * n for n in (16, 32, 64)] and record["x"] == [16, 32, 64]
    printed = capsys.readouterr().out
    assert (
        "not run: peer (peer is not installed)" in printed
        and "out of memory: hungry at 32, 64 (CUDA" in printed
    )

    fig = records.figure_of(record)
    text = (
        " ".join(t.get_text() for t in fig.findobj(Text)).replace("\n", " ").replace("\u00a0", " ")
    )
    assert plotting.texts_outside(fig) == [] and plotting.overlapping_texts(fig) == []
    speedup = (
        record["series"]["loop"]["points"][-1]["median_s"]
        / record["series"]["one call"]["points"][-1]["median_s"]
    )
    assert f"One call is {speedup:.0f}x faster than a loop at 64 rows" in text
    assert (
        "hungry (out of memory at 32)" in text
        and "not run: peer" in text
        and "[rows, rows]" in text
    )


def test_quick_takes_the_small_sizes(lessons, tmp_path):
    assert bench.main(["row_sums", "--quick", "--out", str(tmp_path)], root=lessons) == 0
    record = json.loads((tmp_path / "row_sums.json").read_text())
    assert record["x"] == [16, 32] and record["quick"] is True


def test_a_wrong_output_is_never_timed_and_fails_the_command(
    scripted_clock, tmp_path, capsys, lessons
):
    def off_by_one_row(x):
        return lambda: x.sum(dim=1).roll(1)

    def slightly_scaled(x):
        return lambda: x.sum(dim=1) * 1.001

    def nan(x):
        return lambda: x.sum(dim=1).fill_(float("nan"))

    record = bench.run(
        build(
            {
                "truth": ("naive", rows),
                "rolled": ("optimized", off_by_one_row),
                "scaled": ("optimized", slightly_scaled),
                "nan": ("library", nan),
                "good": ("optimized", rows),
            }
        ),
        "cpu",
        out=None,
    )
    assert scripted_clock[1] == [["truth", "good"]] * 2
    points = {label: s["points"][0] for label, s in record["series"].items()}
    assert {points[label]["status"] for label in ("rolled", "scaled", "nan")} == {"wrong"}
    assert "differs from 'truth'" in points["rolled"]["reason"]
    assert "WRONG: rolled (" in records.figure_of(record).get_supxlabel().replace(
        "\n", " "
    ).replace("\u00a0", " ")
    assert bench.report(record) is False
    path = lessons / "l03_row_sums" / "benchmark.py"
    path.write_text(LESSON.replace("x.sum(dim=1)\n\ndef library", "x.sum(dim=0)\n\ndef library"))
    assert bench.main(["3", "--out", str(tmp_path), "--device", "cpu"], root=lessons) == 1


def test_a_dropped_element_is_seen_although_the_norm_hardly_moves():
    truth = torch.randn(100_000, dtype=torch.float64)
    truth[7] = 1.0
    out = truth.clone()
    out[7] = 0.0
    assert float((out - truth).norm() / truth.norm()) < 5e-3
    assert bench.disagreement(out, truth, tolerance=5e-3) != ""
    assert bench.disagreement(truth * (1 + 1e-4), truth, tolerance=5e-3) == ""


@pytest.mark.parametrize(
    "output, truth, words",
    [
        ([[1, 2]], [[1, 3]], "outputs differ"),
        ([[1, 2]], [[1, 2]], ""),
        (None, None, "None"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 elements differ"),
        (torch.ones(2), torch.ones(3), "shape [2], not [3]"),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, 2.0]), "infinity"),
        (torch.zeros(3), torch.zeros(3), ""),
    ],
)
def test_disagreement(output, truth, words):
    found = bench.disagreement(output, truth, tolerance=1e-3)
    assert words in found and bool(words) == bool(found)


def test_every_provider_gets_the_same_inputs_and_a_reused_buffer_cannot_pass_for_the_truth(
    scripted_clock,
):
    seen, buffer = [], torch.empty(8)

    def shared_buffer(x, factor):
        seen.append(x)

        def call():
            buffer[: len(x)] = factor * x.sum(dim=1)
            return buffer[: len(x)]

        return call

    record = bench.run(
        build(
            {
                "a": ("naive", lambda x: shared_buffer(x, 1)),
                "b": ("optimized", lambda x: shared_buffer(x, 2)),
            }
        ),
        "cpu",
        out=None,
    )
    assert seen[0] is seen[1]
    assert [p["status"] for p in record["series"]["b"]["points"]] == ["wrong", "wrong"]
    other = bench.run(build({"a": ("naive", rows)}), "cpu", out=None)
    assert other["seed"] != record["seed"], "seeds are fresh"


def test_a_crash_is_recorded_and_costs_the_others_nothing(scripted_clock):
    def broken(x):
        return lambda: 1 / 0

    def no_memory(x):
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 "
            "bytes"
        )

    record = bench.run(
        build({"a": ("naive", rows), "b": ("optimized", broken), "c": ("library", no_memory)}),
        "cpu",
        out=None,
    )
    assert record["series"]["b"]["points"][0] == {
        "x": 4,
        "status": "failed",
        "reason": "ZeroDivisionError: division by zero",
    }
    assert [p["status"] for p in record["series"]["c"]["points"]] == ["out of memory"] * 2
    assert [p["status"] for p in record["series"]["a"]["points"]] == ["ok"] * 2


def test_a_provider_out_of_memory_is_not_tried_again_at_larger_sizes(scripted_clock):
    tried = []

    def hungry(x):
        tried.append(len(x))
        raise torch.OutOfMemoryError("CUDA out of memory")

    record = bench.run(
        build({"a": ("naive", rows), "b": ("optimized", hungry)}, x_values=(4, 8, 16)),
        "cpu",
        out=None,
    )
    assert (
        tried == [4]
        and [p["status"] for p in record["series"]["b"]["points"]] == ["out of memory"] * 3
    )


def test_when_all_together_run_out_of_memory_each_is_timed_alone(scripted_clock, monkeypatch):
    scripted = timing.interleave

    def together(functions, **how):
        if len(functions) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return scripted(functions, **how)

    monkeypatch.setattr(timing, "interleave", together)
    record = bench.run(
        build({"a": ("naive", rows), "b": ("optimized", rows)}, x_values=(4,)), "cpu", out=None
    )
    assert [s["points"][0]["status"] for s in record["series"].values()] == ["ok", "ok"]
    assert all(
        "timed alone: together CUDA out of memory" in s["points"][0]["flags"]
        for s in record["series"].values()
    )
    assert "timed alone: a; b" in records.figure_of(record).get_supxlabel().replace("\u00a0", " ")


def axis_of(record):
    ax = records.figure_of(record).axes[0]
    line = next(line for line in ax.lines if line.get_marker() == "o")
    return ax.get_ylabel(), list(line.get_ydata())


def test_ratios_on_a_cpu_absolute_on_a_gpu_and_both_from_the_record_alone(scripted_clock):
    scripted_clock[0].update(slow=0.006, fast=0.002)
    record = bench.run(
        build(
            {"slow": ("naive", rows), "fast": ("optimized", rows)}, title="{speedup:.1f}x at {x}"
        ),
        "cpu",
        out=None,
    )
    label, values = axis_of(record)
    assert "× fast at 4" in label and "ms" not in label and values == pytest.approx([3, 3])
    assert records.title_of(record) == "3.0x at 8"
    record |= {"device_type": "cuda", "fingerprint": {"device": "NVIDIA H200"}}
    label, values = axis_of(record)
    assert "(ms)" in label and values == pytest.approx([6, 6])
    assert "NVIDIA H200" in records.figure_of(record).get_supxlabel().replace("\u00a0", " ")


def test_bandwidth_is_drawn_under_its_roof_and_a_time_below_the_floor_is_flagged(scripted_clock):
    scripted_clock[0].update(slow=2.0, fast=0.5)
    record = bench.run(
        build(
            {"slow": ("naive", rows), "fast": ("optimized", rows)},
            metric="bandwidth",
            ylabel="bandwidth",
            bytes_moved=lambda n: 8e9,
            floor_s=lambda n: 1.0,
        ),
        "cpu",
        out=None,
    )
    label, values = axis_of(record)
    assert "% of this machine's roof" in label and values == pytest.approx([50, 50])
    assert "CHECK" in records.figure_of(record).get_supxlabel()
    label, values = axis_of(record | {"device_type": "cuda"})
    assert "(GB/s)" in label and values == pytest.approx([4, 4])


def test_a_message_that_was_not_measured_is_not_stated(scripted_clock):
    def absent(x):
        raise Unavailable("no GPU here")

    record = bench.run(
        build({"a": ("naive", rows), "b": ("optimized", absent)}, title="{speedup:.1f}x"),
        "cpu",
        out=None,
    )
    assert (
        records.title_of(record)
        == "example: not enough was measured here to state its message (speedup)"
    )
    nothing = bench.run(build({"b": ("optimized", absent)}), "cpu", out=None)
    with pytest.raises(ValueError, match="nothing to draw: not run: b"):
        records.figure_of(nothing)


def test_a_record_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    bench.write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        bench.write_json(path, {"a": float("nan")})

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"title": "{speed}x"}, r"title quotes \['speed'\]; accepted: speedup"),
        ({"x_values": (8, 4)}, "ascending"),
        ({"x_values": ()}, "one or more"),
        ({"metric": "joy"}, "metric 'joy'; accepted: time"),
        ({"name": "a/b"}, "name 'a/b'"),
        ({"metric": "bandwidth"}, "needs bytes_moved"),
        ({"providers": {"a": ("fast", rows)}}, r"roles \['fast'\]; accepted: naive"),
    ],
)
def test_a_wrong_declaration_is_one_clear_line(changes, words):
    with pytest.raises(ValueError, match=words):
        build(**({"providers": {"a": ("naive", rows)}} | changes))


@pytest.mark.parametrize("wanted", ["99", "", "nonsense", "04", "-1"])
def test_an_unknown_lesson_lists_those_that_exist(wanted, lessons, capsys):
    with pytest.raises(ValueError, match="accepted: 03 row_sums"):
        bench.find_lesson(wanted, lessons)
    assert bench.main(["--", wanted], root=lessons) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "03 row_sums" in printed
    assert bench.find_lesson("3", lessons) == bench.find_lesson("l03_row_sums", lessons)


def test_redraw_from_json_and_a_file_that_is_none(tmp_path, scripted_clock, capsys):
    bench.run(build({"a": ("naive", rows), "b": ("optimized", rows)}), "cpu", out=tmp_path)
    assert bench.main(["--draw", str(tmp_path / "example.json")]) == 0
    assert (tmp_path / "example.png").exists() and (tmp_path / "example.svg").exists()
    (tmp_path / "bad.json").write_text("{}")
    assert (
        bench.main(["--draw", str(tmp_path / "bad.json")]) == 2
        and bench.main(["--draw", str(tmp_path / "absent.json")]) == 2
    )
    assert "is no benchmark record" in capsys.readouterr().err


def test_ctrl_c_leaves_no_half_record(lessons, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "interleave", interrupted)
    assert bench.main(["03", "--out", str(tmp_path / "o")], root=lessons) == 130
    assert not (tmp_path / "o").exists() and "interrupted" in capsys.readouterr().err


def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "lessons.toolbox.measure.bench", "99"],
        capture_output=True,
        text=True,
        cwd=bench.ROOT,
    )
    assert done.returncode == 2 and textwrap.shorten(done.stderr, 60).startswith(
        "LESSON='99' has no benchmark"
    )


def test_records_of_a_lesson_are_found_wherever_they_were_written(tmp_path):
    """`make gpu` keeps them in one file a device, `make bench` in one file each."""
    record = {"schema": 1, "series": {}, "name": "l07_norm"}
    for path, content in {
        "h200/benchmarks.json": {
            "07": {"records": {"l07_norm": record | {"name": "l07_gpu"}}},
            "08": {},
        },
        "cpu/l07_norm.json": record,
        "cpu/l08_other.json": record | {"name": "l08_other"},
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))
    assert [r["name"] for r in records.recorded(tmp_path, "07")] == ["l07_gpu", "l07_norm"]
    assert [r["name"] for r in records.recorded(tmp_path, "07", "l07_norm")] == ["l07_norm"]
    assert records.recorded(tmp_path, "09") == []
