"""Tensors that say they lie on a GPU, on a machine without one.

A `PretendedTensor` answers "cuda:0" when it is asked for its device, and keeps its numbers in
`host`, an ordinary tensor on the CPU. Every operation on it comes to `operate`, which refuses what
PyTorch refuses on a GPU (operands on two devices, a generator of the CPU) and computes on the
hosts. Operations on CPU tensors alone never come here.
"""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lessons.toolbox.proof.pretended.hosts import (
    NO_KERNEL,
    Hosts,
    compute,
    with_numbers,
    without_values,
    writes_into_first,
)
from lessons.toolbox.proof.pretended.refusals import CaptureError, NotRehearsed

DEVICE = torch.device("cuda", 0)
TWO_DEVICES = (
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
)
# between devices, and the question whether one is possible
COPIES = {"copy_", "copy", "_to_copy", "_has_compatible_shallow_copy_type"}


class PretendedTensor(Tensor):
    """A tensor on "cuda:0" whose numbers are in `host`: [...], on the CPU, or on "meta"."""

    @staticmethod
    def __new__(cls, host: Tensor):
        # not an inference tensor, because PyTorch refuses to make views of a wrapper that is one
        with torch.inference_mode(False):
            made = Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
            )
        made.host = without_values(host)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return operate(func, args, kwargs or {})

    # What PyTorch does in C++ without an operation that could be seen.

    @property
    def data(self) -> "PretendedTensor":
        return self.detach()

    @data.setter
    def data(self, new: "PretendedTensor") -> None:
        if (new.shape, new.dtype, new.device) != (self.shape, self.dtype, self.device):
            raise NotRehearsed("`.data` of another shape, type or device: use `.to` before")
        self.host = new.host

    def get_device(self) -> int:
        return DEVICE.index

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self):
        return self.host.untyped_storage()

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, *args, **options):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )

    __array__ = numpy

    def new_tensor(self, data, dtype=None, device=None):
        made = torch.tensor(data, dtype=dtype or self.dtype)
        return made.to(device or self.device)

    def set_(self, *source) -> "PretendedTensor":
        """A new tensor, where PyTorch changes this one."""
        source = [x.host if isinstance(x, PretendedTensor) else x for x in source]
        return PretendedTensor(torch.empty(0, dtype=self.dtype).set_(*source))

    def __repr__(self, **options) -> str:
        return f"pretended on {DEVICE}: {self.host!r}"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else repr(self)

    def __deepcopy__(self, memo: dict) -> "PretendedTensor":
        made = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made


def is_cuda(device) -> bool:
    """Whether a `device` argument names the GPU. A number does, None does not."""
    return device is not None and torch.device(device).type == "cuda"


# ---------------------------------------------------------------- one operation


def operate(func, args: tuple, kwargs: dict):
    """What `func` gives on a GPU. Raises as PyTorch does there; NotRehearsed for what is too large;
    CaptureError while a graph is captured.
    """
    name = func._schema.name.removeprefix("aten::")
    refuse_two_devices(name, args, kwargs)
    refuse_foreign_generator(args, kwargs)
    graph = Hosts.captured_by
    if waits_for_gpu(func, name, args):
        wait(name)
    if graph is not None:
        # a compound operation is captured as its parts, some of which copy and some do not
        parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
    target = kwargs.get("device")
    if name == "_to_copy" and any_pretended(args) and target == torch.device("cpu"):
        # PyTorch's own code names the CPU, where it believes the tensor. Who means it: `to_cpu`.
        target, kwargs = None, kwargs | {"device": None}
    on_gpu = any_pretended((args, kwargs)) if target is None else is_cuda(target)
    host_args, host_kwargs = on_hosts(args, kwargs)
    Hosts.operations += on_gpu and not func.is_view and not name.startswith(NO_KERNEL)
    if graph is not None and not func.is_view:
        result = graph.note(func, name, host_args, host_kwargs)
    else:
        result = compute(func, name, host_args, host_kwargs, on_gpu)
    if writes_into_first(func):
        return as_given(args[0])
    if "out" in kwargs:
        return as_given(kwargs["out"])
    return tree_map_only(Tensor, PretendedTensor, result) if on_gpu else result


