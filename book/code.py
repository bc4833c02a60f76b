"""Pages that show a file of code, or what is in a folder."""

import ast
from pathlib import Path

LANGUAGES = {".py": "python", ".cu": "cuda", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
LANGUAGES |= {".toml": "toml", ".sh": "bash", ".js": "javascript", ".css": "css"}
# on no list, and its words not among those that the search finds
HEAD = ["---", "orphan: true", "nosearch: true", "---", ""]
LONGEST = 400_000  # characters; a longer file is data


def file_page(name: str) -> str:
    """The page of a file."""
    return f"code/{name}.md"


def folder_page(name: str) -> str:
    """The page of a folder."""
    return f"code/{name}/index.md"


def first_line(path: Path) -> str:
    """What a file says of itself, for a table: a module's first sentence, a page's heading."""
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        said = " ".join(said.split("\n\n")[0].split())
    elif path.suffix == ".md":
        said = path.read_text(encoding="utf-8").lstrip("# ").split("\n")[0]
    else:
        said = ""
    return said.replace("|", "\\|")


def write(stage) -> None:
    """All pages that other pages lead to. stage: a Stage, whose list of files may grow."""
    for name in sorted(stage.folders):
        stage.write(folder_page(name), folder(stage, name))
    for name in sorted(stage.files):
        stage.write(file_page(name), file(stage, name))


def file(stage, name: str) -> str:
    """A file with the numbers of its lines."""
    path = stage.root / name
    text = path.read_text(encoding="utf-8")
    if len(text) > LONGEST:
        return "\n".join([*HEAD, f"# {name}", "", f"{len(text):,} characters of data.", ""])
    stage.write(f"code/{name}", text)
    language = LANGUAGES.get(path.suffix, "text")
    lines = [f"```{{literalinclude}} /code/{name}", f":language: {language}", ":linenos:", "```"]
    return "\n".join([*HEAD, f"# {name}", "", *lines, ""])


def folder(stage, name: str) -> str:
    """What is in a folder: pictures as pictures, code with what it says of itself."""
    lines = [*HEAD, f"# {name}", ""]
    at = Path(folder_page(name)).parent
    pictures, rows = [], []
    for path in sorted((stage.root / name).iterdir()):
        if path.name.startswith((".", "__")):
            continue
        inside = f"{name}/{path.name}"
        if path.suffix in (".svg", ".png"):
            stage.copy(inside)
            pictures.append(picture(path.stem, "../" * len(at.parts) + inside))
        else:
            rows.append(f"| {shown(stage, path, inside, at)} | {first_line(path) or '–'} |")
    lines += [line for picture in pictures for line in (picture, "")]
    if rows:
        lines += ["| file | what it says of itself |", "| --- | --- |", *rows, ""]
    return "\n".join(lines)


def picture(alt: str, at: str) -> str:
    """A picture that is loaded when a reader comes to it, because a folder may have many."""
    return f"```{{image}} {at}\n:alt: {alt}\n:loading: lazy\n```"


def shown(stage, path: Path, inside: str, at: Path) -> str:
    """A file's name in a table, as a link where it has a page."""
    up = "../" * len(at.parts)
    if path.suffix in (".py", ".cu"):
        stage.files.add(inside)
        return f"[{path.name}]({up}{file_page(inside)})"
    if path.suffix in (".md", ".ipynb") and (stage.out / inside).exists():
        return f"[{path.name}]({up}{inside})"
    return f"`{path.name}{'/' if path.is_dir() else ''}`"
