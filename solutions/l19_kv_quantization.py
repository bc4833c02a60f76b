"""Exercises of lesson 19: what a smaller cache buys, activations of 8 bits, pages whose scales must
grow, and the hook that reads 4 bits inside the decode kernel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.l05_gqa.optimized import LOG2_E
from lessons.l12_paged_kv.kernels.hooks import NO_WINDOW
from lessons.l12_paged_kv.kernels.paged import decode_kernel
from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton


@exercise("19.1", "Predict: what a smaller cache buys", minutes=15, difficulty=1)
def cache_plan(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    context: int,
    bits: int,
    group: int,
    weight_bytes: int,
    memory_bytes: int,
) -> tuple[int, int, int, int, float]:
    """Sequences of `context` tokens, with a cache of 16 bits and with one of `bits` bits.

    The quantized cache stores a scale of 16 bits for each `group` values of a head; group divides
    head_dim. What the weights leave of memory_bytes is for the cache, and at least one sequence
    fits. A decode step reads the weights once and the whole cache of every sequence of its batch,
    and takes as long as that.

    Returns, in this order:
        the bytes of the cache of one sequence, 16 bits
        the same, quantized
        how many sequences fit, 16 bits
        the same, quantized
        how many times as many tokens a second, if either cache runs as many sequences as fit
    Errors: none to raise.

    Example: 2 layers, 1 KV head of 4 values, 10 tokens, 8 bits, group 4, weights of 1000 bytes in a
        memory of 2000
        a token has 16 values of K and V: 32 bytes; or 16 bytes and 4 scales, 24 bytes
        1000 bytes are left: 3 sequences of 320 bytes, or 4 of 240
        3 tokens for 1000 + 960 bytes, or 4 tokens for 1000 + 960 bytes
        -> (320, 240, 3, 4, 1.3333333)
    Write down your guess first: Llama-2-70B (80 layers of 8 KV heads, 128 values each), 4096
    tokens, 8 bits, group 128, weights of 138 GB in two GPUs of 80 GB.
    """
    # SOLUTION
    values = 2 * num_layers * num_kv_heads * head_dim * context
    plain, small = 2 * values, values * bits // 8 + 2 * values // group
    left = memory_bytes - weight_bytes
    few, many = left // plain, left // small
    seconds_before = weight_bytes + few * plain
    seconds_after = weight_bytes + many * small
    return plain, small, few, many, (many / seconds_after) / (few / seconds_before)
    # END


@exercise("19.2", "SmoothQuant: 8 bits on both sides of a product", minutes=35, difficulty=2)
def smooth_linear(
    x: Tensor,
    weight: Tensor,
    act_max: Tensor,
    alpha: float,
    dtype: torch.dtype,
    x_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x · weightᵀ from numbers of 8 bits. x: [T, K] and weight: [N, K], float32. dtype: torch.int8
    with whole numbers of -127 to 127, or torch.float8_e4m3fn, whose largest number is 448.

    act_max: [K] float32, the largest |x| of each input channel on a calibration text. First,
    channel k of x is divided by s[k], and channel k of the weight is multiplied by it, so the
    product stays:
        s[k] = act_max[k]^alpha / (largest |weight[:, k]|)^(1 - alpha)
    and 1 where either of the two is 0. Then both are quantized: code = value / scale, rounded to
    the nearest number of dtype (torch.round, or the conversion to float8). What is beyond the
    largest number becomes the largest number. The weight has a scale for each row, x one for each
    token: the row's largest |value| / 127 or / 448, and 1 for a row of zeros. If x_scale: [1, 1] is
    given, it is the scale of all tokens.

    Returns, in this order: s: [K], the codes of x: [T, K] of dtype, their scale: [T, 1] (or x_scale
    as it was given), the codes of the weight: [N, K] of dtype, their scale: [N, 1], and the product
    of the dequantized matrices: [T, N] float32. Multiply codes as float32 or wider, because int8
    overflows. Errors: none to raise.

    Example, int8, alpha 0.5: x = [[127, 2]], weight = [[1, 2]], act_max = [127, 2]
        s = [√127 / √1, √2 / √2] = [11.27, 1]
        x / s = [11.27, 2], scale 11.27 / 127 = 0.0887, codes [127, 23]
        weight · s = [11.27, 2]: the same scale, the same codes
        product: (127 · 127 + 23 · 23) · 0.0887 · 0.0887 = 131.17; exactly it is 131
    """
    # SOLUTION
    largest = 127.0 if dtype == torch.int8 else 448.0

    def row_scale(rows: Tensor) -> Tensor:
        most = rows.abs().amax(dim=1, keepdim=True)
        return torch.where(most > 0, most / largest, 1.0)

    def codes(rows: Tensor, scale: Tensor) -> Tensor:
        values = (rows / scale).clamp(-largest, largest)
        return (values.round() if dtype == torch.int8 else values).to(dtype)

    weight_max = weight.abs().amax(dim=0)
    s = act_max**alpha / weight_max ** (1 - alpha)
    s = torch.where((act_max > 0) & (weight_max > 0), s, 1.0)
    x, weight = x / s, weight * s
    x_scale = row_scale(x) if x_scale is None else x_scale
    w_scale = row_scale(weight)
    x_codes, w_codes = codes(x, x_scale), codes(weight, w_scale)
    product = (x_codes.float() @ w_codes.float().T) * x_scale * w_scale.T
    return s, x_codes, x_scale, w_codes, w_scale, product
    # END


@dataclass
class Pages:
    """A cache of 8 bits. A value is its code times its scale.

    k_codes, v_codes: [num_pages, page_size, Hkv, D] int8. k_scales: [num_pages, Hkv, D] float32,
    one a page and channel. v_scales: [num_pages, page_size, Hkv] float32, one a token and head.
    """

    k_codes: Tensor
    k_scales: Tensor
    v_codes: Tensor
    v_scales: Tensor


