"""What a kernel does wrong is said in one sentence, with its line, program and thread."""

import numpy as np
import pytest

from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.gpu.releases import Releases
from tests.toolbox.gpu.running import run

SHARED = ".shared .align 16 .b8 tile[1024];"
MINE = "mul.lo.u32 %r1, %r70, 4;\nmov.u32 %r2, tile;\nadd.u32 %r1, %r1, %r2;\n"
OTHER = "xor.b32 %r3, %r70, 32;\nmul.lo.u32 %r3, %r3, 4;\nadd.u32 %r3, %r3, %r2;\n"


def words(count: int = 256) -> np.ndarray:
    return np.arange(count, dtype=np.uint32)


def fails(body: str, match: str, arrays=None, **options) -> None:
    with pytest.raises(Fault, match=match):
        run(body, [words()] if arrays is None else arrays, **options)


# ---------------------------------------------------------------- global memory


def test_a_load_after_the_last_element():
    body = "mad.wide.u32 %rd1, %r70, 4, %rd30;\nld.global.b32 %r1, [%rd1+1024];"
    fails(
        body, r"kernel.py:9, program \(0, 0, 0\), thread 0: 4 bytes at 1024 of x0, which has 1024"
    )
    fails(body.replace("+1024", "+-8"), "thread 0: 4 bytes, 8 before the first of x0")
    run(body.replace("+1024", "+896"), [words()])


def test_only_the_threads_of_the_predicate_load():
    body = "mad.wide.u32 %rd1, %r70, 64, %rd30;\nsetp.lt.u32 %p1, %r70, 16;\n"
    run(body + "@%p1 ld.global.b32 %r1, [%rd1];", [words()])
    fails(body + "@!%p1 ld.global.b32 %r1, [%rd1];", "thread 16: 4 bytes at 1024 of x0")


def test_a_misaligned_address():
    fails(
        "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd30+4];", "byte 4 of x0 is not a multiple of 16"
    )


def test_two_programs_write_the_same_bytes():
    body = "mad.wide.u32 %rd1, %r70, 4, %rd30;\nst.global.b32 [%rd1], %r71;"
    fails(body, "race in global memory: it writes bytes of x0 that program .* writes", grid=2)
    own = "mad.lo.u32 %r1, %r71, 32, %r70;\nmad.wide.u32 %rd1, %r1, 4, %rd30;\n"
    run(own + "st.global.b32 [%rd1], %r71;", [words()], grid=8)


def test_a_program_reads_what_another_one_writes():
    body = "mul.wide.u32 %rd2, %r71, 4;\nadd.u64 %rd1, %rd30, %rd2;\n"
    body += "ld.global.b32 %r1, [%rd30];\nst.global.b32 [%rd1], %r1;"
    for seed in range(4):  # whichever comes first
        fails(body, "race in global memory", grid=4, seed=seed)


