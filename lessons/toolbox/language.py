"""What the course prints for a learner, in the learner's language.

    INFERENCE_LADDER_LANG=ko make check LESSON=02

The code speaks English. Where it prints a line, `said` looks the line up in the catalogues of
ko/messages/, which are gettext's .po files. A msgid may have places, {1} and {2}, where the code
puts values: "{1} has shape {2}, expected {3}" fits "your result has shape [2], expected [3]", and
what is in a place is looked up, too. So checks and hints compare English lines whatever the
language, and a line without a translation stays English. `python -m tests.exercises.messages` lists
what a catalogue lacks, and what no line of the code says any more.
"""

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "en"
# the first one that is set counts: ours, then those by which gettext chooses
VARIABLES = "INFERENCE_LADDER_LANG", "LC_ALL", "LC_MESSAGES", "LANG"
PLACE = re.compile(r"\{(\d+)\}")
SHORT = 4  # letters
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def language() -> str:
    """ "ko", or "en" where there are no catalogues of the language that was chosen."""
    chosen = next((value for name in VARIABLES if (value := os.environ.get(name))), "")[:2].lower()
    return chosen if chosen.isalpha() and catalogues_of(chosen).is_dir() else SOURCE


def catalogues_of(code: str) -> Path:
    return ROOT / code / "messages"


def said(text: str, more: Mapping[str, str] | None = None) -> str:
    """An English line in the learner's language, or as it is. more: other lines, translated."""
    code = language()
    return text if code == SOURCE else catalogue(code).said(text, more or {})[0]


# ---------------------------------------------------------------- catalogues


@dataclass(frozen=True)
class Message:
    """An entry of a .po file."""

    english: str
    translated: str
    is_fuzzy: bool = False  # gettext's word: made for another sentence, and not looked at since


@dataclass(frozen=True)
class Catalogue:
    lines: dict[str, str]
    patterns: list[tuple[re.Pattern, int, str]]  # of a line with places: also its letters

    def said(self, text: str, more: Mapping[str, str], depth: int = 0) -> tuple[str, int]:
        """A line translated, and how many of its letters were: "hint: {1}" and "{1} of dimension
        {2}" may both fit, and what explains more of a line counts, then what parts it at a colon,
        then what explains more by itself, then what ends later. A place within a place within a
        place of a place stays English.
        """
        if found := more.get(text) or self.lines.get(text):
            return found, _letters(text)
        best, most = text, (0, False, 0, 0)
        for pattern, letters, translated in self.patterns if depth < 4 else ():
            if found := pattern.fullmatch(text):
                places = found.groupdict()
                inside = {name: self.said(places[name], more, depth + 1) for name in places}
                total = letters + sum(count for _, count in inside.values())
                last = found.start(len(places))
                score = total, text[:last].endswith(": "), letters, last
                if score > most:
                    best, most = _filled(translated, inside), score
        return best, most[0]


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))


def _filled(text: str, inside: Mapping[str, tuple[str, int]]) -> str:
    return PLACE.sub(lambda place: inside[f"p{place[1]}"][0], text)


@cache
def catalogue(code: str) -> Catalogue:
    """All catalogues of a language as one."""
    paths = sorted(catalogues_of(code).glob("*.po"))
    found = [message for path in paths for message in read_po(path.read_text(encoding="utf-8"))]
    return catalogue_of(
        [message for message in found if message.translated and not message.is_fuzzy]
    )


def catalogue_of(messages: Iterable[Message]) -> Catalogue:
    lines = {message.english: message.translated for message in messages}
    places = [english for english in lines if PLACE.search(english)]
    patterns = [(_pattern(english), _letters(english), lines.pop(english)) for english in places]
    return Catalogue(lines, patterns)


def _pattern(english: str) -> re.Pattern:
    """What fits an English line with places; its groups are p1, p2 and so on. Where one word is all
    that is said, as in "{1} of {2}", the places are for numbers.
    """
    value = r"\d*" if 0 < _letters(english) < SHORT else ".*?"
    *pairs, last = zip_longest(*[iter(PLACE.split(english))] * 2)
    text, known = "", set()
    for literal, place in pairs:
        group = f"(?P=p{place})" if place in known else f"(?P<p{place}>{value})"
        text += re.escape(literal) + group
        known.add(place)
    return re.compile(text + re.escape(last[0]), re.DOTALL)


def read_po(text: str) -> Iterator[Message]:
    """The entries of a .po file but its header. Raises ValueError for a line of another form."""
    for block in re.split(r"\n\s*\n", text):
        parts, at, is_fuzzy = {"msgid": "", "msgstr": ""}, "", False
        for line in filter(None, map(str.strip, block.splitlines())):
            word, _, rest = line.partition(" ")
            if line.startswith("#"):
                is_fuzzy |= line.startswith("#,") and "fuzzy" in line
                continue
            if word in parts:
                at, line = word, rest
            if not at or not STRING.fullmatch(line):
                raise ValueError(f"line: got {line!r}; accepted: msgid, msgstr or a string")
            parts[at] += ast.literal_eval(line)
        if parts["msgid"]:
            yield Message(parts["msgid"], parts["msgstr"], is_fuzzy)
