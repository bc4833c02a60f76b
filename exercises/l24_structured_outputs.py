# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=24
# Generated from solutions/l24_structured_outputs.py, checksum ac2252621c49. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 24: which tokens may come next, what a mask does to probabilities, and a
kernel with its wrapper.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lessons.l24_structured_outputs.matcher import Matcher, State
from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton


@exercise(
    "24.1",
    "Which tokens may come next",
    minutes=35,
    difficulty=3,
    replaces="lessons.l24_structured_outputs.optimized:new_mask",
    through="reference.ladder.yours.masks:new_mask",
)
def token_mask(matcher: Matcher, state: State, tokens: Sequence[bytes | None]) -> Tensor:
    """Which tokens may come next, one bit a token: [ceil(V / 32)] int32, V = len(tokens).

    tokens: the bytes of each token; None or b"" for those without text, which are never allowed.
    matcher.step(state, byte) gives the state after one more byte, and None if the byte does not
    fit. A token is allowed if all its bytes fit, one after the other; the text need not end there.
    Bit t % 32 of word t // 32 is 1 if token t is allowed, and bits without a token are 0. Bit 31 is
    the sign of an int32.

    Aim: tokens share beginnings, so step once for each *different* beginning of a token that can be
    reached, and never for the same one twice. "1", "12" and "1a" are three steps, not five.
    Errors: none to raise.

    Example: digits alone fit. tokens [b"7", b"a", None, b"42", b"4x"]; steps: 7, a, 4, 42, 4x
        0, 3 are allowed, so the word is 2⁰ + 2³                         -> tensor([9], int32)
    """
    raise NotImplementedError("Exercise 24.1: Which tokens may come next")


Text = tuple[int, ...]  # the tokens of a text, or of the beginning of one


@exercise("24.2", "What a mask does to probabilities", minutes=30, difficulty=3)
def two_chances(
    model: Callable[[Text], Sequence[float]], allowed: Callable[[Text], Sequence[int]]
) -> dict[Text, tuple[float, float]]:
    """How likely each text that fits is, in two ways: {text: (with a mask, without one)}.

    model(text): the probability of each token of the vocabulary as the next one. They sum to 1, and
    depend on the whole text so far. allowed(text): the tokens that may come next, each with a
    probability above 0. A text ends where no token may come next, and each does after some steps.

        with a mask: before each step the logits of the forbidden tokens become -inf, and the
            softmax is taken of the others. The chance that sampling writes this text.
        without one: the model samples freely, and answers that do not fit are thrown away. The
            share of this text among the answers that are kept.
    Both columns sum to 1. Errors: none to raise.

    Example: only (0, 1) and (2, 3) fit. The model begins with 0 with probability 0.9, and with 2
        with 0.1. After 0 it writes 1 with probability 0.01, and after 2 it always writes 3.
        -> {(0, 1): (0.9, 0.009 / 0.109), (2, 3): (0.1, 0.1 / 0.109)}
    Guess first: which of the two columns does an engine give you?
    """
    raise NotImplementedError("Exercise 24.2: What a mask does to probabilities")


@triton.jit
def forbid_kernel(
    logits_ptr,
    words_ptr,
    vocab_size,
    stride_row,
    stride_token,
    stride_words,
    stride_word,
    BLOCK: tl.constexpr,
):
    """A program: BLOCK tokens of one row. Meaning as in `forbid` below; stride_row and stride_token
    are those of logits, stride_words and stride_word those of words.
    """
    raise NotImplementedError("Exercise 24.3: Kernel and wrapper: forbid tokens in a batch")


@exercise("24.3", "Kernel and wrapper: forbid tokens in a batch", minutes=60, difficulty=4)
def forbid(logits: Tensor, words: Tensor) -> None:
    """Write −inf, in place, to each logit whose token the words forbid; returns None.

    logits: [B, V] float32, float16 or bfloat16. words: [B, ceil(V / 32)] int32; bit t % 32 of word
    t // 32 of a row is 0 if its token t is forbidden. Both may have any strides, also between two
    tokens, and other rows around them.

    Nothing is done for you: the body of `forbid_kernel` above is yours, and so is this wrapper.
    - One launch for all rows. BLOCK is a power of two, at most 4096. A row of the words may end
      before the block does.
    - grid: its first size may be up to 2**31 − 1, the second and third up to 65535. B may be
      100000, and V 262144, so the place of a logit needs 64 bits.
    - num_warps is given in the launch, a power of two. A warp has 32 lanes, and each lane should
      have 4 to 16 of the BLOCK tokens.
    - B = 0 or V = 0: no launch, because a grid of size 0 is an error on a GPU.
    - The kernel loads words alone, and stores to forbidden tokens alone. Nothing is copied.
    Errors: ValueError, before anything is written, if logits is no [B, V] of these dtypes, or if
    words is not int32 or has another shape. The message names the argument and its shape or dtype.

    Example: B = 1, V = 3, words [[5]] = 2⁰ + 2²: tokens 0 and 2 are allowed
        logits [[0.5, 2, 1]] become [[0.5, −inf, 1]]
    """
    raise NotImplementedError("Exercise 24.3: Kernel and wrapper: forbid tokens in a batch")
