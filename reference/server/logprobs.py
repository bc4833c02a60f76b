"""Log-probabilities in the two forms that the OpenAI API has."""

from collections.abc import Sequence
from typing import Any

from reference.engine.outputs import Logprob, Logprobs
from reference.server.tokens import Tokens

LOWEST = -9999.0  # JSON has no −∞


class TokenNames:
    """How a token is written. as_ids: "token_id:17" instead of its text, which two may share."""

    def __init__(self, tokens: Tokens, as_ids: bool):
        self.tokens = tokens
        self.as_ids = as_ids

    def __call__(self, token: int, found: Logprob | None = None) -> str:
        """The token's name. found: what is known of it at its place: of a character of several
        tokens the last one has it all, and the others nothing.
        """
        if self.as_ids:
            return f"token_id:{token}"
        return self.text(token, found)

    def text(self, token: int, found: Logprob | None) -> str:
        """What it adds to the text before it."""
        if found is None or found.decoded_token is None:
            return self.tokens.text_of(token)
        return found.decoded_token


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
        own = None if found is None else found[token]
        texts.append(names(token, own))
        offsets.append(offset)
        offset += 0 if names.tokens.is_special(token) else len(names.text(token, own))
        if found is None:
            values.append(None)
            tops.append(None)
        else:
            values.append(number(found[token].logprob))
            tops.append({names(one, value): number(value.logprob) for one, value in found.items()})
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

    def entry(token: int, found: Logprob) -> dict[str, Any]:
        value = number(found.logprob)
        known = names.tokens.bytes_of(token)
        return {"token": names(token, found), "logprob": value, "bytes": known}

    found = []
    for token, here in zip(ids, logprobs):
        best = sorted(here.items(), key=lambda pair: pair[1].rank)[:count]
        top = [entry(one, value) for one, value in best]
        found.append({**entry(token, here[token]), "top_logprobs": top})
    return found


def of_prompt(logprobs: Sequence[Logprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's prompt_logprobs."""
    if logprobs is None:
        return None
    return [
        here
        and {
            str(token): {
                "logprob": number(value.logprob),
                "rank": value.rank,
                "decoded_token": value.decoded_token,
            }
            for token, value in here.items()
        }
        for here in logprobs
    ]
