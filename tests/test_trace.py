"""The engine's trace: it says what happened, it opens when it is cut off, and a browser shows
it.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import html
import json
import re
import shutil
import subprocess

import pytest

from reference import LLM, SamplingParams
from reference.trace import recorder as trace
from reference.trace.recorder import page, read_trace, traced

PROMPTS = [
    "import os\n" * 5,
    "def f(x):\n    return x</script>",
    "import os\n" * 5 + "x",
    "class A:",
]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0),
    SamplingParams(max_tokens=9, temperature=0.9, n=2, seed=3),
    SamplingParams(max_tokens=30, temperature=0.0),
    SamplingParams(max_tokens=40, temperature=0.0),
]


BLOCKS = 9


@pytest.fixture(scope="module")
def llm():
    """An engine that chunks prompts, and whose pool is too small for all, so that it preempts."""
    small = dict(num_gpu_blocks_override=BLOCKS, block_size=8, max_model_len=100)
    return LLM("models/tiny", max_num_seqs=5, max_num_batched_tokens=16, **small)


@pytest.fixture(scope="module")
def answers(llm, tmp_path_factory):
    """(the file, the outputs)."""
    path = tmp_path_factory.mktemp("trace") / "steps.json"
    with traced(llm.engine, path):
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return path, outputs


def test_tracing_changes_no_token(llm, answers):
    untraced = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for mine, theirs in zip(answers[1], untraced):
        assert [a.token_ids for a in mine.outputs] == [a.token_ids for a in theirs.outputs]


def test_steps_tell_what_the_engine_did(answers):
    path, outputs = answers
    about, steps, events, cut_off = read_trace(path)
    assert about["num_blocks"] == BLOCKS and about["block_size"] == 8 and not cut_off
    born = {e["id"]: e["args"] for e in events if e["name"] == "answer" and e["ph"] == "b"}
    left = {e["id"]: e["args"] for e in events if e["name"] == "answer" and e["ph"] == "e"}
    assert born.keys() == left.keys() and len(born) == 5
    got = {(born[row]["request"], born[row]["answer"]): left[row]["tokens"] for row in born}
    assert got == {
        (output.request_id, answer.index): len(answer.token_ids)
        for output in outputs
        for answer in output.outputs
    }
    held, tables, sampled = dict.fromkeys(born, 0), {}, dict.fromkeys(born, 0)
    for number, step in enumerate(steps):
        assert step["step"] == number and sum(c[2] for c in step["chunks"]) <= 16
        for row, table in step["tables"].items():
            tables[int(row)] = table
        owned = {block for table in tables.values() if table for block in table}
        assert step["free"] == BLOCKS - len(owned)
        for row in step["preempted"]:
            held[row] = 0
            assert row in step["waiting"]
        for row, first, count in step["chunks"]:
            # a prefix cache, or a parent, spares tokens; nothing is computed twice without a reason
            assert first >= held[row]
            held[row] = first + count
            assert len(tables[row]) * 8 >= held[row]
        for row in step["sampled"]:
            sampled[row] += 1
    assert sampled == {row: left[row]["tokens"] for row in left}
    assert any(step["preempted"] for step in steps), "this pool is small enough to preempt"
    assert any(step["remembered"] for step in steps)


def test_the_file_is_a_trace_of_chrome(answers):
    """What https://ui.perfetto.dev asks of the format; spans of an answer follow each other."""
    events = json.loads(answers[0].read_text())
    is_open = {}
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys() and event["ph"] in "MXbei"
        if event.get("cat") == "request" and event["name"] != "answer":
            assert is_open.get(event["id"]) == (None if event["ph"] == "b" else event["name"])
            is_open[event["id"]] = event["name"] if event["ph"] == "b" else None
    assert not any(is_open.values())


