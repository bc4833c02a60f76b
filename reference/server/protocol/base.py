"""How every request is read: strictly, and no field is ignored in silence.

A field is honoured or refused by name. A null is the same as no field at all. A name that the API
does not have is refused with the nearest one that it has.
"""

import difflib
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, model_validator

from lessons.toolbox.model.arguments import shown
from reference.engine.compatibility.reading import asks_for_nothing, refusal, why_not


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


class Wire(BaseModel):
    """Base of all requests. path: of the route whose body it is, "" for a part of one."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    path: ClassVar[str] = ""
    refused: ClassVar[Refusals] = {}

    @model_validator(mode="before")
    @classmethod
    def check_names(cls, data: Any) -> Any:
        """Drop nulls and harmless fields. Raises ValueError for unknown and refused ones."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {}
        for name, value in data.items():
            if name in cls.refused:
                if value is not None:
                    cls.refused[name].check(name, value)
            elif name not in known:
                if reason := cls.path and why_not(cls.path, name):
                    if asks_for_nothing(cls.path, name, value):
                        continue
                    raise ValueError(refusal(name, reason, "a field"))
                raise ValueError(unknown(name, [*known, *cls.refused]))
            elif value is not None:
                kept[name] = value
        return kept


def unknown(name: str, known: list[str]) -> str:
    """The line for a name that is not known, with the nearest that is."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"accepted: {', '.join(sorted(known))}"
    return f"{shown(name)[1:-1]}: unknown field; {hint}"
