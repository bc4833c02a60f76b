"""The benchmark harness: nothing wrong is timed, nothing missing is hidden, a record is whole, and
a figure tells its numbers.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from matplotlib.text import Text

import lessons as course
from lessons.toolbox.draw import plotting
from lessons.toolbox.measure import bench, records, timing
from lessons.toolbox.measure.bench import Benchmark, Unavailable, compiled, needs

RECORDED = Path(__file__).resolve().parents[2] / "results" / "cpu"
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
    name="row_sums",
    title="One call is {speedup:.0f}x faster than a loop at {x} rows",
    x_name="rows",
    x_values=(16, 32, 64),
    inputs=inputs,
    ylabel="row sums",
    dtype="float32",
    shape="[rows, rows]",
    bytes_moved=lambda n: 4.0 * n * n,
    floor_s=lambda n: 4.0 * n * n / 1e13,
    floor_label="memory floor",
    providers={
        "loop": ("naive", naive),
        "one call": ("optimized", optimized),
        "peer": ("library", library),
        "hungry": ("library", greedy),
        "kernel": ("optimized", on_gpu(optimized)),
    },
)]
"""


@pytest.fixture
def lessons(tmp_path, monkeypatch):
    """A course of one lesson with a benchmark and one without, on a CPU."""
    for folder in ("l03_row_sums/lab", "l04_no_benchmark"):
        (tmp_path / "lessons" / folder).mkdir(parents=True)
    (tmp_path / "lessons/l03_row_sums/lab/benchmark.py").write_text(LESSON)
    monkeypatch.setattr(course, "__path__", [*course.__path__, str(tmp_path / "lessons")])
    monkeypatch.setattr(bench, "default_device", lambda: torch.device("cpu"))
    yield tmp_path / "lessons"
    for name in [name for name in sys.modules if name.startswith("lessons.l03_row_sums")]:
        del sys.modules[name]


def build(providers, **changes):
    """A benchmark of random [n, n] at n = 4 and 8."""
    declared = {
        "name": "example",
        "title": "t",
        "x_name": "n",
        "x_values": (4, 8),
        "tolerance": 1e-5,
        "inputs": lambda n, device: (torch.randn(n, n, device=device),),
    }
    return Benchmark(providers=providers, **(declared | changes))


def measured(providers, **changes):
    """The record of such a benchmark on a CPU, providers as {label: make_fn}; the first is naive,
    the others are optimized.
    """
    roles = ["naive"] + ["optimized"] * len(providers)
    declared = {label: (role, make) for role, (label, make) in zip(roles, providers.items())}
    return bench.run(build(declared, **changes), "cpu", out=None)


def statuses(record):
    return {label: [p["status"] for p in s["points"]] for label, s in record["series"].items()}


def caption_of(record):
    text = records.figure_of(record).get_supxlabel()
    return text.replace("\n", " ").replace("\u00a0", " ")


def rows(x):
    return lambda: x.sum(dim=1)


@pytest.fixture
def scripted_clock(monkeypatch):
    """Times by script instead of by clock: {label: seconds}; and the list of what was timed."""
    seconds, timed = {}, []

    def interleave(functions, **_):
        timed.append(list(functions))
        times = {label: seconds.get(label, 1.0) for label in functions}
        return {label: timing.Timing(s, 0.9 * s, 1.1 * s, s, 7, []) for label, s in times.items()}

    monkeypatch.setattr(timing, "interleave", interleave)
    return seconds, timed


