"""The numbers that the lesson's text quotes, each from a run of the schedulers.

python -m lessons.l14_continuous_batching.lab.figures
"""

from statistics import fmean, median, quantiles

from lessons.l14_continuous_batching.clock import Arrival, Log
from lessons.l14_continuous_batching.lab.cost import StepCost, predicted
from lessons.l14_continuous_batching.lab.occupancy import (
    gain,
    occupancy,
    offline,
    place_rows,
    simulate,
)
from lessons.l14_continuous_batching.lab.workload import (
    draw,
    geometric,
    new_trace,
    poisson,
    uniform,
)
from lessons.toolbox.draw.figure import ClassFigure
from lessons.toolbox.draw.plotting import class_plot

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
    """Seconds of one request at low load: no request before it, the next one an hour later."""
    trace = new_trace([0.0, 3600.0], [100, 100], [output_len, output_len])
    log = simulate(way, trace, PLACES, cost or predicted(), WINDOW_S)
    return log.left_s[0]


def draw_gain_by_places(long: int = 200, share_long: float = 0.05, short: int = 10) -> ClassFigure:
    """The gain's formula, E[max of B] / E[length], over B, where the share `share_long` of the
    answers has `long` tokens and the others `short`.
    """
    places = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    mean = share_long * long + (1 - share_long) * short
    longest = [long - (long - short) * (1 - share_long) ** count for count in places]
    found = [value / mean for value in longest]
    return class_plot(
        places,
        {"longest over mean": ("optimized", [(value,) * 3 for value in found])},
        floor=[float(min(count, max(long, short) / mean)) for count in places],
        floor_label="no more than B, or than the longest over the mean",
        better="higher",
        title=f"With {share_long:.0%} of the answers at {long} tokens and the others at {short}, "
        f"32 places gain {found[places.index(32)]:.1f}×",
        xlabel="places B",
        ylabel="gain in steps over static waves",
        caption="computed for many requests · gain = E[longest of B] / E[length]",
    )


def text_film(way: str, lengths: list[int], places: int) -> str:
    """Which request is where, a line a place and a letter a step; a dot is an idle place."""
    table = place_rows(offline(way, lengths, places), places)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return "\n".join(
        "".join("·" if row is None else letters[row % 26] for row in lane) for lane in table
    )


def main() -> None:
    cost = predicted()
    print(
        f"predicted: {cost.fixed_s * 1e3:.2f} ms + {cost.token_s * 1e6:.1f} µs + "
        f"{cost.context_s * 1e9:.0f} ns"
    )
    print(f"20 answers of U(50, 500) on 4 places: {job_gain():.2f}x, idle {idle_shares()}")
    for (way, load), numbers in offline_against_online().items():
        print(way, load, *(f"{value:.3g}" for value in numbers))
    for way in WAYS:
        print(way, f"alone: {lone_latency_s(way):.3g} s")


if __name__ == "__main__":
    main()
