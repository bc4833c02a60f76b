"""Whether the learner's kernel did the work of an exercise, or PyTorch beside an empty one.

    test_the_kernel_does_it = kernel_does_it("12.3", lambda seed: pages(seed, [20, 3], 4))

Values cannot tell, because PyTorch's are as right. So here the wrapper may only allocate, fill and
view tensors that hold numbers; a kernel has to load each input and to store each element of the
result, by what a compiler knows, and after its launch nobody may change one. Every exercise with a
kernel has this check, and attacks (wrong/attacks.py) show that it rejects what it is for. Its
programs run in two orders, too.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lessons.toolbox.gpu.arguments import bytes_of
from lessons.toolbox.gpu.filming import filming
from lessons.toolbox.kernels.cuda_cpp import CudaKernel
from lessons.toolbox.kernels.film import Access, Film
from lessons.toolbox.kernels.order import program_order
from lessons.toolbox.measure.device import has_gpu, has_triton, interpreting
from tests.exercises.checking import alike, check, note, unspoiled
from tests.exercises.kernel_names import assert_compilable

Tensors = dict[str, Tensor]
READS = ("numpy", "tolist", "__array__")  # how numbers leave PyTorch without an operation


def kernel_does_it(
    exercise_id: str,
    make: Callable[[int], dict[str, Any]],
    *,
    results: Callable[[Any, dict[str, Any]], Tensors] | None = None,
    not_loaded: tuple[str, ...] = (),
    once: tuple[str, ...] = (),
    may: tuple[str, ...] = (),
) -> Callable:
    """A check of an exercise, on the inputs make(seed). results: what the kernel has to store
    whole, from (what was returned, inputs), as {what it is: tensor}; default: what was returned.

    not_loaded: inputs that a right kernel need not load; once: those of which it loads each element
    once; may: operations of PyTorch that the given wrapper has.
    """

    def named(got: Any, inputs: dict[str, Any]) -> Tensors:
        return results(got, inputs) if results else {"your result": got}

    @check(exercise_id, seconds=90)  # the first CUDA C++ kernel waits for its compiler
    def test_the_kernel_does_it(impl, seed):
        inputs = make(seed)
        with unspoiled(inputs):
            with watched(may) as watch:
                got = impl.bare(**inputs)  # what a Recorder does is PyTorch's work
            note(got)
            for label, x in named(got, inputs).items():
                assert isinstance(x, Tensor), f"{label} is {type(x).__name__}, expected a tensor"
                watch.assert_stored(x, label)
            for name, x in inputs.items():
                if isinstance(x, Tensor) and name not in not_loaded:
                    watch.assert_loaded(x, name, name in once)
        if interpreting() and has_triton():
            assert_any_order(impl.bare, inputs, named, seed)

    return test_the_kernel_does_it


def assert_any_order(
    impl: Callable, inputs: dict[str, Any], named: Callable[[Any, dict], Tensors], seed: int
) -> None:
    """Of every two programs each one runs first once, and the results are the same. named: the
    results that count, from (what was returned, inputs).
    """
    runs = []
    for backwards in (False, True):
        with unspoiled(inputs), program_order(seed, backwards):
            got = impl(**inputs)
            runs.append({label: x.clone() for label, x in named(got, inputs).items()})
    for label, x in runs[0].items():
        assert alike(x, runs[1][label]), (
            f"{label} depends on the order in which your kernel's programs run, and a GPU promises "
            "none: a place that one program stores to, another one stores to or loads"
        )


@contextmanager
def watched(may: tuple[str, ...] = ()) -> Iterator["Watch"]:
    """Within it PyTorch computes nothing, and the kernels' accesses are kept: of interpreted ones,
    and of CUDA C++ on the CPU. A GPU keeps no record, so there a Watch accepts everything.
    """
    alone, watch = KernelAlone(may), Watch()
    with ExitStack() as stack:
        film = stack.enter_context(Film() if interpreting() and has_triton() else nullcontext())
        stack.enter_context(filming(watch.accesses))
        if film:
            from triton.runtime.interpreter import GridExecutor

            stack.enter_context(watch.after_launches(GridExecutor, "__call__", alone))
            for name in READS:
                stack.enter_context(alone.refusing(name))
        stack.enter_context(watch.after_launches(CudaKernel, "launch", alone))
        stack.enter_context(alone)
        yield watch
    watch.accesses += film.accesses if film else []


class Watch:
    """What kernels loaded and stored, and what their tensors held after the last launch."""

    def __init__(self):
        self.accesses: list[Access] = []
        self.given: list[Tensor] = []  # alive, so that their addresses stay theirs
        self.after: dict[int, np.ndarray] = {}  # address of a storage -> its bytes

    def after_launches(self, owner: type, name: str, alone: "KernelAlone"):
        """Within it each launch by owner.name leaves its tensors' bytes here."""
        original = getattr(owner, name)

        def launch(this, *args, **options):
            with alone.at_rest():
                original(this, *args, **options)
            leaves = tree_leaves((args, options))
            if hasattr(this, "fn"):  # of Triton; CUDA C++ went through a compiler
                assert_compilable(this.fn, leaves)
            for x in leaves:
                if isinstance(x, Tensor) and x.device.type == "cpu":
                    self.given.append(x)
                    self.after[x.untyped_storage().data_ptr()] = bytes_of(
                        x.untyped_storage()
                    ).copy()

        return mock.patch.object(owner, name, launch)

    def assert_stored(self, x: Tensor, label: str) -> None:
        """Kernels stored each element of x: [...], and it still is what the last launch left."""
        if has_gpu():
            return
        missing = int((self._touched(x, "store", "atomic") == 0).sum())
        assert not missing, (
            f"{label}: no kernel stored {missing} of its {x.numel()} elements. The kernel has to "
            "do the work, not PyTorch beside it"
        )
        left = self.after.get(x.untyped_storage().data_ptr())
        if left is None:
            return  # compiled for a CPU: who changes a result is found where it is interpreted
        then = torch.from_numpy(left).view(x.dtype)
        then = then.as_strided(x.shape, x.stride(), x.storage_offset())
        changed = int(((then != x) & ~((then != then) & (x != x))).sum())
        assert not changed, (
            f"{label}: {changed} of its {x.numel()} elements were changed after the kernel's "
            "launch. What the kernel stores is the result"
        )

    def touched(self, x: Tensor, *kinds: str) -> Tensor | None:
        """How often kernels touched each element of x: [...] so; None on a GPU, which keeps no
        record.
        """
        return None if has_gpu() else self._touched(x, *kinds)

    def assert_loaded(self, x: Tensor, name: str, once: bool) -> None:
        """Kernels loaded something of x: [...]; `once`: each element, and once."""
        if has_gpu():
            return
        counts = self._touched(x, "load", "atomic")
        assert counts.any(), (
            f"no kernel loads anything of `{name}`. The kernel has to read its inputs itself"
        )
        left_out = int((counts == 0).sum())
        assert not once or not left_out, (
            f"your kernel leaves out {left_out} of {x.numel()} elements of `{name}`: it has to "
            "load each one"
        )
        # Compiled, a block of fewer values than threads is loaded by several threads at once.
        assert not once or not interpreting() or bool((counts == 1).all()), (
            f"your kernel loads elements of `{name}` {int(counts.max())} times; once is enough: "
            "threads pass on what they hold, and lanes without work are masked"
        )

    def _touched(self, x: Tensor, *kinds: str) -> Tensor:
        """How often each element of x: [...] was touched so, in its shape."""
        total = torch.zeros(x.shape, dtype=torch.int64)
        for access in self.accesses:
            if access.kind in kinds:
                total += access.elements(x)
        return total


