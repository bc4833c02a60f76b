# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=20
# Generated from solutions/l20_parallelism.py, checksum b9d410f10c46. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 20: attention on several ranks, a token chosen from local logits, and a cache
whose tokens the ranks share.

The ranks are simulated in one process. A list holds what the ranks hold, in their order. A rank may
use its own entry only. Whatever another rank has must come through a collective of `Ranks`, which
writes down what it carries.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.naive import attention
from lessons.l20_parallelism.processes.ranks import Ranks
from lessons.toolbox.exercises.exercise import exercise


class AttentionWeights(NamedTuple):
    """Of one layer, whole. q_proj: [Hq · D, H]; k_proj, v_proj: [Hkv · D, H]; o_proj: [H, Hq · D];
    q_bias: [Hq · D]; o_bias: [H]. H is the hidden size. Rows of a head are side by side.
    """

    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    o_proj: Tensor
    q_bias: Tensor
    o_bias: Tensor


@exercise("20.1", "Attention on several ranks", minutes=30, difficulty=2)
def attention_on_ranks(
    x: Tensor, weights: AttentionWeights, head_dim: int, ranks: Ranks
) -> list[Tensor]:
    """What every rank has after the layer: the whole result [T, H], once for each rank.

    x: [T, H], which every rank has. On one rank the layer is
        q = x q_projᵀ + q_bias as [T, Hq, D], k and v alike without a bias as [T, Hkv, D]
        attention(q, k, v), causal, flattened to [T, Hq · D], times o_projᵀ, plus o_bias
    Query heads 0 … G − 1 read KV head 0, the next G read KV head 1, and so on; G = Hq / Hkv.

    Rank r takes query heads r · Hq / size and the following ones, and the KV heads that these read.
    size divides Hq, and either size divides Hkv or Hkv divides size. In the second case several
    ranks hold a copy of the same KV head.

    Aims: exactly one collective, and it carries T · H numbers. No rank does another rank's work;
    only copies of KV heads may be computed more than once. `attention` (imported above) wants
    q: [T, heads, D] and k, v: [T, KV heads, D], and takes any number of heads with its groups.
    Errors: ValueError that names size, if it does not divide Hq.

    Example: D = 1, 2 query heads, 1 KV head, 2 ranks, x [[1, 2]], q_proj zeros, k_proj [[1, 1]],
    v_proj [[1, 1]], o_proj [[1, 0], [10, 1]], q_bias zeros, o_bias [1, 1]
        there is one key, so each head gives v = 3
        rank 0 has 3 · (1, 10) = (3, 30), rank 1 has 3 · (0, 1) = (0, 3)
        their sum is (3, 33), and the bias is added once               -> [[[4, 34]], [[4, 34]]]
    """
    raise NotImplementedError("Exercise 20.1: Attention on several ranks")


@exercise(
    "20.2",
    "The likeliest token, from local logits",
    minutes=25,
    difficulty=2,
    replaces="lessons.l20_parallelism.shards.greedy:likeliest",
    through="reference.ladder.yours.ranks:likeliest",
)
def greedy_on_ranks(
    local_logits: list[Tensor], vocab_size: int, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """The token with the largest logit, and its log-probability: [B] int64 and [B] float32.

    local_logits: of each rank a tensor [B, C] float32. Column j of rank r belongs to token
    r · C + j. The vocabulary was padded to size · C columns. Columns from vocab_size on belong to
    no token, and they may hold anything, NaN as well. A last rank may have nothing but such
    columns. A logit of −inf means that its token is forbidden. Of a row all tokens of one rank may
    be forbidden, but not all tokens of all ranks. Of several equal logits the token with the lowest
    number counts. The log-probability is that of a softmax over the whole vocabulary.

    Aim: the logits stay where they are. All collectives together carry at most 3 numbers for each
    row and rank. A token's number may travel as float32. Errors: none to raise.

    Example: vocab_size 3, two ranks with C = 2: [[0, 0]] and [[ln 2, 9]]; the 9 is padding
        rank 0: largest 0, exp sums to 2, token 0       rank 1: largest ln 2, exp sums to 1, token 2
        the largest is ln 2, and its sum of exps 2 · ½ + 1 = 2         -> ([2], [−ln 2 = −0.693])
    """
    raise NotImplementedError("Exercise 20.2: The likeliest token, from local logits")


@exercise("20.3", "One KV head, its tokens on all ranks", minutes=25, difficulty=3)
def attention_over_shared_tokens(
    qs: list[Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    context_lens: Tensor,
    softmax_scale: float,
    ranks: Ranks,
) -> list[Tensor]:
    """A decode step's attention. Of each rank the results of its own query heads, [B, H, Dv].

    qs: of each rank its H query heads for B sequences, [B, H, D]. All query heads of all ranks read
    the same KV head, whose tokens are spread: token i of a sequence is in row i // size of rank
    i % size. keys: of each rank [B, C, D], values: [B, C, Dv], float32. context_lens: [B] int64,
    the tokens of each sequence on all ranks together, 1 or more. So a rank may have no token of a
    sequence. Rows after a rank's last token hold anything, NaN as well.

    A head's result is Σ p v over all tokens, p = softmax(softmax_scale · q · k), computed in
    float32. Scores may be so large that exp overflows without their maximum.

    Aims: keys and values stay where they are, and each rank attends to its own tokens only. Into
    all collectives together a rank puts at most B · H · D + size · B · H · (Dv + 2) numbers.
    Errors: none to raise.

    Example: D = Dv = 1, 2 ranks, a head each, B = 1, two tokens, softmax_scale 1
        q 1 on both ranks; rank 0 has key ln 2 and value 3, rank 1 has key 0 and value 6
        weights 2/3 and 1/3: 3 · 2/3 + 6 · 1/3 = 4                   -> [[[[4]]], [[[4]]]]
    """
    raise NotImplementedError("Exercise 20.3: One KV head, its tokens on all ranks")
