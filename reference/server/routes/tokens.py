"""/tokenize and /detokenize, as in vLLM, and /v1/embeddings."""

from typing import Any

from fastapi import APIRouter

from reference.server.chat import encode, prompt_of
from reference.server.embeddings import as_base64, embed
from reference.server.errors import refused
from reference.server.generation import refusal
from reference.server.protocol.tokens import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from reference.server.routes.completions import read_prompts
from reference.server.service import Service
from reference.server.streaming import Watched, Whole

MOST_INPUTS = 2048  # of a call, as at OpenAI


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

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of some token ids."""
        service.models.find(body.model)
        return {"prompt": service.tokens.decode(service.tokens.check("tokens", body.tokens))}

    @router.post("/v1/embeddings")
    async def create_embedding(body: EmbeddingRequest) -> Watched:
        """A vector for each text: the mean of the last hidden states, at length 1."""
        name, lora = service.models.find(body.model)
        if lora is not None:
            raise refused(
                "model", name, f"{service.models.names[0]}, because adapters do not embed"
            )
        if service.args.engine.has_workers:
            raise refused(
                "model", name, "one in the server's own process, because workers give logits only"
            )
        is_one = isinstance(body.input, str) or isinstance(next(iter(body.input), None), int)
        if not is_one and len(body.input) > MOST_INPUTS:
            raise refused("input", f"{len(body.input)} texts", f"at most {MOST_INPUTS} of them")
        keep = body.truncate_prompt_tokens
        special = body.add_special_tokens
        prompts = await read_prompts(service, "input", body.input, special, keep)
        return Whole(embeddings(service, name, prompts, body), service.args.write_timeout)

    return router


async def embeddings(
    service: Service, name: str, prompts: list[list[int]], body: EmbeddingRequest
) -> dict[str, Any]:
    """The answer. Each text is a command of its own, so that steps run between them."""
    data = []
    for at, ids in enumerate(prompts):
        try:
            vector = await service.engine.call(embed, ids)
        except RuntimeError as error:
            raise refusal(error) from error
        value = as_base64(vector) if body.encoding_format == "base64" else vector
        data.append({"object": "embedding", "index": at, "embedding": value})
    count = sum(map(len, prompts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": name, "usage": usage}
