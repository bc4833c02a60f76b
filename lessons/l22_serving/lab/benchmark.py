"""Time to the first token of a second client, while a long answer is written for the first one: by
the blocking loop, and by the engine's thread with an event loop.

    python -m lessons.toolbox.measure.bench 22

The model is lesson 15's virtual one, and a step sleeps for STEP_S in place of a GPU's work. So the
times are those of the two servers, measured, around a step that is given.
"""

import asyncio
import threading
import time
from functools import lru_cache
from itertools import count
from queue import SimpleQueue

import torch

from lessons.l15_chunked_prefill.lab.virtual import VirtualModel
from lessons.l22_serving import naive, optimized
from lessons.l22_serving.engine import LessonEngine, new_engine
from lessons.toolbox.measure.bench import Benchmark

STEP_S = 0.002
LONG_ANSWERS = [16, 64, 256]  # tokens
PROMPT, SHORT = [5, 6, 7], 3  # tokens of each prompt, and of the second client's answer
NUM_BLOCKS = 64


def slow_engine() -> LessonEngine:
    """The lesson's engine over a model whose step takes STEP_S."""

    def slowed(blocks):
        model = VirtualModel(blocks)
        return lambda step: time.sleep(STEP_S) or model(step)

    return new_engine(slowed, NUM_BLOCKS)


@lru_cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all runs, in a thread of its own, because a notebook has one already."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="readers", daemon=True).start()
    return loop


def by_the_loop(long_answer: int):
    """naive.py: the second client's first token comes with its last, after the first client's."""
    server = naive.BlockingServer(slow_engine())
    threading.Thread(target=server.serve, daemon=True).start()

    def run() -> int:
        first = dict(prompt=PROMPT, max_tokens=long_answer)
        server.inbox.put(("long", first, SimpleQueue()))
        return server.ask("short", prompt=PROMPT, max_tokens=SHORT).tokens[0]

    return run


def by_the_event_loop(long_answer: int):
    """optimized.py: both are in the next step. Then both clients leave."""
    engine, numbers = optimized.AsyncEngine(slow_engine()), count()

    async def submit(name: str, max_tokens: int):
        request_id = f"{name} {next(numbers)}"
        add = engine.engine.add_request
        return await engine.submit(request_id, lambda: add(request_id, PROMPT, max_tokens) or 0.0)

    async def first_token() -> int:
        first, second = await submit("long", long_answer), await submit("short", SHORT)
        output = await second.__anext__()
        first.close()
        second.close()
        return output.tokens[0]

    return lambda: asyncio.run_coroutine_threadsafe(first_token(), event_loop()).result()


def long_answer_of(tokens: int, device: torch.device) -> tuple[int]:
    """The first client's answer."""
    return (tokens,)


BENCHMARKS = [
    Benchmark(
        name="l22_second_client",
        title="While one client gets {x} tokens, an event loop gives the next its first "
        "{speedup:.0f}x sooner",
        x_name="tokens of the first client's answer",
        x_values=LONG_ANSWERS,
        quick_x_values=LONG_ANSWERS[:1],
        inputs=long_answer_of,
        providers={
            "a blocking loop": ("naive", by_the_loop),
            "a thread and an event loop": ("optimized", by_the_event_loop),
        },
        ylabel="first token of a second client",
        floor_s=lambda tokens: STEP_S,
        floor_label="one step",
        dtype="virtual model",
        shape=f"a step is {1e3 * STEP_S:.0f} ms of sleep",
        tolerance=0.0,
    )
]
