# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=23
# Generated from solutions/l23_experts.py, checksum 4da5e608cee8. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 23: the kernel of many experts, and experts on other ranks.

The ranks are simulated in one process, as in l20_parallelism.py: a list holds what the ranks hold,
and whatever another rank has must come through a collective of `Ranks`.
"""

import torch
from torch import Tensor

from lessons.l20_parallelism.processes.ranks import Ranks
from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def expert_rows_kernel(
    x_ptr,
    weight_ptr,
    pairs_ptr,
    tile_experts_ptr,
    router_ptr,
    out_ptr,
    num_pairs,
    size,
    num_outputs,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile, block): BLOCK_M pairs of one expert, BLOCK_N of its outputs.

    Shapes and meaning as in `expert_rows` below; all tensors are contiguous, and num_pairs is
    T · k. BLOCK_M, BLOCK_N, BLOCK_K are at least 16, as `tl.dot` requires. size and num_outputs
    need not be multiples of blocks. `tl.dot` needs input_precision="ieee". E · N · K may be more
    than 2³¹, so the place of a weight needs 64 bits.
    """
    raise NotImplementedError("Exercise 23.1: The kernel: all experts in one launch")


@exercise(
    "23.1",
    "The kernel: all experts in one launch",
    minutes=45,
    difficulty=3,
    replaces="lessons.l23_experts.grouped:experts",
    through="reference.ladder.yours.experts:experts",
)
def expert_rows(
    x: Tensor, weight: Tensor, pairs: Tensor, tile_experts: Tensor, router: Tensor
) -> Tensor:
    """Each token through each of its k experts, times the router's weight: [T · k, N].

    x: [T, K]; weight: [E, N, K], a matrix for each expert; router: [T, k]. Pair p is token p // k
    with its choice p % k, so out[p] = router of that choice · x[p // k] weight[e]ᵀ, where e is the
    expert of the choice. All are float32.

    pairs: [tiles · 16] int32, the numbers of the pairs, sorted by expert. Each expert begins a new
    tile of 16 places, and places that are left in its last tile hold T · k, which is no pair.
    tile_experts: [tiles] int32, the expert of each tile, or −1 for a tile that is not used. The
    places of such a tile hold numbers of an earlier step, which may be those of any pair. A pair
    that is in no used tile belongs to an expert of another rank: its row stays zero.

    The wrapper is done. It launches `expert_rows_kernel` above, which is yours to write. Aim: no
    copy of rows of x or of experts. Errors: none to raise.

    Example: T = 2, k = 1, K = N = 1, x [[1], [2]], weight [[[10]], [[100]]], router [[0.5], [1]]
        token 0 goes to expert 1, token 1 to expert 0
        pairs = [1, 2, 2, …, 2,   0, 2, …, 2], tile_experts = [0, 1]; the 2 is no pair
        pair 0: 0.5 · 1 · 100 = 50; pair 1: 1 · 2 · 10 = 20                    -> [[50], [20]]
    """
    (num_tokens, size), (_, num_outputs, _) = x.shape, weight.shape
    top_k = router.shape[1]
    out = x.new_zeros(num_tokens * top_k, num_outputs)
    block_m = block_n = block_k = 16
    expert_rows_kernel[(len(tile_experts), triton.cdiv(num_outputs, block_n))](
        x,
        weight,
        pairs,
        tile_experts,
        router,
        out,
        len(out),
        size,
        num_outputs,
        TOP_K=top_k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    return out


@exercise("23.2", "Find the bugs: experts on other ranks", minutes=40, difficulty=3)
def experts_on_ranks(
    x: list[Tensor],
    logits: list[Tensor],
    experts: list[Tensor],
    top_k: int,
    capacity: int,
    ranks: Ranks,
) -> tuple[list[Tensor], int]:
    """A layer of experts whose tokens and experts are spread over the ranks.

    x: of each rank its own tokens, [T, H]; ranks may have different T, or no token. logits: of each
    rank what the router gave for these tokens, [T, E]. experts: of each rank its own ones,
    [E / size, H, H]; rank 0 holds the first E / size experts, rank 1 the next ones, and so on. Here
    an expert is just a product: row @ matrix.T.

    A token goes to the top_k experts with the largest logits. Their weights are a softmax over
    these top_k logits alone, so they sum to 1. An expert takes at most `capacity` rows of a step.
    The first count, in the order of ranks, then of tokens. For a row that finds no room the
    expert's share is zero; the weights of the token's other experts stay as they are.

    Returns the ranks' results [T, H], and how many rows found no room on any expert (pairs of a
    token and an expert). Rows travel by `ranks.all_to_all` only. Errors: none to raise.

    Example: two ranks, H = 1, experts [[[10]]] and [[[100]]], top_k 1, capacity 1. Rank 0 has x
    [[1]], rank 1 has x [[2]], and both tokens choose expert 1, which rank 1 holds
        rank 0's row is first: 1 · 100. Rank 1's own row finds no room  -> ([[[100]], [[0]]], 1)

    The code below is right for one rank with one expert and room for all. It has five bugs, one of
    them in two lines. Delete the first line and find them.
    """
    raise NotImplementedError("Exercise 23.2: Find the bugs: experts on other ranks")
    per_rank = len(experts[0])
    weights, pairs, rows, wanted = [], [], [], []
    for rank in range(ranks.size):
        best = logits[rank].softmax(-1).topk(top_k, dim=-1)
        weights.append(best.values.flatten())  # of pair p, which is token p // top_k
        expert = best.indices.flatten()
        owner = expert % ranks.size
        to_each = [torch.where(owner == other)[0] for other in range(ranks.size)]
        pairs.append(to_each)
        rows.append([x[rank][pair // top_k] for pair in to_each])
        wanted.append([expert[pair] for pair in to_each])
    rows, wanted = ranks.all_to_all(rows), ranks.all_to_all(wanted)
    
    answers, dropped = [], 0
    for rank in range(ranks.size):
        own = [torch.zeros_like(sent) for sent in rows[rank]]
        for source in range(ranks.size):
            taken = [0] * per_rank
            for at, expert in enumerate(wanted[rank][source].tolist()):
                local = expert // ranks.size
                if taken[local] == capacity:
                    continue
                taken[local] += 1
                own[source][at] = rows[rank][source][at] @ experts[rank][local].T
        answers.append(own)
    answers = ranks.all_to_all(answers)
    
    outs = []
    for rank in range(ranks.size):
        out = torch.zeros_like(x[rank])
        for pair, answer in zip(pairs[rank], answers[rank]):
            out[pair // top_k] += answer * weights[rank][pair, None]
        outs.append(out)
    return outs, dropped


@exercise("23.4", "Dispatch and combine: a token once for each rank", minutes=40, difficulty=3)
def once_for_each_rank(
    x: list[Tensor],
    weights: list[Tensor],
    chosen: list[Tensor],
    experts: list[Tensor],
    ranks: Ranks,
) -> list[Tensor]:
    """A layer of experts on several ranks, in which a token travels once to each rank that has some
    of its experts, and one row comes back from there.

    x: of each rank its own tokens, [T, H]; ranks may have different T, or no token. weights,
    chosen: of each rank [T, k], what the router gave for these tokens: numbers of k different
    experts, int64, and what each of them counts. experts: of each rank its own ones,
    [E / size, H, H]; rank 0 holds the first E / size experts, and so on. Here an expert is just a
    product: row @ matrix.T.

    A rank to which a token came computes its experts that the token chose, times their weights,
    adds them up, and sends one row [H] for the token back. The token's own rank adds up the rows of
    all ranks. So the weights, and which experts are meant, travel beside the rows.

    Returns the ranks' results [T, H]. All that a rank learns from another one comes through
    `ranks.all_to_all`. Aim: no row of x is sent twice to the same rank, or to a rank that has none
    of its experts, and beside a row go at most 2 k numbers. Errors: none to raise.

    Example: two ranks, H = 1, experts [[[10]], [[20]]] and [[[100]], [[200]]]. Rank 0 has x [[2]],
    chosen [[3, 2]], weights [[0.5, 0.25]], and rank 1 has no token
        the row [2] goes to rank 1 only, once. There 0.5 · 400 + 0.25 · 200 = 250 is one row, which
        goes back                                                           -> [[[250]], []]
    """
    raise NotImplementedError("Exercise 23.4: Dispatch and combine: a token once for each rank")
