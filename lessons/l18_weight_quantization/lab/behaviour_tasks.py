"""Five tasks whose answer a program can judge: right or wrong, without another model's opinion.

Each task makes items from Python's own modules that the embedded models never saw, or from a few
words. An item is a prompt and a judge of what a model writes after it. Where an item is made from a
module, what the module says next would be right, but it is not asked for: any answer that keeps the
rule is.

    brackets    every bracket that the prompt leaves open is closed, in the right order
    literals    a list or dictionary that was begun is finished, and Python reads it
    copies      a name from far above is written out again
    own names   the next statement of a function names nothing that does not exist
    syntax      a function goes on for 32 tokens without a mistake that Python refuses
"""

import ast
import builtins
import codeop
import io
import keyword
import random
import re
import textwrap
import tokenize
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from lessons.toolbox.model.corpus import corpus

CLOSES = {"(": ")", "[": "]", "{": "}"}
ITEMS = 24  # of each task
BEFORE = 600  # characters of a module before the place that is asked about
LINES_BETWEEN = (4, 16, 48)  # lines of other code between a name and its copy


@dataclass(frozen=True)
class Item:
    """prompt: what the model reads; judge(text): whether what it writes next is right."""

    task: str
    prompt: str
    judge: Callable[[str], bool]


def items(count: int = ITEMS) -> list[Item]:
    """`count` items of each task, the same in every call."""
    sources = corpus()[1]
    found = [*brackets(sources, count), *literals(count), *copies(sources, count)]
    return [*found, *own_names(sources, count), *syntax(sources, count)]


