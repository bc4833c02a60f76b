"""Checks of lesson 24's exercises. Each exists because it rejects a named wrong answer
(wrong/l24.py).
"""

import copy
import random
from functools import cache

import pytest
import torch

from lessons.toolbox.proof.inputs import far_apart
from tests.exercises.checking import (
    assert_equal,
    assert_largest_tensor,
    call,
    check,
    in_wider_memory,
    note,
)
from tests.exercises.kernel_launches import launches
from tests.exercises.kernel_work import watched

# ---------------------------------------------------------------- 24.1 masks


class Steps:
    """Stands in for a Matcher. table: {state: {byte: state}}; counts the steps."""

    def __init__(self, table):
        self.table = table
        self.count = 0

    def step(self, state, byte):
        assert state in self.table, (
            f"your function steps from {state!r}, which is no state of this matcher"
            + (": nothing follows a byte that did not fit" if state is None else "")
        )
        self.count += 1
        return self.table[state].get(byte)


DIGITS = {"digits": {byte: "digits" for byte in b"0123456789"}}
# [0-9]+(,[0-9]+)*, with a position before and one after the first digit
LIST = {
    0: {byte: 1 for byte in b"0123456789"},
    1: {**{byte: 1 for byte in b"0123456789"}, ord(","): 0},
}
# three letters at most, so what a text ends with says nothing
THREE = {at: {byte: at + 1 for byte in b"ab"} for at in range(3)} | {3: {}}
WORD = {0: {ord("a"): 1}, 1: {ord("b"): 2}, 2: {}}


