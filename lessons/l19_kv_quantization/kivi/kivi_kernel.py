"""KIVI's decode step with lesson 12's kernel: once over pages of codes, once over what is in full
precision, and lesson 10's `combine` merges the two.

The kernel needs nothing new: LOAD reads K with a scale for each channel, LOAD_V reads V with a
scale for each token. That a context is in two caches is a split of the keys, and any two splits
can be merged.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lessons.l10_flash_decoding.optimized import combine
from lessons.l12_paged_kv.kernels.hooks import contiguous_row
from lessons.l12_paged_kv.kernels.launch import Stored, launch_decode
from lessons.l19_kv_quantization.kernels.hooks import kivi_key_load, kivi_value_load
from lessons.l19_kv_quantization.kivi.kivi import GROUP, KiviCache
from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.model.arguments import refuse


class KiviPages(NamedTuple):
    """What some sequences hold. A page is a group, 32 tokens.

    k_codes, v_codes: [pages, 32, Hkv, D / 2] uint8; k_scales: [Hkv, pages, 2, D]; v_scales: [Hkv,
    pages · 32, 2, D / 32]; block_table: [B, max_pages] int32; coded: [B] int32, tokens in pages;
    k, v: [B, most, Hkv, D], what is in full precision; rest: [B] int32, tokens there.
    """

    k_codes: Tensor
    v_codes: Tensor
    k_scales: Tensor
    v_scales: Tensor
    block_table: Tensor
    coded: Tensor
    k: Tensor
    v: Tensor
    rest: Tensor

    @classmethod
    def of(cls, caches: list[KiviCache], order: list[int] | None = None) -> "KiviPages":
        """Pages of these caches. order: which page each group becomes, group after group; None: the
        next one.
        """
        groups = [group for cache in caches for group in cache.groups]
        device = caches[0].k.device
        order = list(range(len(groups))) if order is None else order
        places = iter(order)
        rows = [[next(places) for _ in cache.groups] for cache in caches]
        width = max([1, *map(len, rows)])
        table = [row + [2**30] * (width - len(row)) for row in rows]
        k_codes, k_scales, v_codes, v_scales = (
            torch.stack([groups[order.index(page)][part] for page in range(len(groups))])
            for part in range(4)
        )
        return cls(
            k_codes,
            v_codes,
            k_scales.flatten(0, 1).permute(1, 0, 3, 2).contiguous(),
            v_scales.flatten(0, 1).permute(1, 0, 3, 2).contiguous(),
            torch.tensor(table, dtype=torch.int32, device=device),
            torch.tensor([c.coded for c in caches], dtype=torch.int32, device=device),
            side_by_side([cache.k for cache in caches]),
            side_by_side([cache.v for cache in caches]),
            torch.tensor([len(c.k) for c in caches], dtype=torch.int32, device=device),
        )


def side_by_side(rows: list[Tensor]) -> Tensor:
    """[T, Hkv, D] each -> [B, most, Hkv, D], zeros after the shorter ones. `most` is a multiple of
    a group, because the kernel is compiled for it.
    """
    most = max(1, -(-max(map(len, rows)) // GROUP)) * GROUP
    return torch.stack([pad(row, (0, 0, 0, 0, 0, most - len(row))) for row in rows])


def kivi_decode(q: Tensor, pages: KiviPages, softmax_scale: float | None = None) -> Tensor:
    """One query per sequence over pages of codes and over the tokens after them. q: [B, Hq, D] ->
    [B, Hq, D]. Raises ValueError for a head size that is no power of two or below 32.
    """
    head_dim = q.shape[2]
    if head_dim < GROUP or head_dim != triton.next_power_of_2(head_dim):
        refuse("q", head_dim, f"a head size that is a power of two, {GROUP} or more")
    stored = Stored(
        kivi_key_load,
        kivi_value_load,
        pages.k_scales,
        pages.v_scales,
        pages.k_scales.stride(0),
        head_dim,
    )
    codes = pages.k_codes, pages.v_codes, pages.block_table, pages.coded
    old = launch_decode(q, *codes, softmax_scale, stored=stored)
    # Sequence b owns block b there, so there is nothing to look up in a table.
    rest = pages.k, pages.v, pages.block_table, pages.rest
    new = launch_decode(q, *rest, softmax_scale, row_of=contiguous_row, num_splits=1)
    outs, lses = zip(old, new)
    partial_out = torch.stack(outs, dim=2).float()  # [B, Hq, 2, D]
    return combine(partial_out, torch.stack(lses, dim=2), q.dtype)[0]
