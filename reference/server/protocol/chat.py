"""/v1/chat/completions: OpenAI's fields and vLLM's."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from reference.server.protocol.base import Refusal, Refusals, Wire
from reference.server.protocol.sampling import (
    ONE_MODEL,
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


class FunctionCall(Wire):
    name: str
    arguments: str = Field(default="{}", description="JSON")


class ToolCall(Wire):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # some clients send back the chunks that they got


class ChatMessage(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    refused: ClassVar[Refusals] = {
        "audio": Refusal(ONE_MODEL),
        "function_call": Refusal("tool_calls took its place"),
        "annotations": Refusal(ONE_MODEL, ([],)),
    }


class FunctionDefinition(Wire):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(Wire):
    type: Literal["function"] = "function"
    function: FunctionDefinition


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
        "metadata": Refusal(STORES_NOTHING, ({},)),
        "store": Refusal(STORES_NOTHING, (False,)),
        "moderation": Refusal(ONE_MODEL),
        "prediction": Refusal("a prompt's own n-grams are drafted with --speculative-config"),
        "prompt_cache_options": Refusal("the prefix cache has no options"),
        "prompt_cache_retention": Refusal("the prefix cache is in memory", ("in_memory",)),
        "reasoning_effort": Refusal("the model does not reason apart from its answer", ("none",)),
        "include_reasoning": Refusal("there is no reasoning apart from the answer", (True, False)),
        "verbosity": Refusal("the model cannot be told how much to say", ("medium",)),
        "service_tier": Refusal("there is one tier; priority orders requests", ("auto", "default")),
        "web_search_options": Refusal("nothing is fetched"),
        "echo": Refusal("only /v1/completions repeats the prompt", (False,)),
    }
