"""Which drafted tokens stay, and which token comes behind them: logits in, tokens out.

Read `Verifier.__call__`. A sequence with K drafted tokens has K + 1 rows of logits: row 0 says what
the target makes of its newest token, row i of drafted token i. In a chain drafted token i follows
token i - 1; in a tree the node that its tree says.

Two rules, and both leave the distribution as it is:

- Sure drafts (n-grams, greedy requests): each row is sampled as if nothing had been drafted, with
  the random number of its position. A drafted token stays if it is the token that came out, and the
  first one that differs takes its place. So the tokens are those of an engine without speculation,
  whatever was drafted.
- Drafts drawn from q: lesson 16's rule, and for trees lesson 17's, which asks one sibling after the
  other. Both accept more of them. Tokens follow the same distribution as without speculation, with
  other random numbers.

Sources of the second: Leviathan et al. 2023, algorithm 1; Miao et al. 2024, SpecInfer, algorithm 2,
with siblings drawn without replacement as in Jeon et al. 2024, Recursive Speculative Decoding.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_rows import SamplingBatch
from lessons.l02_naive_attention.batched.batch_sampling import (
    batch_probabilities,
    read_tokens,
    sample_batch,
)
from lessons.l02_naive_attention.random_streams import streams_of, uniform
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l16_speculative_sampling.stand_ins import verify_for
from lessons.l17_tree_speculation.naive import follow
from lessons.l17_tree_speculation.trees.accept import Asked, verify_trees
from lessons.l17_tree_speculation.trees.tree import MOST_NODES
from reference.engine.nucleus import searching_batch
from reference.engine.outputs import Logprobs
from reference.engine.request import EngineSequence
from reference.engine.sampler import adjust, top_logprobs
from reference.features.structured import apply_constraints
from reference.speculation.protocol import Draft

# Each position of an answer has three random numbers. The first of them is the one that draws its
# token without speculation; the others stand where no answer's positions reach.
DRAWS, ACCEPTS, DRAFTS = 0, 2**40, 2**41
# The nodes of drawn trees have numbers of their own, because several nodes have one position.
NODES = 2**39


class Verified(NamedTuple):
    """What a sequence gets from a step: drafted tokens that stay, and one more. logprobs: of each.
    path: the rows from which they came, which are the nodes that stay, the newest token's first.
    """

    tokens: list[int]
    logprobs: list[Logprobs | None]
    path: Sequence[int]


class Row(NamedTuple):
    """A row of logits: what follows a sequence's output and `ahead`. It looks like a request. node:
    its number in the tree.
    """

    sequence: EngineSequence
    ahead: list[int]
    node: int = 0

    @property
    def sampling(self) -> SamplingParams:
        return self.sequence.sampling

    @property
    def prompt(self) -> list[int]:
        return self.sequence.prompt

    @property
    def output(self) -> list[int]:
        return self.sequence.output + self.ahead

    @property
    def position(self) -> int:
        """Of the token that this row gives, in the answer."""
        return len(self.sequence.output) + len(self.ahead)

    @property
    def place(self) -> int:
        """Of the numbers that belong to this node: no other node of the answer has the same."""
        return NODES + len(self.sequence.output) * MOST_NODES + self.node


Kept = tuple[list[int], Sequence[int]]  # tokens and path of an Verified


class RowBatches:
    """The sampling batch of some rows. It is kept, because most steps have rows like the last's."""

    def __init__(self):
        self.shape: list[tuple[int, int]] = []
        self.batch: SamplingBatch | None = None

    def __call__(self, rows: list[Row], device: torch.device) -> SamplingBatch:
        """Made anew for other sequences, and where penalties depend on the tokens in front."""
        shape = [(row.sequence.row, len(row.ahead)) for row in rows]
        if shape != self.shape or self.batch.seen is not None:
            self.shape, self.batch = shape, searching_batch(rows, device)
        else:
            self.batch.drawn = torch.tensor([row.position for row in rows], device=device)
        return self.batch


