"""Slides are the figures without the line under them, at a projector's width, and a page that turns
them.
"""

import contextlib
import re
import struct
from pathlib import Path

import pytest

from lessons.toolbox.draw.figure import overlapping_texts, pictures_to, texts_outside
from lessons.toolbox.draw.plotting import class_plot
from lessons.toolbox.measure.device import has_triton
from reference.bench import slides
from reference.bench.class_texts import aims_of, first_question, numbers, plan_of, title_of
from reference.bench.deck import SLIDE_PIXELS, Deck, page, save_slide, words
from tests.course_rules import committed_files

ROOT = Path(slides.__file__).parents[2]


def width_of(png: Path) -> int:
    """Pixels, from the header of a PNG."""
    return struct.unpack(">I", png.read_bytes()[16:20])[0]


def test_a_slide_has_no_caption_and_fills_the_projector(tmp_path):
    points = [(x, x, x) for x in (1.0, 2.0, 4.0)]
    words = {"title": "t", "xlabel": "x", "ylabel": "y", "caption": "a CPU, 2026"}
    figure = class_plot([1, 2, 4], {"naive": ("naive", points)}, **words)
    assert figure.get_supxlabel() == words["caption"]
    save_slide(figure, tmp_path / "s.png")
    assert figure.get_supxlabel() == "" and width_of(tmp_path / "s.png") == SLIDE_PIXELS
    assert not overlapping_texts(figure)


@pytest.mark.filterwarnings("error:.*found in sys.modules")
def test_one_lesson_gives_its_pictures_and_its_records(tmp_path, capsys):
    import lessons.l12_paged_kv.lab.pictures  # noqa: F401  # which imports those of lesson 10

    committed = ROOT / "lessons/l10_flash_decoding/lab/occupancy.svg"
    before = committed.stat().st_mtime_ns
    assert slides.main(["--lesson", "10", "--out", str(tmp_path)]) == 0
    written = {path.stem for path in tmp_path.glob("*.png")}
    shown = re.findall(r'<img src="(.+?)\.png" alt="(.+?)" data-part="10"', text_of(tmp_path))
    assert {name for name, _ in shown} == written and len(shown) == len(written)
    names, said = zip(*shown)
    assert names[:2] == ("l10_0_opening", "l10_0_question") and "You will be able to" in said[0]
    assert names[-2:] == ("l10_9_answer", "l10_9_exercise")
    pages = re.search(rb"/Count (\d+)", (tmp_path / "slides.pdf").read_bytes())
    assert int(pages[1]) == len(written)
    pictures = {f"l10_flash_decoding_{name}" for name in ("occupancy", "predicted")}
    records = {f"cpu_{path.stem}" for path in (ROOT / "results/cpu").glob("l10_*.json")}
    assert written >= pictures | records
    assert f"{len(written)} slides in" in capsys.readouterr().out
    assert committed.stat().st_mtime_ns == before, "a slide is no picture of the lesson"


@pytest.mark.parametrize("room", slides.rooms(), ids=lambda room: room.name)
@pytest.mark.sample(4, of="pictures")
def test_every_picture_of_a_room_is_a_slide(room, tmp_path):
    wanted = {path.stem for path in room.rglob("*.svg")}
    if room.name.startswith("l00") and not has_triton():
        wanted -= {"instructions", "banks"}  # which compiled code draws
    with Deck(tmp_path) as deck, contextlib.suppress(ValueError):
        slides.draw_pictures(room, deck)
    drawn = [slide.file.removeprefix(f"{room.name}_").removesuffix(".png") for slide in deck.slides]
    assert sorted(drawn) == sorted(wanted)


def test_no_picture_shows_the_formula_of_a_number():
    """As a logarithmic axis does whose numbers are Matplotlib's own: use log_axis."""
    pictures = committed_files(ROOT, ".svg")
    assert len(pictures) > 150
    for picture in pictures:
        assert "mathdefault" not in picture.read_text(encoding="utf-8"), picture


def text_of(out: Path) -> str:
    """The page of a deck."""
    return (out / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("lesson", numbers())
def test_words_fit_on_their_slides(lesson):
    asked = first_question(lesson)
    assert asked.answer and len(aims_of(lesson)) == 3
    assert asked.answer not in asked.question or asked.answer == "No."
    aims = ["You will be able to", *aims_of(lesson)]
    for title, lines in (
        (title_of(lesson), aims),
        ("Write down your guess", [asked.question]),
        (asked.question, [asked.answer]),
        ("Your turn", [plan_of(lesson)["Exercise"]]),
    ):
        figure = words(title, lines)
        assert not texts_outside(figure) and not overlapping_texts(figure), title
        assert min(text.get_size() for text in figure.texts) >= 20


def test_a_slide_of_too_many_words_is_seen():
    assert texts_outside(words("t", ["word " * 900]))


def test_a_title_cannot_write_into_the_page(tmp_path):
    with Deck(tmp_path) as deck:
        deck.add_words("a", '<script>"x"', ["y"])
    assert "&lt;script&gt;&quot;x&quot;" in text_of(tmp_path)
    assert page([]).count("<script>") == 1


def test_every_room_and_every_record_is_tried():
    names = {name for name, _ in slides.works_of(None)}
    assert {room.name for room in slides.rooms()} < names
    assert {"architecture", "cpu/ladder", "cpu/l04_extrapolation", "cpu/l05_quality"} < names


@pytest.mark.parametrize("stem", ["ladder", "l04_extrapolation", "l05_quality"])
def test_records_of_other_shapes_are_drawn_too(stem, tmp_path):
    with Deck(tmp_path) as deck:
        assert slides.draw_record(ROOT / f"results/cpu/{stem}.json", deck) == 1


def test_the_engine_is_a_slide(tmp_path):
    with Deck(tmp_path) as deck:
        assert slides.draw_engine(deck) == 1
    assert width_of(tmp_path / "architecture.png") == SLIDE_PIXELS


def test_an_unknown_lesson_is_refused_in_one_line(tmp_path, capsys):
    assert slides.main(["--lesson", "99", "--out", str(tmp_path)]) == 2
    assert "got '99'; accepted: 00, 01" in capsys.readouterr().err


def test_pictures_go_to_the_disk_again_after_the_block():
    from lessons.toolbox.draw import figure

    with pictures_to(lambda fig, path: None):
        assert figure._taker.get()
    assert figure._taker.get() is None
