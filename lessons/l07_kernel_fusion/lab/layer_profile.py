"""One layer of a decode step as PyTorch's profiler sees it on a CPU: each operation a bar, each gap
Python between two of them.
"""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.batch import new_batch
from lessons.l05_gqa.optimized import IN_GROUPS
from lessons.toolbox.draw.figure import ClassFigure
from lessons.toolbox.draw.plotting import gantt
from lessons.toolbox.measure.device import fingerprint

CONTEXT = 120
SMALL_OPERATIONS = "norm, addition, SwiGLU, RoPE"
KINDS = {
    "aten::linear": "matrix product",
    "aten::bmm": "attention",
    "aten::softmax": "attention",
    "aten::copy_": "attention",
}
PRODUCTS_A_LAYER = 7


@torch.inference_mode()
def second_layer(model: Decoder) -> list[tuple[float, float, str]]:
    """[(start, end, kind)] in µs: the operations of one decoded token from the second layer's first
    product to the third layer's. model: at least three layers, on a CPU.
    """
    pool = IN_GROUPS.new_cache(model, 1, CONTEXT + 10)
    prompt = new_batch([([7] * CONTEXT, 0)], CONTEXT + 10, model.device)
    model(prompt.tokens, pool.attending(prompt))
    with silent():
        for turn in range(3):  # the first ones warm up
            token = new_batch([([7], CONTEXT + turn)], CONTEXT + 10, model.device)
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                model(token.tokens, pool.attending(token))
    top = [e for e in seen.events() if e.cpu_parent is None and e.name.startswith("aten::")]
    top.sort(key=lambda event: event.time_range.start)
    products = [i for i, event in enumerate(top) if event.name == "aten::linear"]
    layer = top[products[PRODUCTS_A_LAYER] : products[2 * PRODUCTS_A_LAYER]]
    start = layer[0].time_range.start
    return [
        (
            event.time_range.start - start,
            event.time_range.end - start,
            KINDS.get(event.name, SMALL_OPERATIONS),
        )
        for event in layer
    ]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Drop what is written to standard error, because the profiler announces itself there."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def draw_layer(models: dict[str, Decoder]) -> ClassFigure:
    """A lane for each model, {label: model}; the first one gives the title its number."""
    lanes = {label: second_layer(model) for label, model in models.items()}
    label, first = next(iter(lanes.items()))
    large = sum(end - start for start, end, kind in first if kind != SMALL_OPERATIONS)
    return gantt(
        lanes,
        xlabel="µs since the layer's first product",
        kinds=["matrix product", "attention", SMALL_OPERATIONS],
        title=f"Products and attention are {large / first[-1][1]:.0%} of a layer ({label}); the "
        "rest is small operations and gaps",
        caption="measured here, with the profiler's own overhead · "
        f"{fingerprint()['device']} · one token, {CONTEXT} of context",
    )
