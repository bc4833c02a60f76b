"""Which operations of PyTorch move data, and how many bytes: counted operation by operation.

Each operation that makes or changes a tensor is one pass: it reads its operands and writes its
result, which is the least that it can do. On PyTorch's meta device, where tensors have shapes but
no numbers, a chain is counted at full size without the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Pass:
    """One operation, and the bytes that it reads and writes."""

    name: str
    read_bytes: int
    written_bytes: int


def total_bytes(passes: list[Pass]) -> int:
    """Bytes that all passes move."""
    return sum(p.read_bytes + p.written_bytes for p in passes)


class Traffic(TorchDispatchMode):
    """Within it every operation that moves data is appended to `passes`. Use it under
    torch.no_grad().

    Views and allocations move nothing. A tensor that several operands show (the same storage and
    offset) is read once.
    """

    def __init__(self):
        super().__init__()
        self.passes: list[Pass] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        name = func._schema.name.removeprefix("aten::")
        # What gives back its operand's storage without writing to it is a view.
        is_view = not func._schema.is_mutable and _storages(results) <= _storages(operands)
        if results and not is_view and not name.startswith(("empty", "new_empty")):
            self.passes.append(Pass(name, _distinct_bytes(operands), _distinct_bytes(results)))
        return out


def _storages(tensors: list[Tensor]) -> set[int]:
    return {x.untyped_storage()._cdata for x in tensors}


def _distinct_bytes(tensors: list[Tensor]) -> int:
    return sum(
        {
            (x.untyped_storage()._cdata, x.storage_offset(), x.shape): x.nbytes for x in tensors
        }.values()
    )


def passes_of(function: Callable, *arguments) -> list[Pass]:
    """The passes of function(*arguments), whose tensors have any shape; best on the meta device."""
    with torch.no_grad(), Traffic() as traffic:
        function(*arguments)
    return traffic.passes
