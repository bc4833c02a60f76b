"""A request on its way through a scheduler, and what one step of the model runs of it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from lessons.l02_naive_attention.request import Request
from lessons.l12_paged_kv.blocks import Copy


@dataclass(eq=False)
class Sequence(Request):
    """A request with its place in the cache. Its id, `row`, names its block table.

    computed: how many of its tokens have K and V in the cache. places: how many it takes of a
    scheduler's (one for each answer that will fork from it). reuses_prefix: whether a prefix cache
    may spare it tokens (lesson 13). preemptions: how often it had to give back its blocks (lesson
    15). names: how the prefix cache knows the tokens, where equal tokens may have other K and V;
    None: as they are.
    """

    computed: int = 0
    places: int = 1
    reuses_prefix: bool = True
    preemptions: int = 0
    names: list[int] | None = None
    all_tokens: list[int] = field(init=False)

    # Requests are compared by their fields, but two sequences are one only if they are the same.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __post_init__(self):
        self.all_tokens = self.prompt + self.output

    @classmethod
    def of(cls, request: Request) -> "Sequence":
        """The same request, ready for a scheduler."""
        return cls(**vars(request))

    @property
    def tokens(self) -> list[int]:
        """Prompt and output. One list that grows, because a step must not copy a long prompt."""
        return self.all_tokens

    @property
    def known_as(self) -> list[int]:
        """The tokens as a prefix cache is told them."""
        return self.all_tokens if self.names is None else self.names

    @property
    def to_compute(self) -> int:
        """Tokens that have to run before the next one can be sampled: 1 while it decodes."""
        return len(self.all_tokens) - self.computed

    @property
    def is_decoding(self) -> bool:
        return self.to_compute == 1 and bool(self.output)

    def append(self, token: int) -> None:
        """Take a sampled token."""
        self.output.append(token)
        self.all_tokens.append(token)
        if self.names is not None:
            self.names.append(token)


class Chunk(NamedTuple):
    """The next `count` tokens of a sequence, after those that are computed."""

    sequence: Sequence
    count: int

    @property
    def tokens(self) -> list[int]:
        start = self.sequence.computed
        return self.sequence.all_tokens[start : start + self.count]

    @property
    def is_sampled(self) -> bool:
        """Whether its last token is the sequence's newest, whose logits give the next one."""
        return self.count == self.sequence.to_compute


class Step(NamedTuple):
    """One pass of the model. copies: blocks to copy before it."""

    chunks: list[Chunk]
    copies: list[Copy]

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose K and V the pass reads, those that it writes itself included."""
        return sum(chunk.sequence.computed + chunk.count for chunk in self.chunks)
