"""Log-probabilities in the two forms that the OpenAI API has."""

from collections.abc import Sequence
from typing import Any

from reference.engine.outputs import Logprobs
from reference.server.tokens import Tokens

LOWEST = -9999.0  # JSON has no −∞


class TokenNames:
    """How a token is written. as_ids: "token_id:17" instead of its text, which two may share."""

    def __init__(self, tokens: Tokens, as_ids: bool):
        self.tokens = tokens
        self.as_ids = as_ids

    def __call__(self, token: int) -> str:
        """The token's name."""
        return f"token_id:{token}" if self.as_ids else self.tokens.text_of(token)


def number(logprob: float) -> float:
    """A log-probability as JSON can write it."""
    return max(logprob, LOWEST)


def for_completion(
    ids: list[int], logprobs: Sequence[Logprobs | None], names: TokenNames, offset: int
) -> dict[str, list]:
    """/v1/completions': lists beside one another. logprobs: of each id, None for the first of a
    prompt. offset: characters of the answer in front of them; special tokens are no part of it.
    """
    offsets, texts, values, tops = [], [], [], []
    for token, found in zip(ids, logprobs):
        texts.append(names(token))
        offsets.append(offset)
        offset += 0 if names.tokens.is_special(token) else len(names.tokens.text_of(token))
        if found is None:
            values.append(None)
            tops.append(None)
        else:
            values.append(number(found[token].logprob))
            tops.append({names(one): number(value.logprob) for one, value in found.items()})
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": texts,
        "top_logprobs": tops,
    }


def for_chat(
    ids: list[int], logprobs: Sequence[Logprobs], names: TokenNames, count: int
) -> list[dict[str, Any]]:
    """/v1/chat/completions': an object for each token, with the `count` likeliest ones in it."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        value = number(logprob)
        return {"token": names(token), "logprob": value, "bytes": names.tokens.bytes_of(token)}

    found = []
    for token, here in zip(ids, logprobs):
        best = sorted(here.items(), key=lambda pair: pair[1].rank)[:count]
        top = [entry(one, value.logprob) for one, value in best]
        found.append({**entry(token, here[token].logprob), "top_logprobs": top})
    return found


def of_prompt(logprobs: Sequence[Logprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's prompt_logprobs."""
    if logprobs is None:
        return None
    return [
        here
        and {
            str(token): {"logprob": number(value.logprob), "rank": value.rank}
            for token, value in here.items()
        }
        for here in logprobs
    ]
