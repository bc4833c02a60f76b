"""What an exercise consists of: the function that it decorates, and helpers that have its gaps."""

import ast
import re
from functools import cache

from lessons.toolbox.exercises.exercise import ROOT, SOLUTIONS, Exercise, generate, untouched_line
from lessons.toolbox.language import SOURCE

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def stub_of(entry: Exercise) -> str:
    """The code of an exercise as the learner gets it: the definitions that have its gaps."""
    text = generate(SOLUTIONS / entry.file)
    return "\n\n\n".join(undecorated(text, node) for node in parts_of(text, entry))


def hints_of(entry: Exercise, language: str = SOURCE) -> list[str]:
    """The three hints that the lesson's README folds under an exercise; [] if there is no README in
    that language.
    """
    fold = _fold(entry, language)
    hint = r"<summary>(?:Hint|힌트) \d[^<]*</summary>\s*(.*?)\s*</details>"
    return re.findall(hint, fold, re.S)[:3]


def title_of(entry: Exercise, language: str = SOURCE) -> str:
    """An exercise's title as the README of a language has it, or in English."""
    title, found, _ = _fold(entry, language).partition("</b>")
    return title if found else entry.title


def _fold(entry: Exercise, language: str) -> str:
    """A lesson's README from an exercise on, "" if there is none in a language."""
    folder = ROOT / "lessons" if language == SOURCE else ROOT / language / "lessons"
    for readme in folder.glob(f"l{entry.lesson}_*/README.md"):
        text = readme.read_text(encoding="utf-8")
        return text.partition(f"<details><summary><b>{entry.id} ")[2]
    return ""


@cache
def names_of(entry: Exercise) -> list[str]:
    """The definitions that an exercise asks for."""
    return [node.name for node in parts_of(generate(SOLUTIONS / entry.file), entry)]


def parts_of(text: str, entry: Exercise) -> list[Definition]:
    """Of a generated file: what has an exercise's gaps, and what it decorates."""
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, Definition) and (
            node.name == entry.name or untouched_line(source_of(text, node), entry.id)
        ):
            found.append(node)
    return found


def first_line(node: ast.stmt) -> int:
    """Its first line, with decorators."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def source_of(text: str, node: ast.stmt) -> str:
    return "\n".join(text.splitlines()[first_line(node) - 1 : node.end_lineno])


def undecorated(text: str, node: Definition) -> str:
    """Without `@exercise(...)`, which stays in the file."""
    lines = text.splitlines()
    marks = [d for d in node.decorator_list if is_mark(d)]
    dropped = {n for mark in marks for n in range(mark.lineno, mark.end_lineno + 1)}
    kept = [n for n in range(first_line(node), node.end_lineno + 1) if n not in dropped]
    return "\n".join(lines[n - 1] for n in kept)


def is_mark(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "exercise"
