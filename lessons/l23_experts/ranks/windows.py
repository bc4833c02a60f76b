"""Fixed slots that the sender writes into the receiver's memory: no empty slot travels.

    windows = new_windows(group, num_experts, max_tokens=128, row_bytes=7392, result_bytes=14336)
    layer = WrittenSlotsMoE(moe, group, windows, form=Float8())

Every rank has a window that all others can write (lesson 20's symmetric memory), so a slot has a
known address: a sender asks no receiver first, and sends nothing that is empty. A step is

    write rows into the experts' ranks, and how many   →   barrier: all rows are there
    run the experts on the slots that are full
    write results into the senders' windows            →   barrier: all results are there

Two barriers are enough. A rank writes rows of the next step only after the second one. By then
every other rank has run its experts, so it needs the old rows no more. It writes results of the
next step only after the first barrier of that step, to which the others come when they have read
the old ones.

DeepEP's low-latency kernels do this over RDMA, with a count for each expert and sender in place of
the barriers. Here processes of one machine map the same memory.

Source: DeepEP (github.com/deepseek-ai/DeepEP), README, low-latency kernels.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l06_mla.moe import MoE
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.symmetric import SymmetricMemory, shared_on_cpu
from lessons.l23_experts.ranks.dispatch import PLAIN, FixedSlotsMoE
from lessons.l23_experts.ranks.wire import Float8, Plain, as_bytes, from_bytes
from lessons.toolbox.model.arguments import refuse

ALIGNED = 16  # bytes: each part of a window begins where any number may, and wide loads


class Window(NamedTuple):
    """A rank's memory for others. rows: uint8 [senders, own, max_tokens, row_bytes]; full: int64
    [senders, own], how many slots are full; results: uint8 [E, max_tokens, result_bytes], what
    comes back to this rank.
    """

    rows: Tensor
    full: Tensor
    results: Tensor


class Windows:
    """The windows of all ranks: each: one Window a rank."""

    def __init__(self, memory: SymmetricMemory, each: list[Window]):
        self.memory, self.each = memory, each
        self.own = each[memory.rank]

    def dispatch(self, packed: Tensor, chosen: Tensor, slot: Tensor) -> None:
        """Write rows into the slots of their experts, and how many there are; return when all ranks
        have. packed: uint8 [T, row_bytes]; chosen: [T, k]; slot: [T · k], of each pair.
        """
        (_, num_own), top_k = self.own.full.shape, chosen.shape[1]
        expert = chosen.flatten()
        full = torch.bincount(expert, minlength=num_own * self.memory.size).view(-1, num_own)
        for peer, window in enumerate(self.each):
            (pair,) = torch.where(expert // num_own == peer)
            place = expert[pair] % num_own, slot[pair]
            window.rows[self.memory.rank][place] = packed[pair // top_k]
            window.full[self.memory.rank] = full[peer]
        self.memory.barrier()

    def combine(self, results: Tensor) -> None:
        """Write results into the windows of their senders; return when all ranks have. results:
        uint8 [senders · own · max_tokens, result_bytes], of which empty slots stay here.
        """
        (size, num_own), slots = self.own.full.shape, self.own.rows.shape[2]
        results = results.view(size, num_own, slots, -1)
        first = self.memory.rank * num_own
        for sender, window in enumerate(self.each):
            is_full = torch.arange(slots) < self.own.full[sender][:, None]
            window.results[first : first + num_own][is_full] = results[sender][is_full]
        self.memory.barrier()


def new_windows(
    group: Group,
    num_experts: int,
    max_tokens: int,
    row_bytes: int,
    result_bytes: int,
    shared: Callable[[Group, int], SymmetricMemory] = shared_on_cpu,
    kind: type[Windows] = Windows,
) -> Windows:
    """Windows between processes of this machine. Every rank of the group has to call it. shared:
    where so many bytes of each rank come from; kind: who writes, Python or kernels. Raises
    ValueError unless all ranks have equally many experts.
    """
    if num_experts % group.size:
        refuse("num_experts", num_experts, f"a multiple of {group.size}, the number of ranks")
    num_own = num_experts // group.size
    shapes = [
        torch.Size((group.size, num_own, max_tokens, row_bytes)),
        torch.Size((group.size, num_own, torch.int64.itemsize)),
        torch.Size((num_experts, max_tokens, result_bytes)),
    ]
    sizes = [-(-shape.numel() // ALIGNED) * ALIGNED for shape in shapes]
    memory, each = shared(group, sum(sizes)), []
    for buffer in memory.buffers:
        parts = zip(buffer.split(sizes), shapes)
        rows, full, results = (part[: shape.numel()].view(shape) for part, shape in parts)
        each.append(Window(rows, full.view(torch.int64)[..., 0], results))
    return kind(memory, each)


class WrittenSlotsMoE(FixedSlotsMoE):
    """FixedSlotsMoE, whose slots are in the windows of the experts' ranks. Layers of a model may
    share windows, because one runs after the other.
    """

    def __init__(self, moe: MoE, group: Group, windows: Windows, form: Plain | Float8 = PLAIN):
        super().__init__(moe, group, windows.own.rows.shape[2], form)
        self.windows = windows

    def visit(self, x: Tensor, chosen: Tensor) -> Tensor:
        """As FixedSlotsMoE.visit: [T, H] -> [T · k, H]."""
        self.check_room(x)
        slot = slots_of(chosen, self.num_experts)
        packed = self.form.pack(x)
        self.group.wire.count("write", packed[:1].expand(chosen.numel(), -1))  # T · k rows
        self.windows.dispatch(packed, chosen, slot)
        rows, full, came = self.windows.own
        expert = self.experts_of_slots(full.flatten())
        results = self.experts.rows(self.form.unpack(rows.flatten(0, 2), x), expert[:, None])
        self.windows.combine(as_bytes(results))
        y = from_bytes(came[chosen.flatten(), slot], x.dtype)
        self.group.wire.count("write", y)  # by the others, and counted where it arrives
        return y


def slots_of(chosen: Tensor, num_experts: int) -> Tensor:
    """The slot of each pair: how many pairs before it have the same expert. chosen: [T, k] ->
    [T · k].
    """
    expert, order = chosen.flatten().sort(stable=True)
    first = torch.searchsorted(expert, torch.arange(num_experts, device=chosen.device))
    place = torch.arange(len(order), device=chosen.device) - first[expert]
    return torch.empty_like(order).index_copy_(0, order, place)
