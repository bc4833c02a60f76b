"""Sequence parallelism: between two products of a layer each rank has some rows, not all of them.

    part = sequence_parallel(shard(model, links), links)      # the same answers, the same bytes

After tensor parallelism's all-reduce every rank has all T rows, and all of them add the same
residual and compute the same norm. An all-reduce is a reduce-scatter and an all-gather. So let the
residual and the norm sit between the two, on T / P rows of each rank:

    all-reduce, add, norm of T rows      becomes
    reduce-scatter, add, norm of T / P rows, all-gather

The residual stream of a rank has 1/P of the rows, and the norms do 1/P of the work. What travels is
the same, in one message more. And what is gathered is the norm's output, which may be rounded to
FP8 before it travels: then the second half has half the bytes (Float8GatheredNorm).

`mlp_on_rows` has it with lists. In the classes T may be no multiple of P: the last ranks then have
rows of zeros, which are cut off after the gather.

Sources: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models,
section 4.2.2; vLLM's compilation pass for it, `enable_sp`.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from lessons.l02_naive_attention.decoder import MLP, Decoder
from lessons.l06_mla.deepseek import DeepseekDecoder, decoder_class
from lessons.l06_mla.moe import MoEDecoder
from lessons.l18_weight_quantization.naive import Float8Weight, to_float8
from lessons.l20_parallelism.naive import Shards, column_parallel, equal_slices
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Links
from lessons.l20_parallelism.processes.ranks import Ranks
from lessons.l20_parallelism.shards.layers import (
    RowParallel,
    SummedExperts,
    VocabParallelEmbedding,
)
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig

# ---------------------------------------------------------------- ranks as lists


def mlp_on_rows(xs: Shards, norm: nn.Module, part: MLP, ranks: Ranks) -> Shards:
    """A norm and an MLP where each rank has some rows. xs: [T / P, hidden_size] each, consecutive
    rows -> the same, of norm(x) through the MLP.
    """
    normed = [norm(x) for x in xs]  # of a rank's own rows
    whole = ranks.all_gather(normed, dim=0)  # [T, hidden_size] each
    own = equal_slices(part.gate_proj.out_features, ranks.size)
    gates = column_parallel(whole, part.gate_proj, own)
    ups = column_parallel(whole, part.up_proj, own)
    parts = []
    for gate, up, columns in zip(gates, ups, own):
        inner = silu(gate) * up
        parts.append(inner @ part.down_proj.weight[:, columns].T)
    outs = ranks.reduce_scatter(parts)  # [T / P, hidden_size] each
    bias = part.down_proj.bias
    return outs if bias is None else [out + bias for out in outs]


# ---------------------------------------------------------------- layers of processes


class Rows:
    """Which rows this rank has. num_tokens: of the pass that runs, T."""

    def __init__(self, group: Group):
        self.group, self.num_tokens = group, 0

    def scatter_sum(self, partial: Tensor) -> Tensor:
        """The sum over the ranks of this rank's rows. partial: [T, hidden_size] ->
        [ceil(T / P), hidden_size], zeros where there are no more rows.
        """
        missing = -len(partial) % self.group.size
        return self.group.reduce_scatter(pad(partial, (0, 0, 0, missing)))

    def gather(self, own: Tensor) -> Tensor:
        """All rows from each rank's. own: [ceil(T / P), N] -> [T, N]."""
        return self.group.all_gather(own, dim=0)[: self.num_tokens]


class ScatteredEmbedding(nn.Module):
    """VocabParallelEmbedding whose sum is scattered. It is the first layer of a pass, so it tells
    the others how many tokens there are.
    """

    def __init__(self, embedding: VocabParallelEmbedding, rows: Rows):
        super().__init__()
        self.embedding, self.rows = embedding, rows

    def forward(self, tokens: Tensor) -> Tensor:  # [T] -> [ceil(T / P), hidden_size]
        self.rows.num_tokens = len(tokens)
        return self.rows.scatter_sum(self.embedding.partial(tokens))


