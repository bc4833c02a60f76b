"""The fields by which the OpenAI APIs and vLLM's additions to them ask for a kind of answer."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from reference.server.protocol.base import Hints, Refusal, Refusals, Wire

MOST_CHOICES = 128  # as OpenAI's n
ONE_MODEL = "this server answers with text from one model"
STORES_NOTHING = "this server stores nothing"
# Of OpenAI's requests and of vLLM's: what the engine has no answer to.
REFUSED = {
    "use_beam_search": Refusal(
        "beams need an idle engine; offline LLM.beam_search does it", (False,)
    ),
    "spaces_between_special_tokens": Refusal("tokens are joined as they are", (True,)),
    "cache_salt": Refusal("the prefix cache has no salts"),
    "logits_processors": Refusal("no code of a client is run", ([],)),
    "mm_processor_kwargs": Refusal(ONE_MODEL, ({},)),
    "structural_tag": Refusal("a grammar can say the same"),
    "logprob_token_ids": Refusal("logprobs reports the likeliest tokens"),
}
# Of the same requests: what changes no answer.
HINTS = {
    "length_penalty": "it ranks beams, and there are none",
    "vllm_xargs": "it is for extensions of a server, and there are none",
    "guided_decoding_backend": "there is one backend",
}
NO_CACHE_OPTIONS = "the prefix cache finds what is equal by itself, and keeps what it can"
ONE_TIER = "there is one tier; priority orders requests"
NO_REASONING = "the model does not reason apart from its answer"
NO_VERBOSITY = "the model cannot be told how much to say"


class StreamOptions(Wire):
    include_usage: bool = False
    continuous_usage_stats: bool = False

    hints: ClassVar[Hints] = {"include_obfuscation": "chunks are not padded"}


class JsonSchema(Wire):
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] | bool = Field(default=True, alias="schema")
    strict: bool = False


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Wire):
    """vLLM's field of this name. One of the first five has to be given."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool = False
    disable_additional_properties: bool = False

    refused: ClassVar[Refusals] = {"structural_tag": REFUSED["structural_tag"]}


class SamplingFields(Wire):
    """What /v1/completions and /v1/chat/completions have in common. Defaults are
    SamplingParams'.
    """

    model: str | None = Field(default=None, description="of /v1/models; default: the base model")
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = Field(default=None, max_length=1024)
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = Field(default=None, max_length=1024)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        description="keep so many of the prompt's last tokens, among them the special ones that "
        "the tokenizer puts around a text; -1: all that fit",
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=512)
    priority: int = 0
    request_id: str | None = Field(default=None, max_length=128, pattern=r"^[\w.:-]+$")
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    kv_transfer_params: dict[str, Any] | None = Field(
        default=None,
        description="where K and V of the prompt go or come from, as vLLM's proxies write it; for "
        "a server with --kv-transfer-config",
    )

    refused: ClassVar[Refusals] = REFUSED
    hints: ClassVar[Hints] = HINTS
