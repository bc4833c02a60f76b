"""Simulated TMA: tensor descriptors, and copies that run beside the partition that started them.

Rows and columns outside the tensor are read as zeros (or NaN) and are not written; a load brings
the bytes of a whole tile to its barrier all the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.toolbox.proof.traps import poison_
from lessons.toolbox.simulator.machine import program, refuse
from lessons.toolbox.simulator.mbarrier import barrier_of
from lessons.toolbox.simulator.memory import Shared


@dataclass(frozen=True)
class BlockType:
    shape: list[int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Descriptor:
    """What a kernel sees of a TensorDescriptor that was made on the host."""

    def __init__(self, host):
        self.tensor: Tensor = host.base
        self.dtype, self.layout, self.padding = host.base.dtype, host.layout, host.padding
        self.block_shape = list(host.block_shape)
        self.block_type = BlockType(self.block_shape, self.dtype)
        self.nbytes_per_cta = self.block_type.nbytes

    def inside(self, coord) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of the tensor that a tile at `coord` covers, and the same part of the tile."""
        ranges = [
            (max(0, int(at)), max(0, int(at), min(int(at) + rows, size)), int(at))
            for at, rows, size in zip(coord, self.block_shape, self.tensor.shape)
        ]
        of_tensor = tuple(slice(first, behind) for first, behind, _ in ranges)
        of_tile = tuple(slice(first - at, behind - at) for first, behind, at in ranges)
        return of_tensor, of_tile


def async_copy_global_to_shared(
    tensor_desc: Descriptor, coord, barrier: Shared, result: Shared, pred=True, multicast=False
) -> None:
    """Fill `result`, [block_shape], and bring its bytes to `barrier`."""
    if not pred:
        return
    _check_tile(tensor_desc, coord, result)
    bar = barrier_of(barrier)
    access = result.begin(writes=True, what="the TMA load", barrier=bar)
    poison_(result.data)
    of_tensor, of_tile = tensor_desc.inside(coord)

    def land() -> None:
        result.data.fill_(float("nan") if tensor_desc.padding == "nan" else 0)
        result.data[of_tile] = tensor_desc.tensor[of_tensor]
        result.end(access)
        bar.bring(tensor_desc.block_type.nbytes)

    program().start("load", "the TMA load", land)
    program().pause()


def async_copy_shared_to_global(tensor_desc: Descriptor, coord, src: Shared) -> None:
    """Store `src`, [block_shape]."""
    _check_tile(tensor_desc, coord, src)
    access = src.begin(writes=False, what="the TMA store")
    of_tensor, of_tile = tensor_desc.inside(coord)

    def land() -> None:
        tensor_desc.tensor[of_tensor] = src.data[of_tile]
        src.end(access)

    program().start("store", "the TMA store", land)
    program().pause()


def store_wait(pendings: int) -> None:
    """Wait until at most `pendings` stores of this partition are in flight."""
    here = program()
    mine = here.running
    here.pause(lambda: here.outstanding("store", mine) <= pendings, lambda: "for its TMA stores")


def _check_tile(desc: Descriptor, coord, smem: Shared) -> None:
    if smem.shape != desc.block_shape or smem.dtype != desc.dtype:
        tile = f"{desc.dtype} {desc.block_shape}"
        raise refuse(f"{smem.name} is {smem.dtype} {smem.shape}, the descriptor's tile {tile}")
    if len(coord) != len(desc.block_shape):
        raise refuse(f"got {len(coord)} coordinates; accepted: {len(desc.block_shape)}")
