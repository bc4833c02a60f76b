"""Blackwell's tensor memory and tensor core (tcgen05) against NumPy; planted bugs are faults."""

import numpy as np
import pytest

from lessons.toolbox.gpu.faults import Fault, UnknownInstruction
from lessons.toolbox.gpu.rounding import ROUNDING
from lessons.toolbox.gpu.values import narrow, widen
from tests.toolbox.gpu.running import kernel_of, run

THREADS = 128
SHARED = """
.shared .align 16 .b8 place[16];
.shared .align 16 .b8 done[16];
.shared .align 1024 .b8 left[16384];
.shared .align 1024 .b8 right[4096];
"""
# %r1: where the columns begin; %r3: the same in the warp's quarter; %p1: warp 0; %p2: thread 0
BEGIN = """
setp.lt.u32 %p1, %r70, 32; setp.eq.u32 %p2, %r70, 0;
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 64;
@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
@%p2 mbarrier.init.shared::cta.b64 [done], 1;
bar.sync 0;
ld.shared.b32 %r1, [place];
shr.u32 %r2, %r70, 5; shl.b32 %r2, %r2, 21; add.u32 %r3, %r1, %r2;
"""
END = "bar.sync 0;\n@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 64;\n"


def written(registers: list[str], buffer: int = 30) -> str:
    """Each thread's registers as a row of a buffer."""
    body = f"mad.wide.u32 %rd1, %r70, {4 * len(registers)}, %rd{buffer};\n"
    return body + "\n".join(f"st.global.b32 [%rd1+{4 * k}], {r};" for k, r in enumerate(registers))


def changed(body: str, old: str, new: str) -> str:
    """A body with one bug planted."""
    assert body.count(old) == 1, (old, body.count(old))
    return body.replace(old, new)


def fails(body: str, match: str, arrays: list) -> None:
    for seed in range(8):  # of the order of warps and events
        with pytest.raises(Fault, match=match):
            run(body, [x.copy() for x in arrays], threads=THREADS, outside=SHARED, seed=seed)


# ---------------------------------------------------------------- rows

ROWS = (
    BEGIN
    + """
mul.lo.u32 %r10, %r70, 4; add.u32 %r11, %r10, 1; add.u32 %r12, %r10, 2; add.u32 %r13, %r10, 3;
tcgen05.st.sync.aligned.32x32b.x4.b32 [%r3 + 8], {%r10, %r11, %r12, %r13};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {%r20, %r21}, [%r3 + 8], 2;
tcgen05.wait::ld.sync.aligned;
"""
)
TAKEN = written(["%r20", "%r21"]) + "\n" + END


def out(columns: int) -> np.ndarray:
    return np.zeros((THREADS, columns), dtype=np.uint32)


def test_rows_move_between_registers_and_tensor_memory():
    """Row r of 32x32b holds 4 r + column. In 16x32bx2 lane i has row i mod 16 of its warp's, from
    column 2 on for the upper lanes.
    """
    found = out(2)
    run(ROWS + TAKEN, [found], threads=THREADS, outside=SHARED)
    thread = np.arange(THREADS)
    row = thread // 32 * 32 + thread % 16
    expected = 4 * row + thread % 32 // 16 * 2
    assert (found == np.stack([expected, expected + 1], axis=1)).all()


