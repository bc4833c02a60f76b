"""The ranks that talk to each other, and an instrument that counts what they say.

    total = group.all_reduce(partial)            # every rank gets the sum
    whole = group.all_gather(shard, dim=-1)      # every rank gets all shards, in the order of ranks

Every collective of this lesson goes through a Group, so `group.wire` has counted all of them.
A group of one rank sends nothing. Shapes are the same on all ranks unless a method says otherwise.
Source: the collectives of MPI, as torch.distributed offers them.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Wire:
    """What the collectives of one rank were asked to move. bytes: of this rank's own tensors,
    before an algorithm decides how often they travel (collectives.py has the factors).
    """

    calls: Counter = field(default_factory=Counter)
    bytes: Counter = field(default_factory=Counter)

    def count(self, kind: str, x: Tensor) -> None:
        """Note that x, of any shape, is put into a collective of this kind."""
        self.calls[kind] += 1
        self.bytes[kind] += x.numel() * x.element_size()

    def clear(self) -> None:
        """Begin to count anew."""
        self.calls.clear()
        self.bytes.clear()


class Group:
    """Some ranks of the world, in order. rank: this process's place among them. members: the same
    ranks by their number in the world.
    """

    def __init__(self, members: list[int], rank: int, handle: dist.ProcessGroup | None = None):
        self.members = list(members)
        self.rank = rank
        self.size = len(members)
        self.handle = handle  # None: the world itself, or a group of one
        self.wire = Wire()

    @classmethod
    def alone(cls) -> "Group":
        """A group of one, for which nothing has to be started."""
        return cls([0], 0)

    @classmethod
    def world(cls) -> "Group":
        """All ranks, after init_process_group."""
        return cls(list(range(dist.get_world_size())), dist.get_rank())

    @property
    def backend(self) -> str | None:
        """Who moves the bytes: "nccl" or "gloo"; None: nothing moves."""
        return dist.get_backend(self.handle) if self.size > 1 else None

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph may hold its collectives: NCCL's are kernels, gloo's run on a
        CPU.
        """
        return self.backend in (None, "nccl")

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place. x: any shape."""
        if self.size > 1:
            self.wire.count("all_reduce", x)
            dense = x.contiguous()
            dist.all_reduce(dense, group=self.handle)
            give_back(dense, x)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors side by side along `dim`. x: [..., N, ...] -> [..., size · N, ...]."""
        if self.size == 1:
            return x
        self.wire.count("all_gather", x)
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in self.members]
        dist.all_gather(parts, x, group=self.handle)
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Of the sum over the ranks this rank's equal share of rows. x: [size · R, ...] ->
        [R, ...].
        """
        if self.size == 1:
            return x
        self.wire.count("reduce_scatter", x)
        x = x.contiguous()
        out = torch.empty_like(x[: len(x) // self.size])
        dist.reduce_scatter(out, list(x.chunk(self.size)), group=self.handle)
        return out

    def all_to_all(self, x: Tensor, to_each: list[int], from_each: list[int]) -> Tensor:
        """Rows sent to each rank, and rows that came from each. x: [sum(to_each), ...], in the
        order of the receivers -> [sum(from_each), ...], in the order of the senders.
        """
        if self.size == 1:
            return x
        self.wire.count("all_to_all", x)
        out = x.new_empty(sum(from_each), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), from_each, to_each, group=self.handle)
        return out

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """The tensor of rank `source` of this group, in place. x: any shape, the same on all
        ranks.
        """
        if self.size > 1:
            self.wire.count("broadcast", x)
            dense = x.contiguous()
            dist.broadcast(dense, self.members[source], group=self.handle)
            give_back(dense, x)
        return x

    def send(self, x: Tensor, to: int) -> None:
        """x, of any shape, to rank `to` of this group, which has to receive it."""
        self.wire.count("send", x)
        dist.send(x.contiguous(), self.members[to], group=self.handle)

    def receive(self, out: Tensor, source: int) -> Tensor:
        """Fill `out`, of any shape, with what rank `source` of this group sends."""
        dense = out.contiguous()
        dist.recv(dense, self.members[source], group=self.handle)
        give_back(dense, out)
        return out

    def exchange(self, x: Tensor, to: int, source: int) -> Tensor:
        """Send x to one rank while a tensor of the same shape comes from another: a step of a
        ring.
        """
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.step({to: x}, {source: out})
        return out

    def step(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        """All of these at once: send each tensor, of any shape, to the rank of its key, and fill
        each tensor with what the rank of its key sends.
        """
        work = []
        dense = {source: out.contiguous() for source, out in receives.items()}
        for to, x in sends.items():
            self.wire.count("send", x)
            work.append(dist.P2POp(dist.isend, x.contiguous(), self.members[to], self.handle))
        for source, out in dense.items():
            work.append(dist.P2POp(dist.irecv, out, self.members[source], self.handle))
        if work:
            self.wire.calls["step"] += 1
            for request in dist.batch_isend_irecv(work):
                request.wait()
        for source, out in receives.items():
            give_back(dense[source], out)

    def send_later(self, x: Tensor, to: int) -> dist.Work:
        """Begin to send x, of any shape, to rank `to`. It may be changed once wait() of what is
        returned has come back. A plain `send` waits for the receiver, so a circle of ranks that
        send would never end.
        """
        self.wire.count("send", x)
        return dist.isend(x.contiguous(), self.members[to], group=self.handle)

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        if self.size > 1:
            dist.barrier(group=self.handle)


def give_back(dense: Tensor, x: Tensor) -> None:
    """Copy what a collective left in `dense`, x.contiguous(), into x, of any shape, if that is
    another tensor.

    Because gloo sends and fills memory in the order of its addresses. A slice of wider rows would
    send the gaps.
    """
    if dense is not x:
        x.copy_(dense)
