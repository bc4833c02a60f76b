"""/v1/responses: OpenAI's fields, for text and functions. Nothing is stored."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from reference.server.protocol.base import Refusal, Refusals, Wire
from reference.server.protocol.sampling import ONE_MODEL, STORES_NOTHING


class InputPart(Wire):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None

    refused: ClassVar[Refusals] = {
        "annotations": Refusal(ONE_MODEL, ([],)),
        "logprobs": Refusal("they are of an answer", ([],)),
    }


class InputItem(Wire):
    """A message, a call of a function, or what the function gave."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class FunctionTool(Wire):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class NamedTool(Wire):
    type: Literal["function"]
    name: str


class TextFormat(Wire):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] | bool = Field(default=True, alias="schema")
    strict: bool = False


class TextConfig(Wire):
    format: TextFormat = TextFormat()

    refused: ClassVar[Refusals] = {
        "verbosity": Refusal("the model cannot be told how much to say", ("medium",))
    }


class ResponsesRequest(Wire):
    path: ClassVar[str] = "/v1/responses"

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    include: list[Literal["message.output_text.logprobs"]] = Field(default_factory=list)
    text: TextConfig = TextConfig()
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    metadata: dict[str, str] = Field(default_factory=dict)
    stream: bool = False
    user: str | None = Field(default=None, max_length=512)
    safety_identifier: str | None = Field(default=None, max_length=512)
    prompt_cache_key: str | None = None

    refused: ClassVar[Refusals] = {
        "access_programs": Refusal(ONE_MODEL),
        "background": Refusal(STORES_NOTHING, (False,)),
        "background_options": Refusal(STORES_NOTHING),
        "context_management": Refusal(STORES_NOTHING, ([],)),
        "conversation": Refusal(STORES_NOTHING),
        "image": Refusal(ONE_MODEL),
        "max_tool_calls": Refusal("the server calls no tools itself"),
        "moderation": Refusal(ONE_MODEL),
        "previous_response_id": Refusal(STORES_NOTHING),
        "prompt": Refusal("there are no stored prompts"),
        "prompt_cache_options": Refusal("the prefix cache has no options"),
        "prompt_cache_retention": Refusal("the prefix cache is in memory", ("in_memory",)),
        "reasoning": Refusal("the model does not reason apart from its answer", ({},)),
        "service_tier": Refusal("there is one tier", ("auto", "default")),
        "store": Refusal(STORES_NOTHING, (False,)),
        "stream_options": Refusal("chunks are not padded", ({}, {"include_obfuscation": False})),
        "truncation": Refusal("a prompt that is too long is refused", ("disabled",)),
    }
