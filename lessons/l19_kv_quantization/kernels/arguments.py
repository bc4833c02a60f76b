"""Bad input to the wrappers of the quantized kernels, refused in one line each."""

import torch
from torch import Tensor

from lessons.l19_kv_quantization.formats import RowFormat


def check_codes(
    format: RowFormat,
    q: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
) -> tuple[Tensor, Tensor]:
    """Raise ValueError unless codes and scales, as in `quantized_decode`, fit each other and q.

    Returns views of the shapes and the dtype that the numbers would have, [num_blocks, block_size,
    Hkv, D], for lesson 12's checks. They hold nothing.
    """
    plain = []
    for name, codes, scales in (("k", k_codes, k_scales), ("v", v_codes, v_scales)):
        if codes.dtype != torch.uint8 or codes.ndim != 4 or codes.stride(-1) != 1:
            raise ValueError(
                f"{name}_codes: got {codes.dtype} {tuple(codes.shape)}; accepted: uint8 "
                "[num_blocks, "
                "block_size, Hkv, bytes of a row], dense rows"
            )
        shape, count = codes.shape[:3], format.scales_per_row
        if scales.dtype != q.dtype or scales.shape != (*shape, count):
            raise ValueError(
                f"{name}_scales: got {scales.dtype} {tuple(scales.shape)}; accepted: {q.dtype} "
                f"{(*shape, count)}, the scales of a row of {format.name} for each of {name}_codes"
            )
        if scales.stride()[:2] != (shape[1] * count, count) or scales.device != codes.device:
            raise ValueError(
                f"{name}_scales: got strides {scales.stride()} on {scales.device}; accepted: the "
                "slots "
                f"of a head side by side, on {codes.device}"
            )
        plain.append(q.new_empty(codes.shape[-1] * 8 // format.bits).expand(*shape, -1))
    if k_scales.stride(2) != v_scales.stride(2):
        raise ValueError(
            f"k_scales, v_scales: got heads {k_scales.stride(2)} and {v_scales.stride(2)} elements "
            "apart; accepted: as many in both"
        )
    return tuple(plain)
