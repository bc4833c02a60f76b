"""What the tests of this lesson share: caches of codes whose pages lie in random order."""

from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l12_paged_kv.lab.testing import DEVICE, PagedInputs, paged
from lessons.l12_paged_kv.naive import gathered_attention
from lessons.l19_kv_quantization.formats import RowFormat

__all__ = ["DEVICE", "CodedInputs", "coded", "dequantized_attention", "dequantized_decode", "paged"]

NAN_CODE = 0x7F  # in E4M3


class CodedInputs(NamedTuple):
    """The arguments of quantized_prefill up to the format, in their order."""

    q: Tensor
    k_codes: Tensor
    v_codes: Tensor
    k_scales: Tensor
    v_scales: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor

    @property
    def decode(self) -> tuple[Tensor, ...]:
        """The arguments of quantized_decode up to the format."""
        return self[:6] + self[7:]


def coded(format: RowFormat, inputs: PagedInputs) -> CodedInputs:
    """`paged` inputs with K and V as codes. Slots that nobody wrote hold NaN scales."""
    q, k_cache, v_cache, *rest = inputs
    (k_codes, k_scales), (v_codes, v_scales) = (coded_cache(format, x) for x in (k_cache, v_cache))
    return CodedInputs(q, k_codes, v_codes, k_scales, v_scales, *rest)


def coded_cache(format: RowFormat, cache: Tensor) -> tuple[Tensor, Tensor]:
    """cache: [num_blocks, block_size, Hkv, D], NaN where nobody wrote -> codes and scales, the
    slots of a head side by side.
    """
    written = cache.isfinite().all(-1, keepdim=True)
    codes, scales = format.quantize(torch.where(written, cache, 0.0))
    codes[~written[..., 0]] = NAN_CODE
    scales[~written[..., 0]] = torch.nan
    by_head = scales.permute(2, 0, 1, 3).contiguous()
    return codes, by_head.permute(1, 2, 0, 3)


def dequantized_attention(
    q: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    format: RowFormat,
    **options,
) -> Tensor:
    """The definition of quantized_prefill: numbers again, then lesson 12's attention."""
    k_cache, v_cache = (
        format.dequantize(codes, scales)
        for codes, scales in ((k_codes, k_scales), (v_codes, v_scales))
    )
    return gathered_attention(
        q, k_cache, v_cache, block_table, cu_seqlens_q, context_lens, **options
    )


def dequantized_decode(*arguments, **options) -> Tensor:
    """The definition of quantized_decode, for one new token a sequence: q: [B, Hq, D] and the rest."""
    *before, context_lens, format = arguments
    starts = torch.arange(len(context_lens) + 1, device=context_lens.device)
    return dequantized_attention(*before, starts, context_lens, format, **options)
