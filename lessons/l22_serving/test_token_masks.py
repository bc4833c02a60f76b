"""Proves the masks: the bytes of tokens are exact, the trie finds what trying every token finds, the
kernel writes what naive writes and nothing else, and other libraries allow the same tokens.
"""

import json
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from lessons.l22_serving import kernels
from lessons.l22_serving.grammar import naive, optimized
from lessons.l22_serving.grammar.json_text import Layout
from lessons.l22_serving.grammar.matcher import Matcher, TooAmbiguous
from lessons.l22_serving.grammar.optimized import TokenMasks
from lessons.l22_serving.grammar.reading import compile_structure
from lessons.l22_serving.grammar.vocabulary import Vocabulary, bytes_of_tokens
from lessons.l22_serving.kernels import token_mask_kernel
from lessons.l22_serving.lab.grammar_testing import random_tokens
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.checkpoint import load_tokenizer
from lessons.toolbox.proof.numerics import NotEquivalent, assert_same_bits, draw, prove
from lessons.toolbox.proof.planted import with_bug

DEVICE = default_device()  # without a GPU the kernel runs in Triton's interpreter
TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("models/tiny")


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary(bytes_of_tokens(tokenizer, len(tokenizer)))


# ---------------------------------------------------------------- the bytes of tokens


def wrapped(backend: Tokenizer):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def sentencepiece_tokenizer():
    """A vocabulary in the form of Llama 2's: blanks as ▁, bytes as <0x..>, and a decoder that says so."""
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
    """Bytes that are no text alone show as U+FFFD, so they are decoded between letters that we know."""
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


# ---------------------------------------------------------------- masks

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 3, "maximum": 250},
        "more": {
            "anyOf": [{"$ref": "#"}, {"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]
        },
    },
    "required": ["name"],
}
STRUCTURES = {
    "regex": r"(\w+é?|[日-本]{1,3}|🙂+ ?)(, \d{2,4})*",
    "json": SCHEMA,
    "json_object": True,
    "grammar": 'root ::= item (" " root)? | "(" root ")"\nitem ::= [a-z]+ | item "." item',
    "choice": ["red", "return", "return None", "é"],
}


def allowed_by(masks: TokenMasks):
    size = len(masks.vocabulary)
    return lambda state: naive.unpacked(masks.mask(state), size).nonzero().view(-1).tolist()


@pytest.mark.parametrize("kind", STRUCTURES)
def test_the_trie_finds_what_trying_every_token_finds(kind, vocabulary, seed, request):
    """Along random texts of a part of the vocabulary, with its single bytes and several tokens of the
    same bytes; states and tables are forgotten in between.
    """
    few = random.choices(vocabulary.tokens, k=600) + [bytes([byte]) for byte in range(256)]
    part = Vocabulary([*few, None, b"", b"re", b"re"])
    masks = TokenMasks(compile_structure(kind, STRUCTURES[kind]), part)
    matcher = Matcher(masks.matcher.automaton)
    for _ in range(20 if request.config.getoption("--all") else 2):
        text = b""
        for state, token in random_tokens(masks, allowed_by(masks), 12):
            wanted = naive.token_mask(matcher, matcher.read(text), part.tokens)
            assert torch.equal(masks.mask(state), wanted), text
            assert masks.mask(state) is masks.mask(state)
            text += part.tokens[token] if token >= 0 else b""
            if random.random() < 0.1:
                masks.forget()


