"""A request inside the engine: one prompt, one or more sequences that answer it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lessons.l14_continuous_batching.sequence import Chunk, Sequence, Step
from lessons.l15_chunked_prefill.preemption import by_arrival
from lessons.toolbox.model.arguments import refuse
from reference.engine.outputs import CompletionOutput, Logprobs, RequestMetrics, RequestOutput
from reference.engine.sampling_params import SamplingParams
from reference.engine.text import Detokenizer

if TYPE_CHECKING:  # what only some requests have is imported where they ask for it
    from lessons.l17_tree_speculation.trees.tree import Tree
    from lessons.l21_multi_lora.peft.adapters import Adapter
    from lessons.l21_multi_lora.slots import LoRARequest
    from lessons.l22_serving.fair import Ticket
    from reference.engine.model_runner import ModelRunner
    from reference.features.bans import Bans
    from reference.features.kv_transfer.handover import Departure
    from reference.features.structured import Constraint
    from reference.vision.prompt import Placed
    from reference.vision.sight import Sight


@dataclass(eq=False)
class EngineSequence(Sequence):
    """One answer under way."""

    params: SamplingParams = field(default_factory=SamplingParams)
    request: EngineRequest | None = None
    adapter: Adapter | None = None
    pictures: tuple[Placed, ...] = ()
    index: int = 0  # among the answers to its prompt
    priority: int = 0
    bias: tuple[Tensor, Tensor] | None = None  # logit_bias: token ids, values
    late_token_ids: frozenset[int] = frozenset()  # none of them before min_tokens
    bans: Bans | None = None  # allowed_token_ids, bad_words
    detokenizer: Detokenizer | None = None
    constraint: Constraint | None = None  # structured_outputs: what it may still say
    # While it speculates: how many of its tokens, the last ones, are drafted or places for drafted
    # ones; and the tree whose nodes they are, with the newest as its root. None: a chain.
    num_drafted: int = 0
    tree: Tree | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def is_decoding(self) -> bool:
        """As in lesson 14; what was drafted runs beside the newest token."""
        return self.to_compute == 1 + self.num_drafted and bool(self.output)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_greedy(self) -> bool:
        """Whether its token is always the likeliest, by the logits as they are."""
        return self.sampling.temperature == 0 and not self.sampling.has_penalties

    @property
    def wants_logprobs(self) -> bool:
        return self.params.wants_logprobs

    def take(self, token: int, logprobs: Logprobs | None) -> None:
        """A sampled token: keep it, and see whether it ends the answer."""
        self.append(token)
        if self.constraint is not None:
            self.constraint.take(token)
        if logprobs is not None:
            if self.detokenizer is not None:
                logprobs = self.detokenizer.named(logprobs, self.output[:-1])
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token].logprob
        is_late = len(self.output) >= self.params.min_tokens
        if self.constraint is not None:
            is_late |= self.constraint.has_ended  # a complete text ends, also before min_tokens
        is_stop = token in self.stop_token_ids and is_late
        if is_stop:
            self.finish_reason = "stop"
            self.stop_reason = token if token in self.params.stop_token_ids else None
        if self.detokenizer is not None:
            is_cut = is_stop and not self.params.include_stop_str_in_output
            # later than a stop token: a string counts that ends after min_tokens, as in vLLM
            may_stop = len(self.output) > self.params.min_tokens
            stop = self.detokenizer.append(token, is_last_special=is_cut, may_stop=may_stop)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
        if self.constraint is not None and self.constraint.failure is not None:
            self.finish_reason, self.stop_reason = "abort", self.constraint.failure
        if self.finish_reason is None and len(self.output) >= self.max_new_tokens:
            self.finish_reason = "length"
        # not behind a stop string, at which the text was cut
        if self.finished and self.detokenizer is not None and not isinstance(self.stop_reason, str):
            self.detokenizer.finish()

    def completion(self) -> CompletionOutput:
        text = "" if self.detokenizer is None else self.detokenizer.text
        if self.detokenizer is not None and not self.finished:
            text = text[: self.detokenizer.safe_length]
        with_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            self.index,
            text,
            list(self.output),
            self.cumulative_logprob if self.wants_logprobs else None,
            reported(list(self.logprobs), self.params) if with_logprobs else None,
            self.finish_reason,
            self.stop_reason,
        )


@dataclass(eq=False)
class EngineRequest:
    """What `add_request` was given, and the sequences that answer it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    lora_request: LoRARequest | None = None
    adapter: Adapter | None = None  # held on the host until the request ends
    pictures: tuple[Placed, ...] = ()  # and where they stand in the prompt
    user: str = ""  # among whom a fair order shares
    ticket: Ticket | None = None  # its place among its user's requests
    sequences: list[EngineSequence] = field(default_factory=list)
    waiting_to_fork: list[EngineSequence] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.monotonic()))
    departure: Departure | None = None  # of its K and V to another engine
    kv_transfer_params: dict | None = None  # for the engine that goes on with it

    def __post_init__(self):
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing stands before the first token

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

    @property
    def most_tokens(self) -> int:
        """Of its prompt and all its answers."""
        return len(self.prompt_token_ids) + sum(one.max_new_tokens for one in self.sequences)

    @property
    def used_tokens(self) -> int:
        """Of most_tokens, those that it took, or none if it never ran."""
        if self.metrics.first_scheduled is None:
            return 0
        return len(self.prompt_token_ids) + sum(len(one.output) for one in self.sequences)

    def note_token(self, now: float) -> None:
        """For its metrics: a token came. now: in seconds of the monotonic clock."""
        self.metrics.first_token = self.metrics.first_token or now
        self.metrics.last_token = now

    def output(self) -> RequestOutput:
        """The request as it stands: of `best_of` answers the n likeliest, once all have ended."""
        self.metrics.preemptions = sum(sequence.preemptions for sequence in self.sequences)
        answers = self.sequences
        if self.params.drawn > self.params.n:
            answers = sorted(answers, key=mean_logprob, reverse=True)[: self.params.n]
        completions = [sequence.completion() for sequence in answers]
        if self.params.drawn > self.params.n:
            for index, completion in enumerate(completions):
                completion.index = index
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            completions,
            self.finished,
            self.prompt_logprobs and reported(self.prompt_logprobs, self.params),
            self.num_cached_tokens,
            self.metrics,
            self.lora_request,
            self.kv_transfer_params,
        )


