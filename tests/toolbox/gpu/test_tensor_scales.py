"""Blackwell's products of blocks with scales (tcgen05.cp, tcgen05.mma with .block_scale) against
NumPy; planted bugs are faults.
"""

import numpy as np
import pytest

from lessons.toolbox.gpu.faults import UnknownInstruction
from lessons.toolbox.gpu.values import from_fp8
from tests.toolbox.gpu import test_tensor_memory as cases
from tests.toolbox.gpu.running import run
from tests.toolbox.gpu.test_tensor_memory import COMMIT, THREADS, WAIT, changed, descriptor, out

M, N, ROW = 128, 64, 64  # rows of the operands, bytes of a row: two instructions of 32
SHARED = """
.shared .align 16 .b8 place[16];
.shared .align 16 .b8 done[16];
.shared .align 1024 .b8 left[8192];
.shared .align 1024 .b8 right[4096];
.shared .align 1024 .b8 a_atoms[2048];
.shared .align 1024 .b8 b_atoms[2048];
"""
BEGIN = cases.BEGIN.replace("[place], 64", "[place], 128")
END = cases.END.replace("%r1, 64", "%r1, 128")
FENCE = "fence.proxy.async.shared::cta;\nbar.sync 0;\n"

# kind: (numbers a byte, scales of a row an instruction, are they UE8M0, type in the descriptor)
KINDS = {
    "mxf4nvf4.block_scale.scale_vec::4X": (2, 4, False, 1),
    "mxf4nvf4.block_scale.block16": (2, 4, True, 1),
    "mxf4nvf4.block_scale.scale_vec::2X": (2, 2, True, 1),
    "mxf4.block_scale.block32": (2, 2, True, 1),
    "mxf8f6f4.block_scale.scale_vec::1X": (1, 1, True, 0),
    "mxf8f6f4.block_scale": (1, 1, True, 0),
}


def what(kind: str, a_place: int = 0, b_place: int = 0) -> int:
    """The instruction descriptor; places: in which byte of a column the scales begin."""
    _, _, is_e8m0, type_ = KINDS[kind]
    bits = type_ << 7 | type_ << 10 | N // 8 << 17 | is_e8m0 << 23 | M // 128 << 27
    return bits | b_place << 4 | a_place << 29


def copies(kind: str) -> str:
    """Scales to columns 0 to 7 of A, 8 to 15 of B, an atom each four."""
    body = ""
    for variable, first in (("a_atoms", 0), ("b_atoms", 8)):
        body += descriptor(variable, "%rd5", 0, 0, 128)
        for atom in range(2):
            body += "@%p2 tcgen05.cp.cta_group::1.warpx4.32x128b "
            body += f"[%r1 + {first + 4 * atom}], %rd5;\nadd.u64 %rd5, %rd5, 32;\n"
    return body


def products(kind: str) -> str:
    """Two instructions along k: with four scales each the second one takes the next atom, else the
    next bytes of the same columns.
    """
    each = KINDS[kind][1]
    body = "setp.ne.u32 %p3, %r70, %r70;\nsetp.eq.u32 %p4, %r70, %r70;\n"
    for k in range(2):
        atom, place = divmod(k * each, 4)
        bits = what(kind, place, place)
        body += f"mov.u32 %r8, {bits if bits < 2**31 else bits - 2**32};\n"
        body += f"@%p2 tcgen05.mma.cta_group::1.kind::{kind} [%r1 + 64], %rd3, %rd4, %r8, "
        body += f"[%r1 + {4 * atom}], [%r1 + {8 + 4 * atom}], %p{3 + (k > 0)};\n"
        body += "add.u64 %rd3, %rd3, 16;\nadd.u64 %rd4, %rd4, 16;\n"
    return body


