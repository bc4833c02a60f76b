"""Blocks from a producer whose model is cut by heads, tensor parallel, for a consumer that has the
whole model.

    pages = HeadPages(pool, parts=2)    # a consumer's: rows hold the heads of rank 0, then 1

Each rank sends its own heads as a part of a block (reference/parallel/transfers.py). The consumer
puts the parts side by side when it loads the block. They come in any order, over a connection each.

The ranks add in another order than one process does, so their K and V have other last bits. So such
engines know each other by their weights, and not by the bits that these give.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l03_kv_cache.cache import KVPool
from lessons.l26_kv_transfer.pages import Pages
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig
from reference.features.kv_transfer.rounded import RoundedPages, code_and_scale_bytes, stored

PIECE_BYTES = 2**24  # of a file that is hashed


class Section(NamedTuple):
    """Bytes of a row: `before` times the heads, each of so many bytes."""

    before: int
    head_bytes: int
    size: int


class HeadPages(Pages):
    """Pages whose rows hold the heads of one rank after those of the other. kind: how each rank
    packs its own, Pages or RoundedPages.
    """

    def __init__(self, pool: KVPool, parts: int, kind: type[Pages] = Pages):
        self.whole = kind([pool])
        self.sections = list(sections_of(self.whole))
        super().__init__([pool])
        self.parts = parts
        self.last_parts = range(parts)  # because each comes over a connection of its own

    def row_bytes(self, pool: KVPool) -> int:
        return self.whole.block_bytes

    def pack(self, pool: KVPool, blocks: Sequence[int]) -> Tensor:
        rows = self.whole.pack(pool, blocks)
        each = [[own.flatten(1) for own in self.of_rank(rows, part)] for part in range(self.parts)]
        return torch.cat([own for part in each for own in part], dim=1)

    def unpack(self, pool: KVPool, blocks: Sequence[int], rows: Tensor) -> None:
        whole = torch.empty_like(rows)
        for part, mine in enumerate(rows.split(self.part_bytes, dim=1)):
            at = 0
            for place in self.of_rank(whole, part):
                size = place[0].numel()
                place.copy_(mine[:, at : at + size].unflatten(1, place.shape[1:]))
                at += size
        self.whole.unpack(pool, blocks, whole)

    def of_rank(self, rows: Tensor, part: int) -> Iterator[Tensor]:
        """What of whole rows is a rank's, in its order: [rows, before, bytes] each, views."""
        at = 0
        for section in self.sections:
            own = rows[:, at : at + section.size].unflatten(1, (section.before, self.parts, -1))
            yield own[:, :, part]
            at += section.size


def sections_of(pages: Pages) -> Iterator[Section]:
    """Of a row, in its order."""
    (pool,) = pages.pools
    for slots, (codes, scales) in zip(stored(pool), code_and_scale_bytes(pool)):
        layers, _, heads, width = slots.shape
        if isinstance(pages, RoundedPages):
            yield Section(layers, codes // (layers * heads), codes)
            yield Section(layers, scales // (layers * heads), scales)
        else:
            before, head_bytes = layers * pool.block_size, width * slots.itemsize
            yield Section(before, head_bytes, before * heads * head_bytes)


def check_cut(name: str, config: ModelConfig, parts: int) -> None:
    """Raise ValueError unless each rank has KV heads that no other one has. name: of the argument
    that says how many ranks there are.
    """
    heads = 0 if config.mla is not None else config.num_key_value_heads
    if not heads or heads % parts:
        accepted = f"1, or what divides the model's {heads} KV heads"
        if not heads:
            accepted = "1 for a model with latents, which every rank has whole"
        refuse(name, parts, f"{accepted}, with kv_transfer_config")


def weights_name(args, dtype: torch.dtype) -> str:
    """A hash of a checkpoint's files and of what else K and V depend on. Reads all weights once.
    Raises ValueError for a model that is no folder of them.
    """
    files = sorted(Path(args.model).glob("*.safetensors"))
    if not files:
        accepted = "a folder of safetensors, with a tensor parallel producer"
        refuse("model", args.model, accepted)
    found = hashlib.sha256(f"{dtype} {args.quantization} {args.block_size}".encode())
    for path in [Path(args.model) / "config.json", *files]:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                found.update(piece)
    return found.hexdigest()[:16]
