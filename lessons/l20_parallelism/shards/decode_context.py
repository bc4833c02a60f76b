"""Decode context parallelism: ranks that would copy a KV head share its tokens instead.

    cache = ContextCache(part, group)                       # of one sequence
    hidden = part(tokens, cache.attending(len(tokens)))     # a prompt, then token after token

With more ranks than KV heads, tensor parallelism copies heads: with 8 ranks MLA's latent is stored
8 times. Here the ranks of such a group deal the tokens out, token i to rank i mod P (`striped`), so
that each stores and reads 1/P of them, and the next token always goes to the next rank. But a rank
has the queries of its own heads alone, and these need all tokens. So in each layer

    1. all get the queries of all heads of the group: an all-gather
    2. each attends with all of them to its own tokens
    3. each row of softmax is now in P parts. They are merged by lesson 8's rule, and each rank gets
       the rows of its heads: an all-gather of lse and a reduce-scatter

`attention_on_ranks` does it with lists, and merges (m, l, acc) as lesson 8 does. The processes send
what a decode kernel returns, `out` and `lse`: with LSE = log Σ exp(lse) over the ranks, the row is
Σ out · exp(lse − LSE), a plain sum, which a reduce-scatter computes. A learnt sink (gpt-oss) is one
more term of LSE, which no rank has: each adds those of its own heads at the end.

Sources: vLLM's docs/serving/context_parallel_deployment.md; Helix Parallelism (Bhatia et al. 2025).
"""

from functools import reduce

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l02_naive_attention.rope import rotation
from lessons.l02_naive_attention.variants.score_rules import sinks_of
from lessons.l08_online_softmax.naive import (
    Partial,
    exp_difference,
    finish,
    from_scores,
    merge,
    wide,
)
from lessons.l09_flash_attention.naive import tile_scores
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Links
from lessons.l20_parallelism.processes.ranks import Ranks
from lessons.l20_parallelism.ring_attention import striped
from lessons.toolbox.model.arguments import check_whole, refuse
from lessons.toolbox.model.config import ModelConfig

# ---------------------------------------------------------------- ranks as lists


def attention_on_ranks(
    qs: list[Tensor],
    ks: list[Tensor],
    vs: list[Tensor],
    ranks: Ranks,
    softmax_scale: float,
) -> list[Tensor]:
    """One new token's attention, whose heads and whose keys are spread over the ranks.

    qs: [H, D] of each rank's heads; ks: [N, D], vs: [N, Dv] of each rank's tokens of the one KV
    head that all read, N differing by one at most -> [H, Dv] of each rank's heads.
    """
    own = len(qs[0])
    gathered = ranks.all_gather(qs, dim=0)  # [P · H, D] each
    sent = []
    for q, k, v in zip(gathered, ks, vs):
        m, l, acc = from_scores(q @ k.T * softmax_scale, v)
        rows = torch.cat([m[:, None], l[:, None], acc], dim=-1)  # [P · H, 2 + Dv]
        sent.append(list(rows.split(own)))  # a piece for the rank whose heads they are
    outs = []
    for pieces in ranks.all_to_all(sent):
        parts = [Partial(piece[:, 0], piece[:, 1], piece[:, 2:]) for piece in pieces]
        outs.append(finish(reduce(merge, parts))[0])
    return outs