def test_the_command_measures_records_and_draws(lessons, tmp_path, capsys):
    out = tmp_path / "out"
    assert bench.main(["03", "--out", str(out)], root=lessons) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        f"row_sums.{k}" for k in ("json", "png", "svg")
    ]
    record = json.loads((out / "row_sums.json").read_text())
    assert statuses(record) == {
        "loop": ["ok"] * 3,
        "one call": ["ok"] * 3,
        "peer": ["not run"] * 3,
        "kernel": ["not run"] * 3,
        "hungry": ["ok"] + ["out of memory"] * 2,
    }
    point = record["series"]["loop"]["points"][0]
    assert 0 < point["p20_s"] <= point["median_s"] <= point["p80_s"] and point["runs"] > 1
    assert {"device", "torch", "date"} <= set(record["fingerprint"])
    assert record["dtype"] == "float32" and record["x"] == [16, 32, 64]
    assert record["bytes"] == [4.0 * n * n for n in (16, 32, 64)]
    printed = capsys.readouterr().out
    assert "not run (peer is not installed): peer" in printed
    assert "Tried to allocate 9 TiB): hungry at 32, 64" in printed

    figure = records.figure_of(record)
    assert plotting.texts_outside(figure) == [] and plotting.overlapping_texts(figure) == []
    text = " ".join(t.get_text() for t in figure.findobj(Text))
    text = text.replace("\n", " ").replace("\u00a0", " ")
    slow, fast = (record["series"][label]["points"] for label in ("loop", "one call"))
    steady = [n for n in range(3) if not records.is_noisy(slow[n]) | records.is_noisy(fast[n])]
    if steady:  # a machine that others use may be noisy at every size
        at = steady[-1]
        ratio = slow[at]["median_s"] / fast[at]["median_s"]
        said = f"One call is {ratio:.0f}x faster than a loop at {record['x'][at]} rows"
        assert said in text
    assert "hungry (out of memory at 32)" in text
    assert figure.get_supxlabel() == f"{record['fingerprint']['device']} · float32 · [rows, rows]"


def test_quick_takes_the_small_sizes(lessons, tmp_path):
    assert bench.main(["row_sums", "--quick", "--out", str(tmp_path)], root=lessons) == 0
    record = json.loads((tmp_path / "row_sums.json").read_text())
    assert record["x"] == [16, 32] and record["quick"] is True


@pytest.mark.sample(2, of="benchmarks")
def test_a_wrong_output_is_never_timed_and_fails_the_command(scripted_clock, tmp_path, lessons):
    providers = {
        "truth": rows,
        "rolled": lambda x: lambda: x.sum(dim=1).roll(1),
        "scaled": lambda x: lambda: x.sum(dim=1) * 1.001,
        "nan": lambda x: lambda: x.sum(dim=1).fill_(float("nan")),
        "good": rows,
    }
    record = measured(providers)
    assert scripted_clock[1] == [["truth", "good"]] * 2
    for label in ("rolled", "scaled", "nan"):
        assert statuses(record)[label] == ["wrong"] * 2
    assert "WRONG (differs from 'truth'" in caption_of(record)
    assert not records.is_sound(record)
    path = lessons / "l03_row_sums" / "lab" / "benchmark.py"
    path.write_text(LESSON.replace("x.sum(dim=1)\n\ndef library", "x.sum(dim=0)\n\ndef library"))
    assert bench.main(["3", "--out", str(tmp_path)], root=lessons) == 1


def test_a_dropped_element_is_seen_although_the_norm_hardly_moves():
    truth = torch.randn(100_000, dtype=torch.float64)
    truth[7] = 1.0
    out = truth.clone()
    out[7] = 0.0
    assert float((out - truth).norm() / truth.norm()) < 5e-3
    assert bench.disagreement(out, truth, tolerance=5e-3) != ""
    assert bench.disagreement(truth * (1 + 1e-4), truth, tolerance=5e-3) == ""


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "output, truth, words",
    [
        ([[1, 2]], [[1, 3]], "outputs differ"),
        ([[1, 2]], [[1, 2]], ""),
        (None, None, "None"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "worst element"),
        (torch.tensor([2**24 + 1, 2**30]), torch.tensor([2**24 + 1, 2**30]), ""),
        (1.003 * torch.ones(3), torch.ones(3), "relative error 3.0e-03"),
        (torch.ones(2), torch.ones(3), "shape [2], not [3]"),
        (torch.tensor([1.0, INF]), torch.tensor([1.0, 2.0]), "error inf"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, -INF]), "error inf"),
        (torch.tensor([1.0, INF]), torch.tensor([1.0, -INF]), "error inf"),
        (torch.tensor([1.0, -INF]), torch.tensor([1.0, -INF]), ""),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), "error nan"),
        (torch.zeros(3), torch.zeros(3), ""),
    ],
)
def test_disagreement(output, truth, words):
    found = bench.disagreement(output, truth, tolerance=1e-3)
    assert words in found and bool(words) == bool(found)


