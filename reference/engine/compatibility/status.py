"""What each of vLLM's names does here, asked of our own signatures and models, and README.md's
table.

python -m reference.engine.compatibility.status    # writes the table
"""

import inspect
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from lessons.toolbox.model.arguments import shown
from reference.engine.async_engine import AsyncEngineArgs
from reference.engine.compatibility.reading import vllm_names, why
from reference.engine.compatibility.reasons import REFUSED, WITHOUT_EFFECT
from reference.engine.engine_args import SPECULATIVE, EngineArgs
from reference.engine.llm import LLM
from reference.engine.sampling_params import SamplingParams
from reference.features.beam_search import BeamSearchParams
from reference.features.structured import StructuredOutputsParams
from reference.server.app import ROUTES
from reference.server.flags import new_parser, without_effect
from reference.server.protocol.base import Wire
from reference.server.protocol.chat import ChatCompletionRequest
from reference.server.protocol.completions import CompletionRequest
from reference.server.protocol.messages import CountTokensRequest, MessagesRequest
from reference.server.protocol.responses import ResponsesRequest
from reference.server.protocol.tokens import DetokenizeRequest, EmbeddingRequest, TokenizeRequest

PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- begin: python -m reference.engine.compatibility.status -->\n", "<!-- end -->\n"
WORKS, NO_EFFECT, NOT_HERE = "works", "accepted without effect", "refused"
BODIES: dict[str, type[Wire]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
# What our functions have and what changes nothing.
OURS_WITHOUT_EFFECT = {
    ("BeamSearchParams", "temperature"): "scores are those of the model's own distribution",
    ("/v1/responses", "prompt_cache_key"): "the prefix cache finds what is equal by itself",
}


class Status(NamedTuple):
    """kind: WORKS, NO_EFFECT or NOT_HERE. reason: of the last two."""

    kind: str
    reason: str = ""


def status(group: str, name: str) -> Status:
    """Of one of vLLM's names. Raises KeyError for one that nothing here decides."""
    if reason := OURS_WITHOUT_EFFECT.get((group, name)):
        return Status(NO_EFFECT, reason)
    if name in our_names(group):
        return Status(WORKS)
    if body := BODIES.get(group):
        hints = getattr(body, "hints", {})
        if name in hints:
            return Status(NO_EFFECT, hints[name])
        if refusal := body.refused.get(name):
            but = " or ".join(f"`{shown(one)}`" for one in refusal.harmless)
            return Status(NOT_HERE, f"{refusal.why}{but and f' (but {but} is accepted)'}")
    if reason := why(WITHOUT_EFFECT, group, name):
        return Status(NO_EFFECT, reason)
    reason = why(REFUSED, group, name)
    if reason is None:
        raise KeyError(f"{group}: {name}")
    return Status(NOT_HERE, reason)


@cache
def our_names(group: str) -> list[str]:
    """Every name that works in the place of a group."""
    if body := BODIES.get(group):
        return [field.alias or name for name, field in body.model_fields.items()]
    if group.startswith("LLM."):
        return parameters(getattr(LLM, group.removeprefix("LLM.")))
    return OURS[group]()


def parameters(call) -> list[str]:
    """The names of its parameters."""
    kept = inspect.signature(call).parameters.values()
    return [one.name for one in kept if one.name != "self" and one.kind is not one.VAR_KEYWORD]


def of_llm() -> list[str]:
    """Arguments of LLM."""
    engine = [field.name for field in fields(EngineArgs)]
    return list(dict.fromkeys([*parameters(LLM.__init__), *engine, *SPECULATIVE]))


def of_server() -> list[str]:
    """Arguments that AsyncEngineArgs adds to EngineArgs."""
    return [field.name for field in fields(AsyncEngineArgs)[len(fields(EngineArgs)) :]]


def flags() -> list[str]:
    """Flags of the server."""
    actions = new_parser("")._actions
    found = [flag for action in actions for flag in action.option_strings[:1] if flag != "-h"]
    return [flag for flag in found if flag[2:] not in without_effect()]


def methods() -> list[str]:
    """Public methods of LLM."""
    return [name for name in dir(LLM) if name[0] != "_" and callable(getattr(LLM, name))]


def routes() -> list[str]:
    """Paths of the server."""
    # routes look at the rest of it when they are asked
    service = SimpleNamespace(engine=None, args=SimpleNamespace(write_timeout=0.0))
    paths = [route.path for module in ROUTES for route in module.new_router(service).routes]
    return list(dict.fromkeys(path.replace(":path", "") for path in [*paths, "/openapi.json"]))


OURS = {
    "LLM": of_llm,
    "AsyncEngineArgs": of_server,
    "SamplingParams": lambda: parameters(SamplingParams),
    "BeamSearchParams": lambda: parameters(BeamSearchParams),
    "StructuredOutputsParams": lambda: parameters(StructuredOutputsParams),
    "methods of LLM": methods,
    "vllm serve": flags,
    "routes": routes,
}


TITLES = {
    "LLM": "Arguments of `LLM` and `EngineArgs`",
    "AsyncEngineArgs": "Arguments of `AsyncEngineArgs` alone",
    "methods of LLM": "Methods of `LLM`",
    "vllm serve": "Flags of `vllm serve`",
    "routes": "Paths",
}
SAME_FLAGS = "A flag that is an argument of `LLM` does what the argument does. The others:"


def title(group: str) -> str:
    """What the page calls a group."""
    return TITLES.get(group, f"`{group}`")


def table() -> str:
    """Markdown: for each group what works, what has no effect and what is refused, and why."""
    kinds = (WORKS, NO_EFFECT, NOT_HERE)
    counts = [f"| names of | {' | '.join(kinds)} |", "| --- | ---: | ---: | ---: |"]
    sections, own = [], []
    for group, names in vllm_names().items():
        found = {name: status(group, name) for name in names}
        numbers = [sum(one.kind == kind for one in found.values()) for kind in kinds]
        counts.append(f"| {title(group)} | {' | '.join(map(str, numbers))} |")
        sections += section(group, found)
        if extra := [f"`{name}`" for name in our_names(group) if name not in names]:
            own.append(f"- {title(group)}: {' '.join(extra)}")
    own = ["## Our own names", "", "vLLM 0.32 does not have these.", "", *own, ""]
    return "\n".join([*counts, "", *sections, *own])


def section(group: str, found: dict[str, Status]) -> list[str]:
    """The lines of a group. found: its names."""
    lines = [f"## {title(group)}", ""]
    if group == "vllm serve":
        lines += [SAME_FLAGS, ""]
        found = {name: one for name, one in found.items() if not is_same(name, one)}
    rows: dict[Status, list[str]] = {}
    for name, one in found.items():
        rows.setdefault(one, []).append(f"`{name}`")
    if works := rows.pop(Status(WORKS), None):
        lines += [f"Works: {' '.join(works)}", ""]
    for kind in (NO_EFFECT, NOT_HERE):
        of_kind = {one: row for one, row in rows.items() if one.kind == kind}
        if of_kind:
            lines += [f"| {kind} | because |", "| --- | --- |"]
            lines += [f"| {' '.join(row)} | {one.reason} |" for one, row in of_kind.items()]
            lines.append("")
    return lines


def is_same(flag: str, found: Status) -> bool:
    """Whether a flag is an argument of LLM and does the same."""
    name = flag.removeprefix("--").replace("-", "_")
    return name in vllm_names()["LLM"] and status("LLM", name) == found


def with_table(text: str) -> str:
    """A page with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
