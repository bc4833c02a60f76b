"""Proves the masks: the trie finds what trying every token finds, and the kernel writes what naive
writes and nothing else.
"""

import random

import pytest
import torch

from lessons.l24_structured_outputs import kernels, naive, optimized, stand_ins
from lessons.l24_structured_outputs.kernels import token_mask_kernel
from lessons.l24_structured_outputs.lab.testing import (
    allowed_by,
    embedded_vocabulary,
    random_tokens,
)
from lessons.l24_structured_outputs.languages.reading import compile_structure
from lessons.l24_structured_outputs.matcher import Matcher, TooAmbiguous
from lessons.l24_structured_outputs.optimized import TokenMasks
from lessons.l24_structured_outputs.vocabulary import Vocabulary
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.measure.device import default_device, interpreting
from lessons.toolbox.proof.inputs import far_apart
from lessons.toolbox.proof.numerics import NotEquivalent, assert_same_bits, draw, prove
from lessons.toolbox.proof.planted import with_bug

DEVICE = default_device()  # without a GPU the kernel runs in Triton's interpreter
TYPES = [torch.float32, torch.float16, torch.bfloat16]


# ---------------------------------------------------------------- masks


@pytest.fixture
def vocabulary():
    """The bytes of the embedded model's tokens."""
    return embedded_vocabulary()


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


@pytest.mark.parametrize("kind", STRUCTURES)
def test_the_trie_finds_what_trying_every_token_finds(kind, vocabulary, seed, request):
    """Along random texts of a part of the vocabulary, with its single bytes and several tokens of
    the same bytes; states and tables are forgotten in between.
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


def test_engines_in_several_threads_do_not_meet_in_a_table(vocabulary, monkeypatch):
    """Each change of the table is made by the thread that holds the lock."""
    masks = TokenMasks(compile_structure("regex", r"[a-z]+\(\d\)"), vocabulary)
    number_of, changes = TokenMasks.number_of, []

    def noted(self, state):
        changes.append(self.lock.locked())
        return number_of(self, state)

    monkeypatch.setattr(TokenMasks, "number_of", noted)
    for state, token in random_tokens(masks, allowed_by(masks), 8):
        masks.mask(state)
        masks.advance(state, token)
    assert changes and all(changes) and not masks.lock.locked()


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
    """Tables begin anew, and a caller who holds a state goes on."""
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
    # Bits after the last token mean nothing.
    if vocab_size % 32:
        mask[:, -1] |= -1 << vocab_size % 32
    return logits, mask.to(DEVICE), torch.tensor(rows, device=DEVICE)


def same(inputs) -> None:
    """Equal in every bit, because nothing is computed; and rows that are not named are
    untouched.
    """
    logits, mask, rows = inputs
    out = optimized.apply_token_mask(logits.clone(), mask, rows)
    wanted = naive.apply_token_mask(logits.clone(), mask, rows)
    if not torch.equal(out, wanted):
        raise NotEquivalent("exact", "the logits differ")
    others = [row for row in range(len(logits)) if row not in rows.tolist()]
    assert_same_bits(out[others], logits[others])


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab_size", [1, 31, 64, 1023, 1025, 2090])
def test_the_kernel(vocab_size, dtype, seed, proof):
    inputs = problem(vocab_size, dtype=dtype, seed=seed)
    same(inputs)
    errors = prove(optimized.apply_token_mask, naive.apply_token_mask, inputs, mutates=[0])
    proof.record(token_mask_kernel, errors[0])


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_the_stand_in(dtype, seed):
    for vocab_size in (1, 31, 32, 65, 1100):
        inputs = [each.cpu() for each in problem(vocab_size, dtype=dtype, seed=seed)]
        logits = inputs[0].clone()
        assert torch.equal(
            stand_ins.apply_token_mask(logits, *inputs[1:]), naive.apply_token_mask(*inputs)
        )
        assert_same_bits(logits[[1, 2, 5]], inputs[0][[1, 2, 5]])


def test_the_kernel_on_a_part_of_a_larger_tensor(seed):
    """Rows with a stride, a mask with a stride, and NaN logits that are allowed stay what
    they are.
    """
    logits, mask, rows = problem(1100, seed=seed)
    whole = torch.full((6, 1200), 7.0, device=DEVICE)
    whole[:, 40:1140] = logits
    wide = torch.zeros(3, 50, dtype=torch.int32, device=DEVICE)
    wide[:, : mask.shape[1]] = mask
    optimized.apply_token_mask(whole[:, 40:1140], wide[:, : mask.shape[1]], rows)
    naive.apply_token_mask(logits, mask, rows)
    assert_same_bits(whole[:, 40:1140], logits)
    assert (whole[:, :40] == 7).all() and (whole[:, 1140:] == 7).all()


def test_rows_further_apart_than_an_int32_counts(seed, tmp_path, monkeypatch):
    logits, mask, rows = problem(100, (2, 0), torch.float16, seed, num_rows=3)
    far = far_apart(logits)
    with in_bounds():
        optimized.apply_token_mask(far, mask, rows)
        assert_same_bits(far.contiguous(), naive.apply_token_mask(logits, mask, rows))
        if not interpreting():
            return  # a kernel that leaves its tensors may end the process
        row = "row = tl.load(rows_ptr + which)"
        buggy = with_bug(kernels, tmp_path, row, row + ".to(tl.int32)")
        monkeypatch.setattr(optimized, "token_mask_kernel", buggy.token_mask_kernel)
        with pytest.raises(Exception, match="out of bounds"):
            optimized.apply_token_mask(far, mask, rows)


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


@pytest.mark.sample(4)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path, monkeypatch):
    buggy = with_bug(kernels, tmp_path, *BUGS[bug])
    monkeypatch.setattr(optimized, "token_mask_kernel", buggy.token_mask_kernel)
    with pytest.raises(NotEquivalent):
        same(problem(1090, rows=(4, 1), seed=3))


@pytest.mark.parametrize("dtype", TYPES)
def test_xgrammar_applies_the_same_bits(dtype, seed):
    xgrammar = pytest.importorskip("xgrammar", reason="NOT RUN: needs xgrammar")
    logits, mask, rows = (each.cpu() for each in problem(1025, dtype=dtype, seed=seed))
    whole = torch.full((6, mask.shape[1]), -1, dtype=torch.int32)
    whole[rows] = mask
    theirs = logits.clone()
    xgrammar.apply_token_bitmask_inplace(theirs, whole, indices=rows.tolist())
    assert_same_bits(naive.apply_token_mask(logits, mask, rows), theirs)
