"""The film of the front page is drawn from a run of the engine, and shows what that run did."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from reference.trace.film import draw, run

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
LARGEST = 2**20  # bytes


@pytest.fixture(scope="module")
def found() -> dict:
    return json.loads(run.RECORD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def films(found) -> list[run.Frame]:
    return run.frames(found)


def test_the_record_is_a_run_of_todays_engine(found):
    assert json.loads(run.written(run.record())) == found


def test_it_shows_what_an_engine_does(found, films):
    """Requests wait, share blocks, run in chunks, are preempted and end."""
    notes = " ".join(note for frame in films for note in frame.notes)
    for said in ("prompt tokens cached", "runs in chunks", "gives its blocks back"):
        assert said in notes
    seen = {phase for frame in films for phase in frame.phase.values()}
    assert seen >= draw.PHASES.keys()
    assert any(len(owners) > 1 for frame in films for owners in frame.owners)
    assert set(films[-1].phase.values()) == {"done"}


def test_frames_agree_with_the_engines_rules(found, films):
    about, requests = found["about"], {int(row): one for row, one in found["requests"].items()}
    for frame in films:
        assert len(frame.batch) <= about["max_num_batched_tokens"]
        assert len(set(frame.batch)) <= run.ENGINE["max_num_seqs"]
        running = set(frame.batch)
        assert all(frame.phase[row] in ("prompt", "answer") for row in running)
        held = {row for owners in frame.owners for row in owners}
        assert running <= held
        for row in running:  # its blocks have room for what was computed
            mine = sum(row in owners for owners in frame.owners)
            assert mine * about["block_size"] >= frame.computed[row]
        assert all(0 <= rows <= about["block_size"] for rows in frame.rows)
    for row, one in requests.items():  # the last token of an answer is not computed
        assert films[-1].computed[row] == one["prompt_tokens"] + one["max_tokens"] - 1


@pytest.mark.parametrize("name", [*draw.LOOKS, *map(draw.still_of, draw.LOOKS)])
def test_the_committed_picture_is_drawn_from_the_record(name, found):
    path = run.RECORD.parent / name
    text = path.read_text(encoding="utf-8")
    assert text == draw.pictures(found)[name] and path.stat().st_size < LARGEST


@pytest.mark.parametrize("name", draw.LOOKS)
def test_a_still_is_what_a_viewer_shows_that_plays_nothing(name, found):
    still = ElementTree.fromstring(draw.pictures(found)[draw.still_of(name)])
    moving = ElementTree.fromstring(draw.pictures(found)[name])
    seen = [e for e in moving.iter() if e.get("visibility") != "hidden" and "animate" not in e.tag]
    assert [e.attrib for e in still.iter()] == [e.attrib for e in seen]
    assert "animate" not in ElementTree.tostring(still, encoding="unicode")
    words = [e.text for e in still.iter(f"{SVG}text") if (e.text or "").startswith("step ")]
    assert len(words) == 1


@pytest.mark.parametrize("page", ["README.md", "README.ko.md"])
def test_less_motion_and_the_dark_have_their_pictures(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    sources = re.findall(r'<source media="([^"]+)" srcset="reference/trace/film/([^"]+)">', text)
    dark, calm = "(prefers-color-scheme: dark)", "(prefers-reduced-motion: reduce)"
    assert sources == [  # the first that fits is shown
        (f"{calm} and {dark}", "film_dark_still.svg"),
        (calm, "film_still.svg"),
        (dark, "film_dark.svg"),
    ]


def value_at(element, name: str, second: float) -> str:
    """An attribute as a browser shows it at that time, by SMIL's rules for discrete values."""
    for moved in element.iter(f"{SVG}animate"):
        if moved.get("attributeName") == name:
            assert moved.get("calcMode") == "discrete" and moved.get("dur") == "30s"
            values = moved.get("values").split(";")
            times = [float(time) for time in moved.get("keyTimes").split(";")]
            assert len(values) == len(times) and times[0] == 0 and times == sorted(set(times))
            return [v for v, time in zip(values, times) if time <= second / 30][-1]
    return element.get(name)


def test_what_a_browser_shows_is_what_the_run_did(found, films):
    """In each frame the batch has the colours of its requests, and one line names the step."""
    text = draw.film(found, draw.LOOKS["film.svg"])
    picture = ElementTree.fromstring(text)
    places = [r for r in picture.iter(f"{SVG}rect") if r.get("width") == "19"]
    steps = [t for t in picture.iter(f"{SVG}text") if (t.text or "").startswith("step ")]
    assert len(places) == found["about"]["max_num_batched_tokens"] and len(steps) == len(films)
    for at, frame in enumerate(films):
        second = 30 * (1 - draw.REST) * at / (len(films) - 1) + 0.01
        shown = [value_at(place, "fill", second) for place in places]
        colours = [draw.COLOURS[row] for row in frame.batch]
        assert shown[: len(colours)] == colours
        assert set(shown[len(colours) :]) <= {draw.LOOKS["film.svg"].empty}
        seen = [t.text for t in steps if value_at(t, "visibility", second) == "visible"]
        assert len(seen) == 1 and seen[0].startswith(f"step {at}: ")


def test_the_front_page_shows_it_in_light_and_dark():
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    (picture,) = re.findall(r"<picture>.*?</picture>", front, re.DOTALL)
    for file in re.findall(r'src(?:set)?="([^"]+)"', picture):
        assert (ROOT / file).is_file(), file
    assert "(prefers-color-scheme: dark)" in picture and "film_dark.svg" in picture
    assert f'alt="{draw.ALT}"' in picture


def test_the_command_writes_it_anew(tmp_path, monkeypatch, capsys, found):
    from reference.trace.film.__main__ import main

    monkeypatch.setattr(run, "record", lambda: found)
    assert main(["--out", str(tmp_path)]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {run.RECORD.name, *draw.pictures(found)}
    assert "film.svg: " in capsys.readouterr().out
    assert json.loads((tmp_path / run.RECORD.name).read_text()) == found
