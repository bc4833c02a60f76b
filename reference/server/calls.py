"""A call: what any API's request is turned into before the engine sees it."""

from dataclasses import dataclass, field
from typing import Any

from reference.engine.outputs import Logprobs
from reference.engine.sampling_params import SamplingParams
from reference.features.lora import LoRARequest
from reference.vision.pictures import Picture


@dataclass(eq=False)
class Call:
    """prompts: token ids of each. model: the name it was asked for by. user: whose turn it counts
    as. pictures: of its only prompt.
    """

    id: str
    model: str
    prompts: list[list[int]]
    params: SamplingParams
    lora: LoRARequest | None = None
    priority: int = 0
    user: str = ""
    pictures: list[Picture] = field(default_factory=list)

    def engine_prompt(self, prompt: int) -> list[int] | dict[str, Any]:
        """One of the prompts as the engine takes it."""
        ids = self.prompts[prompt]
        if not self.pictures:
            return ids
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": self.pictures}}

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass
class Delta:
    """What is new of one answer. index: among all answers of the call, prompt after prompt."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Answer:
    """An answer as far as it has come, the sum of its deltas."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Take what is new."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *delta.logprobs]
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass
class Usage:
    """Tokens of a call. cached: of the prompts, found in the prefix cache."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def as_openai(self) -> dict[str, Any]:
        """In the words of the OpenAI API."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
