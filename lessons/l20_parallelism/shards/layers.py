"""The layers that talk: what a rank's decoder has where an ordinary one has a plain layer.

    RowParallel              o_proj, down_proj: partial sums, then adds over the ranks
    VocabParallelEmbedding   looks up the tokens that it holds, then adds over the ranks
    ParallelHead             computes the logits of its tokens, then gathers those of all ranks
    SummedExperts            a layer's experts, which write partial sums, then adds once for all
    NormOverRanks            a norm over all heads (OLMo): adds the sums of squares over the ranks

The first three are row_parallel, embed and head of naive.py, in the same order.

A column-parallel layer (q, k, v, gate, up) needs no class. It is an ordinary linear layer that has
fewer outputs, and says nothing, because the row-parallel layer after it wants just these as inputs.
Each class wraps the plain layer of the rank, so a quantized or an adapted one may be inside.

Source: Megatron-LM (Shoeybi et al. 2019), section 3; vLLM's layers/linear.py.
"""

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.variants.olmo import NormOverHeads
from lessons.l06_mla.gpt_oss import StackedMoE
from lessons.l06_mla.moe import MoE
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.shards.sharding import experts_of


class RowParallel(nn.Module):
    """A linear layer over this rank's inputs, summed over the ranks."""

    def __init__(self, linear: nn.Linear, group: Group):
        super().__init__()
        self.bias, self.group = linear.bias, group
        linear.bias = None  # because each rank would add it, and the sum would hold it `size` times
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:  # [T, in / size] -> [T, out]
        out = self.group.all_reduce(self.linear(x))
        return out if self.bias is None else out + self.bias

    def partial(self, x: Tensor) -> Tensor:
        """Before the sum and the bias: [T, in / size] -> [T, out]."""
        return self.linear(x)


class VocabParallelEmbedding(nn.Module):
    """The embeddings of the tokens first, first + 1, … that this rank holds."""

    def __init__(self, embedding: nn.Embedding, first: int, group: Group):
        super().__init__()
        self.embedding, self.first, self.group = embedding, first, group

    def forward(self, tokens: Tensor) -> Tensor:  # [T] -> [T, hidden_size]
        return self.group.all_reduce(self.partial(tokens))

    def partial(self, tokens: Tensor) -> Tensor:
        """Before the sum: [T] -> [T, hidden_size], zeros for another rank's tokens."""
        local = tokens - self.first
        is_elsewhere = (local < 0) | (local >= len(self.embedding.weight))
        # Looked up as token 0, then made zeros, because the shapes must not depend on the data.
        x = self.embedding(local.masked_fill(is_elsewhere, 0))
        # not multiplied by zero, because the row of token 0 may hold an infinity
        return x.masked_fill_(is_elsewhere[:, None], 0)


class ParallelHead(nn.Module):
    """The logits of this rank's tokens, gathered. share: tokens of a rank, of the last one at
    most.
    """

    holds_plain_linear = True  # which a CPU may pack

    def __init__(self, linear: nn.Linear, vocab_size: int, share: int, group: Group):
        super().__init__()
        self.linear, self.vocab_size, self.share, self.group = linear, vocab_size, share, group

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, vocab_size]
        return self.group.all_gather(self.local(x))[..., : self.vocab_size]

    def local(self, x: Tensor) -> Tensor:
        """Of this rank's tokens alone: [T, hidden_size] -> [T, share]."""
        logits = self.linear(x)  # [T, this rank's tokens]
        missing = self.share - logits.shape[-1]
        if missing:  # on the last rank, because a gather wants equal shapes
            logits = nn.functional.pad(logits, (0, missing))
        return logits


class SummedExperts(nn.Module):
    """A layer's experts on this rank, summed over the ranks: each token's share of its experts."""

    def __init__(self, moe: nn.Module, group: Group):
        super().__init__()
        self.moe, self.group = moe, group

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        return self.group.all_reduce(self.moe(x))

    def partial(self, x: Tensor) -> Tensor:
        """Before the sum: [T, hidden_size] -> [T, hidden_size]."""
        return self.moe(x)


class NormOverRanks(nn.Module):
    """OLMo's norm of all heads together, of which this rank has some."""

    def __init__(self, norm: NormOverHeads, group: Group):
        super().__init__()
        self.norm, self.group = norm, group

    def forward(self, x: Tensor) -> Tensor:  # [T, this rank's heads, D] -> the same
        wide = x if x.dtype == torch.float64 else x.float()
        squares = self.group.all_reduce(wide.square().sum((-2, -1), keepdim=True))  # [T, 1, 1]
        # A KV head that several ranks have counts as often above as here.
        mean = squares / (x.shape[-2] * x.shape[-1] * self.group.size)
        weight = self.norm.weight.view(x.shape[-2:]).to(wide.dtype)
        return (weight * wide * torch.rsqrt(mean + self.norm.eps)).to(x.dtype)


class OwnExperts(nn.Module):
    """The routed experts that this rank holds whole, and its strip of the shared ones.

    moe: one of lesson 6 that has just these, or whose other experts are Elsewhere.
    """

    waits_for_values = True  # as lesson 6's layer: Python asks which experts were chosen

    def __init__(self, moe: MoE | StackedMoE, rank: int, size: int):
        super().__init__()
        self.is_stacked = isinstance(moe, StackedMoE)
        self.gate = moe.router if self.is_stacked else moe.gate
        self.experts = moe.experts
        self.shared_experts = None if self.is_stacked else moe.shared_experts
        self.own = experts_of(self.gate.config.n_routed_experts, rank, size)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> the same, a partial sum
        weights, chosen = self.gate(x)  # of all experts, the same on all ranks
        out = torch.zeros_like(x) if self.shared_experts is None else self.shared_experts(x)
        for index in self.own:
            token, place = torch.where(chosen == index)
            share = self.run_expert(x[token], index) * weights[token, place, None]
            out.index_add_(0, token, share.to(out.dtype))
        return out

    def run_expert(self, x: Tensor, index: int) -> Tensor:  # [T, hidden_size] -> the same
        if self.is_stacked:
            return self.experts(x, index - self.own.start)
        return self.experts[index](x)


class Elsewhere(nn.Identity):
    """In the place of a part that another rank holds: a layer of another stage, another's expert.

    An Identity, by which the other lessons know that nothing is here.
    """

    def forward(self, *args, **kwargs):
        raise RuntimeError("this part of the model is held by another rank")
