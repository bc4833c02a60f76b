"""One budget of tokens for every step: running requests decode first, prompts fill up the rest in
chunks. So no prompt, however long, makes a running request wait for longer than one full step.

Read `schedule` beside naive.py's. Blocks and preemption are in preemption.py, this lesson's rung of
the ladder in generate.py.

Source: Agrawal et al. 2024, Sarathi-Serve, section 4.
"""

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.l15_chunked_prefill.preemption import PreemptiveScheduler


class ChunkedScheduler(PreemptiveScheduler):
    """Decides what runs in each step, and which request owns which block.

    enable_chunked_prefill: False lets a prompt run only as a whole, in what the decodes leave of
    the budget. Other arguments: PreemptiveScheduler.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *arguments,
        enable_chunked_prefill: bool = True,
        **named_arguments,
    ):
        super().__init__(blocks, *arguments, **named_arguments)
        self.enable_chunked_prefill = enable_chunked_prefill

    def add(self, sequence: Sequence) -> None:
        """As in preemption.py; also ValueError for a prompt that must run whole and cannot."""
        if not self.enable_chunked_prefill:
            self.refuse_longer_than_a_step(sequence)
        super().add(sequence)

    def schedule(self) -> Step:
        """What runs next; nothing if no request is here."""
        step, waited = Step([], []), len(self.waiting)
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        for sequence in decoding:
            if sequence in self.running:  # it may have been preempted meanwhile
                self.run(sequence, 1, step)
        # Then prompts that have begun. A token at least is left for the first of them, because the
        # budget has one for each place.
        for sequence in [s for s in self.running if not s.is_decoding]:
            if sequence in self.running and (room := self.room(step)):
                self.run(sequence, room, step)
        if len(self.waiting) > waited:
            return step  # because blocks that were taken back are for those who lacked them
        while self.waiting and self.fits(self.waiting[0], step):
            if not self.admit(self.waiting[0], self.room(step), step):
                break
        return step

    def fits(self, sequence: Sequence, step: Step) -> bool:
        """Whether the step has room for what the sequence may run in one."""
        least = 1 if self.enable_chunked_prefill else sequence.to_compute
        return least <= self.room(step)
