"""/generate of two servers, vLLM's legacy one and text-generation-inference; and what else the
latter has. Which one is meant shows in the body.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from reference.engine.outputs import Logprobs
from reference.server.calls import Answer, Call, Delta
from reference.server.errors import refused
from reference.server.generation import Run
from reference.server.protocol.generate import GenerateRequest, LegacyRequest, TgiRequest
from reference.server.routes.common import check_answers, check_stream, user_of
from reference.server.routes.completions import read_prompts
from reference.server.sampling import (
    check_logprobs,
    new_params,
    parsed_json,
    structured_outputs,
    wishes_of,
)
from reference.server.service import Service
from reference.server.streaming import EventStream, Watched, Whole, event

# ---------------------------------------------------------------- vLLM's legacy /generate


async def legacy(service: Service, body: LegacyRequest, http: Request) -> Watched:
    """{"text": [prompt and answer, …]}; as a stream, the same after each token, as vLLM's did."""
    check_stream(body)
    keep = body.truncate_prompt_tokens
    prompts = await read_prompts(service, "prompt", body.prompt, body.add_special_tokens, keep)
    check_answers(service, prompts, body.n)
    check_logprobs("logprobs", body.logprobs, service.args.max_logprobs)
    params = new_params(body.max_tokens, **wishes_of(body), logprobs=body.logprobs)
    call = service.new_call("gen-", body.model, prompts, params, user=user_of(http, body.user),
                            priority=body.priority, request_id=body.request_id)  # fmt: skip
    run, timeout_s = Run(service, call), service.args.write_timeout
    is_text = isinstance(body.prompt, str)
    prompt = body.prompt if is_text else service.tokens.decode(body.prompt)

    async def whole() -> dict[str, Any]:
        return {"text": [prompt + answer.text for answer in await run.answers()]}

    async def events() -> AsyncIterator[bytes]:
        texts = [prompt] * params.n
        async with aclosing(run.deltas()) as deltas:
            async for delta in deltas:
                texts[delta.index] += delta.text
                yield event({"text": texts})

    if body.stream:
        return EventStream(events(), timeout_s)
    return Whole(whole(), timeout_s)


# ---------------------------------------------------------------- text-generation-inference

REASONS = {"length": "length", "stop": "eos_token"}


class Tgi:
    """One request of text-generation-inference."""

    def __init__(self, service: Service, body: TgiRequest, call: Call):
        self.tokens = service.tokens
        self.body = body
        self.wishes = body.parameters
        self.call = call
        self.run = Run(service, call)

    def token(self, token: int, logprobs: Logprobs) -> dict[str, Any]:
        """A token of the answer."""
        return {
            "id": token,
            "text": self.tokens.text_of(token),
            "logprob": logprobs[token].logprob,
            "special": self.tokens.is_special(token),
        }

    def top(self, logprobs: Logprobs) -> list[dict[str, Any]]:
        """The likeliest tokens at one place."""
        best = sorted(logprobs, key=lambda token: logprobs[token].rank)
        return [self.token(token, logprobs) for token in best[: self.wishes.top_n_tokens]]

    def reason(self, answer: Answer | Delta) -> str:
        """Why the answer ended."""
        if answer.finish_reason == "stop" and answer.stop_reason is not None:
            return "stop_sequence"
        return REASONS[answer.finish_reason]

    def text(self, text: str) -> str:
        """The answer, behind the prompt if that was asked for."""
        return self.body.inputs + text if self.wishes.return_full_text else text

    def details(self, answer: Answer) -> dict[str, Any]:
        """What `details` asks for."""
        scored = list(zip(answer.token_ids, answer.logprobs))
        found = {
            "finish_reason": self.reason(answer),
            "generated_tokens": len(answer.token_ids),
            "seed": self.wishes.seed,
            "prefill": self.prefill() if self.wishes.decoder_input_details else [],
            "tokens": [self.token(token, logprobs) for token, logprobs in scored],
        }
        if self.wishes.top_n_tokens:
            found["top_tokens"] = [self.top(logprobs) for _, logprobs in scored]
        return found

    def prefill(self) -> list[dict[str, Any]]:
        """The prompt's tokens; the first has no score."""
        found = []
        scores = self.run.outputs[0].prompt_logprobs
        for token, logprobs in zip(self.call.prompts[0], scores):
            logprob = None if logprobs is None else logprobs[token].logprob
            found.append({"id": token, "text": self.tokens.text_of(token), "logprob": logprob})
        return found

    async def whole(self) -> dict[str, Any]:
        """The answer in one."""
        answer = (await self.run.answers())[0]
        found: dict[str, Any] = {"generated_text": self.text(answer.text)}
        if self.wishes.details:
            found["details"] = self.details(answer)
        return found

    async def events(self) -> AsyncIterator[bytes]:
        """An event for each token. Text that is held back comes with a later token."""
        answer, index = Answer(0), 0
        async with aclosing(self.run.deltas()) as deltas:
            async for delta in deltas:
                answer.add(replace(delta, logprobs=None))
                last = len(delta.token_ids) - 1
                for at, (token, logprobs) in enumerate(zip(delta.token_ids, delta.logprobs)):
                    index += 1
                    shown = self.token(token, logprobs)
                    shown["text"] = delta.text if at == last else ""
                    found = {
                        "index": index,
                        "token": shown,
                        "generated_text": None,
                        "details": None,
                    }
                    if self.wishes.top_n_tokens:
                        found["top_tokens"] = self.top(logprobs)
                    if at == last and delta.finish_reason is not None:
                        found |= self.end(answer)
                    yield event(found)

    def end(self, answer: Answer) -> dict[str, Any]:
        """What the last event has."""
        details = {
            "finish_reason": self.reason(answer),
            "generated_tokens": len(answer.token_ids),
            "input_length": len(self.call.prompts[0]),
            "seed": self.wishes.seed,
        }
        return {"generated_text": self.text(answer.text), "details": details}


