"""Symmetric memory: buffers of all ranks that each rank can read and write, without a message.

    memory = shared_on_cpu(group, num_bytes=1 << 20)
    total = one_shot(x, memory)             # the same bits on every rank

GPUs of one machine read each other's memory over NVLink; processes on a CPU map the same files.
An all-reduce then needs no library: a rank writes its x where all see it, waits until all have
done so, and adds what it reads. Two waits keep it right:

    write x → barrier: all inputs are there → read and add → barrier: all have read → write the next

Without the first a rank adds what is not there yet. Without the second a fast rank overwrites its
buffer while a slow one reads it. Every rank adds in the order of the ranks, so all get equal bits.
symmetric_kernels.py has the same two ways as Triton kernels, with flags in place of `barrier`.

Sources: PyTorch's torch/distributed/_symmetric_memory; vLLM's custom_all_reduce.cuh.
"""

import os
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lessons.l20_parallelism.processes.group import Group
from lessons.toolbox.model.arguments import check_whole, refuse

BLOCKS = 32  # programs of a kernel that may wait for each other, each with flags of its own
LINE = 64  # bytes that a processor's caches keep together: a counter has a line of its own
LOOKS, SLEEP_S = 500, 20e-6  # looks at a counter without a pause, and the pause after them
FENCE = threading.Lock()


class SymmetricMemory:
    """What all ranks of a group see. buffers: uint8, [num_bytes] of each rank; flags: int32,
    [BLOCKS · size] of each rank, all 0 while no kernel runs; counters: int64, [1] of each rank, on
    a CPU alone.
    """

    def __init__(
        self,
        group: Group,
        buffers: list[Tensor],
        flags: list[Tensor],
        counters: list[Tensor] | None = None,
        timeout_s: float = 60.0,
    ):
        self.rank, self.size = group.rank, group.size
        self.num_bytes = len(buffers[0])
        self.buffers, self.flags, self.timeout_s = buffers, flags, timeout_s
        self.epoch = 0  # barriers of this rank so far
        self.owner: object = None  # what the buffers last no longer than
        # NumPy's, because a barrier reads them thousands of times
        self._counters = [count.numpy() for count in counters or ()]

    def views(self, x: Tensor) -> list[Tensor]:
        """The first bytes of each rank's buffer as a tensor like x: of its type, [x.numel()].
        Raises ValueError where x is larger than the buffers.
        """
        num_bytes = x.numel() * x.element_size()
        if num_bytes > self.num_bytes:
            refuse("bytes of x", num_bytes, f"at most {self.num_bytes}, the size of a buffer")
        return [buffer[:num_bytes].view(x.dtype) for buffer in self.buffers]

    def barrier(self) -> None:
        """Return when all ranks have come here as often as this one. Raises TimeoutError.

        Each rank counts its own barriers where all can see it. A counter is never set back, so a
        rank that is already at its next barrier lets a slow one pass.
        """
        if not self._counters:
            raise ValueError(
                "barrier: got memory of GPUs; accepted: of a CPU, a GPU's kernel waits"
            )
        self.epoch += 1
        fence()  # what this rank wrote is seen before its new count
        self._counters[self.rank][0] = self.epoch
        deadline = time.monotonic() + self.timeout_s
        for peer in range(self.size):
            looks = 0
            while self._counters[peer][0] < self.epoch:
                looks += 1
                if looks < LOOKS:
                    os.sched_yield()
                else:  # because it would take a core from the rank that it waits for
                    time.sleep(SLEEP_S)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {peer} did not come to a barrier in time")
        fence()  # what the others wrote before their counts is read after them


def fence() -> None:
    """Keep the order of this process's reads and writes before and after, as other processors see
    it. x86 does so anyway for writes; ARM does not.

    Python has no fence. Freeing a lock lets nothing before it come later, taking one lets nothing
    after it come earlier, and these two keep their order. vLLM's shm_broadcast.py does the same.
    """
    for _ in range(2):
        with FENCE:
            pass


# ---------------------------------------------------------------- where the memory comes from


