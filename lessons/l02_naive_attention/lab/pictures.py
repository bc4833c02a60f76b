"""The lesson's picture, how often the scores travel through memory, counted by `traffic`; and two
of the notebook: the same over the prompt's length, and what sampling parameters do.

python -m lessons.l02_naive_attention.lab.pictures      writes passes.svg beside this file
"""

from pathlib import Path

from torch import Tensor

from lessons.l02_naive_attention.lab.traffic import versions
from lessons.l02_naive_attention.sampling import SamplingParams, probabilities
from lessons.toolbox.draw.figure import ClassFigure, save_svg
from lessons.toolbox.draw.plotting import bars, class_plot, gantt
from lessons.toolbox.measure.passes import Pass, total_bytes

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 8192, 32, 8, 128  # Llama-3-8B
HERE = Path(__file__).parent
ALT = (
    "Two bars. Naive attention moves each 2-byte score through memory eight times, 44 bytes in "
    "all; with the fused kernel "
    "the scores are written, read once, written and read, 7 bytes in all."
)
KINDS = {"bmm": "matrix product", "softmax_kernel": "scale + mask + softmax, one pass"}
SHORT = {
    "bmm": "",
    "mul": "scale",
    "_to_copy": "cast",
    "masked_fill": "mask",
    "_softmax": "softmax",
    "softmax_kernel": "all",
}


def pieces(passes: list[Pass], num_scores: int) -> list[tuple]:
    """(start, end, kind, text) of each pass on an axis of bytes per score, for `plotting.gantt`."""
    found, end = [], 0.0
    for one in passes:
        start, end = end, end + (one.read_bytes + one.written_bytes) / num_scores
        found.append((start, end, KINDS.get(one.name, "one step, one pass"), SHORT[one.name]))
    return found


def draw() -> ClassFigure:
    """Each bar is as long as the bytes that its passes read and write, per score."""
    found, num_scores = versions(TOKENS, HEADS, KV_HEADS, HEAD_DIM), HEADS * TOKENS**2
    naive, fused = found["naive.attention"], found["optimized.attention"]
    each = [total_bytes(passes) / num_scores for passes in (naive, fused)]
    return gantt(
        {"naive": pieces(naive, num_scores), "fused": pieces(fused, num_scores)},
        kinds=["matrix product", "one step, one pass", "scale + mask + softmax, one pass"],
        title=f"A score has 2 bytes; naive attention moves {each[0]:.0f} for it, with one fused "
        f"kernel {each[1]:.0f}",
        xlabel="bytes read and written for each score (bfloat16)",
        caption=f"Counted, not measured: lessons/l02_naive_attention/lab/traffic.py · {HEADS} "
        f"query heads, {KV_HEADS} KV "
        f"heads of {HEAD_DIM}, {TOKENS} tokens, causal",
    )


def draw_growth(lengths: list[int]) -> ClassFigure:
    """GB that a layer moves over the prompt's length, beside its inputs and output."""
    counted = [versions(tokens, HEADS, KV_HEADS, HEAD_DIM) for tokens in lengths]
    series = {}
    for label, role, name in (
        ("naive", "naive", "naive.attention"),
        ("fused softmax", "optimized", "optimized.attention"),
    ):
        moved = [total_bytes(found[name]) / 1e9 for found in counted]
        series[label] = (role, [(value,) * 3 for value in moved])
    least = [4 * tokens * (HEADS + KV_HEADS) * HEAD_DIM / 1e9 for tokens in lengths]
    ratio = series["fused softmax"][1][-1][0] / least[-1]
    return class_plot(
        lengths,
        series,
        floor=least,
        floor_label="q, k, v and output",
        xlabel="tokens of the prompt",
        ylabel="GB moved by one layer",
        title=f"Fused, a layer still moves {ratio:.0f} times its inputs and outputs at the longest",
        caption=f"Counted, not measured · {HEADS} query heads, {KV_HEADS} KV heads of {HEAD_DIM}, "
        "bfloat16",
    )


def draw_sampling(logits: Tensor, names: list[str], likeliest: int = 8, **settings) -> ClassFigure:
    """The likeliest next tokens, by the model and after `settings` (those of SamplingParams).

    logits: [V]; names: V texts, one a token.
    """
    before = probabilities(logits, SamplingParams(), [], [])
    after = probabilities(logits, SamplingParams(**settings), [], [])
    shown = before.topk(min(likeliest, len(before))).indices.tolist()
    said = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in settings.items())
    kept = int((after > 0).sum())
    outside = 1 - float(after[shown].sum())
    return bars(
        [names[token] for token in shown],
        {
            "the model": ("naive", [round(float(before[token]), 3) for token in shown]),
            "sampled": ("optimized", [round(float(after[token]), 3) for token in shown]),
        },
        ylabel="probability (neither is better)",
        better="neither",
        title=f"{said}: {kept} of {len(before)} tokens can be drawn, {outside:.0%} of the mass "
        "lies outside these",
        caption=f"The {len(shown)} likeliest next tokens",
    )


if __name__ == "__main__":
    save_svg(draw(), HERE / "passes.svg", alt=ALT)