def test_tolerance_0_means_the_same_elements():
    truth = torch.tensor([1.0, -INF])
    assert bench.disagreement(truth.clone(), truth, tolerance=0) == ""
    one_bit_off = torch.tensor([1.0 + 2**-23, -INF])
    assert bench.disagreement(one_bit_off, truth, tolerance=0) != ""


def test_outputs_are_compared_where_they_are(monkeypatch):
    def moved(self):
        raise AssertionError("a gigabyte of output went to the CPU")

    monkeypatch.setattr(torch.Tensor, "cpu", moved)
    assert bench.disagreement(torch.ones(3), torch.ones(3), 1e-3) == ""


def test_every_provider_gets_the_same_inputs_and_a_reused_buffer_cannot_pass_for_the_truth(
    scripted_clock,
):
    seen, buffer = [], torch.empty(8)

    def into_the_buffer(factor):
        def make(x):
            seen.append(x)
            return lambda: torch.mul(x.sum(dim=1), factor, out=buffer[: len(x)])

        return make

    record = measured({"a": into_the_buffer(1), "b": into_the_buffer(2)})
    assert seen[0] is seen[1]
    assert statuses(record)["b"] == ["wrong", "wrong"]
    assert measured({"a": rows})["seed"] != record["seed"], "seeds are fresh"


def test_a_crash_is_recorded_and_costs_the_others_nothing(scripted_clock):
    def no_memory(x):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")

    record = measured({"a": rows, "b": lambda x: lambda: 1 / 0, "c": no_memory})
    point = record["series"]["b"]["points"][0]
    reason = "ZeroDivisionError: division by zero"
    assert point == {"x": 4, "status": "failed", "reason": reason}
    assert statuses(record)["a"] == ["ok"] * 2
    assert statuses(record)["c"] == ["out of memory"] * 2


def test_a_provider_that_fails_while_it_is_timed_fails_alone():
    calls = iter(range(100))
    record = measured(
        {"a": rows, "b": lambda x: lambda: x.sum(dim=1) if next(calls) < 2 else 1 / 0},
        x_values=(4,),
    )
    assert statuses(record) == {"a": ["ok"], "b": ["failed"]}


@pytest.mark.sample(2, of="benchmarks")
def test_a_provider_out_of_memory_is_not_tried_again_at_larger_sizes(scripted_clock):
    tried = []

    def hungry(x):
        tried.append(len(x))
        raise torch.OutOfMemoryError("CUDA out of memory")

    record = measured({"a": rows, "b": hungry}, x_values=(4, 8, 16))
    assert tried == [4] and statuses(record)["b"] == ["out of memory"] * 3


def test_when_all_together_run_out_of_memory_each_is_timed_alone(scripted_clock, monkeypatch):
    scripted = timing.interleave

    def together(functions, **how):
        if len(functions) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return scripted(functions, **how)

    monkeypatch.setattr(timing, "interleave", together)
    record = measured({"a": rows, "b": rows}, x_values=(4,))
    assert statuses(record) == {"a": ["ok"], "b": ["ok"]}
    flags = record["series"]["b"]["points"][0]["flags"]
    assert flags == ["timed alone: together CUDA out of memory"]
    assert "timed alone: a; b" in caption_of(record)


