"""A request's wishes as SamplingParams. Every API comes through here."""

import json
from dataclasses import fields
from typing import Any

from lessons.toolbox.model.arguments import shown
from reference.sampling_params import SamplingParams
from reference.server.errors import bad_request, refused
from reference.server.protocol.sampling import SamplingFields

# Fields of a request that SamplingParams has under the same name.
COMMON = {field.name for field in fields(SamplingParams)} - {"logprobs", "max_tokens"}
KINDS = ("json", "regex", "choice", "grammar", "json_object")


def new_params(max_tokens: int | None, **wishes: Any) -> SamplingParams:
    """SamplingParams of the wishes that are not None. max_tokens: None for as many as fit. Raises
    ApiError that names a wish that cannot work.
    """
    wishes = {name: wish for name, wish in wishes.items() if wish is not None}
    try:
        return SamplingParams(max_tokens=max_tokens, **wishes)
    except ValueError as error:
        raise bad_request(str(error)) from None


def wishes_of(request: SamplingFields) -> dict[str, Any]:
    """The wishes that both OpenAI APIs have, under SamplingParams' names."""
    wishes = {
        name: value
        for name, value in request
        if name in COMMON and name in request.model_fields_set and name != "structured_outputs"
    }
    if bias := wishes.get("logit_bias"):
        wishes["logit_bias"] = {token_id(name): value for name, value in bias.items()}
    if structured := structured_of(request):
        wishes["structured_outputs"] = structured_outputs(**structured)
    return wishes


def token_id(name: str) -> int:
    """A key of logit_bias. JSON has no numbers there."""
    if not (name.isascii() and name.isdecimal() and len(name) < 10):
        raise refused("logit_bias", name, "token ids as keys")
    return int(name)


def structured_of(request: SamplingFields) -> dict[str, Any]:
    """{kind: value} of the form that the answer has to have; {} for any. There are three spellings:
    OpenAI's response_format, vLLM's structured_outputs, and vLLM's older guided_*.
    """
    found = {}
    if request.response_format is not None:
        schema = request.response_format.json_schema
        found |= form_of(request.response_format.type, schema and schema.schema_)
    for kind in KINDS:
        value = getattr(request, f"guided_{kind}", None)
        if request.structured_outputs is not None:
            attribute = "json_" if kind == "json" else kind
            value = getattr(request.structured_outputs, attribute) or value
        if value not in (None, False):
            if found:
                raise refused(kind, value, f"one form of an answer, and {next(iter(found))} is one")
            found[kind] = value
    return found


def form_of(kind: str, schema: Any) -> dict[str, Any]:
    """OpenAI's response_format (or text.format) as {kind: value}."""
    if kind == "json_schema" and schema is None:
        raise refused("response_format", kind, "json_schema with a field json_schema")
    return {"json_object": {"json_object": True}, "json_schema": {"json": schema}}.get(kind, {})


def structured_outputs(**form: Any) -> Any:
    """What the engine's SamplingParams takes for a form of the answer. Raises ApiError."""
    try:
        from reference.structured_outputs import StructuredOutputsParams
    except ImportError:
        (kind, value), *_ = form.items()
        accepted = "no form of the answer, because this engine has no grammars"
        raise refused(kind, value, accepted) from None
    try:
        return StructuredOutputsParams(**form)
    except ValueError as error:
        raise bad_request(str(error)) from None


def parsed_json(name: str, text: str) -> Any:
    """A field that holds JSON as a string."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise bad_request(f"{name}: got {shown(text)}; accepted: JSON", name) from None


def check_logprobs(name: str, count: int | None, most: int) -> int | None:
    """How many log-probabilities to report. Raises ApiError above the server's --max-logprobs."""
    if count is not None and count > most:
        raise refused(name, count, f"0 to {most} (--max-logprobs)")
    return count
