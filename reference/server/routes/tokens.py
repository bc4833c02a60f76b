"""/tokenize and /detokenize, as in vLLM, and /v1/embeddings."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from reference.server.chat import encode, prompt_of
from reference.server.embeddings import as_base64, embed
from reference.server.errors import ApiError, refused
from reference.server.generation import refusal
from reference.server.protocol.tokens import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from reference.server.routes.common import user_of
from reference.server.routes.completions import read_prompts
from reference.server.service import Service
from reference.server.streaming import Watched, Whole

MOST_TOKENS = 300_000  # of a call that embeds, as at OpenAI
MANY_TOKENS = 1024  # fewer are written between two events of the loop


def new_router(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The token ids of a prompt, or of a conversation."""
        service.models.find(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise refused("prompt", body.prompt, "a prompt or messages, one of them")
        if body.messages is not None:
            ids, _ = await prompt_of(service, body.messages, body.tools, body)
        else:
            special = body.add_special_tokens is not False
            ids = await encode(service, "prompt", body.prompt, special)
        found = {"count": len(ids), "max_model_len": service.tokens.max_model_len, "tokens": ids}
        names = [service.tokens.backend.id_to_token(token) for token in ids]
        return found | {"token_strs": names if body.return_token_strs else None}

    def written(ids: list[int]) -> str:
        return service.tokens.decode(service.tokens.check("tokens", ids))

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of some token ids."""
        service.models.find(body.model)
        if len(body.tokens) < MANY_TOKENS:
            return {"prompt": written(body.tokens)}
        async with service.reading:
            return {"prompt": await asyncio.to_thread(written, body.tokens)}

    @router.post("/v1/embeddings")
    async def create_embedding(body: EmbeddingRequest, http: Request) -> Watched:
        """A vector for each text: the mean of the last hidden states, at length 1."""
        name, lora = service.models.find(body.model)
        if lora is not None:
            raise refused(
                "model", name, f"{service.models.names[0]}, because adapters do not embed"
            )
        if service.args.engine.has_workers:
            raise refused(
                "model", name, "one in the server's own process, because workers give tokens only"
            )
        keep = body.truncate_prompt_tokens
        special = body.add_special_tokens
        prompts = await read_prompts(service, "input", body.input, special, keep)
        if (count := sum(map(len, prompts))) > MOST_TOKENS:
            raise refused("input", f"{count} tokens", f"at most {MOST_TOKENS} in all texts")
        found = embeddings(service, name, prompts, body, user_of(http, body.user))
        return Whole(in_time(found, service.args.request_timeout), service.args.write_timeout)

    return router


async def in_time(work: Awaitable[dict[str, Any]], timeout_s: float) -> dict[str, Any]:
    """What the work gives. Raises ApiError if it takes longer."""
    try:
        return await asyncio.wait_for(work, timeout_s)
    except asyncio.TimeoutError:
        late = f"the answer was not there after {timeout_s} s (--request-timeout)"
        raise ApiError(504, late) from None


async def embeddings(
    service: Service, name: str, prompts: list[list[int]], body: EmbeddingRequest, user: str
) -> dict[str, Any]:
    """The answer. Each text is a command of its own, so that steps run between them, and a turn of
    its own, so that users wait for one text of each other user.
    """
    data = []
    for at, ids in enumerate(prompts):
        try:
            async with service.embedding.turn(user):
                vector = await service.engine.call(embed, ids)
        except RuntimeError as error:
            raise refusal(error) from error
        value = as_base64(vector) if body.encoding_format == "base64" else vector
        data.append({"object": "embedding", "index": at, "embedding": value})
    count = sum(map(len, prompts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": name, "usage": usage}
