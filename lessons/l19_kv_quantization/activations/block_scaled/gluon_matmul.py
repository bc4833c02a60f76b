"""A product of two matrices of 4-bit numbers with a scale for each 16 or 32 of them, for Blackwell,
in Gluon: one warp fetches tiles, one starts the products, four write the output.

Its compiled code for sm_100 runs on a CPU (`lessons.toolbox.gpu`); it has NOT RUN on a GPU yet.
Read naive.py first, then operands.py, which has the order of the scales. What is new beside lesson
9's kernel for Blackwell:

- the tensor core multiplies codes and scales: no number is ever dequantized by a warp;
- it finds the scales in tensor memory. `tcgen05_copy` brings them there from shared memory, and
  the product after it waits for that by itself;
- the larger scale of a row, float32, is left to the end: it is one factor for a whole sum.

Limits, to stay readable: one tile of the output a program, no split of K (see README.md).
Source: NVIDIA, PTX ISA 9.0, 9.7.16.10.7 (block scaling); Triton's Gluon tutorial 11 for the calls.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from lessons.l09_flash_attention.hopper.blackwell.tiles import allocate_barriers
from lessons.l19_kv_quantization.activations.block_scaled.operands import (
    ROWS,
    SCALES,
    BlockScaled,
    check_product,
)
from lessons.toolbox.gpu.gluon import on_the_machine
from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.measure.device import has_triton

if has_triton():
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.blackwell import (
        TensorMemoryLayout,
        TensorMemoryScalesLayout,
        allocate_tensor_memory,
        fence_async_shared,
        get_tmem_reg_layout,
        mbarrier,
        tcgen05_commit,
        tcgen05_copy,
        tcgen05_mma_scaled,
        tma,
    )
else:  # the file can be imported and read, nothing in it launched
    gluon, gl = triton.experimental.gluon, triton.experimental.gluon.language

BLOCK_M = ROWS  # the tensor core's rows, and those of a tile of scales
BLOCK_K = 256  # numbers, 128 bytes: as wide as a row can be swizzled
COLUMNS = 64  # of the output that a thread holds at once, 128 bytes
STAGES = 4
NUM_WARPS = 4  # that write the output: each reaches a quarter of the lanes of tensor memory


@gluon.jit
def allocate_stages(desc, STAGES: gl.constexpr):
    """Shared memory for STAGES tiles of a descriptor."""
    SHAPE: gl.constexpr = [STAGES] + desc.block_type.shape  # noqa: RUF005  Triton knows no star
    return gl.allocate_shared_memory(desc.dtype, SHAPE, desc.layout)


@gluon.jit
def load(desc, place, buffers, stage, bar):
    """Ask for a tile. place: its number along each side."""
    at = ()
    for side in gl.static_range(len(place)):
        at = at + (place[side] * desc.block_type.shape[side],)  # noqa: RUF005  here neither
    tma.async_copy_global_to_shared(desc, at, bar, buffers.index(stage))


@gluon.jit
def load_tiles(descs, buffers, barriers, num_steps):
    """The producer: ask for the codes and the scales of each step once their buffers are free."""
    a_desc, b_desc, a_scale_desc, b_scale_desc = descs
    a, b, a_scales, b_scales = buffers
    ready, free = barriers
    STAGES: gl.constexpr = a.shape[0]
    BYTES: gl.constexpr = (
        a_desc.block_type.nbytes
        + b_desc.block_type.nbytes
        + a_scale_desc.block_type.nbytes
        + b_scale_desc.block_type.nbytes
    )
    m, n = gl.program_id(0), gl.program_id(1)
    for i in range(num_steps):
        stage = i % STAGES
        # ^ 1, because on a fresh barrier a wait for parity 1 passes: at first all buffers are free
        mbarrier.wait(free.index(stage), (i // STAGES & 1) ^ 1)
        bar = ready.index(stage)
        mbarrier.expect(bar, BYTES)
        load(a_desc, [m, i], a, stage, bar)
        load(b_desc, [n, i], b, stage, bar)
        load(a_scale_desc, [m, i, 0, 0], a_scales, stage, bar)
        load(b_scale_desc, [n, i, 0, 0], b_scales, stage, bar)


@gluon.jit
def in_order(scales):
    """A view of a step's atoms of scales (operands.in_atoms) as [rows, scales of a row]."""
    BLOCKS: gl.constexpr = scales.shape[0]
    PARTS: gl.constexpr = scales.shape[1]
    atoms = scales.reshape((BLOCKS, PARTS, 32, 4, 4)).permute((0, 3, 2, 1, 4))
    return atoms.reshape((BLOCKS * 128, PARTS * 4))


