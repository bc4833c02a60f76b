"""Text and tokens for the server: prompts to ids without waiting for the engine, and single tokens
as log-probabilities show them.
"""

import re
from functools import cached_property

from reference.server.errors import ApiError, bad_request, refused

SURROGATE = re.compile("[\ud800-\udfff]")


def byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes every byte as one printable letter: {letter: byte}.

    Source: Radford et al. 2019, github.com/openai/gpt-2, src/encoder.py.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in printable)
    return letters | {chr(256 + at): byte for at, byte in enumerate(rest)}


class Tokens:
    """A tokenizer as the server uses it. max_model_len: no prompt may have more tokens.

    It asks the `tokenizers` object itself, which many threads may read; transformers' own call
    changes its settings.
    """

    def __init__(self, tokenizer, max_model_len: int):
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        # a tokenizer.json may ask for both, and transformers' call does neither
        self.backend.no_truncation()
        self.backend.no_padding()
        self.max_model_len = max_model_len

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token: no token stands for more."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    @cached_property
    def is_byte_level(self) -> bool:
        return "ByteLevel" in str(self.backend.decoder)

    @cached_property
    def bytes_of_letters(self) -> dict[str, int]:
        return byte_of_letter()

    def encode(
        self, name: str, text: str, special: bool = True, keep: int | None = None
    ) -> list[int]:
        """The ids of a prompt, as reference.engine.text.encode gives them. special: with the
        tokens that the tokenizer's own rule puts around a text, which may be none. keep: how many
        ids at most, as in `cut`; the text loses its beginning, and the tokens around it stay, as in
        vLLM. Raises ApiError, without reading it, for a text that is too long for any model of this
        length. name: of the field.
        """
        if SURROGATE.search(text):
            raise refused(name, text, "text without halves of surrogate pairs")
        if len(text) > self.longest * self.max_model_len:
            raise bad_request(self.too_long(name, f"{len(text)} characters"), name)
        found = self.backend.encode(text, add_special_tokens=False)
        if keep is not None:
            around = self.backend.num_special_tokens_to_add(is_pair=False) if special else 0
            # no more than there are, because the tokenizer counts in 64 bits and a client may not
            most = min(max(0, self.kept(keep) - around), len(found.ids))
            found.truncate(most, direction="left")
        return self.backend.post_process(found, add_special_tokens=special).ids

    def check(self, name: str, ids: list[int]) -> list[int]:
        """Token ids that the model can run. Raises ApiError for others."""
        size = self.backend.get_vocab_size(with_added_tokens=True)
        for at, token in enumerate(ids):
            if not 0 <= token < size:
                raise refused(f"{name}[{at}]", token, f"token ids from 0 to {size - 1}")
        return ids

    def too_long(self, name: str, length: str) -> str:
        """The line for a prompt that leaves no room for an answer."""
        most = self.max_model_len - 1
        return f"{name}: got {length}; accepted: at most {most} tokens (max_model_len {most + 1})"

    def kept(self, keep: int) -> int:
        """How many ids of a prompt truncate_prompt_tokens keeps: -1 stands for as many as fit."""
        return self.max_model_len - 1 if keep == -1 else keep

    def cut(self, name: str, ids: list[int], keep: int | None) -> list[int]:
        """The last `keep` tokens of a prompt: None for all, −1 for as many as fit. Raises ApiError
        for a prompt that is empty or too long.
        """
        if keep is not None:
            ids = ids[max(0, len(ids) - self.kept(keep)) :]
        if not ids:
            raise refused(name, "no tokens", "one token at least")
        if len(ids) >= self.max_model_len:
            too_long = self.too_long(name, f"{len(ids)} tokens")
            raise ApiError(400, too_long, name, "context_length_exceeded")
        return ids

    def decode(self, ids: list[int], skip_special: bool = False) -> str:
        """The text of some tokens."""
        return self.backend.decode(ids, skip_special_tokens=skip_special)

    def text_of(self, token: int) -> str:
        """One token alone; U+FFFD where it is a part of a character."""
        return self.decode([token])

    def bytes_of(self, token: int) -> list[int]:
        """The bytes that a token stands for."""
        piece = self.backend.id_to_token(token) or ""
        letters = self.bytes_of_letters
        if self.is_byte_level and all(letter in letters for letter in piece):
            return [letters[letter] for letter in piece]
        return list(self.text_of(token).encode())

    def is_special(self, token: int) -> bool:
        """Whether it is a special token, such as the end of a sequence."""
        return token in self.tokenizer.all_special_ids
