"""Whether two pages say the same, as far as a program can see: two languages share their headings'
levels, code, numbers, links, pictures and tables.

A section, from one heading to the next, is compared with the section of the same number, because
the order of words within a sentence is no matter of truth.
"""

import calendar
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from book.links import LINK

Complaints = list[str]
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
TAG = re.compile(r"</?[a-z][^>\n]*>")
ALT = re.compile(r'(?<=alt=")[^"\n]*')  # the words for a picture in HTML, which are translated
NUMBER = re.compile(r"[0-9]+(?:[.,][0-9]+)*")
# numbers that English writes as words, and that another language may write as digits
UP_TO_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
)
WORDS = {word: str(number) for number, word in enumerate(UP_TO_TWENTY.split())}
WORDS |= {"zeros": "0", "twice": "2", "fifty": "50", "hundred": "100", "thousand": "1000"}
WORDS |= {name.lower(): str(number) for number, name in enumerate(calendar.month_name) if number}
HEADING = re.compile(r"^(#+) .*$", re.MULTILINE)


def differences(source: str, page: str) -> Complaints:
    """source, page: Markdown whose links have been made comparable -> what differs."""
    if FENCE.findall(source) != FENCE.findall(page):
        return [_first("code", FENCE.findall(source), FENCE.findall(page))]
    source, page = FENCE.sub("", source), FENCE.sub("", page)
    levels = [[len(found) for found in HEADING.findall(text)] for text in (source, page)]
    if levels[0] != levels[1]:
        return [f"levels of headings: {levels[0]} in the source, {levels[1]} here"]
    found = []
    for theirs, ours in zip(sections(source), sections(page)):
        name = ours.splitlines()[0] if ours.startswith("#") else "before the first heading"
        found += [f"{name}: {why}" for why in _section(theirs, ours)]
    return found


def sections(text: str) -> list[str]:
    """A page cut before each of its headings."""
    starts = [0, *(found.start() for found in HEADING.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(starts)]


def _section(source: str, page: str) -> Iterator[str]:
    source, page = ALT.sub("", source), ALT.sub("", page)
    for what, pattern in (("comment", COMMENT), ("code", CODE), ("tag", TAG)):
        yield from _counts(what, pattern.findall(source), pattern.findall(page))
        source, page = pattern.sub(" ", source), pattern.sub(" ", page)
    yield from _counts("link", _targets(source), _targets(page))
    source, page = LINK.sub(r"\g<label>", source), LINK.sub(r"\g<label>", page)
    yield from _numbers("number", source, page)
    theirs, ours = _rows(source), _rows(page)
    if [_shape(row) for row in theirs] != [_shape(row) for row in ours]:
        yield f"rows of tables: {len(theirs)} in the source, {len(ours)} here, or other cells"
        return
    for number, (their, our) in enumerate(zip(theirs, ours)):
        yield from _numbers(f"row {number + 1}: number", their, our)


def _targets(text: str) -> list[str]:
    return [f"{found['bang']}({found['target']})" for found in LINK.finditer(text)]


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def _shape(row: str) -> tuple[int, bool]:
    """Its cells, and whether it is the line below a head."""
    return row.count("|"), not row.strip("|-: ")


def _numbers(what: str, source: str, page: str) -> Iterator[str]:
    theirs, ours = NUMBER.findall(source), Counter(NUMBER.findall(page))
    words = Counter(WORDS.get(word) for word in re.findall(r"[a-z]+", source.lower()))
    surplus = ours - Counter(theirs)
    yield from _counts(what, theirs, list((ours - (surplus & words)).elements()))


def _counts(what: str, theirs: list[str], ours: list[str]) -> Iterator[str]:
    lacking, added = Counter(theirs) - Counter(ours), Counter(ours) - Counter(theirs)
    yield from (f"{what} {text!r} is in the source alone" for text in lacking)
    yield from (f"{what} {text!r} is here alone" for text in added)


def _first(what: str, theirs: list, ours: list) -> str:
    """Which entry of two lists that differ is the first to differ."""
    if len(theirs) != len(ours):
        return f"{what}: {len(theirs)} in the source, {len(ours)} here"
    place = next(i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b)
    return f"{what} {place + 1}: {theirs[place]!r} in the source, {ours[place]!r} here"
