"""The lesson's picture, which tokens each pass computes, copies and reads; and two of the notebook.

    python -m lessons.l03_kv_cache.lab.pictures      writes passes.svg beside this file

What they show is counted, not measured.
"""

from pathlib import Path

from matplotlib.patches import Patch, Rectangle

from lessons.l01_roofline.calculators import kv_bytes_per_token
from lessons.l01_roofline.planner.models import find_model
from lessons.l03_kv_cache.cache import bucket
from lessons.l03_kv_cache.lab.traffic import MIB, mib_written
from lessons.l03_kv_cache.lab.work import flops
from lessons.toolbox.draw.figure import PALETTE, ROLES, ClassFigure, frame, key, save_svg, style
from lessons.toolbox.draw.plotting import bars, class_plot, gantt
from lessons.toolbox.model.config import ModelConfig

PROMPT, ANSWER = 3, 4
HERE = Path(__file__).parent
WORK_ALT = (
    "FLOPs of a whole answer over its length, both axes logarithmic. Without a cache the weights' "
    "work grows like the square and attention's like the cube; with one, the weights' work grows "
    "like the length and attention's like the square."
)
RUN, COPY, READ = "runs through the model", "copied to make room, then read", "read where it is"
LOOK = {RUN: (ROLES["naive"].colour, ""), COPY: (PALETTE[1], "//"), READ: ("#CFE8F7", "")}


def passes(way: str) -> list[list[str]]:
    """What happens to each token in each pass: [[RUN | COPY | READ] * tokens] * ANSWER."""
    rows = []
    for held in range(PROMPT, PROMPT + ANSWER):
        new = held if way == "recompute" or held == PROMPT else 1
        rows.append([COPY if way == "concatenate" else READ] * (held - new) + [RUN] * new)
    return rows


@style()
def draw() -> ClassFigure:
    """Three grids beside each other."""
    ways = {way: passes(way) for way in ("recompute", "concatenate", "preallocate")}
    count = {}
    for way, rows in ways.items():
        count[way] = {what: sum(row.count(what) for row in rows) for what in LOOK}
    once, again = count["preallocate"][RUN], count["recompute"][RUN]
    width = PROMPT + ANSWER - 1
    fig, ax = frame(
        f"A cache runs each token once: {once} instead of {again}",
        f"prompt of {PROMPT} tokens, answer of {ANSWER}; nothing is computed from the last · "
        "counted, not measured",
        (11, 4.2),
    )
    for n, (way, rows) in enumerate(ways.items()):
        left = n * (width + 2)
        draw_grid(ax, left, width, rows)
        copied = f", {count[way][COPY]} copied" if count[way][COPY] else ""
        title = f"{way}: {count[way][RUN]} run{copied}"
        ax.text(left, len(rows) + 0.15, title, va="top", fontweight="bold")
    ax.set_xlim(-0.1, 3 * width + 4)
    ax.set_ylim(ANSWER + 0.8, -0.1)
    ax.set_yticks([y + 0.45 for y in range(ANSWER)], [f"pass {y + 1}" for y in range(ANSWER)])
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    patches = []
    for what, (colour, hatch) in LOOK.items():
        patches.append(Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=what))
    patches.append(Patch(facecolor="white", edgecolor="#CCCCCC", label="not yet generated"))
    key(ax, patches)
    return fig


def draw_grid(ax, left: float, width: int, rows: list[list[str]]) -> None:
    """One way to generate: a row of `width` squares for each pass, from x = left on."""
    for y, row in enumerate(rows):
        for x in range(width):
            known = x < len(row)
            colour, hatch = LOOK[row[x]] if known else ("white", "")
            edge = "white" if known else "#CCCCCC"
            look = dict(facecolor=colour, hatch=hatch, edgecolor=edge, lw=1)
            ax.add_patch(Rectangle((left + x, y), 0.94, 0.9, **look))


