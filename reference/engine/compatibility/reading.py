"""What becomes of an argument that one of our functions does not have: vLLM's without effect are
dropped with a warning, its others are refused with the reason, and any other with the nearest name.
"""

import ast
import difflib
import json
import re
import sys
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from lessons.toolbox.model.arguments import one_line
from reference.engine.compatibility.reasons import REFUSED, WITHOUT_EFFECT

LIST = Path(__file__).with_name("vllm_names.json")
ENGINE = ("LLM", "AsyncEngineArgs", "vllm serve")


@cache
def vllm_names() -> dict[str, dict[str, str]]:
    """{group: {name: "kind = default"}} of vLLM 0.32."""
    return json.loads(LIST.read_text(encoding="utf-8"))["names"]


def names_of(group: str) -> dict[str, str]:
    """{name: "kind = default"} of a group."""
    return vllm_names().get("LLM" if group == "EngineArgs" else group, {})


def tables_of(group: str) -> tuple[str, ...]:
    """The names of the tables of a group, in the order in which they are asked."""
    if group == "EngineArgs":  # through which LLM reads its arguments
        return ("EngineArgs", "LLM", "engine")
    if group == "/v1/messages/count_tokens":
        return ("/v1/messages", "request")
    return (group, "engine" if group in ENGINE else "request")


def why(tables: dict[str, dict[str, str]], group: str, name: str) -> str | None:
    """The reason that one of reasons.py's tables has for a name; None: it has none."""
    plain = name.removeprefix("--").replace("-", "_") if group == "vllm serve" else name
    for table in tables_of(group):
        for reason, names in tables.get(table, {}).items():
            if plain in names.split():
                return reason
    return None


def why_not(group: str, name: str) -> str | None:
    """The reason of either table."""
    return why(WITHOUT_EFFECT, group, name) or why(REFUSED, group, name)


def asks_for_nothing(group: str, name: str, value: Any) -> bool:
    """Whether the value is None or vLLM's own default."""
    _, has_default, default = names_of(group).get(name, "").rpartition(" = ")
    if value is None or not has_default:
        return value is None
    try:
        return isinstance(value, (bool, int, float, str)) and ast.literal_eval(default) == value
    except (SyntaxError, ValueError):
        return False


def read_others(group: str, known: Iterable[str], others: dict[str, Any]) -> None:
    """Read the arguments of a call that are not `known` to the function. Warns of those without
    effect, and raises ValueError for one that asks for what this engine does not have.
    """
    for name, value in others.items():
        if reason := why(WITHOUT_EFFECT, group, name):
            if not asks_for_nothing(group, name, value):
                warnings.warn(effectless(name, reason), stacklevel=levels_to_user())
        elif reason := why(REFUSED, group, name):
            if not asks_for_nothing(group, name, value):
                raise ValueError(refusal(name, reason))
        else:
            raise ValueError(unknown(name, list(known), group))


def levels_to_user() -> int:
    """The stacklevel of a warning, given by the function that asks, that points at the line that
    called us.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals["__name__"].startswith(("reference.", "lessons.")):
        frame, level = frame.f_back, level + 1
    return level


def effectless(name: str, reason: str) -> str:
    """The line for a name without effect."""
    return f"{name}: accepted without effect, because {reason}"


def refusal(name: str, reason: str, kind: str = "an argument") -> str:
    """The line for a name that vLLM has and this engine has not."""
    return f"{name}: {kind} of vLLM that this engine does not have, because {reason}"


def no_method(name: str, known: list[str]) -> str:
    """The line for a method that LLM does not have."""
    if reason := why(REFUSED, "methods of LLM", name):
        return refusal(name, reason, "a method")
    return unknown(name, known, "methods of LLM", "method")


def route_reason(path: str) -> str | None:
    """The reason why the server does not have this path of vLLM's; None: vLLM has it not either."""
    for one in vllm_names()["routes"]:
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", one), path):
            return why(REFUSED, "routes", one)
    return None


def unknown(name: str, known: list[str], group: str, kind: str = "argument") -> str:
    """The line for a name that vLLM does not have either."""
    # not what EngineArgs alone refuses, because LLM reads it
    asked = "LLM" if group == "EngineArgs" else group
    works = [one for one in names_of(group) if one != name and not why_not(asked, one)]
    near = difflib.get_close_matches(name, [*known, *works], 1)
    hint = f"did you mean {near[0]}?" if near else f"accepted: {', '.join(known)}"
    return one_line(f"{name}: unknown {kind}; {hint}")
