"""Other libraries allow the same tokens, where both read the same dialect."""

import json
import re

import pytest
import torch

from lessons.l24_structured_outputs import naive
from lessons.l24_structured_outputs.lab.testing import random_tokens
from lessons.l24_structured_outputs.languages.json_text import Layout
from lessons.l24_structured_outputs.languages.reading import compile_structure
from lessons.l24_structured_outputs.optimized import TokenMasks
from lessons.toolbox.measure.device import default_device

DEVICE = default_device()  # without a GPU the kernel runs in Triton's interpreter
TYPES = [torch.float32, torch.float16, torch.bfloat16]


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


def is_rare_escape(text: bytes, token: bytes) -> bool:
    r"""Whether a token that follows the text of a JSON document writes at an escape \/ or \u0000:
    RFC 8259 allows them for any character, llguidance only where there is no shorter way.
    """
    escapes = re.finditer(rb"\\(u[0-9a-fA-F]{0,4}|.)", text + token, re.DOTALL)
    return any(found.end() > len(text) and found[1][:1] in b"/u" for found in escapes)


def assert_agrees(kind, value, vocabulary, peer_mask, accept, is_llguidance: bool = False) -> None:
    """Along a random text, the peer allows the same tokens. is_llguidance: where only one byte can
    follow, it allows only the token that its tokenizer would choose, and it has rules for escapes.
    """
    written = []
    masks = TokenMasks(compile_structure(kind, value, Layout.compact()), vocabulary)
    size, eos = len(vocabulary), 0

    def allowed(state) -> list[int]:
        mine, theirs = naive.unpacked(masks.mask(state), size), peer_mask()
        assert bool(theirs[eos]) == state.may_end
        differ = (mine != theirs).nonzero().view(-1).tolist()
        # DEL in a JSON string: RFC 8259 allows it, llguidance does not.
        differ = [t for t in differ if t != eos and b"\x7f" not in vocabulary.tokens[t]]
        firsts = {text[0] for text, is_mine in zip(vocabulary.tokens, mine) if text and is_mine}
        if is_llguidance:
            if len(firsts) == 1:
                differ = [token for token in differ if theirs[token]]
            if kind == "json":
                text = b"".join(written)
                differ = [
                    token
                    for token in differ
                    if theirs[token] or not is_rare_escape(text, vocabulary.tokens[token])
                ]
        assert not differ, [(vocabulary.tokens[t], bool(mine[t])) for t in differ[:5]]
        return (mine & theirs).nonzero().view(-1).tolist()

    for _, token in random_tokens(masks, allowed, 20):
        if token >= 0:
            accept(token)
            written.append(vocabulary.tokens[token])


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

    assert_agrees(kind, value, vocabulary, peer_mask, matcher.consume_token, is_llguidance=True)