def shared_on_cpu(group: Group, num_bytes: int, timeout_s: float = 60.0) -> SymmetricMemory:
    """Buffers between processes of this machine. Every rank of the group has to call it.

    A file of each rank is mapped by all of them. Its name is gone before this returns, so that
    nothing is left however the processes end; the memory lasts as long as they use it.
    """
    check_whole(num_bytes=num_bytes)
    flag_bytes = 4 * BLOCKS * group.size
    sizes = [-(-size // LINE) * LINE for size in (num_bytes, flag_bytes, LINE)]
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None  # memory, not a disk
    with tempfile.NamedTemporaryFile(dir=folder, prefix="ladder-") as file:
        file.truncate(sum(sizes))  # zeros
        names = [file.name] * group.size
        if group.size > 1:
            dist.all_gather_object(names, file.name, group=group.handle)
        mapped = [torch.from_file(name, True, sum(sizes), dtype=torch.uint8) for name in names]
        group.barrier()  # all have mapped them
    buffers, flags, counters = zip(*(memory.split(sizes) for memory in mapped))
    flags = [pad[:flag_bytes].view(torch.int32) for pad in flags]
    return SymmetricMemory(
        group,
        [buffer[:num_bytes] for buffer in buffers],
        flags,
        [count.view(torch.int64) for count in counters],
        timeout_s,
    )


def shared_on_gpus(group: Group, num_bytes: int, device: torch.device) -> SymmetricMemory:
    """Buffers of the GPUs of one machine, one process each, by PyTorch's symmetric memory. Every
    rank of the group has to call it. For the kernels alone: a barrier of the processor would wait
    for no GPU. No GPU has run this yet.

    PyTorch's signal pads are our flags. Its own kernels use them as ours do: 0 while none runs.
    """
    import torch.distributed._symmetric_memory as symmetric

    check_whole(num_bytes=num_bytes)
    mine = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(mine, group=group.handle or dist.group.WORLD)
    ranks, shape = range(group.size), (BLOCKS * group.size,)
    buffers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in ranks]
    flags = [handle.get_signal_pad(rank, shape, torch.int32) for rank in ranks]
    memory = SymmetricMemory(group, buffers, flags)
    memory.owner = mine, handle
    return memory


# ---------------------------------------------------------------- two ways to add


def one_shot(x: Tensor, memory: SymmetricMemory) -> Tensor:
    """Every rank reads all of every x. x: any shape, the same on all ranks -> like x, summed in
    float32, or float64 for float64.
    """
    buffers = memory.views(x)
    buffers[memory.rank].copy_(x.flatten())
    memory.barrier()  # all inputs are there
    total = added(buffers).to(x.dtype)
    memory.barrier()  # all have read, so that the next x may be written
    return total.view_as(x)


def two_shot(x: Tensor, memory: SymmetricMemory) -> Tensor:
    """Each rank adds one piece, and writes the sum into the buffers of all. x: any shape, the same
    on all ranks -> like x, summed as in one_shot.

    A piece is read by the rank that adds it and by no other, so its sum may take its place.
    """
    buffers = memory.views(x)
    buffers[memory.rank].copy_(x.flatten())
    memory.barrier()  # all inputs are there
    pieces = [buffer.tensor_split(memory.size)[memory.rank] for buffer in buffers]
    total = added(pieces).to(x.dtype)
    for piece in pieces:
        piece.copy_(total)
    memory.barrier()  # all sums are there
    # others write into this buffer after the next first barrier, to which this rank has to come
    return buffers[memory.rank].clone().view_as(x)


def added(parts: list[Tensor]) -> Tensor:
    """The sum in the order of the ranks, the same everywhere: [n] each -> [n], in float32 or
    float64.
    """
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total


class SymmetricGroup(Group):
    """A group whose small all-reduces go through shared memory, and all others over the wire, as
    vLLM's custom all-reduce serves small tensors and leaves the rest to NCCL.
    """

    def __init__(self, group: Group, memory: SymmetricMemory, one_shot_bytes: int = 1 << 18):
        super().__init__(group.members, group.rank, group.handle)
        self.memory, self.one_shot_bytes = memory, one_shot_bytes

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place. x: any shape."""
        num_bytes = x.numel() * x.element_size()
        if self.size == 1 or num_bytes > self.memory.num_bytes:
            return super().all_reduce(x)
        self.wire.count("all_reduce", x)
        # with two ranks each adds as much as it would in two shots
        is_small = self.size == 2 or num_bytes <= self.one_shot_bytes
        return x.copy_((one_shot if is_small else two_shot)(x, self.memory))
