"""Whether a kernel did the work of an exercise, or PyTorch beside an empty one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lessons.toolbox.kernels.accesses import Accesses
from lessons.toolbox.measure.device import interpreting


@contextmanager
def by_kernels() -> Iterator[Callable[[Tensor, str], None]]:
    """Gives a function that fails if an element of x was stored by no kernel within the context.
    Where kernels are compiled nothing can be counted, and it accepts everything.

        with by_kernels() as assert_stored:
            out = impl(q)
        assert_stored(out, "out")
    """
    if not interpreting():
        yield lambda x, label: None
        return
    with Accesses() as accesses:

        def assert_stored(x: Tensor, label: str) -> None:
            missing = int((accesses.stores(x) == 0).sum())
            assert not missing, (
                f"{label}: no kernel stored {missing} of its {x.numel()} elements. The kernel has "
                "to do the work, not PyTorch beside it"
            )

        yield assert_stored


class kernel_alone(TorchDispatchMode):
    """Within it the operations of a softmax fail in PyTorch, because the kernel is the exercise."""

    REFUSED = ("exp", "exp2", "_softmax", "logsumexp", "mm", "bmm", "addmm", "baddbmm")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.REFUSED, (
            f"your answer calls PyTorch's `{name}`: the kernel has to compute it"
        )
        return func(*args, **(kwargs or {}))
