"""The kernel exercises are a ladder: a mask first, then a pattern of loads, a body, the wrapper,
and a test for a kernel that others wrote.
"""

from lessons.toolbox.exercises.exercise import all_exercises, has_kernel
from lessons.toolbox.exercises.kernels import asked, ladder, print_ladder

RUNGS = ("mask", "load", "body", "wrapper", "test")


def test_each_rung_is_there_and_the_first_ones_come_in_order():
    first = {}
    for place, (_, parts) in enumerate(ladder()):
        for part in parts:
            first.setdefault(part, place)
    assert set(RUNGS) <= set(first), f"no exercise asks for {set(RUNGS) - set(first)}"
    assert first["mask"] < first["load"] and first["body"] < min(first["wrapper"], first["test"])


def test_it_begins_with_minutes_and_ends_with_an_hour():
    minutes = [entry.minutes for entry, _ in ladder()]
    assert minutes[0] <= 10 and max(minutes) == 60
    assert all(entry.minutes >= 45 for entry, parts in ladder() if {"wrapper", "test"} & set(parts))


def test_no_step_is_steeper_than_twice_the_minutes():
    """The longest so far, from kernel to kernel: a learner who did it in its time can do the
    next.
    """
    longest = 10
    for entry, _ in ladder():
        assert entry.minutes <= 2 * longest, f"{entry.id} takes {entry.minutes}, after {longest}"
        longest = max(longest, entry.minutes)


def test_what_is_asked_is_read_from_the_gaps():
    by_id = {entry.id: asked(entry) for entry in all_exercises()}
    assert by_id["0.1"] == ["mask"] and by_id["0.6"] == ["load"] and by_id["0.7"] == ["body"]
    assert by_id["0.11"] == ["body"] and by_id["4.4"] == ["bugs"] and by_id["19.4"] == ["load"]
    assert by_id["24.3"] == ["body", "wrapper"] and by_id["23.3"] == ["test"]
    assert by_id["2.1"] == by_id["25.2"] == []


def test_every_exercise_with_a_kernel_of_its_own_is_on_it():
    listed = {entry.id for entry, _ in ladder()}
    assert {entry.id for entry in all_exercises() if has_kernel(entry)} <= listed


def test_the_table(capsys):
    print_ladder()
    rows = capsys.readouterr().out.splitlines()
    assert len([row for row in rows if row.split()[:1]]) >= len(ladder())
    assert any("23.3" in row and "test" in row for row in rows)
