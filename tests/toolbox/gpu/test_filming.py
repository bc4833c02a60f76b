"""Accesses that the machine films, against addresses worked out by hand."""

import numpy as np
import pytest

from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.gpu.filming import filming
from tests.toolbox.gpu.running import run

PLACE = """
mad.lo.u32 %r1, %r71, {threads}, %r70;
mul.wide.u32 %rd1, %r1, {step};
add.u64 %rd2, %rd1, %rd30;
add.u64 %rd3, %rd1, %rd31;
"""


def film_of(body: str, arrays: list, **options) -> list:
    accesses = []
    with filming(accesses):
        run(body, arrays, **options)
    return accesses


def places(access, array: np.ndarray) -> list[int]:
    """Bytes from the array's first."""
    return (access.addresses - array.ctypes.data).tolist()


def test_loads_and_stores_of_each_program_in_order():
    """Two programs of two warps copy a number a thread: 64 neighbours are 8 sectors."""
    body = (
        PLACE.format(threads=64, step=4) + "ld.global.b32 %r2, [%rd2]; st.global.b32 [%rd3], %r2;"
    )
    x, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    found = film_of(body, [x, out], grid=2, threads=64)
    assert (x == out).all()
    assert [(a.program, a.kind) for a in found] == [
        ((0, 0, 0), "load"),
        ((1, 0, 0), "load"),
        ((0, 0, 0), "store"),
        ((1, 0, 0), "store"),
    ]
    for access, array in zip(found, (x, x, out, out)):
        first = 256 * access.program[0]
        assert places(access, array) == list(range(first, first + 256, 4))
        assert (access.sectors, access.needed, access.together) == (8, 8, 1)
        assert access.kernel == "tried" and not len(access.outside)


@pytest.mark.parametrize("step, sectors", [(4, 4), (8, 8), (32, 32), (0, 1)])
def test_sectors_of_gaps(step, sectors):
    """32 numbers of 4 bytes fill 4 sectors; the same one for all fills a part of one."""
    body = PLACE.format(threads=32, step=step) + "ld.global.b32 %r2, [%rd2];"
    x = np.zeros(32 * 32, np.uint8)
    (load,) = film_of(body, [x, x.copy()])
    assert (load.sectors, load.needed) == (sectors, 1 if step == 0 else 4)
    assert places(load, x) == [step * lane for lane in range(32)]


def test_a_vector_load_is_one_access_of_many_elements():
    body = PLACE.format(threads=32, step=16) + "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd2];"
    x = np.zeros(128, np.uint32)
    (load,) = film_of(body, [x, x.copy()])
    # The machine knows no type of an array: a lane's 16 bytes are one element here.
    assert (len(load.addresses), load.sectors, load.needed) == (32, 16, 16)


def test_instructions_of_one_operation_are_one_access_until_one_repeats():
    """The compiler made two loads of one line. In a loop they begin an access at each turn."""
    loads = "ld.global.b32 %r2, [%rd2]; ld.global.b32 %r3, [%rd2+128];"
    body = (
        PLACE.format(threads=32, step=4)
        + f"""
mov.u32 %r9, 0;
$again: {loads} add.u64 %rd2, %rd2, 256;
add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 3; @%p1 bra $again;
{loads}
"""
    )
    x = np.zeros(256, np.uint32)
    found = film_of(body, [x, x.copy()])
    assert [min(places(access, x)) for access in found] == [0, 256, 512, 768]
    assert all(len(access.addresses) == 64 and access.sectors == 8 for access in found)


def test_two_calls_of_a_function_are_two_accesses():
    """Both loads are of line 9, which two lines call, one after the other."""
    called = ".loc 1 9 3 // mine.py:9:3 @[ mine.py:{}:1 ]\nld.global.b32 %r2, [%rd2+{}];\n"
    body = PLACE.format(threads=32, step=4) + called.format(20, 0) + called.format(21, 128)
    x = np.zeros(64, np.uint32)
    found = film_of(body, [x, x.copy()])
    assert [min(places(access, x)) for access in found] == [0, 128]


def test_copies_of_two_groups_are_two_accesses():
    body = (
        PLACE.format(threads=32, step=16)
        + """
mul.lo.u32 %r3, %r70, 16;
cp.async.cg.shared.global [%r3], [%rd2], 16; cp.async.commit_group;
cp.async.cg.shared.global [%r3+512], [%rd2+512], 16; cp.async.commit_group;
cp.async.wait_group 0;
"""
    )
    x = np.zeros(256, np.uint32)
    found = film_of(body, [x, x.copy()], shared=1024)
    assert [(a.kind, min(places(a, x)), a.sectors) for a in found] == [
        ("load", 0, 16),
        ("load", 512, 16),
    ]


def test_atomics_and_lanes_that_are_off():
    """5 lanes add; then no lane loads, which is an access of no element."""
    body = (
        PLACE.format(threads=32, step=4)
        + """
setp.lt.u32 %p1, %r70, 5;
@%p1 red.global.add.u32 [%rd2], 1;
setp.lt.u32 %p1, %r70, 0;
@%p1 ld.global.b32 %r2, [%rd3];
"""
    )
    x = np.zeros(32, np.uint32)
    added, off = film_of(body, [x, x.copy()])
    assert x.tolist() == [1] * 5 + [0] * 27
    assert (added.kind, places(added, x)) == ("atomic", [0, 4, 8, 12, 16])
    assert (off.kind, len(off.addresses), off.sectors) == ("load", 0, 0)


@pytest.mark.parametrize("shift", [8, -8, 4096, -4096])
def test_a_wrong_mask_shows_up_to_the_fault(shift):
    """The lanes that leave the array are told apart, near it and far from it. The store never
    runs.
    """
    body = (
        PLACE.format(threads=32, step=4)
        + f"""
ld.global.b32 %r2, [%rd2+{shift}];
st.global.b32 [%rd3], %r2;
"""
    )
    asked = [shift + 4 * lane for lane in range(32)]
    x, accesses = np.zeros(32, np.uint32), []
    with pytest.raises(Fault, match="4 bytes"), filming(accesses):
        run(body, [x, x.copy()])
    (load,) = accesses
    assert places(load, x) == [at for at in asked if 0 <= at < 128]
    outside = [at for at in asked if not 0 <= at < 128]
    assert (load.outside - x.ctypes.data).tolist() == outside and outside


def test_an_address_in_no_buffer():
    """Far beyond the last one: a Fault, and an access of nothing but wild addresses."""
    body = PLACE.format(threads=32, step=4) + f"ld.global.b32 %r2, [%rd2+{2**45}];"
    x, accesses = np.zeros(32, np.uint32), []
    with pytest.raises(Fault, match="in no buffer"), filming(accesses):
        run(body, [x, x.copy()])
    assert [(len(a.addresses), len(a.outside)) for a in accesses] == [(0, 32)]