def spread(found: list, count: int) -> list:
    """`count` of a list, evenly spread over it."""
    return [found[index * len(found) // count] for index in range(count)]


# ---------------------------------------------------------------- brackets


def closes(opened: str, text: str) -> bool:
    """Whether `text` closes every bracket of `opened`, innermost last, and none in a wrong order.
    What is between quotes does not count; a text that ends before the last is closed is wrong.
    """
    stack, quote = list(opened), None
    for character in text:
        if quote:
            quote = None if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in CLOSES:
            stack.append(character)
        elif character in CLOSES.values():
            if CLOSES[stack.pop()] != character:
                return False
            if not stack:
                return True
    return False


def brackets(sources: list[str], count: int) -> Iterator[Item]:
    """Places of the modules where two brackets or more are open, at the beginning of a token."""
    places = []
    for source in sources:
        stack = []
        starts = line_starts(source)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NAME and len(stack) > 1:
                places.append((source, starts[token.end[0] - 1] + token.end[1], "".join(stack)))
            if token.type == tokenize.OP and token.string in CLOSES:
                stack.append(token.string)
            elif token.type == tokenize.OP and token.string in CLOSES.values():
                stack.pop()
    for source, end, opened in spread(places, count):
        prompt = source[max(0, end - BEFORE) : end]
        yield Item("brackets", prompt, partial(closes, opened))


def line_starts(source: str) -> list[int]:
    """The place of each line's first character."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


# ---------------------------------------------------------------- literals

WORDS = ("name", "size", "path", "width", "text", "items", "index", "value", "count", "line")


def literals(count: int) -> Iterator[Item]:
    """A dictionary with a list in it, begun three times over, so that its form is clear."""
    chance = random.Random(18)
    for _ in range(count):
        keys = chance.sample(WORDS, 3)
        rows = [
            f'    {{"{keys[0]}": {chance.randrange(100)}, "{keys[1]}": ["{chance.choice(WORDS)}", '
            f'{chance.randrange(10)}], "{keys[2]}": None}},\n'
            for _ in range(3)
        ]
        begun = f'    {{"{keys[0]}": '
        prompt = "TABLE = [\n" + "".join(rows) + begun
        yield Item("literals", prompt, partial(is_literal, begun))


def is_literal(begun: str, text: str) -> bool:
    """Whether the dictionary that `begun` opens is closed in `text`, and Python reads it."""
    for end, character in enumerate(text, 1):
        if character == "}":
            try:
                return isinstance(ast.literal_eval((begun + text[:end]).strip()), dict)
            except (ValueError, SyntaxError):
                continue
    return False


# ---------------------------------------------------------------- copies


def copies(sources: list[str], count: int) -> Iterator[Item]:
    """A name of two words is set, other code follows, and its first word is written again."""
    chance = random.Random(19)
    lines = [line for source in sources for line in source.splitlines() if line.strip()]
    for index in range(count):
        first, second = chance.sample(WORDS, 2)
        between = LINES_BETWEEN[index % len(LINES_BETWEEN)]
        start = chance.randrange(len(lines) - between)
        other = textwrap.dedent("\n".join(lines[start : start + between]))
        prompt = f"{first}_{second} = {chance.randrange(100)}\n{other}\nprint({first}_"
        yield Item("copies", prompt, partial(starts_with, second))


def starts_with(word: str, text: str) -> bool:
    """Whether a text begins with this word, and not with a longer one."""
    rest = text[len(word) :]
    return text.startswith(word) and not (rest[:1].isalnum() or rest[:1] == "_")


# ---------------------------------------------------------------- functions


def functions(sources: list[str]) -> list[tuple[str, str]]:
    """(what comes before it, its own text as far as the first statement) of every function of the
    modules that has parameters and more than a docstring, without its indent.
    """
    found = []
    for source in sources:
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or not node.args.args or node.col_offset:
                continue
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body and not node.decorator_list:
                first = body[0].lineno - 1
                head = "".join(lines[node.lineno - 1 : first])
                before = "".join(lines[: node.lineno - 1])[-BEFORE // 2 :]
                found.append((before, head))
    return found


def own_names(sources: list[str], count: int) -> Iterator[Item]:
    """The head of a function that has a docstring, and the indent of its first statement."""
    documented = [(before, head) for before, head in functions(sources) if '"""' in head]
    for before, head in spread(documented, count):
        prompt = before + head + "    "
        yield Item("own names", prompt, partial(names_exist, prompt))


def names_exist(seen: str, text: str) -> bool:
    """Whether the first line of `text` says something, and every name in it, other than one after
    a dot, before = or as a keyword argument, is in `seen` or is Python's own.
    """
    line = text.splitlines()[0] if text.strip() else ""
    known = words_of(seen) | set(dir(builtins)) | set(keyword.kwlist)
    tokens = words_and_signs(line.strip())
    if not tokens:
        return False
    for index, (before, token) in enumerate(zip(["", *tokens], tokens)):
        after = tokens[index + 1] if index + 1 < len(tokens) else ""
        is_new = after in ("=", ",", "in") and index < 6  # assigned here, or a target of `for`
        if token.isidentifier() and before != "." and token not in known and not is_new:
            return False
    return True


def words_of(text: str) -> set[str]:
    """The names that occur in a text, also in its comments and between its quotes."""
    return set(re.findall(r"[A-Za-z_]\w*", text))


def words_and_signs(text: str) -> list[str]:
    """Python's tokens of a line, as far as it can be cut into them; texts between quotes are left
    out.
    """
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
                found.append(token.string)
    except (tokenize.TokenError, IndentationError, SyntaxError):
        pass  # a line that ends within brackets
    return found


def syntax(sources: list[str], count: int) -> Iterator[Item]:
    """The same functions, another 24 of them where there are as many."""
    every = functions(sources)
    for before, head in spread(every[1:] + every[:1], count):
        head += "    "
        yield Item("syntax", before + head, partial(goes_on, head))


def goes_on(head: str, text: str) -> bool:
    """Whether the complete lines of `text` continue a function, as far as they go: they are Python,
    or would be if more followed.
    """
    complete, newline, _ = text.rpartition("\n")
    lines = (head + complete + newline).splitlines(keepends=True)
    own = next((n for n, line in enumerate(lines) if n and line[:1].strip()), len(lines))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            codeop.compile_command("".join(lines[:own]), symbol="exec")
        except (SyntaxError, ValueError, OverflowError):
            return False
    return bool(complete.strip())