def test_the_upper_half_of_a_quarter():
    found = out(2)
    body = changed(ROWS, "{%r20, %r21}, [%r3 + 8], 2", "{%r20, %r21}, [%r3 + 1048584], 2")
    run(body + TAKEN, [found], threads=THREADS, outside=SHARED)
    thread = np.arange(THREADS)
    assert (found[:, 0] == 4 * (thread // 32 * 32 + 16 + thread % 16) + thread % 32 // 16 * 2).all()


@pytest.mark.parametrize(
    "old, new, said",
    {
        "no wait for the store": (
            "tcgen05.wait::st.sync.aligned;",
            "",
            "it reads what the asynchronous store of kernel.py:17 is still filling",
        ),
        "no wait for the load": (
            "tcgen05.wait::ld.sync.aligned;",
            "",
            r"register %r2[01] is read while a load from tensor memory \(tcgen05.ld\) fills it",
        ),
        "columns that are not its own": (
            "[%r3 + 8], {",
            "[%r3 + 64], {",
            r"columns \d+ to \d+ of tensor memory are not allocated",
        ),
        "another warp's quarter": (
            "shl.b32 %r2, %r2, 21",
            "shl.b32 %r2, %r2, 20",
            "warp [123] at lane (16|32|48) of tensor memory; it reaches lanes",
        ),
        "no whole power of two": (
            "[place], 64",
            "[place], 48",
            "48 columns of tensor memory; accepted: 32, 64, 128, 256, 512",
        ),
        "more than the chip has": (
            "@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
            "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 512;",
            "512 columns of tensor memory, where 448 of 512 are free",
        ),
        "an allocation after the last": (
            "@%p2 mbarrier.init.shared::cta.b64 [done], 1;",
            "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 64;",
            "it allocates after it gave up the right to",
        ),
    }.values(),
)
def test_a_planted_bug_of_rows_is_a_fault(old, new, said):
    fails(changed(ROWS + TAKEN, old, new), said, [out(2)])


PACKED = changed(
    ROWS,
    "tcgen05.wait::ld.sync.aligned;",
    "mov.b64 %rd20, {%r20, %r21};\ntcgen05.wait::ld.sync.aligned;\nmov.b64 {%r20, %r21}, %rd20;",
)


def test_two_registers_in_flight_are_packed():
    """The pair is the same two registers, and may be read only once the load has ended."""
    apart, packed = out(2), out(2)
    run(ROWS + TAKEN, [apart], threads=THREADS, outside=SHARED)
    run(PACKED + TAKEN, [packed], threads=THREADS, outside=SHARED)
    assert (packed == apart).all()
    early = changed(
        PACKED, "%rd20, {%r20, %r21};\n", "%rd20, {%r20, %r21};\nadd.u64 %rd21, %rd20, 1;\n"
    )
    said = r"register %rd20 is read while a load from tensor memory"
    fails(early + TAKEN, said, [out(2)])
    fails(changed(early, "add.u64 %rd21, %rd20", "add.u32 %r22, %r20") + TAKEN, "%r20 is", [out(2)])


def test_columns_are_given_back():
    fails(ROWS + written(["%r20", "%r21"]), r"program \(0, 0, 0\) ends with columns", [out(2)])
    fails(ROWS + TAKEN.replace("%r1, 64", "%r1, 32"), "32 columns .* are no allocation", [out(2)])
    early = ROWS + TAKEN.replace("bar.sync 0;\n", "")
    fails(early, "race in tensor memory: it writes what warp [123]", [out(2)])


def test_columns_that_hold_nothing_are_nan():
    found = out(2)
    body = changed(ROWS, "{%r20, %r21}, [%r3 + 8], 2", "{%r20, %r21}, [%r3 + 16], 2")
    run(body + TAKEN, [found], threads=THREADS, outside=SHARED)
    assert np.isnan(found.view(np.float32)).all()


# ---------------------------------------------------------------- products

# What is told depends on whether the product has ended by then.
RACE = "race in tensor memory: it reads what the (asynchronous product of|tensor core wrote at)"
WAIT = "again:\nmbarrier.try_wait.parity.shared::cta.b64 %p5, [done], 0;\n@!%p5 bra again;\n"
COMMIT = "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];"
M, N, K = 128, 32, 64
WHAT = 1 << 4 | 1 << 7 | 1 << 10 | N // 8 << 17 | M // 16 << 24  # float32 = bf16 · bf16


def descriptor(variable: str, register: str, swizzle: int, leading: int, stride: int) -> str:
    """PTX that makes a matrix descriptor of a variable in shared memory."""
    fields = leading // 16 << 16 | stride // 16 << 32 | 1 << 46 | swizzle << 61
    fields -= 1 << 64 if fields >> 63 else 0
    return (
        f"mov.u32 %r5, {variable}; shr.u32 %r5, %r5, 4; cvt.u64.u32 {register}, %r5;\n"
        f"or.b64 {register}, {register}, {fields};\n"
    )


def in_rows_of_128(x: np.ndarray) -> np.ndarray:
    """[rows, 64] of 2 bytes as a 128-byte swizzle lays them out: chunk c of row r is at c ^ (r mod
    8).
    """
    rows = len(x)
    chunk = np.arange(8) ^ (np.arange(rows) % 8)[:, None]
    return x.reshape(rows, 8, 8)[np.arange(rows)[:, None], chunk]


def in_core_matrices(x: np.ndarray) -> np.ndarray:
    """[rows, 64] of 2 bytes without a swizzle: [rows / 8, 8 chunks of k, 8 rows, 8 numbers]."""
    return x.reshape(-1, 8, 8, 8).swapaxes(1, 2)


# name: (field of the descriptor, leading, stride, bytes from one k-step to the next, how)
LAYOUTS = {
    "rows of 128 bytes": (2, 16, 1024, 32, in_rows_of_128),
    "core matrices": (0, 128, 1024, 256, in_core_matrices),
}


def product_body(layout: str, what: int = WHAT) -> str:
    """d = left · right over 4 steps of 16; each thread then writes its row."""
    swizzle, leading, stride, step, _ = LAYOUTS[layout]
    body = BEGIN + "mul.lo.u32 %r6, %r70, 16;\n"
    for variable, source, size in (("left", 31, 2 * M * K), ("right", 32, 2 * N * K)):
        body += f"mov.u32 %r7, {variable}; add.u32 %r7, %r7, %r6; cvt.u64.u32 %rd2, %r6;\n"
        body += f"add.u64 %rd2, %rd2, %rd{source};\n"
        for first in range(0, size, 16 * THREADS):
            body += f"ld.global.v4.b32 {{%r60, %r61, %r62, %r63}}, [%rd2+{first}];\n"
            body += f"st.shared.v4.b32 [%r7+{first}], {{%r60, %r61, %r62, %r63}};\n"
    body += "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
    body += descriptor("left", "%rd3", swizzle, leading, stride)
    body += descriptor("right", "%rd4", swizzle, leading, stride)
    body += f"mov.u32 %r8, {what};\nsetp.ne.u32 %p3, %r70, %r70;\nsetp.eq.u32 %p4, %r70, %r70;\n"
    for k in range(K // 16):
        body += "@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r1 + 32], "
        body += f"%rd3, %rd4, %r8, %p{3 + (k > 0)};\n"
        body += f"add.u64 %rd3, %rd3, {step // 16};\nadd.u64 %rd4, %rd4, {step // 16};\n"
    body += f"{COMMIT}\n{WAIT}"
    sums = [f"%r{20 + k}" for k in range(N)]
    body += f"tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {{{', '.join(sums)}}}, [%r3 + 32];\n"
    return body + "tcgen05.wait::ld.sync.aligned;\n" + written(sums) + "\n" + END


def operands(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """bf16 bits of [M, K] and [N, K]."""
    x = np.random.default_rng(seed).standard_normal((M + N, K)).astype(np.float32)
    bits = narrow(x, "bf16")
    return bits[:M], bits[M:]


def given(layout: str, left: np.ndarray, right: np.ndarray) -> list[np.ndarray]:
    how = LAYOUTS[layout][-1]
    return [out(N), np.ascontiguousarray(how(left)), np.ascontiguousarray(how(right))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_from_shared_memory(layout, seed):
    left, right = operands(seed)
    exact = widen(left, "bf16").astype(np.float64) @ widen(right, "bf16").astype(np.float64).T
    results = []
    for order in range(6):
        arrays = given(layout, left, right)
        body = product_body(layout)
        run(body, arrays, threads=THREADS, outside=SHARED, seed=order)
        results.append(arrays[0].view(np.float32))
    assert np.abs(results[0] - exact).max() < 1e-4
    assert all((x.view(np.uint32) == results[0].view(np.uint32)).all() for x in results[1:])


def test_an_operand_in_tensor_memory(monkeypatch):
    """left, two numbers a column, is stored by the threads to the columns from 0 on."""
    monkeypatch.setattr(ROUNDING, "seed", 0)
    left, right = operands(1)
    stored = [f"%r{20 + k}" for k in range(K // 2)]
    loads = "mad.wide.u32 %rd5, %r70, 128, %rd31;\n"
    loads += "\n".join(f"ld.global.b32 {r}, [%rd5+{4 * k}];" for k, r in enumerate(stored))
    store = f"tcgen05.st.sync.aligned.32x32b.x{K // 2}.b32 [%r3 + 0], {{{', '.join(stored)}}};\n"
    body = product_body("core matrices")
    fence = "fence.proxy.async.shared::cta;\n"
    body = changed(body, fence, f"{loads}\n{store}tcgen05.wait::st.sync.aligned;\n{fence}")
    for k in range(K // 16):
        body = body.replace("%rd3, %rd4, %r8", f"[%r1 + {8 * k}], %rd4, %r8", 1)
    arrays = [out(N), np.ascontiguousarray(left), given("core matrices", left, right)[2]]
    run(body, arrays, threads=THREADS, outside=SHARED)
    exact = widen(left, "bf16").astype(np.float64) @ widen(right, "bf16").astype(np.float64).T
    assert np.abs(arrays[0].view(np.float32) - exact).max() < 1e-4
    unwritten = body.replace("[%r1 + 24], %rd4", "[%r1 + 28], %rd4")
    fails(
        unwritten, "column .* of tensor memory is read before it is written|still filling", arrays
    )
    unwaited = body.replace("tcgen05.wait::st.sync.aligned;\n", "")
    fails(unwaited, "it reads what the asynchronous store of", arrays)


@pytest.mark.parametrize(
    "old, new, said",
    {
        "no wait": (WAIT, "", RACE),
        "wrong phase": ("%p5, [done], 0", "%p5, [done], 1", RACE),
        "no commit": (COMMIT, "", "deadlock in program .* at the mbarrier of"),
        "an arrival in the place of the commit": (
            COMMIT,
            "@%p2 mbarrier.arrive.shared::cta.b64 %rd9, [done];",
            RACE,
        ),
        "no proxy fence": (
            "fence.proxy.async.shared::cta;\n",
            "",
            "no fence.proxy.async in between",
        ),
        "no barrier before the product": (
            "fence.proxy.async.shared::cta;\nbar.sync 0;",
            "fence.proxy.async.shared::cta;",
            "race in shared memory: it reads what warp [123] wrote",
        ),
        "a column off": ("[%r3 + 32]", "[%r3 + 33]", "are not allocated to the program"),
        "sums where there are none": (
            "%rd4, %r8, %p3",
            "%rd4, %r8, %p4",
            "is read before it is written",
        ),
        "two threads start it": (
            "setp.eq.u32 %p2, %r70, 0",
            "setp.lt.u32 %p2, %r70, 2",
            "more than one thread of the program starts the product",
        ),
    }.values(),
)  # fmt: skip
def test_a_planted_bug_of_a_product_is_a_fault(old, new, said):
    body = product_body("core matrices")
    fails(changed(body, old, new), said, given("core matrices", *operands(3)))


# Warp 1 tells the thread that starts the product, which tells nobody but the tensor core.
TOLD = """
setp.eq.u32 %p6, %r70, 32;
@%p6 st.shared.b32 [place+8], %r70;
@%p6 mbarrier.arrive.shared::cta.b64 %rd9, [done+8];
@!%p2 bra after;
told:
mbarrier.try_wait.parity.shared::cta.b64 %p7, [done+8], 0;
@!%p7 bra told;
after:
"""
FENCED = "fence.proxy.async.shared::cta;\nbar.sync 0;\n"


def test_who_waits_for_a_product_knows_what_its_starter_knew():
    body = product_body("core matrices")
    init = "@%p2 mbarrier.init.shared::cta.b64 [done], 1;\n"
    body = changed(body, init, init + init.replace("[done]", "[done+8]"))
    body = changed(body, WAIT, WAIT + "ld.shared.b32 %r64, [place+8];\n")
    arrays = given("core matrices", *operands(5))
    for order in range(8):
        told = changed(body, FENCED, FENCED + TOLD)
        run(told, arrays, threads=THREADS, outside=SHARED, seed=order)
    unasked = changed(TOLD, "@!%p2 bra after", "bra after")
    said = "race in shared memory: it reads what warp 1 wrote"
    fails(changed(body, FENCED, FENCED + unasked), said, arrays)
    late = changed(
        body,
        WAIT,
        f"{WAIT}{TOLD}".replace("again:", "once_more:").replace("bra again", "bra once_more"),
    )
    fails(late, said, arrays)


def test_what_the_machine_does_not_know_is_named():
    for text in (
        "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r1}, [%r2];",
        "tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r8, %p1;",
        "tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;",
    ):
        with pytest.raises(UnknownInstruction, match="does not know"):
            run(text, [out(1)])
    assert kernel_of("tcgen05.fence::before_thread_sync;", 1)
    half = product_body("core matrices", WHAT & ~(1 << 4))  # float16 sums
    with pytest.raises(UnknownInstruction, match="does not know the instruction descriptor"):
        run(half, given("core matrices", *operands(3)), threads=THREADS, outside=SHARED)
