"""/v1/messages and /v1/messages/count_tokens: Anthropic's fields."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from reference.server.protocol.base import Refusal, Refusals, Wire
from reference.server.protocol.sampling import ONE_MODEL

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

    refused: ClassVar[Refusals] = {"citations": Refusal("nothing is cited", ([],))}


class Message(Wire):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class MessagesTool(Wire):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")
    type: Literal["custom"] = "custom"
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: dict[str, Any] | None = Field(default=None, description=CACHES_ITSELF)

    refused: ClassVar[Refusals] = {
        "strict": Refusal("calls are read from the text as it is", (False,))
    }


class ToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Metadata(Wire):
    user_id: str | None = Field(default=None, max_length=512)


class CountTokensRequest(Wire):
    """What both requests have."""

    path: ClassVar[str] = "/v1/messages"
    model: str | None = None
    messages: list[Message] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[MessagesTool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    cache_control: dict[str, Any] | None = Field(default=None, description=CACHES_ITSELF)

    refused: ClassVar[Refusals] = {
        "output_config": Refusal("the model cannot be told how much effort to make", ({},)),
        "speed": Refusal("there is one speed", ("standard",)),
        "thinking": Refusal(
            "the model does not think apart from its answer", ({"type": "disabled"},)
        ),
        "user_profile_id": Refusal(ONE_MODEL),
        "workspace_id": Refusal(ONE_MODEL),
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
        **CountTokensRequest.refused,
        "container": Refusal(ONE_MODEL),
        "context_management": Refusal("the server keeps no context"),
        "diagnostics": Refusal(ONE_MODEL),
        "inference_geo": Refusal("there is one place"),
        "mcp_servers": Refusal("the server calls no tools itself", ([],)),
        "service_tier": Refusal("there is one tier", ("auto", "standard_only")),
    }
