"""Prompts as users write them, made into token ids that the model can run."""

import re
from collections.abc import Iterable

from lessons.toolbox.model.arguments import is_whole, refuse, shown
from reference.engine.detokenizer import encode
from reference.engine.model_runner import ModelRunner


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
