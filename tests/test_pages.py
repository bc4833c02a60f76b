"""The course's reference pages agree with themselves, with the code and with the numbers behind
them.
"""

import re
from functools import lru_cache
from pathlib import Path

from lessons.l01_roofline.calculators import kv_bytes_per_token
from lessons.l01_roofline.models import find_model
from lessons.toolbox.measure.hardware import CHIPS
from tests.link_rules import slug

REPOSITORY = Path(__file__).resolve().parents[1]
LESSONS = REPOSITORY / "lessons"
# "Lesson 7" alone, or as a link into the room of lesson 7
BEHIND_A_DEFINITION = re.compile(
    r" \*(?:\[Lesson (\d+)\]\(l(\d\d)_\w+/README\.md\)|Lesson (\d+))\*$"
)


def page(name: str) -> str:
    """A page beside the lessons."""
    return (LESSONS / name).read_text(encoding="utf-8")


def glossary() -> dict[str, str]:
    """{term: what stands under it}, in the order of the page."""
    entries = page("GLOSSARY.md").split("\n### ")[1:]
    return {term: body.strip() for term, _, body in (entry.partition("\n") for entry in entries)}


def rows(name: str, columns: int) -> list[list[str]]:
    """The cells of all tables of so many columns on a page, without heads and rules."""
    lines = [line for line in page(name).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    rules = {i for i, line in enumerate(lines) if re.fullmatch(r"\|[\s:|-]+\|", line)}
    return [
        row
        for i, row in enumerate(cells)
        if i not in rules and i + 1 not in rules and len(row) == columns
    ]


# ---------------------------------------------------------------- GLOSSARY.md


def test_the_glossary_is_in_order_and_no_term_stands_twice():
    terms = [re.sub(r"[^a-z0-9 ]", "", term.lower().replace("-", " ")) for term in glossary()]
    assert terms == sorted(terms)
    anchors = [slug(term) for term in re.findall(r"^### (.*)$", page("GLOSSARY.md"), re.MULTILINE)]
    assert len(anchors) == len(set(anchors)) > 100


def test_a_term_is_defined_in_a_few_sentences_and_names_its_lesson():
    for term, body in glossary().items():
        found = BEHIND_A_DEFINITION.search(body)
        assert found, f"{term}: the lesson is missing behind {body!r}"
        linked, room, _ = found.groups()
        assert room is None or int(room) == int(linked), f"{term}: the link leads to another lesson"
        sentences = re.findall(r"[.)](?= |$)", body[: found.start()])
        assert 1 <= len(sentences) <= 5 and "\n" not in body, f"{term}: {body}"


def test_the_numbers_of_the_glossary():
    text = page("GLOSSARY.md")
    h200, kib = CHIPS["h200"], 1024
    llama, deepseek = find_model("llama-3-8b"), find_model("deepseek-v3")
    assert f"{kv_bytes_per_token(llama) / kib:.0f} KiB a token" in glossary()["KV cache"]
    assert f"{kv_bytes_per_token(deepseek) / kib:.1f} KiB a token" in glossary()["MLA"]
    assert f"An H200 has {h200.sm_count}." in glossary()["SM"]
    assert f"{h200.memory_bytes / 1e9:.0f} GB on an H200" in glossary()["HBM"]
    assert f"{h200.memory_bytes_per_s / 1e12:.1f} TB/s by its data sheet" in text
    ridge = h200.bf16_flops_per_s / h200.memory_bytes_per_s
    assert f"{ridge:.0f} FLOP/byte on an H200" in glossary()["ridge"]
    times = h200.bf16_flops_per_s / h200.fp32_flops_per_s
    assert f"about {times:.0f} times" in glossary()["matrix unit"]
    assert f"up to {h200.shared_memory_bytes // kib} KiB for a block" in glossary()["shared memory"]
    under_way_mb = h200.memory_bytes_per_s * 1e-6 / 1e6
    assert f"{under_way_mb:.1f} MB must be under way" in glossary()["Little's law"]


# ---------------------------------------------------------------- NOTATION.md


def symbols() -> list[list[str]]:
    """Rows of NOTATION.md: symbol, meaning, unit or shape, names in code, lesson."""
    return rows("NOTATION.md", columns=5)


def test_a_symbol_has_one_meaning():
    names = [name.strip() for row in symbols() for name in row[0].split(",")]
    assert len(names) == len(set(names)) > 30


@lru_cache(maxsize=1)
def identifiers() -> set[str]:
    """Every name in the code of the lessons and of the engine."""
    files = [*LESSONS.rglob("*.py"), *(REPOSITORY / "reference").rglob("*.py")]
    return {name for file in files for name in re.findall(r"\w+", file.read_text("utf-8"))}


def test_a_symbol_names_the_code_and_the_lesson():
    for symbol, _, _, in_code, lesson in symbols():
        (number, room) = re.fullmatch(r"\[(\d+)\]\(l(\d\d)_\w+/README\.md\)", lesson).groups()
        assert int(number) == int(room), symbol
        names = re.findall(r"`(\w+)`", in_code)
        assert names, f"{symbol}: no name in code"
        for name in names:
            assert is_in_code(name), f"{symbol}: no code has {name}"


def is_in_code(name: str) -> bool:
    """Whether the code has such a name, or one with such an ending (`_ms`)."""
    return any(
        known == name or (name[0] == "_" and known.endswith(name)) for known in identifiers()
    )
