"""A plugin of pytest that keeps launches of a lesson's tests of equivalence, with their inputs, and
plants bugs in their kernels when the tests are over. Told by the environment:

    PLANTED     {"out": file, "kernels": [names], "each": bugs of a kind, "seconds": of a kernel}
"""

import json
import os
from collections import Counter
from time import process_time

from lessons.toolbox.gpu import cuda_launch, machine, triton_driver
from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.proof.first import is_first
from lessons.toolbox.proof.planting.replay import Recorded
from lessons.toolbox.proof.planting.trial import plant

VARIABLE = "PLANTED"
CASES = 2  # of each test
LAUNCHES = 2  # that are kept of each kernel
MOST_SECONDS = 1.0  # of a launch that is worth to be run again and again
MOST_BYTES = 2**26  # of its inputs

kept: dict[str, list[tuple[float, Recorded]]] = {}


def pytest_collection_modifyitems(config, items) -> None:
    """A few cases of each test that records a proof."""
    of_test: Counter[str] = Counter()
    chosen = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if is_first(item) and of_test[name] < CASES:
            of_test[name] += 1
            chosen.append(item)
    items[:] = chosen


def pytest_configure(config) -> None:
    """From now on every launch goes through `recording`."""
    names = set(asked()["kernels"])
    triton_driver.launch = recording(names)
    cuda_launch.launch = recording(None)


def asked() -> dict:
    return json.loads(os.environ[VARIABLE])


def recording(names: set[str] | None):
    """machine.launch, which keeps what it is called with. names: of the kernels; None: all."""

    def launch(kernel, grid, block, buffers, parameters, shared_bytes=0, seed=0, maps=None):
        contents = [buffer.data.copy() for buffer in buffers]
        start = process_time()
        done = machine.launch(
            kernel, grid, block, buffers, parameters, shared_bytes, seed=seed, maps=maps
        )
        seconds = process_time() - start
        if (names is None or kernel.name in names) and sum(map(len, contents)) < MOST_BYTES:
            keep(
                seconds,
                Recorded(
                    kernel, grid, block, buffers, contents, parameters, shared_bytes, maps, done
                ),
            )
        return done

    return launch


def keep(seconds: float, launch: Recorded) -> None:
    """Of each kernel's compiled forms the one of which most instructions ran, and two launches of
    it; a launch that takes long only where there is no other.
    """

    def rank(entry: tuple[float, Recorded]) -> tuple:
        seconds, recorded = entry
        return seconds < MOST_SECONDS, len(recorded.places), -seconds

    entries = [*kept.get(launch.kernel.name, []), (seconds, launch)]
    entries.sort(key=rank, reverse=True)
    best = entries[0][1].kernel
    kept[launch.kernel.name] = [entry for entry in entries if entry[1].kernel is best][:LAUNCHES]


def pytest_sessionfinish(session) -> None:
    """Plant, and write {kernel: its trials}."""
    told, found = asked(), {}
    for name, entries in kept.items():
        launches = [recorded for _, recorded in entries]
        try:
            trials = plant(launches, told["each"], told["seconds"])
        except Fault as fault:  # the right kernel is refused in this order of programs
            found[name] = {"counts": {}, "missed": [], "refused": str(fault)}
            continue
        found[name] = vars(trials)
    with open(told["out"], "w", encoding="utf-8") as file:
        json.dump(found, file)