@gluon.jit
def allocate_scales(desc, STAGES: gl.constexpr):
    """Columns of tensor memory for the scales of each stage, 4 of a row in a column."""
    COLUMNS: gl.constexpr = desc.block_type.shape[0] * desc.block_type.shape[1] * 4
    AT: gl.constexpr = TensorMemoryLayout([128, COLUMNS], col_stride=1)
    return allocate_tensor_memory(gl.int32, [STAGES, 128, COLUMNS], AT)


@gluon.jit
def copy_scales(scales, ring, stage):
    """A step's scales from shared to tensor memory, beside the warps. -> where they will be"""
    ROWS: gl.constexpr = scales.shape[1] * 128
    SCALES: gl.constexpr = scales.shape[2] * 4
    AT: gl.constexpr = TensorMemoryScalesLayout()
    columns = ring.index(stage)._reinterpret(scales.dtype, [ROWS, SCALES], AT)
    tcgen05_copy(in_order(scales.index(stage)), columns)
    return columns


@gluon.jit
def multiply_tiles(buffers, memory, barriers, num_steps):
    """Start every copy of scales and every product. A product waits for the copies before it by
    itself. A copy waits for no product, so each stage has columns of its own for scales: when its
    codes have come, the product that read them last has ended.
    """
    a, b, a_scales, b_scales = buffers
    sums, a_columns, b_columns = memory
    ready, free, done = barriers
    STAGES: gl.constexpr = a.shape[0]
    for i in range(num_steps):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        tcgen05_mma_scaled(
            a.index(stage),
            b.index(stage).permute((1, 0)),
            sums,
            copy_scales(a_scales, a_columns, stage),
            copy_scales(b_scales, b_columns, stage),
            "e2m1",
            "e2m1",
            use_acc=i > 0,
        )
        tcgen05_commit(free.index(stage))
    tcgen05_commit(done.index(0))


@gluon.jit
def write_tile(out, sums, buffer, done, PART: gl.constexpr):
    """Wait for the sums, multiply them by the larger scales of row and column, round, store."""
    out_desc, row_scale_ptr, column_scale_ptr, num_rows, num_columns = out
    ROWS: gl.constexpr = out_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = out_desc.block_type.shape[1]
    PARTS: gl.constexpr = sums.shape[1] // COLUMNS
    first, column = gl.program_id(0) * ROWS, gl.program_id(1) * sums.shape[1]
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, PART))
    row_scale = gl.load(row_scale_ptr + row, mask=row < num_rows, other=0.0)
    mbarrier.wait(done.index(0), 0)
    # where codes of a were: all products that read them have ended
    parts = buffer._reinterpret(out_desc.dtype, [PARTS, ROWS, COLUMNS], out_desc.layout)
    for j in gl.static_range(PARTS):
        each = column + j * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, PART))
        scale = gl.load(column_scale_ptr + each, mask=each < num_columns, other=0.0)
        scale = gl.expand_dims(row_scale, 1) * gl.expand_dims(scale, 0)
        tile = sums.slice(j * COLUMNS, COLUMNS).load(PART) * scale
        parts.index(j).store(tile.to(out_desc.dtype))
    fence_async_shared()
    for j in gl.static_range(PARTS):  # TMA drops rows and columns beyond the last
        place = [first, column + j * COLUMNS]
        tma.async_copy_shared_to_global(out_desc, place, parts.index(j))
    tma.store_wait(pendings=0)


