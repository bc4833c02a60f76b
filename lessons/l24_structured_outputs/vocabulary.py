"""The bytes of each token, and all tokens as a trie.

A grammar speaks of bytes, a model of tokens. Two kinds of tokenizers say exactly which bytes a
token adds to a text:

- byte-level BPE (GPT-2, Llama 3, Qwen, models/tiny): each byte is written as one visible character,
  so "Ġdef" is b" def";
- SentencePiece with byte fallback (Llama 2, Mistral, Gemma): "▁def" is b" def", and <0x0A> is
  b"\\n".

A token that was added later is its own text; special tokens are no text at all. Both kinds cut
characters into bytes where their vocabulary has no token for them.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_of_tokens(tokenizer, vocab_size: int) -> list[bytes | None]:
    """What each token adds to a text; None for special tokens and for ids without a token.

    tokenizer: as transformers' AutoTokenizer, of the fast kind. vocab_size: of the model, which may
    have more rows than the tokenizer has tokens. Raises ValueError for another kind of tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("tokenizer: got none of the fast kind; accepted: one with tokenizer.json")
    read = reader_of(json.loads(backend.to_str()).get("decoder"))
    found: list[bytes | None] = [None] * vocab_size
    special = set(tokenizer.all_special_ids)
    special |= {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
    for token, id in backend.get_vocab(with_added_tokens=True).items():
        if id < vocab_size and id not in special:
            found[id] = read(token)
    return found


def reader_of(decoder: dict | None):
    """How a tokenizer with this decoder writes bytes: a function of a token. Raises ValueError."""
    kinds = [decoder] if decoder is None else decoder.get("decoders", [decoder])
    names = [kind and kind["type"] for kind in kinds]
    if "ByteLevel" in names:
        return read_byte_level
    blank = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    if "ByteFallback" in names and (blank in kinds or "Metaspace" in names):
        return read_sentencepiece
    raise ValueError(
        f"tokenizer: got one that decodes by {names}; accepted: byte-level, or SentencePiece with "
        f"byte fallback, because only these say which bytes a token is"
    )


def read_byte_level(token: str) -> bytes:
    """b" def" for "Ġdef". A token with other characters was added as its own text."""
    if all(char in BYTE_OF for char in token):
        return bytes(BYTE_OF[char] for char in token)
    return token.encode()


def read_sentencepiece(token: str) -> bytes:
    """b" def" for "▁def", and b"\\n" for "<0x0A>"."""
    if byte := BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace("▁", " ").encode()


def visible_characters() -> dict[str, int]:
    """{character: byte} of GPT-2: printable characters of Latin-1 are themselves, and the other
    bytes follow from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTE_OF = visible_characters()


class Vocabulary:
    """Tokens by their bytes. tokens[id]: bytes, or None for a token that is no text.

    The trie has a node for each beginning of a token. Nodes are numbered level by level, so those
    of one length are side by side: node n comes from parent[n] by byte[n], and level k is the slice
    levels[k]. node_of[id]: where token id ends; 0, the empty text, for a token that is no text.
    """

    def __init__(self, tokens: Sequence[bytes | None]):
        self.tokens = list(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def single_bytes(self) -> frozenset[int]:
        """The bytes that are tokens."""
        return frozenset(token[0] for token in self.tokens if token and len(token) == 1)

    @cached_property
    def trie(self) -> tuple[np.ndarray, np.ndarray, list[slice], np.ndarray]:
        """parent [N], byte [N], levels, node_of [V]."""
        beginnings = {token[:n] for token in self.tokens if token for n in range(len(token) + 1)}
        ordered = sorted(beginnings | {b""}, key=lambda text: (len(text), text))
        number = {text: at for at, text in enumerate(ordered)}
        parent = np.array([number[text[:-1]] for text in ordered])
        byte = np.array([text[-1] if text else 0 for text in ordered], dtype=np.uint8)
        lengths = np.array([len(text) for text in ordered])
        edges = np.searchsorted(lengths, np.arange(1, lengths[-1] + 2))
        levels = [slice(a, b) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist())]
        node_of = np.array([number[token] if token else 0 for token in self.tokens])
        return parent, byte, levels, node_of