def to_cpu(x: PretendedTensor, dtype: torch.dtype) -> Tensor:
    """A copy of x: [...] on the CPU. Raises CaptureError while a graph is captured."""
    wait("a copy to the CPU")
    return with_numbers(x.host).to(dtype, copy=True)


def on_hosts(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of an operation as the hosts take them."""
    args, kwargs = tree_map_only(PretendedTensor, lambda x: x.host, (args, kwargs))
    kwargs.pop("pin_memory", None)  # there is no device to pin it for
    if is_cuda(kwargs.get("device")):
        kwargs["device"] = torch.device("cpu")
    return args, kwargs


def as_given(x: Tensor) -> Tensor:
    """x, after an operation that wrote into it. Raises NotImplementedError if it has another shape
    now, which a wrapper cannot follow.
    """
    if isinstance(x, PretendedTensor) and x.shape != x.host.shape:
        raise NotImplementedError("a pretended tensor cannot change its shape in place")
    return x


def any_pretended(tree) -> bool:
    """Whether a pretended tensor stands anywhere in nested lists, tuples and dicts."""
    return any(isinstance(x, PretendedTensor) for x in tree_leaves(tree))


# ---------------------------------------------------------------- what PyTorch refuses


def refuse_two_devices(name: str, args: tuple, kwargs: dict) -> None:
    """Raise RuntimeError if an operation has operands on the CPU and on the GPU. A CPU tensor
    without dimensions is a number, and may stand anywhere but where it would be written.
    """
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    pretended = [isinstance(x, PretendedTensor) for x in leaves]
    if not any(pretended) or all(pretended) or name in COPIES:
        return
    first = args[0]
    if name in ("index", "index_put", "index_put_", "_unsafe_index"):
        if not isinstance(first, PretendedTensor):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        # Indices may come from the CPU, the values that are written may not.
        leaves = list(args[2:3])
        pretended = [isinstance(x, PretendedTensor) for x in leaves]
    foreign = [x for x, is_ours in zip(leaves, pretended) if not is_ours and not x.is_meta]
    in_place = name.endswith("_") and isinstance(first, Tensor)
    if (in_place and not isinstance(first, PretendedTensor)) or any(x.dim() for x in foreign):
        raise RuntimeError(f"{TWO_DEVICES} (in {name})")


def refuse_foreign_generator(args: tuple, kwargs: dict) -> None:
    """Raise RuntimeError if random numbers on the GPU come from a generator of the CPU."""
    generators = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch._C.Generator)]
    if generators and (any_pretended((args, kwargs)) or is_cuda(kwargs.get("device"))):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")


def wait(what: str) -> None:
    """Count a wait for the GPU. Raises CaptureError while a graph is captured."""
    if Hosts.captured_by is not None:
        raise CaptureError(f"operation not permitted when stream is capturing: {what}")
    Hosts.waits += 1


def waits_for_gpu(func, name: str, args: tuple) -> bool:
    """Whether Python cannot go on before the GPU has done this operation."""
    between = False
    if name == "copy_":
        target, source, *non_blocking = args
        is_blocking = not any(non_blocking)
        between = is_blocking and not (any_pretended([target]) and any_pretended([source]))
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    # indices on the CPU are copied, a mask is counted
    by_index = any(x is not None and (x.dtype == torch.bool or not x.is_cuda) for x in indices)
    decides_shape = torch.Tag.dynamic_output_shape in func.tags and name != "index"
    read_by_python = torch.Tag.data_dependent_output in func.tags or name in ("is_nonzero", "equal")
    return between or by_index or decides_shape or read_by_python
