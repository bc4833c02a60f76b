"""/tokenize and /detokenize as in vLLM, and OpenAI's /v1/embeddings."""

from typing import ClassVar, Literal

from pydantic import Field

from reference.server.protocol.base import Hints, Refusal, Refusals, Wire
from reference.server.protocol.chat import ChatMessage, TemplateFields, Tool
from reference.server.protocol.completions import Tokens


class TokenizeRequest(TemplateFields):
    """A prompt, or messages."""

    path: ClassVar[str] = "/tokenize"
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    refused: ClassVar[Refusals] = {"mm_processor_kwargs": Refusal("the model reads text", ({},))}


class DetokenizeRequest(Wire):
    path: ClassVar[str] = "/detokenize"

    model: str | None = None
    tokens: Tokens


class EmbeddingRequest(Wire):
    path: ClassVar[str] = "/v1/embeddings"

    model: str | None = None
    input: str | list[str] | Tokens | list[Tokens] = Field(
        description="text, token ids, or a list of either"
    )
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = Field(default=None, max_length=512)
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)

    refused: ClassVar[Refusals] = {
        "dimensions": Refusal("a hidden state cannot be cut shorter without training"),
        "normalize": Refusal("every vector has length 1", (True,)),
    }
    hints: ClassVar[Hints] = {"priority": "texts are embedded in turns, one client after the other"}
