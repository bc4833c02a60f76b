"""Prompts first: a step is either whole prompts or decodes, never both.

Read `schedule`. While prompts run, every running request waits for its next token. A long prompt is
a pause for all, and a stream of prompts is a pause without end.

Source: the default of vLLM's first engine; Agrawal et al. 2024, Sarathi-Serve, section 3, measure
what it does to decodes ("prefill-prioritizing").
"""

from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.l15_chunked_prefill.preemption import PreemptiveScheduler


class PrefillFirstScheduler(PreemptiveScheduler):
    """Whole prompts as soon as they fit, decodes when no prompt does."""

    def add(self, sequence: Sequence) -> None:
        """As in preemption.py; also ValueError for a prompt that no step holds."""
        self.refuse_longer_than_a_step(sequence)
        super().add(sequence)

    def schedule(self) -> Step:
        """What runs next; nothing if no request is here."""
        step = Step([], [])
        while self.waiting and self.waiting[0].to_compute <= self.room(step):
            if not self.admit(self.waiting[0], self.room(step), step):
                break
        if step.chunks:
            return step  # because it holds prompts, and decodes wait
        for sequence in list(self.running):
            if sequence in self.running:  # it may have been preempted meanwhile
                self.run(sequence, 1, step)
        return step
