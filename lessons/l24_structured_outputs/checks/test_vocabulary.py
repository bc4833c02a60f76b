"""Proves that the bytes of tokens are exact, for both kinds of tokenizers."""

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from lessons.l24_structured_outputs.vocabulary import bytes_of_tokens
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.checkpoint import load_tokenizer

DEVICE = default_device()  # without a GPU the kernel runs in Triton's interpreter
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def wrapped(backend: Tokenizer):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def sentencepiece_tokenizer():
    """A vocabulary in the form of Llama 2's: blanks as ▁, bytes as <0x..>, and a decoder that says
    so.
    """
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁the", "a", "é", "<0xZZ>", "a▁b", "日本", "<think>"]
    backend = Tokenizer(
        models.BPE(
            {word: n for n, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    return wrapped(backend)


def test_tokens_of_a_text_are_its_bytes(tokenizer, vocabulary, seed):
    """Also where a character is cut between tokens."""
    for _ in range(40):
        codes = [random.choice([32, 97, 10, 233, 0x65E5, 0x1F642, 34]) for _ in range(12)]
        text = "".join(map(chr, codes)) + random.choice(["def f(x):\n    return", "naïve 🙂", ""])
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(vocabulary.tokens[id] for id in ids) == text.encode()
    assert vocabulary.tokens[tokenizer.eos_token_id] is None
    assert len(vocabulary.single_bytes) == 256


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_every_token_is_what_its_decoder_says(kind, tokenizer):
    """Bytes that are no text alone show as U+FFFD, so they are decoded between letters that we
    know.
    """
    tokenizer = tokenizer if kind == "byte-level" else sentencepiece_tokenizer()
    tokens = bytes_of_tokens(tokenizer, len(tokenizer) + 3)
    assert tokens[-3:] == [None] * 3  # rows of the model without a token
    decoder = tokenizer.backend_tokenizer
    added = decoder.get_added_tokens_decoder()
    special = {id for id, token in added.items() if token.special}
    letter = tokens.index(b"a")
    for id in range(len(tokenizer)):
        if id in special:
            assert tokens[id] is None
            continue
        shown = decoder.decode([letter, id, letter], skip_special_tokens=False)
        said = tokens[id].decode(errors="replace")
        if "\ufffd" not in said:
            assert shown == f"a{said}a", (id, tokens[id])
        else:
            assert "\ufffd" in shown


def test_bytes_become_characters_again(seed):
    tokenizer = sentencepiece_tokenizer()
    tokens = bytes_of_tokens(tokenizer, len(tokenizer))
    ids = [tokens.index(bytes([byte])) for byte in "é日🙂".encode()]
    assert tokenizer.backend_tokenizer.decode(ids) == "é日🙂"
    assert tokens[tokenizer.convert_tokens_to_ids("a▁b")] == b"a b"
    assert tokens[tokenizer.convert_tokens_to_ids("<0xZZ>")] == b"<0xZZ>"


def test_added_tokens(tokenizer):
    """What was added as text is text; what was added as special is not."""
    twin = load_tokenizer("models/tiny")
    twin.add_tokens(["a new é", "<think>"])
    twin.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    tokens = bytes_of_tokens(twin, len(twin))
    assert tokens[-3:] == ["a new é".encode(), b"<think>", None]


def test_other_tokenizers_are_refused_in_one_line():
    words = {"[UNK]": 0, "a": 1, "##b": 2}
    backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    for decoder in (None, decoders.WordPiece(), decoders.Metaspace()):
        if decoder is not None:
            backend.decoder = decoder
        with pytest.raises(ValueError, match=r"tokenizer: got .*accepted: byte-level") as caught:
            bytes_of_tokens(wrapped(backend), 3)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="fast kind"):
        bytes_of_tokens(object(), 3)
