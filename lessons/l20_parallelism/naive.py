"""A model on several ranks, in one process: what the ranks hold is a list, and they run in turn.

    ranks = Ranks(4)
    logits = forward(model, tokens, ranks)     # a list: whole logits, once for each rank
    ranks.calls                                # what they had to say to each other

Read it from the bottom up: `forward`, `mlp`, `column_parallel` and `row_parallel`, then `attention`,
then `embed` and `head`. Every function takes and returns lists, entry r being rank r's. Only the
methods of `ranks` look at the entries of others. parallel.py puts each entry into a process, and
between processes these methods are torch.distributed's.

For decoders of lesson 2 (Llama, Qwen, Mistral, Phi-3).
Source: Megatron-LM (Shoeybi et al. 2019), section 3, figures 3 and 4.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from lessons.l02_naive_attention.decoder import MLP, Attention, Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l20_parallelism.ranks import Ranks
from lessons.l20_parallelism.sharding import kv_heads_of, vocabulary_rows
from lessons.toolbox.model.config import ModelConfig

# ---------------------------------------------------------------- one matrix


def column_parallel(xs: list[Tensor], layer: nn.Linear, rows: list[slice]) -> list[Tensor]:
    """Each rank has the whole input and computes some outputs. xs: [T, in] each -> [T, its rows].

    rows: of the stored matrix, [out, in]. They are columns of the W in y = x W, hence the name.
    """
    bias = layer.bias
    return [
        linear(x, layer.weight[own], None if bias is None else bias[own])
        for x, own in zip(xs, rows)
    ]


def row_parallel(
    xs: list[Tensor], layer: nn.Linear, columns: list[slice], ranks: Ranks
) -> list[Tensor]:
    """Each rank has some inputs, so its product is a part of every output's sum.

    xs: [T, its columns] each -> [T, out]; columns: of the stored matrix, [out, in].
    """
    partial_sums = [x @ layer.weight[:, own].T for x, own in zip(xs, columns)]
    outs = ranks.all_reduce(partial_sums)
    # behind the sum, because a bias in every part would be added once for each rank
    return outs if layer.bias is None else [out + layer.bias for out in outs]


def equal_slices(length: int, size: int) -> list[slice]:
    """0 … length cut into `size` equal pieces, in order."""
    share = length // size
    return [slice(rank * share, (rank + 1) * share) for rank in range(size)]


# ---------------------------------------------------------------- the vocabulary


def embed(tokens: Tensor, table: Tensor, ranks: Ranks) -> list[Tensor]:
    """Each rank looks up the tokens that it holds; a token of another rank gives zeros, which the
    sum fills. tokens: [T]; table: [V, hidden_size] -> [T, hidden_size] each.
    """
    parts = []
    for rank in range(ranks.size):
        own = vocabulary_rows(len(table), rank, ranks.size)
        is_mine = (tokens >= own.start) & (tokens < own.stop)
        rows = table[torch.where(is_mine, tokens, own.start)]  # any own row stands for the others
        parts.append(rows.masked_fill(~is_mine[:, None], 0))
    return ranks.all_reduce(parts)


def head(xs: list[Tensor], table: Tensor, ranks: Ranks) -> list[Tensor]:
    """Each rank computes the logits of its tokens, then all get all. xs: [T, hidden_size] each;
    table: [V, hidden_size] -> [T, V] each. The likeliest token of one part may not be the
    likeliest of all, so nobody can choose before this gather.
    """
    share, parts = len(vocabulary_rows(len(table), 0, ranks.size)), []
    for rank, x in enumerate(xs):
        own = vocabulary_rows(len(table), rank, ranks.size)
        local = x @ table[own.start : own.stop].T
        parts.append(pad(local, (0, share - len(own))))  # a gather wants equal shapes
    return [logits[:, : len(table)] for logits in ranks.all_gather(parts)]


# ---------------------------------------------------------------- a layer


def attention(
    xs: list[Tensor], part: Attention, config: ModelConfig, attend: Callable, ranks: Ranks
) -> list[Tensor]:
    """Each rank has some query heads and the KV heads that these read. xs: [T, hidden_size] each ->
    the same. attend: as the decoder's, for any number of heads.
    """
    dim = part.head_dim
    q_rows = equal_slices(config.num_attention_heads * dim, ranks.size)
    kv_rows = []
    for rank in range(ranks.size):
        heads = kv_heads_of(config, rank, ranks.size)
        kv_rows.append(slice(heads.start * dim, heads.stop * dim))
    queries = column_parallel(xs, part.q_proj, q_rows)
    keys = column_parallel(xs, part.k_proj, kv_rows)
    values = column_parallel(xs, part.v_proj, kv_rows)
    outs = []
    for q, k, v in zip(queries, keys, values):  # no rank needs to know the others' heads
        q, k, v = (x.unflatten(-1, (-1, dim)) for x in (q, k, v))
        outs.append(attend(part.q_norm(q), part.k_norm(k), v).flatten(-2))
    return row_parallel(outs, part.o_proj, q_rows, ranks)


def mlp(xs: list[Tensor], part: MLP, ranks: Ranks) -> list[Tensor]:
    """Each rank has some of the inner values. silu and the product work on single values, so they
    need no others. xs: [T, hidden_size] each -> the same.
    """
    own = equal_slices(part.gate_proj.out_features, ranks.size)
    gates = column_parallel(xs, part.gate_proj, own)
    ups = column_parallel(xs, part.up_proj, own)
    inner = [silu(gate) * up for gate, up in zip(gates, ups)]
    return row_parallel(inner, part.down_proj, own, ranks)


# ---------------------------------------------------------------- the whole


@torch.inference_mode()
def forward(model: Decoder, tokens: Tensor, ranks: Ranks) -> list[Tensor]:
    """One sequence from its first token on, on all ranks. tokens: [T] -> logits: [T, V] each.

    Between its two sums a layer does the same work on every rank: the norms, and the addition to the
    residual stream, of which every rank has a copy.
    """
    attend = whole_sequence(model, len(tokens))
    xs = embed(tokens, model.embed_tokens.weight, ranks)
    for index, layer in enumerate(model.layers):
        normed = [layer.input_layernorm(x) for x in xs]
        attend_here = partial(attend, index)
        branches = attention(normed, layer.self_attn, model.config, attend_here, ranks)
        xs = [x + branch for x, branch in zip(xs, branches)]
        normed = [layer.post_attention_layernorm(x) for x in xs]
        xs = [x + branch for x, branch in zip(xs, mlp(normed, layer.mlp, ranks))]
    return head([model.norm(x) for x in xs], model.lm_head.weight, ranks)
