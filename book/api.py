"""The interface of the engine, written from its source without importing it."""

import ast
import re
from textwrap import dedent

# module -> its public classes; None: all
MODULES = {
    "reference.engine.llm": ["LLM"],
    "reference.engine.sampling_params": ["SamplingParams"],
    "reference.engine.outputs": None,
    "reference.engine.engine_args": ["EngineArgs"],
    "reference.engine.engine": ["Engine"],
    "reference.engine.async_engine": ["AsyncLLMEngine"],
}
PAGE = "api.md"  # in the book; the repository has no such file
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CODE = re.compile(r"(`[^`]+`)")
SPECIAL = re.compile(r"([\\*_`\[\]<>#|])")  # what Markdown would read as more than a letter


def write(stage) -> None:
    """The page. stage: a Stage, which is asked for pages of the modules' code."""
    lines = ["# The interface of the engine", ""]
    lines += ["Names are vLLM's. A class shows its fields, or what its `__init__` takes.", ""]
    for module, names in MODULES.items():
        file = f"{module.replace('.', '/')}.py"
        stage.files.add(file)
        lines += [f"## {module}", "", f"[{file}](code/{file}.md)", ""]
        lines += of_module((stage.root / file).read_text(encoding="utf-8"), names)
    stage.write(PAGE, "\n".join(lines) + "\n")


def of_module(source: str, names: list[str] | None) -> list[str]:
    """Markdown of the public classes and functions of a module. names: those; None: all."""
    lines, written = [], source.splitlines()
    for node in ast.parse(source).body:
        is_public = getattr(node, "name", "_")[0] != "_"
        if is_public and (names is None or node.name in names):
            lines += of_node(node, written, "### ")
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, FUNCTIONS) and inner.name[0] != "_":
                    lines += of_node(inner, written, f"#### {node.name}.")
    return lines


def of_node(node: ast.AST, written: list[str], heading: str) -> list[str]:
    """A heading, a signature and the docstring. written: the lines of the module."""
    lines = [f"{heading}{node.name}", "", "```python", *signature(node, written), "```", ""]
    return lines + prose(ast.get_docstring(node) or "")


def signature(node: ast.AST, written: list[str]) -> list[str]:
    """How it is called, as it is written: of a class its name and its fields, or its __init__."""
    # From the decorators, because a property is not called, to the first line of the body.
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = written[first - 1 : node.body[0].lineno - 1]
    if isinstance(node, ast.ClassDef):
        makers = [inner for inner in node.body if getattr(inner, "name", "") == "__init__"]
        fields = [inner for inner in node.body if isinstance(inner, ast.AnnAssign)]
        for inner in makers:
            lines += ["", *(f"    {line}" for line in signature(inner, written))]
        for inner in fields if not makers else ():
            lines += written[inner.lineno - 1 : inner.end_lineno]
    return dedent("\n".join(lines)).splitlines()


def prose(docstring: str) -> list[str]:
    """Its paragraphs as Markdown. An indented one is code."""
    lines = []
    for paragraph in docstring.split("\n\n"):
        if paragraph.startswith("    "):
            lines += ["```text", *(line[4:] for line in paragraph.split("\n")), "```", ""]
        elif paragraph.strip():
            parts = CODE.split(" ".join(paragraph.split()))
            text = [part if part[:1] == "`" else SPECIAL.sub(r"\\\1", part) for part in parts]
            lines += ["".join(text), ""]
    return lines
