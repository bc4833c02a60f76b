"""The numbers of pretended tensors: ordinary tensors on the CPU, and what is computed on them.

With `Hosts.keep_values` off, numbers of a floating type are not kept: their hosts are on the "meta"
device, which has shapes and no memory. So a model of any size fits, and nothing is computed. Where
such a number is asked for it is 1, which is finite and may be a probability; an integer that
depends on one (a sampled token) is 0, and so is one that a kernel would have written.
"""

import math

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lessons.toolbox.proof.pretended.refusals import NotRehearsed

MOST_BYTES = 2**30  # of one tensor that keeps its numbers: a rehearsal runs on a laptop
MOST_ZEROED = 2**24  # elements: what Python reads is small, and a large tensor takes no memory so
NO_KERNEL = ("empty", "new_empty")  # they give memory alone


class Hosts:
    """How the numbers of all pretended tensors are kept, and the graph that is being captured."""

    keep_values = True
    captured_by = None  # a graph with note(function, arguments, outputs)
    operations = 0  # that a GPU was asked for, but for kernels of ours
    waits = 0  # of Python, until the GPU has done all that it was asked for


def without_values(host: Tensor) -> Tensor:
    """host: [...], as Hosts keeps it: itself, or its shape on "meta"."""
    if Hosts.keep_values or not host.is_floating_point():
        return host
    return as_meta(host)


def as_meta(host: Tensor) -> Tensor:
    """The shape, strides and type of `host`: [...], without memory."""
    if host.is_meta:
        return host
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="meta")


def compute(func, name: str, args: tuple, kwargs: dict, on_gpu: bool):
    """The operation on hosts."""
    if on_gpu and name.startswith(NO_KERNEL):
        refuse_too_large(name, args, kwargs)
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    loses_values = not Hosts.keep_values and dtype.is_floating_point
    if on_gpu and loses_values and not tensors and name.startswith("empty"):
        return func(*args, **kwargs | {"device": "meta"})
    if not any(x.is_meta for x in tensors):
        result = func(*args, **kwargs)
        is_for_a_kernel = on_gpu and not Hosts.keep_values and name.startswith(NO_KERNEL)
        if is_for_a_kernel and result.numel() <= MOST_ZEROED:
            result.zero_()
        return result
    return compute_without_values(func, name, args, kwargs, on_gpu)


def compute_without_values(func, name: str, args: tuple, kwargs: dict, on_gpu: bool):
    """The shapes of the operation's results. An integer is 0; what goes to the CPU is 1, and a
    truth is what it is of ones.
    """
    if name == "_local_scalar_dense":
        return 1.0 if args[0].is_floating_point() else 0
    if writes_into_first(func) and not args[0].is_meta:
        return args[0]
    kwargs = kwargs | ({"device": "meta"} if "device" in kwargs else {})
    shapes = tree_map_only(Tensor, as_meta, (args, kwargs))
    try:
        result = func(*shapes[0], **shapes[1])
        needs_numbers = isinstance(result, Tensor) and result.dtype == torch.bool
    except (NotImplementedError, RuntimeError):
        # The result's shape depends on numbers, as that of a masked selection does.
        needs_numbers = True
    if needs_numbers:
        some = tree_map_only(Tensor, with_numbers, (args, kwargs))
        result = func(*some[0], **{k: v for k, v in some[1].items() if k != "device"})
    keep = lambda x: x if x.is_floating_point() and on_gpu else with_numbers(x)
    return tree_map_only(Tensor, keep, result)


def with_numbers(x: Tensor) -> Tensor:
    """Ones on the CPU, in the shape of x: [...], zeros if x is of integers; x itself if it has
    numbers.
    """
    number = int(x.is_floating_point())
    return torch.full(x.shape, number, dtype=x.dtype) if x.is_meta else x


def writes_into_first(func) -> bool:
    """Whether an operation changes its first argument and returns it."""
    arguments, returns = func._schema.arguments, func._schema.returns
    alias = arguments[0].alias_info if arguments else None
    return bool(alias and alias.is_write and len(returns) == 1)


def refuse_too_large(name: str, args: tuple, kwargs: dict) -> None:
    """Raise NotRehearsed for a new tensor that this machine should not hold."""
    if not Hosts.keep_values:
        return
    sizes = next((x for x in args if isinstance(x, (list, tuple, torch.Size))), ())
    item_bytes = (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
    if (num_bytes := math.prod(sizes) * item_bytes) > MOST_BYTES:
        raise NotRehearsed(f"{name} of {num_bytes / 2**30:.1f} GiB")