class Verifier:
    """The sampler of a speculative engine."""

    def __init__(self):
        self.sure, self.drawn, self.in_trees = RowBatches(), RowBatches(), RowBatches()
        self.verify = None  # lesson 16's kernel, or PyTorch in its place

    @torch.inference_mode()
    def __call__(
        self, logits: Tensor, sequences: list[EngineSequence], drafts: list[Draft]
    ) -> list[Verified]:
        """What each sequence emits. logits: [R, V], which are changed: 1 + len(draft.tokens) rows
        of each sequence, one sequence after the other. Raises ValueError for logits that are not
        finite.
        """
        raw = logits.float().log_softmax(-1) if any(s.wants_logprobs for s in sequences) else None
        rows, first = [], []
        for sequence, draft in zip(sequences, drafts):
            first.append(len(rows))
            rows += rows_of(sequence, draft)
        adjust_rows(logits, rows)
        emitted: dict[int, Kept] = {}
        for rule in (self.compare, self.accept, self.accept_in_trees):
            which = [b for b, draft in enumerate(drafts) if self.rule_for(draft) == rule]
            if which:
                some = [drafts[b] for b in which]
                places = [first[b] + n for b in which for n in range(len(drafts[b].tokens) + 1)]
                part = logits if len(places) == len(rows) else logits[places]
                emitted |= zip(which, rule(part, [rows[at] for at in places], some))
        return [
            Verified(tokens, logprobs_of(raw, first[b], tokens, path, sequences[b]), path)
            for b, (tokens, path) in sorted(emitted.items())
        ]

    def rule_for(self, draft: Draft) -> Callable[..., list[Kept]]:
        """One of the three below."""
        if draft.q is None:
            return self.compare
        return self.accept if draft.tree is None else self.accept_in_trees

    def compare(self, logits: Tensor, rows: list[Row], drafts: list[Draft]) -> list[Kept]:
        """For sure drafts. logits: [R, V], of all rows of all drafts."""
        return compared(read_tokens(sample_batch(logits, self.sure(rows, logits.device))), drafts)

    def accept(self, logits: Tensor, rows: list[Row], drafts: list[Draft]) -> list[Kept]:
        """For chains that were drawn. logits: [R, V], as in `compare`."""
        device = logits.device
        self.verify = self.verify or verify_for(device)
        counts = [len(draft.tokens) + 1 for draft in drafts]
        starts = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
        batch = self.drawn(rows, device)
        p = batch_probabilities(logits, batch).float()
        # The last row of each is not read; any will do.
        q = torch.cat([part for draft in drafts for part in (draft.q, draft.q[:1])])
        drafted = [token for draft in drafts for token in (*draft.tokens, -1)]
        u = torch.stack([numbers(batch, purpose) for purpose in (ACCEPTS, DRAWS)], dim=1)
        tokens, kept = self.verify(
            p, q, torch.tensor(drafted, device=device), u, starts, max(counts)
        )
        tokens, kept, found, first = tokens.tolist(), kept.tolist(), [], 0
        for count, stays in zip(counts, kept):
            own = tokens[first : first + stays + 1]
            found.append((checked(own), range(stays + 1)))
            first += count
        return found

    def accept_in_trees(self, logits: Tensor, rows: list[Row], drafts: list[Draft]) -> list[Kept]:
        """For trees whose siblings were drawn without replacement. logits: [R, V], as in
        `compare`.
        """
        batch = self.in_trees(rows, logits.device)
        p = batch_probabilities(logits, batch).float()
        q = torch.cat([draft.q for draft in drafts])
        asked = [Asked(None, draft.tree, nodes_of(draft)) for draft in drafts]
        u = [node_numbers(rows, purpose, logits.device) for purpose in (ACCEPTS, DRAWS)]
        paths, last = verify_trees(p, q, asked, torch.stack(u, dim=1))
        return [
            (checked([*(one.tokens[node] for node in path[1:]), token]), path)
            for one, path, token in zip(asked, paths, last)
        ]


def compared(tokens: list[int], drafts: list[Draft]) -> list[Kept]:
    """What stays of sure drafts. tokens: of all rows of all drafts, as if none had been drafted."""
    found, first = [], 0
    for draft in drafts:
        own = tokens[first : first + len(draft.tokens) + 1]
        first += len(own)
        if draft.tree is None:
            kept = 0
            while kept < len(draft.tokens) and draft.tokens[kept] == own[kept]:
                kept += 1
            path = range(kept + 1)
        else:
            path = follow(draft.tree, nodes_of(draft), own)[:-1]
        found.append(([own[node] for node in path], path))
    return found


def rows_of(sequence: EngineSequence, draft: Draft) -> list[Row]:
    """A row for the newest token and for each drafted one."""
    if draft.tree is None:
        return [Row(sequence, draft.tokens[:n]) for n in range(len(draft.tokens) + 1)]
    behind: list[list[int]] = [[]]
    for parent, token in zip(draft.tree.parents[1:], draft.tokens):
        # Where nothing was drawn any token will do, because that row is never reached.
        behind.append([*behind[parent], max(token, 0)])
    return [Row(sequence, ahead, node) for node, ahead in enumerate(behind)]


def nodes_of(draft: Draft) -> list[int]:
    """The tokens of a tree's nodes, whose numbers begin at the root. The root's is not asked
    for.
    """
    return [-1, *draft.tokens]


def checked(tokens: list[int]) -> list[int]:
    """The same. Raises ValueError if the last was drawn from logits that are not finite."""
    read_tokens(torch.tensor(tokens[-1:]))
    return tokens


def numbers(batch: SamplingBatch, purpose: int) -> Tensor:
    """The random number that each row has for this purpose: [R] float32, in [0, 1)."""
    return below_one(uniform(batch.stream, batch.drawn + purpose))


def node_numbers(rows: list[Row], purpose: int, device: torch.device) -> Tensor:
    """The same for nodes of trees, each with numbers of its own: [R] float32."""
    streams = streams_of([row.sampling.seed for row in rows], device)
    places = torch.tensor([row.place for row in rows], device=device)
    return below_one(uniform(streams, places + purpose))


def below_one(u: Tensor) -> Tensor:
    """[R] float64 -> [R] float32. A float64 just below 1 would become 1, and then even a perfect
    draft could be rejected.
    """
    return u.float().clamp(max=1 - 2.0**-24)


def adjust_rows(logits: Tensor, rows: list[Row]) -> None:
    """Structures, biases and least lengths, in place. logits: [R, V]."""
    constraints = [row.sequence.constraint for row in rows]
    wanted = [each and each.row(row.ahead) for each, row in zip(constraints, rows)]
    must_end = apply_constraints(logits, wanted)
    for at, row in enumerate(rows):
        adjust(logits, at, row.sequence, row.ahead, must_end[at])


def logprobs_of(
    raw: Tensor | None,
    first: int,
    tokens: list[int],
    path: Sequence[int],
    sequence: EngineSequence,
) -> list[Logprobs | None]:
    """What the request wants to know of its tokens. raw: [R, V], the first of its rows at
    `first`.
    """
    if not sequence.wants_logprobs:
        return [None] * len(tokens)
    count = sequence.params.logprobs or 0
    return top_logprobs(raw[[first + node for node in path[: len(tokens)]]], tokens, count)
