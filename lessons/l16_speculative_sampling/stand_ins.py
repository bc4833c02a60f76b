"""PyTorch in the kernel's place, for machines without a GPU: an interpreted kernel takes
seconds.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from lessons.l02_naive_attention.batched.batch_math import BLOCK, draw_tokens
from lessons.l16_speculative_sampling.arguments import check_rows
from lessons.l16_speculative_sampling.more.split import verify_split


def draw_rows(p: Tensor, u: Tensor) -> Tensor:
    """One token a row by inverse CDF. p: [B, V], need not sum to 1; u: [B], in [0, 1) -> [B]
    int64.
    """
    blocks = pad(p, (0, -p.shape[1] % BLOCK)).view(len(p), -1, BLOCK)
    return draw_tokens(blocks, u.double())


def verify_torch(
    p: Tensor, q: Tensor | None, drafted: Tensor, u: Tensor, cu_rows: Tensor, max_rows: int
) -> tuple[Tensor, Tensor]:
    """optimized.verify without a loop over the sequences. p, q: [R, V] -> tokens: [R], accepted:
    [B]. Raises ValueError.
    """
    check_rows(p, q, drafted, u, cu_rows, max_rows)
    first, end = cu_rows[:-1, None].long(), cu_rows[1:, None].long()  # [B, 1]
    rows = first + torch.arange(max_rows, device=p.device)  # [B, max_rows]
    is_drafted = rows < end - 1
    here = rows.clamp(max=len(drafted) - 1)
    # Clamped, because a bonus row holds no token.
    token = drafted[here].clamp(0, p.shape[1] - 1)
    q_there = 1.0 if q is None else q[here, token]
    passes = is_drafted & (u[here, 0] * q_there < p[here, token])
    kept = passes.long().cumprod(dim=1).sum(dim=1, keepdim=True)  # [B, 1]
    stop = (first + kept).clamp(max=len(drafted) - 1)

    ends = stop.squeeze(1)
    rest = p[ends]
    share = one_hot(drafted[ends].clamp(0), p.shape[1]) if q is None else q[ends]
    has_draft = stop < end - 1
    # where, because the bonus row of q holds anything, and NaN times 0 is NaN
    rest = torch.where(has_draft, (rest - share).clamp(min=0), rest)
    rest = torch.where(rest.sum(dim=1, keepdim=True) == 0, p[ends], rest)
    drawn = draw_rows(rest, u[ends, 1])
    drawn = torch.where(rest.sum(dim=1).isnan(), -1, drawn)

    emitted = torch.where(rows < stop, drafted[here], -1)
    emitted = torch.where(rows == stop, drawn[:, None], emitted)
    is_real = rows < end
    tokens = torch.empty_like(drafted)
    tokens[rows[is_real]] = emitted[is_real]
    accepted = torch.where(first < end, kept, -1).squeeze(1)
    return tokens, accepted.int()


def verify_for(device: torch.device) -> Callable:
    """The verification to generate with: the kernels where they are compiled."""
    return verify_split if device.type == "cuda" else verify_torch
