"""How a lesson's text reads, measured: a core that one evening is enough for, sentences of a length
that one takes in at once, no rows of fragments, and the glossary linked where a lesson introduces a
term.

A measure is no proof: a good text may break one for a reason. So the course warns, in the long form
of the tests (`make test-all`). Only the length of the core is held.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from book.links import slug
from tests.course_rules import Complaints, complete_rooms
from tests.link_rules import HIDDEN

# Of a README, as it is read: folded hints and answers, code and formulas do not count.
CORE_WORDS = 1800
FOLD = re.compile(r"<details>(?:(?!<details>).)*?</details>", re.DOTALL)
MEAN_WORDS = (12, 22)  # of a sentence
MOST_DOTS = 2  # "·" between words in a line of prose; between numbers it multiplies
DOT = re.compile(r"[A-Za-z`*)\]]{2} · ")
TERM = re.compile(r"^### (.*)\n.*\*\[?Lesson (\d+)", re.MULTILINE)
# what is no running text: headings, tables, formulas and diagrams, images, the line of times
NO_PROSE = re.compile(r"^(?:#+ .*|\|.*|    .*|!\[.*|Read \d.*)$", re.MULTILINE)


def hard_to_read(root: Path) -> Complaints:
    """Lessons whose measures are out of range."""
    terms = TERM.findall((root / "lessons/GLOSSARY.md").read_text(encoding="utf-8"))
    complaints = []
    for room in complete_rooms(root):
        text = (room / "README.md").read_text(encoding="utf-8")
        own = [term for term, lesson in terms if int(lesson) == int(room.name[1:3])]
        found = [*_sentences(text), *_fragments(text), *_unlinked(text, own)]
        complaints += [f"{room.name}/README.md: {why}" for why in found]
    return complaints


def long_cores(root: Path) -> Complaints:
    """Lessons whose README.md is no text for one evening."""
    complaints = []
    for room in complete_rooms(root):
        words = core_words(room)
        if words > CORE_WORDS:
            complaints.append(
                f"{room.name}/README.md: {words} words, at most {CORE_WORDS}; what is not needed "
                f"to go on belongs into MORE.md"
            )
    return complaints


def core_words(room: Path) -> int:
    """Words of a README that are read from top to bottom: headings, sentences and tables."""
    text = (room / "README.md").read_text(encoding="utf-8")
    folded = 1
    while folded:  # from the innermost fold outwards
        text, folded = FOLD.subn("", text)
    text = re.sub(r"<!--.*?-->|^```.*?^```|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return len(re.findall(r"[^\s|]*\w[^\s|]*", text))


def prose(text: str) -> str:
    """The running text of a README: no code, formula, table, heading or image."""
    text = re.sub(NO_PROSE, "", re.sub(HIDDEN, "x", text))
    # a tag begins with a letter: `at < n` does not
    return re.sub(r"</?[a-z][^>\n]*>", " ", text)


def mean_words(text: str) -> float:
    """Words of a sentence in the mean. A link counts by its label."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose(text))
    sentences = [s.split() for s in re.split(r"(?<=[.?!:])\s+|\n\s*\n", plain)]
    lengths = [len(words) for words in sentences if len(words) > 2]
    return sum(lengths) / max(1, len(lengths))


def _sentences(text: str) -> Iterator[str]:
    mean, (least, most) = mean_words(text), MEAN_WORDS
    if not least <= mean <= most:
        yield f"a sentence has {mean:.1f} words in the mean, not {least} to {most}"


def _fragments(text: str) -> Iterator[str]:
    for line in prose(text.partition("\nSources: ")[0]).splitlines():
        if len(DOT.findall(line)) > MOST_DOTS:
            yield f"a row of fragments: {line[:60]!r}"


def _unlinked(text: str, terms: list[str]) -> Iterator[str]:
    # the goals promise terms, the text after them defines them
    plain = prose(re.sub(r"## You will be able to\n.*?(?=\n## |\Z)", "", text, flags=re.DOTALL))
    plain = re.sub(r"^\*\*Step [^*\[]*\*\*", "", plain, flags=re.MULTILINE)  # a heading, too
    for term in terms:
        link = plain.find(f"GLOSSARY.md#{slug(term)})")
        used = re.search(rf"(?i)\b{re.escape(term)}s?\b", plain)
        if used and link < 0:
            yield f"{term!r} is not linked to the glossary"
        elif used and used.start() < plain.rfind("[", 0, link):
            yield f"{term!r} is used before it is linked to the glossary"
