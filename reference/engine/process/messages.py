"""What goes through the pipe. An engine's output holds the whole answer so far; only what is new of
it is sent, and the other side puts it together again. So a long answer costs no more than its
tokens.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reference.engine.outputs import CompletionOutput, RequestOutput
from reference.engine.stats import EngineStats, IterationStats


class Raised(NamedTuple):
    """An exception in parts, because one whose __init__ is its own cannot be pickled."""

    kind: type
    args: tuple
    state: dict

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        """The parts of an exception."""
        return cls(type(error), error.args, vars(error))

    def error(self) -> BaseException:
        """The exception again."""
        error = self.kind.__new__(self.kind, *self.args)
        error.__dict__.update(self.state)
        return error


class Grown(NamedTuple):
    """What is new of an answer. kept: characters of its text so far that stay. logprobs: of the new
    tokens.
    """

    kept: int
    text: str
    token_ids: list[int]
    logprobs: list | None
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: str | int | None


# What has become of a request, by its number: its first output, what is new of its answers, or why
# there are no more.
Change = tuple[int, RequestOutput | list[Grown] | Raised]


@dataclass
class Message:
    """From the engine, once a step. replies: (number of an order, what it returned, what it
    raised). steps: what was counted since the last message. failure: why the engine has ended, if
    it has.
    """

    stats: EngineStats
    changes: list[Change] = field(default_factory=list)
    replies: list[tuple[int, Any, Raised | None]] = field(default_factory=list)
    steps: list[IterationStats] = field(default_factory=list)
    failure: str | None = None


class Outbox:
    """A mailbox whose reader is in the other process. put: from the engine's thread.

    whole: whether every output is sent whole, because the best of several answers change places.
    """

    def __init__(self, number: int, whole: bool):
        self.number = number
        self.whole = whole
        self.newest: RequestOutput | BaseException | None = None
        self.told: RequestOutput | None = None

    def put(self, output: RequestOutput | BaseException) -> None:
        """As in Mailbox."""
        self.newest = output

    def change(self) -> Change:
        """What the other side does not know yet."""
        newest, told, self.told = self.newest, self.told, self.newest
        if isinstance(newest, BaseException):
            return self.number, Raised.of(newest)
        # The last one is sent whole, because only the engine knows the times of the request.
        if self.whole or told is None or newest.finished:
            return self.number, newest
        return self.number, [*map(grown, told.outputs, newest.outputs)]


def grown(old: CompletionOutput, new: CompletionOutput) -> Grown:
    """What is new of an answer that went on."""
    kept, count = len(old.text) if new.text.startswith(old.text) else 0, len(old.token_ids)
    return Grown(
        kept,
        new.text[kept:],
        new.token_ids[count:],
        None if new.logprobs is None else new.logprobs[count:],
        new.cumulative_logprob,
        new.finish_reason,
        new.stop_reason,
    )


def with_news(told: RequestOutput, news: list[Grown]) -> RequestOutput:
    """A new output: the one before and what is new of its answers. Its metrics are those of the
    first output, until the last one comes.
    """
    answers = []
    for old, new in zip(told.outputs, news):
        logprobs = None if new.logprobs is None else old.logprobs + new.logprobs
        text, ids = old.text[: new.kept] + new.text, old.token_ids + new.token_ids
        answers.append(
            CompletionOutput(old.index, text, ids, new.cumulative_logprob, logprobs, *new[5:])
        )
    return RequestOutput(
        told.request_id,
        told.prompt,
        told.prompt_token_ids,
        answers,
        False,
        told.prompt_logprobs,
        told.num_cached_tokens,
        told.metrics,
        told.lora_request,
    )
