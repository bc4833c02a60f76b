"""How long prompts that arrive stop those who decode: the curve of chunk size against the gaps
between tokens, and against how long the prompts themselves wait.

A step with a chunk costs what its decodes cost and what the chunk's tokens cost. So the largest gap
is about (decode step + chunk × time of a prompt's token), and a prompt takes prompt / chunk such
steps.
"""

import argparse
import asyncio
from itertools import pairwise
from statistics import median

from lessons.l22_serving.load import Served, percentile

PROMPT, EVERY_S, BURSTS, DECODES, ANSWER = 1024, 0.5, 8, 8, 400
CHUNKS = (16, 32, 64, 128)
WHOLE = "whole prompts"
MOST = 3.0  # times the gap of undisturbed decodes that the 99th percentile may take


def measure_curve(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """For each chunk size, and for prompts in one piece, what gaps_under_bursts tells."""
    found = {f"chunks of {chunk}": asyncio.run(measure(args, chunk)) for chunk in CHUNKS}
    return found | {WHOLE: asyncio.run(measure(args, None))}


async def measure(args: argparse.Namespace, chunk: int | None) -> dict[str, float]:
    """Eight requests decode, and every half second a long prompt comes. chunk: tokens of it in a
    step beside all decodes; None: all of it.
    """
    from reference.bench import bench_data
    from reference.bench.bench_load import BenchRequest, InProcess, Stream, run_load
    from reference.engine.async_engine import AsyncEngineArgs
    from reference.engine.model import load_tokenizer
    from reference.engine.process.client import AsyncProcessEngine

    tokenizer = load_tokenizer(args.model)
    budget = {} if chunk is None else dict(max_num_batched_tokens=chunk + DECODES)
    wishes = dict(model=args.model, max_num_seqs=2 * DECODES, enable_prefix_caching=False)
    engine = AsyncProcessEngine(AsyncEngineArgs.read(**wishes, **budget))
    decodes = bench_data.random_requests(DECODES, 1, tokenizer, 16, ANSWER)
    prompts = bench_data.random_requests(BURSTS, 2, tokenizer, PROMPT, 1)
    arrivals = [0.0] * DECODES + [EVERY_S * (1 + index) for index in range(BURSTS)]
    backend = InProcess(engine, ignore_eos=True)
    try:
        for warm in (BenchRequest([1] * 8, 8, 4), prompts[0]):
            await backend.send(warm, Stream())
        run = await run_load([*decodes, *prompts], arrivals, backend)
    finally:
        engine.shutdown()
    return gaps_under_bursts(run.history[:DECODES], run.history[DECODES:])


def gaps_under_bursts(decodes: list[Served], prompts: list[Served]) -> dict[str, float]:
    """Seconds between two tokens of those who decode: quiet_itl_s, the median before the first
    prompt came; median_itl_s and p99_itl_s, from then until the last prompt had its token. The
    other two divide p99. burst_ttft_s: the median of the prompts' own waits.
    """
    begin, end = prompts[0].arrival_s, max(one.token_s[0] for one in prompts)
    gaps = [pair for one in decodes for pair in pairwise(one.token_s)]
    quiet = median(after - before for before, after in gaps if after <= begin)
    under = [after - before for before, after in gaps if after > begin and before < end]
    p99 = percentile(under, 99)
    return {
        "quiet_itl_s": quiet,
        "median_itl_s": median(under),
        "p99_itl_s": p99,
        "p99_over_median": p99 / median(under),
        "p99_over_quiet": p99 / quiet,
        "burst_ttft_s": median(one.ttft_s for one in prompts),
    }


def largest_chunk(curve: dict[str, dict[str, float]], most: float = MOST) -> int | None:
    """The largest chunk whose 99th percentile is at most `most` quiet gaps; None: no chunk's is."""
    fitting = [
        chunk
        for chunk in CHUNKS
        if f"chunks of {chunk}" in curve and curve[f"chunks of {chunk}"]["p99_over_quiet"] <= most
    ]
    return max(fitting, default=None)


def lines_of(curve: dict[str, dict[str, float]]) -> list[str]:
    """The curve as a table."""
    return [
        f"{name:<26} {1e3 * found['median_itl_s']:8.2f} ms between tokens, 99th percentile "
        f"{found['p99_over_median']:.1f} times that and {found['p99_over_quiet']:.1f} times a "
        f"quiet gap; a prompt's first token after {found['burst_ttft_s']:.2f} s"
        for name, found in curve.items()
    ]