def body_of(kind: str) -> str:
    """d = (left · a_scales)(right · b_scales)ᵀ; each thread then writes its row."""
    body = BEGIN + "mul.lo.u32 %r6, %r70, 16;\n"
    sizes = {"left": 8192, "right": 4096, "a_atoms": 2048, "b_atoms": 2048}
    for source, (variable, size) in enumerate(sizes.items(), start=31):
        body += f"mov.u32 %r7, {variable}; add.u32 %r7, %r7, %r6; cvt.u64.u32 %rd2, %r6;\n"
        body += f"add.u64 %rd2, %rd2, %rd{source};\n"
        for first in range(0, size, 16 * THREADS):
            body += f"ld.global.v4.b32 {{%r60, %r61, %r62, %r63}}, [%rd2+{first}];\n"
            body += f"st.shared.v4.b32 [%r7+{first}], {{%r60, %r61, %r62, %r63}};\n"
    body += FENCE + copies(kind)
    body += descriptor("left", "%rd3", 0, 128, 512) + descriptor("right", "%rd4", 0, 128, 512)
    body += products(kind) + f"{COMMIT}\n{WAIT}"
    sums = [f"%r{100 + k}" for k in range(N)]
    body += f"tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {{{', '.join(sums)}}}, [%r3 + 64];\n"
    return body + "tcgen05.wait::ld.sync.aligned;\n" + cases.written(sums) + "\n" + END