class KernelAlone(TorchDispatchMode):
    """Within it PyTorch may make, fill and view tensors of floats, and nothing else."""

    MAKES = ("empty_like", "zeros_like", "full_like", "new_empty", "new_zeros", "new_full")
    FILLS = ("fill_", "zero_")

    def __init__(self, may: tuple[str, ...] = ()):
        super().__init__()
        self.allowed, self._resting = {*self.MAKES, *self.FILLS, *may}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not (self._resting or func.is_view or name in self.allowed):
            leaves = tree_leaves((args, kwargs))
            assert not any(isinstance(x, Tensor) and x.is_floating_point() for x in leaves), (
                f"your answer calls PyTorch's `{name}`: the kernel has to compute it"
            )
        return func(*args, **(kwargs or {}))

    def refusing(self, name: str):
        """Within it a method of tensors gives no floats away."""
        original = getattr(Tensor, name)

        def read(x: Tensor, *args, **options):
            assert self._resting or not x.is_floating_point(), (
                f"your answer reads numbers by a tensor's `{name}`: the kernel has to compute them"
            )
            return original(x, *args, **options)

        return mock.patch.object(Tensor, name, read)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Within it all is allowed, for what the launcher of a kernel does."""
        self._resting += 1
        try:
            yield
        finally:
            self._resting -= 1
