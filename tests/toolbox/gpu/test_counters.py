"""Counts of sectors and passes against what a hand, or a plain loop over the threads, works out."""

import numpy as np
import pytest

from lessons.toolbox.gpu.counters import Counts, counting, matrix_flops
from tests.toolbox.gpu.running import kernel_of, run

LOAD = "mul.wide.u32 %rd1, %r70, {step};\nadd.u64 %rd1, %rd1, %rd30;\n"
LOAD += "ld.global.{type} {to}, [%rd1+{first}];"
SHARED = "mul.lo.u32 %r1, %r70, {step};\nst.shared.{type} [%r1], {of};"


def of_op(done, op: str, *names: str) -> tuple[int, ...]:
    """The columns of the only instruction with this operation after the pointer's."""
    places = [
        i
        for i, instruction in enumerate(done.kernel.instructions)
        if instruction.op == op and not instruction.has("param")
    ]
    assert len(places) == 1, places
    return tuple(int(done.counts.columns[name][places[0]]) for name in names)


def counted(body: str, arrays: list, **options):
    with counting():
        return run(body, arrays, **options)


@pytest.mark.parametrize(
    "step, type_, first, sectors, least",
    [
        (4, "b32", 0, 4, 4),  # neighbours
        (8, "b32", 0, 8, 4),  # every second number
        (32, "b32", 0, 32, 4),  # a sector each
        (0, "b32", 0, 1, 1),  # one number for all
        (4, "b32", 16, 5, 4),  # begins in the middle of a sector
        (2, "b16", 0, 2, 2),
        (1, "b8", 0, 1, 1),
        (8, "b64", 0, 8, 8),
    ],
)
def test_sectors_of_a_warp(step, type_, first, sectors, least):
    to = {"b8": "%rs1", "b16": "%rs1", "b32": "%r1", "b64": "%rd2"}[type_]
    body = LOAD.format(step=step, type=type_, to=to, first=first)
    done = counted(body, [np.zeros(4096, np.uint8)])
    found = of_op(done, "ld", "requests", "sectors", "least_sectors", "threads")
    assert found == (1, sectors, least, 32)
    assert done.counts.footprint("loaded") == 32 * sectors
    assert done.counts.footprint("stored") == 0


def test_loads_of_16_bytes_and_of_a_part_of_the_warp():
    body = LOAD.format(step=16, type="v4.b32", to="{%r1, %r2, %r3, %r4}", first=0)
    done = counted(body, [np.zeros(4096, np.uint8)], grid=3)
    assert of_op(done, "ld", "requests", "sectors", "bytes") == (3, 48, 3 * 512)
    assert done.counts.footprint("loaded") == 512, "three programs, the same bytes"
    body = "setp.lt.u32 %p1, %r70, 5;\n" + LOAD.format(step=32, type="b32", to="%r1", first=0)
    body = body.replace("ld.global", "@%p1 ld.global")
    done = counted(body, [np.zeros(4096, np.uint8)])
    assert of_op(done, "ld", "sectors", "threads") == (5, 5)


@pytest.mark.parametrize(
    "step, type_, of, passes, least",
    [
        (4, "b32", "%r70", 1, 1),
        (8, "b32", "%r70", 2, 1),  # 16 of the banks, each twice
        (128, "b32", "%r70", 32, 1),  # one bank
        (132, "b32", "%r70", 1, 1),  # the same column of padded rows
        (8, "b64", "%rd30", 2, 2),  # half a warp each
        (16, "v4.b32", "{%r70, %r70, %r70, %r70}", 4, 4),  # a quarter each
        (32, "v4.b32", "{%r70, %r70, %r70, %r70}", 8, 4),
        (2, "b16", "%rs2", 1, 1),  # two threads in a word
    ],
)
def test_passes_of_shared_memory(step, type_, of, passes, least):
    body = "mov.u16 %rs2, 7;\n" + SHARED.format(step=step, type=type_, of=of)
    done = counted(body, [np.zeros(4, np.uint8)], shared=8192)
    assert of_op(done, "st", "shared_requests", "passes", "least_passes") == (1, passes, least)


def test_a_word_for_all_threads_is_one_pass():
    body = "st.shared.b32 [64], 3;\nbar.sync 0;\nld.shared.b32 %r2, [64];"
    assert of_op(counted(body, [], shared=128), "ld", "passes") == (1,)


@pytest.mark.parametrize(
    "shift, passes",
    [
        (5, 2),
        (1, 2),
        (0, 4),
        (2, 4),
    ],  # the lane's number without its last bits; (2: halves stay apart)
)
def test_wide_loads_of_neighbours_that_want_the_same(shift, passes):
    """16 bytes a thread: two quarters of a warp go together where neighbours share an address."""
    of = {5: "shr.u32 %r1, %r70, 5;", 1: "shr.u32 %r1, %r70, 1;", 0: "mov.u32 %r1, %r70;",
          2: "and.b32 %r1, %r70, 7;"}[shift]  # fmt: skip
    body = of + "\nmul.lo.u32 %r1, %r1, 16;\nld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1];"
    assert of_op(counted(body, [], shared=1024), "ld", "passes") == (passes,)


