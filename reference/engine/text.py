"""Text to token ids and back. `Prompts` reads what users write, and refuses what the model cannot
run. `Detokenizer` adds one token at a time to an answer: a character is never split, and a stop
string ends the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from lessons.toolbox.model.arguments import is_whole, refuse, shown
from reference.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from reference.engine.model_runner import ModelRunner
    from reference.engine.outputs import Logprobs
    from reference.features.bans import Bans


# ---------------------------------------------------------------- in


def encode(tokenizer, text: str) -> list[int]:
    """The token ids of a prompt, as vLLM and transformers have them: the tokenizer's own rule (the
    post-processor in its tokenizer.json) decides which special tokens begin and end a text.
    """
    # not verbose, because the caller says better that a prompt is too long
    return tokenizer(text, verbose=False)["input_ids"]


class Prompts:
    """Reads and checks prompts for one engine. runner: whose model runs them, and what it can
    see.
    """

    def __init__(self, tokenizer, runner: ModelRunner, max_model_len: int):
        self.tokenizer = tokenizer
        self.runner = runner
        self.vocab_size = runner.model.config.vocab_size
        self.max_model_len = max_model_len

    def read(self, prompt: str | list[int] | dict) -> tuple:
        """A prompt as text, if it was one, as token ids, and its pictures. Raises ValueError. A
        dict is vLLM's {"prompt": text} or {"prompt_token_ids": ids}, with or without
        multi_modal_data.
        """
        data = None
        if isinstance(prompt, dict):
            from reference.vision.prompt import split  # here: few prompts are dicts

            prompt, data = split(prompt)
        text = prompt if isinstance(prompt, str) else None
        if text is not None:
            if re.search("[\ud800-\udfff]", text):
                refuse("prompt", text, "text without halves of surrogate pairs")
            prompt = encode(self.tokenizer, text)
            if not prompt:
                refuse("prompt", text, "text of one token at least")
        ids, pictures = self.checked(prompt), ()
        if self.runner.sight is not None:
            ids, pictures = self.runner.sight.placed(ids, data)
        elif data is not None:
            refuse("multi_modal_data", data, "none, because this model reads text alone")
        return text, self.checked(ids) if pictures else ids, pictures

    def checked(self, ids: list[int]) -> list[int]:
        """A prompt that the model can run. Raises ValueError for any other."""
        if not isinstance(ids, (list, tuple)) or not ids:
            refuse("prompt", ids, "text or token ids, one at least")
        for at, token in enumerate(ids):
            if not is_whole(token, 0, self.vocab_size - 1):
                accepted = f"token ids from 0 to {self.vocab_size - 1}"
                raise ValueError(f"prompt: got {shown(token)} at {at}; accepted: {accepted}")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"prompt: got {len(ids)} tokens; accepted: at most {self.max_model_len - 1}, so "
                f"that one fits behind them (max_model_len {self.max_model_len})"
            )
        return list(ids)

    def check_tokens(self, **wishes: Iterable[int]) -> None:
        """Raise ValueError for a token that the model does not have."""
        for name, tokens in wishes.items():
            for token in tokens:
                if token >= self.vocab_size:
                    refuse(name, token, f"token ids below {self.vocab_size}")

    def bans(self, params: SamplingParams) -> Bans | None:
        """Which tokens a request's answers may not have; None: it says nothing of that. Raises
        ValueError.
        """
        if params.allowed_token_ids is None and not params.bad_words:
            return None
        from reference.features.bans import new_bans  # here: few requests ask for it

        return new_bans(params, self.tokenizer, self.vocab_size, self.runner.model.device)


# ---------------------------------------------------------------- out


class Detokenizer:
    """The text of one answer as its tokens arrive.

    stop: strings that end it. include_stop: whether the text keeps the one that did.
    """

    def __init__(
        self,
        tokenizer,
        prompt: list[int],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special: bool = True,
    ):
        self.tokenizer = tokenizer
        self.stop = stop
        self.include_stop = include_stop
        self.skip_special = skip_special
        # It begins with the prompt's end, because a decoder drops the space before a first word.
        # Not with one that ends amid a character, because the stream would hold it back and then
        # give it as the answer's.
        begin = prompt[-4:]
        if tokenizer.decode(begin).endswith("\ufffd"):
            begin = []
        self.stream = DecodeStream(ids=begin, skip_special_tokens=skip_special)
        self.token_ids: list[int] = []
        self.text = ""

    def append(
        self, token: int, is_last_special: bool = False, may_stop: bool = True
    ) -> str | None:
        """Take a token; returns the stop string that it completes, if it does.

        is_last_special: a token that ends the answer and is no part of its text. may_stop: False
        while a stop string is text like any other, because the answer has to be longer.
        """
        if is_last_special:
            return None
        self.token_ids.append(token)
        # None while a character lacks bytes
        new = self.stream.step(self.tokenizer.backend_tokenizer, token) or ""
        before, self.text = len(self.text), self.text + new
        return self._find_stop(before) if new and may_stop else None

    def _find_stop(self, before: int) -> str | None:
        """Cut the text at the first stop string that ends behind `before`."""
        found = []
        for stop in self.stop:
            # it may have begun in older text, but not have ended there
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                found.append((at, stop))
        if not found:
            return None
        # The first to end, because one token at a time would have found it first; of equal ones
        # the first in the request.
        at, stop = min(found, key=lambda pair: pair[0] + len(pair[1]))
        self.text = self.text[: at + len(stop) * self.include_stop]
        return stop

    def named(self, here: Logprobs, before: list[int]) -> Logprobs:
        """Log-probabilities of one place with the texts of their tokens. before: the answer's
        tokens up to there.
        """
        from reference.features.token_texts import named  # here: few requests ask for them

        return named(self.tokenizer, here, before)

    def finish(self) -> None:
        """The answer has ended: bytes that never became a character show as U+FFFD."""
        whole = self.tokenizer.decode(self.token_ids, skip_special_tokens=self.skip_special)
        if whole.startswith(self.text):
            self.text = whole

    @property
    def safe_length(self) -> int:
        """How much of the text can be shown: its end may be the beginning of a stop string."""
        if self.include_stop:
            return len(self.text)
        held = 0
        for stop in self.stop:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return len(self.text) - held


def new_detokenizer(tokenizer, prompt: list[int], params: SamplingParams) -> Detokenizer | None:
    """The one that a request asks for. None: no text is wanted, or there is no tokenizer."""
    if tokenizer is None or not params.detokenize:
        return None
    kept = params.include_stop_str_in_output
    return Detokenizer(tokenizer, prompt, params.stop, kept, params.skip_special_tokens)
