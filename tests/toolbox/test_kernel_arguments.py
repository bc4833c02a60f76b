"""Triton compiles an argument that equals 1 as a constant, which has no method .to. So a kernel
that calls it fails for a batch of one, and only on a GPU: the interpreter does not know such
constants.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def converted_arguments(source: str) -> list[str]:
    """ "kernel: argument.to" for each argument that a launched kernel (named …_kernel) converts
    so.
    """
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or not function.name.endswith("_kernel"):
            continue
        arguments = {a.arg for a in function.args.args if a.annotation is None}
        for use in ast.walk(function):
            is_method = isinstance(use, ast.Attribute) and use.attr == "to"
            if is_method and isinstance(use.value, ast.Name) and use.value.id in arguments:
                found.append(f"{function.name}: {use.value.id}.to")
    return found


def test_no_kernel_converts_an_argument_by_its_method():
    """tl.cast takes both, numbers and constants."""
    files = [*ROOT.glob("lessons/**/*.py"), *ROOT.glob("solutions/*.py")]
    texts = {str(path): path.read_text("utf-8") for path in files}
    kernels = {
        path: converted_arguments(text) for path, text in texts.items() if "_kernel(" in text
    }
    assert len(kernels) > 20
    assert {name: found for name, found in kernels.items() if found} == {}


def test_one_is_found():
    kernel = "def a_kernel(n, SIZE: tl.constexpr):\n    m = n.to(tl.int64)\n    m.to(tl.int32)\n"
    assert converted_arguments(kernel) == ["a_kernel: n.to"]