def masked(table, state, tokens):
    """Token by token, and each word as a number of its own."""
    words = [0] * -(-len(tokens) // 32)
    for number, token in enumerate(tokens):
        at = state
        for byte in token or b"":
            at = None if at is None else table[at].get(byte)
        if token and at is not None:
            words[number // 32] += 2 ** (number % 32)
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32)


def compare_mask(impl, matcher: Steps, state, tokens) -> None:
    """As compare, with a message that names the first token that is wrong."""
    want = masked(matcher.table, state, tokens)
    got = call(impl, dict(matcher=matcher, state=state, tokens=tokens))
    if isinstance(got, torch.Tensor) and (got.shape, got.dtype) == (want.shape, want.dtype):
        note(got)
        for bit in range(32 * len(want)):
            mine, right = (int(mask[bit // 32]) >> bit % 32 & 1 for mask in (got, want))
            token = (
                f"token {bit}, {tokens[bit]!r}," if bit < len(tokens) else f"bit {bit}, no token,"
            )
            assert mine == right, f"{token} is {mine} in your mask, expected {right}"
    assert_equal(got, want)


def drawn_tokens(seed, count, letters=b"0123,a", longest=4):
    draws = random.Random(seed)
    tokens = [
        bytes(draws.choice(letters) for _ in range(draws.randint(1, longest))) for _ in range(count)
    ]
    return [None if draws.random() < 0.05 else token for token in tokens]


MASK_CASES = {  # name: (table, state, tokens by seed, why)
    "example": (DIGITS, "digits", lambda seed: [b"7", b"a", None, b"42", b"4x"], "the docstring's"),
    "middle": (
        LIST,
        1,
        lambda seed: [b"1,", b"1,,", b",2,3", b",", b",a", b"12", b"a1", b"1,a", b"1,2"],
        "all bytes of a token must fit, in their order",
    ),
    "other_state": (
        LIST,
        0,
        lambda seed: [b",", b"1,", b",2", b"7", b"7,7", b"7,,"],
        "from another state other tokens fit",
    ),
    "no_text": (DIGITS, "digits", lambda seed: [None, b"", b"5", None], "tokens without text"),
    "end": (WORD, 2, lambda seed: [b"a", b"b", b"ab"], "nothing fits any more"),
    "needs_more": (WORD, 0, lambda seed: [b"a", b"ab", b"abb"], "the text need not end there"),
    "alike_ends": (
        THREE,
        0,
        lambda seed: [b"ab", b"b", b"aab", b"aaab", b"baab", b"bab", b"a", b"bbbab", b"aa"],
        "what follows depends on all bytes before it",
    ),
    "words": (LIST, 1, lambda seed: drawn_tokens(seed, 70), "70 tokens are three words"),
    "full_words": (DIGITS, "digits", lambda seed: [b"1"] * 64, "two words full of ones"),
    "sign": (DIGITS, "digits", lambda seed: [b"x"] * 31 + [b"1"], "token 31 is the sign"),
}


@check("24.1", {case: why for case, (*_, why) in MASK_CASES.items()}, seconds=5)
def test_mask(impl, case, seed):
    table, state, make, _ = MASK_CASES[case]
    compare_mask(impl, Steps(table), state, make(seed))


@check("24.1", {"two_states": "the same tokens from one state, then from another"}, seconds=5)
def test_mask_again(impl, case, seed):
    """What was found from one state says nothing about another."""
    tokens = [b"1", b",", b"12", b",1", b"1,", b"a"]
    matcher = Steps(LIST)
    for state in (0, 1, 0):
        compare_mask(impl, matcher, state, tokens)


@check("24.1", {"shared": "long tokens that begin alike", "mixed": "random tokens"}, seconds=5)
def test_mask_steps(impl, case, seed):
    """One step for each beginning that can be reached."""
    if case == "shared":
        table, state = DIGITS, "digits"
        tokens = [b"1234567" + bytes([end]) for end in b"0123456789ab"] + [b"x12345", b"x1"]
    else:
        table, state, tokens = LIST, 1, drawn_tokens(seed, 60)
    beginnings, wanted = {b"": state}, 0
    for text in sorted({t[:n] for t in tokens if t for n in range(1, len(t) + 1)}, key=len):
        before = beginnings.get(text[:-1])
        if before is not None:
            wanted += 1
            beginnings[text] = table[before].get(text[-1])
    matcher = Steps(table)
    compare_mask(impl, matcher, state, tokens)
    assert matcher.count <= wanted, (
        f"your function steps {matcher.count} times, and {wanted} different beginnings can be "
        f"reached: keep the state after each beginning"
    )


# ---------------------------------------------------------------- 24.2 probabilities


class Tree:
    """A model and the texts that fit. table: {text: (probabilities, allowed tokens)}; a text that
    is no key of it has ended.
    """

    def __init__(self, table):
        self.table = table

    def model(self, text):
        assert text in self.table, f"your function asks what follows {text!r}, which has ended"
        return self.table[text][0]

    def allowed(self, text):
        return self.table[text][1] if text in self.table else []


def chances_by_hand(tree: Tree):
    """Each text from its end back to its beginning."""
    ends = [(*text, t) for text, (_, allowed) in tree.table.items() for t in allowed]
    ends = [text for text in ends if text not in tree.table] or [()]
    masked, free = {}, {}
    for end in ends:
        masked[end] = free[end] = 1.0
        for at in range(len(end)):
            chances, allowed = tree.table[end[:at]]
            free[end] *= chances[end[at]]
            masked[end] *= chances[end[at]] / sum(chances[t] for t in allowed)
    return {end: (masked[end], free[end] / sum(free.values())) for end in ends}


@cache
def drawn_tree(seed, width, depth, few=False):
    """Random probabilities over four tokens; few: of a text exactly one token may follow."""
    draws, table = random.Random(seed), {}
    waiting = [()]
    while waiting:
        text = waiting.pop()
        parts = [draws.uniform(0.05, 1) ** 2 for _ in range(4)]
        count = 1 if few and text else draws.randint(1, width) if text else width
        allowed = sorted(draws.sample(range(4), count))
        table[text] = [part / sum(parts) for part in parts], allowed
        longer = [(*text, token) for token in allowed]
        waiting += [t for t in longer if len(t) < depth and (len(t) < 2 or draws.random() < 0.7)]
    return Tree(table)


EXAMPLE = Tree(
    {
        (): ([0.9, 0.0, 0.1, 0.0], [0, 2]),
        (0,): ([0.39, 0.01, 0.3, 0.3], [1]),
        (2,): ([0.0, 0.0, 0.0, 1.0], [3]),
    }
)
CHANCE_CASES = {  # name: (tree by seed, why)
    "example": (lambda seed: EXAMPLE, "the docstring's"),
    "one_step": (lambda seed: drawn_tree(seed, 3, 1), "texts of one token: the two are the same"),
    "forced": (
        lambda seed: drawn_tree(seed, 3, 4, few=True),
        "after the first token one way is left",
    ),
    "one_text": (
        lambda seed: Tree({(): ([0.2, 0.8], [0]), (0,): ([0.5, 0.5], [1])}),
        "only one text fits, so it is sure in both ways",
    ),
    "no_step": (lambda seed: Tree({}), "the empty text has ended already, and is the only one"),
    "long": (lambda seed: drawn_tree(seed, 3, 5), "texts of different lengths"),
}


@check("24.2", {case: why for case, (_, why) in CHANCE_CASES.items()}, seconds=5)
def test_chances(impl, case, seed):
    tree = CHANCE_CASES[case][0](seed)
    want = chances_by_hand(tree)
    own = Tree(copy.deepcopy(tree.table))
    got = call(impl, dict(model=own.model, allowed=own.allowed))
    assert isinstance(got, dict), f"your result is {got!r}, expected a dictionary"
    assert own.table == tree.table, (
        "your function changed a list that model or allowed returned: it is the model's own"
    )
    for text, both in got.items():
        assert isinstance(both, tuple) and len(both) == 2, (
            f"your result has {both!r} for {text}, expected a tuple of two: (with a mask, without)"
        )
    assert_equal(sorted(got), sorted(want), label="the texts of your result")
    for text, (masked, free) in want.items():
        assert_equal(got[text][0], masked, rtol=1e-9, label=f"the chance of {text} with a mask")
        assert_equal(got[text][1], free, rtol=1e-9, label=f"the share of {text} without a mask")


# ---------------------------------------------------------------- 24.3 kernel and wrapper


def batch_of(seed, rows, vocab_size, dtype=torch.float32, share=0.5):
    """logits, words, and what is forbidden: [B, V] bool. share: of the tokens that are allowed."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=g).to(dtype)
    is_allowed = torch.rand(rows, vocab_size, generator=g) < share
    count = -(-vocab_size // 32)
    bits = torch.zeros(rows, count * 32, dtype=torch.int64)
    bits[:, :vocab_size] = is_allowed
    words = (bits.view(rows, count, 32) << torch.arange(32)).sum(-1).to(torch.int32)
    return logits, words, ~is_allowed


FORBID_CASES = {  # name: (arguments of batch_of after the seed, why)
    "whole_words": (dict(rows=2, vocab_size=64), "V is a multiple of 32"),
    "tail": (dict(rows=3, vocab_size=75), "the last word is not full"),
    "several_blocks": (dict(rows=2, vocab_size=9000), "V is larger than any block"),
    "few": (dict(rows=2, vocab_size=5), "V is smaller than a word"),
    "all_allowed": (dict(rows=2, vocab_size=40, share=1.1), "nothing is forbidden"),
    "all_forbidden": (dict(rows=2, vocab_size=40, share=-1.0), "nothing is allowed"),
    "float16": (dict(rows=2, vocab_size=70, dtype=torch.float16), "the logits are float16"),
    "bfloat16": (dict(rows=2, vocab_size=70, dtype=torch.bfloat16), "the logits are bfloat16"),
}


@check("24.3", {case: why for case, (_, why) in FORBID_CASES.items()}, seconds=10)
def test_forbid(impl, case, seed):
    logits, words, is_forbidden = batch_of(seed, **FORBID_CASES[case][0])
    given, want = words.clone(), logits.masked_fill(is_forbidden, -torch.inf)
    assert_equal(impl(logits, words), None, label="what your function returns")
    assert_equal(note(logits), want, label="the logits")
    assert torch.equal(words, given), "your function changed its argument `words` in place"


@check(
    "24.3",
    {
        "wider_rows": "logits and words are slices of wider tensors",
        "apart": "two tokens of a row are apart, and two words",
    },
    seconds=60,  # PyTorch's first watched kernel imports its compiler
)
def test_forbid_strides(impl, case, seed):
    logits, words, is_forbidden = batch_of(seed, 3, 70)
    want = logits.masked_fill(is_forbidden, -torch.inf)
    if case == "wider_rows":
        logits, words = in_wider_memory(logits), in_wider_memory(words)
    else:
        logits, words = logits.T.contiguous().T, words.T.contiguous().T
    around = logits._base.clone()
    because = "read and write where the tensors are"
    assert_largest_tensor(words.numel(), because, impl, logits, words)
    assert_equal(note(logits), want, label="the logits")
    if case == "wider_rows":
        logits.copy_(around[1:-2, 1:-2])
        same = torch.equal(logits._base.nan_to_num(7.0), around.nan_to_num(7.0))
        assert same, "your kernel wrote beside the logits, into a row or column of another tensor"


@check(
    "24.3",
    {
        "rows": "the third row begins after element 2³¹ of the memory",
        "tokens": "the third token of a row is after element 2³¹ of the memory",
        "words": "the third row of the words begins after element 2³¹ of the memory",
    },
    seconds=30,
)
def test_forbid_far_apart(impl, case, seed):
    """Memory that is never written costs nothing, so this is a small check."""
    logits, words, is_forbidden = batch_of(seed, 3, 3, dtype=torch.float16)
    is_forbidden |= torch.eye(3, dtype=torch.bool)  # something in the last row and column
    words &= 0b111 - (1 << torch.arange(3, dtype=torch.int32))[:, None]
    want = logits.masked_fill(is_forbidden, -torch.inf)
    if case == "words":
        words = far_apart(words)
    else:
        logits = far_apart(logits) if case == "rows" else far_apart(logits.T).T
    impl(logits, words)
    near = logits.clone(memory_format=torch.contiguous_format)
    assert_equal(note(near), want, label="the logits")


@check("24.3", seconds=5)
def test_forbid_example(impl, seed):
    logits = torch.tensor([[0.5, 2.0, 1.0]])
    impl(logits, torch.tensor([[5]], dtype=torch.int32))
    assert_equal(logits, torch.tensor([[0.5, -torch.inf, 1.0]]), label="the logits")


@check("24.3", seconds=20)
def test_the_kernel_does_it(impl, seed):
    """The kernel, not PyTorch: it stores to what is forbidden, once, and loads no logit."""
    logits, words, is_forbidden = batch_of(seed, 2, 70)
    with watched() as watch:
        impl.bare(logits, words)
    note(logits)
    watch.assert_loaded(words, "words", once=False)
    loaded = watch.touched(logits, "load", "atomic")
    stored = watch.touched(logits, "store", "atomic")
    if stored is None:
        return  # a GPU keeps no record
    assert not loaded.any(), "your kernel loads logits: where a token goes, its bit alone decides"
    wrong = int(((stored > 0) != is_forbidden).sum())
    assert not wrong, (
        f"your kernel stores to {int((stored > 0).sum())} logits, and {int(is_forbidden.sum())} "
        "are forbidden: mask the store by the bits"
    )


LAUNCH_CASES = {  # name: (B, V, why)
    "small": (2, 70, "a decode step of two requests"),
    "large_vocabulary": (1, 262144, "one row of the largest vocabulary"),
    "large_batch": (100000, 33, "more rows than a grid's second size may have"),
}


@check("24.3", {case: why for case, (*_, why) in LAUNCH_CASES.items()}, seconds=10)
def test_forbid_launch(impl, case, seed):
    """Looks at the launch, and runs nothing."""
    batch, vocab_size, _ = LAUNCH_CASES[case]
    logits = torch.zeros(1, 1).expand(batch, vocab_size)
    words = torch.zeros(1, 1, dtype=torch.int32).expand(batch, -(-vocab_size // 32))
    with launches() as seen:
        impl(logits, words)
    if seen is None:
        return
    assert len(seen) == 1, f"your function launches {len(seen)} kernels, and one is enough"
    grid, options = seen[0]
    assert grid[0] < 2**31 and max((0, *grid[1:])) <= 65535, (
        f"your grid is {grid}: its second and third sizes may be 65535 at most"
    )
    block, warps = options.get("BLOCK", 0), options.get("num_warps")
    assert 0 < block <= 4096 and block & (block - 1) == 0, (
        f"BLOCK is {block}, expected a power of two, at most 4096"
    )
    programs = grid[0] * (grid[1] if len(grid) > 1 else 1) * (grid[2] if len(grid) > 2 else 1)
    least = batch * -(-vocab_size // block)
    assert programs == least, f"your grid {grid} has {programs} programs, and {least} are enough"
    assert warps in (1, 2, 4, 8, 16, 32), f"num_warps is {warps}, expected a power of two up to 32"
    lanes = block / (32 * warps)
    assert 4 <= lanes <= 16, (
        f"BLOCK {block} with {warps} warps gives each lane {lanes:g} tokens, expected 4 to 16"
    )


@check("24.3", {"no_row": "B = 0", "no_token": "V = 0"}, seconds=5)
def test_forbid_nothing(impl, case, seed):
    shape = (0, 40) if case == "no_row" else (2, 0)
    words = torch.zeros(shape[0], -(-shape[1] // 32), dtype=torch.int32)
    with launches() as seen:
        got = impl(torch.zeros(shape), words)
    assert_equal(got, None, label="what your function returns")
    assert not seen, f"your function launches a grid of {seen[0][0]}, which is an error on a GPU"


REFUSALS = {  # name: (change of logits, change of words, argument, why)
    "integers": (lambda x: x.long(), None, "logits", "the logits are int64"),
    "float64": (lambda x: x.double(), None, "logits", "the logits are float64"),
    "one_dimension": (lambda x: x[0], None, "logits", "the logits are a vector"),
    "three_dimensions": (lambda x: x[None], None, "logits", "the logits are [1, B, V]"),
    "word_dtype": (None, lambda x: x.long(), "words", "the words are int64"),
    "word_missing": (None, lambda x: x[:, :-1], "words", "a word too few in each row"),
    "row_missing": (None, lambda x: x[:1], "words", "a row too few of the words"),
    "word_more": (None, lambda x: x.repeat(1, 2), "words", "words for another vocabulary"),
    "row_more": (None, lambda x: x.repeat(2, 1), "words", "rows for another batch"),
    "words_turned": (None, lambda x: x.T, "words", "the words are [ceil(V / 32), B]"),
    "words_in_a_row": (None, lambda x: x.flatten(), "words", "the words are a vector"),
    "no_row": (lambda x: x[:0], None, "words", "B = 0, and the words have rows"),
    "no_token": (lambda x: x[:, :0], None, "words", "V = 0, and the rows have words"),
    "no_integer": (lambda x: x[:0].long(), lambda x: x[:0], "logits", "B = 0, and int64"),
}


@check("24.3", {case: why for case, (*_, why) in REFUSALS.items()}, seconds=5)
def test_forbid_refuses(impl, case, seed):
    logits, words, _ = batch_of(seed, 2, 70)
    change_logits, change_words, name, _ = REFUSALS[case]
    logits = change_logits(logits) if change_logits else logits
    words = change_words(words) if change_words else words
    before, bad = logits.clone(), logits if name == "logits" else words
    with pytest.raises(ValueError) as caught:
        impl(logits, words)
    text = str(caught.value)
    shape, dtype = (str(part) for part in (list(bad.shape), bad.dtype))
    is_named = name in text and (shape in text or str(tuple(bad.shape)) in text or dtype in text)
    assert is_named, f"your ValueError says {text!r}; name `{name}` and its shape or dtype"
    assert torch.equal(logits, before), "your function wrote to the logits before it refused"