def in_core_matrices(x: np.ndarray) -> np.ndarray:
    """[rows, 64] bytes: 8 rows of 16 bytes side by side, then the next 16 bytes of these rows."""
    return np.ascontiguousarray(x.reshape(-1, 8, ROW // 16, 16).swapaxes(1, 2))


def in_atoms(scales: np.ndarray) -> np.ndarray:
    """[128, 8] bytes -> 2048 bytes: two atoms by the formula of cuBLAS' documentation."""
    atoms = np.zeros(2048, dtype=np.uint8)
    for row, scale in np.ndindex(*scales.shape):
        at = scale // 4 * 512 + row % 32 * 16 + row // 32 * 4 + scale % 4
        atoms[at] = scales[row, scale]
    return atoms


def e2m1(bits: np.ndarray) -> np.ndarray:
    """[rows, n] bytes -> [rows, 2 n] numbers: a sign, two bits of exponent, one of mantissa; the
    lower half of a byte first.
    """
    code = np.stack([bits % 16, bits // 16], axis=-1).reshape(len(bits), -1).astype(np.float64)
    sign, size = np.where(code >= 8, -1.0, 1.0), code % 8
    exponent, half = size // 2, size % 2
    return sign * np.where(exponent == 0, half / 2, (1 + half / 2) * 2.0 ** (exponent - 1))


def given(kind: str, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """(arrays, what the product should be)."""
    per_byte, each, is_e8m0, _ = KINDS[kind]
    random = np.random.default_rng(seed)
    low, high = (120, 134) if is_e8m0 else (0, 127)
    arrays, sides = [out(N)], []
    codes = [random.integers(0, 256, (rows, ROW), dtype=np.uint8) for rows in (M, N)]
    if per_byte == 1:
        codes = [x & 0xBF for x in codes]  # no NaN
    scales = [random.integers(low, high, (128, 8), dtype=np.uint8) for _ in codes]
    for bits, stored in zip(codes, scales):
        numbers = e2m1(bits) if per_byte == 2 else from_fp8(bits, "e4m3").reshape(bits.shape)
        factors = stored[: len(bits), : 2 * each]
        if is_e8m0:
            factors = 2.0 ** (factors.astype(np.float64) - 127)
        else:
            factors = from_fp8(factors, "e4m3").reshape(factors.shape).astype(np.float64)
        sides.append(numbers * np.repeat(factors, numbers.shape[1] // factors.shape[1], axis=1))
    arrays += [in_core_matrices(x) for x in codes] + [in_atoms(x) for x in scales]
    return arrays, sides[0] @ sides[1].T


def run_body(body: str, arrays: list, seed: int = 0) -> np.ndarray:
    mine = [x.copy() for x in arrays]
    run(body, mine, threads=THREADS, outside=SHARED, seed=seed)
    return mine[0].view(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_of_blocks(kind, seed):
    arrays, exact = given(kind, seed)
    for order in range(3):
        found = run_body(body_of(kind), arrays, order)
        assert np.abs(found - exact).max() <= 1e-5 * np.abs(exact).max()


def test_the_sign_of_a_scale_is_ignored():
    kind = "mxf4nvf4.block_scale.scale_vec::4X"
    arrays, exact = given(kind, 1)
    arrays[3] = arrays[3] | np.uint8(0x80)
    assert np.abs(run_body(body_of(kind), arrays) - exact).max() <= 1e-5 * np.abs(exact).max()


def test_an_exponent_of_255_is_nan():
    """It belongs to one block of one row."""
    kind = "mxf4.block_scale.block32"
    arrays, _ = given(kind, 1)
    arrays[3][5 * 16] = 255  # row 5, first block
    found = np.isnan(run_body(body_of(kind), arrays))
    assert found[5].all() and found.sum() == N


NVFP4 = "mxf4nvf4.block_scale.scale_vec::4X"
OTHER_THREAD = "setp.eq.u32 %p8, %r70, 64;\n"
FIRST_COPY = "@%p2 tcgen05.cp.cta_group::1.warpx4.32x128b [%r1 + 0], %rd5;"
BUGS = {
    "the copy sees no fence": (FENCE, "bar.sync 0;\n", "no fence.proxy.async in between"),
    "the copy before the barrier": (
        FENCE,
        FENCE.replace("bar.sync 0;\n", ""),
        "race in shared memory: it reads what warp [123] wrote",
    ),
    "scales that nobody copied": (FIRST_COPY, "", "is read before it is written"),
    "another thread copies the scales": (
        FIRST_COPY,
        OTHER_THREAD + FIRST_COPY.replace("%p2", "%p8"),
        "race in tensor memory|is read before it is written",
    ),
    "new scales while the product may read the old": (
        COMMIT,
        "@%p2 tcgen05.cp.cta_group::1.warpx4.32x128b [%r1 + 0], %rd5;\n" + COMMIT,
        r"race in tensor memory: it (writes what the tensor core reads|overwrites what)",
    ),
    "two copies to one place": (
        FIRST_COPY,
        f"{FIRST_COPY}\n{FIRST_COPY}",
        "race in tensor memory: it overwrites what",
    ),
    "scales over the sums": (
        FIRST_COPY,
        FIRST_COPY.replace("%r1 + 0", "%r1 + 128"),
        "columns 128 to 131 of tensor memory are not allocated|are not allocated to the program",
    ),
    "scales from another lane on": (
        FIRST_COPY,
        FIRST_COPY.replace("%r1 + 0", "%r1 + 2097152"),
        "scales from lane 32 on; accepted: lane 0",
    ),
    "a swizzled row of scales": (
        FIRST_COPY,
        f"or.b64 %rd5, %rd5, {1 << 62};\n{FIRST_COPY}",
        "scales of a swizzled row",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_a_fault(bug):
    old, new, said = BUGS[bug]
    arrays, _ = given(NVFP4, 3)
    body = changed(body_of(NVFP4), old, new)
    for seed in range(4):
        with pytest.raises(cases.Fault, match=said):
            run_body(body, arrays, seed)


def test_quarters_that_differ_are_a_fault():
    """Scales that warps store themselves, which Triton's plain products do, each to its quarter."""
    stores = "tcgen05.st.sync.aligned.32x32b.x4.b32 [%r3 + 0], {%r64, %r64, %r64, %r64};\n"
    stores += "tcgen05.wait::st.sync.aligned;\n"
    arrays, _ = given(NVFP4, 3)
    body = changed(body_of(NVFP4), FIRST_COPY, "")
    body = changed(body, FENCE, f"mov.u32 %r64, %r70;\n{stores}{FENCE}")
    with pytest.raises(cases.Fault, match="the four quarters of tensor memory hold different"):
        run_body(body, arrays)


def test_a_copy_of_another_thread_has_no_order(seed):
    """A barrier of the threads says that it was started, not that it has ended."""
    arrays, _ = given(NVFP4, seed)
    copy = OTHER_THREAD + FIRST_COPY.replace("%p2", "%p8") + "\nbar.sync 0;\n"
    body = changed(body_of(NVFP4), FIRST_COPY, copy)
    for order in range(4):
        with pytest.raises(cases.Fault, match="race in tensor memory: it reads what"):
            run_body(body, arrays, order)


def test_scales_in_use_may_not_be_overwritten(seed):
    """The copies have ended, and were waited for; the products that read them were not."""
    arrays, _ = given(NVFP4, seed)
    ended = f"{COMMIT}\n{WAIT}".replace("again", "copied")
    body = changed(body_of(NVFP4), copies(NVFP4), copies(NVFP4) + ended)
    body = body.replace(WAIT, WAIT.replace("[done], 0", "[done], 1"))
    run_body(body, arrays)
    late = body.rindex(COMMIT)
    body = body[:late] + descriptor("a_atoms", "%rd5", 0, 0, 128) + FIRST_COPY + "\n" + body[late:]
    for order in range(4):
        with pytest.raises(cases.Fault, match="it writes what the tensor core reads at"):
            run_body(body, arrays, order)


def test_a_copy_may_follow_once_the_product_has_ended():
    """The same columns again, after a wait: no fault, and the sums are twice as large."""
    arrays, exact = given(NVFP4, 4)
    body = body_of(NVFP4)
    once_more = copies(NVFP4)
    once_more += descriptor("left", "%rd3", 0, 128, 512) + descriptor("right", "%rd4", 0, 128, 512)
    once_more += products(NVFP4).replace(
        "%r8, [%r1 + 0], [%r1 + 8], %p3", "%r8, [%r1 + 0], [%r1 + 8], %p4"
    )
    once_more += f"{COMMIT}\n{WAIT}".replace("[done], 0", "[done], 1").replace("again", "again2")
    body = changed(body, WAIT, WAIT + once_more)
    for order in range(4):
        found = run_body(body, arrays, order)
        assert np.abs(found - 2 * exact).max() <= 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;",
        "tcgen05.cp.cta_group::2.32x128b.warpx4 [%r1], %rd1;",
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4 [%r1], %rd1, %rd2, %r8, %p1;",
        "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::4X "
        "[%r1], %rd1, %rd2, %r8, [%r1], [%r1], %p1;",
        "tcgen05.mma.cta_group::1.kind::f16.block_scale [%r1], %rd1, %rd2, %r8, [%r1], [%r1], %p1;",
    ],
)
def test_what_the_machine_does_not_know_is_named(text):
    with pytest.raises(UnknownInstruction, match="does not know"):
        run(text, [out(1)])


@pytest.mark.parametrize(
    "kind, bits",
    {
        "UE4M3 for blocks of 32": ("mxf4.block_scale.block32", ~(1 << 23)),
        "no E2M1": (NVFP4, ~(1 << 7)),
        "no rows": (NVFP4, ~(1 << 27)),
    }.values(),
)
def test_a_descriptor_that_does_not_exist(kind, bits):
    arrays, _ = given(kind, 3)
    body = body_of(kind).replace(f"mov.u32 %r8, {what(kind)}", f"mov.u32 %r8, {what(kind) & bits}")
    with pytest.raises(UnknownInstruction, match="instruction descriptor"):
        run_body(body, arrays)


def test_a_place_that_does_not_exist():
    """Four scales fill a column, two begin at byte 0 or 2."""
    for kind, place in ((NVFP4, 2), ("mxf4.block_scale.block32", 1)):
        arrays, _ = given(kind, 3)
        new = what(kind, place)
        body = body_of(kind).replace(f"mov.u32 %r8, {what(kind)};", f"mov.u32 %r8, {new};")
        assert body != body_of(kind)
        with pytest.raises(UnknownInstruction, match="instruction descriptor"):
            run_body(body, arrays)
