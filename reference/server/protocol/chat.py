"""/v1/chat/completions: OpenAI's fields and vLLM's."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from reference.server.protocol.base import Hints, Refusal, Refusals, Wire
from reference.server.protocol.sampling import (
    HINTS,
    NO_CACHE_OPTIONS,
    NO_REASONING,
    NO_VERBOSITY,
    ONE_MODEL,
    ONE_TIER,
    REFUSED,
    STORES_NOTHING,
    SamplingFields,
)


class ContentPart(Wire):
    """A part of a message. `chat.text_of` says which kinds the model can read."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: dict[str, Any] | str | None = None
    input_audio: dict[str, Any] | None = None
    file: dict[str, Any] | None = None

    is_history: ClassVar[bool] = True


class FunctionCall(Wire):
    name: str
    arguments: str = Field(default="{}", description="JSON")

    is_history: ClassVar[bool] = True


class ToolCall(Wire):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # some clients send back the chunks that they got

    is_history: ClassVar[bool] = True


class ChatMessage(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    refused: ClassVar[Refusals] = {
        "audio": Refusal(ONE_MODEL),
        "function_call": Refusal("tool_calls took its place"),
    }
    is_history: ClassVar[bool] = True


class FunctionDefinition(Wire):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    hints: ClassVar[Hints] = {"cache_control": NO_CACHE_OPTIONS}


class Tool(Wire):
    type: Literal["function"] = "function"
    function: FunctionDefinition

    hints: ClassVar[Hints] = {"cache_control": NO_CACHE_OPTIONS}


class NamedFunction(Wire):
    name: str


class NamedToolChoice(Wire):
    type: Literal["function"] = "function"
    function: NamedFunction


class TemplateFields(Wire):
    """How messages become a prompt: vLLM's fields."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(SamplingFields, TemplateFields):
    path: ClassVar[str] = "/v1/chat/completions"

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool = True
    safety_identifier: str | None = Field(default=None, max_length=512)
    prompt_cache_key: str | None = None  # the prefix cache finds what is equal by itself

    refused: ClassVar[Refusals] = {
        **REFUSED,
        "audio": Refusal(ONE_MODEL),
        "modalities": Refusal(ONE_MODEL, (["text"],)),
        "functions": Refusal("tools took its place", ([],)),
        "function_call": Refusal("tool_choice took its place", ("none", "auto")),
        "moderation": Refusal(ONE_MODEL),
        "web_search_options": Refusal("nothing is fetched"),
        "echo": Refusal("only /v1/completions repeats the prompt", (False,)),
    }
    hints: ClassVar[Hints] = {
        **HINTS,
        "metadata": STORES_NOTHING,
        "store": STORES_NOTHING,
        "prediction": "a prompt's own n-grams are drafted with --speculative-config",
        "prompt_cache_options": NO_CACHE_OPTIONS,
        "prompt_cache_retention": NO_CACHE_OPTIONS,
        "reasoning_effort": f"{NO_REASONING}; chat_template_kwargs reach the template",
        "include_reasoning": NO_REASONING,
        "verbosity": NO_VERBOSITY,
        "service_tier": ONE_TIER,
    }
