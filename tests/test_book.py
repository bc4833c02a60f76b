"""The sources of the book: every page is there, and every link of a page stays inside."""

import ast
import json
import re
from os.path import normpath
from pathlib import Path

import pytest

from book import api, code, glossary, head, order, search, translations
from book.links import LINK
from book.stage import FENCED, REPOSITORY, Stage, pages_of, stage
from tests.course_rules import committed_files, complete_rooms, within


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("book") / "source"
    stage(REPOSITORY, out)
    return out


def text_of(page: Path) -> str:
    """What is Markdown in it."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return FENCED.sub("", text)


def test_every_page_and_notebook_is_in_the_book(source):
    reports = "reference/bench/open_tasks/reports"
    for path in committed_files(REPOSITORY, ".md", ".ipynb"):
        name = within(REPOSITORY, path)
        if not name.startswith(("tests/", ".github/", translations.CELLS)):
            assert (source / order.staged(name)).is_file(), name
    assert (source / reports / "board.md").is_file()


def test_the_lessons_stand_as_the_front_page_has_them():
    chapters = order.lessons(REPOSITORY)
    rooms = {room.name for room in complete_rooms(REPOSITORY)}
    assert {chapter.page.split("/")[1] for chapter in chapters} == rooms
    front = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    places = [front.index(f"]({chapter.page})") for chapter in chapters]
    assert places == sorted(places)
    assert all(chapter.below[0].page.startswith("notebooks/") for chapter in chapters)


def test_a_lesson_leads_to_what_a_reader_can_move(source):
    for page in (REPOSITORY / "book/playground").glob("*.md"):
        for lesson in re.findall(r"lessons/l\w+/README.md", page.read_text(encoding="utf-8")):
            top = (source / lesson).read_text(encoding="utf-8").splitlines()[2]
            assert top.startswith("*Move it yourself") and f"playground/{page.name})" in top


def test_every_link_leads_to_a_file_of_the_book(source):
    count = 0
    for page in pages_of(source):
        if page.is_relative_to(source / "code") and page.name != "index.md":
            continue  # a file of code, which is no Markdown
        for found in LINK.finditer(text_of(page)):
            file = found["target"].partition("#")[0]
            target = normpath(page.parent / file)
            original = REPOSITORY / page.relative_to(source).parent / file
            is_here = not file  # an anchor of this page
            assert is_here or Path(target).is_file() or not original.exists(), f"{page}: {found[0]}"
            count += Path(target).is_file()
    assert count > 1000


def test_every_page_of_the_lists_is_there(source):
    for page in source.rglob("*.md"):
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            for line in tree.splitlines():
                if line and not line.startswith(":"):
                    name = re.sub(r"^.*<(.*)>$", r"\1", line)
                    found = [(page.parent / f"{name}{end}").is_file() for end in (".md", ".ipynb")]
                    assert any(found), f"{page}: {line}"


def test_a_link_to_code_shows_the_code_as_it_is(source):
    shown = list((source / "code").rglob("optimized.py"))
    assert len(shown) > 10
    for copy in shown:
        name = copy.relative_to(source / "code")
        assert copy.read_bytes() == (REPOSITORY / name).read_bytes()
        assert f"/code/{name}" in (source / code.file_page(str(name))).read_text("utf-8")


def test_links_to_a_folder_show_what_is_in_it(source):
    page = (source / "code/results/h200/index.md").read_text(encoding="utf-8")
    for path in (REPOSITORY / "results/h200").iterdir():
        assert path.name in page, path.name


def test_labels_of_code_are_links_and_code_is_none(tmp_path):
    page = Stage(REPOSITORY, tmp_path)
    text = "[`f`](lessons/__init__.py)\n```\n[x](lessons/__init__.py)\n```\n`a[i](lessons)`\n"
    text = page.relinked("README.md", text)
    assert text.startswith("[`f`](code/lessons/__init__.py.md)\n")
    assert "\n[x](lessons/__init__.py)\n" in text and page.files == {"lessons/__init__.py"}


def test_a_folder_with_other_files_is_not_emptied(tmp_path):
    (tmp_path / "mine.md").write_text("work")
    with pytest.raises(ValueError, match="accepted: a new folder, or one with an earlier book"):
        stage(REPOSITORY, tmp_path)
    assert (tmp_path / "mine.md").read_text() == "work"


def test_the_moving_picture_is_in_the_book(source):
    front = (source / "index.md").read_text(encoding="utf-8")
    assert "<picture>" not in front and "](reference/trace/film/film.svg)" in front
    assert (source / "reference/trace/film/film.svg").is_file()


def test_an_anchor_stays_behind_its_page(tmp_path):
    page = Stage(REPOSITORY, tmp_path)
    text = "[a](../README.md#the-engine) [b](#here) [c](GLOSSARY.md#token)"
    said = "[a](../index.md#the-engine) [b](#here) [c](GLOSSARY.md#token)"
    assert page.relinked("lessons/TEACHING.md", text) == said


def test_a_term_is_defined_in_plain_words():
    terms = glossary.definitions(REPOSITORY)
    page = (REPOSITORY / "lessons/GLOSSARY.md").read_text(encoding="utf-8")
    assert len(terms) == page.count("\n### ")
    for anchor, said in terms.items():
        assert said and not re.search(r"\]\(|\*\[|`|Lesson \d+\*$", said), (anchor, said)
    linked = set()
    for path in committed_files(REPOSITORY, ".md"):
        linked |= set(re.findall(r"GLOSSARY\.md#([^)\s]+)", path.read_text(encoding="utf-8")))
    assert linked <= terms.keys()


def test_a_page_has_the_definitions_of_its_language(source):
    for language, page in (("en", "lessons/GLOSSARY.md"), ("ko", "ko/lessons/GLOSSARY.md")):
        script = (source / f"_static/glossary-{language}.js").read_text(encoding="utf-8")
        said = json.loads(script.removeprefix("window.GLOSSARY = ").removesuffix(";\n"))
        assert said == glossary.definitions(REPOSITORY, page)


# ---------------------------------------------------------------- the search

INDEX = {
    "docnames": ["ko/lessons/GLOSSARY", "index", "README.ko", "lessons/GLOSSARY"],
    "filenames": ["ko/lessons/GLOSSARY.md", "index.md", "README.ko.md", "lessons/GLOSSARY.md"],
    "titles": ["용어", "The Inference Ladder", "추론 사다리", "Glossary"],
    "terms": {"cach": [0, 1, 3], "캐시": [0, 2], "token": 3, "triton": 1, "글": 2},
    "titleterms": {"glossari": 3, "용어": 0},
    "alltitles": {"Token": [[0, "token"], [3, "token"]], "용어": [[0, None]]},
    "envversion": {"sphinx": 66},
}


def test_the_index_of_the_search_is_one_for_each_language(tmp_path):
    (tmp_path / search.WHOLE).write_text(f"Search.setIndex({json.dumps(INDEX)})")
    search.split(tmp_path)
    found = {}
    for language in search.LANGUAGES:
        script = (tmp_path / f"searchindex-{language}.js").read_text(encoding="utf-8")
        found[language] = json.loads(script.removeprefix("Search.setIndex(").removesuffix(")"))
    assert found["en"] == {
        "docnames": ["index", "lessons/GLOSSARY"],
        "filenames": ["index.md", "lessons/GLOSSARY.md"],
        "titles": ["The Inference Ladder", "Glossary"],
        "terms": {"cach": [0, 1], "token": 1, "triton": 0},
        "titleterms": {"glossari": 1},
        "alltitles": {"Token": [[1, "token"]]},
        "envversion": {"sphinx": 66},
    }
    assert found["ko"]["docnames"] == ["ko/lessons/GLOSSARY", "README.ko"]
    assert found["ko"]["terms"] == {"cach": 0, "캐시": [0, 1], "글": 1}
    assert found["ko"]["alltitles"] == {"Token": [[0, "token"]], "용어": [[0, None]]}


def test_the_language_of_a_page_is_told_by_its_place():
    for page in translations.translated(REPOSITORY):
        assert search.language_of(order.staged(page).removesuffix(".md")) == "ko"
    for page in ("index", "lessons/GLOSSARY", "notebooks/00_gpu_and_triton", "korea"):
        assert search.language_of(page) == "en"
    assert search.language_of("ko/notebooks/00_gpu_and_triton") == "ko"


# ---------------------------------------------------------------- the interface


def test_the_interface_names_what_is_public(source):
    page = (source / "api.md").read_text(encoding="utf-8")
    for name in ("LLM", "LLM.generate", "SamplingParams", "EngineArgs", "AsyncLLMEngine"):
        assert f"### {name}\n" in page, name
    assert "#### LLM._" not in page and "temperature: float" in page


def test_a_signature_says_every_argument():
    source = (
        "@wrapped\nasync def f(\n    a: dict[str, int], *, b: str = ', (', **c\n) -> int:\n    pass"
    )
    node = ast.parse(source).body[0]
    assert api.signature(node, source.splitlines()) == source.splitlines()[:-1]


def test_a_class_shows_its_fields_or_what_it_takes():
    fields = "class A:\n    x: int = 1  # tokens\n    y: str"
    node = ast.parse(fields).body[0]
    assert api.signature(node, fields.splitlines()) == fields.splitlines()
    taken = (
        'class B:\n    """b"""\n    x: int\n\n    def __init__(self, x: int):\n        self.x = x'
    )
    (node,) = ast.parse(taken).body
    shown = ["class B:", "", "    def __init__(self, x: int):"]
    assert api.signature(node, taken.splitlines()) == shown


def test_a_docstring_keeps_its_shapes_and_its_code():
    lines = api.prose("x: [B, H] of a*b, as `f(a_b)`.\n\n    call(x)\n    again\n\nEnd.")
    assert lines == [
        r"x: \[B, H\] of a\*b, as `f(a_b)`.",
        "",
        "```text",
        "call(x)",
        "again",
        "```",
        "",
        "End.",
        "",
    ]


def test_pictures_of_a_page_tell_their_sizes_and_the_lower_ones_wait(tmp_path):
    wide, unsized = tmp_path / "wide.svg", tmp_path / "none.svg"
    wide.write_text('<?xml?><svg version="1" height="60pt" stroke-width="9" width="300pt">')
    unsized.write_text('<svg viewBox="0 0 4 3"><rect width="7" height="9"/></svg>')
    assert head.size_of(wide) == (400, 80) and head.size_of(unsized) is None
    assert head.size_of(REPOSITORY / "book/playground/roofline.png")[0] > 500
    body = '<p><img alt="a &gt; b" src="../_images/w.svg" /> <img src="_images/n.svg"></p>'
    assert head.with_sizes(body, {"w.svg": wide, "n.svg": unsized}) == (
        '<p><img alt="a &gt; b" src="../_images/w.svg" width="400" height="80"> '
        '<img src="_images/n.svg" loading="lazy"></p>'
    )


def test_a_page_is_described_by_its_first_words_that_say_something():
    words = "Every  step\nreads all weights, so one more sequence of a batch is nearly free."
    said = " ".join(words.split())
    facts = "Read 20 min · code 140 min · plot 20 min · CPU ok · needs lessons 2, 3 and 8"
    assert head.description(["Short.", facts, words, "x" * 99]) == said
    cut = head.description([" ".join([said] * 3)])
    assert cut.endswith(" …") and said in cut and len(cut) <= 162
    assert head.description(["Short."]) == ""
