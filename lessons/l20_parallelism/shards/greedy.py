"""The likeliest token of each row, while the logits stay where they are.

ParallelHead gathers all logits, V numbers a row, because sampling wants them. A greedy request
wants one token. So each rank sends three numbers a row: its largest logit, how much all of its
tokens weigh against it, and which token it is.
"""

import torch
from torch import Tensor

from lessons.l20_parallelism.processes.group import Group


def likeliest(local_logits: Tensor, vocab_size: int, group: Group) -> tuple[Tensor, Tensor]:
    """(tokens: [B] int64, their log-probabilities: [B] float32 or wider), the same on all ranks.

    local_logits: [B, C]; column j of rank r belongs to token r · C + j, those from vocab_size on to
    none. Of equal logits the token with the lowest number counts. Where the largest logit is not
    finite, the log-probability is NaN.
    """
    first, width = group.rank * local_logits.shape[1], local_logits.shape[1]
    token = first + torch.arange(width, device=local_logits.device)
    wide = torch.promote_types(local_logits.dtype, torch.float32)
    own = local_logits.to(wide).masked_fill(token >= vocab_size, -torch.inf)
    best, place = own.max(dim=-1, keepdim=True)
    # A rank that has no token: -inf - (-inf) would be NaN.
    weight = (own - best.clamp(min=torch.finfo(own.dtype).min)).exp().sum(-1, keepdim=True)
    # A token's number is exact in float32 up to 2^24, above every vocabulary.
    sent = torch.stack([best, weight, (first + place).to(wide)], dim=-1)  # [B, 1, 3]
    best, weight, token = group.all_gather(sent, dim=1).unbind(-1)  # [B, size] each
    largest, winner = best.max(dim=-1, keepdim=True)
    total = (weight * (best - largest).exp()).sum(-1)
    return token.gather(-1, winner).flatten().long(), -total.log()
