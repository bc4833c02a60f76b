"""What a public function's docstring must say: that it exists, the shapes of tensors, the units of
bare quantities.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.course_rules import Complaints, committed_files, within

FLOORS = ("lessons/", "reference/", "solutions/")
# commands, and declarations whose form toolbox.measure.bench explains
SCRIPTS = ("__main__.py", "benchmark.py")
SHAPE = re.compile(r"\[[^\]]*\]|\bshape|\bscalar\b|\belementwise\b", re.IGNORECASE)
COMMANDS = ("main", "parse", "parse_args")  # what they take is in --help
# a quantity whose name has no unit
BARE = re.compile(r"(?:^|_)(?:time|latency|duration|elapsed|timeout|bandwidth|throughput)$")
UNITS = re.compile(
    r"\b(?:seconds?|s|ms|milliseconds?|µs|microseconds?|ns|bytes?(?:/s)?|[KMGT]i?B(?:/s)?"
    r"|tokens/s|requests/s)\b"
)


def wrong_docstrings(root: Path) -> Complaints:
    """Public functions of lessons, reference and solutions without a docstring, or with one that
    leaves out shapes or units.
    """
    complaints = []
    for path in committed_files(root, ".py"):
        name = within(root, path)
        if (
            name.startswith(FLOORS)
            and not path.name.startswith("test_")
            and path.name not in SCRIPTS
        ):
            complaints += [
                f"{name}: {why}" for why in _file(ast.parse(path.read_text(encoding="utf-8")))
            ]
    return complaints


def _file(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node) and not (_is_plain_data(node) or node.bases):
                yield f"class {node.name} has no docstring"
            for name, method in _functions(node):
                if not _explains_itself(method, node):
                    yield from _function(f"{node.name}.{name}", method)
    for name, function in _functions(tree):
        if name not in COMMANDS and not name.startswith("pytest_"):
            yield from _function(name, function)


def _functions(parent: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in parent.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith(
            "_"
        ):
            yield node.name, node


def _is_plain_data(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _explains_itself(method: ast.FunctionDef, owner: ast.ClassDef) -> bool:
    """A property of one expression says what it is by its name; a method of a subclass may be
    explained by its base.
    """
    decorators = [ast.unparse(decorator) for decorator in method.decorator_list]
    is_short_property = len(method.body) == 1 and any(
        "property" in decorator for decorator in decorators
    )
    return is_short_property or bool(owner.bases and not ast.get_docstring(method))


def _function(name: str, node: ast.FunctionDef) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    if not docstring:
        yield f"{name} has no docstring"
        return
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    annotations = [
        ast.unparse(annotation)
        for annotation in (*(a.annotation for a in arguments), node.returns)
        if annotation
    ]
    if any(re.search(r"\bTensor\b", annotation) for annotation in annotations) and not SHAPE.search(
        docstring
    ):
        yield f"{name} takes or returns tensors and gives no shape, such as q: [T, Hq, D]"
    for quantity in [name.rpartition(".")[2], *(a.arg for a in arguments)]:
        if BARE.search(quantity) and not UNITS.search(docstring):
            yield f"{name}: {quantity} has no unit, neither in its name nor in the docstring"
