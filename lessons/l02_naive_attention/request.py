"""One row of `generate`: what is asked for, and what has been produced so far.

Every rung of the ladder takes the same arguments and refuses the same mistakes, so both live here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.sampling import GREEDY, SamplingParams, sample
from lessons.toolbox.model.arguments import check_kind, is_whole, refuse, shown
from lessons.toolbox.model.config import ModelConfig

OnToken = Callable[[int, int], None]  # (row, token)


@dataclass
class Request:
    row: int
    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingParams  # with a seed
    stop_token_ids: frozenset[int]
    output: list[int] = field(default_factory=list)  # a stop token that ended the row is included

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def most_cached(self) -> int:
        """Tokens that a cache must hold for it: all but the last, from which nothing is
        computed.
        """
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_new_tokens or (
            bool(self.output) and self.output[-1] in self.stop_token_ids
        )


def take_next_tokens(
    logits: Tensor, requests: list[Request], on_token: OnToken | None = None
) -> None:
    """Sample one token for each request, row by row, append it to its output, report it.

    logits: [B, V], row b belongs to requests[b].
    """
    tokens = sample(
        logits,
        [r.sampling for r in requests],
        [r.prompt for r in requests],
        [r.output for r in requests],
    )
    hand_out(tokens, requests, on_token)


def hand_out(tokens: list[int], requests: list[Request], on_token: OnToken | None) -> None:
    """Append tokens[b] to the output of requests[b], and report it."""
    for request, token in zip(requests, tokens):
        request.output.append(token)
        if on_token is not None:
            on_token(request.row, token)


def check_call(model: Decoder, on_token: OnToken | None, may_have_states: bool = False) -> None:
    """Raise ValueError unless these two arguments of `generate` can be called."""
    check_kind(Decoder, "a decoder, such as load_decoder returns", model=model)
    if not may_have_states:
        check_all_attend(model.config)
    if on_token is not None and not callable(on_token):
        refuse("on_token", on_token, "None, or a function of a row and a token")


def check_all_attend(config: ModelConfig) -> None:
    """Raise ValueError for a model of which layers keep a state in the place of K and V."""
    if config.state is not None:
        raise ValueError(
            f"model: got model_type {config.model_type!r}; accepted: one whose layers all attend "
            "(layers with a state: reference.features.states.generate, or the engine)"
        )


def read_requests(
    config: ModelConfig,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
) -> list[Request]:
    """The arguments of `generate` as one Request a prompt; one without a seed gets a fresh one.

    Raises ValueError, one line, for anything that cannot work.
    """
    if not isinstance(prompts, (list, tuple)) or len(prompts) == 0:
        refuse("prompts", prompts, "a list of one or more prompts, each a list of token ids")
    limits = _one_each("max_new_tokens", max_new_tokens, int, len(prompts))
    params = _one_each(
        "sampling", GREEDY if sampling is None else sampling, SamplingParams, len(prompts)
    )
    requests = []
    for row, (prompt, limit, row_params) in enumerate(zip(prompts, limits, params)):
        _check_prompt(config, row, prompt)
        if limit < 0:
            got = f"{shown(limit)} for prompt {row}"
            raise ValueError(f"max_new_tokens: got {got}; accepted: 0 or more")
        if len(prompt) + limit > config.max_position_embeddings:
            raise ValueError(
                f"prompts[{row}], max_new_tokens: {len(prompt)} tokens and {shown(limit)} new ones "
                f"make {shown(len(prompt) + limit)}; "
                f"accepted: at most {config.max_position_embeddings} (max_position_embeddings)"
            )
        stop = {
            *row_params.stop_token_ids,
            *(() if row_params.ignore_eos else config.eos_token_ids),
        }
        requests.append(Request(row, list(prompt), limit, row_params.seeded(), frozenset(stop)))
    return requests


def _one_each(name: str, value, kind: type, count: int) -> list:
    """`value` once per prompt, or as given when it already is a list of `count`."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(
            f"{name}: got {len(values)} for {count} prompts; accepted: one {kind.__name__}, or one "
            f"per prompt"
        )
    for entry in values:
        # True is an int to Python
        if not isinstance(entry, kind) or isinstance(entry, bool):
            refuse(name, entry, f"{kind.__name__}, or a list of them, one per prompt")
    return values


def _check_prompt(config: ModelConfig, row: int, prompt: list[int]) -> None:
    if not isinstance(prompt, (list, tuple)) or len(prompt) == 0:
        refuse(f"prompts[{row}]", prompt, "a list of one or more token ids")
    largest = config.vocab_size - 1
    for index, token in enumerate(prompt):
        if not is_whole(token, 0, largest):
            refuse(f"prompts[{row}][{index}]", token, f"a token id from 0 to {largest}")
