"""What drafts: a small model, or the request's own text.

A drafter gets requests and how many tokens to draft for each. It returns the tokens and what they
were drawn from. It may return fewer, or none.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_sampling import batch_probabilities
from lessons.l02_naive_attention.batched.requests import sampling_batch
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.random_streams import streams_of, uniform
from lessons.l02_naive_attention.request import Request
from lessons.l16_speculative_sampling.naive import DRAFTS
from lessons.l16_speculative_sampling.runner import RewindingRunner
from lessons.l16_speculative_sampling.stand_ins import draw_rows
from lessons.toolbox.model.arguments import check_whole, refuse
from lessons.toolbox.model.checkpoint import load_tokenizer


class Drafts(NamedTuple):
    """tokens: of each request. q: [R, V] float32, what they were drawn from, one row for each token
    and one that is not read after each request's; None if the drafter was sure.
    """

    tokens: list[list[int]]
    q: Tensor | None


class Drafter(Protocol):
    """What the loop asks of a drafter."""

    def propose(self, requests: list[Request], counts: list[int]) -> Drafts:
        """At most counts[b] tokens that may follow requests[b].tokens."""

    def forget(self, request: Request) -> None:
        """The request has finished."""


def row_starts(counts: list[int]) -> list[int]:
    """Where the rows of each request begin, and their end: a row for each token and the bonus
    row.
    """
    return list(accumulate((count + 1 for count in counts), initial=0))


def distributions(logits: Tensor, requests: list[Request], after: list[list[int]]) -> Tensor:
    """What each request is sampled from if the tokens `after` follow it. logits: [N, V] -> [N, V]
    float32. For target and draft alike.
    """
    extended = [
        Request(r.row, r.prompt, r.max_new_tokens, r.sampling, r.stop_token_ids, r.output + tokens)
        for r, tokens in zip(requests, after)
    ]
    return batch_probabilities(logits, sampling_batch(extended, logits.device)).float()


def numbers(requests: list[Request], indices: list[int], purpose: int, device) -> Tensor:
    """The random number of a position of each request's answer: [N] float32, in [0, 1)."""
    streams = streams_of([request.sampling.seed for request in requests], device)
    places = torch.tensor(indices, device=device) * 3 + purpose
    # A float64 just below 1 would become 1, and then even a perfect draft could be rejected.
    return uniform(streams, places).float().clamp(max=1 - 2.0**-24)


# ---------------------------------------------------------------- a model


class ModelDrafter:
    """A smaller model with a cache of its own, which is rewound like the target's."""

    def __init__(self, model: Decoder, num_blocks: int, block_size: int, max_context_len: int):
        self.runner = RewindingRunner.for_model(model, num_blocks, block_size, max_context_len)

    def propose(self, requests: list[Request], counts: list[int]) -> Drafts:
        """Token after token, for all requests together."""
        device = self.runner.model.device
        starts, drafted = row_starts(counts), [[] for _ in requests]
        q = torch.empty(starts[-1], self.runner.model.config.vocab_size, device=device)
        for index in range(max(counts)):
            active = [b for b, count in enumerate(counts) if count > index]
            some, after = [requests[b] for b in active], [drafted[b] for b in active]
            rows = torch.tensor([starts[b] + index for b in active], device=device)
            q[rows] = distributions(self.next_logits(some, after), some, after)
            places = [len(request.output) + index for request in some]
            tokens = draw_rows(q[rows], numbers(some, places, DRAFTS, device))
            for b, token in zip(active, tokens.tolist()):
                drafted[b].append(token)
        return Drafts(drafted, q)

    def next_logits(self, requests: list[Request], drafted: list[list[int]]) -> Tensor:
        """What the draft says after the drafted tokens of each request: [N, V]."""
        new = {r.row: self.lacking(r, tokens) for r, tokens in zip(requests, drafted)}
        return self.runner.step(new)

    def lacking(self, request: Request, drafted: list[int]) -> list[int]:
        """The tokens that the draft's cache lacks, one at least."""
        if drafted:
            return drafted[-1:]
        tokens, held = request.tokens, self.runner.held.get(request.row, 0)
        # What the target has rejected goes. The newest token is never in the cache.
        if held >= len(tokens):
            held = len(tokens) - 1
            self.runner.rewind(request.row, held)
        return tokens[held:]

    def forget(self, request: Request) -> None:
        """Give back its blocks."""
        if request.row in self.runner.held:
            self.runner.free(request.row)


# ---------------------------------------------------------------- the request's own text


def lookup(tokens: list[int], count: int, longest: int = 3) -> list[int]:
    """At most `count` tokens that followed when the newest tokens stood in the text before.

    The last 3 tokens are looked for, then the last 2, then the last; of several places the newest
    counts. Source: Saxena 2023, prompt lookup decoding.
    """
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        suffix = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                after = start + size
                return tokens[after : after + count]
    return []


class NgramDrafter:
    """No model: what followed last time follows again."""

    def propose(self, requests: list[Request], counts: list[int]) -> Drafts:
        """The continuation is certain, so q is 1 at its tokens and need not be stored."""
        found = [lookup(request.tokens, count) for request, count in zip(requests, counts)]
        return Drafts(found, None)

    def forget(self, request: Request) -> None:
        """Nothing is kept."""


def drafter_of(
    draft: Decoder | Drafter | None,
    *memory: int,
    new_drafter: Callable[..., Drafter] = ModelDrafter,
) -> Drafter:
    """What `generate` drafts with. memory: of a model's cache, as `ModelDrafter` takes it.
    new_drafter: from a model and that memory to what drafts.
    """
    if draft is None:
        return NgramDrafter()
    return new_drafter(draft, *memory) if isinstance(draft, Decoder) else draft


# ---------------------------------------------------------------- which models fit together


def check_tokenizers(tokenizer, draft: str) -> None:
    """Raise ValueError unless the draft's folder or hub name has the same tokenizer: token 17 must
    be the same text for both, or the rule would compare probabilities of different words.
    """
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(draft).get_vocab()
    if ours != theirs:
        differing = len(set(ours.items()) ^ set(theirs.items()))
        raise ValueError(
            f"draft: got {draft}, whose tokenizer differs from the target's in {differing} "
            "entries; accepted: a draft with the same tokenizer"
        )


def check_vocabulary(target: Decoder, draft: Decoder) -> None:
    """Raise ValueError unless both have as many tokens."""
    ours, theirs = target.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ValueError(f"draft: got a model of {theirs} tokens; accepted: the target's {ours}")


def check_draft(target: Decoder, draft: Decoder | Drafter | None) -> None:
    """Raise ValueError unless it can draft for the target."""
    if isinstance(draft, Decoder):
        check_vocabulary(target, draft)
    elif draft is not None and not hasattr(draft, "propose"):
        refuse("draft", draft, "None, a decoder, or a drafter such as SuffixDrafter()")


def load_pair(target: str, draft: str) -> tuple[Decoder, Decoder, object]:
    """(target, draft, tokenizer) from two folders or hub names.

    Raises ValueError if they do not fit together.
    """
    tokenizer = load_tokenizer(target)
    check_tokenizers(tokenizer, draft)
    models = Decoder.from_pretrained(target), Decoder.from_pretrained(draft)
    check_vocabulary(*models)
    return *models, tokenizer


def check_count(num_speculative_tokens: int) -> None:
    """Raise ValueError unless it is a whole number, 0 or more."""
    check_whole(0, num_speculative_tokens=num_speculative_tokens)
