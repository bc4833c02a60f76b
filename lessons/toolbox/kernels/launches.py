"""Who is launched with which tensors: in Triton's interpreter, or compiled and run on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lessons.toolbox.measure.device import compiled_chip

Told = Callable[[str, dict[str, Tensor]], None]


@contextmanager
def watching_launches(told: Told) -> Iterator[None]:
    """Before each launch of a kernel, call told(kernel's name, {argument: tensor}).

    A tuple of tensors or a tensor descriptor counts too: what its last tensor is stands under the
    argument's name.
    """
    with _compiled(told) if compiled_chip() else _interpreted(told):
        yield


def _compiled(told: Told):
    # here, because Triton may not be installed
    from lessons.toolbox.gpu import triton_driver

    bind = triton_driver.bind

    def bound(kernel, given):
        found = {name: getattr(x, "tensor", x) for name, x in given}  # of a descriptor
        told(kernel.name, {name: x for name, x in found.items() if isinstance(x, Tensor)})
        return bind(kernel, given)

    return mock.patch.object(triton_driver, "bind", bound)


def _interpreted(told: Told):
    from triton.runtime.interpreter import GridExecutor

    init_args = GridExecutor._init_args_hst

    def launch(this, args, options):
        on_host = init_args(this, args, options)
        tensors = {}
        for name, arg in [*zip(this.arg_names, on_host[0]), *on_host[1].items()]:
            for leaf in tree_leaves(arg):
                x = getattr(leaf, "base", leaf)  # of a tensor descriptor
                if isinstance(x, Tensor):
                    tensors[name] = x
        told(this.fn.__name__, tensors)
        return on_host

    return mock.patch.object(GridExecutor, "_init_args_hst", launch)
