"""The regime of each rung: a context, a batch or a length in which its idea pays, and what it gains
there.

A gain is measured where a benchmark recorded it: results/ is read, a GPU's records first. Where
nothing was recorded that speaks for a GPU, it is predicted for an H200 by the models of the
lessons, and marked so. No gain is written down here. A gain is a ratio of times, of bytes (lesson
2) or of requests at once (lesson 12), as its label says.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lessons.toolbox.draw.figure import size_number
from lessons.toolbox.measure.hardware import CHIPS
from lessons.toolbox.measure.records import medians, recorded

RESULTS = Path(__file__).parents[2] / "results"
CHIP = CHIPS["h200"]  # of the predictions
PROMPT = 8192  # tokens of a prompt whose scores are many
LONG_CONTEXT = 65536  # tokens of one sequence, too few heads for a GPU
SMALL_MODEL, LAUNCH_CONTEXT = "Llama-3.2-1B", 4096  # a step of it waits for launches
LONG_PROMPT, BUDGET = 32768, 2048  # tokens that arrive; tokens of a step
# one answer in PLACES is long, and the others wait for it in static waves; tokens
PLACES, JOB, LONG_ANSWER, SHORT_ANSWER, TASK = 8, 32, 128, 8, 32


@dataclass(frozen=True)
class Measured:
    """Seconds of `before` over seconds of `after`, at the largest x up to `at` that both have.

    record: a benchmark, "lNN_name". label: where {x} stands for that x. before, after: a series, or
    a role, which means its first series that was measured. gpu_only: a CPU's record does not count,
    because PyTorch stands in there.
    """

    record: str
    at: int
    label: str
    before: str = "naive"
    after: str = "optimized"
    gpu_only: bool = False

    def regime(self, results: Path) -> dict | None:
        """What regime_of returns, from the records under `results`."""
        try:
            found = recorded(results, self.record[1:3], self.record)
        except ValueError:  # a file that is no record
            return None
        for record in sorted(found, key=lambda record: record["device_type"] == "cpu"):
            before, after = seconds_of(record, self.before), seconds_of(record, self.after)
            common = [x for x in before if x in after and x <= self.at]
            if not common or (self.gpu_only and record["device_type"] == "cpu"):
                continue
            x = max(common)
            return {
                "label": self.label.format(x=size_number(x)),
                "gain": round(before[x] / after[x], 3),
                "measured": True,
                "device": short_name(record),
                "source": f"{self.record}: {self.before} / {self.after} at {x}",
            }
        return None


@dataclass(frozen=True)
class Predicted:
    """What a lesson's model says of an H200, or counts on any device. source: the module of the
    model.
    """

    label: str
    gain: Callable[[], float]
    source: str
    device: str = CHIP.name

    def regime(self, results: Path) -> dict | None:
        """What regime_of returns. `results` does not matter to a prediction."""
        try:
            gain = self.gain()
        except ImportError:  # a lesson without that model
            return None
        return {
            "label": self.label,
            "gain": round(gain, 3),
            "measured": False,
            "device": self.device,
            "source": self.source,
        }


def seconds_of(record: dict, series: str) -> dict[int, float]:
    """{x: median seconds} of a series, or of the first measured one of a role; {} if none was."""
    if series not in record["series"]:
        return medians(record, series)
    points = record["series"][series]["points"]
    return {point["x"]: point["median_s"] for point in points if point["status"] == "ok"}


def short_name(record: dict) -> str:
    """What a figure calls the device of a record: "CPU", or the GPU's name."""
    if record["device_type"] == "cpu":
        return "CPU"
    return record["fingerprint"]["device"].removeprefix("NVIDIA ")


# ---------------------------------------------------------------- the predictions
# The imports stand inside, so that one lesson's model is not needed for another's.


