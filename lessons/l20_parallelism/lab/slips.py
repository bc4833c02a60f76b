"""Wrong versions of this lesson's layers, each a mistake that is easily made. The tests make them
on every rank and want to see them fail.
"""

from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l20_parallelism import optimized as parallel
from lessons.l20_parallelism.optimized import connect
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Links
from lessons.l20_parallelism.shards import sharding
from lessons.l20_parallelism.shards.layers import (
    OwnExperts,
    ParallelHead,
    RowParallel,
    SummedExperts,
    VocabParallelEmbedding,
)
from lessons.toolbox.model.config import ModelConfig


def swapped_gather(self: Group, x: Tensor, dim: int = -1) -> Tensor:
    """The ranks' tensors in the opposite order. x: [..., N] -> [..., size · N]."""
    parts = [torch.empty_like(x) for _ in self.members]
    dist.all_gather(parts, x.contiguous(), group=self.handle)
    return torch.cat(parts[::-1], dim)


def only_own_logits(self: ParallelHead, x: Tensor) -> Tensor:
    """What a rank knows before the gather, the other tokens at minus infinity. x: [T, hidden_size]
    -> [T, vocab_size].
    """
    logits = x.new_full((len(x), self.vocab_size), -torch.inf)
    first = self.group.rank * self.share
    local = self.linear(x)
    logits[:, first : first + local.shape[-1]] = local
    return logits


def sum_of_columns(part: Decoder, links: Links, expert_parallel: bool = False) -> None:
    """Sum after up_proj as well, although every rank has other outputs of it."""
    connect(part, links, expert_parallel)
    for index in part.stage_layers:
        mlp = part.layers[index].mlp
        mlp.up_proj = RowParallel(mlp.up_proj, links.tensor)


def bias_everywhere(self: RowParallel, x: Tensor) -> Tensor:
    """Each rank adds the bias before the sum. x: [T, in / size] -> [T, out]."""
    out = self.linear(x)
    return self.group.all_reduce(out if self.bias is None else out + self.bias)


def fed_with_one_strip(self: RowParallel, x: Tensor) -> Tensor:
    """Every rank multiplies the inputs of rank 0. x: [T, in / size] -> [T, out]."""
    return self.group.all_reduce(self.linear(self.group.broadcast(x)))


def unmasked(self: VocabParallelEmbedding, tokens: Tensor) -> Tensor:
    """Each rank adds its nearest row for tokens of other ranks. tokens: [T] -> [T, hidden_size]."""
    rows = (tokens - self.first).clamp(0, len(self.embedding.weight) - 1)
    return self.group.all_reduce(self.embedding(rows))


def summed_with_all_biases(moe: nn.Module, links: Links, expert_parallel: bool) -> SummedExperts:
    """The sum over strips of experts, the bias of each strip included."""
    return SummedExperts(moe, links.tensor)


def shared_on_every_rank(self: OwnExperts, x: Tensor) -> Tensor:
    """As if every rank had the shared experts whole. x: [T, hidden_size] -> the same."""
    size = self.gate.config.n_routed_experts // len(self.own)
    return own_experts(self, x) + (size - 1) * self.shared_experts(x)


own_experts = OwnExperts.forward


def kv_heads_in_turn(config: ModelConfig, rank: int, size: int) -> range:
    """KV heads dealt like cards, so that a rank's query heads read another rank's."""
    head = rank % config.num_key_value_heads
    return range(head, head + 1)


# name -> what it changes, for as long as the context lasts
SLIPS = {
    "logits not gathered": partial(
        patch.object, ParallelHead, "forward", lambda self, x: self.linear(x)
    ),
    "each rank looks at its own logits": partial(
        patch.object, ParallelHead, "forward", only_own_logits
    ),
    "gathered in the wrong order": partial(patch.object, Group, "all_gather", swapped_gather),
    "summed after a column-parallel layer": partial(
        patch.object, parallel, "connect", sum_of_columns
    ),
    "bias on every rank": partial(patch.object, RowParallel, "forward", bias_everywhere),
    "all ranks fed with one strip": partial(
        patch.object, RowParallel, "forward", fed_with_one_strip
    ),
    "tokens of other ranks not masked": partial(
        patch.object, VocabParallelEmbedding, "forward", unmasked
    ),
    "KV heads dealt in turn": partial(patch.object, sharding, "kv_heads_of", kv_heads_in_turn),
    "not summed": partial(patch.object, Group, "all_reduce", lambda self, x: x),
    "experts' bias on every rank": partial(
        patch.object, parallel, "summed", summed_with_all_biases
    ),
    "shared experts on every rank": partial(
        patch.object, OwnExperts, "forward", shared_on_every_rank
    ),
}