def test_bits_of_any_number_of_tokens(seed):
    for size in (1, 31, 32, 33, 64, 100):
        allowed = torch.rand(size) < 0.5
        allowed[-1] = True  # the sign of a word, for 32 and 64
        bits = naive.packed(allowed)
        assert bits.dtype == torch.int32 and bits.shape == (-(-size // 32),)
        assert torch.equal(bits, optimized.packed(allowed.numpy()))
        assert torch.equal(naive.unpacked(bits, size), allowed)


def test_a_mask_that_takes_too_long_is_given_up(vocabulary, monkeypatch):
    masks = TokenMasks(compile_structure("grammar", 'root ::= [a-z]+ | root root "."'), vocabulary)
    monkeypatch.setattr(optimized, "MOST_STEPS", 30)
    with pytest.raises(TooAmbiguous):
        masks.mask(masks.start)


def test_memory_is_bounded(vocabulary, monkeypatch, seed):
    """Tables begin anew, and whoever holds a state goes on."""
    monkeypatch.setattr(optimized, "MOST_ROWS", 20)
    masks = TokenMasks(compile_structure("json", SCHEMA), vocabulary)
    once = TokenMasks(compile_structure("json", SCHEMA), vocabulary)
    monkeypatch.setattr(optimized, "MOST_ROWS", 4096)
    state = once.start
    for at, token in random_tokens(masks, allowed_by(masks), 25):
        monkeypatch.setattr(optimized, "MOST_ROWS", 20)
        assert torch.equal(masks.mask(at), once.mask(state))
        assert len(masks.masks) <= 21
        if token >= 0:
            state = once.advance(state, token)


# ---------------------------------------------------------------- the kernel


def problem(vocab_size, rows=(3, 0, 4), dtype=torch.float32, seed=0, num_rows=6):
    """logits, mask, rows."""
    logits = draw("normal", (num_rows, vocab_size), dtype=dtype, seed=seed, device=DEVICE)
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.rand(len(rows), vocab_size, generator=generator) < 0.5
    allowed[:, -1] = torch.arange(len(rows)) % 2 == 0
    mask = naive.packed(allowed)
    # Bits behind the last token mean nothing.
    if vocab_size % 32:
        mask[:, -1] |= -1 << vocab_size % 32
    return logits, mask.to(DEVICE), torch.tensor(rows, device=DEVICE)


def same(inputs) -> None:
    """Equal in every bit, because nothing is computed; and rows that nobody named are untouched."""
    logits, mask, rows = inputs
    out = optimized.apply_token_mask(logits.clone(), mask, rows)
    wanted = naive.apply_token_mask(logits.clone(), mask, rows)
    if not torch.equal(out, wanted):
        raise NotEquivalent("exact", "the logits differ")
    others = [row for row in range(len(logits)) if row not in rows.tolist()]
    assert_same_bits(out[others], logits[others])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab_size", [1, 31, 64, 1023, 1025, 2090])
def test_the_kernel(vocab_size, dtype, seed, proof):
    inputs = problem(vocab_size, dtype=dtype, seed=seed)
    same(inputs)
    errors = prove(optimized.apply_token_mask, naive.apply_token_mask, inputs, mutates=[0])
    proof.record(token_mask_kernel, errors[0])


def test_the_kernel_on_a_part_of_a_larger_tensor(seed):
    """Rows with a stride, a mask with a stride, and NaN logits that are allowed stay what they are."""
    logits, mask, rows = problem(1100, seed=seed)
    whole = torch.full((6, 1200), 7.0, device=DEVICE)
    whole[:, 40:1140] = logits
    wide = torch.zeros(3, 50, dtype=torch.int32, device=DEVICE)
    wide[:, : mask.shape[1]] = mask
    optimized.apply_token_mask(whole[:, 40:1140], wide[:, : mask.shape[1]], rows)
    naive.apply_token_mask(logits, mask, rows)
    assert_same_bits(whole[:, 40:1140], logits)
    assert (whole[:, :40] == 7).all() and (whole[:, 1140:] == 7).all()


def test_no_rows_and_bad_operands():
    logits, mask, rows = problem(100)
    before = logits.clone()
    assert optimized.apply_token_mask(logits, mask[:0], rows[:0]) is logits
    assert_same_bits(logits, before)
    for wrong, name in (
        ((logits.double(), mask, rows), "logits: got"),
        ((logits.t(), mask, rows), "logits: got"),
        ((logits, mask[:, :3], rows), "mask: got"),
        ((logits, mask.long(), rows), "mask: got"),
        ((logits, mask[:2], rows), "mask: got"),
        ((logits, mask, rows.int()), "rows: got"),
    ):
        with pytest.raises(ValueError, match=name) as caught:
            optimized.apply_token_mask(*wrong)
        assert "\n" not in str(caught.value)


BUGS = {
    "what is allowed is forbidden": ("& 1) == 0", "& 1) == 1"),
    "the bits of a word in the other order": ("(token % 32)", "(31 - token % 32)"),
    "the row of the mask, not of the logits": ("row * stride_logits", "which * stride_logits"),
    "the first mask for every row": ("mask_ptr + which * stride_mask", "mask_ptr"),
    "the first block only": ("tl.program_id(1) * BLOCK + tl", "0 * BLOCK + tl"),
    "the last token is not seen": ("token < vocab_size", "token < vocab_size - 1"),
    "a large number in place of -inf": ('float("-inf")', "-1e4"),
    "allowed logits are written, too": ("mask=is_token & is_forbidden", "mask=is_token"),
    "words of 31 bits": ("token // 32", "token // 31"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path, monkeypatch):
    buggy = with_bug(kernels, tmp_path, *BUGS[bug])
    monkeypatch.setattr(optimized, "token_mask_kernel", buggy.token_mask_kernel)
    with pytest.raises(NotEquivalent):
        same(problem(1090, rows=(4, 1), seed=3))


# ---------------------------------------------------------------- other libraries

BOTH_READ = {
    "regex": [r"[a-z]+(-\d{2,3})*", r"(yes|no|maybe), [^\d\n]{1,9}", r"[A-Za-z_ ]{2,12}\.?"],
    "json": [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "ok": {"type": "boolean"},
                "list": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["name", "ok", "list"],
            "additionalProperties": False,
        },
        {"enum": ["a", "b", 12, None, True]},
    ],
}
EACH = [(kind, n) for kind, values in BOTH_READ.items() for n in range(len(values))]


def assert_agrees(kind, value, vocabulary, peer_mask, accept, forces: bool = False) -> None:
    """Along a random text, the peer allows the same tokens. forces: where only one byte can follow, it
    allows only the token that its tokenizer would choose.
    """
    masks = TokenMasks(compile_structure(kind, value, Layout.compact()), vocabulary)
    size, eos = len(vocabulary), 0

    def allowed(state) -> list[int]:
        mine, theirs = naive.unpacked(masks.mask(state), size), peer_mask()
        assert bool(theirs[eos]) == state.may_end
        differ = (mine != theirs).nonzero().view(-1).tolist()
        # DEL in a JSON string: RFC 8259 allows it, llguidance does not.
        differ = [t for t in differ if t != eos and b"\x7f" not in vocabulary.tokens[t]]
        firsts = {text[0] for text, is_mine in zip(vocabulary.tokens, mine) if text and is_mine}
        if forces and len(firsts) == 1:
            differ = [token for token in differ if theirs[token]]
        assert not differ, [(vocabulary.tokens[t], bool(mine[t])) for t in differ[:5]]
        return (mine & theirs).nonzero().view(-1).tolist()

    for _, token in random_tokens(masks, allowed, 20):
        if token >= 0:
            accept(token)


@pytest.mark.parametrize("kind, number", EACH)
def test_xgrammar_allows_the_same_tokens(kind, number, vocabulary, seed):
    xgrammar = pytest.importorskip("xgrammar", reason="NOT RUN: needs xgrammar")
    value = BOTH_READ[kind][number]
    info = xgrammar.TokenizerInfo(
        [t or b"<|endoftext|>" for t in vocabulary.tokens], stop_token_ids=[0]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    compiled = (
        compiler.compile_regex(value)
        if kind == "regex"
        else compiler.compile_json_schema(json.dumps(value), any_whitespace=False)
    )
    matcher = xgrammar.GrammarMatcher(compiled)
    bitmask = xgrammar.allocate_token_bitmask(1, len(vocabulary))

    def peer_mask():
        matcher.fill_next_token_bitmask(bitmask)
        return naive.unpacked(bitmask[0], len(vocabulary))

    assert_agrees(kind, value, vocabulary, peer_mask, matcher.accept_token)


@pytest.mark.parametrize("kind, number", EACH)
def test_llguidance_allows_the_same_tokens(kind, number, tokenizer, vocabulary, seed):
    llguidance = pytest.importorskip("llguidance", reason="NOT RUN: needs llguidance")
    from llguidance import hf, numpy

    value = BOTH_READ[kind][number]
    if kind == "regex":
        source = llguidance.LLMatcher.grammar_from_regex(value)
    else:
        layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        source = llguidance.LLMatcher.grammar_from_json_schema(value, overrides=layout)
    matcher = llguidance.LLMatcher(hf.from_tokenizer(tokenizer), source)
    bitmask = numpy.allocate_token_bitmask(1, len(vocabulary))

    def peer_mask():
        numpy.fill_next_token_bitmask(matcher, bitmask)
        return naive.unpacked(torch.from_numpy(bitmask[0]), len(vocabulary))

    assert_agrees(kind, value, vocabulary, peer_mask, matcher.consume_token, forces=True)


@pytest.mark.parametrize("dtype", TYPES)
def test_xgrammar_applies_the_same_bits(dtype, seed):
    xgrammar = pytest.importorskip("xgrammar", reason="NOT RUN: needs xgrammar")
    logits, mask, rows = (each.cpu() for each in problem(1025, dtype=dtype, seed=seed))
    whole = torch.full((6, mask.shape[1]), -1, dtype=torch.int32)
    whole[rows] = mask
    theirs = logits.clone()
    xgrammar.apply_token_bitmask_inplace(theirs, whole, indices=rows.tolist())
    assert_same_bits(naive.apply_token_mask(logits, mask, rows), theirs)
