"""allowed_token_ids and bad_words: which tokens an answer may not have.

A bad word is banned as its tokens write it: once an answer has all of them but the last, the last
is not sampled. So a word of one token never comes, and a word that other tokens spell may.

Source of which spellings count, with a space in front and without: vLLM, vllm/sampling_params.py,
update_from_tokenizer; and of the rule: vllm/v1/sample/ops/bad_words.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.toolbox.model.arguments import refuse
from reference.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Bans:
    """Of one request. others: [K] int64, the tokens outside of allowed_token_ids; None: all are
    allowed. words: the tokens of each bad word.
    """

    others: Tensor | None
    words: list[list[int]]

    def apply(self, row: Tensor, output: list[int], barred: list[int]) -> None:
        """-inf for banned tokens, in place. row: [V], logits. barred: tokens that are not wanted
        here for another reason, as before min_tokens.
        """
        if self.others is not None:
            row[self.others] = -torch.inf
        barred = [*barred, *self.ends(output)]
        if not barred:
            return
        logits = row[barred]
        row[barred] = -torch.inf
        # Where nothing else is left, a token that is not wanted is better than none, because
        # logits of -inf alone would end the step for all its requests.
        if not row.amax().isfinite():
            row[barred] = logits

    def ends(self, output: list[int]) -> list[int]:
        """The last tokens of the words whose other tokens end the output."""
        return [
            word[-1]
            for word in self.words
            if len(word) == 1 or output[1 - len(word) :] == word[:-1]
        ]


def new_bans(params: SamplingParams, tokenizer, vocab_size: int, device: torch.device) -> Bans:
    """What a request asks for, for a model with `vocab_size` tokens. Raises ValueError for words
    without a tokenizer, or that are no tokens.
    """
    others = None
    if params.allowed_token_ids is not None:
        is_other = torch.ones(vocab_size, dtype=torch.bool)
        is_other[list(params.allowed_token_ids)] = False
        others = is_other.nonzero()[:, 0].to(device)
    if params.bad_words and tokenizer is None:
        refuse("bad_words", params.bad_words, "none, because this engine has no tokenizer")
    return Bans(others, [ids for word in params.bad_words for ids in spellings(tokenizer, word)])


def spellings(tokenizer, word: str) -> list[list[int]]:
    """The tokens of a word at the beginning of a text, and after a space if that is a word of as
    many tokens with another first one.
    """

    def ids_of(text: str) -> list[int]:
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    word = word.lstrip()
    first, spaced = ids_of(word), ids_of(f" {word}")
    if not first:
        refuse("bad_words", word, "words of one token at least")
    is_another = len(spaced) == len(first) and spaced[0] != first[0]
    return [first, spaced] if is_another else [first]
