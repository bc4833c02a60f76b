"""The number of drafts chosen by load and by acceptance: `"enable_adaptive_verification": True`.

With b sequences that decode, K drafted tokens each, and a_i the share of tokens at position i that
stay if all before them stayed, a step is expected to give each sequence

    E(K) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_K   tokens, in   s(b, K)   seconds

Both are measured while the engine runs, and `best` takes the K with the largest E(K) / s(b, K). 0
is one of them. A K that is never run is never measured, so now and then its neighbour is run
instead: a probe. What a probe loses is paid from a purse, into which each step puts SHARE of its
time, so all probes together cost no more than that.

K depends on tokens whose fate is decided, never on those that are drafted now, so no distribution
changes. It does depend on who else is there. So seeded requests whose drafts are drawn get tokens
of the same distribution, but not the same tokens in any batch; all others get the same tokens.

vLLM has the same aim under the same name: its budget is split among sequences by how sure the
drafter is of each token, and its costs are measured before the first request.
"""

import time
from collections.abc import Callable, Iterable

from lessons.l14_continuous_batching.sequence import Step
from reference.engine.model_runner import ModelRunner
from reference.engine.request import EngineSequence
from reference.speculation.batch_schedule import BySchedule, Chooser
from reference.speculation.estimates import Acceptance, StepCosts
from reference.speculation.lookahead import LookaheadScheduler
from reference.speculation.speculation import Speculation
from reference.speculation.speculative_config import SpeculativeConfig

SHARE = 0.01  # of the time, which probes may lose
PURSE = 4  # steps' time that is in the purse at most, and at the beginning


class ByLoad:
    """A Chooser that learns. most: num_speculative_tokens. costs: as StepCosts. clock: seconds."""

    def __init__(self, most: int, costs=None, clock: Callable[[], float] = time.perf_counter):
        self.most = most
        self.acceptance = Acceptance(most)
        self.costs = StepCosts() if costs is None else costs
        self.clock = clock
        self.purse_s: float | None = None  # None until a step has been measured
        self.steps = 0
        self.ran_at: dict[tuple[int, int], int] = {}  # (batch, K) -> when, in steps
        self.began_s = 0.0
        self.count, self.is_probe = 0, False  # of the step under way

    def rate(self, batch: int, count: int) -> float:
        """Tokens a second of each sequence, as expected; infinite where no time is known."""
        seconds = self.costs.seconds(batch, count)
        return self.acceptance.tokens(count) / seconds if seconds > 0 else float("inf")

    def best(self, batch: int) -> int:
        """The K with the highest rate; the smallest of several."""
        return max(range(self.most + 1), key=lambda count: self.rate(batch, count))

    def loss_s(self, batch: int, count: int, seconds: float) -> float:
        """How much later the tokens of a step with K = `count` come than with the best K."""
        fair = self.acceptance.tokens(count) / self.rate(batch, self.best(batch))
        return max(0.0, seconds - fair)

    def probe(self, batch: int, best: int) -> int | None:
        """The K to try in place of the best, if the purse pays for it; None: none."""
        if not self.purse_s or self.purse_s < 0:
            return None
        # The neighbours, because each further token stays less often and costs no less: so the
        # rates rise up to the best K, and fall from there.
        near = [count for count in (best - 1, best + 1) if 0 <= count <= self.most]
        count = min(near, key=lambda near_by: self.ran_at.get((batch, near_by), -1))
        price = self.loss_s(batch, count, self.costs.seconds(batch, count))
        return count if price <= self.purse_s else None

    def count_for(self, batch: int) -> int:
        """As in Chooser."""
        self.began_s = self.clock()
        self.count, self.is_probe = 0, False
        if batch:
            self.count = self.best(batch)
            if (other := self.probe(batch, self.count)) is not None:
                self.count, self.is_probe = other, True
        return self.count

    def note(
        self,
        batch: int,
        draft_s: float | None,
        pass_s: float,
        outcomes: Iterable[tuple[int, int]],
    ) -> None:
        """The step has run. draft_s, pass_s: of the drafter and of the rest; draft_s None: prompts
        ran in it, too, so its time says nothing. outcomes: (places, kept) of each sequence.
        """
        for places, kept in outcomes:
            self.acceptance.note(places, kept)
        seconds = self.costs.seconds(batch, self.count)
        self.steps += 1
        self.ran_at[batch, self.count] = self.steps
        if draft_s is not None:
            seconds = draft_s + pass_s
            self.costs.note(batch, self.count, draft_s, pass_s)
            purse = PURSE * seconds if self.purse_s is None else self.purse_s + SHARE * seconds
            self.purse_s = min(purse, PURSE * seconds)
        if self.is_probe:
            self.purse_s -= self.loss_s(batch, self.count, seconds)


def chooser_of(config: SpeculativeConfig) -> Chooser | None:
    """Who chooses the number of drafts; None: it is always the same."""
    if config.enable_adaptive_verification:
        return ByLoad(config.num_speculative_tokens)
    schedule = config.num_speculative_tokens_per_batch_size
    return None if schedule is None else BySchedule(schedule)


def speculation_over(runner: ModelRunner, scheduler: LookaheadScheduler) -> Speculation:
    """The part of the engine that drafts and verifies, and measures itself if its scheduler's
    chooser learns from that.
    """
    learns = isinstance(scheduler.chooser, ByLoad)
    return (MeasuredSpeculation if learns else Speculation)(runner, scheduler)


class MeasuredSpeculation(Speculation):
    """Tells a ByLoad what became of each step."""

    def __init__(self, runner: ModelRunner, scheduler: LookaheadScheduler):
        super().__init__(runner, scheduler)
        self.chooser: ByLoad = scheduler.chooser
        self.places: dict[EngineSequence, int] = {}

    def draft(self, step: Step) -> None:
        """As in Speculation."""
        decoding = [chunk.sequence for chunk in step.chunks if chunk.sequence.is_decoding]
        self.places = {sequence: sequence.num_drafted for sequence in decoding}
        begin_s = self.chooser.clock()
        super().draft(step)
        self.draft_s = self.chooser.clock() - begin_s

    def keep(self, step: Step) -> None:
        """As in Speculation."""
        is_plain = len(self.places) == len(step.chunks)
        super().keep(step)
        if not self.places:
            return
        pass_s = self.chooser.clock() - self.chooser.began_s - self.draft_s
        # Of an answer that has just ended it is not known how many would have stayed.
        outcomes = [
            (places, self.in_step.get(sequence.row, (0, 0))[1])
            for sequence, places in self.places.items()
            if not sequence.finished
        ]
        self.chooser.note(len(self.places), self.draft_s if is_plain else None, pass_s, outcomes)
