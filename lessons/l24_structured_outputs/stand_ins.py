"""What takes the kernel's place on a CPU, where it would be interpreted.

PyTorch's masked fill looks at one element after the other there. Adding is vectorized, so each byte
of a mask is looked up as eight numbers, 0 or -inf, and these are added. A forbidden +inf would
become NaN; logits are finite.
"""

import torch
from torch import Tensor

from lessons.l24_structured_outputs import naive

_EIGHT = naive.unpacked(torch.arange(256, dtype=torch.int32)[:, None], 8)
BIAS_OF_BYTE = torch.zeros(256, 8).masked_fill(~_EIGHT, -torch.inf)


def apply_token_mask(logits: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """As naive.apply_token_mask, for finite logits on a CPU. logits: [B, V], mask: [R, ceil(V /
    32)] int32, rows: [R] int64.
    """
    each_byte = mask.contiguous().view(torch.uint8).int().flatten()
    bias = BIAS_OF_BYTE.index_select(0, each_byte).view(len(mask), -1)
    logits[rows] += bias[:, : logits.shape[1]].to(logits.dtype)
    return logits
