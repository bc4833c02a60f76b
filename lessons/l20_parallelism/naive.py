"""A model on several ranks, in one process: what the ranks hold is a list, and they run in turn.

    ranks = Ranks(4)
    logits = forward(model, tokens, ranks)     # a list: whole logits, once for each rank
    ranks.calls                                # what they had to say to each other

Read it from the bottom up: `forward`, `mlp`, `column_parallel` and `row_parallel`, then
`attention`, then `embed` and `head`. Every function takes and returns lists, entry r being rank
r's. Only the methods of `ranks` look at the entries of others. optimized.py puts each entry into a
process, and between processes these methods are torch.distributed's.

For decoders of lesson 2 (Llama, Qwen, Mistral, Phi-3).
Source: Megatron-LM (Shoeybi et al. 2019), section 3, figures 3 and 4.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from lessons.l02_naive_attention.decoder import MLP, Attention, Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l20_parallelism.processes.ranks import Ranks
from lessons.l20_parallelism.shards.sharding import kv_heads_of, local_config, vocabulary_rows
from lessons.toolbox.model.config import ModelConfig

Shards = list[Tensor]  # what the ranks hold, in their order

# ---------------------------------------------------------------- one matrix


def column_parallel(
    xs: Shards,
    layer: nn.Linear,
    rows: list[slice],
) -> Shards:
    """Each rank has the whole input and computes some outputs. xs: [T, in] each -> [T, its rows].

    rows: of the stored matrix, [out, in]. They are columns of the W in y = x W, hence the name.
    """
    outs = []
    for x, own in zip(xs, rows):
        out = x @ layer.weight[own].T
        if layer.bias is not None:
            out += layer.bias[own]
        outs.append(out)
    return outs


def row_parallel(
    xs: Shards,
    layer: nn.Linear,
    columns: list[slice],
    ranks: Ranks,
) -> Shards:
    """Each rank has some inputs, so its product is a part of every output's sum.

    xs: [T, its columns] each -> [T, out]; columns: of the stored matrix, [out, in].
    """
    parts = []
    for x, own in zip(xs, columns):
        parts.append(x @ layer.weight[:, own].T)
    outs = ranks.all_reduce(parts)
    if layer.bias is None:
        return outs
    # after the sum, because a bias in every part would be added once for each rank
    return [out + layer.bias for out in outs]


def equal_slices(length: int, size: int) -> list[slice]:
    """0 … length cut into `size` equal pieces, in order."""
    pieces = []
    share = length // size
    for rank in range(size):
        start = rank * share
        pieces.append(slice(start, start + share))
    return pieces


# ---------------------------------------------------------------- the vocabulary


def embed(tokens: Tensor, table: Tensor, ranks: Ranks) -> Shards:
    """Each rank looks up the tokens that it holds; a token of another rank gives zeros, which the
    sum fills. tokens: [T]; table: [V, hidden_size] -> [T, hidden_size] each.
    """
    parts = []
    for own in shares_of(table, ranks):
        local = tokens - own.start
        is_elsewhere = (local < 0) | (local >= len(own))
        # looked up as this rank's first token, then made zeros
        looked_up = local.masked_fill(is_elsewhere, 0)
        x = table[own.start : own.stop][looked_up]
        x[is_elsewhere] = 0
        parts.append(x)
    return ranks.all_reduce(parts)


def head(xs: Shards, table: Tensor, ranks: Ranks) -> Shards:
    """Each rank computes the logits of its tokens, then all get all. xs: [T, hidden_size] each;
    table: [V, hidden_size] -> [T, V] each.

    No rank can choose a token before this gather, because the largest logit of one rank may not be
    the largest of all.
    """
    parts = []
    shares = shares_of(table, ranks)
    for x, own in zip(xs, shares):
        local = x @ table[own.start : own.stop].T
        # because a gather wants equal shapes, and the last rank may have fewer tokens
        missing = len(shares[0]) - len(own)
        parts.append(pad(local, (0, missing)))
    gathered = ranks.all_gather(parts)
    return [logits[:, : len(table)] for logits in gathered]


def shares_of(table: Tensor, ranks: Ranks) -> list[range]:
    """The tokens of each rank. table: [V, hidden_size]."""
    size = ranks.size
    return [vocabulary_rows(len(table), rank, size) for rank in range(size)]


# ---------------------------------------------------------------- a layer


def attention(
    xs: Shards,
    part: Attention,
    config: ModelConfig,
    attend: Callable,
    ranks: Ranks,
) -> Shards:
    """Each rank has some query heads and the KV heads that these read. xs: [T, hidden_size] each ->
    the same. attend: as the decoder's, for any number of heads.
    """
    dim = part.head_dim
    q_size = config.num_attention_heads * dim
    q_rows = equal_slices(q_size, ranks.size)
    kv_rows = []
    for rank in range(ranks.size):
        heads = kv_heads_of(config, rank, ranks.size)
        first = heads.start * dim
        last = heads.stop * dim
        kv_rows.append(slice(first, last))

    queries = column_parallel(xs, part.q_proj, q_rows)
    keys = column_parallel(xs, part.k_proj, kv_rows)
    values = column_parallel(xs, part.v_proj, kv_rows)

    outs = []
    for q, k, v in zip(queries, keys, values):
        # no rank needs to know the others' heads
        q = q.unflatten(-1, (-1, dim))
        k = k.unflatten(-1, (-1, dim))
        v = v.unflatten(-1, (-1, dim))
        out = attend(part.q_norm(q), part.k_norm(k), v)
        outs.append(out.flatten(-2))
    return row_parallel(outs, part.o_proj, q_rows, ranks)


def mlp(xs: Shards, part: MLP, ranks: Ranks) -> Shards:
    """Each rank has some of the inner values. silu and the product work on single values, so they
    need no others. xs: [T, hidden_size] each -> the same.
    """
    own = equal_slices(part.gate_proj.out_features, ranks.size)
    gates = column_parallel(xs, part.gate_proj, own)
    ups = column_parallel(xs, part.up_proj, own)
    inner = []
    for gate, up in zip(gates, ups):
        inner.append(silu(gate) * up)
    return row_parallel(inner, part.down_proj, own, ranks)


def add(xs: Shards, branches: Shards) -> Shards:
    """The residual stream, of which every rank has a copy: [T, hidden_size] each."""
    return [x + branch for x, branch in zip(xs, branches)]


# ---------------------------------------------------------------- the whole


@torch.inference_mode()
def forward(model: Decoder, tokens: Tensor, ranks: Ranks) -> Shards:
    """One sequence from its first token on, on all ranks. tokens: [T] -> logits: [T, V] each.

    Between its two sums a layer does the same work on every rank: the norms and the additions.
    Raises ValueError, one line, for a model that cannot be cut for so many ranks.
    """
    local_config(model.config, 0, ranks.size)  # refuses, because slices would leave values out
    attend = whole_sequence(model, len(tokens))
    config = model.config
    xs = embed(tokens, model.embed_tokens.weight, ranks)
    for index, layer in enumerate(model.layers):
        attend_here = partial(attend, index)
        normed = [layer.input_layernorm(x) for x in xs]
        branches = attention(normed, layer.self_attn, config, attend_here, ranks)
        xs = add(xs, branches)

        normed = [layer.post_attention_layernorm(x) for x in xs]
        branches = mlp(normed, layer.mlp, ranks)
        xs = add(xs, branches)
    hidden = [model.norm(x) for x in xs]
    return head(hidden, model.lm_head.weight, ranks)
