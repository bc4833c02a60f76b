"""All-reduce as one kernel: it reads and writes the buffers of all ranks, and waits by flags.

    memory = shared_on_gpus(group, num_bytes, device)     # or shared_on_cpu
    total = one_shot(x, memory)                           # the same bits on every rank

The kernels do what `one_shot` and `two_shot` of symmetric.py do, in one launch. The pointers of all
buffers are arguments, so the loops over ranks are unrolled, and a rank adds in the order of ranks.

A barrier has a flag for each pair of ranks and for each program: program b of rank r waits for the
programs b of the other ranks and for no others. A flag is 0 or 1, and each side changes it once:

    rank r sets flag [b, r] of each peer from 0 to 1      release: what r wrote before is seen first
    and its own flags [b, peer] from 1 back to 0          acquire: what it reads after is read after

So flags are 0 again after every barrier, and a captured launch (CUDA graph), whose arguments never
change, can be replayed. Both are compare-and-swap in the scope of the system, because the scope of
a GPU does not reach the others. All programs that wait have to run at the same time, so there are
at most BLOCKS of them, and they walk over longer tensors.

Sources: PyTorch's CUDASymmetricMemory-inl.h (the flags); vLLM's custom_all_reduce.cuh (the ways).
"""

import torch
from torch import Tensor

from lessons.l20_parallelism.processes.symmetric import BLOCKS, SymmetricMemory
from lessons.toolbox.kernels.triton_ import tl, triton

BLOCK = 1024  # values of a program: 128 threads load 16 bytes of 16-bit values each


@triton.jit
def barrier(flags, own_flags_ptr, rank, SIZE: tl.constexpr):
    """Return when this program of all ranks has come here. flags: the flags of each rank."""
    block = tl.program_id(0)
    tl.debug_barrier()  # all threads of this program have read and written
    for peer in tl.static_range(SIZE):
        flag_ptr = flags[peer] + block * SIZE + rank
        # the flag is still 1 if the peer has not seen the last barrier's signal
        while tl.atomic_cas(flag_ptr, 0, 1, sem="release", scope="sys") != 0:
            pass
    for peer in tl.static_range(SIZE):
        flag_ptr = own_flags_ptr + block * SIZE + peer
        while tl.atomic_cas(flag_ptr, 1, 0, sem="acquire", scope="sys") != 1:
            pass
    tl.debug_barrier()  # no thread goes on before all peers have come


@triton.jit
def added(buffers, at, mask, SIZE: tl.constexpr, ACC: tl.constexpr):
    """The sum of all ranks' values at the places `at`, in the order of ranks: [BLOCK]."""
    total = tl.load(buffers[0] + at, mask=mask, other=0).to(ACC)
    for peer in tl.static_range(1, SIZE):
        total += tl.load(buffers[peer] + at, mask=mask, other=0).to(ACC)
    return total


@triton.jit
def one_shot_kernel(
    x_ptr,  # [n]
    out_ptr,  # [n]
    buffers,  # [n] of each rank
    own_buffer_ptr,
    flags,  # [BLOCKS, SIZE] of each rank
    own_flags_ptr,
    n,
    rank,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Every rank adds everything: it reads n values of each rank."""
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for start in range(first, n, step):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n)
        tl.store(own_buffer_ptr + at, x, mask=at < n)
    barrier(flags, own_flags_ptr, rank, SIZE)  # all inputs are there
    for start in range(first, n, step):
        at = start + tl.arange(0, BLOCK)
        total = added(buffers, at, at < n, SIZE, ACC)
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < n)
    barrier(flags, own_flags_ptr, rank, SIZE)  # all have read, so the next x may be written


@triton.jit
def two_shot_kernel(
    x_ptr,  # [n]
    out_ptr,  # [n]
    buffers,  # [n] of each rank
    own_buffer_ptr,
    flags,  # [BLOCKS, SIZE] of each rank
    own_flags_ptr,
    n,
    piece,  # values that a rank adds, a multiple of BLOCK: rank r those from r · piece on
    rank,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Each rank adds a piece and writes it to all: it reads and writes n / SIZE values of each.

    Program b has the same blocks of every piece, so that it waits for programs b alone.
    """
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for start in range(first, piece, step):
        for owner in range(SIZE):
            at = owner * piece + start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < n)
            tl.store(own_buffer_ptr + at, x, mask=at < n)
    barrier(flags, own_flags_ptr, rank, SIZE)  # all inputs are there
    for start in range(first, piece, step):
        at = rank * piece + start + tl.arange(0, BLOCK)
        total = added(buffers, at, at < n, SIZE, ACC).to(out_ptr.dtype.element_ty)
        for peer in tl.static_range(SIZE):
            tl.store(buffers[peer] + at, total, mask=at < n)
    barrier(flags, own_flags_ptr, rank, SIZE)  # all sums are there
    for start in range(first, piece, step):
        for owner in range(SIZE):
            at = owner * piece + start + tl.arange(0, BLOCK)
            total = tl.load(own_buffer_ptr + at, mask=at < n)
            tl.store(out_ptr + at, total, mask=at < n)


def one_shot(x: Tensor, memory: SymmetricMemory) -> Tensor:
    """symmetric.one_shot as a kernel. x: any shape -> like x."""
    x, buffers = x.contiguous(), memory.views(x)
    out = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    grid = (min(BLOCKS, triton.cdiv(x.numel(), BLOCK)),)
    if x.numel():
        one_shot_kernel[grid](x, out, *shared(buffers, memory), x.numel(), memory.rank,
                              SIZE=memory.size, BLOCK=BLOCK, ACC=accumulator(x))  # fmt: skip
    return out.view_as(x)


def two_shot(x: Tensor, memory: SymmetricMemory) -> Tensor:
    """symmetric.two_shot as a kernel. x: any shape -> like x."""
    x, buffers = x.contiguous(), memory.views(x)
    out = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    piece = triton.cdiv(triton.cdiv(x.numel(), memory.size), BLOCK) * BLOCK
    grid = (min(BLOCKS, piece // BLOCK),)
    if x.numel():
        two_shot_kernel[grid](x, out, *shared(buffers, memory), x.numel(), piece, memory.rank,
                              SIZE=memory.size, BLOCK=BLOCK, ACC=accumulator(x))  # fmt: skip
    return out.view_as(x)


def shared(buffers: list[Tensor], memory: SymmetricMemory) -> tuple:
    """What a kernel gets of all ranks: buffers, [n] each, and flags, and which are its own."""
    own_buffer, own_flags = buffers[memory.rank], memory.flags[memory.rank]
    return tuple(buffers), own_buffer, tuple(memory.flags), own_flags


def accumulator(x: Tensor) -> tl.dtype:
    """What sums of x, of any shape, are kept in: float32, or float64 for float64."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32
