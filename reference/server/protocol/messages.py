"""/v1/messages and /v1/messages/count_tokens: Anthropic's fields."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from reference.server.protocol.base import Hints, Refusal, Refusals, Wire
from reference.server.protocol.sampling import NO_REASONING, ONE_MODEL, ONE_TIER, STORES_NOTHING

CACHES_ITSELF = "the prefix cache finds what is equal by itself"


class Block(Wire):
    """A block of content: text, tool_use or tool_result. cache_control is a hint and changes no
    answer.
    """

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool = False
    source: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = Field(default=None, description=CACHES_ITSELF)

    is_history: ClassVar[bool] = True


class Message(Wire):
    role: Literal["user", "assistant"]
    content: str | list[Block]

    is_history: ClassVar[bool] = True


class MessagesTool(Wire):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")
    type: Literal["custom"] = "custom"
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: dict[str, Any] | None = Field(default=None, description=CACHES_ITSELF)

    refused: ClassVar[Refusals] = {
        "strict": Refusal("calls are read from the text as it is", (False,))
    }
    hints: ClassVar[Hints] = {
        "allowed_callers": "only the client calls tools",
        "defer_loading": "all tools are in the prompt",
        "eager_input_streaming": "a call is sent when it is whole",
        "input_examples": "the template has no place for them",
    }


class ToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Metadata(Wire):
    user_id: str | None = Field(default=None, max_length=512)


class OutputConfig(Wire):
    refused: ClassVar[Refusals] = {
        "format": Refusal("/v1/chat/completions and /v1/responses have forms of an answer")
    }
    hints: ClassVar[Hints] = {"effort": "the model cannot be told how much effort to make"}


class CountTokensRequest(Wire):
    """What both requests have."""

    path: ClassVar[str] = "/v1/messages"
    model: str | None = None
    messages: list[Message] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[MessagesTool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    cache_control: dict[str, Any] | None = Field(default=None, description=CACHES_ITSELF)
    output_config: OutputConfig | None = None

    hints: ClassVar[Hints] = {
        "speed": "there is one speed",
        "thinking": NO_REASONING,
        "user_profile_id": STORES_NOTHING,
        "workspace_id": STORES_NOTHING,
        "context_management": "the whole conversation is read",
    }


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = Field(default=None, max_length=1024)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata = Metadata()
    stream: bool = False

    refused: ClassVar[Refusals] = {
        "container": Refusal(ONE_MODEL),
        "inference_geo": Refusal("there is one place"),
        "mcp_servers": Refusal("the server calls no tools itself", ([],)),
    }
    hints: ClassVar[Hints] = {
        **CountTokensRequest.hints,
        "diagnostics": STORES_NOTHING,
        "service_tier": ONE_TIER,
    }
