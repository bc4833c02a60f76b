"""The lesson's experiments on a virtual clock: one long prompt among decodes, the budget as a trade
of first tokens against next tokens, and two pools of GPUs.

Each returns a Log of lesson 14's `serve`. costs.py says what a step takes.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import NamedTuple

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.clock import (
    Arrival,
    CostExecutor,
    Log,
    VirtualClock,
    serve,
)
from lessons.l14_continuous_batching.lab.workload import draw, new_trace, poisson, uniform
from lessons.l15_chunked_prefill.lab.costs import LINKS_BYTES_PER_S, StepCost
from lessons.l15_chunked_prefill.naive import PrefillFirstScheduler
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l15_chunked_prefill.preemption import PreemptiveScheduler

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
LONG_PROMPT, LONG_AT_S, LONG_ROW = 32768, 0.3, 8
BUDGETS = (512, 1024, 2048, 4096, 8192)
WHOLE = 65536  # a budget that takes any prompt of these experiments whole
LLAMA_ON_H100 = StepCost()


def simulate(
    trace: Sequence[Arrival],
    kind: type[PreemptiveScheduler],
    max_num_batched_tokens: int,
    cost: StepCost = LLAMA_ON_H100,
) -> Log:
    """Serve a trace with a scheduler of this kind, on the blocks that the chip has."""
    clock, blocks = VirtualClock(), BlockManager(cost.kv_blocks(BLOCK_SIZE), BLOCK_SIZE)
    scheduler = kind(
        blocks, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=max_num_batched_tokens
    )
    return serve(scheduler, trace, CostExecutor(clock, cost), clock)


def gaps_s(log: Log, rows: Sequence[int] | None = None) -> list[float]:
    """All inter-token latencies: from each token of an answer to its next."""
    rows = sorted(log.token_s) if rows is None else rows
    return [after - before for row in rows for before, after in pairwise(log.token_s[row])]


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which `percent` percent of the values are."""
    return quantiles(values, n=100, method="inclusive")[percent - 1]


# ---------------------------------------------------------------- one long prompt


def long_prompt_trace(outputs: int = 120) -> list[Arrival]:
    """Eight short requests from the beginning, and one of 32k tokens while they decode."""
    short = [Arrival(0.0, [1] * 512, outputs)] * LONG_ROW
    return [*short, Arrival(LONG_AT_S, [1] * LONG_PROMPT, 4)]


def long_prompt(max_num_batched_tokens: int | None) -> Log:
    """The eight and the long one. None: prompts first, whole."""
    if max_num_batched_tokens is None:
        return simulate(long_prompt_trace(), PrefillFirstScheduler, WHOLE)
    return simulate(long_prompt_trace(), ChunkedScheduler, max_num_batched_tokens)


def long_prompt_steps(log: Log) -> int:
    """In how many steps the long prompt ran, until its first token."""
    first_s = log.token_s[LONG_ROW][0]
    return sum(LONG_ROW in one.rows and one.end_s <= first_s for one in log.passes)


def long_ttft_s(log: Log) -> float:
    """From the arrival of the long prompt to its first token."""
    return log.ttfts_s()[LONG_ROW]


# ---------------------------------------------------------------- many requests


def mixed_trace(rate_per_s: float = 6.0, count: int = 120, seed: int = 15) -> list[Arrival]:
    """Prompts of 256 to 4096 tokens and answers of 200, coming at random."""
    prompts = draw(uniform(256, 4096), count, seed)
    return new_trace(poisson(rate_per_s, count, seed), prompts, [200] * count)


def trade_off(budgets: Sequence[int] = BUDGETS) -> list[tuple[int, float, float]]:
    """(budget, median TTFT in seconds, 99th percentile of the inter-token latency in seconds)."""
    logs = {budget: simulate(mixed_trace(), ChunkedScheduler, budget) for budget in budgets}
    return [(budget, *summary(log)) for budget, log in logs.items()]


def summary(log: Log) -> tuple[float, float]:
    """(median TTFT, 99th percentile of the inter-token latency), seconds."""
    return median(log.ttfts_s()), percentile(gaps_s(log), 99)


# ---------------------------------------------------------------- two pools


class ReceivingScheduler(ChunkedScheduler):
    """Gets requests whose prompts another GPU has computed: only the newest token has to run."""

    def add(self, sequence):
        super().add(sequence)
        sequence.computed = len(sequence.prompt) - 1

    def take_blocks(self, sequence):
        """A request that has to wait for blocks loses nothing: its K and V wait where they are."""
        computed = sequence.computed
        if super().take_blocks(sequence):
            return True
        sequence.computed = computed
        return False


class TwoPools(NamedTuple):
    """Seconds: median TTFT, 99th percentile of the inter-token latency, and the median wait for the
    second token, which holds the journey of K and V where the pools are apart.
    """

    ttft_s: float
    gap_s: float
    second_token_s: float


def apart(
    trace: Sequence[Arrival], link_bytes_per_s: float, cost: StepCost = LLAMA_ON_H100
) -> TwoPools:
    """One GPU runs prompts, one decodes, and K and V travel between them."""
    prompts = [arrival._replace(output_len=1) for arrival in trace]
    prefilled = simulate(prompts, PrefillFirstScheduler, WHOLE, cost)
    there_s = {
        row: prefilled.left_s[row] + cost.transfer_s(len(arrival.prompt), link_bytes_per_s)
        for row, arrival in enumerate(trace)
    }
    order = sorted(there_s, key=there_s.get)
    handed = [
        Arrival(there_s[row], [*trace[row].prompt, 1], trace[row].output_len - 1) for row in order
    ]
    decoded = simulate(handed, ReceivingScheduler, WHOLE, cost)
    second = [decoded.token_s[index][0] - prefilled.left_s[row] for index, row in enumerate(order)]
    gaps = gaps_s(decoded) + second
    return TwoPools(median(prefilled.ttfts_s()), percentile(gaps, 99), median(second))


def together(trace: Sequence[Arrival]) -> TwoPools:
    """Two GPUs that both do both, every other request each."""
    logs = [simulate(trace[half::2], ChunkedScheduler, 2048) for half in (0, 1)]
    ttfts = [ttft for log in logs for ttft in log.ttfts_s()]
    gaps = [gap for log in logs for gap in gaps_s(log)]
    second = [times[1] - times[0] for log in logs for times in log.token_s.values()]
    return TwoPools(median(ttfts), percentile(gaps, 99), median(second))


def two_pools() -> dict[str, TwoPools]:
    """Two GPUs under twice the load of the trade-off: both chunked, or apart over some links."""
    trace = mixed_trace(rate_per_s=12.0, count=240)
    ways = {"together, chunks of 2048": together(trace)}
    for name, bytes_per_s in LINKS_BYTES_PER_S.items():
        ways[f"apart, {name}"] = apart(trace, bytes_per_s)
    return ways