def test_a_file_that_was_cut_off_opens_as_far_as_it_goes(answers, tmp_path):
    text, last = answers[0].read_text(), 0
    whole = len(read_trace(answers[0]).steps)
    first_event = text.index("\n", 2) + 1
    for at in range(first_event, len(text) - 1, 97):
        (tmp_path / "cut.json").write_text(text[:at])
        found = read_trace(tmp_path / "cut.json")
        assert found.cut_off and last <= len(found.steps) <= whole
        last = len(found.steps)
    assert last >= whole - 1


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "no trace of version 1"),
        ('{"traceEvents": []}', "no trace of version 1"),
        ('[\n{"name":"engine","args":{"version":7}},\n', "no trace of version 1"),
        ('[\n{"name":"x","args":{"version":1}},\n{"name"\n{"name":"y"},\n]\n', "line 3 is broken"),
        ('[\n{"name":"x","args":{"version":1}},\n[1, 2],\n]\n', "line 3 is broken"),
    ],
)
def test_another_file_is_refused_in_one_line(text, said, tmp_path, capsys):
    (tmp_path / "bad.json").write_text(text)
    assert trace.main([str(tmp_path / "bad.json")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "bad.html").exists()


def test_a_missing_file_and_a_place_that_cannot_be_written(llm, tmp_path, capsys):
    assert trace.main([str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    nowhere = traced(llm.engine, tmp_path / "no folder" / "steps.json")
    with pytest.raises(ValueError, match="accepted: a file that can be written"), nowhere:
        pass
    assert "run" not in vars(llm.engine)


def test_a_step_that_raises_and_an_abort_are_told(llm, tmp_path, monkeypatch):
    def broken(step, tables):
        raise RuntimeError("a fault")

    engine = llm.engine
    with traced(engine, tmp_path / "steps.json"):
        engine.add_request("a", "x = 1", SamplingParams(max_tokens=5))
        engine.step()
        engine.abort_request("a")
        engine.add_request("b", "y = 2", SamplingParams(max_tokens=5))
        monkeypatch.setattr(engine, "runner", broken)
        with pytest.raises(RuntimeError):
            monkeypatch.setattr(broken, "model", llm.engine.runner, raising=False)
            engine.step()
        monkeypatch.undo()
    found = read_trace(tmp_path / "steps.json")
    assert found.steps[-1]["error"] == "RuntimeError"
    ended = [e["args"]["reason"] for e in found.events if e["name"] == "answer" and e["ph"] == "e"]
    assert ended == ["abort", "abort"] and not engine.has_unfinished_requests


def test_a_prompt_cannot_end_the_script(answers):
    assert "return x</script>" not in page(answers[0])
    data = re.search(r"const GIVEN = (.*);\n", page(answers[0]))[1]
    prompts = [
        e["args"]["prompt"] for e in json.loads(data)["events"] if "prompt" in e.get("args", {})
    ]
    assert PROMPTS[1] in prompts


# ---------------------------------------------------------------- in a browser

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
in_a_browser = pytest.mark.skipif(not CHROMIUM, reason="NOT RUN: no Chromium is installed")


def opened(path, tmp_path, at: int = 0) -> dict[str, str]:
    """{id: text} of the page's elements after its script has run."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    place = [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{path}#step={at}"]
    done = subprocess.run(
        [CHROMIUM, *flags, *place],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = dict(re.findall(r'id="(\w+)"[^>]*?>([^<]*)<', done.stdout))
    found["rows"] = str(len(re.findall(r"<tr title", done.stdout)))
    found["ms"] = (re.findall(r'data-ms="(\d+)"', done.stdout) or [""])[0]
    return {name: html.unescape(text) for name, text in found.items()}


@in_a_browser
def test_the_page_shows_a_step(answers, tmp_path):
    assert trace.main([str(answers[0]), "--out", str(tmp_path / "steps.html")]) == 0
    steps = read_trace(answers[0]).steps
    at = next(n for n, step in enumerate(steps) if step["preempted"])
    shown = opened(tmp_path / "steps.html", tmp_path, at)
    assert shown["error"] == "" and shown["number"] == str(at)
    assert shown["count"] == str(len(steps) - 1) and shown["rows"] == str(len(steps[at]["chunks"]))
    tokens = sum(chunk[2] for chunk in steps[at]["chunks"])
    count = len(steps[at]["chunks"])
    said = f"{count} answer{'s' * (count > 1)}, {tokens} tokens of 16"
    assert shown["summary"].startswith(said)
    assert shown["memory"].startswith(f"{BLOCKS - steps[at]['free']} of {BLOCKS} owned")
    assert shown["waiting"].startswith("Preempted: ")


@in_a_browser
def test_ten_thousand_steps_open_in_two_seconds(answers, tmp_path):
    lines = answers[0].read_text().splitlines()
    steps = [line for line in lines if '"name":"step"' in line]
    many = (steps * (10_000 // len(steps) + 1))[:10_000]
    (tmp_path / "many.json").write_text("\n".join([*lines[:2], *many, '{"name":"end"}', "]"]))
    (tmp_path / "many.html").write_text(page(tmp_path / "many.json"))
    shown = opened(tmp_path / "many.html", tmp_path, 9_999)
    assert shown["number"] == "9999" and shown["error"] == ""
    assert int(shown["ms"]) < 2000


@in_a_browser
@pytest.mark.parametrize(
    "text, said",
    [
        ("[\n{\n]\n", "line 2 is broken"),
        ("hello", "no trace; accepted: what reference.trace wrote"),
        ('[\n{"name":"x","args":{"version":2}},\n]\n', "no trace of version 1"),
        ('[\n{"name":"x","args":{"version":1}},\n]\n', "the trace has no step"),
    ],
)
def test_a_broken_trace_is_one_line_in_the_page(text, said, tmp_path):
    """As if the file had been dropped there."""
    drop = f"<script>openText({json.dumps(text)}, 'bad.json')</script></body>"
    viewer = trace.VIEWER.read_text().replace("</body>", drop)
    (tmp_path / "bad.html").write_text(viewer)
    shown = opened(tmp_path / "bad.html", tmp_path)
    assert said in shown["error"]