class StaysHere:
    """What an engine asks of kv_transfer_params that sends K and V to no other one, and gets
    none.
    """

    about = None

    def begin(self, request: EngineRequest) -> None:
        """A request has come. Raises ValueError if it asks for more."""
        if request.params.extra_args:
            accepted = "none, because kv_transfer_config is None"
            refuse("kv_transfer_params", request.params.extra_args["kv_transfer_params"], accepted)

    def released(self, touched: list[EngineRequest]) -> list[EngineRequest]:
        """Who may be told that a token has come: all."""
        return touched


def reported(logprobs: list[Logprobs | None], params: SamplingParams):
    """Log-probabilities in the form that a request asks for."""
    if params.flat_logprobs:
        from reference.features.token_texts import FlatLogprobs  # here: few requests ask for it

        return FlatLogprobs.of(logprobs)
    return logprobs


def mean_logprob(sequence: EngineSequence) -> float:
    """By which `best_of` ranks answers."""
    return sequence.cumulative_logprob / max(1, len(sequence.output))


def bias_of(params: SamplingParams, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """logit_bias as tensors: token ids [K] int64 and values [K]."""
    if not params.logit_bias:
        return None
    tokens, values = zip(*params.logit_bias.items())
    return torch.tensor(tokens, device=device), torch.tensor(values, device=device)


def asked(request: EngineRequest, runner: ModelRunner) -> dict:
    """Fields of a sequence that few requests ask for: names of its tokens, logit_bias."""
    names = names_of(request, runner.sight)
    return names | {"bias": bias_of(request.params, runner.model.device)}


def names_of(request: EngineRequest, sight: Sight | None) -> dict:
    """How the prefix cache knows the tokens of a request: with another adapter or another picture
    equal tokens have other K and V, so they get other names. Fields of a Sequence. sight: of a
    model that sees pictures.
    """
    if request.adapter is None and not request.pictures:
        return {}
    names = list(request.prompt_token_ids)
    if request.pictures:
        sight.names.put(names, request.pictures)
    if request.adapter is not None:
        # The first name alone, because a block is known by all names before it, too. No token has
        # the number: ids and rows of pictures are below 2^32.
        names[0] += request.adapter.serial << 32
    return {"names": names}


def ends(step: Step) -> list[tuple[int, Chunk]]:
    """Each chunk with the row of its last token."""
    found, row = [], -1
    for chunk in step.chunks:
        row += chunk.count
        found.append((row, chunk))
    return found


def sampled_rows(step: Step) -> tuple[list[int], list[EngineSequence]]:
    """The sequences that get a token from a step, and the rows of their logits: each whose newest
    token runs in it, with a row for every drafted token, too; and each that forks from one now.
    """
    rows, sequences = [], []
    for last, chunk in ends(step):
        if not chunk.is_sampled:
            continue
        sequence = chunk.sequence
        children = sequence.request.waiting_to_fork
        rows += range(last - sequence.num_drafted, last + 1)
        rows += [last] * len(children)
        sequences += [sequence, *children]
    return rows, sequences


# ---------------------------------------------------------------- whose turn it is


def by_priority(sequence: EngineSequence) -> tuple:
    """The smallest priority first, then the order of arrival."""
    return (sequence.priority, sequence.row)


def by_user(sequence: EngineSequence) -> tuple:
    """The smallest priority first, then the user whose turn it is, then the order of arrival."""
    return (sequence.priority, sequence.request.ticket.start, sequence.row)


ORDERS = {"fcfs": by_arrival, "priority": by_priority, "fair": by_user}
