"""What the texts of the course must hold, as functions from a root folder to complaints: [] means
that all is well.

The fourteen points of a lesson's README.md; links and images; numbers. A number that a README
quotes from a recorded result carries its source in a comment right behind it, which no reader sees:

    5.3 ×<!-- results/h200/benchmarks.json#01.records.copy.series.naive.points.x=4096.median_s
             / 01.records.copy.series.kernel.points.x=4096.median_s -->

FILE#PATH, then `* NUMBER`, `/ NUMBER`, `* PATH` or `/ PATH` as often as needed. In a path, `x=4096`
picks the entry of a list whose `x` is 4096, a number counts from the start (or the end, if
negative), and a key that holds a dot stands in quotes.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from tests.course_rules import Complaints, committed_files, complete_rooms, within

HEADINGS = (
    "You will be able to",
    "The bottleneck",
    "The idea in one picture",
    "Derivation",
    "Code",
    "What must hold",
    # points 3 to 14, in this order
    "Exercises",
    "Measured",
    "Where it loses",
    "In production",
    "Quiz",
    "Next",
)
OPENING = {
    "how long it takes": r"\d+ (?:min|h)",
    "whether a CPU is enough": r"\bCPU\b",
    "what it needs": r"(?i)\bneeds?\b",
}
QUIZ_ITEMS = 5
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
UNIT = r"(?:[kMGTP]i?B(?:/s)?|[MGTP]?FLOP/s|tokens/s|tokens per second|µs|us|ms|×|x\b|%)"
# image?, label, target
LINK = re.compile(
    r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+(?:\([^()]*\))?)(?:\s+\"[^\"]*\")?\)"
)


# ---------------------------------------------------------------- the fourteen points


def sections(text: str) -> dict[str, str]:
    """{heading of level 2: what stands under it}; code fences hide what looks like a heading."""
    found, heading, fenced = {}, "", False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if line.startswith("## ") and not fenced:
            heading = line[3:].strip().replace("*", "")
            found[heading] = ""
        elif heading:
            found[heading] += line + "\n"
    return found


def section(text: str, heading: str) -> str:
    """The section whose heading begins with `heading`, in any case; "" without one."""
    return next(
        (body for name, body in sections(text).items() if name.lower().startswith(heading.lower())),
        "",
    )


def bad_readmes(root: Path) -> Complaints:
    """What the README.md of a complete lesson lacks of the fourteen points."""
    complaints, tests = [], _test_names(root)
    for room in complete_rooms(root):
        text = (room / "README.md").read_text(encoding="utf-8")
        complaints += [f"{room.name}/README.md: {complaint}" for complaint in _readme(text, tests)]
    return complaints


def _readme(text: str, tests: set[str]) -> Iterator[str]:
    opening = text.split("\n## ")[0]
    title = opening.splitlines()[0] if opening else ""
    if not title.startswith("# ") or len(title.split()) < 5:
        yield f"the title {title!r} makes no claim (a sentence, not a topic)"
    for said, pattern in OPENING.items():
        if not re.search(pattern, opening):
            yield f"the lines under the title do not say {said}"
    found = [
        next((wanted for wanted in HEADINGS if name.lower().startswith(wanted.lower())), name)
        for name in sections(text)
    ]
    if missing := [wanted for wanted in HEADINGS if wanted not in found]:
        yield f"headings are missing: {', '.join(missing)}"
    elif [name for name in found if name in HEADINGS] != list(HEADINGS):
        yield f"headings are not in the order {', '.join(HEADINGS)}"
    if not any(bang for bang, *_ in LINK.findall(section(text, "The idea in one picture"))):
        yield "The idea in one picture: shows no image"
    yield from _table_of_tests(section(text, "What must hold"), tests)
    if section(text, "Exercises").count("<details>") < 3:
        yield "Exercises: fewer than three folded hints"
    if "make check" not in section(text, "Exercises"):
        yield "Exercises: no command that checks them (make check ...)"
    if (count := section(text, "Quiz").count("<details>")) != QUIZ_ITEMS:
        yield f"Quiz: {count} folded answers, not {QUIZ_ITEMS}"
    if (
        len(re.findall(r"\]\(https?://|<https?://|(?<!\*)\*\w[^*]+\*(?!\*)", section(text, "Next")))
        < 3
    ):
        yield "Next: fewer than three primary sources (a link, or the title in italics)"


def _table_of_tests(body: str, tests: set[str]) -> Iterator[str]:
    lines = [line.strip() for line in body.splitlines()]
    rules = {i for i, line in enumerate(lines) if re.fullmatch(r"\|[\s:|-]+\|", line)}
    rows = [
        line
        for i, line in enumerate(lines)
        if line.startswith("|") and i not in rules and i + 1 not in rules
    ]
    if not rows:
        yield "What must hold: there is no table"
    for row in rows:
        if not (named := re.findall(r"\btest_\w+", row)):
            yield f"What must hold: no test is named in the row {row!r}"
        for name in sorted(set(named) - tests):
            yield f"What must hold: there is no test {name}"


def _test_names(root: Path) -> set[str]:
    files = [*root.glob("lessons/l*/test_*.py"), *root.glob("tests/**/test_*.py")]
    return {
        name
        for file in files
        for name in (file.stem, *re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8")))
    }


# ---------------------------------------------------------------- numbers have a source


def wrong_numbers(root: Path) -> Complaints:
    """Numbers in a README that differ from the recorded result which the comment behind them names."""
    complaints = []
    for path in committed_files(root, ".md"):
        complaints += [
            f"{within(root, path)}: {why}"
            for why in _numbers(root, path.read_text(encoding="utf-8"))
        ]
    return complaints


def _numbers(root: Path, text: str) -> Iterator[str]:
    for comment in re.finditer(r"<!--\s*(results/[^#\s]+)#(.*?)\s*-->", text, re.DOTALL):
        before = text[max(0, comment.start() - 40) : comment.start()]
        if not (quoted := re.search(rf"({NUMBER})[^\d\n|<>]*$", before)):
            yield f"no number stands before <!-- {comment[1]}#{comment[2]} -->"
            continue
        try:
            value = evaluate(
                json.loads((root / comment[1]).read_text(encoding="utf-8")), comment[2]
            )
        except (OSError, ValueError, LookupError, TypeError) as error:
            yield f"{quoted[1]}: {comment[1]}#{comment[2]} cannot be read ({type(error).__name__}: {error})"
            continue
        if not agrees(quoted[1], value):
            yield f"{quoted[1]} is not the recorded {value:.6g} of {comment[1]}#{comment[2]}"


def evaluate(data, expression: str) -> float:
    """PATH, `/` or `*`, PATH or number, ... of a recorded result, left to right. Raises
    LookupError, ValueError, TypeError.
    """
    first, *rest = re.split(r"\s+([*/])\s+", expression.strip())
    value = look_up(data, first)
    for operator, operand in zip(rest[::2], rest[1::2]):
        number = float(operand) if re.fullmatch(NUMBER, operand) else look_up(data, operand)
        value = value * number if operator == "*" else value / number
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{expression} is {value!r}, no number")
    return value


def look_up(data, path: str):
    """What stands at a dotted path of a JSON document."""
    for quoted, bare in re.findall(r"\"([^\"]*)\"|([^.\"]+)", path):
        part = quoted or bare
        if isinstance(data, list) and "=" in part:
            key, wanted = part.split("=", 1)
            data = next((entry for entry in data if str(entry.get(key)) == wanted), None)
            if data is None:
                raise LookupError(f"no entry with {part}")
        else:
            data = data[int(part)] if isinstance(data, list) else data[part]
    return data


def agrees(quoted: str, value: float) -> bool:
    """Whether a number, as printed, is `value` rounded to the digits that it shows."""
    digits = quoted.replace(",", "")
    mantissa, _, exponent = digits.partition("e")
    last = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return math.isclose(float(digits), value, rel_tol=1e-9, abs_tol=0.5000001 * last)


def unsourced_numbers(root: Path) -> Complaints:
    """Measurements under Measured and Where it loses without a comment behind them that says where
    they come from.
    """
    complaints = []
    for room in complete_rooms(root):
        text = (room / "README.md").read_text(encoding="utf-8")
        for heading in ("Measured", "Where it loses"):
            body = re.sub(r"<!--.*?-->", "<!---->", section(text, heading), flags=re.DOTALL)
            body = re.sub(r"`[^`]*`|!\[[^\]]*\]\([^)]*\)", "", body)
            for found in re.finditer(rf"{NUMBER}\s?{UNIT}", body):
                if not re.match(r"[*\s]{0,4}<!--", body[found.end() :]):
                    complaints.append(
                        f"{room.name}/README.md, {heading}: {found[0]!r} has no <!-- results/... "
                        f"--> behind it"
                    )
    return complaints


# ---------------------------------------------------------------- links and images


def broken_links(root: Path) -> Complaints:
    """Relative links and images that lead nowhere, anchors included, and images without alt text."""
    complaints = []
    for path in committed_files(root, ".md"):
        complaints += [
            f"{within(root, path)}: {why}" for why in _links(path, path.read_text(encoding="utf-8"))
        ]
    for path in committed_files(root, ".ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
        complaints += [f"{within(root, path)}: {why}" for why in _links(path, text)]
    return complaints


def _links(path: Path, text: str) -> Iterator[str]:
    text = re.sub(r"^```.*?^```|`[^`\n]*`|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    for bang, label, target in LINK.findall(text):
        if bang and not label.strip():
            yield f"image {target} has no alt text"
        if why := _leads_nowhere(path, target, text):
            yield why
    for image in re.findall(r"<img\b[^>]*>", text):
        if not re.search(r"alt=\"[^\"]+\"", image):
            yield f"{image} has no alt text"
        if (source := re.search(r"src=\"([^\"]+)\"", image)) and (
            why := _leads_nowhere(path, source[1], text)
        ):
            yield why


def _leads_nowhere(path: Path, target: str, text: str) -> str:
    if re.match(r"\w+:", target):
        return ""
    file, _, anchor = target.partition("#")
    found = (path.parent / file).resolve() if file else path
    if not found.exists():
        return f"{target} does not exist"
    if anchor and found.suffix == ".md":
        body = text if not file else found.read_text(encoding="utf-8")
        if anchor not in {
            slug(heading) for heading in re.findall(r"^#+ (.*)$", body, re.MULTILINE)
        }:
            return f"{target}: there is no such heading"
    return ""


def slug(heading: str) -> str:
    """The anchor that a heading gets on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