def score_bytes_gain() -> float:
    """Bytes of scores over a prompt, pass by pass and with the fused softmax, for a layer of
    Llama-3-8B.
    """
    from lessons.l01_roofline.planner.models import find_model
    from lessons.l02_naive_attention.lab.traffic import versions
    from lessons.toolbox.measure.passes import total_bytes

    model = find_model("llama-3-8b")
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    passes = versions(PROMPT, heads, kv_heads, model.head_dim)
    return total_bytes(passes["naive.attention"]) / total_bytes(passes["optimized.attention"])


def launches_gain() -> float:
    """Seconds of a decode step of a small model, eager and with fused layers."""
    from lessons.l07_kernel_fusion.lab import launches

    def step_s(launches_of) -> float:
        passes = launches_of(launches.MODELS[SMALL_MODEL], LAUNCH_CONTEXT)
        spans = launches.schedule(passes, launches.LAUNCH_S, CHIP.memory_bytes_per_s)
        return spans[-1].end_s

    return step_s(launches.eager_launches) / step_s(launches.fused_launches)


def splits_gain() -> float:
    """Seconds of a layer's decode attention for one long sequence, unsplit and split."""
    from lessons.l10_flash_decoding.lab.occupancy import Decode, predicted_s

    work = Decode(LONG_CONTEXT)
    return predicted_s(work, num_splits=1, chip=CHIP) / predicted_s(work, chip=CHIP)


def graph_gain() -> float:
    """Microseconds of a decode step of models/tiny with fused layers, launched one by one and as a
    graph.
    """
    from lessons.l11_cuda_graphs.lab import pictures, timeline

    graph = timeline.recorded_step(
        pictures.TINY, pictures.BATCH, pictures.CONTEXT, twin=timeline.with_fused_kernels
    )
    cost = timeline.LaunchCost(bytes_per_s=CHIP.memory_bytes_per_s)
    eager = timeline.eager_spans(graph.launches, cost)
    return eager[-1].end / timeline.graph_spans(graph.launches, cost)[-1].end


def requests_gain() -> float:
    """How many more chats run at once in the same memory: in blocks as they grow, and reserved for
    the longest answer.
    """
    from lessons.l12_paged_kv.lab.workload import (
        SHAREGPT,
        longest,
        simulate_blocks,
        simulate_pieces,
    )

    return simulate_blocks(SHAREGPT).at_once / simulate_pieces(SHAREGPT, longest).at_once


def mix_gain() -> float:
    """Seconds of a job in static waves and with continuous batching, for Llama-3-8B."""
    from lessons.l14_continuous_batching.lab.cost import predicted
    from lessons.l14_continuous_batching.lab.occupancy import simulate
    from lessons.l14_continuous_batching.lab.workload import all_at_once

    answers = [SHORT_ANSWER if i % PLACES else LONG_ANSWER for i in range(JOB)]
    trace, cost = all_at_once(answers, TASK), predicted()
    logs = [simulate(way, trace, PLACES, cost) for way in ("static", "continuous")]
    return logs[0].makespan_s / logs[1].makespan_s


def chunks_gain() -> float:
    """The longest that eight requests wait for a token while a long prompt arrives: prompts first,
    and in chunks, for Llama-3-8B.
    """
    from lessons.l15_chunked_prefill.lab import experiments as lab
    from lessons.l15_chunked_prefill.lab.costs import StepCost

    trace, cost, others = lab.long_prompt_trace(), StepCost(chip=CHIP), range(lab.LONG_ROW)
    first = lab.simulate(trace, lab.PrefillFirstScheduler, lab.WHOLE, cost)
    chunked = lab.simulate(trace, lab.ChunkedScheduler, BUDGET, cost)
    return max(lab.gaps_s(first, others)) / max(lab.gaps_s(chunked, others))


def drafts_gain() -> float:
    """Seconds of one request token by token, and with 4 drafted tokens a pass that cost nothing and
    of which each stays with probability 0.8: a pass reads the weights once, however few its tokens.
    """
    from lessons.l16_speculative_sampling.more.speed import speedup

    return speedup(alpha=0.8, count=4, cost_ratio=0.0)


# ---------------------------------------------------------------- the table

