"""Proves that the compiled flags of the all-reduce order what the ranks write, for the whole
system: on the machine of toolbox.gpu no order is ever missing, so the code itself is read.
"""

import pytest

from lessons.toolbox.gpu.another_process import call

NAMES = ("one_shot", "two_shot")
# what orders the writes of a rank before the reads of another, on a GPU
BARRIER = ["wait", "release.sys", "acquire.sys", "wait"]
WRONG_ORDERS = {
    "another GPU may see the flag first": ('sem="release", scope="sys"',
                                           'sem="relaxed", scope="sys"'),
    "what is read may be older than the flag": ('sem="acquire", scope="sys"',
                                                'sem="relaxed", scope="sys"'),
    "no other GPU has to see it": ('sem="release", scope="sys"', 'sem="release", scope="gpu"'),
}  # fmt: skip


def barriers_of(accesses: list[str]) -> list[list[str]]:
    """What is between the runs of loads and stores, without repeated waits."""
    marks = "".join("|" if access in ("load", "store") else f" {access} " for access in accesses)
    runs = [run.split() for run in marks.split("|") if run.strip()]
    return [[a for a, before in zip(run, [None, *run]) if a != before] for run in runs]


def reduced(run: list[str]) -> list[str]:
    """A barrier's atomics, and whether it begins and ends with a wait of the program's threads."""
    inner = [access for access in run if access != "wait"]
    return [*run[:1], *inner, *run[-1:]]


@pytest.mark.compiler
@pytest.mark.parametrize("chip", [80, 90])
@pytest.mark.parametrize("way", NAMES)
def test_flags_order_memory_for_the_whole_system(way, chip):
    """In the compiled code: all threads are done, release, acquire, and then all go on."""
    accesses = call("lessons.l20_parallelism.lab.flags:accesses_of", way, chip=chip)
    assert "load.nc" not in accesses  # of another rank's buffer, whose values change
    assert [reduced(run) for run in barriers_of(accesses)] == [BARRIER, BARRIER]


@pytest.mark.compiler
@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_wrong_orders_are_seen(name):
    function = "lessons.l20_parallelism.lab.flags:accesses_of"
    accesses = call(function, "one_shot", WRONG_ORDERS[name], chip=90)
    assert [reduced(run) for run in barriers_of(accesses)] != [BARRIER, BARRIER]
