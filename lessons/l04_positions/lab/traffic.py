"""Bytes that a rotation and its write to the cache move: PyTorch's, counted operation by operation,
and the least there is.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MovedBytes(TorchDispatchMode):
    """Within it every operation is charged one read of each tensor that it takes and one write of
    each that it makes.

    That is the least it can do. Views move nothing; of a table only the rows looked up are read;
    what is overwritten is not read.
    """

    def __init__(self):
        super().__init__()
        self.moved_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name, outputs = func._schema.name, [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.is_view or name in ("aten::detach", "aten::_unsafe_view"):
            return out
        if name.startswith("aten::index"):
            self.moved_bytes += 2 * out.nbytes + sum(x.nbytes for x in inputs[1:])
        else:
            read = {id(x): x.nbytes for x in inputs}
            if name == "aten::copy_":
                del read[id(args[0])]
            self.moved_bytes += sum(read.values()) + sum(x.nbytes for x in outputs)
        return out


def eager_bytes(attend_write, *inputs) -> int:
    """Bytes that attend_write(*inputs), any PyTorch code, moves; inputs of any shape, best on the
    meta device at full size.
    """
    with MovedBytes() as traffic:
        attend_write(*inputs)
    return traffic.moved_bytes


def fused_bytes(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> int:
    """What rope_cache_kernel moves: q, k and v read once and written once, a row of the table, a
    position and a slot a token.
    """
    rows = 2 * (num_heads + 2 * num_kv_heads) * head_dim * itemsize
    return num_tokens * (rows + head_dim * torch.float32.itemsize + 2 * torch.int64.itemsize)
