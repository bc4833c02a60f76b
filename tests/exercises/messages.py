"""What the catalogues of ko/messages/ translate: the English lines, found in the code.

    python -m tests.exercises.messages           # what is missing and what is stale
    python -m tests.exercises.messages blank 04  # entries to translate, for ko/messages/l04.po

A value in an f-string is a place, {1} or {2}, in the order of the English line. Nothing in the code
says that a string is for a learner, so a catalogue may translate any string of its files. What it
is missed to translate is narrower: why a case exists, the hint of a wrong answer, and the message
of an assert; of the toolbox, what passes through `said`, and the hints of hint_rules.py. A line of
places alone has nothing to translate.
"""

import argparse
import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from lessons.toolbox.exercises.exercise import ROOT, all_exercises
from lessons.toolbox.exercises.progress import LOOKS
from lessons.toolbox.language import PLACE, Message, catalogues_of, read_po
from tests.exercises import hint_rules
from tests.exercises.running import checks_of
from tests.exercises.wrong import answers_of

KOREAN = catalogues_of("ko")
TOOLBOX = "toolbox"  # the catalogue of what no lesson says by itself
OF_TOOLBOX = (
    "lessons/toolbox/command.py",
    "lessons/toolbox/exercises/*.py",
    "tests/exercises/[cghkr]*.py",
)
OF_LESSON = "tests/exercises/*_l{0}*.py", "tests/exercises/wrong/l{0}*.py"


def messages_of(name: str) -> list[Message]:
    """The entries of a catalogue, [] if there is none. name: "toolbox" or "l02"."""
    path = KOREAN / f"{name}.po"
    return list(read_po(path.read_text(encoding="utf-8"))) if path.is_file() else []


def names() -> list[str]:
    """The catalogues that there could be."""
    return [TOOLBOX, *dict.fromkeys(f"l{entry.lesson}" for entry in all_exercises())]


# ---------------------------------------------------------------- in the code


def files_of(name: str) -> list[Path]:
    """Where the lines of a catalogue are."""
    patterns = OF_TOOLBOX if name == TOOLBOX else [each.format(name[1:]) for each in OF_LESSON]
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def template(node: ast.expr) -> str | None:
    """A string of the code with places for its values; None for what is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    text, places = "", 0
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += part.value
        else:
            places += 1
            text += f"{{{places}}}"
    return text


def strings_of(name: str) -> set[str]:
    """Every line that a catalogue may translate."""
    found = set(LOOKS)
    for path in files_of(name):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {text for node in ast.walk(tree) if (text := template(node))}
    return found | set(wanted(name))


@cache
def wanted(name: str) -> list[str]:
    """Every line that a catalogue should translate, in the order of the code."""
    if name == TOOLBOX:
        rules = (hint_rules.BROKEN_RULES, hint_rules.WRONG_DTYPE, hint_rules.OWN_REFUSAL)
        said = [hint for group in (*rules, hint_rules.EXCEPTIONS) for _, hint in group]
        calls = (call for path in files_of(name) for call in _calls_of_said(path))
        said += [text for call in calls if (text := template(call.args[0]))]
        return with_words([*LOOKS, *said])
    entries = all_exercises(name)
    said = [check.why for entry in entries for check in checks_of(entry) if check.why]
    said += [text for path in files_of(name) for text in _asserted(path)]
    answers = answers_of(name[1:])
    said += [answer.hint for entry in entries for answer in answers.wrong_for(entry.id)]
    return with_words(said)


def with_words(lines: list[str]) -> list[str]:
    """Each line once, without those that are places alone."""
    return [line for line in dict.fromkeys(lines) if re.search(r"[^\W\d_]", PLACE.sub("", line))]


def _calls_of_said(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "said" and node.args:
            yield node


def _asserted(path: Path) -> Iterator[str]:
    """What the asserts of a file say."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        said = node.msg if isinstance(node, ast.Assert) else None
        if said is not None and (text := template(said)):
            yield text


# ---------------------------------------------------------------- the command


def missing(name: str) -> list[str]:
    """Lines that a catalogue does not translate yet."""
    there = {message.english for message in messages_of(name) if message.translated}
    return [text for text in wanted(name) if text not in there]


def stale(name: str) -> list[str]:
    """Lines of a catalogue that the code does not say any more, or that were not looked at since
    they changed.
    """
    there, messages = strings_of(name), messages_of(name)
    return [m.english for m in messages if m.english not in there or m.is_fuzzy]


def entry_of(message: Message) -> str:
    """As it is written in a .po file."""
    said = (json.dumps(text, ensure_ascii=False) for text in (message.english, message.translated))
    return "msgid {}\nmsgstr {}\n".format(*said)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.exercises.messages", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["list", "blank"], default="list")
    parser.add_argument("lesson", nargs="?", help="of blank: 04; without it the toolbox's")
    options = parser.parse_args()
    if options.command == "blank":
        name = f"l{options.lesson}" if options.lesson else TOOLBOX
        print("\n".join(entry_of(Message(text, "")) for text in missing(name)))
        return
    for name in names():
        for text in stale(name):
            print(f"{name}: stale: {text}")
        if lines := missing(name):
            print(f"{name}: {len(lines)} of {len(wanted(name))} lines are not translated")


if __name__ == "__main__":
    main()
