"""Expert parallelism as it is served: dispatch sends tokens to the ranks of their experts, combine
brings the results back.

In ranks/experts.py a token travels once for each of its experts. Here it is sent in the ways that
serving engines offer (vLLM's all2all_backend has their names):

    GatherScatterMoE      allgather_reducescatter. Every rank gets all tokens, and computes what
                          its own experts add to each. The sum goes back to the token's rank.
    BroadcastMoE          naive. The same in its simplest form: the ranks broadcast their tokens in
                          turn, and an all-reduce adds up the results of all tokens.
    CountedDispatchMoE    deepep_high_throughput. Counts first; then a token goes once to each RANK
                          that has some of its experts. That rank weighs and adds up its experts'
                          results, and sends one row back.
    FixedSlotsMoE         deepep_low_latency. Each expert has slots for all tokens that a rank may
                          have. Shapes never change, so no counts are waited for, and a CUDA graph
                          could hold the step. The sender weighs and adds up.

All are made as `Form(moe, group)`. Each rank has tokens of its own; ranks may have different
numbers of them, none included. Nothing is dropped. `form` says what a row is on the way to the
experts (wire.py); results come back in the dtype of x.

Sources: DeepEP (github.com/deepseek-ai/DeepEP), README; vLLM's
vllm/distributed/device_communicators/all2all.py.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lessons.l06_mla.moe import MoE
from lessons.l20_parallelism.processes.group import Group
from lessons.l23_experts.ranks.experts import PlacesMoE, SplitTokensMoE, first_pairs
from lessons.l23_experts.ranks.load import Load
from lessons.l23_experts.ranks.wire import Float8, Plain, read_message, write_message
from lessons.toolbox.model.arguments import check_whole, refuse

PLAIN = Plain()
MAX_TOKENS = 128  # of a rank in a step, DeepEP's example for decoding
NOWHERE = -1  # an expert that no rank has: it adds nothing
EMPTY = 255  # each byte of a row that is no token's: its experts are then -1, which is NOWHERE


class GatherScatterMoE(SplitTokensMoE):
    """All tokens on all ranks for the time of one layer: an all-gather, then a reduce-scatter."""

    def __init__(self, moe: MoE, group: Group, form: Plain | Float8 = PLAIN):
        super().__init__(moe, group)
        self.form = form

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As SplitTokensMoE.routed: [T, H] -> [T, H]."""
        # First how many tokens the longest has, because all must gather equally long tensors.
        counts = self.group.all_gather(chosen.new_full((1,), len(x)), dim=0)
        height = int(counts.max())
        if not height:
            return torch.zeros_like(x)
        message = write_message(self.form, x, chosen, weights)
        message = pad(message, (0, 0, 0, height - len(x)), value=EMPTY)
        message = self.group.all_gather(message, dim=0)
        return self.group.reduce_scatter(self.shares(message, x, weights))[: len(x)]

    def shares(self, message: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Partial sums: what the experts of this rank add to each token of a message, [tokens, H]
        as x. weights: [T, k] of this rank's tokens, which have their dtype.
        """
        rows, chosen, weights = read_message(self.form, message, x, weights)
        return self.experts(rows, weights, chosen - self.own.start)


class BroadcastMoE(GatherScatterMoE):
    """The same without a collective of equal sizes: each rank in turn broadcasts its tokens. Then
    an all-reduce, of which a rank needs its own rows alone.
    """

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As SplitTokensMoE.routed: [T, H] -> [T, H]."""
        counts = self.group.all_gather(chosen.new_full((1,), len(x)), dim=0).tolist()
        if not sum(counts):
            return torch.zeros_like(x)
        own = write_message(self.form, x, chosen, weights)
        message = own.new_empty(sum(counts), own.shape[1])
        parts = message.split(counts)
        parts[self.group.rank].copy_(own)
        for rank, part in enumerate(parts):
            if len(part):
                self.group.broadcast(part, rank)
        sums = self.group.all_reduce(self.shares(message, x, weights))
        return sums.split(counts)[self.group.rank]


class CountedDispatchMoE(SplitTokensMoE):
    """A token is sent once to each rank that has some of its experts, however many, and one row
    comes back from each.

    rows_sent: of the last step, [senders][receivers], how many rows each rank sent to each.
    """

    def __init__(self, moe: MoE, group: Group, form: Plain | Float8 = PLAIN):
        super().__init__(moe, group)
        self.form, self.rows_sent = form, [[0] * group.size] * group.size
        counts = torch.tensor(self.experts_of_each, device=moe.gate.weight.device)
        # of each expert its rank, and its number among the experts there: both [E]
        ranks = torch.arange(group.size, device=counts.device).repeat_interleave(counts)
        first = (counts.cumsum(0) - counts)[ranks]
        self.register_buffer("rank_of", ranks, persistent=False)
        self.register_buffer("number_of", torch.arange(len(ranks)).to(first) - first, False)

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As SplitTokensMoE.routed: [T, H] -> [T, H]."""
        rank, token = self.sends(chosen)
        to_each = torch.bincount(rank, minlength=self.group.size)
        # Every rank learns what each sends to each. Python waits here, because the sizes of the
        # next exchange depend on it.
        self.rows_sent = self.group.all_gather(to_each[None], dim=0).tolist()
        to_each = self.rows_sent[self.group.rank]
        from_each = [sent[self.group.rank] for sent in self.rows_sent]

        # [R, k]: a token's experts on the rank that it is sent to; others are nowhere there
        there = self.rank_of[chosen[token]] == rank[:, None]
        numbers = torch.where(there, self.number_of[chosen[token]], NOWHERE)
        message = write_message(self.form, x[token], numbers, weights[token])
        message = self.group.all_to_all(message, to_each, from_each)
        rows, numbers, weights = read_message(self.form, message, x, weights)

        shares = self.experts(rows, weights, numbers)  # weighed and added up, one row for each
        shares = self.group.all_to_all(shares, from_each, to_each)
        return combined(shares, token, to_each, x)

    @property
    def load(self) -> Load:
        """Rows that each rank got in the last step, its own included: the same on every rank."""
        return Load(tuple(map(sum, zip(*self.rows_sent))))

    def sends(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Who is sent where: ranks [R] and tokens [R], by rank and then by token, each pair once.
        chosen: [T, k].
        """
        wanted = torch.zeros(len(chosen), self.group.size, dtype=torch.bool, device=chosen.device)
        wanted.scatter_(1, self.rank_of[chosen], True)
        return wanted.T.nonzero(as_tuple=True)


def combined(shares: Tensor, token: Tensor, to_each: list[int], x: Tensor) -> Tensor:
    """The sum of a token's rows from all ranks: [T, H] as x. shares: [R, H], rank after rank, of
    the tokens `token`: [R]; to_each: rows of each rank.

    Ranks are added in their order, and a token has one row of each at most. So the bits are the
    same in every run.
    """
    total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for tokens, rows in zip(token.split(to_each), shares.split(to_each)):
        total.index_add_(0, tokens, rows.to(total.dtype))
    return total.to(x.dtype)


class FixedSlotsMoE(PlacesMoE):
    """A slot for each (expert, sender, token), up to max_tokens of a sender. All ranks must have
    the same max_tokens.

    A row is sent for each expert of a token, as in SplitTokensMoE. A collective sends empty slots
    as well, so here the bytes are those that DeepEP reserves. Its kernels write only full slots
    into the receiver's memory, which are T · k: windows.py does that.
    """

    def __init__(
        self,
        moe: MoE,
        group: Group,
        max_tokens: int = MAX_TOKENS,
        form: Plain | Float8 = PLAIN,
    ):
        super().__init__(moe, group)
        check_whole(max_tokens=max_tokens)
        self.max_tokens, self.form = max_tokens, form

    def visit(self, x: Tensor, chosen: Tensor) -> Tensor:
        """As SplitTokensMoE.visit: [T, H] -> [T · k, H]. Raises ValueError for more tokens than
        slots.
        """
        self.check_room(x)
        pairs = first_pairs(chosen, self.num_experts, self.max_tokens)  # [E, max_tokens]
        full = (pairs < chosen.numel()).sum(1)  # [E], which travel beside the slots
        own = [len(self.own)] * self.group.size
        full = self.group.all_to_all(full, self.experts_of_each, own)
        return self.visit_places(x, pairs, chosen.shape[1], self.experts_of_slots(full), self.form)

    def experts_of_slots(self, full: Tensor) -> Tensor:
        """Which own expert runs each slot, NOWHERE for empty ones: [senders · own · max_tokens].
        full: [senders · own], how many slots are full.
        """
        slot = torch.arange(self.max_tokens, device=full.device)
        number = torch.arange(len(self.own), device=full.device).repeat(self.group.size)[:, None]
        return torch.where(slot < full[:, None], number, NOWHERE).flatten()

    def check_room(self, x: Tensor) -> None:
        """Raise ValueError unless there is a slot for each of x: [T, H]."""
        if len(x) > self.max_tokens:
            refuse("tokens of x", len(x), f"at most {self.max_tokens}, which is max_tokens")
