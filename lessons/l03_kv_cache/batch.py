"""What one step of the model runs: new tokens, their positions, and where their K and V go.

A step may hold anything: whole prompts, single new tokens, or both. The tokens of its sequences are
packed one after the other, because everything in the decoder but `attend` takes each token alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from lessons.toolbox.model.arguments import check_kind, check_whole, refuse
from lessons.toolbox.model.placement import read_device


@dataclass(frozen=True)
class Batch:
    """One step: B sequences with T new tokens in all. Tensors are on the model's device.

    Lesson 3 needs the fields up to max_context_len. Lessons 12 and 17 fill the others.
    The two integers are known to Python, and so are `lengths` of a step that Python put together.
    So no step has to wait for the device to learn them.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64: of each token in its own sequence
    slot_mapping: Tensor  # [T] int64: which slot of the cache takes its K and V; -1: none
    cu_seqlens_q: Tensor  # [B + 1] int32: where each sequence's new tokens begin, and the end
    context_lens: Tensor  # [B] int32: tokens of each sequence once these are written
    logits_at: Tensor  # [B] int64: which rows of `hidden` become logits
    max_seqlen_q: int  # new tokens of the sequence that has most
    max_context_len: int
    block_table: Tensor | None = None  # [B, max_blocks] int32, from lesson 12 on
    work_list: object | None = None  # what lesson 12's decode reads on a CPU, made once a step
    states: object | None = None  # which slot each sequence's state has, in lesson 27 alone
    groups: tuple | None = None  # the step over each group's blocks (lesson 27's windows)
    plans: dict | None = None  # lists of splits by length, made once a step, from lesson 12 on
    share: object | None = None  # which tokens are here, where ranks share them: the reference
    tree: Tensor | None = None  # [T, W] int8: which new token sees which, from lesson 17 on
    # Before the prompts, those that run one token each, or a tree: what lesson 12's kernels take
    # apart.
    num_decodes: int = 0  # sequences; 0, too, if there are no prompts
    num_decode_tokens: int = 0
    # (new tokens, context_lens) of each sequence; None: on the device alone, as in a CUDA graph
    lengths: tuple[tuple[int, int], ...] | None = None

    @cached_property
    def in_two(self) -> tuple["Batch", "Batch"]:
        """The first num_decodes sequences, and the others; for attention alone, whose queries are
        cut at num_decode_tokens. Made once a step, because every layer asks.
        """
        count, tokens, table = self.num_decodes, self.num_decode_tokens, self.block_table
        known = None if self.lengths is None else self.lengths[:count]
        others = None if self.lengths is None else self.lengths[count:]
        front = replace(
            self,
            cu_seqlens_q=self.cu_seqlens_q[: count + 1],
            context_lens=self.context_lens[:count],
            max_seqlen_q=1 if self.tree is None else self.tree.shape[1],
            max_context_len=self.longest_of(known),
            block_table=None if table is None else table[:count],
            tree=None if self.tree is None else self.tree[:tokens],
            num_decodes=0,
            lengths=known,
        )
        rest = replace(
            self,
            cu_seqlens_q=self.cu_seqlens_q[count:] - tokens,
            context_lens=self.context_lens[count:],
            max_context_len=self.longest_of(others),
            block_table=None if table is None else table[count:],
            plans=None,
            tree=None,
            num_decodes=0,
            lengths=others,
        )
        return front, rest

    def longest_of(self, lengths: tuple[tuple[int, int], ...] | None) -> int:
        """The most tokens that some of the sequences have; if Python does not know, that all
        have.
        """
        if lengths is None:
            return self.max_context_len
        return max(context_len for _, context_len in lengths)


