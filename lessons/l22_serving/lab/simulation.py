"""The server on a virtual clock: requests arrive, are let in or not, are dropped when it is too
late, and give up; nothing sleeps, and a run repeats.

Read `simulate`. The engine, the admission and the order of users are the lesson's own, as the
thread of optimized.py drives them. Only the clock is a number that a formula for the time of a step
moves.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lessons.l14_continuous_batching.clock import CostExecutor, VirtualClock
from lessons.l14_continuous_batching.sequence import Step
from lessons.l15_chunked_prefill.lab.costs import StepCost
from lessons.l15_chunked_prefill.preemption import by_arrival
from lessons.l22_serving.admission import AdmissionControl, Limits, Overloaded, ServiceRate
from lessons.l22_serving.engine import BLOCK_SIZE, LessonEngine, new_engine
from lessons.l22_serving.load import Served

LLAMA_ON_H100 = StepCost()
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 64, 2048


class Call(NamedTuple):
    """A request of the load. output_len: its answer's tokens, which no scheduler knows; max_tokens:
    what it asks for at most, None: output_len. timeout_s: after which the server drops it.
    patience_s: after which its client hangs up.
    """

    arrival_s: float
    prompt_len: int
    output_len: int
    user: str = ""
    max_tokens: int | None = None
    timeout_s: float | None = None
    patience_s: float | None = None


@dataclass
class Here:
    """A call that was let in."""

    call: Call
    token_s: list[float] = field(default_factory=list)


class Simulation:
    """A server over a LessonEngine whose steps take cost(step) seconds."""

    def __init__(
        self,
        order: Callable = by_arrival,
        limits: Limits | None = None,
        cost: Callable[[Step], float] = LLAMA_ON_H100,
        max_num_seqs: int = MAX_NUM_SEQS,
        num_blocks: int | None = None,
    ):
        self.clock = VirtualClock()
        if num_blocks is None:
            num_blocks = LLAMA_ON_H100.kv_blocks(BLOCK_SIZE)
        self.engine: LessonEngine = new_engine(
            lambda blocks: CostExecutor(self.clock, cost),
            num_blocks,
            order,
            max_num_seqs,
            MAX_NUM_BATCHED_TOKENS,
        )
        self.rate = ServiceRate()
        self.admission = AdmissionControl(limits or Limits(), self.rate, self.engine.queue)
        self.here: dict[str, Here] = {}
        self.history: dict[int, Served] = {}
        self.wasted_tokens = 0  # computed for requests that got no whole answer

    def arrive(self, index: int, call: Call) -> None:
        """Let a call in, or turn it away."""
        max_tokens = call.max_tokens or call.output_len
        try:
            self.admission.admit(call.user, call.prompt_len, max_tokens, call.timeout_s)
        except Overloaded:
            # told at the arrival itself, although a step was running then
            self.end(index, Here(call), call.arrival_s, "refused")
            return
        prompt = [1] * call.prompt_len
        self.engine.add_request(str(index), prompt, max_tokens, call.user, call.output_len)
        self.here[str(index)] = Here(call)

    def drop(self) -> None:
        """Those whose time is over, on the server's clock or on their client's."""
        now = self.clock()
        for request_id, one in list(self.here.items()):
            call, sequence = one.call, self.engine.sequences[request_id]
            age_s = now - call.arrival_s
            left_s = 0.0
            if not sequence.was_scheduled:
                left_s = self.rate.service_s(call.prompt_len, sequence.max_new_tokens)
            if call.timeout_s is not None and age_s + left_s > call.timeout_s:
                why, end_s = "late", now
            elif call.patience_s is not None and age_s > call.patience_s:
                why, end_s = "left", call.arrival_s + call.patience_s
            else:
                continue
            self.wasted_tokens += sequence.computed
            self.engine.abort_request(request_id)
            self.end(int(request_id), self.here.pop(request_id), end_s, why)

    def step(self) -> None:
        """One step of the engine, and what its readers see of it."""
        begin_s = self.clock()
        outputs = self.engine.step()
        now = self.clock()
        self.rate.ran(self.engine.last_step.num_tokens, now - begin_s)
        for output in outputs:
            one = self.here[output.request_id]
            one.token_s.append(now)
            if output.finished:
                self.rate.answered(len(output.tokens))
                self.end(int(output.request_id), self.here.pop(output.request_id), now, "")

    def end(self, index: int, one: Here, end_s: float, why_not: str) -> None:
        """Note what became of a call."""
        call = one.call
        self.history[index] = Served(
            call.arrival_s, end_s, tuple(one.token_s), call.prompt_len, call.user, why_not
        )


def simulate(calls: Iterable[Call], **how) -> tuple[list[Served], Simulation]:
    """Serve calls, in the order of arrival, to the end. how: Simulation's arguments."""
    server = Simulation(**how)
    coming = deque(enumerate(calls))
    while coming or server.here:
        while coming and coming[0][1].arrival_s <= server.clock():
            server.arrive(*coming.popleft())
        server.drop()
        if server.here:
            server.step()
        elif coming:
            server.clock.now_s = max(server.clock(), coming[0][1].arrival_s)
    return [server.history[index] for index in sorted(server.history)], server


def of_user(history: Sequence[Served], user: str) -> list[Served]:
    """One user's requests."""
    return [served for served in history if served.user == user]