@gluon.jit
def block_scaled_kernel(
    a_desc,
    b_desc,
    a_scale_desc,
    b_scale_desc,
    out_desc,
    row_scale_ptr,
    column_scale_ptr,
    num_rows,
    num_columns,
    num_steps,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One program: a tile of out = (a · bᵀ) · row_scale · column_scale. Descriptors: codes of
    [rows, K / 2] with tiles of [BLOCK_M or BLOCK_N, BLOCK_K / 2], atoms of scales [rows / 128,
    parts of K, 2, 256] with those of a step, out of [M, N] with tiles of [BLOCK_M, COLUMNS].
    """
    BLOCK_M: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = out_desc.block_type.shape[1]
    AT: gl.constexpr = TensorMemoryLayout([BLOCK_M, BLOCK_N], col_stride=1)
    PART: gl.constexpr = get_tmem_reg_layout(
        gl.float32,
        [BLOCK_M, COLUMNS],
        TensorMemoryLayout([BLOCK_M, COLUMNS], col_stride=1),
        num_warps,
    )
    descs = a_desc, b_desc, a_scale_desc, b_scale_desc
    buffers = (
        allocate_stages(a_desc, STAGES),
        allocate_stages(b_desc, STAGES),
        allocate_stages(a_scale_desc, STAGES),
        allocate_stages(b_scale_desc, STAGES),
    )
    memory = (
        allocate_tensor_memory(gl.float32, [BLOCK_M, BLOCK_N], AT),
        allocate_scales(a_scale_desc, STAGES),
        allocate_scales(b_scale_desc, STAGES),
    )
    ready, free, done = allocate_barriers(STAGES), allocate_barriers(STAGES), allocate_barriers(1)
    out = out_desc, row_scale_ptr, column_scale_ptr, num_rows, num_columns
    gl.warp_specialize(
        [
            (write_tile, (out, memory[0], buffers[0], done, PART)),
            (multiply_tiles, (buffers, memory, (ready, free, done), num_steps)),
            (load_tiles, (descs, buffers, (ready, free), num_steps)),
        ],
        [1, 1],  # warps of the second and the third
        [24, 24],  # registers a thread
    )


def block_scaled_matmul(a: BlockScaled, b: BlockScaled, block_n: int = 128) -> Tensor:
    """a · bᵀ on a Blackwell GPU, or on a CPU that runs its code: [M, N] bfloat16.

    a: of [M, K]; b: of [N, K], N a multiple of 8, both in one format; block_n: columns of a tile,
    128 or 256. Raises ValueError.
    """
    check_product(a, b, block_n)
    out = torch.empty(len(a.codes), len(b.codes), dtype=torch.bfloat16, device=a.codes.device)
    if not out.numel():
        return out
    grid = triton.cdiv(len(out), BLOCK_M), triton.cdiv(out.shape[1], block_n)
    with nullcontext() if a.codes.is_cuda else on_the_machine(100):
        block_scaled_kernel[grid](
            tiles_of(a.codes, [BLOCK_M, BLOCK_K // 2], 128),
            tiles_of(b.codes, [block_n, BLOCK_K // 2], 128),
            scales_of(a, BLOCK_M),
            scales_of(b, block_n),
            tiles_of(out, [BLOCK_M, COLUMNS], 128),
            a.row_scale,
            b.row_scale,
            *out.shape,
            triton.cdiv(a.shape[1], BLOCK_K),
            STAGES=STAGES,
            num_warps=NUM_WARPS,
        )
    return out


def tiles_of(x: Tensor, tile: list[int], swizzle: int):
    """A TMA descriptor. x: dense; swizzle: bytes of a swizzled row, 0 for none."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle, 8 * x.element_size(), len(tile))
    return TensorDescriptor.from_tensor(x, tile, layout)


def scales_of(x: BlockScaled, rows: int):
    """The descriptor of its atoms, in rows of 256 bytes, because no side of a tile may be longer;
    unswizzled, as `tcgen05_copy` wants them.
    """
    atoms = x.atoms.unflatten(2, (2, -1))
    return tiles_of(atoms, [rows // ROWS, BLOCK_K // x.block // SCALES, 2, atoms.shape[3]], 0)
