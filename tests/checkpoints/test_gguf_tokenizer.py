"""Proves that a file's tokenizer gives the tokens of the one that was written into it, and of
transformers' and SentencePiece's rules where it is built from tokens.
"""

import importlib.util
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers, processors

from lessons.toolbox.model.checkpoint import load_tokenizer
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.model.corpus import END, HELD_OUT
from reference.checkpoints.gguf import gguf_tokenizer
from reference.checkpoints.gguf.gguf_file import GgufFile, read_gguf, write_gguf
from reference.checkpoints.gguf.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    WHOLE,
    tokenizer_metadata,
    tokenizer_of,
)
from reference.engine.text import encode

VOCABULARY = 4096
GGML = "tokenizer.ggml."
ODD = "Ünïcode ＡＢ é 中文 😀 I'LL we've 12345 x=1.5e-3\r\n\r\n\t  \n   def f(a):  # <|endoftext|> end  "


@pytest.fixture(scope="module")
def tiny():
    return load_tokenizer("models/tiny")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """The first lines of held-out modules, and what they do not hold."""
    files = [Path(importlib.util.find_spec(name).origin) for name in HELD_OUT[:6]]
    return [file.read_text(encoding="utf-8")[:4000] for file in files] + [ODD, "", " ", "\n"]


def as_file(metadata: dict) -> GgufFile:
    return GgufFile(Path("x.gguf"), 3, metadata, {})


def ids_of(tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in texts]


# ---------------------------------------------------------------- there and back


def test_the_embedded_tokenizer_comes_back(tiny, texts, tmp_path):
    write_gguf(tmp_path / "x.gguf", tokenizer_metadata(tiny, VOCABULARY + 3), {})
    file = read_gguf(tmp_path / "x.gguf")
    again = tokenizer_of(file)
    assert ids_of(again, texts) == ids_of(tiny, texts)
    assert [again.decode(ids[1:]) for ids in ids_of(tiny, texts)] == texts
    assert (again.eos_token, again.pad_token) == (tiny.eos_token, tiny.pad_token)
    assert file.metadata["tokenizer.ggml.eos_token_id"] == tiny.eos_token_id
    # ids that the model has and the tokenizer does not
    assert file.metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{VOCABULARY + 2}]"


def test_tokens_and_merges_say_the_same(tiny, texts, monkeypatch):
    """Without the whole tokenizer.json, where llama.cpp's rule is that of the embedded models."""
    metadata = tokenizer_metadata(tiny, VOCABULARY)
    del metadata[WHOLE]
    own = tiny.backend_tokenizer.pre_tokenizer[0]
    monkeypatch.setitem(gguf_tokenizer.RULES, metadata["tokenizer.ggml.pre"], [own])
    assert ids_of(tokenizer_of(as_file(metadata)), texts) == ids_of(tiny, texts)


def test_llama_cpp_cuts_differently_at_line_breaks_only(tiny, texts):
    """The nearest of its rules, which the file names, gives other tokens, but the same text."""
    metadata = tokenizer_metadata(tiny, VOCABULARY)
    del metadata[WHOLE]
    nearest = tokenizer_of(as_file(metadata))
    assert ids_of(nearest, texts) != ids_of(tiny, texts)
    for line in texts[0].splitlines():
        words = " ".join(line.split())
        assert nearest(words)["input_ids"] == tiny(words)["input_ids"]
    assert [nearest.decode(ids[1:]) for ids in ids_of(nearest, texts)] == texts


def test_chat_template(tiny):
    metadata = tokenizer_metadata(tiny, VOCABULARY)
    metadata |= {"tokenizer.chat_template": "{{ messages[0].content }}!"}
    del metadata[WHOLE]
    again = tokenizer_of(as_file(metadata))
    turn = [dict(role="user", content="a")]
    assert again.apply_chat_template(turn, tokenize=False) == "a!"
    assert tokenizer_metadata(again, VOCABULARY)["tokenizer.chat_template"].endswith("!")


# ---------------------------------------------------------------- other files' rules


