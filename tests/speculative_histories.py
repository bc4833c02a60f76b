"""Histories for the speculative engine: those of engine_histories.py, with a drafter.

A draft model is played by a second hash over a second memory of tokens, in the same blocks. It
reads its context back through the block table before each token, so a slot that it never wrote, or
that belongs to another request now, is seen at once.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_sampling import batch_probabilities
from lessons.l02_naive_attention.batched.requests import sampling_batch
from lessons.l02_naive_attention.request import Request
from lessons.l02_naive_attention.sampling import sample
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l15_chunked_prefill.lab.histories import Rules
from lessons.l15_chunked_prefill.lab.virtual import TokenMemory
from lessons.l15_chunked_prefill.swap import Host, Lender
from lessons.l16_speculative_sampling.more.suffixes import Limits
from lessons.l16_speculative_sampling.naive import verify_sequence
from lessons.l16_speculative_sampling.stand_ins import draw_rows
from lessons.l17_tree_speculation.heads.drafts import HeadDrafter
from lessons.l17_tree_speculation.naive import verify_tree
from lessons.l17_tree_speculation.trees.guesses import Ranked
from lessons.l17_tree_speculation.trees.tree import Tree, chain
from reference.engine.engine import Engine
from reference.engine.request import by_priority
from reference.engine.sampling_params import SamplingParams
from reference.features.swap import PoolsSwap
from reference.speculation.head_proposers import HeadProposer
from reference.speculation.lookahead import LookaheadScheduler
from reference.speculation.proposers import (
    DraftModelProposer,
    NgramProposer,
    ParallelDraftProposer,
)
from reference.speculation.protocol import Draft
from reference.speculation.speculation import Speculation
from reference.speculation.suffix_proposer import SuffixProposer
from reference.speculation.tree_guesses import DrawnIfSampled
from reference.speculation.verification import ACCEPTS, DRAFTS, DRAWS, Row, node_numbers, numbers
from tests.engine_histories import (
    CONFIG,
    LOGITS,
    LONGEST,
    History,
    House,
    VirtualRunner,
    hashes,
    logits_after,
)

# A draft agrees with the target now and then.
OTHERS = LOGITS + torch.randn(LOGITS.shape, generator=torch.Generator().manual_seed(1))
MASK = 0  # of parallel drafting; a token like any other to the hash

KEPT_ANSWERS = 2  # by suffix decoding


class Drafting(NamedTuple):
    """Who drafts. kind: "ngram"; "suffix"; "sure": it keeps its distributions to itself; "drawn";
    "drawn at once": with masks; "sure tree" or "drawn tree": of the shape `tree`.
    """

    kind: str
    num_speculative_tokens: int
    temperature: float = 1.0
    context: int = LONGEST  # of the draft
    min_tokens: int = 0
    tree: Tree = chain(1)

    @property
    def shape(self) -> Tree | None:
        return self.tree if self.kind in TREE_KINDS else None

    @property
    def most(self) -> int:
        """Tokens that are drafted in a step at most."""
        return self.num_speculative_tokens if self.shape is None else len(self.tree) - 1


class DraftMemory:
    """In the place of a draft's ModelRunner: tokens in, hashes of their contexts out."""

    def __init__(self, blocks: BlockManager, context: int):
        self.pool = TokenMemory(blocks)
        self.pool.block_size = blocks.block_size
        self.max_model_len = context

    def run(self, chunks, tables) -> Tensor:
        hidden, size = [], self.pool.block_size
        for (tokens, held), table in zip(chunks, tables):
            places = torch.arange(held, held + len(tokens))
            assert held + len(tokens) <= self.max_model_len, "beyond the draft's context"
            at = torch.tensor(table)[places // size] * size + places % size
            self.pool.k_slots.view(-1)[at] = torch.tensor(tokens)
            self.pool.v_slots.view(-1)[at] = places
        for (tokens, held), table in zip(chunks, tables):
            context = self.pool.k_slots[0, table].flatten()[: held + len(tokens)].tolist()
            assert min(context) >= 0, "the draft reads what it never wrote"
            hidden += hashes(context)[held:]
        return torch.tensor(hidden)

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        return OTHERS[hidden[rows] % len(OTHERS)].clone()


class VirtualDraft(DraftModelProposer):
    """The proposer itself, over that memory."""


class VirtualParallel(ParallelDraftProposer):
    """The same with masks in that memory."""

    def __init__(self, runner: DraftMemory):
        super().__init__(runner, MASK)


class SureDraft(VirtualDraft):
    """Tokens without the distributions that they come from: right only if the rule for sure drafts
    is right for whatever is drafted.
    """

    def propose(self, sequences, counts, tables):
        return [Draft(draft.tokens) for draft in super().propose(sequences, counts, tables)]


def new_proposer(drafting: Drafting, blocks: BlockManager, runner, draft=VirtualDraft):
    if drafting.kind == "ngram":
        return NgramProposer(3)
    if drafting.kind == "suffix":
        return SuffixProposer(Limits(8, KEPT_ANSWERS))
    if drafting.shape is not None:
        return VirtualTrees(runner.model, TREE_KINDS[drafting.kind]())
    kinds = {"sure": SureDraft, "drawn at once": VirtualParallel}
    kind = kinds.get(drafting.kind, VirtualDraft) if draft in (None, VirtualDraft) else draft
    return kind(DraftMemory(blocks, drafting.context))


# ---------------------------------------------------------------- trees


TREE_KINDS = {"sure tree": Ranked, "drawn tree": DrawnIfSampled}


class VirtualHeads(HeadDrafter):
    """What may follow a node: a row of the other table, by a hash of its context."""

    def level_logits(self, depth, level, trees, tokens):
        found = [
            logits_after(OTHERS, one.request, one.request.output + one.behind) for one in level
        ]
        return torch.cat(found)


class VirtualTrees(HeadProposer):
    """Nothing is kept from step to step. It has no memory that could be wrong: the target's shows
    what becomes of a tree.
    """

    taps, pools = None, ()

    def __init__(self, model, choice):
        # the tables have the logits: no last matrix is read
        self.drafter = VirtualHeads(model, choice, lm_head=torch.nn.Identity())

    def most(self, sequence) -> int:
        return LONGEST

    def observe(self, ran, features, tables) -> None:
        for sequence, first, count, rows in ran:
            assert len(rows) == count and first == sequence.computed

    def fork(self, parent, child) -> None:
        pass

    def forget(self, sequence) -> None:
        pass


class Slots(NamedTuple):
    """TokenMemory as a pool of slots: tensors [1, slots]."""

    k_slots: Tensor
    v_slots: Tensor

    @property
    def tensors(self):
        return self


class TreeRunner(VirtualRunner):
    """The hash of a node is that of its way, whatever is between in memory. Positions are stored,
    too, by depth; so a text whose K are in order was compacted right.
    """

    def __init__(self, *args):
        super().__init__(*args)
        memory = self.virtual.memory
        self.pool = Slots(memory.k_slots.view(1, -1), memory.v_slots.view(1, -1))

    def __call__(self, step, tables) -> Tensor:
        hidden, first = super().__call__(step, tables), 0
        for sequence, count in step.chunks:
            held, tree, table = sequence.computed, sequence.tree, tables[sequence.row]
            places = self.virtual.memory.v_slots[0, table].flatten()[:held]
            assert places.tolist() == list(range(held)), "K of another position"
            if tree is not None:
                assert len(tree) == count
                context = self.virtual.read(sequence, count)
                for node in range(count):
                    way = [context[held + n] for n in tree.path_to(node)]
                    hidden[first + node] = hashes(context[:held] + way)[-1]
                self.write_positions(table, held, tree)
            first += count
        return hidden

    def write_positions(self, table, held: int, tree: Tree) -> None:
        size = self.virtual.blocks.block_size
        for node, depth in enumerate(tree.depths):
            place = held + node
            self.pool.v_slots[0, table[place // size] * size + place % size] = held + depth


def new_engine(house: House, faults, drafting: Drafting, kind, draft) -> Engine:
    size = house.num_blocks, house.block_size
    if house.cache is None:
        blocks = BlockManager(*size)
    else:
        blocks = CachingBlockManager(*size, house.cache(house.block_size))
    runner = TreeRunner(blocks, None, faults)
    proposer = new_proposer(drafting, blocks, runner, draft)
    how = dict(
        max_num_seqs=house.max_num_seqs,
        max_num_batched_tokens=house.max_num_batched_tokens,
        enable_chunked_prefill=house.enable_chunked_prefill,
        order=by_priority,
        proposer=proposer,
        num_speculative_tokens=drafting.most,
        tree=drafting.shape,
    )
    if house.host_blocks is not None:
        pools = [runner.virtual.memory, *proposer.pools]
        swap = PoolsSwap(Lender(runner.virtual.memory, blocks), pools)
        how["host"] = Host(swap, house.host_blocks)
    scheduler = LookaheadScheduler(blocks, **how)
    runner.rules = LookaheadRules(scheduler)
    return Engine(runner, scheduler, None, LONGEST, speculation=kind(runner, scheduler))


class LookaheadRules(Rules):
    """Lesson 15's rules. What is new: a sequence keeps the blocks that a rejected draft had, and
    one that comes in with nothing but its newest token left may wait for the next step.
    """

    def __init__(self, scheduler):
        super().__init__(scheduler)
        self.ran_before: set[int] = set()

    def check(self, step) -> None:
        super().check(step)
        in_step = {chunk.sequence.row for chunk in step.chunks}
        for sequence in self.scheduler.running:
            is_new = sequence.row not in self.ran_before
            waits = sequence.row not in in_step
            assert not (waits and sequence.is_decoding) or is_new, "a decode waits"
        self.ran_before = {sequence.row for sequence in self.scheduler.running}

    def check_progress(self, step) -> None:
        if all(s.row in self.ran_before for s in self.scheduler.running[:1]):
            super().check_progress(step)

    def is_right(self, sequence, end: int, owned: int) -> bool:
        blocks = self.scheduler.blocks
        return blocks.blocks_for(end) <= owned <= blocks.blocks_for(sequence.most_cached)


def kept_by(proposer) -> dict:
    """What a proposer holds of requests, by their numbers."""
    if isinstance(proposer, SuffixProposer):
        return proposer.cache.own
    return getattr(proposer, "known", getattr(proposer, "held", {}))


class DraftedHistory(History):
    """A history of an engine that speculates."""

    def __init__(
        self,
        house: House,
        requests,
        faults,
        drafting: Drafting,
        kind=Speculation,
        draft=VirtualDraft,
    ):
        least = house.max_num_seqs * (1 + drafting.most)
        most = max(house.max_num_batched_tokens, least)
        house = house._replace(max_num_batched_tokens=most)
        engine = new_engine(house, faults, drafting, kind, draft)
        super().__init__(house, requests, faults, engine=engine)
        self.drafting = drafting
        self.seen |= dict(accepted=0, rejected=0, stopped_inside=0, moved=0)
        engine.sampler = self.look_at

    def look_at(self, logits, sequences):
        """What is verified, on its way to the engine."""
        speculation = self.engine.speculation
        found, drafts = speculation.verify(logits, sequences), speculation.drafts
        for sequence, (tokens, _, path) in zip(sequences, found):
            drafted = len(drafts[sequence].tokens) if sequence in drafts else 0
            self.seen["accepted"] += len(tokens) - 1
            self.seen["rejected"] += drafted - (len(tokens) - 1)
            self.seen["moved"] += any(node != place for place, node in enumerate(path))
            self.seen["stopped_inside"] += not sequence.stop_token_ids.isdisjoint(tokens[:-1])
        return found

    def params(self, index: int) -> SamplingParams:
        params = super().params(index)
        temperature = self.drafting.temperature if params.n == 1 else 1.0
        least = min(self.drafting.min_tokens, params.max_tokens)
        return replace(params, temperature=temperature, min_tokens=least)

    def alone(self, sequence) -> list[int]:
        return alone(sequence, self.drafting, self.logits_after)

    def check_end(self) -> None:
        super().check_end()
        proposer = self.engine.speculation.proposer
        assert not kept_by(proposer), "the proposer remembers a request that has gone"
        if self.drafting.kind == "suffix":
            assert len(proposer.cache.kept) <= KEPT_ANSWERS


# ---------------------------------------------------------------- what every request must get


def alone(sequence, drafting: Drafting, logits_after) -> list[int]:
    """The answer of a sequence that is alone, one row of probabilities after the other. Where
    drafts come without their distributions, it is that of plain sampling. logits_after: that of the
    history.
    """
    output, stops = [], frozenset(CONFIG.eos_token_ids)
    is_drawn = drafting.kind.startswith("drawn") and sequence.sampling.temperature > 0
    while len(output) < sequence.max_new_tokens and not stops.intersection(output[-1:]):
        left = sequence.max_new_tokens - len(output) - 1
        room = drafting.context - (len(sequence.prompt) + len(output) - 1)
        room = LONGEST if drafting.shape is not None else room
        count = min(drafting.most, left, room) if output and is_drawn else 0
        if count <= 0:
            logits = logits_after(LOGITS, sequence, output)
            output += sample(logits, [sequence.sampling], [sequence.prompt], [output])
            continue
        emits = masked_round if drafting.kind == "drawn at once" else drafted_round
        if drafting.shape is not None:
            emits, count = tree_round, drafting.tree.first(count + 1)
        for token in emits(sequence, output, count, logits_after):
            output.append(token)
            if token in stops:
                break
    return output


def masked_round(sequence, output: list[int], count: int, logits_after) -> list[int]:
    """The same with a draft that reads masks in the places of what it drafted."""

    def with_masks(table, sequence, text):
        masks = [MASK] * (len(text) - len(output))
        return logits_after(table, sequence, text, output + masks if table is OTHERS else text)

    return drafted_round(sequence, output, count, with_masks)


def drafted_round(sequence, output: list[int], count: int, logits_after) -> list[int]:
    """A step of lesson 16's naive.py with the engine's random numbers."""
    drafted, p, q, u = [], [], [], []
    for _ in range(count + 1):
        text = output + drafted
        batch = sampling_batch([sequence_with(sequence, text)], "cpu")
        for table, rows in ((LOGITS, p), (OTHERS, q)):
            logits = logits_after(table, sequence, text)
            rows.append(batch_probabilities(logits, batch).float()[0])
        u.append(torch.cat([numbers(batch, purpose) for purpose in (ACCEPTS, DRAWS)]))
        drafted += draw_rows(q[-1][None], numbers(batch, DRAFTS)).tolist()
    rows = torch.stack(p), torch.stack(q), torch.tensor(drafted), torch.stack(u)
    return verify_sequence(*rows)


def tree_round(sequence, output: list[int], tree: Tree, logits_after) -> list[int]:
    """A step of lesson 17's naive.py with the engine's random numbers."""
    tokens, p, q, u, text_of = [-1] * len(tree), [], [], [], {0: output}
    for node, children in enumerate(tree.children):
        batch = sampling_batch([sequence_with(sequence, text_of[node])], "cpu")
        for table, rows in ((LOGITS, p), (OTHERS, q)):
            logits = logits_after(table, sequence, text_of[node])
            rows.append(batch_probabilities(logits, batch).float()[0])
        row, left = Row(sequence_with(sequence, output), [], node), q[-1].clone()
        u.append(torch.cat([node_numbers([row], one, "cpu") for one in (ACCEPTS, DRAWS)]))
        for place, child in enumerate(children):
            if left.sum() > 0:
                number = node_numbers([row], DRAFTS * (1 + place), "cpu")
                tokens[child] = int(draw_rows(left[None], number))
                left[tokens[child]] = 0
            text_of[child] = [*text_of[node], max(tokens[child], 0)]
    *path, last = verify_tree(torch.stack(p), torch.stack(q), tree, tokens, torch.stack(u))
    return [*(tokens[node] for node in path[1:]), last]


def sequence_with(sequence, output: list[int]) -> Request:
    """The sequence with another output."""
    limit, stops = sequence.max_new_tokens, sequence.stop_token_ids
    return Request(sequence.row, sequence.prompt, limit, sequence.sampling, stops, output)