# Thread 0 of each program stores a word and counts itself; the last one reads all words.
LAST_READS = """
setp.ne.u32 %p1, %r70, 0;
@%p1 bra end;
mul.wide.u32 %rd2, %r71, 4;
add.u64 %rd1, %rd30, %rd2;
st.global.b32 [%rd1], %r71;
atom.acq_rel.gpu.global.inc.u32 %r1, [%rd31], 2;
setp.ne.u32 %p1, %r1, 2;
@%p1 bra end;
ld.global.v2.b32 {%r2, %r3}, [%rd30];
ld.global.b32 %r4, [%rd30+8];
end:
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_program_reads_what_others_have_released(seed):
    arrays = [np.zeros(4, np.uint32), np.zeros(1, np.uint32)]
    options = dict(grid=3, seed=seed)
    run(LAST_READS, arrays, **options)
    assert arrays[0].tolist() == [0, 1, 2, 0] and arrays[1][0] == 0
    said = "race in global memory: it (reads|writes) bytes of x0 that program"
    for wrong in ("atom", "atom.acquire.gpu", "atom.release.gpu", "atom.acq_rel.cta"):
        arrays[1][:] = 0
        fails(LAST_READS.replace("atom.acq_rel.gpu", wrong), said, arrays, **options)
    arrays[1][:] = 0
    first = LAST_READS.replace("%r1, 2;", "%r1, 1;")  # one too early
    fails(first, said, arrays, **options)
    store = "st.global.b32 [%rd1], %r71;\n"
    count = next(line for line in LAST_READS.splitlines() if line.startswith("atom"))
    arrays[1][:] = 0
    late = LAST_READS.replace(store, "").replace(count, count + "\n" + store)
    fails(late, said, arrays, **options)


def test_what_is_released_comes_with_what_its_program_knew():
    """Program 0 releases to 1, and 1 to 2, which may read what both have written."""
    known = Releases()
    known.meet(1, 100, acquires=False, releases=True)
    known.meet(2, 100, acquires=True, releases=False)
    known.meet(2, 200, acquires=False, releases=True)
    known.meet(3, 200, acquires=True, releases=False)
    readers, writers, when = np.array([3, 3, 3, 1]), np.array([1, 2, 1, 2]), np.array([0, 0, 1, 0])
    assert known.known_to(readers, writers, when).tolist() == [True, True, False, False]


def test_a_register_that_was_not_written():
    body = "setp.ge.u32 %p1, %r70, 0;\n@%p1 bra on;\nmov.u32 %r2, 1;\non:\nadd.s32 %r1, %r2, 1;"
    fails(body, "register '?%r2'? is read before it is written")
    # what nothing ever writes is the compiler's "undefined": it holds garbage
    run("add.s32 %r1, %r2, 1;", [words()])


# ---------------------------------------------------------------- the order of warps


def test_the_order_of_warps_is_drawn_and_a_fault_names_its_seed():
    """Each warp's first thread takes a number: warp 1 may come before warp 0."""
    body = "and.b32 %r1, %r70, 31;\nsetp.eq.u32 %p1, %r1, 0;\nshr.u32 %r2, %r70, 5;\n"
    body += "mad.wide.u32 %rd1, %r2, 4, %rd31;\n@%p1 atom.global.add.u32 %r3, [%rd30], 1;\n"
    body += "@%p1 st.global.b32 [%rd1], %r3;"
    orders = set()
    for seed in range(60):
        found = [np.zeros(1, dtype=np.uint32), np.zeros(4, dtype=np.uint32)]
        run(body, found, threads=128, seed=seed)
        orders.add(tuple(found[1].tolist()))
        assert sorted(found[1].tolist()) == [0, 1, 2, 3]
    assert len(orders) > 4
    fails("ld.shared.b32 %r1, [tile+1024];", r"\(LADDER_ORDER=41\)$", outside=SHARED, seed=41)


def test_warps_may_store_copies_of_a_result_in_any_order():
    body = "mov.u32 %r1, 7;\nst.shared.b32 [tile], VALUE;\nbar.sync 0;\nld.shared.b32 %r2, [tile];"
    for seed in range(20):
        run(body.replace("VALUE", "%r1"), [words()], threads=128, outside=SHARED, seed=seed)
        fails(
            body.replace("VALUE", "%r70"),
            "race in|two threads",
            threads=128,
            outside=SHARED,
            seed=seed,
        )


# ---------------------------------------------------------------- shared memory


def test_a_race_between_warps():
    body = MINE + OTHER + "st.shared.b32 [%r1], %r70;\nBARRIER\nld.shared.b32 %r5, [%r3];"
    one = dict(threads=64, outside=SHARED)
    run(body.replace("BARRIER", "bar.sync 0;"), [words()], **one)
    fails(
        body.replace("BARRIER", ""),
        "race in shared memory: it reads what warp 1 wrote at kernel.py:14, with no barrier",
        **one,
    )
    # a barrier within the warp orders nothing between warps
    fails(body.replace("BARRIER", "bar.warp.sync -1;"), "race in shared memory", **one)
    again = body.replace("BARRIER", "bar.sync 0;") + "\nst.shared.b32 [%r1], %r5;"
    fails(again, "it writes what warp [01] reads at kernel.py:16", **one)


def test_a_barrier_of_two_warps_orders_these_two():
    body = MINE + OTHER + "st.shared.b32 [%r1], %r70;\nbar.sync 1, 64;\nld.shared.b32 %r5, [%r3];"
    run(body, [words()], threads=64, outside=SHARED)
    # warps 0 and 1 meet, 2 and 3 meet, and warp 0 reads what warp 2 wrote
    pairs = MINE + "st.shared.b32 [%r1], %r70;\nshr.u32 %r6, %r70, 6;\nadd.u32 %r6, %r6, 1;\n"
    pairs += "bar.sync %r6, 64;\nxor.b32 %r3, %r70, WHICH;\nmul.lo.u32 %r3, %r3, 4;\n"
    pairs += "add.u32 %r3, %r3, %r2;\nld.shared.b32 %r5, [%r3];"
    run(pairs.replace("WHICH", "32"), [words()], threads=128, outside=SHARED)
    fails(pairs.replace("WHICH", "64"), "race", threads=128, outside=SHARED)


def test_two_threads_store_different_values_at_one_place():
    body = "st.shared.b32 [tile], VALUE;"
    fails(body.replace("VALUE", "%r70"), "two threads store different values", outside=SHARED)
    run(body.replace("VALUE", "%r71"), [words()], outside=SHARED)


