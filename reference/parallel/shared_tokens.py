"""Decode context parallelism in the engine: ranks that would hold copies of a KV head share its
tokens, as in lesson 20, here over a pool of blocks.

The engine's process counts in blocks of V = P · block_size tokens, and knows nothing more. Of each
of them every one of the P ranks stores block_size tokens. Tokens are dealt out I at a time, in
turn. With P = 2, block_size = 4 and I = 2 a block is

    token   0  1  2  3  4  5  6  7
    rank    0  0  1  1  0  0  1  1
    slot    0  1  0  1  2  3  2  3

so a rank's slots are filled from the front, whatever the length. A step attends in two ways:

    single queries   travel. All heads of the group come to each rank's tokens, and lesson 20's
                     `merged` adds up the parts, and sinks: a query is small, a context long.
    prompts          have K and V travel. A prompt's many queries see the same keys, so the ranks
                     gather the tokens of its blocks, and each attends with its own heads alone.

All that a rank does with slots and lengths is arithmetic on whole tensors, so a CUDA graph can hold
the first way. The second asks how long the prompts are, which Python knows.

Sources: vLLM, decode_context_parallel_size and cp_kv_cache_interleave_size; Helix Parallelism
(Bhatia et al. 2025).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend
from lessons.l03_kv_cache.batch import Batch, sequences
from lessons.l03_kv_cache.cache import AttentionOps, KVPool
from lessons.l03_kv_cache.generate import Rung
from lessons.l08_online_softmax.naive import finish, from_scores, wide
from lessons.l12_paged_kv.kernels.apart import apart
from lessons.l12_paged_kv.kernels.latents import PagedLatentPool
from lessons.l12_paged_kv.kernels.stand_ins import work_list
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Links
from lessons.l20_parallelism.shards.decode_context import check_context_size, merged
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig
from reference.engine.engine_args import EngineArgs
from reference.parallel.kernel_states import kernel_states

# (q: [B, H, D], k_cache: [blocks, block_size, 1, D], v_cache, batch, softmax_scale) -> out: [B, H,
# Dv] and lse: [B, H], of queries over the first batch.context_lens of their tokens; none: 0 and −∞
States = Callable[[Tensor, Tensor, Tensor, Batch, float], tuple[Tensor, Tensor]]


# ---------------------------------------------------------------- whose token is whose


@dataclass(frozen=True)
class TokenShare:
    """Which tokens of every sequence this rank stores. group: who shares them; interleave: tokens
    that go to a rank before the next one has its turn.
    """

    group: Group
    interleave: int = 1

    def own_slots(self, slots: Tensor) -> Tensor:
        """Slots of the engine's blocks, of V tokens, as slots of this rank's blocks; −1 for tokens
        of other ranks, and for −1. slots: [T] int64 -> [T].
        """
        # V is a multiple of P · I, so turns can be counted through all blocks.
        turn, place = slots // self.interleave, slots % self.interleave
        is_own = (turn % self.group.size == self.group.rank) & (slots >= 0)
        return torch.where(is_own, turn // self.group.size * self.interleave + place, -1)

    def own_lens(self, lens: Tensor) -> Tensor:
        """Of the first `lens` tokens those that are here: [B] -> [B], of any whole numbers."""
        size = self.interleave
        around = self.group.size * size
        begun = (lens % around - self.group.rank * size).clamp(0, size)
        return lens // around * size + begun

    def most(self, tokens: int) -> int:
        """Of so many tokens at most so many are here."""
        return -(-tokens // (self.group.size * self.interleave)) * self.interleave

    def whole(self, rows: Tensor) -> Tensor:
        """Blocks of this rank as blocks of all ranks' tokens, in their order: [W, block_size, ...]
        -> [W · P, block_size, ...].
        """
        size = rows.shape[1]
        of_all = self.group.all_gather(rows[None], dim=0)  # [P, W, block_size, ...]
        turns = of_all.unflatten(2, (size // self.interleave, self.interleave))
        return turns.movedim(0, 2).reshape(-1, size, *rows.shape[2:])  # from [W, turns, P, I, ...]


def check_share(config: ModelConfig, tp: int, dcp: int) -> None:
    """Raise ValueError unless `dcp` neighbours of `tp` shards would hold copies of a KV head, and
    scores have no cap. config: of the whole model.
    """
    check_context_size(config, tp, dcp)
    if config.attn_logit_softcapping is not None:
        accepted = (
            "one without a soft-cap, which the kernel that returns a log-sum-exp does not know"
        )
        refuse("model", config.model_type, accepted)


def new_share(args: EngineArgs, links: Links) -> TokenShare:
    """This rank's, for the neighbours that would hold the same KV head. Every rank of the world has
    to call it.
    """
    groups = links.mesh.context_groups(args.decode_context_parallel_size)
    return TokenShare(links.new_group(groups), args.cp_kv_cache_interleave_size)


@dataclass
class StepShare:
    """What a step needs of a TokenShare, found once for all layers. own_lens: [B] of
    batch.context_lens. gathered: the blocks of its prompts, [W] int64, and the step over them when
    they are whole; None before the first layer asks.
    """

    own_lens: Tensor
    gathered: tuple[Tensor, Batch] | None = None


def over_whole_blocks(batch: Batch, block_tokens: int, size: int) -> tuple[Tensor, Batch]:
    """The blocks of a step's sequences: [W] int64, one sequence after the other; and the step with
    tables into `TokenShare.whole` of them. block_tokens: V; size: P.
    """
    table, device = batch.block_table, batch.block_table.device
    counts = [-(-context_len // block_tokens) for _, context_len in sequences(batch)]
    owned = [(b, place) for b, count in enumerate(counts) for place in range(count)]
    blocks = table[tuple(torch.tensor(owned, device=device).unbind(1))].long()
    first = torch.tensor(list(accumulate(counts[:-1], initial=0)), device=device) * size
    # What follows a sequence's blocks here is another's, or none: it is not read.
    table = first[:, None] + torch.arange(table.shape[1] * size, device=device)
    nothing = work_list([], block_tokens // size, [])  # because no single query comes this way
    return blocks, replace(batch, block_table=table.int(), work_list=nothing)


# ---------------------------------------------------------------- attention


def torch_states(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    begins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """States in PyTorch. begins: [B], the first token of each that is seen. q: [B, H, D] -> [B, H,
    Dv] and [B, H], float32 or float64.
    """
    table = batch.block_table.long().clamp(max=len(k_cache) - 1)  # what follows is no block
    k, v = (cache[table].flatten(1, 2)[:, :, 0] for cache in (k_cache, v_cache))  # [B, N, D]
    place = torch.arange(k.shape[1], device=q.device)
    is_here = place < batch.context_lens[:, None]
    if begins is not None:
        is_here &= place >= begins[:, None]
    scores = (wide(q) @ wide(k).mT * softmax_scale).masked_fill(~is_here[:, None], -torch.inf)
    return finish(from_scores(scores, v.masked_fill(~is_here[..., None], 0)))


def states_in_window(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    begins: Tensor,
    most: int,
) -> tuple[Tensor, Tensor]:
    """torch_states of the last blocks of each sequence, because how many tokens of a window are
    here differs from one to the other, and a kernel has one window. begins: [B]; most: tokens in it
    at most. Returns out: [B, H, Dv] and lse: [B, H].
    """
    block_size, width = k_cache.shape[1], batch.block_table.shape[1]
    first = begins // block_size
    place = torch.arange(min(width, -(-most // block_size) + 1), device=q.device)
    blocks = (first[:, None] + place).clamp(max=width - 1)  # what is further is not seen
    last = replace(
        batch,
        block_table=batch.block_table.gather(1, blocks.long()),
        context_lens=batch.context_lens - first * block_size,
    )
    return torch_states(q, k_cache, v_cache, last, softmax_scale, begins - first * block_size)


def latent_states(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """States by lesson 12's kernel for latents, where it fits. q: [B, H, rank + rope] -> [B, H,
    rank] and [B, H].
    """
    from lessons.l06_mla.optimized import kernel_fits
    from lessons.l12_paged_kv.kernels.latents import decode_states

    states = decode_states if kernel_fits(q) else torch_states
    return states(q, k_cache, v_cache, batch, softmax_scale)


def sharing(ops: AttentionOps, share: TokenShare, states: States, block_tokens: int):
    """Operations over a cache of which this rank has its share of tokens, with the sinks of its
    heads, if the model has some. block_tokens: V.
    """
    group = share.group

    def decode(
        q, k_cache, v_cache, batch: Batch, softmax_scale: float, window: int | None, sinks=None
    ) -> Tensor:
        everyone = group.all_gather(q, dim=1)  # [B, P · H, D]
        # The sequences that run one token are in front.
        lens, most = batch.share.own_lens[: len(q)], share.most(batch.max_context_len)
        own = replace(batch, context_lens=lens, max_context_len=most, lengths=None)
        what = everyone, k_cache, v_cache, own, softmax_scale
        if window is None:
            out, lse = states(*what)
        else:
            begins = share.own_lens((batch.context_lens[: len(q)] - window).clamp(min=0))
            out, lse = states_in_window(*what, begins, share.most(window))
        return merged(out.transpose(0, 1), lse.T, group, sinks).transpose(0, 1).to(q.dtype)

    def prefill(q, k_cache, v_cache, batch: Batch, softmax_scale, window, **rules) -> Tensor:
        def prompts(q: Tensor, part: Batch) -> Tensor:
            if part.share.gathered is None:
                part.share.gathered = over_whole_blocks(part, block_tokens, group.size)
            blocks, step = part.share.gathered
            # K and V in one message
            both = share.whole(torch.cat([k_cache[blocks], v_cache[blocks]], dim=-1))
            k, v = both.split([k_cache.shape[-1], v_cache.shape[-1]], dim=-1)
            return ops.prefill(q, k, v, step, softmax_scale, window, **rules)

        def singles(q: Tensor, part: Batch) -> Tensor:
            return decode(q, k_cache, v_cache, part, softmax_scale, window, **rules)

        return apart(q, batch, singles, prompts)

    return ops._replace(prefill=prefill, decode=decode)


# ---------------------------------------------------------------- pools


class SharedTokens:
    """What a pool does if other ranks have some of the tokens. block_size: V, of the tables."""

    def __init__(self, share: TokenShare, *args, **more):
        self.share = share
        super().__init__(*args, **more)
        self.ops = self.sharing_ops(self.ops)

    @property
    def slots_per_block(self) -> int:
        """This rank's part of a block."""
        return self.block_size // self.share.group.size

    def attending(self, batch: Batch, first_block: int = 0) -> Attend:
        """As KVPool's. batch: with slots of the tables, and lengths of whole sequences."""
        share = StepShare(self.share.own_lens(batch.context_lens))
        slots = self.share.own_slots(batch.slot_mapping)
        own = replace(batch, slot_mapping=slots, share=share, work_list=None)
        return super().attending(own, first_block)

    def sharing_ops(self, ops: AttentionOps) -> AttentionOps:
        """ops over all ranks' tokens."""
        states = kernel_states if self.k_slots.is_cuda else torch_states
        return sharing(ops, self.share, states, self.block_size)


class SharedPool(SharedTokens, KVPool):
    """KVPool of this rank's tokens."""


class SharedLatentPool(SharedTokens, PagedLatentPool):
    """PagedLatentPool of this rank's tokens."""

    def sharing_ops(self, ops: AttentionOps) -> AttentionOps:
        """Prompts expand their latents, which `rows_of` has gathered."""
        shared = sharing(ops, self.share, latent_states, self.block_size)
        return ops._replace(decode=shared.decode)

    def rows_of(self, latents: Tensor, table: Tensor) -> Tensor:
        """As PagedLatentPool's, of all ranks: [len(table) · V, 1, rank + rope]."""
        return self.share.whole(latents[table]).flatten(0, 1)


def rung_over_share(rung: Rung, share: TokenShare, kv_cache_dtype: str) -> Rung:
    """The rung with the pool of a rank that has some of the tokens."""
    made = rung.cache if isinstance(rung.cache, partial) else partial(rung.cache)
    if kv_cache_dtype != "auto":
        from reference.parallel.shared_codes import shared_codes

        kind = shared_codes(made.func)
    else:
        kind = SharedLatentPool if issubclass(made.func, PagedLatentPool) else SharedPool
    return replace(rung, cache=partial(kind, share, *made.args))
