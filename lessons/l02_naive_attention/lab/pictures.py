"""The lesson's one picture: how often the scores travel through memory, counted by `traffic`.

python -m lessons.l02_naive_attention.lab.pictures      writes passes.svg beside this file
"""

from pathlib import Path

from lessons.l02_naive_attention.lab.traffic import Pass, total_bytes, versions
from lessons.toolbox.draw.figure import ClassFigure, save_svg
from lessons.toolbox.draw.plotting import gantt

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 8192, 32, 8, 128  # Llama-3-8B
SVG = Path(__file__).parent / "passes.svg"
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


if __name__ == "__main__":
    save_svg(draw(), SVG, alt=ALT)
