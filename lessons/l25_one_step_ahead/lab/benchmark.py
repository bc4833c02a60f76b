"""Step time over the latency of the device, in real time: a host that needs 2 ms a step, and a
device that sleeps. Both loops serve the same four requests.

python -m lessons.toolbox.measure.bench 25
"""

import torch

from lessons.l25_one_step_ahead.lab.sleeping import served
from lessons.l25_one_step_ahead.lab.timeline import HOST_MS, REQUESTS
from lessons.l25_one_step_ahead.naive import Serial
from lessons.l25_one_step_ahead.optimized import OneStepAhead
from lessons.toolbox.measure.bench import Benchmark

LATENCIES_MS = [1, 2, 3, 5, 10, 20]
STEPS = 12  # of a run: one for the prompts, and one for each later token
HOST = sum(HOST_MS.values())


def in_a_loop(loop: type):
    """A provider: device_ms -> a function that serves all requests. -> tokens: [4, STEPS]"""
    return lambda device_ms: lambda: torch.tensor(served(loop, device_ms, STEPS))


BENCHMARKS = [
    Benchmark(
        name="l25_steps",
        title=f"With a host of {HOST:g} ms and a device of {{x}} ms, one step ahead is "
        "{speedup:.2f}x as fast",
        x_name="milliseconds of the device in a step",
        x_values=LATENCIES_MS,
        quick_x_values=LATENCIES_MS[2:4],
        inputs=lambda latency, device: (latency,),
        providers={
            "one after the other": ("naive", in_a_loop(Serial)),
            "one step ahead": ("optimized", in_a_loop(OneStepAhead)),
        },
        ylabel=f"time of {STEPS} steps",
        floor_s=lambda latency: STEPS * latency / 1e3,
        floor_label="the device alone",
        dtype="int64",
        shape=f"{REQUESTS} requests of {STEPS} tokens; host and device sleep, nothing computes",
        tolerance=0.0,
    ),
]