@exercise("19.3", "A larger token arrives", minutes=40, difficulty=3)
def write_token(pages: Pages, k: Tensor, v: Tensor, slot: int) -> None:
    """Write K and V of one token, [Hkv, D] float32 each, into `slot` of the pages, in place. Slot i
    is row i mod page_size of page i // page_size.

    Tokens fill a page row by row. So the rows in front of the slot hold earlier tokens of the same
    sequence, and whatever the rows after it hold is never read. A token in row 0 is the first of a
    sequence in this page: codes and scales that are there belong to no sequence, and may be NaN.

    V has a scale for each token and head: the largest |value| of the head / 127. K has a scale for
    each channel of the page: the largest |value| of the channel, over all tokens of the page so
    far, / 127. So a token with a larger value makes a scale of K larger. Then the codes in the page
    must be written again, because they meant multiples of the old scale: round(code · old / new).
    A code is value / scale, rounded by torch.round, in -127 … 127. Where all values are 0, scale
    and code are 0. Aim: no loop over rows, heads or channels; other pages stay as they are. Errors:
    none to raise.

    Example: a page of two rows, one head, D = 2
        k = [12.7, 0.5] in row 0: scales [0.1, 0.5 / 127], codes [127, 127]
        k = [25.4, 0.2] in row 1: scales [0.2, 0.5 / 127]; row 0 becomes round([63.5, 127]) = [64,
          127],
        row 1 is [127, round(50.8)] = [127, 51]
    """
    # SOLUTION
    page, row = divmod(slot, pages.k_codes.shape[1])
    own = pages.k_scales[page] if row else torch.zeros_like(k)
    scale = torch.maximum(own, k.abs() / 127)
    divisor = torch.where(scale > 0, scale, 1.0)
    earlier = pages.k_codes[page, :row].float() * (own / divisor)
    pages.k_codes[page, :row] = earlier.round().to(torch.int8)
    pages.k_codes[page, row] = (k / divisor).round().to(torch.int8)
    pages.k_scales[page] = scale
    scale = v.abs().amax(dim=-1) / 127
    divisor = torch.where(scale > 0, scale, 1.0)
    pages.v_codes[page, row] = (v / divisor[:, None]).round().to(torch.int8)
    pages.v_scales[page, row] = scale
    # END


@triton.jit
def load_int4(ptr, offset, column, mask, scale_ptr, slot):
    """Rows of a cache of 4 bits, as lesson 12's tile_step asks for them -> [N, D] float32.

    ptr: the first byte of the cache for this head. offset: [N, 1], how many bytes after it each
    row begins. column: [1, D] and mask: [N, D], which values are asked for. scale_ptr: the scales
    of this head, two float32 numbers for each slot. slot: [N] int64, the slot of each row.
    """
    # SOLUTION 19.4
    byte = tl.load(ptr + offset + column // 2, mask=mask, other=0)
    code = (byte >> (column % 2 * 4)) & 15
    # The address is the same for a whole row, but only the mask knows which rows are in use.
    pair = scale_ptr + slot[:, None] * 2 + column * 0
    scale = tl.load(pair, mask=mask, other=0.0)
    lowest = tl.load(pair + 1, mask=mask, other=0.0)
    return code.to(tl.float32) * scale + lowest
    # END


@exercise(
    "19.4",
    "The LOAD hook: four bits inside the decode kernel",
    minutes=45,
    difficulty=3,
    replaces="lessons.l19_kv_quantization.pool:read_codes",
    through="reference.ladder.yours.codes:read_codes",
)
def int4_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
) -> Tensor:
    """One query per sequence over a paged cache of 4 bits. q: [B, Hq, D] float32 -> [B, Hq, D].

    The wrapper is done: it launches lesson 12's decode_kernel with `load_int4` above as its LOAD
    hook, which is yours to write. The kernel calls it for a tile of K and for a tile of V.

    k_cache, v_cache: [num_blocks, block_size, Hkv, D / 2] uint8. Byte i of a row holds value 2i in
    its low four bits and value 2i + 1 in its high four. k_scales, v_scales: [Hkv, num_blocks,
    block_size, 2] float32, dense: (scale, lowest) for each head and slot. A value is
        code · scale + lowest,    code: 0 to 15
    Unused slots have scales of NaN, so a load needs its mask and `other=`. Values that
    the mask leaves out must be 0. block_table: [B, max_blocks] int32, context_lens: [B] int32, as
    in lesson 12. Aim: no dequantized copy of the cache. Errors: none to raise.

    Example, one head, D = 2, one key in slot 0: byte 0x4F, scale 0.5, lowest -1
        low half 15: 15 · 0.5 - 1 = 6.5; high half 4: 4 · 0.5 - 1 = 1; the row is [6.5, 1]
    """
    (num_sequences, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[2]
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2])
    decode_kernel[num_kv_heads, 1, num_sequences](
        q,
        k_cache,
        v_cache,
        out,
        lse,
        None,
        context_lens,
        block_table,
        k_scales,
        v_scales,
        head_dim**-0.5 * LOG2_E,
        NO_WINDOW,
        0,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        k_scales.stride(0),
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=head_dim,
        PAGE_SIZE=k_cache.shape[1],
        BLOCK_M=16,
        BLOCK_N=16,
        BLOCK_D=triton.next_power_of_2(max(head_dim, 16)),
        BLOCK_DV=triton.next_power_of_2(max(head_dim, 16)),
        NUM_STAGES=2,
        LOAD=load_int4,
        LOAD_V=load_int4,
    )
    return out
