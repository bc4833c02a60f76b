"""What a request gives back, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lessons.l21_multi_lora.slots import LoRARequest


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability under the raw logits, and its rank among all tokens (1: first)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # by token id


@dataclass
class CompletionOutput:
    """One answer. finish_reason: "stop", "length", "abort", or None while it goes on. stop_reason:
    the stop string or token that ended it; None for an end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class SpeculationCounts:
    """What speculation did for a request, or for all of an engine's. passes: of the target that
    gave a sequence a token or more. drafted, accepted: tokens. emitted: tokens of the answers.
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0

    def add(self, drafted: int, accepted: int, emitted: int) -> None:
        """One sequence in one pass."""
        self.passes += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted

    @property
    def acceptance_rate(self) -> float:
        """The share of drafted tokens that stayed. As vLLM counts, those behind a rejected one are
        drafted tokens, too.
        """
        return self.accepted / max(1, self.drafted)

    @property
    def tokens_per_pass(self) -> float:
        """1 without speculation, at most K + 1 with it."""
        return self.emitted / max(1, self.passes)


@dataclass
class RequestMetrics:
    """Seconds of the monotonic clock. queue_s: until it first ran; ttft_s: until its first
    token.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    preemptions: int = 0
    speculation: SpeculationCounts | None = None  # None: no step of it was verified

    @property
    def queue_s(self) -> float | None:
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival


@dataclass
class RequestOutput:
    """A request as it stands. num_cached_tokens: of the prompt, found in the prefix cache.
    kv_transfer_params: of one that is decoded elsewhere, what to tell that engine.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = field(default=None, repr=False)
    lora_request: LoRARequest | None = None
    kv_transfer_params: dict | None = None
