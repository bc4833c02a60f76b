"""How every request is read: strictly, and no field is ignored in silence.

A field is honoured, accepted without effect, or refused by name. Without effect are hints and
labels that change no answer, and the answer's header `x-without-effect` names those that a request
had. A null is the same as no field at all. A name that the API does not have is refused with the
nearest one that it has; but what clients copy back from earlier answers may have names of other
servers.
"""

import difflib
import re
from contextvars import ContextVar
from types import UnionType
from typing import Any, ClassVar, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator

from lessons.toolbox.model.arguments import shown
from reference.engine.compatibility import reasons
from reference.engine.compatibility.reading import asks_for_nothing, refusal, why


class Refusal(NamedTuple):
    """A field of an API that the server does not have. harmless: values that ask for nothing."""

    why: str
    harmless: tuple = ()

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError for a value that asks for something."""
        if any(value == one and type(value) is type(one) for one in self.harmless):
            return
        accepted = " or ".join(shown(one) for one in self.harmless) or "no such field"
        raise ValueError(f"{name}: got {shown(value)}; accepted: {accepted}, because {self.why}")


Refusals = dict[str, Refusal]
Hints = dict[str, str]  # {field: why it has no effect}
# The fields without effect of the request that is read in this context; None: no server asks.
WITHOUT_EFFECT: ContextVar[dict[str, None] | None] = ContextVar("without_effect", default=None)
MOST_NAMED = 20  # in the header
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
WHOLE = re.compile(r"[+-]?\d{1,18}", re.ASCII)
NUMBER = re.compile(r"[+-]?(\d{1,18}(\.\d*)?|\.\d+)([eE][+-]?\d{1,2})?", re.ASCII)


def note(name: str) -> None:
    """The request has a field without effect."""
    noted = WITHOUT_EFFECT.get()
    if noted is not None and NAME.fullmatch(name) and len(noted) < MOST_NAMED:
        noted[name] = None


class Wire(BaseModel):
    """Base of all requests.

    refused: fields that the server does not have. hints: those that it accepts without effect.
    is_history: whether this was copied from an answer, perhaps another server's, so that unknown
    fields ask for nothing. path: of the route whose body it is, "" for a part of one.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    path: ClassVar[str] = ""
    refused: ClassVar[Refusals] = {}
    hints: ClassVar[Hints] = {}
    is_history: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def check_names(cls, data: Any) -> Any:
        """Drop nulls, hints and harmless fields, and read numbers that are written as strings.
        Raises ValueError for unknown and refused fields.
        """
        if not isinstance(data, dict):
            return data
        known = {field.alias or name: field for name, field in cls.model_fields.items()}
        kept = {}
        for name, value in data.items():
            if name in cls.refused:
                if value is not None:
                    cls.refused[name].check(name, value)
            elif name in cls.hints or (cls.is_history and name not in known):
                if value is not None:
                    note(name)
            elif name not in known:
                if not (cls.path and is_vllms(cls.path, name, value)):
                    raise ValueError(unknown(name, [*known, *cls.refused, *cls.hints]))
            elif value is not None:
                kept[name] = as_number(value, known[name].annotation)
        return kept


def is_vllms(path: str, name: str, value: Any) -> bool:
    """Whether vLLM has this field and it changes nothing here. Raises ValueError for one that asks
    for what this server does not have.
    """
    is_hint = why(reasons.WITHOUT_EFFECT, path, name) is not None
    reason = why(reasons.REFUSED, path, name)
    if not is_hint and reason is None:
        return False
    if asks_for_nothing(path, name, value):
        return True
    if not is_hint:
        raise ValueError(refusal(name, reason, "a field"))
    note(name)
    return True


def as_number(value: Any, annotation: Any) -> Any:
    """The number that a client wrote as "5", or as 5.0 where a whole one is meant, if the field is
    a number and nothing else; any other value as it is.
    """
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = set(get_args(annotation)) if is_union else {annotation}
    if not kinds <= {int, float, type(None)}:
        return value
    if float not in kinds:
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return int(value)
        return int(value) if isinstance(value, str) and WHOLE.fullmatch(value) else value
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def unknown(name: str, known: list[str]) -> str:
    """The line for a name that is not known, with the nearest that is."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"accepted: {', '.join(sorted(known))}"
    return f"{shown(name)[1:-1]}: unknown field; {hint}"
