"""A kernel makes a tensor map itself, and the copy engine moves boxes by it; planted bugs are
faults.
"""

import numpy as np
import pytest

from lessons.toolbox.gpu.faults import Fault
from tests.toolbox.gpu.running import kernel_of, run

ROWS, COLUMNS, BOX_ROWS, BOX = 10, 64, 4, 8  # of the tensor, and of a box; float32
SHARED = ".shared .align 128 .b8 tile[512];"
FIELD = "@%p1 tensormap.replace.tile.{}.shared::cta.b1024.b{} [%rd1 + 0], {};"
MAKE = [
    "mov.u64 %rd1, tile;",
    "mov.u32 %r1, tile;",
    "shl.b32 %r2, %r70, 2;",
    "add.u32 %r3, %r1, %r2;",
    "mov.b32 %r4, 0;",
    "st.shared.b32 [%r3], %r4;",
    "bar.warp.sync -1;",
    "setp.eq.u32 %p1, %r70, 0;",
    f"mov.b32 %r5, {BOX}; mov.b32 %r6, {BOX_ROWS}; mov.b32 %r7, {COLUMNS};",
    f"mov.b32 %r8, {ROWS}; mov.b64 %rd2, {4 * COLUMNS}; mov.b32 %r9, 1;",
    FIELD.format("global_address", 64, "%rd30"),
    FIELD.format("rank", 32, "0x1"),
    FIELD.format("box_dim", 32, "0x0, %r5"),
    FIELD.format("box_dim", 32, "0x1, %r6"),
    FIELD.format("global_dim", 32, "0x0, %r7"),
    FIELD.format("global_dim", 32, "0x1, %r8"),
    FIELD.format("global_stride", 64, "0x0, %rd2"),
    FIELD.format("element_stride", 32, "0x0, %r9"),
    FIELD.format("element_stride", 32, "0x1, %r9"),
    FIELD.format("elemtype", 32, "0x7"),
    FIELD.format("interleave_layout", 32, "0x0"),
    FIELD.format("swizzle_mode", 32, "0x0"),
    FIELD.format("fill_mode", 32, "0x0"),
    "bar.warp.sync -1;",
]
COPY = (
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
    "[%rd32 + 0], [%rd1 + 0], 0x80;"
)
FENCE = "fence.proxy.tensormap::generic.acquire.gpu [%rd32 + 0], 0x80;"
# An mbarrier in the bytes after the map and the box, then a box from row 8, column 16.
LOAD = [
    "bar.sync 0;",
    "@%p1 mbarrier.init.shared::cta.b64 [%r1 + 384], 1;",
    "bar.sync 0;",
    "mov.b32 %r10, 16; mov.b32 %r11, 8; add.u32 %r12, %r1, 128; add.u32 %r13, %r1, 384;",
    f"@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r13], {4 * BOX * BOX_ROWS};",
    "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes "
    "[%r12], [%rd32, {%r10, %r11}], [%r13];",
    "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r13], 0;",
    "add.u32 %r14, %r12, %r2;",
    "ld.shared.b32 %r15, [%r14];",
    "mad.wide.u32 %rd3, %r70, 4, %rd31;",
    "st.global.b32 [%rd3], %r15;",
]
WHOLE = [*MAKE, COPY, FENCE, *LOAD]


def arrays() -> list[np.ndarray]:
    """The tensor, a box's worth of output, room for a map."""
    tensor = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    return [tensor, np.zeros(32, np.float32), np.full(128, 0xFF, np.uint8)]


def tried(body: list[str], given: list[np.ndarray], **options) -> None:
    run("\n".join(body), given, outside=SHARED, **options)


@pytest.mark.parametrize("seed", range(4))
def test_a_map_that_the_kernel_makes(seed):
    """Rows 8 and 9 are there, rows 10 and 11 come as zeros."""
    tensor, out, _ = given = arrays()
    tried(WHOLE, given, seed=seed)
    wanted = np.zeros((BOX_ROWS, BOX), np.float32)
    wanted[:2] = tensor[8:, 16 : 16 + BOX]
    assert np.array_equal(out.reshape(BOX_ROWS, BOX), wanted)


def test_the_tensors_of_a_map_may_be_written():
    """A store goes to the address in the map, so that buffer is watched for races."""
    from lessons.toolbox.gpu.written import written_parameters

    assert written_parameters(kernel_of("\n".join(WHOLE), 3, SHARED)) == {
        "tried_param_0",  # by way of the map
        "tried_param_1",
        "tried_param_2",  # the map's own place
    }


def without(text: str) -> list[str]:
    return [line for line in WHOLE if text not in line]


BUGS = {  # name: (body, what the fault says)
    "no fence": (without("fence.proxy"), "no fence.proxy.tensormap came after this tensor map"),
    "the fence before the copy": (
        [*MAKE, FENCE, COPY, *LOAD],
        "no fence.proxy.tensormap came after this tensor map",
    ),
    "the map was never copied": (without("cp_fenceproxy"), "there is no tensor map"),
    "a field was never written": (without("rank"), "there is no tensor map|deadlock"),
    "a map of another kind": (
        [line.replace("], 0x7;", "], 0x17;") for line in WHOLE],
        "there is no tensor map",
    ),
    "half a warp copies it": (
        [
            *MAKE,
            "setp.lt.u32 %p3, %r70, 16;",
            f"@%p3 {COPY}",
            FENCE,
            *LOAD,
        ],
        "a part of a warp copies a tensor map",
    ),
    "at no multiple of 128": (
        [line.replace("[%rd1 + 0], 0x80", "[%rd1 + 64], 0x80") for line in WHOLE],
        "a tensor map at no multiple of 128",
    ),
    "a field with an index too large": (
        [line.replace("global_stride.shared::cta.b1024.b64 [%rd1 + 0], 0x0",
                      "global_stride.shared::cta.b1024.b64 [%rd1 + 0], 0x1") for line in WHOLE],
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_a_fault_or_a_wrong_number(bug):
    body, said = BUGS[bug]
    tensor, out, _ = given = arrays()
    if said:
        with pytest.raises(Fault, match=said):
            tried(body, given)
        return
    tried(body, given)
    assert not np.array_equal(out[:BOX], tensor[8, 16 : 16 + BOX])


def test_other_warps_may_not_touch_a_map_while_it_is_made():
    other = ["setp.eq.u32 %p4, %r70, 32;", "mov.u32 %r20, tile;", "@%p4 st.shared.b32 [%r20], 1;"]
    first = ["setp.ge.u32 %p5, %r70, 32;", "@%p5 bra on;", *MAKE, "on:"]
    with pytest.raises(Fault, match="race in shared memory"):
        tried([*first, *other], arrays(), threads=64)


# ---------------------------------------------------------------- arrivals that count more than one


def arrivals(*many: int) -> list[str]:
    """A thread arrives so many times at an mbarrier that expects 128, and all wait."""
    arrive = [f"@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1], {count};" for count in many]
    return [
        "mov.u32 %r1, tile;",
        "setp.eq.u32 %p1, %r70, 0;",
        "@%p1 mbarrier.init.shared::cta.b64 [%r1], 128;",
        *arrive,
        "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;",
    ]


def test_one_arrival_may_count_for_many():
    tried(arrivals(128), arrays())
    tried(arrivals(100, 28), arrays())
    with pytest.raises(Fault, match="deadlock"):
        tried(arrivals(127), arrays())
    with pytest.raises(Fault, match="more arrivals"):
        tried(arrivals(100, 29), arrays())
