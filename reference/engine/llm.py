"""The offline interface: `LLM(model).generate(prompts, params)`, as users of vLLM know it."""

from __future__ import annotations

import itertools
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from lessons.toolbox.model.arguments import is_whole, refuse
from reference.engine.assembly import new_engine
from reference.engine.engine_args import SIZES, EngineArgs, takes_vllm_names
from reference.engine.outputs import RequestOutput
from reference.engine.request import EngineRequest
from reference.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from lessons.l21_multi_lora.slots import LoRARequest
    from reference.features.beam_search import BeamSearchOutput, BeamSearchParams


class LLM:
    """A model that answers lists of prompts. The arguments are EngineArgs', vLLM's names.

    max_logprobs: log-probabilities that a request may ask for at each place; -1: no limit.
    chat_template: of `chat`, as text or as a file; None: the tokenizer's own.
    """

    def __init__(
        self,
        model: str = "models/tiny",
        *,
        max_logprobs: int = 20,
        chat_template: str | Path | None = None,
        **arguments,
    ):
        if not is_whole(max_logprobs, -1):
            refuse("max_logprobs", max_logprobs, "a whole number, 0 or more, or -1 for no limit")
        self.max_logprobs = max_logprobs
        self.chat_template = chat_template
        if chat_template is not None:
            from reference.engine.conversation import read_template  # here: few bring one

            self.chat_template = read_template(chat_template)
        self.args = EngineArgs.read(model=model, **arguments)
        self.engine = new_engine(self.args)
        self.counter = itertools.count()
        self.enqueued: list[EngineRequest] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """An LLM of these arguments."""
        return cls(**{one.name: getattr(engine_args, one.name) for one in fields(EngineArgs)})

    def __getattr__(self, name: str):
        """Only for what this class does not have. Raises AttributeError."""
        from reference.engine.compatibility.reading import no_method  # here: it is a mistake

        raise AttributeError(no_method(name, [one for one in dir(type(self)) if one[0] != "_"]))

    def shutdown(self) -> None:
        """End the processes that hold the model, if there are any. They end with this object,
        too.
        """
        self.engine.close()

    def get_tokenizer(self):
        """The checkpoint's, as transformers' AutoTokenizer."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of a request that brings none."""
        return SamplingParams()

    def get_world_size(self, include_dp: bool = True) -> int:
        """How many processes hold the model. include_dp: of all replicas."""
        sizes = [getattr(self.args, name) for name in (SIZES if include_dp else SIZES[:2])]
        return math.prod(sizes)

    @takes_vllm_names("LLM.generate")
    def generate(
        self,
        prompts: str | list[str] | list[int] | list[list[int]] | None = None,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        prompt_token_ids: list[list[int]] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        priority: list[int] | None = None,
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The answers, in the order of the prompts. Interrupted by Ctrl-C, it returns what it has;
        what has not ended is marked "abort". lora_request: the adapter that answers, or one for
        each prompt; None: the base model. use_tqdm: whether to show a bar, or what makes one.
        """
        if prompts is not None and prompt_token_ids is not None:
            refuse("prompts, prompt_token_ids", (prompts, prompt_token_ids), "one of them")
        prompts = prompts if prompt_token_ids is None else prompt_token_ids
        requests = self.add(prompts, sampling_params, priority, lora_request)
        self.run(requests, use_tqdm)
        return [request.output() for request in requests]

    @takes_vllm_names("LLM.enqueue")
    def enqueue(
        self,
        prompts: str | list[str] | list[int] | list[list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
        priority: list[int] | None = None,
    ) -> list[str]:
        """Queue what generate would answer, for wait_for_completion. Returns the requests' ids."""
        requests = self.add(prompts, sampling_params, priority, lora_request)
        self.enqueued += requests
        return [request.request_id for request in requests]

    @takes_vllm_names("LLM.wait_for_completion")
    def wait_for_completion(
        self,
        output_type: type | tuple[type, ...] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
    ) -> list[RequestOutput]:
        """The answers to all that was queued, in its order. output_type: RequestOutput or None."""
        if output_type not in (None, RequestOutput, (RequestOutput,)):
            refuse("output_type", output_type, "None or RequestOutput")
        requests, self.enqueued = self.enqueued, []
        self.run(requests, use_tqdm)
        return [request.output() for request in requests]

    def add(self, prompts, sampling_params, priority, lora_request) -> list[EngineRequest]:
        """Give the engine a request for each prompt, or, with ValueError, for none of them."""
        prompts = as_list(prompts)
        params = one_each("sampling_params", sampling_params, len(prompts))
        for wishes in params:
            self.check_logprobs(wishes)
        priorities = one_each("priority", 0 if priority is None else priority, len(prompts))
        adapters = one_each("lora_request", lora_request, len(prompts))
        ids, requests = [str(next(self.counter)) for _ in prompts], []
        try:
            for id, *wishes in zip(ids, prompts, params, priorities, adapters):
                self.engine.add_request(id, *wishes)
                requests.append(self.engine.requests[id])
        except ValueError as error:
            self.abort(requests)
            raise ValueError(f"prompts[{len(requests)}]: {error}") from None
        return requests

    def check_logprobs(self, params: SamplingParams | None) -> None:
        """Raise ValueError for more log-probabilities than a request may ask for."""
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name, None)
            if count is not None and self.max_logprobs != -1:
                fits = 0 <= count <= self.max_logprobs
                if not fits:
                    refuse(name, count, f"0 to max_logprobs ({self.max_logprobs})")

    def run(self, requests: list[EngineRequest], use_tqdm: bool | Callable[..., tqdm]) -> None:
        """Step until these requests have ended; Ctrl-C, or a step that raises, ends them sooner."""
        # some may have ended beside others, if they were enqueued
        waiting = {request.request_id for request in requests if not request.finished}
        new_bar = use_tqdm if callable(use_tqdm) else tqdm
        try:
            with (
                interrupts_noted() as interrupts,
                new_bar(total=len(waiting), desc="requests", disable=not use_tqdm) as bar,
            ):
                while waiting and not interrupts:
                    # not `step`, because an answer is not looked at before it has ended
                    for request in self.engine.advance():
                        if request.finished and request.request_id in waiting:
                            waiting.remove(request.request_id)
                            bar.update()
        except KeyboardInterrupt:
            pass  # as if it had been noted
        finally:
            self.abort(requests)

    def abort(self, requests: list[EngineRequest]) -> None:
        """End those that have not ended."""
        for request in requests:
            self.engine.abort_request(request.request_id)

    @takes_vllm_names("LLM.beam_search")
    def beam_search(
        self,
        prompts: str | list,
        params: BeamSearchParams,
        use_tqdm: bool = False,
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest answers that a search of this width finds, in the order of the prompts.
        lora_request: as in generate.

        Raises ValueError for a prompt that cannot be served, or while requests are unfinished.
        """
        from reference.features.beam_calls import search_all  # here: it imports the engine

        prompts = as_list(prompts)
        adapters = one_each("lora_request", lora_request, len(prompts))
        # one of the replicas, if there are several, because beams share blocks
        alone = getattr(self.engine, "alone", partial(nullcontext, self.engine.engines[0]))
        with alone() as engine:
            return search_all(engine, prompts, params, adapters, use_tqdm)

    @takes_vllm_names("LLM.chat")
    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
        priority: list[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict] | None = None,
        chat_template_kwargs: dict | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations. chat_template: a text; None: that of this object, or the
        tokenizer's. chat_template_content_format: the template gets contents as a "string", as the
        parts that "openai" has, or as they are ("auto"). continue_final_message: go on with the
        last message, which needs add_generation_prompt=False. tools, chat_template_kwargs: what the
        template is given. The others: as in generate. Raises ValueError without a template, and for
        one that fails.
        """
        from reference.engine.conversation import as_prompts  # here: few requests are chats

        prompts = as_prompts(
            self.engine.tokenizer,
            messages,
            chat_template_content_format,
            chat_template=chat_template or self.chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        return self.generate(
            prompts, sampling_params, None, use_tqdm, priority, lora_request=lora_request
        )


# ---------------------------------------------------------------- what callers give, and Ctrl-C


def as_list(prompts) -> list:
    """One prompt, or a list of them, which may be empty. Raises ValueError for anything else."""
    is_list = isinstance(prompts, (list, tuple))
    if isinstance(prompts, (str, dict)) or (is_list and prompts and type(prompts[0]) is int):
        return [prompts]
    if not is_list:
        refuse("prompts", prompts, "a prompt, or a list of them")
    return list(prompts)


def one_each(name: str, value, count: int) -> list:
    """`value` for each prompt, or the list as it is. Raises ValueError for another length."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(
            f"{name}: got {len(values)} for {count} prompts; accepted: one, or {count}"
        )
    return values


@contextmanager
def interrupts_noted() -> Iterator[list]:
    """Inside it, the first Ctrl-C only fills the list, because half a step leaves blocks that no
    request owns. A second one raises KeyboardInterrupt.
    """
    noted = []

    def note(number, frame):
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    # Python delivers signals to its main thread only. Another handler belongs to other code.
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
