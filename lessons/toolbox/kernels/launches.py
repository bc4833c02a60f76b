"""Who is launched with which tensors, in Triton's interpreter."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_leaves

Told = Callable[[str, dict[str, Tensor]], None]


@contextmanager
def watching_launches(told: Told) -> Iterator[None]:
    """Before each launch of an interpreted kernel, call told(kernel's name, {argument: tensor}).

    A tuple of tensors or a tensor descriptor counts too: what its last tensor is stands under the
    argument's name.
    """
    # here, because Triton may not be installed
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

    with mock.patch.object(GridExecutor, "_init_args_hst", launch):
        yield
