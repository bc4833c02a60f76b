"""The engine: requests come in, every `step` runs one pass of the model, answers go out.

    engine = new_engine(EngineArgs(model="models/tiny"))  # of reference.engine.assembly
    engine.add_request("a", "def f(", SamplingParams(max_tokens=20))
    while engine.has_unfinished_requests:
        for output in engine.step(): ...

Read `run`. Each line is a lesson.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from torch import Tensor

from lessons.l14_continuous_batching.sequence import Step
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.toolbox.model.arguments import check_kind, is_whole, refuse
from lessons.toolbox.model.placement import launching_on
from reference.engine.model_runner import ModelRunner
from reference.engine.outputs import RequestOutput
from reference.engine.request import EngineRequest, EngineSequence, StaysHere, asked, sampled_rows
from reference.engine.sampler import Sampler
from reference.engine.sampling_params import SamplingParams
from reference.engine.text import Prompts, new_detokenizer

if TYPE_CHECKING:
    from lessons.l21_multi_lora.slots import LoRARequest
    from lessons.l22_serving.fair import FairQueue
    from reference.features.structured import Structures
    from reference.speculation.speculation import Speculation


class Engine:
    """What is running, and the loop's body. One thread at a time may call it.

    seed: of the requests that bring none; None: a fresh one each time. speculation: lets sequences
    get several tokens from one pass; None: one token each.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: ChunkedScheduler,
        tokenizer,
        max_model_len: int,
        seed: int | None = None,
        speculation: Speculation | None = None,
    ):
        self.runner, self.scheduler, self.device = runner, scheduler, runner.model.device
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.prompts = Prompts(tokenizer, runner, max_model_len)
        self.speculation = speculation
        self.sampler = Sampler() if speculation is None else speculation.verify
        self.requests: dict[str, EngineRequest] = {}
        self.fair: FairQueue | None = None  # whose turn it is, where users take turns
        self.transfers = StaysHere()
        self.under_way: list[EngineSequence] = []  # launched and not told, if a step is ahead
        self.admit: Callable[[EngineRequest], None] = lambda request: None  # may raise
        self.ids, self.seeds = count(), Random(seed)  # of sequences, of requests

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    @cached_property
    def structures(self) -> Structures:
        """What requests with structured outputs share; made for the first of them."""
        from reference.features.structured import Structures

        return Structures(self.tokenizer, self.runner.model.config.vocab_size)

    @property
    def engines(self) -> list[Engine]:
        """The replicas: this one alone."""
        return [self]

    def close(self) -> None:
        """End what runs the model, where that is processes of their own, and copies under way."""
        self.scheduler.host.close()
        self.runner.close()

    # ------------------------------------------------------------ in

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        user: str = "",
    ) -> None:
        """Queue a request. prompt: text or token ids. priority: smaller runs first. lora_request:
        the adapter that answers; None: the base model. user: among whom a fair order shares.
        Raises ValueError, in one line, for a request that cannot be served; nothing is queued then.
        """
        if not isinstance(request_id, str) or request_id in self.requests:
            refuse("request_id", request_id, "a string not in use")
        params = SamplingParams() if params is None else params
        check_kind(SamplingParams, "SamplingParams", sampling_params=params)
        check_kind(str, "a string", user=user)
        if not is_whole(priority, -(2**31)):
            refuse("priority", priority, "a whole number")
        text, ids, pictures = self.read_prompt(prompt)
        self.prompts.check_tokens(
            logit_bias=params.logit_bias or (),
            stop_token_ids=params.stop_token_ids,
            allowed_token_ids=params.allowed_token_ids or (),
        )
        adapter = self.take_adapter(lora_request)
        request = EngineRequest(request_id, text, ids, params, lora_request, adapter, pictures)
        request.user = user
        try:
            self.transfers.begin(request)
            request.sequences = self.new_sequences(request, priority)
            if self.fair is not None:
                request.ticket = self.fair.arrive(user, request.most_tokens)
            self.admit(request)
            self.scheduler.add(request.sequences[0])
        except Exception:
            self.let_go(request)
            raise
        request.waiting_to_fork = request.sequences[1:]
        self.requests[request_id] = request

    def read_prompt(self, prompt: str | list[int] | dict) -> tuple:
        """A prompt as text, if it was one, as token ids, and its pictures. Raises ValueError."""
        return self.prompts.read(prompt)

    def new_sequences(self, request: EngineRequest, priority: int) -> list[EngineSequence]:
        """The answers of a request. The first runs the prompt, the others fork from it."""
        params, config = request.params, self.runner.model.config
        room = self.max_model_len - len(request.prompt_token_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        sequences, bans = [], self.prompts.bans(params)
        for index, row in enumerate(params.rows(self.seeds)):
            # min_tokens also keeps away an end-of-sequence token that would not end the answer
            late = frozenset((*params.stop_token_ids, *config.eos_token_ids))
            stops = frozenset(params.stop_token_ids) if params.ignore_eos else late
            constraint = params.structure and self.structures.constraint(params.structure, stops)
            sequences.append(
                EngineSequence(
                    row=next(self.ids),
                    prompt=request.prompt_token_ids,
                    **asked(request, self.runner),
                    max_new_tokens=limit,
                    sampling=row,
                    stop_token_ids=stops,
                    late_token_ids=late,
                    params=params,
                    request=request,
                    adapter=request.adapter,
                    pictures=request.pictures,
                    index=index,
                    priority=priority,
                    bans=bans,
                    detokenizer=new_detokenizer(self.tokenizer, request.prompt_token_ids, params),
                    constraint=constraint,
                    places=1 if index else params.drawn,
                    reuses_prefix=params.reads_prefix_cache,
                )
            )
        return sequences

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request where it stands; returns what it has so far. None: it is unknown."""
        check_kind(str, "a string", request_id=request_id)
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        for sequence in request.sequences:
            self.scheduler.abort(sequence)  # a finished one, too, if its step raised
            sequence.finish_reason = sequence.finish_reason or "abort"
        self.let_go(request)
        return request.output()

    def let_go(self, request: EngineRequest) -> None:
        """A request has ended: it needs no adapter any more, and took its share of its user's."""
        if request.adapter is not None:
            self.runner.adapters.store.give_back(request.adapter)
        if request.ticket is not None:
            self.fair.leave(request.ticket, request.used_tokens)
            self.scheduler.waiting.sort(key=self.scheduler.order)

    def take_adapter(self, request: LoRARequest | None):
        """The adapter that a request wants, held for it; None: none. Raises ValueError."""
        if request is None:
            return None
        if self.runner.adapters is None:
            refuse("lora_request", request, "None, because enable_lora is False")
        return self.runner.adapters.store.take(request)

    def add_lora(self, lora_request: LoRARequest) -> None:
        """Read an adapter before a request asks for it. Raises ValueError if it cannot be had."""
        adapter = self.take_adapter(lora_request)
        if adapter is not None:
            self.runner.adapters.store.give_back(adapter)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter's id; requests that have it keep it. Returns whether it was known."""
        adapters = self.runner.adapters
        return adapters is not None and adapters.store.remove(lora_int_id)

    def list_loras(self) -> set[int]:
        """The ids of the adapters on the host."""
        adapters = self.runner.adapters
        return set() if adapters is None else set(adapters.store.known)

    # ------------------------------------------------------------ a step

    def step(self) -> list[RequestOutput]:
        """One pass of the model. Returns the requests that got a token, as they stand now."""
        return [request.output() for request in self.advance()]

    def advance(self) -> list[EngineRequest]:
        """One pass of the model. Returns the requests that got a token. If it raises, its requests
        are aborted, because it is unknown what was written.
        """
        self.scheduler.host.settle()
        step = self.scheduler.schedule()
        sequences = self.under_way + [chunk.sequence for chunk in step.chunks]
        if not sequences:
            self.scheduler.host.wait()
        self.note_scheduled(step)
        try:
            with launching_on(self.device):
                touched = self.run(step) if sequences else []
        except BaseException:
            # Of one that was aborted while it ran a namesake may be here, which has not run.
            for request in {one.request for one in sequences}.intersection(self.requests.values()):
                self.abort_request(request.request_id)
            raise
        touched = self.transfers.released(touched)
        for request in touched:
            if request.finished:
                del self.requests[request.request_id]
                self.let_go(request)
        return touched

    def run(self, step: Step) -> list[EngineRequest]:
        """Run, score, sample, count, fork, tidy up. Returns the requests that got a token."""
        if self.speculation is not None:
            self.speculation.draft(step)
        hidden = self.runner(step, self.scheduler.blocks.tables)
        self.score_prompts(step, hidden)
        sampled = self.sample(step, hidden)
        if self.speculation is not None:
            self.speculation.keep(step)
        self.scheduler.finish(step)
        self.fork(sampled)
        self.scheduler.leave()
        return list(dict.fromkeys(sequence.request for sequence in sampled))

    def sample(self, step: Step, hidden: Tensor) -> list[EngineSequence]:
        """A token or more for every sequence whose newest has run, and a first one for each that
        forks from one now. hidden: [T, hidden_size]. Returns these sequences.
        """
        rows, sequences = sampled_rows(step)
        found = self.emit(hidden, rows, sequences) if rows else []
        for sequence, emitted in zip(sequences, found):
            for token, logprobs in zip(emitted.tokens, emitted.logprobs):
                if not sequence.finished:  # drafted tokens may follow the one that ends an answer
                    sequence.take(token, logprobs)
            sequence.request.note_token(time.monotonic())
        return sequences

    def emit(self, hidden: Tensor, rows: list[int], sequences: list[EngineSequence]) -> list:
        """What each sequence gets (Emitted). hidden: [T, hidden_size]; rows: those to sample."""
        return self.sampler(self.runner.logits(hidden, rows), sequences)

    def fork(self, sampled: list[EngineSequence]) -> None:
        """Let the other answers of a request run, now that its prompt has."""
        for sequence in sampled:
            for child in sequence.request.waiting_to_fork:
                self.scheduler.fork(sequence, child)
            sequence.request.waiting_to_fork = []

    def note_scheduled(self, step: Step) -> None:
        """For its metrics: when a request first ran, and how much of it a prefix cache knew."""
        for chunk in step.chunks:
            request = chunk.sequence.request
            if request.metrics.first_scheduled is None:
                request.metrics.first_scheduled = time.monotonic()
                request.num_cached_tokens = chunk.sequence.computed
                if self.fair is not None:
                    self.fair.begin(request.ticket)

    def score_prompts(self, step: Step, hidden: Tensor) -> None:
        """Log-probabilities of prompts, for those that ask for them. hidden: [T, hidden_size]."""
        if any(one.sequence.params.prompt_logprobs is not None for one in step.chunks):
            from reference.features.prompt_scores import score_prompts

            score_prompts(self.runner, self.tokenizer, step, hidden)