async def new_tgi(service: Service, body: TgiRequest, http: Request, stream: bool) -> Tgi:
    """Read a request. do_sample is false by default, which is greedy, unless a temperature, top_k
    or top_p asks for sampling.
    """
    wishes = body.parameters
    if stream and wishes.best_of not in (None, 1):
        raise refused("best_of", wishes.best_of, "1 with a stream")
    samples = wishes.do_sample or wishes.temperature is not None
    samples = samples or wishes.top_k is not None or wishes.top_p is not None
    named = dict(
        temperature=(1.0 if wishes.temperature is None else wishes.temperature) if samples else 0.0,
        best_of=wishes.best_of,
        top_k=wishes.top_k,
        top_p=wishes.top_p,
        seed=wishes.seed,
        stop=wishes.stop,
        repetition_penalty=wishes.repetition_penalty,
        frequency_penalty=wishes.frequency_penalty,
        include_stop_str_in_output=True,  # as text-generation-inference does
        logprobs=check_logprobs("top_n_tokens", wishes.top_n_tokens, service.args.max_logprobs)
        or 0,
        prompt_logprobs=0 if wishes.decoder_input_details else None,
    )
    if wishes.grammar is not None:
        kind = "regex" if wishes.grammar.type == "regex" else "json"
        value = wishes.grammar.value
        if kind == "json" and isinstance(value, str):
            value = parsed_json("grammar", value)
        if wishes.grammar.type == "json_schema" and isinstance(value, dict):
            value = value.get("schema", value)
        named["structured_outputs"] = structured_outputs(**{kind: value}, sent_as="grammar")
    prompts = await read_prompts(service, "inputs", body.inputs, True, wishes.truncate)
    params = new_params(wishes.max_new_tokens, **named)
    user = user_of(http)
    return Tgi(
        service, body, service.new_call("tgi-", wishes.adapter_id, prompts, params, user=user)
    )


def new_router(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["text-generation-inference"])
    timeout_s = service.args.write_timeout

    @router.post("/generate")
    async def generate(body: GenerateRequest, http: Request) -> Watched:
        """{"prompt": …} as vLLM's legacy server, {"inputs": …} as text-generation-inference."""
        if isinstance(body, LegacyRequest):
            return await legacy(service, body, http)
        if body.stream:
            raise refused("stream", True, "false, because /generate_stream streams")
        return Whole((await new_tgi(service, body, http, False)).whole(), timeout_s)

    @router.post("/generate_stream")
    async def generate_stream(body: TgiRequest, http: Request) -> Watched:
        """An event for each token."""
        return EventStream((await new_tgi(service, body, http, True)).events(), timeout_s)

    @router.post("/")
    async def generate_or_stream(body: TgiRequest, http: Request) -> Watched:
        """What huggingface_hub's InferenceClient calls: streams if the body says so."""
        request = await new_tgi(service, body, http, body.stream)
        if body.stream:
            return EventStream(request.events(), timeout_s)
        return Whole(request.whole(), timeout_s)

    return router