# ---------------------------------------------------------------- ranks as processes


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    group: Group,
    softmax_scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's heads over the tokens of all ranks. q: [T, H, D] at the positions
    `queries`: [T]; k: [N, 1, D], v: [N, 1, Dv] of this rank's tokens, at `keys`: [N]; sinks: [H] of
    this rank's heads -> [T, H, Dv].

    Computed in float32, or float64 for float64. N may be 0 on some ranks.
    """
    everyone = group.all_gather(q, dim=1)  # [T, P · H, D]
    scores = tile_scores(wide(everyone), wide(k), queries, keys, softmax_scale, True, window)
    out, lse = finish(from_scores(scores, v[:, 0]))  # [P · H, T, Dv], [P · H, T]
    return merged(out, lse, group, sinks).transpose(0, 1).to(q.dtype)


def merged(out: Tensor, lse: Tensor, group: Group, sinks: Tensor | None = None) -> Tensor:
    """The rows of this rank's heads, of which every rank has attended to some tokens. out: [P · H,
    T, Dv], lse: [P · H, T], −inf where it saw nothing; sinks: [H] of this rank's heads, scores that
    no rank has added yet -> [H, T, Dv].
    """
    of_all = lse[None]
    if group.size > 1:
        of_all = group.all_gather(lse[None], dim=0)  # [P, P · H, T]
        # what part of the row's weight is here: the parts of all ranks add up to 1
        share = exp_difference(lse, of_all.logsumexp(0))
        out = group.reduce_scatter(out * share[..., None])
    if sinks is None:
        return out
    # A sink is one more score: e^seen / (e^seen + e^sink) of the weight is left for the tokens.
    first = group.rank * len(out)
    seen = torch.logsumexp(of_all[:, first : first + len(out)], dim=0)  # [H, T]
    return out * torch.sigmoid(seen - sinks.to(seen.dtype)[:, None])[..., None]


class ContextCache:
    """What one rank keeps of one sequence: K and V of its KV head, of every P-th token.

    part: the rank's decoder; group: the ranks that hold a copy of the same KV head. length: tokens
    so far, on all ranks together; keys, values: {layer: [tokens of this rank, 1, D]}. Raises
    ValueError for a model with several KV heads on a rank, or with a soft-cap.
    """

    def __init__(self, part: Decoder, group: Group):
        config = part.config
        if config.num_key_value_heads != 1:
            refuse("num_key_value_heads", config.num_key_value_heads, "1 on each rank of a group")
        if config.attn_logit_softcapping is not None:
            refuse("config", config.model_type, "a model without a soft-cap")
        self.config, self.group, self.length = config, group, 0
        self.sinks = sinks_of(part)
        empty = torch.empty(0, 1, 0, dtype=part.dtype, device=part.device)
        self.keys: dict[int, Tensor] = dict.fromkeys(part.stage_layers, empty)
        self.values = dict(self.keys)

    def attending(self, num_tokens: int) -> Attend:
        """The decoder's `attend` for the next tokens of the sequence: a prompt, a chunk, or one."""
        size, rank, start = self.group.size, self.group.rank, self.length
        self.length += num_tokens
        queries = torch.arange(start, self.length)
        keys = striped(self.length, rank, size)
        is_mine = queries % size == rank

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            shape = self.config.local_rope if self.config.has_local_rope(layer) else self.config
            rotate = rotation(shape, queries.to(q.device), q.dtype)
            q, k = rotate(q), rotate(k)
            self.keys[layer] = added_rows(self.keys[layer], k[is_mine])
            self.values[layer] = added_rows(self.values[layer], v[is_mine])
            return context_attention(
                q,
                self.keys[layer],
                self.values[layer],
                queries.to(q.device),
                keys.to(q.device),
                self.group,
                self.config.softmax_scale,
                self.config.sliding_window(layer),
                self.sinks[layer],
            )

        return attend


def added_rows(rows: Tensor, new: Tensor) -> Tensor:
    """rows: [N, 1, D], or nothing yet; new: [T, 1, D] -> [N + T, 1, D]."""
    return torch.cat([rows, new]) if len(rows) else new


# ---------------------------------------------------------------- who shares, and what it costs


def check_context_size(config: ModelConfig, tp: int, dcp: int) -> None:
    """Raise ValueError unless each group of `dcp` neighbours among `tp` ranks holds copies of one
    KV head. config: of the whole model; MLA's latent is one head.
    """
    check_whole(tp=tp, dcp=dcp)
    heads = 1 if config.mla is not None else config.num_key_value_heads
    copies = tp // heads
    if tp % heads or not copies or copies % dcp:
        refuse("dcp", dcp, f"a divisor of {max(copies, 1)}, the ranks that hold the same KV head")


def new_context_group(links: Links, config: ModelConfig, dcp: int) -> Group:
    """This process's group of `dcp` neighbours. Every rank of the world has to call it. Raises
    ValueError.
    """
    check_context_size(config, links.mesh.tp, dcp)
    return links.new_group(links.mesh.context_groups(dcp))


def numbers_sent(
    num_tokens: int, heads: int, dim: int, value_dim: int, size: int
) -> dict[str, float]:
    """Numbers that a rank sends in one layer of a step. num_tokens: new tokens of all sequences;
    heads: of this rank; dim, value_dim: of a query and of its result.
    """
    rows, others = num_tokens * heads, size - 1
    return {
        "q": others * rows * dim,
        "lse": others * rows * size,
        "out": others * rows * value_dim,
    }
