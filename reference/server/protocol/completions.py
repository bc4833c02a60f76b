"""/v1/completions: OpenAI's fields and vLLM's."""

from typing import ClassVar

from pydantic import Field

from reference.server.protocol.base import Refusal, Refusals
from reference.server.protocol.sampling import REFUSED, SamplingFields

Tokens = list[int]


class CompletionRequest(SamplingFields):
    path: ClassVar[str] = "/v1/completions"

    prompt: str | list[str] | Tokens | list[Tokens] = Field(
        description="text, token ids, or a list of either"
    )
    max_tokens: int = Field(default=16, ge=0, description="0 only together with echo")
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0)
    add_special_tokens: bool = True

    refused: ClassVar[Refusals] = {
        **REFUSED,
        "suffix": Refusal("the model was not trained to fill in", ("",)),
        "prompt_embeds": Refusal("a prompt is text or token ids"),
    }
