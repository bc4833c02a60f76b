"""The numbers that the lesson's text quotes, each from a run of the schedulers.

python -m lessons.l14_continuous_batching.lab.figures
"""

from statistics import fmean, median, quantiles

from lessons.l14_continuous_batching.clock import Arrival, Log
from lessons.l14_continuous_batching.lab.cost import StepCost, predicted
from lessons.l14_continuous_batching.lab.occupancy import gain, occupancy, offline, simulate
from lessons.l14_continuous_batching.lab.workload import (
    draw,
    geometric,
    new_trace,
    poisson,
    uniform,
)

DRAWS = 40  # jobs over which a mean is taken
PLACES, REQUESTS, WINDOW_S = 32, 256, 0.5
PROMPT_LENS, OUTPUT_LENS = uniform(50, 500), geometric(100)
WAYS = ("static", "dynamic", "continuous")


def job_gain(lengths=None, requests: int = 20, places: int = 4) -> float:
    """Mean gain in steps of a job: 20 answers of 50 to 500 tokens on 4 places."""
    lengths = lengths or uniform(50, 500)
    return fmean(gain(draw(lengths, requests, seed), places) for seed in range(DRAWS))


def idle_shares(requests: int = 20, places: int = 4) -> tuple[float, float]:
    """Mean share of idle places of the same job: static, continuous."""
    lengths = [draw(uniform(50, 500), requests, seed) for seed in range(DRAWS)]
    static, continuous = (
        fmean(occupancy(offline(name, lens, places), places).idle_share for lens in lengths)
        for name in ("static", "continuous")
    )
    return static, continuous


def trace_at(rate_per_s: float | None) -> list[Arrival]:
    """The same requests, arriving by Poisson, or all at once for None."""
    prompts, outputs = draw(PROMPT_LENS, REQUESTS, 1), draw(OUTPUT_LENS, REQUESTS, 2)
    arrivals = [0.0] * REQUESTS if rate_per_s is None else poisson(rate_per_s, REQUESTS, 3)
    return new_trace(arrivals, prompts, outputs)


def summary(log: Log) -> tuple[float, float, float]:
    """(tokens/s, median latency in seconds, its 95th percentile)."""
    latencies = log.latencies_s()
    return log.tokens_per_s, median(latencies), quantiles(latencies, n=20)[-1]


def offline_against_online(
    cost: StepCost | None = None, loads=(None, 0.2, 0.8)
) -> dict[tuple[str, float | None], tuple[float, float, float]]:
    """{(way, load): summary}. load: a share of what continuous batching answers offline; None: an
    offline job. cost: by default the prediction for Llama-3-8B on an H200.
    """
    cost = cost or predicted()
    job = simulate("continuous", trace_at(None), PLACES, cost)
    full_rate = REQUESTS / job.makespan_s
    found = {}
    for load in loads:
        trace = trace_at(None if load is None else load * full_rate)
        for way in WAYS:
            found[way, load] = summary(simulate(way, trace, PLACES, cost, WINDOW_S))
    return found


def lone_latency_s(way: str, output_len: int = 100, cost: StepCost | None = None) -> float:
    """Seconds of one request at low load: nobody before it, the next one an hour later."""
    trace = new_trace([0.0, 3600.0], [100, 100], [output_len, output_len])
    log = simulate(way, trace, PLACES, cost or predicted(), WINDOW_S)
    return log.left_s[0]


def main() -> None:
    cost = predicted()
    print(f"predicted: {cost.a_s * 1e3:.2f} ms + {cost.b_s * 1e6:.1f} µs + {cost.c_s * 1e9:.0f} ns")
    print(f"20 answers of U(50, 500) on 4 places: {job_gain():.2f}x, idle {idle_shares()}")
    for (way, load), numbers in offline_against_online().items():
        print(way, load, *(f"{value:.3g}" for value in numbers))
    for way in WAYS:
        print(way, f"alone: {lone_latency_s(way):.3g} s")


if __name__ == "__main__":
    main()
