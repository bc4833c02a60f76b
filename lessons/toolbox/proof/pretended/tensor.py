"""Tensors that say they lie on a GPU, on a machine without one.

A `PretendedTensor` answers "cuda:0" when it is asked for its device, and keeps its numbers in
`host`, an ordinary tensor on the CPU. Every operation on it comes to `operate`, which refuses what
PyTorch refuses on a GPU (operands on two devices, a generator of the CPU) and computes on the
hosts. Operations on CPU tensors alone never come here.

With `Hosts.keep_values` off, numbers of a floating type are not kept: their hosts are on the "meta"
device, which has shapes and no memory. So a model of any size fits, nothing is computed, and the
integers that depend on such numbers (a sampled token) are zeros.
"""

import math

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lessons.toolbox.proof.pretended.refusals import CaptureError, NotRehearsed

DEVICE = torch.device("cuda", 0)
MOST_BYTES = 2**30  # of one tensor that keeps its numbers: a rehearsal runs on a laptop
TWO_DEVICES = (
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
)
# between devices, and the question whether one is possible
COPIES = {"copy_", "copy", "_to_copy", "_has_compatible_shallow_copy_type"}
NO_KERNEL = ("empty", "new_empty")  # they give memory alone


class Hosts:
    """How the numbers of all pretended tensors are kept, and the graph that is being captured."""

    keep_values = True
    captured_by = None  # a graph with note(function, arguments, outputs)


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


# ---------------------------------------------------------------- one operation


def operate(func, args: tuple, kwargs: dict):
    """What `func` gives on a GPU. Raises as PyTorch does there; NotRehearsed for what is too large;
    CaptureError while a graph is captured.
    """
    name = func._schema.name.removeprefix("aten::")
    refuse_two_devices(name, args, kwargs)
    refuse_foreign_generator(args, kwargs)
    graph = Hosts.captured_by
    if graph is not None:
        refuse_in_capture(func, name, args, kwargs)
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
    if Hosts.captured_by is not None:
        raise CaptureError("operation not permitted when stream is capturing: a copy to the CPU")
    return zeros_like(x.host).to(dtype, copy=True)


def on_hosts(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of an operation as the hosts take them."""
    args, kwargs = tree_map_only(PretendedTensor, lambda x: x.host, (args, kwargs))
    kwargs.pop("pin_memory", None)  # there is nobody to pin it for
    if is_cuda(kwargs.get("device")):
        kwargs["device"] = torch.device("cpu")
    return args, kwargs


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
        return func(*args, **kwargs)
    return compute_without_values(func, name, args, kwargs, on_gpu)


def compute_without_values(func, name: str, args: tuple, kwargs: dict, on_gpu: bool):
    """The shapes of the operation's results; integers, and what goes to the CPU, are zeros."""
    if name == "_local_scalar_dense":
        return 0.0 if args[0].is_floating_point() else 0
    if writes_into_first(func) and not args[0].is_meta:
        return args[0]
    kwargs = kwargs | ({"device": "meta"} if "device" in kwargs else {})
    shapes = tree_map_only(Tensor, as_meta, (args, kwargs))
    try:
        result = func(*shapes[0], **shapes[1])
    except (NotImplementedError, RuntimeError):
        # The result's shape depends on numbers, as that of a masked selection does.
        zeros = tree_map_only(Tensor, zeros_like, (args, kwargs))
        result = func(*zeros[0], **{k: v for k, v in zeros[1].items() if k != "device"})
    keep = lambda x: x if x.is_floating_point() and on_gpu else zeros_like(x)
    return tree_map_only(Tensor, keep, result)


def zeros_like(x: Tensor) -> Tensor:
    """Zeros on the CPU, in the shape of x: [...]; x itself if it has numbers."""
    return torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x


def writes_into_first(func) -> bool:
    """Whether an operation changes its first argument and returns it."""
    arguments, returns = func._schema.arguments, func._schema.returns
    alias = arguments[0].alias_info if arguments else None
    return bool(alias and alias.is_write and len(returns) == 1)


def as_given(x: Tensor) -> Tensor:
    """x, after an operation that wrote into it. Raises NotImplementedError if it has another shape now, which
    a wrapper cannot follow.
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


def refuse_in_capture(func, name: str, args: tuple, kwargs: dict) -> None:
    """Raise CaptureError for what waits for the GPU, which a capture does not allow."""
    from_cpu = name == "copy_" and not all(isinstance(x, PretendedTensor) for x in args[:2])
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    by_mask = any(x is not None and x.dtype == torch.bool for x in indices)
    decides_shape = torch.Tag.dynamic_output_shape in func.tags and name != "index"
    read_by_python = torch.Tag.data_dependent_output in func.tags or name in ("is_nonzero", "equal")
    if from_cpu or by_mask or decides_shape or read_by_python:
        raise CaptureError(f"operation not permitted when stream is capturing: {name}")


def refuse_too_large(name: str, args: tuple, kwargs: dict) -> None:
    """Raise NotRehearsed for a new tensor that this machine should not hold."""
    if not Hosts.keep_values:
        return
    sizes = next((x for x in args if isinstance(x, (list, tuple, torch.Size))), ())
    item_bytes = (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
    if (num_bytes := math.prod(sizes) * item_bytes) > MOST_BYTES:
        raise NotRehearsed(f"{name} of {num_bytes / 2**30:.1f} GiB")
