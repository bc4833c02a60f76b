"""/v1/chat/completions."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from reference.engine.sampling_params import SamplingParams
from reference.server.calls import Answer, Delta
from reference.server.chat import check_tools, prompt_of
from reference.server.conversation import AnswerReader
from reference.server.errors import refused
from reference.server.generation import Run
from reference.server.logprobs import TokenNames, for_chat, of_prompt
from reference.server.protocol.chat import ChatCompletionRequest, NamedToolChoice
from reference.server.routes.common import OpenAIAnswer, check_answers, check_stream, user_of
from reference.server.sampling import call_form, check_logprobs, new_params, wishes_of
from reference.server.service import Service
from reference.server.streaming import Watched
from reference.server.tools import CalledTool, schema_of


def params_of(service: Service, body: ChatCompletionRequest) -> SamplingParams:
    """What is asked of the engine. Raises ApiError."""
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", body.top_logprobs, "none without logprobs")
    most, newer = body.max_tokens, body.max_completion_tokens
    if most is not None and newer not in (None, most):
        raise refused("max_tokens", most, f"the same as max_completion_tokens ({newer})")
    check_logprobs("top_logprobs", body.top_logprobs, service.args.max_logprobs)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, service.args.max_logprobs)
    wishes = wishes_of(body)
    schema = schema_of(body.tools or [], body.tool_choice, body.parallel_tool_calls)
    if schema is not None:
        form = wishes.get("structured_outputs")
        wishes["structured_outputs"] = call_form(schema, form, body.tool_choice)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return new_params(newer or most, **wishes, logprobs=logprobs)


class Chat:
    """The choices of one call."""

    def __init__(self, run: Run, body: ChatCompletionRequest):
        self.run = run
        self.body = body
        self.names = TokenNames(run.service.tokens, body.return_tokens_as_token_ids)
        self.readers: dict[int, AnswerReader] = {}

    def read(self, delta: Delta | Answer) -> tuple[str, list[dict[str, Any]], str | None]:
        """Its text, its calls, and why it ended."""
        body = self.body
        reader = self.readers.get(delta.index)
        if reader is None:
            parser = self.run.service.args.tool_call_parser
            reader = AnswerReader(parser, body.tools, body.tool_choice, body.parallel_tool_calls)
            self.readers[delta.index] = reader
        first_call, parts = reader.num_calls, reader.read(delta)
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [part.as_openai() for part in parts if isinstance(part, CalledTool)]
        for at, call in enumerate(calls, first_call):
            call["index"] = at
        reason = delta.finish_reason
        if (
            reason == "stop"
            and reader.num_calls
            and not isinstance(body.tool_choice, NamedToolChoice)
        ):
            reason = "tool_calls"
        return text, calls, reason

    def common(self, delta: Delta | Answer, is_first: bool, reason: str | None) -> dict[str, Any]:
        """What a choice has beside its message."""
        body, call = self.body, self.run.call
        logprobs = None
        if body.logprobs:
            count = body.top_logprobs or 0
            content = for_chat(delta.token_ids, delta.logprobs or [], self.names, count)
            logprobs = {"content": content, "refusal": None}
        found = {
            "index": delta.index,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": delta.stop_reason,
        }
        if body.return_token_ids:
            found["token_ids"] = delta.token_ids
            if is_first and body.stream:
                found["prompt_token_ids"] = call.prompts[0]
        return found

    def whole(self, answer: Answer, is_first: bool) -> dict[str, Any]:
        """One choice of an answer."""
        text, calls, reason = self.read(answer)
        for call in calls:
            del call["index"]
        message = {"role": "assistant", "content": text if text or not calls else None}
        message |= {"refusal": None} | ({"tool_calls": calls} if calls else {})
        choice = self.common(answer, is_first, reason) | {"message": message}
        return choice

    def about_prompt(self) -> dict[str, Any]:
        """What is asked of the prompt, beside the choices of a whole answer as in vLLM."""
        found = {}
        if self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = of_prompt(self.run.outputs[0].prompt_logprobs)
        if self.body.return_token_ids:
            found["prompt_token_ids"] = self.run.call.prompts[0]
        return found

    def chunk(self, delta: Delta, is_first: bool) -> dict[str, Any] | None:
        """One choice of a chunk; None if there is nothing to tell yet."""
        text, calls, reason = self.read(delta)
        tells_tokens = self.body.logprobs or self.body.return_token_ids
        if not (is_first or text or calls or reason or tells_tokens):
            return None
        content = {"role": "assistant", "content": text} if is_first else {}
        if text:
            content["content"] = text
        if calls:
            content["tool_calls"] = calls
        return self.common(delta, is_first, reason) | {"delta": content}


def new_router(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, http: Request) -> Watched:
        """Answer a conversation."""
        check_stream(body)
        check_tools(body.tools, body.tool_choice)
        offered = None if body.tool_choice == "none" else body.tools
        ids, pictures = await prompt_of(service, body.messages, offered, body)
        prompts = [service.tokens.cut("messages", ids, body.truncate_prompt_tokens)]
        check_answers(service, prompts, body.best_of or body.n)
        call = service.new_call(
            "chatcmpl-",
            body.model,
            prompts,
            params_of(service, body),
            user=user_of(http, body.user, body.safety_identifier),
            priority=body.priority,
            request_id=body.request_id,
            pictures=pictures,
        )
        run = Run(service, call)
        chat = Chat(run, body)
        kinds = ("chat.completion", "chat.completion.chunk")
        choice = chat.chunk if body.stream else chat.whole
        return OpenAIAnswer(run, body, kinds, choice, chat.about_prompt).response()

    return router
