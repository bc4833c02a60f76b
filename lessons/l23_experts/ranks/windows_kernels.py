"""The windows of windows.py written by two kernels, which wait by lesson 20's flags.

    windows = new_windows(group, …, shared=shared_on_cpu, kind=KernelWindows)

A program of `dispatch_kernel` walks over some of this rank's pairs: it loads the row of the pair's
token once, and stores it into the window of the expert's rank. Which rank that is is data, but the
pointers of the windows are arguments, so the program asks each rank in turn. `combine_kernel` takes
the way back. A program has some experts and senders, and copies as many results as are full.

Both end in lesson 20's barrier: program b waits for the programs b of all ranks. A kernel ends when
all of its programs have, so what is launched next sees all rows. Launches have the same arguments
in every step, so a CUDA graph can replay them.
"""

import torch
from torch import Tensor

from lessons.l20_parallelism.processes.symmetric import BLOCKS
from lessons.l20_parallelism.processes.symmetric_kernels import barrier
from lessons.l23_experts.ranks.windows import Windows
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.model.arguments import refuse

WORD = torch.int32  # rows are copied in words
BLOCK = 1024  # words of a row that a program copies at once


@triton.jit
def copy_row(source_ptr, targets, owner, place, words, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """`words` words from source_ptr to targets[owner] + place."""
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = tl.load(source_ptr + at, mask=at < words)
        for peer in tl.static_range(SIZE):
            if owner == peer:
                tl.store(targets[peer] + place + at, row, mask=at < words)


@triton.jit(do_not_specialize=["num_pairs"])
def dispatch_kernel(
    packed_ptr,  # [T, words]
    chosen_ptr,  # [T, k]
    slots_ptr,  # [T · k]
    counts_ptr,  # [E], pairs of this rank
    rows,  # [senders, own, max_tokens, words] of each rank
    full,  # [senders, own] of each rank
    flags,
    own_flags_ptr,
    num_pairs,
    num_own,
    max_tokens,
    vectors,
    rank,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Rows of this rank's pairs into the slots of their experts, and how many slots are full."""
    words = vectors * VECTOR  # so that the compiler knows by what rows can be divided
    for pair in range(tl.program_id(0), num_pairs, tl.num_programs(0)):
        expert = tl.load(chosen_ptr + pair)
        slot = (rank * num_own + expert % num_own) * max_tokens + tl.load(slots_ptr + pair)
        source_ptr = packed_ptr + tl.cast(pair // TOP_K, tl.int64) * words
        copy_row(source_ptr, rows, expert // num_own, slot * words, words, SIZE, BLOCK)
    for expert in range(tl.program_id(0), SIZE * num_own, tl.num_programs(0)):
        count = tl.load(counts_ptr + expert)
        for peer in tl.static_range(SIZE):
            if expert // num_own == peer:
                tl.store(full[peer] + rank * num_own + expert % num_own, count)
    barrier(flags, own_flags_ptr, rank, SIZE)  # all rows are there


@triton.jit
def combine_kernel(
    results_ptr,  # [senders, own, max_tokens, words]
    full_ptr,  # [senders, own]
    windows,  # [E, max_tokens, words] of each rank
    flags,
    own_flags_ptr,
    num_own,
    max_tokens,
    vectors,
    rank,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Results of full slots into the windows of their senders."""
    words = vectors * VECTOR
    for group in range(tl.program_id(0), SIZE * num_own, tl.num_programs(0)):
        first = tl.cast(group, tl.int64) * max_tokens
        target = tl.cast(rank * num_own + group % num_own, tl.int64) * max_tokens
        for slot in range(0, tl.load(full_ptr + group)):
            source_ptr = results_ptr + (first + slot) * words
            copy_row(
                source_ptr, windows, group // num_own, (target + slot) * words, words, SIZE, BLOCK
            )
    barrier(flags, own_flags_ptr, rank, SIZE)  # all results are there


class KernelWindows(Windows):
    """Windows that kernels write. Rows and results need whole words. Raises ValueError."""

    def __init__(self, memory, each):
        super().__init__(memory, each)
        for name, part in (("row_bytes", self.own.rows), ("result_bytes", self.own.results)):
            if part.shape[-1] % WORD.itemsize:
                refuse(name, part.shape[-1], f"a multiple of {WORD.itemsize}")
        self.rows, self.full, self.results = map(tuple, zip(*each))
        self.rows, self.results = (
            tuple(part.view(WORD) for part in parts) for parts in (self.rows, self.results)
        )

    def dispatch(self, packed: Tensor, chosen: Tensor, slot: Tensor) -> None:
        """As Windows.dispatch: packed: uint8 [T, row_bytes]; chosen: [T, k]; slot: [T · k]."""
        size, num_own, max_tokens, words = self.rows[0].shape
        counts = torch.zeros(size * num_own, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        dispatch_kernel[(BLOCKS,)](
            packed.view(WORD),
            chosen.contiguous(),
            slot,
            counts,
            self.rows,
            self.full,
            *self.flags(),
            chosen.numel(),
            num_own,
            max_tokens,
            words // vector_of(words),
            self.memory.rank,
            TOP_K=chosen.shape[1],
            SIZE=size,
            BLOCK=min(BLOCK, triton.next_power_of_2(words)),
            VECTOR=vector_of(words),
        )

    def combine(self, results: Tensor) -> None:
        """As Windows.combine: results: uint8 [senders · own · max_tokens, result_bytes]."""
        size, num_own, max_tokens, _ = self.rows[0].shape
        words = self.results[0].shape[-1]
        combine_kernel[(BLOCKS,)](
            results.view(WORD),
            self.full[self.memory.rank],
            self.results,
            *self.flags(),
            num_own,
            max_tokens,
            words // vector_of(words),
            self.memory.rank,
            SIZE=size,
            BLOCK=min(BLOCK, triton.next_power_of_2(words)),
            VECTOR=vector_of(words),
        )

    def flags(self) -> tuple:
        """The flags of all ranks, and this rank's own."""
        return tuple(self.memory.flags), self.memory.flags[self.memory.rank]


def vector_of(words: int) -> int:
    """Words that one load takes: 16 bytes where rows are whole multiples of them."""
    return 4 if words % 4 == 0 else 1
