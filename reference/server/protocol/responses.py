"""/v1/responses: OpenAI's fields, for text and functions. Nothing is stored."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from reference.server.protocol.base import Hints, Refusal, Refusals, Wire
from reference.server.protocol.sampling import (
    NO_CACHE_OPTIONS,
    NO_REASONING,
    NO_VERBOSITY,
    ONE_MODEL,
    ONE_TIER,
    STORES_NOTHING,
)


class InputPart(Wire):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None

    is_history: ClassVar[bool] = True


class InputItem(Wire):
    """A message, a call of a function, what the function gave, or another model's reasoning, which
    is not read.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None

    is_history: ClassVar[bool] = True


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

    hints: ClassVar[Hints] = {"verbosity": NO_VERBOSITY}


class ResponsesRequest(Wire):
    path: ClassVar[str] = "/v1/responses"

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    include: list[str] = Field(default_factory=list, max_length=64)
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
        "moderation": Refusal(ONE_MODEL),
        "previous_response_id": Refusal(STORES_NOTHING),
        "prompt": Refusal("there are no stored prompts"),
    }
    hints: ClassVar[Hints] = {
        "max_tool_calls": "it bounds tools that a server calls, and this one calls none",
        "prompt_cache_options": NO_CACHE_OPTIONS,
        "prompt_cache_retention": NO_CACHE_OPTIONS,
        "reasoning": NO_REASONING,
        "service_tier": ONE_TIER,
        "store": STORES_NOTHING,
        "stream_options": "chunks are not padded",
        "truncation": "a prompt that is too long is refused",
    }
