"""A rank's part of a model as an ordinary decoder, whose layers talk where they must.

    part = shard(model, links)         # of a whole model; loading.py reads a part from a file
    hidden = part(tokens, attend)      # [T, hidden_size], the same on all ranks of links.tensor
    logits = part.logits(hidden)       # [T, vocab_size], too

Nothing in the decoder is written anew. It is built with the rank's own shape (`local_config`), so a
KVPool of part.config holds the rank's KV heads, and lesson 7's `fused` and lesson 12's pages take
it like any other model. Then layers.py's wrappers go around four kinds of layers. Per pass they
send two sums a layer, one for the embeddings, and one gather of logits.

A stage of a pipeline holds some layers, the first one also the embeddings, the last one the head.
Its `run_layers` and a KVPool with layers=part.stage_layers are all that it needs.

Source: Megatron-LM (Shoeybi et al. 2019), section 3; Narayanan et al. 2021, section 2.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import MLP, Decoder
from lessons.l06_mla.deepseek import decoder_class
from lessons.l06_mla.gpt_oss import StackedExperts, StackedMoE
from lessons.l06_mla.moe import MoE
from lessons.l20_parallelism.pipeline import split_layers
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Links
from lessons.l20_parallelism.shards.layers import (
    Elsewhere,
    NormOverRanks,
    OwnExperts,
    ParallelHead,
    RowParallel,
    SummedExperts,
    VocabParallelEmbedding,
)
from lessons.l20_parallelism.shards.sharding import (
    experts_of,
    local_config,
    slices_of,
    vocabulary_rows,
)
from lessons.toolbox.model.config import ModelConfig


def shard(model: Decoder, links: Links, expert_parallel: bool = False) -> Decoder:
    """This rank's part of a whole model, copied, on the model's device and in its dtype.

    expert_parallel: each rank of links.tensor holds some experts whole, not a strip of each. Raises
    ValueError for a model that cannot be cut so.
    """
    config = model.config
    part, whole = new_part(config, links, expert_parallel), model.state_dict()
    weights: dict[str, Tensor] = {}
    for name in part.state_dict():
        tensor = whole[name]
        index = own_slices(config, name, tensor.shape, links, expert_parallel)
        weights[name] = tensor[index].clone()  # because a view would keep the whole one in memory
    return finish(part, weights, config, links, expert_parallel)


def own_slices(
    config: ModelConfig,
    name: str,
    shape: tuple[int, ...] | list[int],
    links: Links,
    expert_parallel: bool = False,
) -> tuple[slice, ...]:
    """What this rank keeps of a tensor of the whole model. Arguments as in `slices_of`."""
    group = links.tensor
    if links.experts is not None and ".experts." in name:
        group = links.experts
    elif links.experts is not None and ".shared_experts." in name:
        group = Group.alone()  # whole, because a rank runs them for tokens that no other rank has
    return slices_of(config, name, shape, group.rank, group.size, expert_parallel=expert_parallel)


def new_part(config: ModelConfig, links: Links, expert_parallel: bool = False) -> Decoder:
    """This rank's decoder without weights, on the meta device; its tensors have the names that they
    have in the whole model. Raises ValueError.
    """
    place = links.tensor.rank, links.tensor.size
    local = local_config(config, *place, expert_parallel=expert_parallel)
    if links.experts is not None:
        local = replace(local, moe=config.moe)
    stages = split_layers(config.num_hidden_layers, links.pipeline.size)
    num_tokens = len(vocabulary_rows(config.vocab_size, *place))
    with torch.device("meta"):
        part = decoder_class(config)(replace(local, vocab_size=num_tokens))
        if links.experts is not None:
            keep_own_experts(part, links.experts.rank, links.experts.size)
        elif expert_parallel and links.tensor.size > 1:
            keep_own_experts(part, *place)
            keep_strips(part, links.tensor.size)
    part.config = local  # with the whole vocabulary, because prompts and logits are whole
    for index in range(config.num_hidden_layers):
        if index not in stages[links.pipeline.rank]:
            part.layers[index] = Elsewhere()
    if not links.is_first_stage:
        part.embed_tokens = Elsewhere()
    if not links.is_last_stage:
        part.lm_head = Elsewhere()
    return part.eval().requires_grad_(False)


def keep_own_experts(part: Decoder, rank: int, size: int) -> None:
    """Of each layer's routed experts some whole."""
    config = part.config
    for layer in part.layers:
        moe = layer.mlp
        if isinstance(moe, StackedMoE):
            width = config.moe.moe_intermediate_size
            own = experts_of(config.moe.n_routed_experts, rank, size)
            moe.experts = StackedExperts(config.hidden_size, width, len(own))
        if not isinstance(moe, MoE):
            continue
        own = experts_of(len(moe.experts), rank, size)
        for index in range(len(moe.experts)):
            if index not in own:
                moe.experts[index] = Elsewhere()


def keep_strips(part: Decoder, size: int) -> None:
    """Of each layer's shared experts a strip."""
    config = part.config
    for layer in part.layers:
        if isinstance(layer.mlp, MoE) and config.moe.n_shared_experts:
            layer.mlp.shared_experts = MLP(config, config.moe.shared_width // size)


def finish(
    part: Decoder,
    weights: dict[str, Tensor],
    config: ModelConfig,
    links: Links,
    expert_parallel: bool = False,
) -> Decoder:
    """`part` with its weights, of any shape, and with the layers that talk. config: of the whole
    model.
    """
    part.load_state_dict(weights, assign=True)
    if config.tie_word_embeddings and links.is_first_stage and links.is_last_stage:
        part.lm_head.weight = part.embed_tokens.weight  # assigning made two of the one tensor
    if links.tensor.size > 1:
        connect(part, links, expert_parallel)
    return part.requires_grad_(False)


def connect(part: Decoder, links: Links, expert_parallel: bool = False) -> None:
    """Put layers.py's wrappers around the plain layers of a part."""
    group, vocab_size = links.tensor, part.config.vocab_size
    rows = vocabulary_rows(vocab_size, group.rank, group.size)
    if links.is_first_stage:
        part.embed_tokens = VocabParallelEmbedding(part.embed_tokens, rows.start, group)
    if links.is_last_stage:
        share = len(vocabulary_rows(vocab_size, 0, group.size))
        part.lm_head = ParallelHead(part.lm_head, vocab_size, share, group)
    for index in part.stage_layers:
        layer = part.layers[index]
        layer.self_attn.o_proj = RowParallel(layer.self_attn.o_proj, group)
        if part.config.variant == "olmo":
            for name in ("q_norm", "k_norm"):
                norm = getattr(layer.self_attn, name)
                setattr(layer.self_attn, name, NormOverRanks(norm, group))
        if not isinstance(layer.mlp, (MoE, StackedMoE)):
            layer.mlp.down_proj = RowParallel(layer.mlp.down_proj, group)
        elif links.experts is None:  # else rows travel to them, which is lesson 23's
            layer.mlp = summed(layer.mlp, links, expert_parallel)


def summed(moe: nn.Module, links: Links, expert_parallel: bool) -> SummedExperts:
    """The experts of a layer, with one sum over the ranks after all of them."""
    group = links.tensor
    if isinstance(moe, StackedMoE) and not expert_parallel:
        if group.rank:  # because the sum would hold the bias of each strip
            moe.experts.down_proj_bias.zero_()
    elif expert_parallel:
        moe = OwnExperts(moe, group.rank, group.size)
    return SummedExperts(moe, group)