def test_copies_of_a_sum_may_differ_in_their_last_bits():
    """A compiler fuses a product into a butterfly's first addition, and the partners round
    otherwise.
    """
    body = "and.b32 %r3, %r70, 1;\nadd.u32 %r3, %r3, FIRST;\nst.shared.b32 [tile], %r3;"
    run(body.replace("FIRST", "0x40000000"), [words()], outside=SHARED)  # 2.0 and the next float
    fails(body.replace("FIRST", "1000000"), "store different values", outside=SHARED)


def test_shared_memory_has_an_end():
    fails("ld.shared.b32 %r1, [tile+1024];", "the kernel has 1024", outside=SHARED)
    fails("ld.shared.b32 %r1, [tile+2];", "not a multiple of 4", outside=SHARED)


def test_a_deadlock_says_who_waits():
    body = "setp.lt.u32 %p1, %r70, 32;\n@%p1 bar.sync 1, 64;\nbar.sync 2, 64;"
    fails(
        body,
        "deadlock in program .*barrier 1 of kernel.py:9.*barrier 2 of kernel.py:10",
        threads=64,
    )


def test_threads_that_have_ended_are_not_waited_for():
    run("setp.lt.u32 %p1, %r70, 32;\n@%p1 ret;\nbar.sync 0;", [words()], threads=64)


def test_a_shuffle_without_a_part_of_the_warp():
    body = "setp.lt.u32 %p1, %r70, 8;\n@%p1 bra on;\nbra.uni off;\non:\n"
    body += "shfl.sync.bfly.b32 %r1, %r70, 1, 31, -1;\noff:"
    fails(body, "threads of the warp that must take part are elsewhere")
    fails(
        "shfl.sync.bfly.b32 %r1, %r70, 1, 31, 0xFF;", "a thread takes part that the mask does not"
    )


# ---------------------------------------------------------------- asynchronous copies

COPY = (
    MINE
    + "mad.wide.u32 %rd1, %r70, 4, %rd30;\ncp.async.ca.shared.global [%r1], [%rd1], 4;\n"
    + "cp.async.commit_group;\n"
)


def test_a_copy_is_waited_for():
    read = "ld.shared.b32 %r5, [%r1];"
    fails(
        COPY + read, "what the asynchronous copy of kernel.py:12 is still filling", outside=SHARED
    )
    fails(COPY + "cp.async.wait_group 1;\n" + read, "still filling", outside=SHARED)
    run(COPY + "cp.async.wait_group 0;\n" + read, [words()], outside=SHARED)


def test_other_warps_need_a_barrier_after_the_wait():
    wait = COPY + "cp.async.wait_group 0;\n" + OTHER
    read = "ld.shared.b32 %r5, [%r3];"
    one = dict(threads=64, outside=SHARED)
    fails(wait + read, "race in shared memory: it reads what warp 1 wrote", **one)
    run(wait + "bar.sync 0;\n" + read, [words()], **one)


# ---------------------------------------------------------------- mbarriers

INIT = """setp.eq.u32 %p1, %r70, 0;
@%p1 mbarrier.init.shared::cta.b64 [tile+512], COUNT;
bar.sync 0;
"""
WAIT = """{
.reg .pred complete;
again: mbarrier.try_wait.parity.shared::cta.b64 complete, [tile+512], PARITY;
@!complete bra.uni again;
}
"""


def meeting(count: int, parity: int, arrive: str) -> str:
    """Warp 0 arrives at an mbarrier and warp 1 waits for it."""
    body = INIT.replace("COUNT", str(count)) + MINE + OTHER + "st.shared.b32 [%r1], %r70;\n"
    body += "setp.lt.u32 %p2, %r70, 32;\n@!%p2 bra waits;\n" + arrive + "bra.uni over;\nwaits:\n"
    return body + WAIT.replace("PARITY", str(parity)) + "ld.shared.b32 %r5, [%r3];\nover:"


ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [tile+512];\n"


def test_an_mbarrier_orders_those_who_arrive_before_those_who_wait():
    one = dict(threads=64, outside=SHARED)
    run(meeting(32, 0, ARRIVE), [words()], **one)
    # the phase before the first counts as complete, and the first one is not of parity 1
    fails(meeting(32, 1, ARRIVE), "race in shared memory|deadlock", **one)
    fails(meeting(33, 0, ARRIVE), "deadlock .*32 threads at the mbarrier", **one)
    fails(meeting(31, 0, ARRIVE), "more arrivals at the mbarrier at 512", **one)
    none = meeting(32, 0, ARRIVE).replace("@%p1 mbarrier.init", "@%p1 mov.b32 %r7, 0; // ")
    fails(none, "no mbarrier at 512", **one)


def test_a_kernel_that_does_not_end(monkeypatch):
    monkeypatch.setattr("lessons.toolbox.gpu.machine.MOST_STEPS", 1000)
    fails("again:\nbra.uni again;", "does not end")
