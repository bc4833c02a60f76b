"""A request's wishes as SamplingParams. Every API comes through here."""

import json
from dataclasses import fields
from typing import Any

from lessons.toolbox.model.arguments import shown
from reference.engine.sampling_params import SamplingParams
from reference.features.structured import SentStructure
from reference.server.errors import bad_request, refused
from reference.server.protocol.base import note
from reference.server.protocol.sampling import SamplingFields

# Fields of a request that SamplingParams has under the same name.
COMMON = {field.name for field in fields(SamplingParams)} - {"logprobs", "max_tokens"}
FORMS = ("structured_outputs", "guided_decoding")
MOST_PROMPT_LOGPROBS = 200_000  # of a call
OF_TEXTS = ("response_format", "text.format")
KINDS = ("json", "regex", "choice", "grammar")


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
        if name in COMMON and name in request.model_fields_set and name not in FORMS
    }
    if bias := wishes.get("logit_bias"):
        wishes["logit_bias"] = {token_id(name): value for name, value in bias.items()}
    if request.kv_transfer_params:
        wishes["extra_args"] = {"kv_transfer_params": request.kv_transfer_params}
    if structured := structured_of(request):
        wishes["structured_outputs"] = structured_outputs(**structured)
    return wishes


def token_id(name: str) -> int:
    """A key of logit_bias. JSON has no numbers there."""
    if not (name.isascii() and name.isdecimal() and len(name) < 10):
        raise refused("logit_bias", name, "token ids as keys")
    return int(name)


def structured_of(request: SamplingFields) -> dict[str, Any]:
    """The form that the answer has to have, as SentStructure names it; {} for any. There are
    three spellings: OpenAI's response_format, vLLM's structured_outputs, and vLLM's older guided_*.
    """
    found: dict[str, dict[str, Any]] = {}
    if request.response_format is not None:
        schema = request.response_format.json_schema
        form = form_of(request.response_format.type, schema and schema.schema_)
        found["response_format"] = form and form | {"sent_as": "response_format"}
    if request.structured_outputs is not None:
        form = request.structured_outputs.model_dump(by_alias=True, exclude_unset=True)
        if not form:
            raise refused("structured_outputs", form, f"one of {', '.join(KINDS)}, json_object")
        found["structured_outputs"] = form
    for kind in KINDS:
        if (value := getattr(request, f"guided_{kind}")) is not None:
            found[f"guided_{kind}"] = {kind: value, "sent_as": "guided_"}
    forms = {name: form for name, form in found.items() if form}
    if len(forms) > 1:
        raise refused("structured_outputs", list(forms), "one form of an answer")
    form = next(iter(forms.values()), {})
    if form and request.guided_whitespace_pattern is not None:
        form["whitespace_pattern"] = request.guided_whitespace_pattern
    return form


def form_of(kind: str, schema: Any) -> dict[str, Any]:
    """OpenAI's response_format (or text.format) as {kind: value}."""
    if kind == "json_schema" and schema is None:
        raise refused("response_format", kind, "json_schema with a field json_schema")
    return {"json_object": {"json_object": True}, "json_schema": {"json": schema}}.get(kind, {})


def structured_outputs(**form: Any) -> SentStructure:
    """What the engine takes for a form of the answer. Raises ApiError."""
    try:
        return SentStructure(**form)
    except ValueError as error:
        raise bad_request(str(error)) from None


def call_form(
    schema: dict[str, Any], other: SentStructure | None = None, choice: Any = None
) -> SentStructure:
    """Of a call that tool_choice forces. Without blanks, because a program reads them. other: a
    form that was asked for too. Raises ApiError for one that is not of texts alone, with choice.
    """
    if other is not None:
        if other.sent_as not in OF_TEXTS:
            accepted = "auto or none together with another form of the answer"
            raise refused("tool_choice", choice, accepted)
        note(other.sent_as)  # because an answer that is a call has no text
    return structured_outputs(json=schema, disable_any_whitespace=True, sent_as="tools")


def parsed_json(name: str, text: str) -> Any:
    """A field that holds JSON as a string."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise bad_request(f"{name}: got {shown(text)}; accepted: JSON", name) from None


def check_prompt_logprobs(count: int | None, num_tokens: int) -> None:
    """Raise ApiError for more log-probabilities of prompts than can be written while other clients
    wait. num_tokens: of all prompts of a call.
    """
    if count is not None and num_tokens * (count + 1) > MOST_PROMPT_LOGPROBS:
        most = max(0, MOST_PROMPT_LOGPROBS // max(1, num_tokens) - 1)
        raise refused(
            "prompt_logprobs", count, f"at most {most} for {num_tokens} tokens of prompts"
        )


def check_logprobs(name: str, count: int | None, most: int) -> int | None:
    """How many log-probabilities to report. Raises ApiError above the server's --max-logprobs."""
    if count is not None and count > most:
        raise refused(name, count, f"0 to {most} (--max-logprobs)")
    return count
