"""What a page of the playground shows is what the course's code computes, in a browser too."""

import html
import itertools
import json
import random
import re
import subprocess

import pytest

from book.playground import alone, tables
from book.stage import REPOSITORY
from lessons.l01_roofline.planner.models import find_model
from lessons.l01_roofline.planner.plan import make_plan
from lessons.toolbox.measure.hardware import lookup
from reference.trace.film import run as film
from reference.trace.recorder import read_trace
from tests.test_trace import CHROMIUM, in_a_browser

PAGES = alone.PAGES
TEXTS = {name: (PAGES / f"{name}.md").read_text(encoding="utf-8") for name in alone.NAMES}
PYTHON = ["python.js", "course_data.js", "live.js"]  # of a page that runs the lessons' code


@pytest.mark.parametrize("name", tables.SCRIPTS)
def test_the_committed_table_is_todays(name):
    committed = (tables.STATIC / f"{name}_data.js").read_text(encoding="utf-8")
    assert committed == tables.script(name), "compute it again: python -m book.playground"


@pytest.mark.parametrize("name", alone.NAMES)
def test_a_page_loads_what_is_there_and_nothing_else(name):
    text = TEXTS[name]
    loaded = re.findall(r'(?:src|href)="([^"]+)"', text)
    folder = "../../_static/playground/"
    if name == "trace":
        assert loaded == [f"{folder}playground.css", f"{folder}trace.html"]
        return
    data = PYTHON if name in tables.LIVE else [f"{name}_data.js"]
    wanted = ["playground.css", *data, "ui.js", f"{name}.js"]
    assert [one.removeprefix(folder) for one in loaded] == wanted
    size = sum((tables.STATIC / one.removeprefix(folder)).stat().st_size for one in loaded)
    most = 0.75 if name in tables.LIVE else 0.5  # of the megabyte that a page may load
    assert size < most * 2**20 and f'id="{name}"' in text
    for file in ("ui.js", "live.js", f"{name}.js"):
        code = (tables.STATIC / file).read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!www\.w3\.org)|fetch\(|import\(", code)


def test_every_page_has_a_table_and_is_written_alone(tmp_path, capsys):
    assert set(alone.NAMES) == {*tables.TABLES, *tables.LIVE, "trace"}
    alone.main([str(tmp_path)])
    assert "index.html" in capsys.readouterr().out
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    for name in alone.NAMES:
        assert f"{name}.html" in index and alone.title(name) in index
        text = (tmp_path / f"book/playground/{name}.html").read_text(encoding="utf-8")
        for file in re.findall(r'(?:src|href)="([^"]+)"', text):
            assert (tmp_path / "book/playground" / file).is_file(), file


def test_the_trace_is_the_films_run_in_todays_viewer():
    assert tables.VIEWER.read_text(encoding="utf-8") == tables.trace_page()
    found = film.without_times(read_trace(tables.TRACE))
    assert film.written(found) == film.RECORD.read_text(encoding="utf-8")


def test_the_front_page_shows_two_of_them():
    front = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for name in alone.PICTURES:
        assert f"](book/playground/{name}.png)" in front
        assert (PAGES / f"{name}.png").stat().st_size < 2**17


# ---------------------------------------------------------------- in a browser


UNTIL_PYTHON = (
    "const first = document.getElementById('said').textContent; const waits = setInterval(() => "
    "{ if (document.getElementById('said').textContent !== first) clearInterval(waits); }, 2);"
)


def opened(name: str, tmp_path, state: dict, after: str = "") -> dict[str, str]:
    """{id: words} of a page that is opened with the sliders in these places. after: a script that
    runs then. Errors of the page's scripts have the id "errors".
    """
    # Python needs a second to start. The browser's own time would be over before, but for a timer.
    wait = ["--virtual-time-budget=300000"] if name in tables.LIVE else []
    alone.write(tmp_path, after + (UNTIL_PYTHON if wait else ""))
    page = tmp_path / f"book/playground/{name}.html"
    place = "&".join(f"{key}={value}" for key, value in state.items())
    flags = [*alone.FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *wait, "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *flags, f"file://{page}#{place}"], capture_output=True, text=True, timeout=120
    )
    found = dict(re.findall(r'id="([\w-]+)"[^>]*>([^<]*)<', done.stdout))
    found = {key: html.unescape(words) for key, words in found.items()}
    found["table"] = dict(re.findall(r'<dt>([^<]+)</dt><dd id="(\w+)">', done.stdout))
    found["picture"] = done.stdout[done.stdout.find("<svg") : done.stdout.find("</svg>")]
    assert found["errors"] == "", found["errors"]
    return found


def shown(value: float) -> str:
    """A number of a table as JavaScript writes it."""
    return str(int(value)) if value == int(value) else repr(value)


@in_a_browser
@pytest.mark.parametrize("draw", range(3))
def test_a_plan_is_that_of_the_planner(draw, tmp_path):
    sliders = tables.roofline()["sliders"]
    state = {name: random.randrange(len(values)) for name, values in sliders.items()}
    found = opened("roofline", tmp_path, state)
    ids = {"ms to move the bytes": "memory", "ms to compute": "compute", "tokens/s at most": "rate"}
    assert ids.items() <= found["table"].items()
    for name, at in state.items():
        assert found[f"{name}-shown"] == str(sliders[name][at])
    chip = lookup(tables.CHIPS[state["chip"]])
    wanted = tables.BATCHES[state["batch"]]
    bits = tables.WEIGHT_BITS[state["weight_bits"]], tables.KV_BITS[state["kv_bits"]]
    gpus, context = tables.GPUS[state["gpus"]], tables.CONTEXTS[state["context"]]
    try:
        model = find_model(tables.MODELS[state["model"]])
        plan = make_plan(model, chip, wanted, context, gpus, *bits)
    except ValueError:
        assert found["rate"] == "–" and "do not fit" in found["said"]
        return
    floor = plan.decode
    assert found["running"] == str(plan.running)
    assert found["memory"] == shown(tables.rounded(1e3 * floor.memory_s))
    assert found["compute"] == shown(tables.rounded(1e3 * floor.compute_s))
    assert found["rate"] == shown(tables.rounded(plan.tokens_per_s))
    assert found["intensity"] == shown(tables.rounded(floor.intensity))
    bound = {"memory": "moving bytes", "compute": "arithmetic"}[floor.bound]
    assert f"bound by {bound}" in found["said"]
    assert (f"of {wanted} sequences fit" in found["said"]) == (not plan.fits)
    assert 'class="dot"' in found["picture"]


MOVED = (
    "const s = document.getElementById('{id}'); s.value = {value}; "
    "s.dispatchEvent(new Event('input'));"
)


@in_a_browser
def test_a_slider_that_is_moved_moves_the_numbers(tmp_path):
    found = opened("roofline", tmp_path, {"batch": 0}, MOVED.format(id="batch", value=6))
    assert found == opened("roofline", tmp_path, {"batch": 6})
    assert found != opened("roofline", tmp_path, {"batch": 0})


@in_a_browser
@pytest.mark.parametrize("draw", range(2))
def test_acceptance_is_that_of_the_lesson(draw, tmp_path):
    import torch

    from lessons.l16_speculative_sampling.more.speed import acceptance, expected_tokens
    from lessons.l16_speculative_sampling.naive import residual

    cuts = [sorted(random.choices(range(11), k=2)) for _ in range(2)]
    p, q = ([low, high - low, 10 - high] for low, high in cuts)
    state = {f"p{at}": one for at, one in enumerate(p)}
    state |= {f"q{at}": one for at, one in enumerate(q)} | {"count": 4}
    found = opened("speculation", tmp_path, state)
    target, draft = (torch.tensor(row, dtype=torch.float64) / 10 for row in (p, q))
    alpha = float(acceptance(target, draft))
    assert found["alpha"] == shown(tables.rounded(alpha))
    assert found["tokens"] == shown(tables.rounded(expected_tokens(round(alpha, 1), 5)))
    rest = residual(target, draft)
    rest = [shown(tables.rounded(one)) for one in (rest / rest.sum()).tolist()]
    words = ", ".join(f"{word} {one}" for word, one in zip(tables.WORDS, rest))
    assert found["residual"] == (words if p != q else "nothing: no draft is rejected")


@in_a_browser
def test_words_make_room_for_the_one_that_is_moved(tmp_path):
    state = {"p0": 5, "p1": 3, "p2": 2, "q0": 2, "q1": 6, "q2": 2, "count": 0}
    found = opened("speculation", tmp_path, state, MOVED.format(id="p0", value=10))
    assert [found[f"p{at}-shown"] for at in range(3)] == ["1.0", "0.0", "0.0"]
    assert found["alpha"] == "0.2" and found["tokens"] == "1.2"
    found = opened("speculation", tmp_path, state, MOVED.format(id="q1", value=0))
    assert sum(float(found[f"q{at}-shown"]) for at in range(3)) == pytest.approx(1)
    # a bar that is dragged to its top
    drag = (
        "const bar = document.querySelector('[data-bar=q2]'), at = bar.getBoundingClientRect();"
        "const where = {bubbles: true, clientX: at.x + 5, clientY: at.y, pointerId: 1};"
        "Element.prototype.setPointerCapture = () => {};"
        "bar.dispatchEvent(new PointerEvent('pointerdown', where));"
    )
    found = opened("speculation", tmp_path, state, drag)
    assert [found[f"q{at}-shown"] for at in range(3)] == ["0.0", "0.0", "1.0"]
    assert found["alpha"] == "0.2"


@in_a_browser
def test_a_row_of_the_address_that_does_not_add_up_is_not_taken(tmp_path):
    found = opened("speculation", tmp_path, {"p0": 9, "p1": 9, "p2": 9, "count": 99})
    assert [found[f"p{at}-shown"] for at in range(3)] == ["0.5", "0.3", "0.2"]


@in_a_browser
def test_a_step_of_the_run_is_what_was_recorded(tmp_path):
    table = tables.run()
    step = random.randrange(len(table["frames"]))
    frame, found = table["frames"][step], opened("run", tmp_path, {"step": step})
    used = sum(1 for owners in frame["owners"] if owners)
    running, tokens = len(set(frame["batch"])), len(frame["batch"])
    said = f"{running} request{'s run' if running > 1 else ' runs'} with {tokens} token"
    said += f"{'s' if tokens > 1 else ''}; {used} of "
    assert found["said"].startswith(said) and found["step-shown"] == str(step)
    places = re.findall(r'fill="([^"]+)" class="place"', found["picture"])
    colours = [table["colours"][row] for row in frame["batch"]]
    assert places == colours + ["none"] * (len(places) - len(colours))
    held = re.findall(r'height="([\d.]+)" fill="([^"]+)" class="held"', found["picture"])
    size = table["about"]["block_size"]
    wanted = [
        (30 * rows / size, table["colours"][owners[0]])
        for owners, rows in zip(frame["owners"], frame["rows"])
        if owners
    ]
    assert [(float(high), fill) for high, fill in held if float(high)] == wanted


@pytest.fixture(scope="module")
def recorded() -> dict:
    """The committed table of lanes; another test compares it with today's."""
    text = (tables.STATIC / "lanes_data.js").read_text(encoding="utf-8")
    return json.loads(text.partition(".lanes = ")[2].rstrip(";\n"))


def test_lanes_ask_for_what_the_copy_says(recorded):
    """By hand: lane i loads element i · distance and stores element i, those below the count."""
    sliders = recorded["sliders"]
    ways = itertools.product(sliders["distance"], sliders["itemsize"], sliders["count"])
    for (distance, size, count), row in zip(ways, recorded["rows"], strict=True):
        for kind, step in (("load", distance), ("store", 1)):
            asked, where = row[kind], [lane * step * size for lane in range(count)]
            assert (asked["lanes"], asked["bytes"]) == (list(range(count)), where)
            assert asked["sectors"] == len({byte // 32 for byte in where})


@in_a_browser
def test_a_warp_is_the_recorded_one(recorded, tmp_path):
    sliders = recorded["sliders"]
    state = {name: random.randrange(len(values)) for name, values in sliders.items()}
    found = opened("lanes", tmp_path, state)
    place = (state["distance"] * 4 + state["itemsize"]) * 2 + state["count"]
    row = recorded["rows"][place][sliders["access"][state["access"]]]
    lane = state["lane"]
    assert f"ask for {row['sectors']} sectors" in found["said"]
    is_off = lane not in row["lanes"]
    own, size = "its mask is off", sliders["itemsize"][state["itemsize"]]
    if not is_off:
        first = row["bytes"][row["lanes"].index(lane)]
        own = f"byte {first}." if size == 1 else f"bytes {first} to {first + size - 1}."
    assert own in found["said"]
    drawn = [int(one) for one in re.findall(r'data-lane="(\d+)"', found["picture"])]
    assert drawn == [one for one in row["lanes"] if one <= lane]
    seen = {byte // 32 for one, byte in zip(row["lanes"], row["bytes"]) if one <= lane}
    assert found["picture"].count('class="sector asked"') == len(seen)


def test_tables_say_what_a_reader_can_check_by_hand():
    """Lesson 16's picture in three words; a plan that does not fit."""
    table = tables.speculation()
    alpha, *rest = table["rows"]["4,3,3"]["2,5,3"]
    assert (alpha, rest) == (0.8, [1.0, 0.0, 0.0])
    assert table["tokens"][0] == [1.0] * 8 and table["tokens"][10] == [2.0 + k for k in range(8)]
    assert tables.planned("llama-3-70b", "rtx4090", 1, 16, 16, 1024, 1) is None
    assert json.loads(tables.script("run").partition(".run = ")[2].rstrip(";\n"))["frames"]
