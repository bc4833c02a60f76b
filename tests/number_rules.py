"""Numbers in the texts have a source, and agree with it.

A number that a README quotes from a recorded result carries its source in a comment right after
it, which no reader sees:

    5.3 ×<!-- results/h200/l01_copy.json#series.naive.points.x=4096.median_s
             / series.kernel.points.x=4096.median_s -->

FILE#PATH, then `* NUMBER`, `/ NUMBER`, `* PATH` or `/ PATH` as often as needed. In a path, `x=4096`
picks the entry of a list whose `x` is 4096, a number counts from the start (or the end, if
negative), and a key that holds a dot is in quotes.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from lessons.toolbox.proof.pages import pages
from tests.course_rules import Complaints, committed_files, complete_rooms, within
from tests.markdown import section

NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
UNIT = r"(?:[kMGTP]i?B(?:/s)?|[MGTP]?FLOP/s|tokens/s|tokens per second|µs|us|ms|×|x\b|%)"


def wrong_numbers(root: Path) -> Complaints:
    """Numbers in a text that differ from the recorded result which the comment after
    them names.
    """
    complaints = []
    for path in committed_files(root, ".md"):
        text = path.read_text(encoding="utf-8")
        complaints += [f"{within(root, path)}: {why}" for why in _numbers(root, text)]
    return complaints


def _numbers(root: Path, text: str) -> Iterator[str]:
    # a comment within code is an example of one
    text = re.sub(r"`[^`\n]*`", lambda span: "" if "<!--" in span[0] else span[0], text)
    for comment in re.finditer(r"<!--\s*(results/[^#\s]+)#(.*?)\s*-->", text, re.DOTALL):
        file, expression = comment.groups()
        before = text[max(0, comment.start() - 40) : comment.start()]
        quoted = re.search(rf"({NUMBER})[^\d\n|<>]*$", before)
        if not quoted:
            yield f"no number stands before <!-- {file}#{expression} -->"
            continue
        try:
            data = json.loads((root / file).read_text(encoding="utf-8"))
            value = evaluate(data, expression)
        except (OSError, ValueError, LookupError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            yield f"{quoted[1]}: {file}#{expression} cannot be read ({why})"
            continue
        if not agrees(quoted[1], value):
            yield f"{quoted[1]} is not the recorded {value:.6g} of {file}#{expression}"


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
    """What is at a dotted path of a JSON document."""
    for quoted, bare in re.findall(r"\"([^\"]*)\"|([^.\"]+)", path):
        part = quoted or bare
        if isinstance(data, list) and "=" in part:
            key, wanted = part.split("=", 1)
            data = next((entry for entry in data if str(entry.get(key)) == wanted), None)
            if data is None:
                raise LookupError(f"no entry with {part}")
            if any(flag.startswith("noisy") for flag in data.get("flags", ())):
                raise ValueError(f"{part} is a noisy point, and no sentence may rest on one")
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
    """Measurements under Measured and Where it loses without a comment after them that says where
    they come from.
    """
    complaints = []
    for room in complete_rooms(root):
        text = pages(room)
        for heading in ("Measured", "Where it loses"):
            for number in _unsourced(section(text, heading)):
                complaints.append(
                    f"{room.name}/README.md, {heading}: {number!r} has no <!-- results/... --> "
                    f"behind it"
                )
    return complaints


def _unsourced(body: str) -> Iterator[str]:
    body = re.sub(r"<!--.*?-->", "<!---->", body, flags=re.DOTALL)
    body = re.sub(r"`[^`]*`|!\[[^\]]*\]\([^)]*\)", "", body)
    for found in re.finditer(rf"{NUMBER}\s?{UNIT}", body):
        if not re.match(r"[*\s]{0,4}<!--", body[found.end() :]):
            yield found[0]