@pytest.mark.parametrize("rule, model_type", [("qwen2", "qwen2"), ("gpt-2", "gpt2")])
def test_byte_level_rules_are_those_of_transformers(rule, model_type, tiny, texts):
    ggml = pytest.importorskip("transformers.integrations.ggml")
    metadata = tokenizer_metadata(tiny, VOCABULARY) | {"tokenizer.ggml.pre": rule}
    del metadata[WHOLE]
    tokens, merges = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    content = dict(tokens=list(tokens), merges=list(merges))
    theirs = ggml.GGUF_TO_FAST_CONVERTERS[model_type](content).converted()
    texts = [text.replace("<|endoftext|>", "") for text in texts]
    expected = [[0, *theirs.encode(text, add_special_tokens=False).ids] for text in texts]
    assert ids_of(tokenizer_of(as_file(metadata)), texts) == expected


def test_llama_3_takes_three_digits_at_a_time():
    """Its rule differs from Qwen's in that alone."""
    cut = pre_tokenizers.Sequence(gguf_tokenizer.RULES["llama-bpe"]).pre_tokenize_str("a12345 b\n")
    assert [piece for piece, _ in cut] == ["a", "123", "45", " b", "\n"]
    one = pre_tokenizers.Sequence(gguf_tokenizer.RULES["qwen2"]).pre_tokenize_str("a12345 b\n")
    assert [piece for piece, _ in one] == ["a", *"12345", " b", "\n"]


# ---------------------------------------------------------------- what begins and ends a text

TEXTS = ["def f(", "", " ", "a\n"]


