"""Where our engine's answers differ from vLLM's, each with a request that shows it and the reason.

python -m reference.bench.peers.differences    # the table of README.md
"""

from typing import NamedTuple


class Difference(NamedTuple):
    """params: of a greedy request after `prompt`. field: of the answer, or "error" where one of the
    two refuses the request.
    """

    what: str
    field: str
    params: dict
    ours: str
    theirs: str
    why: str
    prompt: str | list[int] = "x"

    @property
    def request(self) -> dict:
        return {"prompt": self.prompt, "params": {"temperature": 0, "max_tokens": 8} | self.params}


YES_OR_NO = {"structured_outputs": {"choice": ["yes", "no"]}}
AN_OBJECT = {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip
DIFFERENCES = (
    Difference(
        "an answer that ends amid a character", "text",
        {"max_tokens": 9, "min_tokens": 9, "ignore_eos": True},
        "ends in U+FFFD", "leaves the bytes out",
        "the text is `tokenizer.decode` of the tokens, as in transformers",
        "emoji = '\U0001f600",
    ),
    Difference(
        "a prompt of token ids that ends amid a character", "text", {"max_tokens": 4},
        "the answer's text", "begins with the text of the whole prompt",
        "a prompt is no part of its answer", [3460, 3722, 197, 2081, 2966, 1875, 3293, 108],
    ),
    Difference(
        "`logprobs` under structured outputs", "logprobs", YES_OR_NO | {"logprobs": 1},
        "the model's own", "after the mask",
        "the two then say how much the model wanted the form; JSON has no -inf either",
    ),
    Difference(
        "`stop_token_ids` that write text under structured outputs", "stop_reason",
        {"structured_outputs": {"choice": ["a", "ab", "abc"]}, "stop_token_ids": [277],
         "logit_bias": {"277": 9}},
        "do not end the answer", "end a complete text",
        "a token that writes text would make the text another one",
    ),
    Difference(
        "`bad_words` that structured outputs need", "finish_reason",
        {"structured_outputs": {"json": {"type": "boolean"}}, "bad_words": ["e"]},
        "the ban gives way", "ends as `error`",
        "an answer that can be completed is completed",
    ),
    Difference(
        "`disable_any_whitespace` of a request", "text",
        {"structured_outputs": {"json": AN_OBJECT, "disable_any_whitespace": True},
         "max_tokens": 16},
        "works", "only the engine's argument works",
        "the field asks for it", "SELECT",
    ),
    Difference(
        "`temperature` above 2", "error", {"temperature": 2.5, "top_k": 1},
        "accepted", "refused", "any finite temperature has a distribution",
    ),
    Difference(
        "`logit_bias` beyond ±100", "error", {"logit_bias": {"5": 1000}},
        "refused", "accepted offline, cut to ±100 by the server",
        "OpenAI's bounds, and no value is changed in silence",
    ),
    Difference(
        "`ignore_eos` with structured outputs", "error", YES_OR_NO | {"ignore_eos": True},
        "refused", "accepted", "a complete text has to end",
    ),
    Difference(
        "`allowed_token_ids` with structured outputs", "error",
        YES_OR_NO | {"allowed_token_ids": list(range(4096))},
        "refused", "accepted", "the two may have no token in common",
    ),
    Difference(
        "`best_of`", "error", {"best_of": 2, "temperature": 0.5, "top_k": 1},
        "works", "removed", "older guides use it",
    ),
)  # fmt: skip


def table() -> str:
    """DIFFERENCES in Markdown."""
    rows = ["| request | here | vLLM | why |", "| --- | --- | --- | --- |"]
    rows += [f"| {one.what} | {one.ours} | {one.theirs} | {one.why} |" for one in DIFFERENCES]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
