"""After a rejected draft: the state of the last token that stays.

K and V of a rejected token are written over by the next one. A state has the token in it. Three
ways to have the right state after a step of K drafted tokens, S bytes a state:

    a state at each token   K + 2 slots a sequence      reads S, writes (K + 1) S
    copy, run again         2 slots                     copy 2 S, step 2 S; the tokens that stay run
                                                        through the whole model again
    copy, repeat the rule   2 slots, and what the       copy 2 S, step 2 S, after a rejection
                            layers were given           2 S for the tokens that stay, in the state
                                                        layers alone

This is the third. What a state layer was given for a token, q, k, v and two numbers a head, is kept
for one step: 16 KB of a layer of Qwen3-Next, whose state has 2.1 MB. Where no token is rejected
nothing is done again. Where one is, the two slots change places, and `StatePool.attend` runs once
more on what stays.

Source of the first way: vLLM, gdn_attn.py; of the third: vLLM, use_replayssm.
"""

import torch

from lessons.l14_continuous_batching.sequence import Sequence
from reference.features.states.layers import new_state_step
from reference.features.states.pool import HybridPool
from reference.features.states.slots import SlotBlocks


class DraftedStates:
    """What Speculation asks of a model with states, before a pass and after it."""

    def __init__(self, pool: HybridPool, blocks: SlotBlocks):
        self.pool, self.blocks = pool, blocks

    def set_aside(self, sequences: list[Sequence]) -> None:
        """Copy the states of sequences that are about to run a draft."""
        for sequence in sequences:
            self.blocks.set_aside(sequence.row)

    @torch.inference_mode()
    def restore(self, outcomes: list[tuple[Sequence, int, int]]) -> None:
        """The states after the tokens that stay. outcomes: of each sequence with a draft, in the
        order of the step, how many tokens have run, and how many of them stay.
        """
        rows, lengths, held, slots, start = [], [], [], [], 0
        for sequence, ran, stay in outcomes:
            self.blocks.settle(sequence.row, goes_back=stay < ran)
            if stay < ran:
                rows += range(start, start + stay)
                lengths.append(stay)
                held.append(sequence.computed)
                slots.append(self.blocks.tables[sequence.row].slot)
            start += ran
        if rows:
            device = self.pool.k_slots.device
            step = new_state_step(lengths, held, slots, device)
            self.pool.states.repeat(torch.tensor(rows, device=device), step)
        self.pool.states.given.clear()
