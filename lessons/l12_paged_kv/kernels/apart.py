"""A step in which prompts run beside single tokens: each kind through its own kernel.

In the prefill kernel a single token fills one row of a tile, once for each of its heads, and one
program reads all of its keys. The decode kernel shares K and V among the heads of a group, and cuts
a long context into splits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch

Part = Callable[[Tensor, Batch], Tensor]  # (q: [T, Hq, D], the step) -> [T, Hq, Dv]


def apart(q: Tensor, batch: Batch, decode: Part, prefill: Part) -> Tensor:
    """`decode` for the sequences in front that run one token, `prefill` for the others. q: [T, Hq,
    D] -> [T, Hq, Dv].
    """
    if not batch.num_decodes:
        return prefill(q, batch)
    front, rest = batch.in_two
    tokens = batch.num_decode_tokens
    return torch.cat([decode(q[:tokens], front), prefill(q[tokens:], rest)])
