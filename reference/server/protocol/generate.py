"""/generate, which two servers have: vLLM's legacy one reads {"prompt": …}, and
text-generation-inference {"inputs": …, "parameters": …}. The body tells which one is meant.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from reference.server.protocol.base import Refusal, Refusals, Wire
from reference.server.protocol.sampling import MOST_CHOICES, SamplingFields


class LegacyRequest(SamplingFields):
    """vLLM's: every other field is one of SamplingParams."""

    path: ClassVar[str] = "/v1/completions"
    prompt: str | list[int]
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0)
    add_special_tokens: bool = True


class Grammar(Wire):
    type: Literal["json", "json_schema", "regex"]
    value: Any


class TgiParameters(Wire):
    adapter_id: str | None = None
    best_of: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    decoder_input_details: bool = False
    details: bool = False
    do_sample: bool = False
    frequency_penalty: float | None = None
    grammar: Grammar | None = None
    max_new_tokens: int = Field(default=100, ge=1)
    repetition_penalty: float | None = None
    return_full_text: bool = False
    seed: int | None = None
    stop: list[str] | None = Field(default=None, max_length=1024)
    temperature: float | None = None
    top_k: int | None = None
    top_n_tokens: int | None = Field(default=None, ge=0)
    top_p: float | None = None
    truncate: int | None = Field(default=None, ge=1)

    refused: ClassVar[Refusals] = {
        "typical_p": Refusal("the sampler has no typical decoding", (1.0, 1)),
        "watermark": Refusal("answers are not marked", (False,)),
    }


class TgiRequest(Wire):
    inputs: str
    parameters: TgiParameters = TgiParameters()
    stream: bool = False


def which(body: Any) -> str:
    """The server whose request this is."""
    return "vllm" if isinstance(body, dict) and "prompt" in body else "tgi"


GenerateRequest = Annotated[
    Annotated[LegacyRequest, Tag("vllm")] | Annotated[TgiRequest, Tag("tgi")],
    Discriminator(which),
]