def draw_bytes(config: ModelConfig, sizes: list[int]) -> ClassFigure:
    """MiB written over the tokens held, which came one by one in float32. sizes: ascending."""
    written = mib_written(config, sizes)
    roles = dict(zip(written, ("naive", "optimized", "optimized")))
    growth = {label: values[-1] / values[-2] for label, values in written.items()}
    concat, doubling = growth["ConcatCache"], growth["KVPool, doubling"]
    # A count has no spread: the band of each point is the point.
    series = {
        label: (roles[label], [(value,) * 3 for value in values])
        for label, values in written.items()
    }
    shape = f"{config.num_hidden_layers} layers, {config.num_key_value_heads} KV heads of "
    return class_plot(
        sizes,
        series,
        floor=[size * config.kv_bytes_per_token(4) / MIB for size in sizes],
        floor_label="each row once",
        xlabel="tokens in the cache",
        ylabel="MiB written, copies included",
        title=f"Twice the tokens: {concat:.1f}x the bytes when concatenating, {doubling:.1f}x when "
        "doubling",
        caption=f"counted, not timed · {shape}{config.head_dim}, float32 · one token a step",
    )


def draw_reserved(requests: list[tuple[int, int]], longest: int) -> ClassFigure:
    """What blocks of a power of two leave empty. requests: tokens of (prompt, answer); longest:
    what one could reserve instead.
    """
    kinds = ["prompt", "answer", "reserved, never used"]
    rows, used, reserved = {}, 0, 0
    for number, (prompt, answer) in enumerate(requests):
        end = prompt + answer - 1  # the last token is never held
        spans = [(0, prompt), (prompt, end), (end, bucket(end))]
        rows[f"request {number}"] = [(*span, kind) for span, kind in zip(spans, kinds)]
        used += end
        reserved += bucket(end)
    empty, emptier = 1 - used / reserved, 1 - used / (longest * len(requests))
    return gantt(
        rows,
        xlabel="slots of the cache (tokens)",
        kinds=kinds,
        title=f"Buckets leave {empty:.0%} of the cache empty; {longest} slots for each would leave "
        f"{emptier:.0%}",
        caption="requests of models/prompts.json; before the answer is written its slots stand "
        "empty too: lesson 12 (pages) takes both back",
    )


def draw_work(model_name: str = "llama-3-8b") -> ClassFigure:
    """FLOPs of an answer over its length, after a prompt of one token."""
    model, answers = find_model(model_name), [2**n for n in range(7, 18)]
    series = {}
    for cached, role in ((False, "naive"), (True, "optimized")):
        counted = [flops(model, 1, answer, cached) for answer in answers]
        way = "cached" if cached else "recomputed"
        for part, name in enumerate(("weights", "attention")):
            series[f"{name}, {way}"] = (role, [(work[part],) * 3 for work in counted])
    growth = {label: values[-1][0] / values[-2][0] for label, (_, values) in series.items()}
    return class_plot(
        answers,
        series,
        title="Twice the answer with a cache: "
        f"{growth['weights, cached']:.1f}x the weights' work, still "
        f"{growth['attention, cached']:.1f}x attention's",
        xlabel="tokens of the answer",
        ylabel="FLOPs of the whole answer",
        caption=f"Counted, not timed · layers of {model_name}, one sequence",
    )


def draw_step_bytes(
    batch: int = 8, context: int = 4096, model_name: str = "llama-3-8b", bits: int = 16
) -> ClassFigure:
    """What a decode step reads: weights once, and the cache of every sequence."""
    model = find_model(model_name)
    weights = 2 * model.params_read(batch) / 1e9
    cache = batch * context * kv_bytes_per_token(model, bits) / 1e9
    return bars(
        ["weights, once for all", f"cache of {batch} sequence{'s' * (batch > 1)}"],
        {"read": ("optimized", [weights, cache])},
        ylabel="GB read by one decode step",
        title=f"{batch} x {context} tokens: {cache / (weights + cache):.0%} of a step's bytes are "
        "cache",
        caption=f"Counted · {model_name}: weights in 16 bits, cache in {bits} bits",
    )


if __name__ == "__main__":
    save_svg(draw(), HERE / "passes.svg")
    save_svg(draw_work(), HERE / "work.svg", alt=WORK_ALT)
