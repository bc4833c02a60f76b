"""What the batched verifications accept."""

import torch
from torch import Tensor

from lessons.toolbox.model.arguments import check_whole, refuse


def check_rows(
    p: Tensor, q: Tensor | None, drafted: Tensor, u: Tensor, cu_rows: Tensor, max_rows: int
) -> None:
    """Raise ValueError unless these fit together: p, q: [R, V], drafted: [R], u: [R, 2], cu_rows:
    [B + 1], as in optimized.verify.
    """
    check_whole(max_rows=max_rows)
    rows = len(drafted)
    vocab_size = p.shape[-1]
    wanted = {
        "p": (p, torch.float32, (rows, vocab_size)),
        "q": (q, torch.float32, (rows, vocab_size)),
        "drafted": (drafted, torch.int64, (rows,)),
        "u": (u, torch.float32, (rows, 2)),
        "cu_rows": (cu_rows, torch.int32, (len(cu_rows),)),
    }
    for name, (x, dtype, shape) in wanted.items():
        if x is None and name == "q":
            continue
        # Rows may lie apart, the elements of a row may not.
        is_dense = x.stride(-1) == 1 or x.shape[-1] == 1
        if name not in ("p", "q"):
            is_dense = x.is_contiguous()
        if x.dtype != dtype or x.shape != shape or x.device != p.device or not is_dense:
            got = f"{x.dtype} {list(x.shape)} with strides {list(x.stride())} on {x.device}"
            refuse(name, got, f"{dtype} {list(shape)}, dense, on p's device {p.device}")
    if not vocab_size or not len(cu_rows):
        refuse("p, cu_rows", f"{vocab_size} tokens, {len(cu_rows)} bounds", "one or more of both")
