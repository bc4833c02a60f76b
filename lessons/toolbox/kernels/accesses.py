"""What a kernel really loads and stores, element by element: counted in Triton's interpreter.

    with Accesses() as accesses:
        out = rms_norm(x, weight, 1e-5)
    accesses.loads(x), accesses.stores(out)      how often each element was touched, in its shape
    accesses.read_bytes, accesses.written_bytes  all of it; `loaded` and `stored` count elements

A formula says what a kernel should move; this sees a second read, a row that was never written, an
address outside every tensor. Only addresses under a true mask count, because a masked load reads
nothing from memory.
"""

import contextlib
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from lessons.toolbox.kernels.triton_ import TritonMissing
from lessons.toolbox.measure.device import has_triton, interpreting


class Accesses:
    """Within it every load and store of an interpreted kernel is kept. Raises RuntimeError where
    kernels are compiled.
    """

    def __init__(self):
        if not interpreting():
            raise RuntimeError(
                "accesses are counted in Triton's interpreter: set TRITON_INTERPRET=1, and use CPU "
                "tensors"
            )
        self.addresses: dict[str, list[np.ndarray]] = {"load": [], "store": []}
        self.loaded = self.stored = self.read_bytes = self.written_bytes = 0

    def __enter__(self) -> "Accesses":
        if not has_triton():
            raise TritonMissing("Triton is not installed, so no accesses can be counted")
        from triton.runtime.interpreter import InterpreterBuilder as builder

        load, store = builder.create_masked_load, builder.create_masked_store

        def create_masked_load(this, ptrs, mask, *rest, **options):
            self._keep("load", ptrs, mask)
            return load(this, ptrs, mask, *rest, **options)

        def create_masked_store(this, ptrs, value, mask, *rest, **options):
            self._keep("store", ptrs, mask)
            return store(this, ptrs, value, mask, *rest, **options)

        self._patches = contextlib.ExitStack()
        for counted in (create_masked_load, create_masked_store):
            self._patches.enter_context(patch.object(builder, counted.__name__, counted))
        return self

    def __exit__(self, *error) -> None:
        self._patches.close()

    def _keep(self, kind, ptrs, mask) -> None:
        addresses, active = np.broadcast_arrays(ptrs.data, mask.data)
        touched = addresses[active.astype(bool)]
        self.addresses[kind].append(touched)
        num_bytes = touched.size * (ptrs.get_element_ty().primitive_bitwidth // 8)
        if kind == "load":
            self.loaded += touched.size
            self.read_bytes += num_bytes
        else:
            self.stored += touched.size
            self.written_bytes += num_bytes

    def loads(self, x: Tensor) -> Tensor:
        """How often each element of x was loaded, int64, shaped like x: [...]."""
        return self._count("load", x)

    def stores(self, x: Tensor) -> Tensor:
        """How often each element of x was stored, int64, shaped like x: [...]."""
        return self._count("store", x)

    def outside(self, *tensors: Tensor) -> int:
        """Loads and stores that touch none of the tensors, of any shape: 0 for a kernel that stays
        inside.
        """
        total = sum(len(found) for kind in self.addresses.values() for found in kind)
        inside = (self._count(kind, x) for kind in self.addresses for x in tensors)
        return total - sum(int(count.sum()) for count in inside)

    def _count(self, kind: str, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        size = storage.nbytes() // x.itemsize
        found = np.concatenate(
            [a.ravel() for a in self.addresses[kind]] or [np.zeros(0, np.uint64)]
        ).astype(np.int64)
        element = (found - storage.data_ptr()) // x.itemsize
        counts = np.bincount(element[(element >= 0) & (element < size)], minlength=size)
        return torch.from_numpy(counts).as_strided(x.shape, x.stride(), x.storage_offset())
