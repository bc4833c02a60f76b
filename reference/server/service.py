"""What all routes share: the engine, its tokenizer, its chat template, the models' names."""

import asyncio
import uuid

from reference.engine.async_engine import AsyncLLMEngine
from reference.engine.process.client import AsyncProcessEngine
from reference.server.args import ServerArgs
from reference.server.calls import Call
from reference.server.errors import bad_request, refused
from reference.server.metrics import Metrics
from reference.server.models import Models
from reference.server.sampling import check_prompt_logprobs
from reference.server.templates import ChatTemplate
from reference.server.tokens import Tokens
from reference.server.turns import Turns
from reference.vision.pictures import Picture
from reference.vision.prompt import inputs_of

READERS = 2  # threads that read long texts at a time, for all clients


class Service:
    """One engine behind many routes. args: of the server. embedding: whose text is embedded next.
    reading: the places of long texts that are read.
    """

    def __init__(
        self, engine: AsyncLLMEngine | AsyncProcessEngine, models: Models, args: ServerArgs
    ):
        self.engine = engine
        self.models = models
        self.args = args
        self.tokens = Tokens(engine.tokenizer, engine.info.max_model_len)
        # what prompts may hold beside text, and what stands for it there; None: nothing
        self.vision, self.image_token = inputs_of(args.engine, self.tokens.max_model_len), None
        if self.vision is not None:
            token = self.vision.config.image_token_id
            self.image_token = self.tokens.backend.id_to_token(token)
        self.template = ChatTemplate.of(engine.tokenizer, args.chat_template)
        self.metrics = Metrics(engine, models.names[0])
        self.embedding = Turns()
        self.reading = asyncio.Semaphore(READERS)

    def with_rows(self, ids: list[int], pictures: list[Picture]) -> list[int]:
        """A prompt with a token for each row of its pictures. Raises ApiError."""
        try:
            return ids if self.vision is None else self.vision.place(ids, pictures)[0]
        except ValueError as error:
            raise bad_request(str(error), "messages") from None

    def new_call(
        self, kind: str, model: str | None, prompts: list[list[int]], params, **more
    ) -> Call:
        """A call of a fresh id. kind: how the id begins. more: fields of Call, and request_id,
        which the client chose. Raises ApiError for an unknown model, or a priority without effect.
        """
        name, lora = self.models.find(model)
        request_id = more.pop("request_id", None) or uuid.uuid4().hex
        policy = self.args.engine.scheduling_policy
        if more.get("priority") and policy != "priority":
            accepted = "0, because the server was started without --scheduling-policy priority"
            raise refused("priority", more["priority"], accepted)
        check_prompt_logprobs(params.prompt_logprobs, sum(map(len, prompts)))
        return Call(f"{kind}{request_id}", name, prompts, params, lora, **more)
