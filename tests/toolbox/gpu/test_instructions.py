"""Each instruction of the machine against what NumPy or a hand works out."""

import math
import struct

import numpy as np
import pytest

from lessons.toolbox.gpu.faults import UnknownInstruction
from lessons.toolbox.gpu.rounding import ROUNDING
from tests.toolbox.gpu.running import computed, kernel_of, run

INF, NAN = float("inf"), float("nan")
SPECIAL = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-40, -1e-40, 3.4e38, 1.5, -2.5]


@pytest.fixture(autouse=True)
def exact_rounding(monkeypatch):
    monkeypatch.setattr(ROUNDING, "seed", 0)


def bits(kind: str, seed: int) -> np.ndarray:
    """[32] random numbers of a kind, with the edges among them."""
    generator = np.random.default_rng(seed)
    dtype = np.dtype({"s": "i", "u": "u", "f": "f"}[kind[0]] + str(int(kind[1:]) // 8))
    if kind[0] == "f":
        x = (generator.standard_normal(32) * 10.0 ** generator.integers(-3, 3, 32)).astype(dtype)
        with np.errstate(all="ignore"):
            x[: len(SPECIAL)] = generator.permutation(SPECIAL)
        return x
    info = np.iinfo(dtype)
    x = generator.integers(info.min, info.max, 32, dtype=dtype, endpoint=True)
    x[:4] = 0, 1, info.max, info.min
    return x


def as_bits(x: np.ndarray) -> np.ndarray:
    """The bits of numbers; every NaN the same."""
    if x.dtype.kind == "f":
        x = np.where(np.isnan(x), np.array(NAN, dtype=x.dtype), x)
    return x.view(f"u{x.dtype.itemsize}")


def wrapped(value: int, kind: str) -> int:
    """A whole number in so many bits."""
    size = int(kind[1:])
    value &= (1 << size) - 1
    return value - (1 << size) if kind[0] == "s" and value >> (size - 1) else value


def signed_quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


# instruction: (kinds of the inputs, kind of the result, the same in Python's whole numbers)
INTEGERS = {
    "add.s32 %r9, %r1, %r2;": ("s32 s32", "s32", lambda a, b: a + b),
    "sub.s64 %rd9, %rd1, %rd2;": ("s64 s64", "s64", lambda a, b: a - b),
    "mul.lo.s32 %r9, %r1, %r2;": ("s32 s32", "s32", lambda a, b: a * b),
    "mul.hi.s32 %r9, %r1, %r2;": ("s32 s32", "s32", lambda a, b: (a * b) >> 32),
    "mul.hi.u32 %r9, %r1, %r2;": ("u32 u32", "u32", lambda a, b: (a * b) >> 32),
    "mul.wide.s32 %rd9, %r1, %r2;": ("s32 s32", "s64", lambda a, b: a * b),
    "mul.wide.u32 %rd9, %r1, %r2;": ("u32 u32", "u64", lambda a, b: a * b),
    "mad.lo.s32 %r9, %r1, %r2, %r3;": ("s32 s32 s32", "s32", lambda a, b, c: a * b + c),
    "mad.wide.s32 %rd9, %r1, %r2, %rd3;": ("s32 s32 s64", "s64", lambda a, b, c: a * b + c),
    "min.s32 %r9, %r1, %r2;": ("s32 s32", "s32", min),
    "max.u32 %r9, %r1, %r2;": ("u32 u32", "u32", max),
    "and.b32 %r9, %r1, %r2;": ("u32 u32", "u32", lambda a, b: a & b),
    "xor.b64 %rd9, %rd1, %rd2;": ("u64 u64", "u64", lambda a, b: a ^ b),
    "not.b32 %r9, %r1;": ("u32", "u32", lambda a: ~a),
    "neg.s32 %r9, %r1;": ("s32", "s32", lambda a: -a),
    "abs.s32 %r9, %r1;": ("s32", "s32", abs),
    "shl.b32 %r9, %r1, 5;": ("u32", "u32", lambda a: a << 5),
    "shl.b32 %r9, %r1, 40;": ("u32", "u32", lambda a: 0),
    "shr.s32 %r9, %r1, 40;": ("s32", "s32", lambda a: a >> 31),
    "shr.s32 %r9, %r1, 7;": ("s32", "s32", lambda a: a >> 7),
    "shr.u64 %rd9, %rd1, 33;": ("u64", "u64", lambda a: a >> 33),
    "bfe.u32 %r9, %r1, 4, 14;": ("u32", "u32", lambda a: (a >> 4) & 0x3FFF),
    "bfe.s32 %r9, %r1, 8, 8;": ("u32", "s32", lambda a: wrapped(a >> 8, "s8")),
    "popc.b32 %r9, %r1;": ("u32", "u32", lambda a: bin(a).count("1")),
    "clz.b32 %r9, %r1;": ("u32", "u32", lambda a: 32 - a.bit_length()),
    "brev.b32 %r9, %r1;": ("u32", "u32", lambda a: int(f"{a:032b}"[::-1], 2)),
    "bfi.b32 %r9, %r1, %r2, 8, 4;": (
        "u32 u32",
        "u32",
        lambda a, b: (b & ~0xF00) | ((a & 0xF) << 8),
    ),
    "lop3.b32 %r9, %r1, %r2, %r3, 0xEA;": ("u32 u32 u32", "u32", lambda a, b, c: (a & b) | c),
    "shf.l.wrap.b32 %r9, %r1, %r2, 8;": (
        "u32 u32",
        "u32",
        lambda a, b: ((b << 32 | a) << 8) >> 32,
    ),
    "prmt.b32 %r9, %r1, %r2, 0x5410;": (
        "u32 u32",
        "u32",
        lambda a, b: (a & 0xFFFF) | (b & 0xFFFF) << 16,
    ),
    "prmt.b32 %r9, %r1, %r2, 0x0008;": (
        "u32 u32",
        "u32",
        lambda a, b: (a & 0xFF) * 0x01010100 | (0xFF if a & 0x80 else 0),
    ),
    "cvt.s64.s32 %rd9, %r1;": ("s32", "s64", lambda a: a),
    "cvt.u64.u32 %rd9, %r1;": ("u32", "u64", lambda a: a),
    "cvt.u32.u64 %r9, %rd1;": ("u64", "u32", lambda a: a),
    "cvt.s32.s8 %r9, %r1;": ("u32", "s32", lambda a: wrapped(a, "s8")),
    "cvt.sat.s8.s32 %r9, %r1;": ("s32", "s32", lambda a: max(-128, min(127, a))),
    "add.u32 %r9, %r1, 0xFFFFFFFF;": ("u32", "u32", lambda a: a - 1),
}


@pytest.mark.parametrize("instruction", INTEGERS)
def test_integers(instruction, seed):
    kinds, result, function = INTEGERS[instruction]
    given = [bits(kind, seed + i) for i, kind in enumerate(kinds.split())]
    register = instruction.split()[1].rstrip(",")
    out = computed(instruction, given, register, f"b{result[1:]}")
    want = [wrapped(function(*map(int, row)), "u" + result[1:]) for row in zip(*given)]
    assert out.tolist() == want


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_division(kind, seed):
    a, b = bits(kind, seed), bits(kind, seed + 1)
    b[b == 0] = 3
    out = computed(f"div.{kind} %r9, %r1, %r2;", [a, b], "%r9", "b32")
    rest = computed(f"rem.{kind} %r9, %r1, %r2;", [a, b], "%r9", "b32")
    for x, y, q, r in zip(map(int, a), map(int, b), out, rest):
        want = signed_quotient(x, y)
        assert (int(q), int(r)) == (wrapped(want, "u32"), wrapped(x - want * y, "u32"))


FLOATS = {
    "add.f32 %r9, %r1, %r2;": lambda a, b: a + b,
    "sub.f32 %r9, %r1, %r2;": lambda a, b: a - b,
    "mul.f32 %r9, %r1, %r2;": lambda a, b: a * b,
    "div.rn.f32 %r9, %r1, %r2;": lambda a, b: a / b,
    "div.full.f32 %r9, %r1, %r2;": lambda a, b: a / b,
    "max.f32 %r9, %r1, %r2;": np.fmax,
    "min.f32 %r9, %r1, %r2;": np.fmin,
    "max.NaN.f32 %r9, %r1, %r2;": np.maximum,
    "max.f32 %r9, %r1, %r2, %r3;": lambda a, b, c: np.fmax(np.fmax(a, b), c),
    "min.NaN.f32 %r9, %r1, %r2, %r3;": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "neg.f32 %r9, %r1;": np.negative,
    "abs.f32 %r9, %r1;": np.abs,
    "copysign.f32 %r9, %r1, %r2;": lambda a, b: np.where(np.signbit(a), -np.abs(b), np.abs(b)),
    "sqrt.rn.f32 %r9, %r1;": np.sqrt,
    "ex2.approx.f32 %r9, %r1;": np.exp2,
    "lg2.approx.f32 %r9, %r1;": np.log2,
    "rcp.approx.f32 %r9, %r1;": lambda a: 1 / a,
    "rsqrt.approx.f32 %r9, %r1;": lambda a: 1 / np.sqrt(a),
}


@pytest.mark.parametrize("instruction", FLOATS)
def test_floats(instruction, seed):
    given = [bits("f32", seed + i) for i in range(instruction.count("%r") - 1)]
    out = computed(instruction, given, "%r9", "b32")
    if ".approx" in instruction or ".full" in instruction:  # one rounding, of the exact result
        given = [x.astype(np.float64) for x in given]
    with np.errstate(all="ignore"):
        want = FLOATS[instruction](*given).astype(np.float32)
    assert np.array_equal(as_bits(out.view(np.float32)), as_bits(want))


def test_ftz_flushes_what_comes_in_and_goes_out():
    tiny, small = np.full(32, 1e-40, np.float32), np.full(32, 1e-30, np.float32)
    one = np.ones(32, np.float32)
    assert (computed("mul.ftz.f32 %r9, %r1, %r2;", [tiny, one], "%r9", "b32") == 0).all()
    assert (computed("mul.ftz.f32 %r9, %r1, %r2;", [small, small], "%r9", "b32") == 0).all()
    assert (computed("mul.f32 %r9, %r1, %r2;", [tiny, one], "%r9", "b32") != 0).all()
    minus = computed("mul.ftz.f32 %r9, %r1, %r2;", [-tiny, one], "%r9", "b32")
    assert (minus == 0x80000000).all(), "the sign stays"


def test_fma_rounds_once(seed):
    """Against whole numbers of Python, of which a float32 is one times a power of two. Among them
    sums whose float64 is exactly between two float32.
    """
    generator = np.random.default_rng(seed)
    a, b, c = (generator.standard_normal(32).astype(np.float32) for _ in range(3))
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: with 2^-60 beside it, float64 forgets on which side it is
    a[:2] = b[:2] = np.float32(1 + 2.0**-12)
    c[:2] = 2.0**-60, -(2.0**-60)
    out = computed("fma.rn.f32 %r9, %r1, %r2, %r3;", [a, b, c], "%r9", "b32").view(np.float32)
    for x, y, z, found in zip(a, b, c, out):
        exact = scaled(x) * scaled(y) + scaled(z) * (1 << 200)
        assert abs(scaled(found) * (1 << 200) - exact) <= half_a_unit(found), (x, y, z, found)
    assert out[0] == np.nextafter(out[1], np.float32(2))


def scaled(x) -> int:
    """x · 2^200, exactly."""
    numerator, denominator = float(x).as_integer_ratio()
    return numerator * (1 << 200) // denominator


def half_a_unit(x) -> int:
    """Half the distance to the next float32, times 2^400."""
    return int(scaled(np.spacing(np.abs(x))) << 199)


@pytest.mark.parametrize("seed_of_rounding", [1, 77, 4242])
@pytest.mark.parametrize(
    "instruction, function, units",
    [
        ("ex2.approx.f32 %r9, %r1;", math.exp2 if hasattr(math, "exp2") else lambda x: 2**x, 2),
        ("rcp.approx.f32 %r9, %r1;", lambda x: 1 / x, 1),
        ("rsqrt.approx.f32 %r9, %r1;", lambda x: x**-0.5, 1.1),
        ("div.full.f32 %r9, 0f3F800000, %r1;", lambda x: 1 / x, 2),
    ],
)
def test_an_approximation_stays_within_the_manual(
    instruction, function, units, seed_of_rounding, seed, monkeypatch
):
    """And uses what the manual allows: a test that needs more exact results fails."""
    monkeypatch.setattr(ROUNDING, "seed", seed_of_rounding)
    x = np.random.default_rng(seed).uniform(0.1, 30, 32).astype(np.float32)
    out = computed(instruction, [x], "%r9", "b32").view(np.float32)
    error = [abs(float(o) / function(float(v)) - 1) * 2**23 for o, v in zip(out, x)]
    assert 0.3 < max(error) <= units + 1e-6
    assert computed("ex2.approx.f32 %r9, %r1;", [0 * x], "%r9", "b32").view(np.float32).max() == 1


def test_comparisons_with_nan():
    x = np.tile(np.array([1, 2, NAN, 2], np.float32), 8)
    y = np.tile(np.array([2, 2, 2, NAN], np.float32), 8)
    expected = {
        "lt": "1000",
        "le": "1100",
        "eq": "0100",
        "ne": "1000",
        "neu": "1011",
        "ltu": "1011",
    }
    expected |= {"nan": "0011", "num": "1100", "gt": "0000", "geu": "0111"}
    for name, want in expected.items():
        text = f"setp.{name}.f32 %p1, %r1, %r2;\nselp.b32 %r9, 1, 0, %p1;"
        out = computed(text, [x, y], "%r9", "b32")
        assert "".join(map(str, out[:4])) == want, name


def test_comparing_two_halves_at_once():
    """The first predicate is of the lower halves, the second of the upper ones: Triton compares
    bfloat16 so from Hopper on. Of single numbers the second one is the opposite.
    """
    one, two, nan = 0x3F80, 0x4000, 0x7FC0
    x = np.tile(np.array([one | two << 16, two | one << 16, nan | one << 16], np.uint32), 11)[:32]
    y = np.full(32, one | one << 16, np.uint32)
    for name, want in (("eq", "1 0 0 1 0 1"), ("neu", "0 1 1 0 1 0"), ("lt", "0 0 0 0 0 0")):
        text = f"setp.{name}.bf16x2 %p1|%p2, %r1, %r2;\nselp.b32 %r9, 1, 0, %p1;"
        text += "\nselp.b32 %r8, 2, 0, %p2;\nor.b32 %r9, %r9, %r8;"
        found = computed(text, [x, y], "%r9", "b32")[:3]
        assert [int(n) for n in want.split()] == [b for n in found for b in (n & 1, n >> 1)], name
    text = "setp.ne.s32 %p3, %r1, %r1;\nsetp.lt.or.s32 %p1|%p2, %r1, 0, %p3;"
    text += "\nselp.b32 %r9, 1, 0, %p1;\nselp.b32 %r8, 2, 0, %p2;\nor.b32 %r9, %r9, %r8;"
    numbers = np.arange(-16, 16, dtype=np.int32)
    assert computed(text, [numbers], "%r9", "b32").tolist() == [1] * 16 + [2] * 16


@pytest.mark.parametrize(
    "text",
    [
        "add.sat.s32 %r1, %r2, %r3;",
        "add.cc.u32 %r1, %r2, %r3;",
        "fma.rz.f32 %r1, %r2, %r3, %r4;",
        "fma.rn.relu.bf16x2 %r1, %r2, %r3, %r4;",
        "add.ftz.f16 %rs1, %rs2, %rs3;",
        "max.s32 %r1, %r2, %r3, %r4;",
        "min.xorsign.abs.f32 %r1, %r2, %r3;",
        "setp.lt.ftz.f32 %p1, %r1, %r2;",
        "atom.global.add.noftz.f16x2 %r1, [%rd1], %r2;",
        "cvt.rn.relu.bf16.f32 %rs1, %r1;",
    ],
)
def test_a_word_that_changes_the_result_is_not_skipped(text):
    with pytest.raises(UnknownInstruction, match="does not know"):
        run(text, [])


def test_a_variable_that_is_no_register_is_named():
    with pytest.raises(UnknownInstruction, match=r"kernel.py:8: .* the variable 'table'"):
        run("mov.u64 %rd1, table;", [])


def test_two_integers_in_a_register():
    """Each half wraps around by itself."""
    x = np.full(32, 0xFFFF_7FFF, np.uint32)
    y = np.full(32, 0x0001_0001, np.uint32)
    for name, want in {"add": 0x0000_8000, "min": 0xFFFF_0001, "max": 0x0001_7FFF}.items():
        text = f"{name}.s16x2 %r9, %r1, %r2;"
        assert (computed(text, [x, y], "%r9", "b32") == want).all(), name
    assert (computed("max.u16x2 %r9, %r1, 65537;", [x], "%r9", "b32") == 0xFFFF_7FFF).all()


def test_halves(seed):
    """bfloat16 and float16 against torch, which rounds each operation once."""
    import torch

    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        generator = torch.Generator().manual_seed(seed)
        a, b, c = (torch.randn(32, generator=generator).to(dtype) for _ in range(3))
        x, y, z = (v.view(torch.uint16).numpy() for v in (a, b, c))

        def result(text, *given, kind=kind, dtype=dtype):
            out = computed(text.replace("KIND", kind), list(given), "%rs9", "b16")
            return torch.from_numpy(out).view(dtype)

        assert torch.equal(result("add.KIND %rs9, %rs1, %rs2;", x, y), a + b)
        assert torch.equal(result("mul.KIND %rs9, %rs1, %rs2;", x, y), a * b)
        fma = result("fma.rn.KIND %rs9, %rs1, %rs2, %rs3;", x, y, z)
        assert torch.equal(fma, (a.double() * b.double() + c.double()).to(dtype))
        text = "cvt.f32.KIND %r9, %rs1;\ncvt.rn.KIND.f32 %rs9, %r9;"
        assert torch.equal(result(text, x), a)
        wide = np.random.default_rng(seed).standard_normal(32).astype(np.float32)
        out = computed(f"cvt.rn.{kind}.f32 %rs9, %r1;", [wide], "%rs9", "b16")
        assert torch.equal(torch.from_numpy(out).view(dtype), torch.from_numpy(wide).to(dtype))
        both = computed(f"cvt.rn.{kind}x2.f32 %r9, %r1, %r2;", [wide, -wide], "%r9", "b32")
        assert np.array_equal(both >> 16, out) and np.array_equal(both & 0xFFFF, out ^ 0x8000)


def test_fp8(seed):
    import torch

    x = (np.random.default_rng(seed).standard_normal(32) * 200).astype(np.float32)
    text = "cvt.rn.satfinite.e4m3x2.f32 %rs9, %r1, %r2;"
    out = computed(text, [x, 2 * x], "%rs9", "b16")
    for part, values in ((out >> 8, x), (out & 0xFF, 2 * x)):
        want = torch.from_numpy(np.clip(values, -448, 448)).to(torch.float8_e4m3fn)
        assert np.array_equal(part, want.view(torch.uint8).numpy())
    back = computed("cvt.rn.f16x2.e4m3x2 %r9, %rs1;", [out], "%r9", "b32")
    low = (back & 0xFFFF).astype(np.uint16).view(np.float16)
    stored = torch.from_numpy((out & 0xFF).astype(np.uint8)).view(torch.float8_e4m3fn)
    assert np.array_equal(low, stored.half().numpy())


def test_floats_to_integers():
    x = np.tile(np.array([1.5, 2.5, -1.5, NAN, 1e20, -1e20, INF, -0.2], np.float32), 4)
    nearest = computed("cvt.rni.s32.f32 %r9, %r1;", [x], "%r9", "b32").view(np.int32)
    cut = computed("cvt.rzi.s32.f32 %r9, %r1;", [x], "%r9", "b32").view(np.int32)
    top, low = 2**31 - 1, -(2**31)
    assert nearest[:8].tolist() == [2, 2, -2, 0, top, low, top, 0]
    assert cut[:8].tolist() == [1, 2, -1, 0, top, low, top, 0]


# ---------------------------------------------------------------- warps


def test_shuffles():
    x = np.arange(32, dtype=np.uint32) * 10
    lane = np.arange(32)
    for text, want in {
        "shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;": lane ^ 1,
        "shfl.sync.idx.b32 %r9, %r1, 5, 31, -1;": lane * 0 + 5,
        "shfl.sync.up.b32 %r9, %r1, 3, 0, -1;": np.where(lane >= 3, lane - 3, lane),
        "shfl.sync.down.b32 %r9, %r1, 3, 31, -1;": np.where(lane < 29, lane + 3, lane),
        # segments of 8 lanes
        "shfl.sync.idx.b32 %r9, %r1, 2, 6175, -1;": lane // 8 * 8 + 2,
        "shfl.sync.up.b32 %r9, %r1, 1, 6144, -1;": np.where(lane % 8 > 0, lane - 1, lane),
    }.items():
        assert computed(text, [x], "%r9", "b32").tolist() == (want * 10).tolist(), text


def test_votes_and_sums(seed):
    x = bits("s32", seed)
    ballot = "setp.gt.s32 %p1, %r1, 0;\nvote.sync.ballot.b32 %r9, %p1, -1;"
    want = sum(1 << lane for lane in range(32) if x[lane] > 0)
    assert (computed(ballot, [x], "%r9", "b32") == want).all()
    for op, function in {"add": np.add, "max": np.maximum, "min": np.minimum}.items():
        out = computed(f"redux.sync.{op}.s32 %r9, %r1, -1;", [x], "%r9", "b32").view(np.int32)
        assert (out == function.reduce(x, dtype=np.int32)).all()
    elected = computed("elect.sync %r8|%p1, -1;\nselp.b32 %r9, 1, 0, %p1;", [x], "%r9", "b32")
    assert elected.sum() == 1


def test_atomics_lose_nothing(seed):
    """1,024 threads of 8 programs count in one word; each sees another number."""
    total, seen = np.zeros(1, np.uint32), np.zeros(1024, np.uint32)
    body = """
        atom.global.add.u32 %r1, [%rd30], 1;
        mad.lo.s32 %r2, %r71, 128, %r70; mul.wide.u32 %rd1, %r2, 4; add.u64 %rd1, %rd1, %rd31;
        st.global.b32 [%rd1], %r1;
    """
    run(body, [total, seen], grid=8, threads=128, seed=seed)
    assert total[0] == 1024 and sorted(seen) == list(range(1024))


# ---------------------------------------------------------------- random programs


def test_random_programs(seed):
    """60 instructions in a row, with branches over some, against Python's whole numbers."""
    generator = np.random.default_rng(seed)
    names = list(INTEGERS)
    plain = [n for n in names if INTEGERS[n][0] in ("s32 s32", "u32 u32") and "%rd" not in n]
    given = [bits("u32", seed + i) for i in range(4)]
    values = [list(map(int, x)) for x in given]
    text = []
    for step in range(60):
        chosen = plain[int(generator.integers(len(plain)))]
        kinds, _, function = INTEGERS[chosen]
        a, b, to = (int(i) for i in generator.integers(0, 4, 3))
        head, rest = chosen.split(" ", 1)
        tail = rest.split("%r2")[1]
        text += [f"setp.gt.u32 %p1, %r{a + 1}, %r{b + 1};", f"@%p1 bra over{step};"]
        text += [f"{head} %r{to + 1}, %r{a + 1}, %r{b + 1}{tail}", f"over{step}:"]
        kind = kinds.split()[0]
        for lane in range(32):
            x, y = values[a][lane], values[b][lane]
            if x <= y:
                found = function(wrapped(x, kind), wrapped(y, kind))
                values[to][lane] = wrapped(found, "u32")
    for register in range(4):
        out = computed("\n".join(text), given, f"%r{register + 1}", "b32")
        assert out.tolist() == values[register]


# ---------------------------------------------------------------- matrices


@pytest.mark.parametrize("type_", ["bf16", "f16", "tf32", "s8"])
def test_a_matrix_product(type_, seed, monkeypatch):
    """mma of one warp; the fragments by the manual's tables, lane by lane."""
    monkeypatch.setattr(ROUNDING, "seed", seed % 1000)
    depth = {"bf16": 16, "f16": 16, "tf32": 8, "s8": 32}[type_]
    generator = np.random.default_rng(seed)
    a, b = generator.integers(-8, 8, (16, depth)), generator.integers(-8, 8, (depth, 8))
    c = generator.integers(-8, 8, (16, 8))
    size = {"bf16": 2, "f16": 2, "tf32": 4, "s8": 1}[type_]
    pack = 4 // size
    a_regs, b_regs = np.zeros((4, 32), np.uint32), np.zeros((2, 32), np.uint32)
    c_regs = np.zeros((4, 32), np.uint32)
    sums = "s32" if type_ == "s8" else "f32"
    for lane in range(32):
        g, t = divmod(lane, 4)
        for part in range(pack):
            for r in range(4):  # upper left, lower left, upper right, lower right
                row, column = g + 8 * (r % 2), pack * t + part + 4 * pack * (r // 2)
                a_regs[r, lane] |= word(a[row, column], type_) << (8 * size * part)
            for r in range(2):
                b_regs[r, lane] |= word(b[pack * t + part + 4 * pack * r, g], type_) << (
                    8 * size * part
                )
        for r in range(4):
            c_regs[r, lane] = word(c[g + 8 * (r // 2), 2 * t + r % 2], sums)
    names = [f"%r{i + 1}" for i in range(10)]
    kinds = f"{sums}.{type_}.{type_}.{sums}"
    sums_at = ", ".join(f"%r{i}" for i in range(20, 24))
    text = (
        f"mma.sync.aligned.m16n8k{depth}.row.col.{kinds} {{{sums_at}}}, "
        f"{{{', '.join(names[:4])}}}, {{{', '.join(names[4:6])}}}, {{{', '.join(names[6:])}}};"
    )
    out = np.zeros((16, 8))
    for r in range(4):
        found = computed(text, [*a_regs, *b_regs, *c_regs], f"%r{20 + r}", "b32")
        for lane in range(32):
            raw = struct.pack("I", found[lane])
            value = struct.unpack("i" if sums == "s32" else "f", raw)[0]
            out[lane // 4 + 8 * (r // 2), lane % 4 * 2 + r % 2] = value
    assert np.array_equal(out, a @ b + c)


def word(value, type_: str) -> int:
    """A small whole number as the bits of a type."""
    if type_ in ("s8", "s32"):
        return int(value) & (0xFF if type_ == "s8" else 0xFFFFFFFF)
    if type_ == "f16":
        return int(np.float16(value).view(np.uint16))
    whole = int(np.float32(value).view(np.uint32))
    return whole >> 16 if type_ == "bf16" else whole


def test_an_unknown_instruction_is_named_and_not_skipped():
    for text in ("frobnicate.f32 %r9, %r1;", "add.f32.rotated.f128 %r9, %r1, %r2;"):
        with pytest.raises(UnknownInstruction, match=text.split(".")[0]):
            run(text, [np.zeros(1, np.uint32)])


def test_a_kernel_knows_its_lines():
    kernel = kernel_of("add.s32 %r1, %r70, 1;\nadd.s32 %r2, %r1, 1;", 1)
    assert [str(line) for line in kernel.lines] == ["kernel.py:7", "kernel.py:8", "kernel.py:9"]


def test_a_parameter_whose_address_only_some_threads_have_made():
    body = """
setp.lt.u32 %p1, %r70, 32;
@!%p1 mov.b64 %rd1, tried_param_1;
@!%p1 ld.param.u64 %rd2, [%rd1];
@%p1 mov.b64 %rd1, tried_param_0;
@%p1 ld.param.u64 %rd2, [%rd1];
mad.wide.u32 %rd3, %r70, 4, %rd2;
st.global.u32 [%rd3], %r70;
"""
    arrays = [np.zeros(64, np.uint32), np.zeros(64, np.uint32)]
    run(body, arrays, threads=64)
    threads = np.arange(64, dtype=np.uint32)
    assert np.array_equal(arrays[0], np.where(threads < 32, threads, 0))
    assert np.array_equal(arrays[1], np.where(threads < 32, 0, threads))
