"""What log-probabilities say of tokens: the text of each, and a flat form of many.

Source of both: vLLM, vllm/v1/engine/logprobs.py and vllm/logprobs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from reference.engine.outputs import Logprob, Logprobs

HALF = "\ufffd"  # what bytes that are no whole character show as
LONGEST = 4  # bytes of a character, so a token's text depends on no more tokens before it


def named(tokenizer, here: Logprobs, before: list[int]) -> Logprobs:
    """Log-probabilities of one place with the texts of their tokens. before: the tokens up to
    there.
    """
    return {
        token: replace(value, decoded_token=text_of(tokenizer, token, before))
        for token, value in here.items()
    }


def text_of(tokenizer, token: int, before: list[int]) -> str:
    """A token's text. One that ends a character has the whole character; one that ends amid a
    character has no text.
    """

    def decode(tokens: list[int]) -> str:
        return tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)

    text = decode([token])
    if not text.endswith(HALF):
        return text
    for count in range(1, min(LONGEST, len(before)) + 1):
        context = before[-count:]
        text = decode([*context, token])
        if text.endswith(HALF):
            continue
        # The last tokens before it had no text of their own, so theirs is part of this one's.
        while context and decode(context[-1:]).endswith(HALF):
            context.pop()
        return text.removeprefix(decode(context))
    return ""


@dataclass
class FlatLogprobs(Sequence):
    """Log-probabilities of many places in a few long lists, which Python's garbage collector
    walks through faster than a dict for each. It reads as a list of Logprobs.

    start_indices, end_indices: where in the other lists the entries of each place are; a place
    without any, as the first of a prompt, is {}.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, logprobs: Sequence[Logprobs | None]) -> FlatLogprobs:
        """The same in this form."""
        flat = cls()
        for here in logprobs:
            flat.start_indices.append(len(flat.token_ids))
            for token, value in (here or {}).items():
                flat.token_ids.append(token)
                flat.logprobs.append(value.logprob)
                flat.ranks.append(value.rank)
                flat.decoded_tokens.append(value.decoded_token)
            flat.end_indices.append(len(flat.token_ids))
        return flat

    def __add__(self, more: Sequence[Logprobs | None]) -> FlatLogprobs:
        return FlatLogprobs.of([*self, *more])

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, place: int | slice) -> Logprobs | FlatLogprobs:
        if isinstance(place, slice):
            return FlatLogprobs.of([self[at] for at in range(len(self))[place]])
        span = range(self.start_indices[place], self.end_indices[place])
        return {
            self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at])
            for at in span
        }
