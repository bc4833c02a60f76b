"""Token masks over a batch of logits in one launch. One program: a block of the vocabulary of one
row.

It reads 1 bit a token and writes -inf where the bit is 0. Logits are never read: a token that is
allowed is not touched, so the store is masked by the bits.
"""

from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def token_mask_kernel(
    logits_ptr,
    mask_ptr,
    rows_ptr,
    vocab_size,
    stride_logits,
    stride_mask,
    BLOCK: tl.constexpr,
):
    """logits: [B, vocab_size]; mask: [R, ceil(vocab_size / 32)] int32; rows: [R] int64."""
    which = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + which)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    word = tl.load(mask_ptr + which * stride_mask + token // 32, mask=is_token, other=0)
    # The shift keeps the sign, and & 1 removes it.
    is_forbidden = ((word >> (token % 32)) & 1) == 0
    out = logits_ptr + row * stride_logits + token
    lowest = tl.full((BLOCK,), float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(out, lowest, mask=is_token & is_forbidden)
