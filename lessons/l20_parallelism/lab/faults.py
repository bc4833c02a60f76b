"""What ranks run in the tests of groups and processes: every collective, and every kind of
fault.
"""

import contextlib
import os
import signal
import socket
import time

import torch
from torch import Tensor

from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Mesh, new_links


def tensor_of(rank: int) -> Tensor:
    """[6, 6], different for each rank, no two numbers alike."""
    return torch.arange(36.0).view(6, 6) + 100 * rank


def laid(x: Tensor, layout: str) -> Tensor:
    """The same numbers, in memory as `layout` says. x: [N, N]."""
    if layout == "transposed":
        return x.T.contiguous().T
    if layout == "in wider rows":
        wide = torch.full((len(x), 9), -7.0)
        wide[:, : x.shape[1]] = x
        return wide[:, : x.shape[1]]
    return x


def all_collectives(world: Group, layout: str) -> dict:
    """Each collective once among three ranks."""
    rank, x = world.rank, laid(tensor_of(world.rank), layout)
    in_place = x[:] if layout == "dense" else x
    total = laid(tensor_of(rank), layout)
    same = world.all_reduce(total)
    given = laid(tensor_of(rank), layout)
    world.broadcast(given, source=1)
    taken = laid(tensor_of(rank), layout)
    if rank < 2:
        world.send(x, rank + 1)
    if rank:
        world.receive(taken, rank - 1)
    to_each, from_each = [1, 2, 3], [rank + 1] * 3
    return {
        "all_reduce": total,
        "is in place": same is total,
        "all_gather, last": world.all_gather(x),
        "all_gather, first": world.all_gather(x, dim=0),
        "reduce_scatter": world.reduce_scatter(x),
        "all_to_all": world.all_to_all(in_place, to_each, from_each),
        "broadcast": given,
        "sent along": taken,
        "exchange": world.exchange(x, (rank + 1) % 3, (rank - 1) % 3),
        "bytes": dict(world.wire.bytes),
        "calls": dict(world.wire.calls),
    }


def draw(world: Group) -> float:
    """A random number of this rank."""
    return float(torch.rand((), dtype=torch.float64))


def members(world: Group, mesh: Mesh) -> tuple[list[int], list[int], bool, bool]:
    """Who shares this rank's tensors and pipeline, and whether its stage is the first, the last."""
    links = new_links(mesh)
    assert links.tensor.members[links.tensor.rank] == world.rank
    assert links.pipeline.members[links.pipeline.rank] == world.rank
    ends = links.is_first_stage, links.is_last_stage
    return (links.tensor.members, links.pipeline.members, *ends)


# ---------------------------------------------------------------- faults


def fails(world: Group, rank: int, how: str) -> None:
    """One rank fails between two collectives."""
    world.all_reduce(torch.ones(3))
    if world.rank == rank:
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(3)
        raise ValueError("x: got a\nb" if how == "raises two lines" else "x: got 3; accepted: 4")
    world.all_reduce(torch.ones(3))


def dies_slowly(world: Group, rank: int, after_s: float) -> None:
    """One rank loses its wires, and dies `after_s` later. Meanwhile the others complain."""
    world.all_reduce(torch.ones(3))
    if world.rank == rank:
        cut_wires()
        time.sleep(after_s)
        os._exit(3)
    world.all_reduce(torch.ones(3))


def cut_wires() -> None:
    """End the connections of gloo. They are TCP, as the pipe to the parent is not."""
    for name in os.listdir("/proc/self/fd"):
        # the listing's own is gone by now, and not every file is a socket
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as wire:
            is_tcp = wire.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and not wire.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                wire.shutdown(socket.SHUT_RDWR)


def raises_as_an_echo_does(world: Group, rank: int) -> None:
    """One rank makes a mistake that PyTorch tells by a RuntimeError; no process dies."""
    world.all_reduce(torch.ones(3))
    if world.rank == rank:
        torch.ones(2, 3) @ torch.ones(2, 3)
    world.all_reduce(torch.ones(3))


def interrupts_itself(world: Group) -> int:
    """What Ctrl-C at a terminal does to each rank; it goes on."""
    os.kill(os.getpid(), signal.SIGINT)
    return world.rank


def hangs(world: Group, rank: int, told: str) -> None:
    """One rank never comes back; the others are done, or wait for it. told: a file that lists who
    ran.
    """
    with open(told, "a") as file:
        print(os.getpid(), file=file)
    world.barrier()
    while world.rank == rank:
        time.sleep(0.05)


def returns_what_cannot_be_pickled(world: Group):
    """A result that no pipe carries."""
    return lambda: None
