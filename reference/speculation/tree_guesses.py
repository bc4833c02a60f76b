"""Which tokens stand at the nodes of the engine's trees: the likeliest ones, or drawn ones for
requests that sample. Lesson 17's `Ranked` and `Drawn` do it; here they learn what only the engine
knows of a request: structures, biases, least lengths.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_sampling import batch_probabilities
from lessons.l17_tree_speculation.trees.guesses import Drawn, Parent, Ranked
from reference.engine.nucleus import searching_batch
from reference.speculation.verification import DRAFTS, Row, adjust_rows, node_numbers


class RankedAsAsked(Ranked):
    """The likeliest tokens that a request allows. A token that its structure forbids would be
    rejected for certain, and so would all tokens after it.
    """

    def children(self, logits: Tensor, parents: list[Parent]) -> list[list[int]]:
        """As in Ranked. logits: [P, V], which are changed."""
        adjust_rows(logits, rows_of(parents))
        return super().children(logits, parents)


class DrawnIfSampled(Drawn):
    """Requests with a temperature draw, each from what the draft would sample for it. Greedy ones
    take the likeliest tokens, and their rows of q stay unused.
    """

    def __init__(self):
        self.ranked = RankedAsAsked()

    def begin(self, num_nodes: int, vocab_size: int, device: torch.device) -> None:
        """A new step."""
        self.q = None  # until one is drawn
        self.step = num_nodes, vocab_size, device

    def children(self, logits: Tensor, parents: list[Parent]) -> list[list[int]]:
        """As in Ranked. logits: [P, V], which are changed."""
        found = self.ranked.children(logits, parents)
        drawn = [at for at, one in enumerate(parents) if one.request.sampling.temperature > 0]
        if drawn:
            if self.q is None:
                super().begin(*self.step)
            rows = super().children(logits[drawn], [parents[at] for at in drawn])
            for at, tokens in zip(drawn, rows):
                found[at] = tokens
        return found

    def probabilities(self, logits: Tensor, parents: list[Parent]) -> Tensor:
        """What would be sampled behind each parent. logits: [P, V], as `ranked` has adjusted them
        -> [P, V].
        """
        batch = searching_batch(rows_of(parents), logits.device)
        return batch_probabilities(logits, batch).float()

    def random_numbers(self, parents: list[Parent], place: int, device: torch.device) -> Tensor:
        """For each parent the one that draws its child number `place`: [P], in [0, 1)."""
        # A multiple of DRAFTS, so that no other purpose has the same number.
        return node_numbers(rows_of(parents), DRAFTS * (1 + place), device)


def rows_of(parents: list[Parent]) -> list[Row]:
    """The parents as rows of logits."""
    return [Row(parent.request, parent.behind, parent.node) for parent in parents]
