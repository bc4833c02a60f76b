# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=02
# Generated from solutions/l02_naive_attention.py, checksum 7849f2424906. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 02: attention, sampling for a batch, a generation loop with bugs, and the
bytes of a score matrix.
"""

import math

import torch
from torch import Tensor

from lessons.toolbox.exercises.exercise import exercise


@exercise(
    "2.1",
    "Attention with a causal mask, derived again",
    minutes=25,
    difficulty=2,
    replaces="lessons.l02_naive_attention.naive:attention",
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """softmax(q kᵀ · softmax_scale + mask) v for all heads at once. q: [Tq, Hq, D]; k, v: [Tk, Hkv,
    D] -> [Tq, Hq, D].

    The result has q's dtype (float32, float16, bfloat16 or float64); q, k and v stay as they were.
    softmax_scale: 1 / √D if None. Query head h reads KV head h // (Hq / Hkv). causal: query i sees
    key j if j <= i + Tk - Tq (bottom-right aligned: the last query sees every key). window: if
    given, each query sees only the last `window` of those keys, its own included (window=1: itself
    alone). A query that sees no key (Tq > Tk) gets zeros. Errors: none to raise; the shapes fit
    together.

    Example, one head, D = 1: q = [1, 1], k = [0, ln 3], v = [4, 8], softmax_scale = 1
        query 0 sees key 0 alone                        -> 4
        query 1 scores 0 and ln 3, weights 1/4 and 3/4  -> 1/4 · 4 + 3/4 · 8 = 7
    """
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    raise NotImplementedError("Exercise 2.1: Attention with a causal mask, derived again")


@exercise(
    "2.2", "Top-k and top-p for a batch, each row with its own settings", minutes=30, difficulty=3
)
def batch_probabilities(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """The distribution of each row's next token. logits: [B, V] float32 -> [B, V] float64, each row
    sums to 1.

    temperature: [B] float64, above 0; top_k: [B] int64, 0 is off; top_p: [B] float64, 0 < p <= 1, 1
    is off.
    For each row, in this order:
        divide by the temperature, softmax;
        top-k: keep the k likeliest tokens, and every token as likely as the k-th; renormalise;
        top-p: keep the fewest likeliest tokens whose mass reaches p (the one that reaches it
          included); renormalise.
    No row depends on another row. The arguments stay as they were. Errors: none to raise.
    Aim: no Python loop over rows, because a server samples hundreds of them at each step.

    Example: probabilities 0.5, 0.2, 0.2, 0.1 (temperature 1)
        top_k=2, top_p=1     keeps 0.5, 0.2 and, tied with the 2nd, 0.2   -> 5/9, 2/9, 2/9, 0
        top_k=0, top_p=0.6   0.5 does not reach 0.6, 0.5 + 0.2 does       -> 5/7, 2/7, 0, 0
    """
    vocab_size = logits.shape[1]
    raise NotImplementedError("Exercise 2.2: Top-k and top-p for a batch, each row with its own settings")


@exercise("2.3", "Find the bugs: a greedy loop that ran, and lied", minutes=20, difficulty=2)
def generate_greedy(
    model, prompt: list[int], max_new_tokens: int, stop_token_ids: set[int], attending
) -> list[int]:
    """The greedy continuation of one prompt: new token ids only, at most max_new_tokens of them
    (none for 0).

    A token of stop_token_ids ends the row and is the last one returned. attending(positions: [T]
    int64) -> the `attend` of tokens at these positions; model(tokens: [T] int64, attend) -> hidden:
    [T, hidden_size]; model.logits(hidden) -> [T, V]. Row t of the logits predicts token t + 1. Each
    step runs the whole sequence; positions count from 0. `prompt` stays as it was.

    Example: a model that always says "last token + 1", prompt [5, 6], stop {9}
        max_new_tokens=2 -> [7, 8];   max_new_tokens=8 -> [7, 8, 9]

    The code below runs, and its text even looks plausible. It has three bugs. Delete the first line
    and find them.
    """
    raise NotImplementedError("Exercise 2.3: Find the bugs: a greedy loop that ran, and lied")
    output = []
    while len(output) < max_new_tokens:
        tokens = torch.tensor(prompt + output)
        positions = torch.cat([torch.arange(len(prompt)), torch.arange(len(output))])
        hidden = model(tokens, attending(positions))
        token = int(model.logits(hidden)[len(prompt) - 1].argmax())
        if token in stop_token_ids:
            break
        output.append(token)
    return output


@exercise("2.4", "Predict: the longest prompt whose score matrix fits", minutes=10, difficulty=1)
def longest_prompt(memory_gib: float, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> int:
    """The largest number of tokens T for which one layer's score matrix fits into memory_gib GiB.

    Naive attention over a prompt of T tokens holds scores: [Hq, T, T], each an element of `dtype`,
    the masked half too. memory_gib: GiB, 2^30 bytes each (not GB, 10^9). num_heads, num_kv_heads:
    counts, num_heads >= num_kv_heads >= 1. Errors: none to raise.

    Example: 1 GiB, 8 query heads, 2 KV heads, float16 (2 bytes): T² <= 2^30 / (8 · 2) = 2^26, so T
    = 8192. Write down your guess first: 80 GiB (a whole H100), 32 query heads, 8 KV heads,
    bfloat16.
    """
    raise NotImplementedError("Exercise 2.4: Predict: the longest prompt whose score matrix fits")