class ScatteredSum(nn.Module):
    """A layer of partial sums, of which each rank gets its rows: RowParallel or SummedExperts."""

    def __init__(self, layer: RowParallel | SummedExperts, rows: Rows):
        super().__init__()
        self.layer, self.rows = layer, rows

    def forward(self, x: Tensor) -> Tensor:  # [T, in / P] -> [ceil(T / P), out]
        out = self.rows.scatter_sum(self.layer.partial(x))
        bias = getattr(self.layer, "bias", None)
        return out if bias is None else out + bias


class GatheredNorm(nn.Module):
    """A norm of this rank's rows, then all rows for the product that follows."""

    def __init__(self, norm: nn.Module, rows: Rows):
        super().__init__()
        self.norm, self.rows = norm, rows

    @property
    def weight(self) -> Tensor:
        """The norm's own, [hidden_size], by which a decoder knows its device and dtype."""
        return self.norm.weight

    def forward(self, x: Tensor) -> Tensor:  # [ceil(T / P), hidden_size] -> [T, hidden_size]
        return self.whole(self.norm(x))

    def after_adding(self, branch: Tensor, residual: Tensor) -> Tensor:
        """Where lesson 7 adds and norms in one operation: residual += branch, in place, both
        [ceil(T / P), hidden_size] -> the norm of all rows, [T, hidden_size].
        """
        return self.whole(self.norm.after_adding(branch, residual))

    def whole(self, own: Tensor) -> Tensor:
        """All rows. own: [ceil(T / P), hidden_size] -> [T, hidden_size]."""
        return self.rows.gather(own)


class Float8GatheredNorm(GatheredNorm):
    """The same, with 8 bits a value and a scale a row on the wire."""

    def whole(self, own: Tensor) -> Tensor:
        """As GatheredNorm: [ceil(T / P), hidden_size] -> [T, hidden_size]."""
        short = to_float8(own, per="row")
        # as bytes, because not every library of collectives knows FP8
        bits = self.rows.gather(short.values.view(torch.uint8))
        whole = Float8Weight(bits.view(short.values.dtype), self.rows.gather(short.scales))
        return whole.dequantize().to(own.dtype)


def sequence_parallel(
    part: Decoder, links: Links, norm_class: type[GatheredNorm] = GatheredNorm
) -> Decoder:
    """`part`, changed so that its residual stream has this rank's rows alone. Its caches, `attend`
    and logits stay as they were: these have all rows.

    norm_class: Float8GatheredNorm for 8 bits on the wire. A part that was changed before, or that
    shares layers with one, is changed anew. Raises ValueError for a model whose layers are no chain
    of norm, product and sum, and for stages.
    """
    if links.mesh.pp > 1:
        refuse("pp", links.mesh.pp, "1, because a stage hands on all rows")
    check_chain(part.config)
    if links.tensor.size == 1:
        return part
    rows = Rows(links.tensor)
    part.embed_tokens = ScatteredEmbedding(as_it_was(part.embed_tokens), rows)
    for layer in part.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, norm_class(as_it_was(getattr(layer, name)), rows))
        # Lesson 6's attention over latents has its matrices inside.
        attention = getattr(layer.self_attn, "expanded", layer.self_attn)
        attention.o_proj = ScatteredSum(as_it_was(attention.o_proj), rows)
        mlp = as_it_was(layer.mlp)
        if isinstance(mlp, SummedExperts):
            layer.mlp = ScatteredSum(mlp, rows)
        else:
            mlp.down_proj = ScatteredSum(as_it_was(mlp.down_proj), rows)
    part.norm = GatheredNorm(as_it_was(part.norm), rows)  # in full, because logits follow
    return part


def as_it_was(layer: nn.Module) -> nn.Module:
    """A layer before `sequence_parallel` changed it."""
    if isinstance(layer, ScatteredEmbedding):
        return layer.embedding
    if isinstance(layer, ScatteredSum):
        return layer.layer
    return layer.norm if isinstance(layer, GatheredNorm) else layer


def check_chain(config: ModelConfig) -> None:
    """Raise ValueError for a model that `sequence_parallel` cannot change, whatever the ranks."""
    if decoder_class(config) not in (Decoder, MoEDecoder, DeepseekDecoder):
        refuse("model", config.model_type, "one with a norm before each product and no other")
