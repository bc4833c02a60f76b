"""One step ahead: step n + 1 is scheduled and launched while the device runs step n.

Read `step` beside naive.py's. The scheduler is lesson 15's, unchanged: it counts a placeholder as a
token. The device puts the value into the next pass, because it has it before the host does.

Sources: Zhu et al. 2024, NanoFlow (scheduling beside the GPU); vLLM's pull request
19970 (placeholders).
"""

from lessons.l02_naive_attention.request import OnToken
from lessons.l14_continuous_batching.loop import Scheduler
from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.l25_one_step_ahead.device import PLACEHOLDER, Device, Pass


class OneStepAhead:
    """The loop that schedules before it knows the last tokens.

    running: the pass that the device runs. Each of its sequences ends with a placeholder.
    """

    def __init__(self, scheduler: Scheduler, device: Device, on_token: OnToken | None = None):
        self.scheduler, self.device = scheduler, device
        self.on_token = on_token or (lambda row, token: None)
        self.running: Pass | None = None

    @property
    def is_idle(self) -> bool:
        return self.running is None and self.scheduler.is_idle

    def abort(self, sequence: Sequence) -> None:
        """Forget a request between two steps, or while tokens are told."""
        self.scheduler.abort(sequence)
        if awaits_token(sequence):
            replace_placeholder(sequence, [])

    def step(self) -> None:
        """Schedule and launch the next step; then tell the tokens of the one before it."""
        step = self.scheduler.schedule()
        ahead = self.device.launch(step, self.running) if step.chunks else None
        self.tell()
        if ahead is not None:
            self.sample(step, ahead)
        self.running = ahead

    def tell(self) -> None:
        """Wait for the pass that was running, and put its tokens in place of the placeholders."""
        if self.running is None:
            return
        tokens = self.device.read(self.running)
        for sequence, token in zip(self.running.sequences, tokens):
            if not awaits_token(sequence):
                continue  # aborted since it was sampled
            replace_placeholder(sequence, [token])
            # Preempted by the step that was scheduled meanwhile, so it waits to be computed again.
            if sequence.finished and sequence in self.scheduler.waiting:
                self.scheduler.abort(sequence)
            self.on_token(sequence.row, token)
        self.scheduler.leave()  # a stop token has ended them, one step late

    def sample(self, step: Step, ahead: Pass) -> None:
        """Draw from the new pass for the sequences that are still here, and hold their places.

        All tokens before it are known now, so penalties and masks are made here, during the pass.
        """
        here = set(self.scheduler.running)
        wanted = [sequence for sequence in self.scheduler.finish(step) if sequence in here]
        self.device.sample(ahead, wanted)
        for sequence in wanted:
            sequence.append(PLACEHOLDER)
        self.scheduler.leave()  # a limit ends them, which needs no token to be known


def awaits_token(sequence: Sequence) -> bool:
    """Whether its newest token is sampled, and not yet known."""
    return sequence.output[-1:] == [PLACEHOLDER]


def replace_placeholder(sequence: Sequence, by: list[int]) -> None:
    """Put the token in the placeholder's place, or nothing. by: one token, or none."""
    lists = [sequence.output, sequence.all_tokens]
    # What a prefix cache is told may be a list of its own.
    if sequence.names is not None:
        lists.append(sequence.names)
    for tokens in lists:
        tokens[-1:] = by
