"""How long, how wide and how dense a file may be, so that it is read in a sitting."""

import ast
import io
import tokenize
from pathlib import Path

from tests.course_rules import committed_files, rooms, within

LINES_OF_A_FILE, LINES_OF_A_FUNCTION, COLUMNS = 300, 60, 100
TOKENS_A_LINE = 9.5
READ_BY_LEARNERS = ("lessons/", "reference/", "models/", "solutions/")
# Stubs are generated with their exercise's title in one line; slips repeat lines of solutions.
AS_WIDE_AS_THEY_ARE = ("exercises/l", "tests/exercises/wrong/")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def sources(root: Path) -> dict[str, str]:
    """{file: its text} of every Python file that learners read."""
    files = {within(root, path): path for path in committed_files(root, ".py")}
    return {
        name: path.read_text(encoding="utf-8")
        for name, path in files.items()
        if name.startswith(READ_BY_LEARNERS)
    }


def long_files(root: Path) -> dict[str, int]:
    """{file: its lines} of files with more than 300 lines."""
    lines = {name: len(text.splitlines()) for name, text in sources(root).items()}
    return {name: count for name, count in lines.items() if count > LINES_OF_A_FILE}


def long_functions(root: Path) -> dict[str, int]:
    """{"file:function": its lines} of functions with more than 60, the docstring aside."""
    found = {}
    for name, text in sources(root).items():
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if (lines := lines_of(node)) > LINES_OF_A_FUNCTION:
                found[f"{name}:{node.name}"] = lines
    return found


def wide_files(root: Path) -> dict[str, int]:
    """{file: its lines of more than 100 characters}, of all Python files. `ruff format` breaks code
    alone, so strings, comments and docstrings are held to it here.
    """
    found = {}
    for path in committed_files(root, ".py"):
        name, lines = within(root, path), path.read_text(encoding="utf-8").splitlines()
        count = sum(len(line) > COLUMNS for line in lines)
        if count and not name.startswith(AS_WIDE_AS_THEY_ARE):
            found[name] = count
    return found


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function):
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def dense_files(root: Path) -> dict[str, float]:
    """{file: its tokens a line} of the lessons' naive.py and optimized.py beyond 9.5."""
    found = {}
    for room in rooms(root):
        for name in ("naive.py", "optimized.py"):
            path = room / name
            if path.exists() and (tokens := density(path.read_text("utf-8"))) > TOKENS_A_LINE:
                found[within(root, path)] = round(tokens, 1)
    return found


def density(source: str) -> float:
    """Tokens a line of code. Comments and docstrings are no code; blank lines do not count."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            docstrings.update(range(node.lineno, node.end_lineno + 1))
    tokens, lines = 0, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE and token.start[0] not in docstrings:
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return tokens / max(1, len(lines))
