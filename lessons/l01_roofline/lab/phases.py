"""Prefill and decode of a real model, measured and drawn: what a token costs in each phase."""

from statistics import median, quantiles
from typing import NamedTuple

import torch
from rich.progress import track

from lessons.l01_roofline.planner.serving import serving_times
from lessons.toolbox.draw.figure import ClassFigure
from lessons.toolbox.draw.plotting import caption, class_plot

PREFILLS, NEW_TOKENS = 4, 9


class Phases(NamedTuple):
    """Milliseconds for each token, (median, p20, p80) at each length, and what was measured."""

    lengths: list[int]
    prefill: list[tuple]
    decode: list[tuple]
    dtype: str


def band(values: list[float]) -> tuple[float, float, float]:
    """Median, 20 % and 80 % quantile."""
    fifths = quantiles(values, n=5, method="inclusive")
    return median(values), fifths[0], fifths[3]


def measure_phases(model, lengths: list[int]) -> Phases:
    """Random prompts of these lengths through a causal language model of transformers."""
    prefill, decode = [], []
    for length in track(lengths, "prefill and decode"):
        prompt = torch.randint(model.config.vocab_size, (length,))
        serving_times(model, prompt, 2)  # warm-up
        runs = [serving_times(model, prompt, NEW_TOKENS) for _ in range(PREFILLS)]
        prefill.append(band([run.ttft_ms / length for run in runs]))
        decode.append(band([ms for run in runs for ms in run.tpot_ms]))
        ttft, tpot = prefill[-1][0] * length, decode[-1][0]
        print(f"{length:5d} tokens: TTFT {ttft:7.1f} ms, TPOT {tpot:6.1f} ms")
    return Phases(lengths, prefill, decode, str(model.dtype).removeprefix("torch."))


def draw_phases(phases: Phases, fingerprint: dict) -> ClassFigure:
    """Milliseconds a token over the prompt's length."""
    ratio = phases.decode[-1][0] / phases.prefill[-1][0]
    return class_plot(
        phases.lengths,
        {
            "decode: one token a step": ("naive", phases.decode),
            "prefill: all at once": ("optimized", phases.prefill),
        },
        title=f"At {phases.lengths[-1]} tokens a prefilled token costs {ratio:.0f}x less than a "
        "decoded one",
        xlabel="tokens in the prompt",
        ylabel="milliseconds per token",
        caption=caption(
            fingerprint,
            dtype=phases.dtype,
            threads=torch.get_num_threads(),
            repetitions=f"{PREFILLS} prefills, {PREFILLS * (NEW_TOKENS - 1)} steps",
            model="models/tiny",
            band="20-80 %",
        ),
    )
