"""K and V of a model whose layers are in groups: one buffer of pages, each of some layers.

A page holds as many layers as a group has, so a buffer has that many and not all of the model's.
Layer l is the i-th of its group g: its K and V are at [i, page], and which page is in the table
of g. So a step has a block table, slots and a list of work for each group.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.generate import Rung
from lessons.l19_kv_quantization.pool import KernelPool, QuantizedPool
from lessons.l25_one_step_ahead.model_device import send
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.window_groups import WindowGroups
from reference.features.windows.blocks import GONE, GroupTable


class InGroups:
    """What a pool of groups has in the place of KVPool's layers. groups: its first argument;
    others are KVPool's.
    """

    def __init__(self, groups: WindowGroups, *args, layers: range | None = None, **arguments):
        if layers is not None and len(layers) != len(groups.place):
            refuse("layers", layers, f"all {len(groups.place)}, because a stage has no groups")
        self.groups = groups
        super().__init__(*args, layers=range(groups.layers_each), **arguments)

    def index_of(self, layer: int) -> int:
        """As KVPool's: the layer's place in a page."""
        return self.groups.place[layer][1]

    def attending(self, batch: Batch, first_block: int = 0) -> Attend:
        """As KVPool's, each layer by its group's tables."""
        if batch.groups is None:
            refuse("batch.groups", None, "a batch of batch_in_groups")
        attends = [super(InGroups, self).attending(one, first_block) for one in batch.groups]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group, _ = self.groups.place[layer]
            return attends[group](layer, q, k, v)

        return attend


class GroupPool(InGroups, KVPool):
    """KVPool of groups."""


class QuantizedGroupPool(InGroups, QuantizedPool):
    """The same as codes of lesson 19. Its second argument is their format."""


class KernelGroupPool(InGroups, KernelPool):
    """The same, whose codes the kernels write and read."""


KINDS = {KVPool: GroupPool, QuantizedPool: QuantizedGroupPool, KernelPool: KernelGroupPool}


def rung_in_groups(rung: Rung, groups: WindowGroups) -> Rung:
    """The same rung over a pool of groups. Raises ValueError for a pool that knows none."""
    kind, first = rung.cache, ()
    if isinstance(kind, partial):  # of a format
        kind, first = kind.func, kind.args
    if kind not in KINDS:
        refuse("groups", kind.__name__, ", ".join(known.__name__ for known in KINDS))
    cache = partial(KINDS[kind], groups, *first)
    return replace(rung, name=f"{rung.name} in groups", cache=cache)


def batch_in_groups(
    batch_over: Callable[..., Batch],
    chunks: list[tuple[list[int], int]],
    tables: Sequence[GroupTable],
    block_size: int,
) -> Batch:
    """A step over tables of groups. chunks: of each sequence its new tokens, and how many it holds.
    batch_over(chunks, tables): the step of one group.

    Attention looks at distances alone. So a window's step is that of a shorter sequence, which
    begins with its first page that is not gone; only its tokens are rotated by where they are.
    """
    batches = []
    for seen, owned, before in seen_by_groups(chunks, tables, block_size):
        batch = batch_over(seen, owned)
        if any(before):
            at = [count for (new, _), count in zip(chunks, before) for _ in new]
            batch = replace(batch, positions=batch.positions + send(at, batch.positions.device))
        batches.append(batch)
    return replace(batches[0], groups=tuple(batches))


def seen_by_groups(
    chunks: list[tuple[list[int], int]], tables: Sequence[GroupTable], block_size: int
) -> Iterator[tuple[list[tuple[list[int], int]], list[list[int]], list[int]]]:
    """For each group (chunks, tables, tokens in front of them) without the pages that are gone."""
    for of_group in zip(*(table.groups for table in tables)):
        gone = [table.count(GONE) for table in of_group]  # all of them in front
        before = [block_size * count for count in gone]
        seen = [(new, held - tokens) for (new, held), tokens in zip(chunks, before)]
        yield seen, [table[count:] for table, count in zip(of_group, gone)], before
