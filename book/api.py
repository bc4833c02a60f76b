"""The interface of the engine, written from its docstrings without importing it."""

import ast
import re
from pathlib import Path

MODULES = {
    "reference.engine.llm": ["LLM"],
    "reference.engine.sampling_params": ["SamplingParams"],
    "reference.engine.outputs": None,
    "reference.engine.engine_args": ["EngineArgs"],
    "reference.engine.engine": ["Engine"],
    "reference.engine.async_engine": ["AsyncLLMEngine"],
}
SPECIAL = re.compile(r"([\\*_`\[\]<>#|])")


def write(stage) -> None:
    """The page, and the pages of its modules' code."""
    lines = ["# The interface of the engine", ""]
    lines += ["Names are vLLM's. A class's fields stand in its signature.", ""]
    for module, names in MODULES.items():
        file = f"{module.replace('.', '/')}.py"
        stage.files.add(file)
        lines += [f"## {module}", "", f"[{file}](code/{file}.md)", ""]
        lines += of_module(stage.root / file, names)
    stage.write("api.md", "\n".join(lines) + "\n")


def of_module(path: Path, names: list[str] | None) -> list[str]:
    """Markdown of the public classes and functions of a module. names: those; None: all."""
    lines = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        is_public = getattr(node, "name", "_")[0] != "_"
        if is_public and (names is None or node.name in names):
            lines += of_node(node, 3)
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, FUNCTIONS) and inner.name[0] != "_":
                    lines += of_node(inner, 4, f"{node.name}.")
    return lines


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def of_node(node: ast.AST, level: int, prefix: str = "") -> list[str]:
    """A heading, a signature and the docstring."""
    heading = f"{'#' * level} {prefix}{node.name}"
    lines = [heading, "", "```python", signature(node), "```", ""]
    return lines + prose(ast.get_docstring(node) or "")


def signature(node: ast.AST) -> str:
    """How it is called; of a class its fields, or what its __init__ takes."""
    if isinstance(node, FUNCTIONS):
        kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        gives = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        one = f"{kind} {node.name}({ast.unparse(node.args)}){gives}"
        if len(one) <= 88:
            return one
        inner = ",\n    ".join(arguments(node.args))
        return f"{kind} {node.name}(\n    {inner},\n){gives}"
    fields = [ast.unparse(inner) for inner in node.body if isinstance(inner, ast.AnnAssign)]
    makers = [inner for inner in node.body if getattr(inner, "name", "") == "__init__"]
    if makers:
        fields = [argument for argument in arguments(makers[0].args) if argument != "self"]
    body = ",\n    ".join(fields)
    return f"class {node.name}(\n    {body},\n)" if fields else f"class {node.name}"


def arguments(args: ast.arguments) -> list[str]:
    """Each argument with its type and default."""
    text, parts, depth, start = ast.unparse(args), [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def prose(docstring: str) -> list[str]:
    """Paragraphs; what is indented is code."""
    lines = []
    for paragraph in docstring.split("\n\n"):
        if paragraph.startswith("    "):
            lines += ["```text", *(line[4:] for line in paragraph.split("\n")), "```", ""]
        elif paragraph.strip():
            lines += [SPECIAL.sub(r"\\\1", " ".join(paragraph.split())), ""]
    return lines