@pytest.mark.sample(2, of="benchmarks")
def test_dynamo_forgets_the_sizes_before(scripted_clock, monkeypatch):
    """Else torch.compile gives up on a function after eight sizes."""
    resets = []
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    measured({"a": rows})
    assert len(resets) == 2


@pytest.mark.sample(2, of="benchmarks")
def test_resume_keeps_what_is_whole_and_of_the_same_key(scripted_clock, tmp_path):
    timed, benchmark = scripted_clock[1], build({"a": ("naive", rows)}, x_values=(4,))

    def seed(**how):
        return bench.run(benchmark, "cpu", out=tmp_path, **how)["seed"]

    first = seed(resume="of this source")
    assert seed(resume="of this source") == first and len(timed) == 1
    assert seed(resume="of another source") != first and len(timed) == 2
    seed()
    assert len(timed) == 3, "there was no request to resume"
    path = tmp_path / "example.json"
    record = json.loads(path.read_text()) | {"resume": "of this source"}
    record["series"]["a"]["points"][0] |= {"status": "failed", "reason": "it was cold"}
    path.write_text(json.dumps(record))
    seed(resume="of this source")
    assert len(timed) == 4, "what failed is measured again"


# ---------------------------------------------------------------- the figure


def axis_of(record):
    ax = records.figure_of(record).axes[0]
    line = next(line for line in ax.lines if line.get_marker() == "o")
    return ax.get_ylabel(), list(line.get_ydata())


@pytest.mark.sample(2, of="benchmarks")
def test_ratios_on_a_cpu_absolute_on_a_gpu_and_both_from_the_record_alone(scripted_clock):
    scripted_clock[0].update(slow=0.006, fast=0.002)
    record = measured({"slow": rows, "fast": rows}, title="{speedup:.1f}x at {x}")
    label, values = axis_of(record)
    assert "× fast at 4" in label and "ms" not in label and values == pytest.approx([3, 3])
    assert records.title_of(record) == "3.0x at 8"
    record |= {"device_type": "cuda", "fingerprint": {"device": "NVIDIA H200"}}
    label, values = axis_of(record)
    assert "(ms)" in label and values == pytest.approx([6, 6])
    assert "NVIDIA H200" in caption_of(record)


@pytest.mark.parametrize(
    "speedups, words",
    [
        ([1.2, 2.0, 1.2], "faster at every number of tokens, 2.0x at 8"),
        ([2.0, 1.2, 1.04], "faster up to 8 tokens, 2.0x at 4"),
        ([0.9, 1.05, 3.0], "faster from 8 tokens on, 3.0x at 16"),
        ([1.0, 1.5, 1.0], "faster only at 8 tokens, 1.5x at 8"),
        ([1.0, 1.5, 1.4, 1.0], "faster from 8 to 16 tokens, 1.5x at 8"),
        ([1.4, 0.8, 1.5, 1.0], "faster at 2 of 4 numbers of tokens, 1.5x at 16"),
        ([1.04, 0.87, 0.99], "nowhere faster, 0.87x at 8 tokens"),
    ],
)
def test_a_title_says_where_it_is_faster(speedups, words):
    """By what was measured; an advantage of less than 5 % is none."""
    sizes = [4, 8, 16, 32][: len(speedups)]
    record = {"title": "At once: {where}", "x": sizes, "x_name": "tokens", "floor_s": None}
    times = {"naive": speedups, "optimized": [1.0] * len(sizes)}
    record["series"] = {
        role: {
            "role": role,
            "points": [{"x": x, "status": "ok", "median_s": s} for x, s in zip(sizes, seconds)],
        }
        for role, seconds in times.items()
    }
    assert records.title_of(record) == f"At once: {words}"
    record["series"]["library"] = record["series"].pop("naive") | {"role": "library"}
    assert records.title_of(record | {"title": "At once: {beside}"}) == f"At once: {words}"


