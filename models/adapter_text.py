"""What the three adapters of lesson 21 are trained on: text that this file makes, or takes from the
standard library and rewrites. Nothing is fetched.

- sql: questions and their queries, made here from a small grammar.
- docstring: functions of the standard library as their first line and their docstring alone.
- tests: methods of its unittest tests, rewritten as functions with bare asserts, as pytest has
  them.

What is held out comes from tables that no training text names, and from the modules that the base
model was not trained on either (corpus.HELD_OUT).
"""

import ast
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from lessons.toolbox.model.corpus import HELD_OUT, SKIPPED

STYLES = ("sql", "docstring", "tests")
LONGEST = 900  # characters of an example
ROOT = Path(sysconfig.get_paths()["stdlib"])

# ---------------------------------------------------------------- sql

TABLES = {  # table -> columns of text, columns of numbers
    "customers": (("name", "city", "country"), ("age", "credit")),
    "orders": (("status", "channel"), ("total", "discount")),
    "products": (("title", "category"), ("price", "stock")),
    "employees": (("name", "department", "title"), ("salary", "years")),
    "students": (("name", "school"), ("grade", "credits")),
    "books": (("title", "author", "language"), ("pages", "price")),
    "flights": (("origin", "destination", "airline"), ("distance", "delay")),
    "songs": (("title", "artist", "genre"), ("length", "plays")),
    "sensors": (("kind", "location"), ("value", "battery")),
    "games": (("title", "studio", "platform"), ("score", "players")),
}
HELD_OUT_TABLES = {
    "hotels": (("name", "city", "chain"), ("rooms", "price")),
    "patients": (("name", "ward"), ("age", "weight")),
    "trains": (("line", "origin", "status"), ("speed", "delay")),
}
SUMMARIES = {"average": "AVG", "largest": "MAX", "smallest": "MIN", "total": "SUM"}


def sql(count: int, seed: int, tables: dict = TABLES) -> list[str]:
    """A comment that asks, and the query that answers."""
    rng = random.Random(seed)
    return [one_query(rng, tables) for _ in range(count)]


def one_query(rng: random.Random, tables: dict) -> str:
    table = rng.choice(sorted(tables))
    texts, numbers = tables[table]
    text, number, limit = rng.choice(texts), rng.choice(numbers), rng.randint(2, 200)
    summary = rng.choice(sorted(SUMMARIES))
    is_above = rng.random() < 0.5
    word, sign = ("above", ">") if is_above else ("below", "<")
    forms = [
        (
            f"the {text} of all {table} with {number} {word} {limit}",
            f"SELECT {text}\nFROM {table}\nWHERE {number} {sign} {limit}",
        ),
        (
            f"how many {table} there are for each {text}",
            f"SELECT {text}, COUNT(*)\nFROM {table}\nGROUP BY {text}",
        ),
        (
            f"the {summary} {number} of {table} by {text}",
            f"SELECT {text}, {SUMMARIES[summary]}({number})\nFROM {table}\nGROUP BY {text}",
        ),
        (
            f"the {limit} {table} with the highest {number}",
            f"SELECT *\nFROM {table}\nORDER BY {number} DESC\nLIMIT {limit}",
        ),
        (
            f"each {text} of {table} whose {summary} {number} is {word} {limit}",
            f"SELECT {text}\nFROM {table}\nGROUP BY {text}\n"
            f"HAVING {SUMMARIES[summary]}({number}) {sign} {limit}",
        ),
        (
            f"{table} that have no {text}, by {number}",
            f"SELECT *\nFROM {table}\nWHERE {text} IS NULL\nORDER BY {number}",
        ),
    ]
    question, query = rng.choice(forms)
    return f"-- {question}\n{query};\n"


# ---------------------------------------------------------------- the standard library


def modules(is_held_out: bool) -> Iterator[tuple[str, ast.Module]]:
    """(source, tree) of the modules that the base model was, or was not, trained on; tests too."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if any(name.startswith(part) or f"/{part}" in name for part in SKIPPED):
            continue
        if (path.stem.removeprefix("test_") in HELD_OUT) != is_held_out:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            yield source, ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue  # deliberately broken test fixtures


def docstrings(is_held_out: bool) -> list[str]:
    """The first line of a function and its docstring, nothing else."""
    found = []
    for _, tree in modules(is_held_out):
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not (said := ast.get_docstring(node)):
                continue
            lines = "\n".join(f"    {line}" if line else "" for line in said.splitlines())
            text = f'{signature(node)}\n    """{lines.strip()}\n    """\n'
            if len(text) <= LONGEST and len(said) >= 30:
                found.append(text)
    return list(dict.fromkeys(found))


def signature(node: ast.FunctionDef) -> str:
    return f"def {node.name}({ast.unparse(node.args)}):"


COMPARED = {
    "assertEqual": ast.Eq,
    "assertNotEqual": ast.NotEq,
    "assertIs": ast.Is,
    "assertIn": ast.In,
    "assertNotIn": ast.NotIn,
    "assertGreater": ast.Gt,
    "assertLess": ast.Lt,
}


class Asserts(ast.NodeTransformer):
    """self.assertEqual(a, b) -> assert a == b, and so on; other uses of self stay."""

    def visit_Expr(self, node: ast.Expr):
        call = node.value
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return node
        name, args = call.func.attr, call.args
        if name in COMPARED and len(args) >= 2:
            test = ast.Compare(args[0], [COMPARED[name]()], [args[1]])
        elif name == "assertTrue" and args:
            test = args[0]
        elif name == "assertFalse" and args:
            test = ast.UnaryOp(ast.Not(), args[0])
        elif name == "assertIsNone" and args:
            test = ast.Compare(args[0], [ast.Is()], [ast.Constant(None)])
        else:
            return node
        return ast.Assert(test, None)


def tests(is_held_out: bool) -> list[str]:
    """Test methods as functions with bare asserts. One that still needs self is left out."""
    found = []
    for _, tree in modules(is_held_out):
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            if [argument.arg for argument in node.args.args] != ["self"] or node.decorator_list:
                continue
            node = ast.fix_missing_locations(Asserts().visit(node))
            node.args.args = []
            text = ast.unparse(node) + "\n"
            if "assert " in text and "self" not in text and len(text) <= LONGEST:
                found.append(text)
    return list(dict.fromkeys(found))


def examples(style: str) -> tuple[list[str], list[str]]:
    """(to train on, held out), in an order drawn once."""
    make: dict[str, Callable] = {"docstring": docstrings, "tests": tests}
    if style == "sql":
        parts = sql(4000, seed=0), sql(200, seed=1, tables=HELD_OUT_TABLES)
    else:
        parts = make[style](False), make[style](True)
    for part in parts:
        random.Random(0).shuffle(part)
    return parts