COPY = """
mul.lo.u32 %r1, %r70, 16;
mul.wide.u32 %rd1, %r70, {step};
add.u64 %rd1, %rd1, %rd30;
setp.lt.u32 %p1, %r70, {live};
selp.b32 %r2, 16, 0, %p1;
cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;
"""


@pytest.mark.parametrize(
    "step, live, passes",
    [
        (16, 32, 4),  # four lines of 128 bytes
        (32, 32, 8),  # eight
        (128, 32, 32),  # one line a thread
        (16, 0, 4),  # nothing but zeros
        (128, 8, 8 + 3),
    ],
)
def test_asynchronous_copies_arrive_by_lines(step, live, passes):
    body = COPY.format(step=step, live=live).strip()
    done = counted(body, [np.zeros(4096, np.uint8)], shared=512)
    assert of_op(done, "cp", "passes") == (passes,)


def test_a_sample_of_the_programs():
    body = LOAD.format(step=4, type="b32", to="%r1", first=0)
    with counting(programs=3):
        done = run(body, [np.zeros(4096, np.uint8)], grid=10)
    assert (done.programs, done.ran) == (10, 3)
    assert of_op(done, "ld", "requests", "first_sectors") == (3, 4)
    assert len(done.counts.path) == len(done.kernel.instructions)


def test_programs_that_belong_together_run_together():
    body = LOAD.format(step=4, type="b32", to="%r1", first=0)
    with counting(programs=8, together=4):
        done = run(body, [np.zeros(4096, np.uint8)], grid=20)
    assert done.counts.programs.tolist() == [0, 1, 2, 3, 16, 17, 18, 19]


def test_what_the_launch_has_stored_does_not_come_from_memory():
    body = LOAD.format(step=4, type="b32", to="%r1", first=0)
    stored = "st.global.b32 [%rd1], %r70;\n"
    done = counted(body, [np.zeros(4096, np.uint8)])
    assert of_op(done, "ld", "first_sectors") == (4,)
    at = body.rindex("ld.global")
    done = counted(body[:at] + stored + body[at:], [np.zeros(4096, np.uint8)])
    assert of_op(done, "ld", "sectors", "first_sectors") == (4, 0)


@pytest.mark.parametrize("pitch, passes", [(128, 32), (144, 4)])
def test_rows_of_ldmatrix(pitch, passes):
    """Rows 128 bytes apart begin in one bank; with 16 bytes of padding they use all of them."""
    body = f"mul.lo.u32 %r1, %r70, {pitch};\n"
    body += "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2, %r3, %r4, %r5}, [%r1];"
    done = counted(body, [], shared=32 * 144)
    assert of_op(done, "ldmatrix", "passes", "least_passes") == (passes, 4)


class Warps:
    """The threads of some warps, as far as a count asks."""

    def __init__(self, count: int):
        self.pc, self.warp = 0, np.arange(count) // 32
        self.lane, self.warps, self.programs = np.arange(count) % 32, 1, np.arange(count // 32)
        self.memory = type("Memory", (), {"buffers": [type("B", (), {"data": bytes(1 << 16)})]})


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_random_addresses_against_a_loop(size, seed):
    generator = np.random.default_rng(seed)
    lanes = np.sort(generator.choice(96, 70, replace=False))
    address = generator.integers(0, 2000 // size, 70) * size
    kernel, threads = kernel_of("mov.u32 %r1, 0;", 0), Warps(96)
    counts = Counts(kernel)
    counts.access(threads, "loaded", address + (1 << 40), size, lanes)
    counts.shared_access(threads, address, size, lanes)
    sectors = least = passes = 0
    for warp in range(3):
        mine = [int(a) for a, lane in zip(address, lanes) if lane // 32 == warp]
        sectors += len({a // 32 for a in mine})
        least += -(-len(set(mine)) * size // 32)
    part = {8: 16, 16: 8}.get(size, 32)
    for first in range(0, 96, part):
        group = [int(a) for a, lane in zip(address, lanes) if first <= lane < first + part]
        words = {a // 4 + k for a in group for k in range(max(1, size // 4))}
        passes += max((sum(w % 32 == bank for w in words) for bank in range(32)), default=0)
    found = {name: int(column[0]) for name, column in counts.columns.items()}
    assert (found["sectors"], found["least_sectors"], found["passes"]) == (sectors, least, passes)
    assert counts.footprint("loaded") == 32 * len(set((address // 32).tolist()))


def test_matrix_flops_of_a_warp():
    mma = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1, %r2, %r3, %r4}, "
    mma += "{%r5, %r6, %r7, %r8}, {%r9, %r10}, {%r1, %r2, %r3, %r4};"
    product, other = kernel_of(mma + "\nadd.s32 %r1, %r2, %r3;", 0).instructions[-3:-1]
    assert matrix_flops(product) == 2 * 16 * 8 * 16
    assert matrix_flops(other) == 0


def test_nothing_is_counted_outside():
    assert run("mov.u32 %r1, 0;", []).counts is None