def test_the_line_under_a_recorded_figure_is_one_line():
    """Of 120 characters at most, because about 130 fit the width."""
    captions = {
        path.name: records._caption(record)
        for path in RECORDED.glob("l*_*.json")
        if (record := json.loads(path.read_text())).get("metric")
    }
    assert len(captions) > 40
    assert not {name: line for name, line in captions.items() if len(line) > 120}


@pytest.mark.sample(2, of="benchmarks")
def test_what_is_not_drawn_is_still_recorded(scripted_clock):
    scripted_clock[0].update(slow=0.006, fast=0.002)
    record = measured({"slow": rows, "fast": rows}, not_drawn=["slow"])
    shown = [text.get_text() for text in records.figure_of(record).axes[0].texts]
    assert "slow" in record["series"] and "fast" in shown and "slow" not in shown


@pytest.mark.sample(2, of="benchmarks")
def test_bandwidth_is_drawn_under_its_roof_and_a_time_below_the_floor_is_flagged(scripted_clock):
    scripted_clock[0].update(slow=2.0, fast=0.5)
    limits = {"bytes_moved": lambda n: 8e9, "floor_s": lambda n: 1.0}
    record = measured(
        {"slow": rows, "fast": rows}, metric="bandwidth", ylabel="bandwidth", **limits
    )
    label, values = axis_of(record)
    assert "% of the dashed line's peak" in label and values == pytest.approx([50, 50])
    assert "CHECK" in caption_of(record)
    label, values = axis_of(record | {"device_type": "cuda"})
    assert "(GB/s)" in label and values == pytest.approx([4, 4])


@pytest.mark.sample(2, of="benchmarks")
def test_a_message_does_not_rest_on_a_noisy_point(scripted_clock):
    """At the largest size, at the smallest, at all."""
    scripted_clock[0].update(slow=0.006, fast=0.002)
    title = "{speedup:.1f}x at {x}, {optimized_growth:.0f}x {first}"
    record = measured({"slow": rows, "fast": rows}, title=title)
    points = record["series"]["fast"]["points"]
    sizes = [point["x"] for point in points]
    assert records.title_of(record) == f"3.0x at {sizes[-1]}, 1x {sizes[0]}"
    points[-1] |= {"median_s": 1e-9, "flags": ["noisy: the 20-80 % band spans 90% of the median"]}
    assert records.title_of(record) == f"3.0x at {sizes[-2]}, 1x {sizes[0]}"
    for point in points:
        point["flags"] = ["noisy: the 20-80 % band spans 90% of the median"]
    assert records.title_of(record).endswith(
        ": its runs differ too much for a message with a number"
    )


@pytest.mark.sample(2, of="benchmarks")
def test_a_message_that_was_not_measured_is_not_stated(scripted_clock):
    def absent(x):
        raise Unavailable("no GPU here")

    record = measured({"a": rows, "b": absent}, title="{speedup:.1f}x")
    message = "Time: not enough was measured here for a message with a number"
    assert records.title_of(record | {"ylabel": "time"}) == message
    beside = measured({"a": rows, "absent": absent, "b": rows}, title="{speedup:.1f}x")
    assert records.title_of(beside) == "1.0x"
    with pytest.raises(ValueError, match=r"nothing to draw; not run \(no GPU here\): b"):
        records.figure_of(measured({"b": absent}))


def test_a_provider_without_its_package_or_a_compiler_is_not_run(scripted_clock, monkeypatch):
    def peer(x):
        with needs("a-package"):
            import a_package_of_no_one  # noqa: F401
        return rows(x)

    def without_a_compiler(function, dynamic):
        def run(x):
            raise RuntimeError("no g++\nand why")

        return run

    monkeypatch.setattr(torch, "compile", without_a_compiler)
    record = measured({"rows": rows, "peer": peer, "compiled": compiled(torch.sum)})
    reasons = {label: s["points"][0].get("reason") for label, s in record["series"].items()}
    assert reasons == {
        "rows": None,
        "peer": "needs a-package",
        "compiled": "torch.compile: RuntimeError: no g++",
    }
    assert statuses(record)["peer"] == statuses(record)["compiled"] == ["not run"] * 2


