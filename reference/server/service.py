"""What all routes share: the engine, its tokenizer, the models' names, and whether the server takes
calls at all.
"""

import asyncio
import uuid
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reference.async_engine import AsyncLLMEngine
from reference.server.args import ServerArgs
from reference.server.calls import Call
from reference.server.errors import ApiError, refused
from reference.server.metrics import Metrics
from reference.server.models import Models
from reference.server.templates import ChatTemplate
from reference.server.tokens import Tokens

if TYPE_CHECKING:
    from reference.server.generation import Run

DRAINING = "the server is shutting down"


class Service:
    """One engine behind many routes. args: of the server."""

    def __init__(self, engine: AsyncLLMEngine, models: Models, args: ServerArgs):
        self.engine = engine
        self.models = models
        self.args = args
        core = engine.engine
        self.tokens = Tokens(core.tokenizer, core.max_model_len)
        self.template = ChatTemplate.of(core.tokenizer, args.chat_template)
        self.metrics = Metrics(engine, models.names[0])
        self.is_draining = False
        self.running: set[Run] = set()
        self.tasks: set[asyncio.Future] = set()

    def new_call(self, kind: str, model: str | None, prompts: list[list[int]], params, **more) -> Call:
        """A call of a fresh id. kind: what the id begins with. more: fields of Call, and request_id,
        which the client chose. Raises ApiError for an unknown model, or a priority without effect.
        """
        name, lora = self.models.find(model)
        request_id = more.pop("request_id", None) or uuid.uuid4().hex
        policy = self.args.engine.scheduling_policy
        if more.get("priority") and policy != "priority":
            accepted = "0, because the server was started without --scheduling-policy priority"
            raise refused("priority", more["priority"], accepted)
        return Call(f"{kind}-{request_id}", name, prompts, params, lora, **more)

    @contextmanager
    def serving(self, run: "Run") -> Iterator[None]:
        """Inside it the call counts as running, and is ended when it has taken too long. Raises
        ApiError if the server takes no call now.
        """
        self.check_open()
        call = run.call
        if call.id in {other.call.id for other in self.running if other.call.id[-1:] == call.id[-1:]}:
            raise refused("request_id", call.id, "a name that is not in use")
        limit_s = self.args.request_timeout
        late = ApiError(504, f"the answer took longer than {limit_s} s (--request-timeout)")
        timer = asyncio.get_running_loop().call_later(limit_s, run.end, late)
        self.running.add(run)
        try:
            yield
        finally:
            timer.cancel()
            self.running.discard(run)

    def check_open(self) -> None:
        """Raise ApiError if the server takes no call now."""
        if self.is_draining:
            raise ApiError(503, DRAINING, retry_after_s=self.args.shutdown_timeout)
        if self.engine.failure is not None:
            raise ApiError(503, f"the engine has ended: {self.engine.failure}")

    def end_all(self) -> None:
        """End every call that still runs."""
        for run in list(self.running):
            run.end(ApiError(503, DRAINING))

    def background(self, work: Coroutine) -> None:
        """Run something that nobody waits for. What it raises is dropped: the engine has ended."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.forget)

    def forget(self, task: asyncio.Future) -> None:
        """A background task has ended."""
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()
