"""Two proposers that read the target's hidden states: Medusa's heads, and EAGLE's one layer.

Lesson 17 explains both, and lets them fill trees. Here they draft chains of their likeliest tokens,
and the verifier's rule for sure drafts keeps every answer as it is.
"""

from itertools import accumulate

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l12_paged_kv.runner import new_pool, step_batch
from lessons.l17_tree_speculation.drafts import OneLayer
from lessons.l17_tree_speculation.heads import FeatureDraft, MedusaHeads
from lessons.l19_kv_quantization.runner import quantized_rung_of
from reference.request import EngineSequence
from reference.speculation import Draft, Proposer, Ran, Tables


class MedusaProposer(Proposer):
    """Head i guesses the token that stands i + 1 places behind the newest.

    All of them read one hidden state: that of the token in front of the newest, from which the newest
    was sampled.
    """

    taps, pools = (), ()

    def __init__(self, heads: MedusaHeads, target: Decoder):
        self.heads = heads.heads
        self.target = target
        self.states: dict[int, Tensor] = {}  # of each sequence: [hidden_size]

    def most(self, sequence: EngineSequence) -> int:
        """A token for each head. None where the prefix cache spared the target the hidden state."""
        return len(self.heads) if sequence.row in self.states else 0

    @torch.inference_mode()
    def propose(
        self, sequences: list[EngineSequence], counts: list[int], tables: Tables
    ) -> list[Draft]:
        """The likeliest token of each head."""
        state = torch.stack([self.states[sequence.row] for sequence in sequences])
        found = [
            self.target.logits(head(state)).argmax(dim=-1) for head in self.heads[: max(counts)]
        ]
        rows = torch.stack(found, dim=1).tolist()
        return [Draft(tokens[:count]) for tokens, count in zip(rows, counts)]

    def observe(self, ran: list[Ran], features: Tensor | None, tables: Tables) -> None:
        """Keep the last hidden state of each. features: [T, hidden_size]."""
        # Copied, because the next replayed step writes over `features`, and a sequence that waits on
        # the host does not take part in it.
        last = torch.stack([features[one.row + one.count - 1] for one in ran])
        for one, state in zip(ran, last):
            self.states[one.sequence.row] = state

    def fork(self, parent: EngineSequence, child: EngineSequence) -> None:
        """Both go on from one hidden state."""
        self.states[child.row] = self.states[parent.row]

    def forget(self, sequence: EngineSequence) -> None:
        """Drop its hidden state."""
        self.states.pop(sequence.row, None)


class EagleProposer(Proposer):
    """One layer that goes on from the target's features, over the target's block tables.

    Place i of its pool belongs to the feature of token i and to token i + 1. So the last place of a
    block that the prefix cache hands on may hold the pair of another continuation. That can cost an
    accepted token, but never changes one.
    """

    def __init__(
        self,
        draft: FeatureDraft,
        target: Decoder,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        kv_cache_dtype: str = "auto",
    ):
        self.draft = draft
        self.taps = draft.taps
        self.target = target
        layer = OneLayer(draft, target)
        rung = quantized_rung_of(layer, kv_cache_dtype)
        self.pool = new_pool(layer, num_blocks, block_size, max_model_len, rung)
        self.pools = (self.pool,)
        # What the layer made of each sequence's last pair: [hidden_size].
        self.made: dict[int, Tensor] = {}

    def most(self, sequence: EngineSequence) -> int:
        """No limit of its own, once it has seen a feature of the sequence."""
        return 2**31 if sequence.row in self.made else 0

    @torch.inference_mode()
    def propose(
        self, sequences: list[EngineSequence], counts: list[int], tables: Tables
    ) -> list[Draft]:
        """Token after token, for all sequences together, each from the feature made before it."""
        drafted: list[list[int]] = [[] for _ in sequences]
        active = list(range(len(sequences)))
        made = torch.stack([self.made[sequence.row] for sequence in sequences])
        for index in range(max(counts)):
            if index:  # the pairs of the features made last and of the tokens drafted from them
                going_on = [at for at, b in enumerate(active) if counts[b] > index]
                active = [active[at] for at in going_on]
                chunks = [(drafted[b][-1:], sequences[b].computed + index - 1) for b in active]
                owned = [tables[sequences[b].row] for b in active]
                made = self.run(chunks, made[going_on], owned)
            logits = self.target.logits(self.draft.hidden(made))
            for b, token in zip(active, logits.argmax(dim=-1).tolist()):
                drafted[b].append(token)
        return [Draft(tokens) for tokens in drafted]

    @torch.inference_mode()
    def observe(self, ran: list[Ran], features: Tensor | None, tables: Tables) -> None:
        """Run the pairs that the target has made. features: [T, F]."""
        rows = [at for one in ran for at in range(one.row, one.row + one.count)]
        inputs = self.draft.features(features[rows])
        chunks = [
            (s.all_tokens[first + 1 : first + count + 1], first) for s, first, count, _ in ran
        ]
        made = self.run(chunks, inputs, [tables[one.sequence.row] for one in ran])
        for one, end in zip(ran, accumulate(one.count for one in ran)):
            self.made[one.sequence.row] = made[end - 1]

    def run(
        self, chunks: list[tuple[list[int], int]], inputs: Tensor, tables: list[list[int]]
    ) -> Tensor:
        """The layer over pairs of features and tokens. inputs: [T, hidden_size] -> the features that
        follow, [T, hidden_size].
        """
        batch = step_batch(self.pool, chunks, tables)
        attend = self.pool.attending(batch)

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(0, q, k, v)

        return self.draft(self.target.embed_tokens(batch.tokens), inputs, layer)

    def fork(self, parent: EngineSequence, child: EngineSequence) -> None:
        """Both go on from one feature, although the parent's first token is in it. This is a worse
        guess for the child's first draft, but never another token.
        """
        self.made[child.row] = self.made[parent.row]

    def forget(self, sequence: EngineSequence) -> None:
        """Drop its feature; its blocks are somebody else's now."""
        self.made.pop(sequence.row, None)
