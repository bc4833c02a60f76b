"""/v1/completions, as OpenAI's legacy API and vLLM have it."""

from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from reference.engine.sampling_params import SamplingParams
from reference.server.calls import Answer, Delta
from reference.server.chat import encode
from reference.server.errors import refused
from reference.server.generation import Run
from reference.server.logprobs import TokenNames, for_completion, of_prompt
from reference.server.protocol.completions import CompletionRequest
from reference.server.routes.common import OpenAIAnswer, check_answers, check_stream, user_of
from reference.server.sampling import check_logprobs, new_params, wishes_of
from reference.server.service import Service
from reference.server.streaming import Watched

MOST_INPUTS = 2048  # of a call, as at OpenAI


async def read_prompts(
    service: Service, name: str, value: str | list, special: bool, keep: int | None
) -> list[list[int]]:
    """The ids of one prompt or many, each text or ids. Raises ApiError, for too many of them before
    the first is read.
    """
    is_one = isinstance(value, str) or (value and isinstance(value[0], int))
    if not is_one and len(value) > MOST_INPUTS:
        raise refused(name, f"{len(value)} of them", f"at most {MOST_INPUTS}")
    tokens, found = service.tokens, []
    for one in [value] if is_one else value:
        if isinstance(one, str):
            ids = await encode(service, name, one, special, keep)
        else:
            ids = tokens.check(name, one)
        found.append(tokens.cut(name, ids, keep))
    if not found:
        raise refused(name, value, "one prompt at least")
    return found


def params_of(service: Service, body: CompletionRequest) -> SamplingParams:
    """What is asked of the engine. Raises ApiError."""
    if body.max_tokens == 0 and not body.echo:
        raise refused("max_tokens", 0, "1 or more without echo")
    wishes = wishes_of(body)
    if body.echo and body.logprobs is not None:
        wishes.setdefault("prompt_logprobs", body.logprobs)
    for name in ("logprobs", "prompt_logprobs"):
        check_logprobs(name, getattr(body, name), service.args.max_logprobs)
    # nothing but the prompt's own scores: one token is drawn and never shown
    return new_params(body.max_tokens or 1, **wishes, logprobs=body.logprobs)


class Completion:
    """The choices of one call. texts: of the prompts, which echo repeats."""

    def __init__(self, run: Run, body: CompletionRequest, texts: list[str]):
        self.run = run
        self.body = body
        self.texts = texts
        self.names = TokenNames(run.service.tokens, body.return_tokens_as_token_ids)
        self.offsets: dict[int, int] = {}  # characters told of each choice

    def choice(self, delta: Delta | Answer, is_first: bool) -> dict[str, Any]:
        """One choice of an answer, or of a chunk."""
        body, call = self.body, self.run.call
        prompt = delta.index // call.params.n
        if body.echo and body.max_tokens == 0:
            self.run.usage.completion -= len(delta.token_ids)
            delta = replace(delta, text="", token_ids=[], logprobs=None, stop_reason=None)
        text, ids, logprobs = delta.text, delta.token_ids, delta.logprobs or []
        if body.echo and is_first:
            text = self.texts[prompt] + text
            ids = call.prompts[prompt] + ids
            logprobs = [*(self.run.outputs[prompt].prompt_logprobs or []), *logprobs]
        offset = self.offsets.get(delta.index, 0)
        self.offsets[delta.index] = offset + len(text)
        found = None
        if body.logprobs is not None:
            found = for_completion(ids, logprobs, self.names, offset)
        reason = delta.finish_reason
        choice = {
            "index": delta.index,
            "text": text,
            "logprobs": found,
            "finish_reason": "length" if reason and body.max_tokens == 0 else reason,
            "stop_reason": delta.stop_reason,
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = of_prompt(self.run.outputs[prompt].prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if is_first:
                choice["prompt_token_ids"] = call.prompts[prompt]
        return choice


def new_router(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/completions")
    async def create_completion(body: CompletionRequest, http: Request) -> Watched:
        """Go on with a prompt."""
        check_stream(body)
        keep = body.truncate_prompt_tokens
        prompts = await read_prompts(service, "prompt", body.prompt, body.add_special_tokens, keep)
        check_answers(service, prompts, body.best_of or body.n)
        call = service.new_call(
            "cmpl-",
            body.model,
            prompts,
            params_of(service, body),
            user=user_of(http, body.user),
            priority=body.priority,
            request_id=body.request_id,
        )
        texts = []
        if body.echo:
            is_text = isinstance(body.prompt, str) or isinstance(body.prompt[0], str)
            given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
            whole = is_text and keep is None
            texts = list(given) if whole else [service.tokens.decode(ids) for ids in prompts]
        run = Run(service, call)
        completion = Completion(run, body, texts)
        kinds = ("text_completion", "text_completion")
        return OpenAIAnswer(run, body, kinds, completion.choice).response()

    return router
