"""Small kernels for the tests of compile_check, each made to show one thing."""

from lessons.toolbox.kernels.compile_check import KernelSpec
from lessons.toolbox.kernels.triton_ import tl, triton

HALF = tl.constexpr(0.5)


@triton.jit
def halve(x):
    return x * HALF


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Streams: 16-byte loads, no matrix instruction."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, halve(tl.load(x_ptr + i, mask=i < n, other=0.0)), mask=i < n)


@triton.jit
def halve_and_add(x):
    return halve(x) + 1.0


@triton.jit
def hook_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, HOOK: tl.constexpr = halve):
    """Calls a function that it is given."""
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, HOOK(tl.load(x_ptr + i)))


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, out_ptr, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """One tile of a [BLOCK_M, k] @ [k, BLOCK_N]: the generation's own matrix instruction."""
    m, n, kk = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        a = tl.load(a_ptr + m[:, None] * k + (start + kk)[None, :])
        b = tl.load(b_ptr + (start + kk)[:, None] * BLOCK_N + n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + m[:, None] * BLOCK_N + n[None, :], acc.to(out_ptr.dtype.element_ty))


@triton.jit
def descriptor_kernel(x_desc, out_desc, BLOCK: tl.constexpr):
    """Copies a tile through tensor descriptors: TMA from Hopper on."""
    row = tl.program_id(0) * BLOCK
    out_desc.store([row, 0], x_desc.load([row, 0]))


@triton.jit
def float8_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Needs sm_89."""
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(tl.float8e4nv))


@triton.jit
def forgiven_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """The interpreter runs it; the compiler refuses a variable that is born in a loop."""
    i = tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        last = tl.load(x_ptr + start + i)
    tl.store(out_ptr + i, last)


@triton.jit
def serial_kernel(a_ptr, b_ptr, out_ptr, k, BLOCK: tl.constexpr):
    """A last tile after the loop, as causal attention has its diagonal: on Hopper ptxas serialises
    every WGMMA.
    """
    m = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    a = tl.load(a_ptr + m[:, None] * BLOCK + m[None, :])
    for start in range(0, k, BLOCK):
        b = tl.load(b_ptr + (start + m)[:, None] * BLOCK + m[None, :])
        acc = tl.dot(tl.dot(a, b).to(b.dtype), b, acc)
    b = tl.load(b_ptr + (k + m)[:, None] * BLOCK + m[None, :])
    last = tl.where(m[:, None] >= m[None, :], tl.dot(a, b), 0.0)
    acc = tl.dot(last.to(b.dtype), b, acc)
    tl.store(out_ptr + m[:, None] * BLOCK + m[None, :], acc.to(out_ptr.dtype.element_ty))


POINTERS = {"x_ptr": "*bf16", "out_ptr": "*bf16"}
MATRICES = {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*bf16", "k": "i32"}
TILES = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
TILE = "tensordesc<bf16[64, 64]>"
HERE = "tests.toolbox.kernels_to_compile:"

COPY = KernelSpec(
    HERE + "copy_kernel", POINTERS | {"n": "i32"}, {"BLOCK": 1024}, divisible_by_16=("n",)
)
COPY_ODD = KernelSpec(
    HERE + "copy_kernel", POINTERS | {"n": "i32"}, {"BLOCK": 1024}, name="copy, odd n", chips=(90,)
)
MATMUL = KernelSpec(HERE + "matmul_kernel", MATRICES, TILES, divisible_by_16=("k",))
STARVED = KernelSpec(
    HERE + "matmul_kernel",
    MATRICES,
    TILES,
    name="few registers",
    options={"maxnreg": 32},
    chips=(80,),
)
LARGE = KernelSpec(
    HERE + "matmul_kernel",
    MATRICES,
    {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64},
    name="large tile",
    num_warps=8,
    num_stages=8,
    chips=(89,),
)
DESCRIPTOR = KernelSpec(
    HERE + "descriptor_kernel",
    {"x_desc": TILE, "out_desc": TILE},
    {"BLOCK": 64},
    chips=(80, 90, 100),
)
FLOAT8 = KernelSpec(
    HERE + "float8_kernel",
    {"x_ptr": "*bf16", "out_ptr": "*fp8e4nv"},
    {"BLOCK": 128},
    chips=(75, 89),
)
FORGIVEN = KernelSpec(
    HERE + "forgiven_kernel", POINTERS | {"n": "i32"}, {"BLOCK": 128}, chips=(90,)
)
SERIAL = KernelSpec(
    HERE + "serial_kernel", MATRICES, {"BLOCK": 64}, divisible_by_16=("k",), chips=(90,)
)
KERNELS = [COPY, COPY_ODD, MATMUL, STARVED, LARGE, DESCRIPTOR, FLOAT8, FORGIVEN, SERIAL]