# (lesson, rung): the candidates, of which the first that is known counts. The first rung, the naive
# side of a lesson and the engine, which is all of them, have none.
REGIMES: dict[tuple[str, str], tuple[Measured | Predicted, ...]] = {
    ("02", "no cache, fused softmax"): (
        Measured("l02_softmax", PROMPT, "prompt of {x}", after="one pass: Triton kernel"),
        Predicted(
            f"prompt of {size_number(PROMPT)}, bytes",
            score_bytes_gain,
            "lessons.l02_naive_attention.lab.traffic",
        ),
    ),
    ("03", "KV cache, concatenated"): (
        Measured("l03_decode_step", 2048, "context {x}", "recompute", "concatenate"),
    ),
    ("03", "KV cache, preallocated"): (
        Measured("l03_decode_step", 4096, "context {x}", "concatenate", "preallocated"),
    ),
    ("04", "rotated on the way into the cache"): (
        Measured("l04_rope_cache", 16384, "{x} new tokens"),
    ),
    ("05", "KV heads read in groups"): (Measured("l05_kv_heads", 8, "{x} KV heads of 32"),),
    ("06", "latents, absorbed"): (Measured("l06_decode_step", 4096, "context {x}"),),
    ("07", "fused layers"): (
        Measured("l07_decode_step", 2048, "hidden size {x}", gpu_only=True),
        Predicted(
            f"{SMALL_MODEL}, batch 1",
            launches_gain,
            "lessons.l07_kernel_fusion.lab.launches",
        ),
    ),
    ("09", "prompts by FlashAttention"): (Measured("l09_causal_gqa", PROMPT, "prompt of {x}"),),
    ("10", "steps in splits"): (
        Measured("l10_context", LONG_CONTEXT, "context {x}, batch 1", gpu_only=True),
        Predicted(
            f"context {size_number(LONG_CONTEXT)}, batch 1",
            splits_gain,
            "lessons.l10_flash_decoding.lab.occupancy",
        ),
    ),
    ("11", "32 requests in lockstep"): (Measured("l11_lockstep", 32, "{x} sequences"),),
    ("11", "in lockstep, CUDA graphs"): (
        Measured("l11_width", 512, "hidden size {x}", "eager", "graph", gpu_only=True),
        Predicted("models/tiny, batch 1", graph_gain, "lessons.l11_cuda_graphs.lab.timeline"),
    ),
    # Counted, not timed: more requests at once is what blocks are for.
    ("12", "paged cache"): (
        Predicted(
            "chats in one memory", requests_gain, "lessons.l12_paged_kv.lab.workload", "any device"
        ),
    ),
    ("13", "prefix cache"): (
        Measured("l13_first_token", 1024, "TTFT, {x} known", "full prefill", "radix tree"),
    ),
    ("14", "continuous batching"): (
        Measured("l14_mix", LONG_ANSWER, f"{{x}} tokens in 1 of {PLACES}", "static, padded"),
        Predicted(
            f"{LONG_ANSWER} tokens in 1 of {PLACES}",
            mix_gain,
            "lessons.l14_continuous_batching.lab.occupancy",
        ),
    ),
    ("15", "chunked prefill"): (
        Measured("l15_worst_gap", PROMPT, "worst ITL, {x} prompt"),
        Predicted(
            f"worst ITL, {size_number(LONG_PROMPT)} prompt",
            chunks_gain,
            "lessons.l15_chunked_prefill.lab.experiments",
        ),
    ),
    ("16", "n-grams, verified"): (
        Measured("l16_batch", 1, "batch {x}, code", "one token a pass", "n-grams, K = 4"),
        Predicted(
            "batch 1, 4 of 5 stay",
            drafts_gain,
            "lessons.l16_speculative_sampling.more.speed",
        ),
    ),
}


def regime_of(lesson: str, name: str, results: Path = RESULTS) -> dict | None:
    """{"label", "gain", "measured", "device", "source"} of a rung; None if it has no regime or
    nothing is known of it.
    """
    for candidate in REGIMES.get((lesson, name), ()):
        found = candidate.regime(results)
        if found is not None:
            return found
    return None
