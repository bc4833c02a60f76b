"""The blocks of one pool, or of several whose blocks have the same numbers, as rows of bytes.

On a GPU copies run on a stream of their own, beside the model's. Two rules keep them right: a copy
begins after what was launched before it was asked for (`now`), and what reads its result waits for
its end: `read` and `write` return then.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from lessons.l03_kv_cache.cache import KVPool
from lessons.l26_kv_transfer.stand_ins import movers


class Pages:
    """pools: all that a block holds, the target's and perhaps a draft's. parts: in so many a row
    may travel, side by side; last_parts: those of which one comes last.
    """

    parts = 1
    last_parts: Sequence[int] = (0,)

    def __init__(self, pools: Sequence[KVPool]):
        self.pools = list(pools)
        self.device = self.pools[0].k_slots.device
        self.is_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.is_gpu else None
        self.movers = movers(self.device)
        self.sizes = [self.row_bytes(pool) for pool in self.pools]

    @property
    def block_bytes(self) -> int:
        """Of a row."""
        return sum(self.sizes)

    @property
    def part_bytes(self) -> int:
        """Of a part; all have the same."""
        return self.block_bytes // self.parts

    def row_bytes(self, pool: KVPool) -> int:
        """What a block of one of the pools takes of a row."""
        return self.movers.block_bytes(pool)

    def pack(self, pool: KVPool, blocks: Sequence[int]) -> Tensor:
        """The part of the rows that is this pool's: [len(blocks), row_bytes] uint8."""
        return self.movers.gather(pool, blocks)

    def unpack(self, pool: KVPool, blocks: Sequence[int], rows: Tensor) -> None:
        """What `pack` returned, into these blocks of this pool. rows: [len(blocks), row_bytes]."""
        self.movers.scatter(pool, blocks, rows.contiguous())

    def now(self):
        """A mark in the GPU's work: what was launched so far. None on a CPU, where it has ended."""
        if not self.is_gpu:
            return None
        return torch.cuda.current_stream(self.device).record_event()

    @torch.inference_mode()
    def read(self, blocks: Sequence[int], after) -> Tensor:
        """Copies in host memory: [len(blocks), bytes of a block] uint8."""
        with self.beside(after):
            return self.on_host(torch.cat([self.pack(pool, blocks) for pool in self.pools], dim=1))

    def on_host(self, packed: Tensor) -> Tensor:
        """packed: [rows, bytes] uint8, in host memory, once it is there. Inside `beside`."""
        if not self.is_gpu:
            return packed
        there = torch.empty_like(packed, device="cpu", pin_memory=True)
        there.copy_(packed, non_blocking=True)
        self.stream.synchronize()
        return there

    @torch.inference_mode()
    def write(self, blocks: Sequence[int], packed: Tensor, after) -> None:
        """What `read` returned, into these blocks."""
        with self.beside(after):
            packed = packed.to(self.device, non_blocking=True)
            for pool, part in zip(self.pools, packed.split(self.sizes, dim=1)):
                self.unpack(pool, blocks, part)
            if self.is_gpu:
                self.stream.synchronize()

    def beside(self, after):
        """Inside it, work goes to the copies' own stream, after a mark."""
        if not self.is_gpu:
            return nullcontext()
        self.stream.wait_event(after)
        return torch.cuda.stream(self.stream)