def new_batch(
    chunks: Sequence[tuple[Sequence[int], int]],
    block_size: int,
    device: torch.device | str = "cpu",
    block_tables: Sequence[Sequence[int]] | None = None,
) -> Batch:
    """The step that runs `chunks`: for each sequence its new tokens, and how many it holds already.

    block_tables: the blocks of each sequence, in order. None: sequence b owns block b, and only it.
    Raises ValueError for a sequence without new tokens, or with more than its blocks hold.
    """
    check_kind((list, tuple), "a list of (new tokens, how many are held)", chunks=chunks)
    if block_tables is not None:
        check_kind((list, tuple), "None, or a list of blocks for each", block_tables=block_tables)
    tables = [[b] for b in range(len(chunks))] if block_tables is None else block_tables
    check_chunks(chunks, tables, block_size)
    if not isinstance(device, torch.device):  # as in every step of `generate`
        device = read_device(device, "meta")
    tokens, positions, slots = [], [], []
    for (new, held), table in zip(chunks, tables):
        where = range(held, held + len(new))
        tokens += new
        positions += where
        slots += [table[p // block_size] * block_size + p % block_size for p in where]
    check_integers(tokens=tokens, block_tables=slots)
    lengths = [len(new) for new, _ in chunks]
    context_lens = [len(new) + held for new, held in chunks]
    starts = list(accumulate(lengths, initial=0))
    last = [end - 1 for end in starts[1:]]
    ones = sum(1 for _ in takewhile(lambda length: length == 1, lengths))
    num_decodes = ones if ones < len(lengths) else 0

    # Two tensors, cut into views, because each copy from the host makes the CPU wait.
    count, num_sequences = len(tokens), len(chunks)
    wide = torch.tensor(tokens + positions + slots + last).to(device)
    narrow = torch.tensor(starts + context_lens, dtype=torch.int32).to(device)
    tokens, positions, slots, last = wide.split([count, count, count, num_sequences])
    starts, lens = narrow.split([num_sequences + 1, num_sequences])
    return Batch(
        tokens=tokens,
        positions=positions,
        slot_mapping=slots,
        cu_seqlens_q=starts,
        context_lens=lens,
        logits_at=last,
        max_seqlen_q=max(lengths),
        max_context_len=max(context_lens),
        block_table=None if block_tables is None else _padded(block_tables).to(device),
        num_decodes=num_decodes,
        num_decode_tokens=num_decodes,
        lengths=tuple(zip(lengths, context_lens)),
    )


def check_chunks(
    chunks: Sequence[tuple[Sequence[int], int]],
    tables: Sequence[Sequence[int]],
    block_size: int,
) -> None:
    """Raise ValueError unless each sequence, one at least, runs a token and has room for it."""
    check_whole(block_size=block_size)
    if not chunks or len(tables) != len(chunks):
        raise ValueError(
            f"chunks, block_tables: got {len(chunks)} and {len(tables)}; accepted: one or more "
            "sequences, as many of both"
        )
    for b, (chunk, table) in enumerate(zip(chunks, tables)):
        if not isinstance(table, (list, tuple)):
            refuse(f"block_tables[{b}]", table, "a list of block numbers")
        new, held = chunk if isinstance(chunk, (list, tuple)) and len(chunk) == 2 else (None, None)
        if not isinstance(new, (list, tuple, range)) or type(held) is not int:
            refuse(f"chunks[{b}]", chunk, "(a list of new tokens, how many are held)")
        room = len(table) * block_size
        if not new or held < 0 or held + len(new) > room:
            raise ValueError(
                f"chunks[{b}]: got {len(new)} new tokens after {held}; accepted: one or more new "
                f"ones, and at most {room} together, the room in its block_tables"
            )


def check_integers(**lists: list[int]) -> None:
    """Raise ValueError that names the first list with anything else than whole numbers from 0
    on.
    """
    for name, values in lists.items():
        if set(map(type, values)) != {int} or min(values) < 0:
            refuse(name, values, "whole numbers, 0 or more")


def _padded(tables: Sequence[Sequence[int]]) -> Tensor:
    """[B, max_blocks] int32. What follows a sequence's blocks is no block's number."""
    width = max(map(len, tables))
    rows = [[*table, *[2**30] * (width - len(table))] for table in tables]
    return torch.tensor(rows, dtype=torch.int32)


def sequences(batch: Batch) -> Iterator[tuple[slice, int]]:
    """For each sequence the rows of its new tokens, and how many tokens it has with them."""
    lengths = batch.lengths
    if lengths is None:  # read back from the device, which makes the CPU wait
        lengths = zip(batch.cu_seqlens_q.diff().tolist(), batch.context_lens.tolist())
    start = 0
    for count, context_len in lengths:
        yield slice(start, start + count), context_len
        start += count