def test_what_is_compiled_is_what_is_timed(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: lambda x: 2 * function(x))
    assert compiled(torch.sum)(torch.ones(3))() == 6


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
        ({"title": "{speed}x"}, "title quotes 'speed'; accepted: speedup"),
        ({"x_values": (8, 4)}, "ascending"),
        ({"x_values": ()}, "one or more"),
        ({"metric": "joy"}, "metric 'joy'; accepted: time"),
        ({"name": "a/b"}, "name 'a/b'"),
        ({"metric": "bandwidth"}, "metric 'bandwidth'; accepted: .* .needs bytes_moved"),
        ({"providers": {"a": ("fast", rows)}}, r"roles \['fast'\]; accepted: naive"),
    ],
)
def test_a_wrong_declaration_is_one_clear_line(changes, words):
    with pytest.raises(ValueError, match=words):
        build(**({"providers": {"a": ("naive", rows)}} | changes))


@pytest.mark.parametrize("wanted", ["99", "", "nonsense", "04", "-1"])
def test_an_unknown_lesson_lists_those_that_exist(wanted, lessons, capsys):
    with pytest.raises(ValueError, match="accepted: 03 row_sums"):
        bench.load_benchmarks(wanted, lessons)
    assert bench.main(["--", wanted], root=lessons) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "03 row_sums" in printed
    for known in ("3", "row_sums", "l03_row_sums"):
        assert [b.name for b in bench.load_benchmarks(known, lessons)] == ["row_sums"]


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
    assert list((tmp_path / "o").iterdir()) == [] and "interrupted" in capsys.readouterr().err


@pytest.mark.sample(3, of="processes")
def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "lessons.toolbox.measure.bench", "99"],
        capture_output=True,
        text=True,
        cwd=bench.ROOT,
    )
    assert done.returncode == 2 and textwrap.shorten(done.stderr, 60).startswith(
        "bench: LESSON='99' has no"
    )


def test_records_of_a_lesson_are_found_wherever_they_were_written(tmp_path):
    """Those of GPUs first; what else is in a device's folder is left alone."""
    record = {"schema": 1, "series": {}, "name": "l07_norm", "metric": "time"}
    for path, content in {
        "cpu/l07_norm.json": record,
        "cpu/l08_other.json": record | {"name": "l08_other"},
        "h200/l07_gpu.json": record | {"name": "l07_gpu"},
        "h200/proof.json": {"steps": {}},
        "cpu/l07_tasks.json": {"rows": []},  # of another shape
        "cpu/l07_ranks.json": {"schema": 1, "series": {}, "name": "l07_ranks"},  # without an x
        "counted/l07_loss.json": {"rows": []},
        "simulated/l07_queue.json": [],
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))
    assert [r["name"] for r in records.recorded(tmp_path, "07")] == ["l07_gpu", "l07_norm"]
    assert [r["name"] for r in records.recorded(tmp_path, "07", "l07_norm")] == ["l07_norm"]
    assert records.recorded(tmp_path, "09") == []
    (tmp_path / "cpu/l07_half.json").write_text('{"schema": 1, ')
    with pytest.raises(ValueError, match=r"l07_half\.json is no benchmark record: .*\Z"):
        records.recorded(tmp_path, "07")


def test_every_lesson_s_own_records_are_read():
    """As the notebooks do, which draw each."""
    lessons = [f"{number:02}" for number in range(29)]
    found = {lesson: records.recorded(bench.ROOT / "results", lesson) for lesson in lessons}
    assert sum(map(len, found.values())) > 60 and not found["26"]  # simulated, so far
    for record in found["18"] + found["19"]:
        assert records.figure_of(record).axes