@pytest.mark.parametrize("ends", [None, False, True])
@pytest.mark.parametrize(
    "rule, begins, expected",
    [
        ("qwen2", True, True),
        ("qwen2", False, False),
        ("qwen2", None, False),  # as llama.cpp has it where a file says nothing
        ("gpt-2", None, False),
        ("smollm", None, False),
        ("llama-bpe", None, True),
        ("llama-v3", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_a_file_says_what_begins_and_ends_a_text(rule, begins, expected, ends, tiny):
    """By add_bos_token and add_eos_token; None: the file has no such key. Its having a
    bos_token_id says nothing.
    """
    metadata = tokenizer_metadata(tiny, VOCABULARY)
    del metadata[WHOLE]
    metadata |= {f"{GGML}pre": rule, f"{GGML}bos_token_id": 5, f"{GGML}eos_token_id": 6}
    metadata |= {f"{GGML}add_bos_token": begins, f"{GGML}add_eos_token": ends}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    tokenizer = tokenizer_of(as_file(metadata))
    first, last = [5] * expected, [6] * bool(ends)
    for text in TEXTS:
        bare = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encode(tokenizer, text) == [*first, *bare, *last]
    assert tokenizer("a", "b")["input_ids"].count(6) == 2 * len(last)


@pytest.mark.parametrize("begins", [None, False, True])
@pytest.mark.parametrize("ends", [None, False, True])
def test_sentence_piece_begins_a_text_unless_the_file_says_no(begins, ends):
    said = {f"{GGML}add_bos_token": begins, f"{GGML}add_eos_token": ends}
    said = {key: value for key, value in said.items() if value is not None}
    ids = encode(tokenizer_of(as_file(sentence_piece() | said)), "abc")
    bare = joined_by_score("abc", sentence_piece())
    assert ids == [1] * (begins is not False) + bare + [2] * bool(ends)


@pytest.mark.parametrize("single", [["$A"], [END, "$A"], ["$A", END], [END, "$A", END]])
def test_what_begins_and_ends_a_text_is_written(single):
    """Under llama.cpp's keys, and read from them without the whole tokenizer.json."""
    tokenizer = load_tokenizer("models/tiny")
    rule = processors.TemplateProcessing(single=single, special_tokens=[(END, 0)])
    tokenizer.backend_tokenizer.post_processor = rule
    metadata = tokenizer_metadata(tokenizer, VOCABULARY)
    said = [metadata[f"{GGML}add_{key}_token"] for key in ("bos", "eos")]
    assert said == [single[0] == END, single[-1] == END]
    whole = tokenizer_of(as_file(metadata))
    del metadata[WHOLE]
    parts = tokenizer_of(as_file(metadata))
    for text in ("def", ""):
        ids = tokenizer(text)["input_ids"]
        assert encode(whole, text) == encode(parts, text) == ids


# ---------------------------------------------------------------- SentencePiece

PIECES = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca", "cab", "▁abc", "<tool>"]


def sentence_piece() -> dict:
    """A vocabulary by hand: unknown, begin, end, all bytes, and pieces whose scores fall."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES)]
    types[-1] = USER_DEFINED
    scores = [0.0] * 259 + [-float(rank) for rank in (90, 91, 92, 93, 3, 1, 5, 2, 6, 4, 7, 8, 99)]
    named = {"unknown": 0, "bos": 1, "eos": 2}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
    } | {f"tokenizer.ggml.{key}_token_id": id for key, id in named.items()}


def joined_by_score(text: str, metadata: dict) -> list[int]:
    """SentencePiece's BPE as it is written: join the neighbours whose union has the highest score,
    the first of equals, until none is a token; what is left without a token goes byte by byte.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"]))
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(scores.get(a + b), -at) for at, (a, b) in enumerate(pairwise(parts))]
        unions = [union for union in unions if union[0] is not None]
        if not unions:
            break
        at = -max(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    known = [
        [part] if part in scores else [f"<0x{b:02X}>" for b in part.encode()] for part in parts
    ]
    return [tokens.index(piece) for pieces in known for piece in pieces]


def test_sentence_piece_joins_by_score():
    metadata = sentence_piece()
    tokenizer = tokenizer_of(as_file(metadata))
    for text in ("abc", "a abc cab", "  abcabc cabcab é 中", "bcbc acab", "x"):
        ids = tokenizer(text)["input_ids"]
        assert ids == [1, *joined_by_score(text, metadata)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    with_tool = tokenizer("ab<tool>")["input_ids"]
    assert with_tool[-1] == metadata["tokenizer.ggml.tokens"].index("<tool>")
    assert tokenizer.eos_token == "</s>" and tokenizer.unk_token == "<unk>"


# ---------------------------------------------------------------- what is refused


def test_refuses_to_write_another_kind():
    with pytest.raises(ValueError, match="tokenizer: got BPE; accepted: byte-level BPE"):
        tokenizer_metadata(tokenizer_of(as_file(sentence_piece())), 300)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({f"{GGML}tokens": None}, r"tokenizer\.ggml\.tokens must list different strings"),
        ({f"{GGML}tokens": ["a", "a"]}, "must list different strings"),
        ({f"{GGML}token_type": [1]}, "token_type must list 4096 whole numbers"),
        ({f"{GGML}model": "bert"}, r"tokenizer\.ggml\.model is 'bert'; supported: gpt2, llama"),
        ({f"{GGML}model": "llama"}, r"scores must list 4096 numbers"),
        (
            {f"{GGML}pre": "mine"},
            "pre is 'mine'; supported: llama-bpe, qwen2, smollm, gpt-2, llama3",
        ),
        ({f"{GGML}pre": None}, "pre is None; supported"),
        ({f"{GGML}merges": ["a b c"]}, "merges must list pairs"),
        ({f"{GGML}merges": ["qqq zzz"]}, "the tokenizer in x.gguf cannot be read"),
        ({f"{GGML}eos_token_id": 4096}, "eos_token_id is 4096; accepted: 0 to 4095"),
        ({f"{GGML}bos_token_id": None, f"{GGML}add_bos_token": True}, "there is no bos_token_id"),
        ({f"{GGML}eos_token_id": None, f"{GGML}add_eos_token": True}, "there is no eos_token_id"),
        ({WHOLE: "{}"}, "the tokenizer in x.gguf cannot be read"),
        ({WHOLE: "other"}, "have different tokens"),
    ],
)
def test_refuses_in_one_line(changes, message, tiny):
    metadata = tokenizer_metadata(tiny, VOCABULARY)
    whole = metadata.pop(WHOLE)
    if changes.get(WHOLE) == "other":
        changes = {WHOLE: whole, f"{GGML}tokens": metadata[f"{GGML}tokens"][::-1]}
    metadata = {key: value for key, value in (metadata | changes).items() if value is not None}
    with pytest.raises(CheckpointError, match=message) as raised:
        tokenizer_of(as_file(metadata))
    assert "x.gguf" in str(raised.value) and "\n" not in str(raised.value)


def test_a_rule_that_is_known_is_named(tiny):
    """A tokenizer with Qwen's rule is written under Qwen's name."""
    metadata = tokenizer_metadata(tiny, VOCABULARY) | {f"{GGML}pre": "qwen2"}
    del metadata[WHOLE]
    again = tokenizer_of(as_file(metadata))
    assert tokenizer_metadata(again, VOCABULARY)[f"{GGML}pre"] == "qwen2"
