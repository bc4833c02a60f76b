"""What torch.cuda answers while a GPU is pretended: one H100, streams and events that are always
done, graphs that record (graphs.py).
"""

import contextlib
import sys
import time
import warnings
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from lessons.toolbox.proof.pretended.graphs import Graph, capture
from lessons.toolbox.proof.pretended.hosts import Hosts
from lessons.toolbox.proof.pretended.refusals import CaptureError, NotRehearsed
from lessons.toolbox.proof.pretended.tensor import (
    DEVICE,
    PretendedTensor,
    any_pretended,
    is_cuda,
    operate,
    to_cpu,
)

NAME = "pretended H100"
PROPERTIES = SimpleNamespace(
    name=NAME,
    major=9,
    minor=0,
    total_memory=80 * 10**9,
    multi_processor_count=132,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=50 * 2**20,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
)
MOST_CYCLES = 10**7  # milliseconds; a timer keeps a GPU busy for less
# name in torch.cuda -> what it returns, whatever it is asked
ANSWERS = {
    "_lazy_init": None,
    "is_available": True,
    "is_initialized": True,
    "_is_in_bad_fork": False,
    "is_bf16_supported": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": NAME,
    "get_device_capability": (9, 0),
    "get_device_properties": PROPERTIES,
    "mem_get_info": (79 * 10**9, 80 * 10**9),
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "reset_peak_memory_stats": None,
    "manual_seed": None,
    "manual_seed_all": None,
    "synchronize": None,
    "empty_cache": None,
    "graph_pool_handle": (0, 0),
    "set_device": None,
    "set_stream": None,
    "set_sync_debug_mode": None,
}

# What a borrowed machine does not have installed: it has PyTorch, Triton, transformers and pytest.
# Some of these have machine code, too, which would look for the real GPU behind torch.cuda.
ABSENT = (
    "bitsandbytes",
    "torchao",
    "xgrammar",
    "llguidance",
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
    "openai",
    "anthropic",
    "gguf",
    "compressed_tensors",
    "adjustText",
    "IPython",
    "ipykernel",
    "nbformat",
)

# What makes new tensors, all others call these. Some of them PyTorch would make empty and resize,
# which a wrapper cannot follow.
FACTORIES = (
    "empty.memory_format",
    "empty_strided",
    "arange",
    "arange.start",
    "arange.start_step",
    "linspace",
    "eye",
    "eye.m",
    "randperm",
    "randperm.generator",
    "tril_indices",
    "triu_indices",
)


class Stream(contextlib.nullcontext):
    """A stream on which everything is done."""

    cuda_stream = 0
    device = DEVICE

    def __init__(self, *args, **options):
        super().__init__()

    def query(self) -> bool:
        """Whether its work is done."""
        return True

    def synchronize(self) -> None:
        """Wait for its work. Raises CaptureError while a graph is captured."""
        if Hosts.captured_by is not None:
            raise CaptureError("operation not permitted when stream is capturing: synchronize")

    def wait_stream(self, other) -> None:
        """Have later work wait, which is done in order anyway."""

    wait_event = record_event = wait_stream


class Event:
    """An event that happens at once. Its times are those of the CPU."""

    def __init__(self, *args, **options):
        self.at = None

    def record(self, stream=None) -> None:
        """Happen, now."""
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """From this event to `end`, in ms."""
        return max((end.at - self.at) * 1e3, 1e-6)

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def synchronize(self) -> None:
        """Wait until it has happened: it has."""

    wait = synchronize


def sleep(cycles: int) -> None:
    """torch.cuda._sleep. Raises NotRehearsed for a GPU that is kept busy for long."""
    if cycles > MOST_CYCLES:
        raise NotRehearsed("a GPU that is still busy: a pretended one has always finished")


def with_index(device):
    """ "cuda" -> cuda:0, because PyTorch without CUDA cannot ask which one is current; what is no
    CUDA device stays.
    """
    named = isinstance(device, (str, torch.device)) and is_cuda(device)
    return DEVICE if named else torch.device(device) if isinstance(device, str) else device


def refuse_compile(*args, **options):
    """torch.compile. Raises NotRehearsed."""
    raise NotRehearsed("torch.compile, which writes code for a real GPU")


def moved(original):
    """Tensor.to, which knows where a pretended tensor lies."""

    def to(self, *args, copy=False, **options):
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        if "other" in options:
            other = options.pop("other")
            args = (other.device, other.dtype, *args)
        args = [with_index(x) if i == 0 else x for i, x in enumerate(args)]
        options = {k: with_index(v) if k == "device" else v for k, v in options.items()}
        device, dtype, _, _ = torch._C._nn._parse_to(*args[:2], **options)
        device, dtype = with_index(device) or self.device, dtype or self.dtype
        if not isinstance(self, PretendedTensor) and device.type != "cuda":
            return original(self, *args, copy=copy, **options)
        if not copy and (device, dtype) == (self.device, self.dtype):
            return self
        if isinstance(self, PretendedTensor) and device.type == "cpu":
            return to_cpu(self, dtype)
        return torch.ops.aten._to_copy(self, dtype=dtype, device=device)

    return to


def keeping_ties(original):
    """Module._apply, after which modules that shared a parameter share the new one, as on a GPU."""

    def apply(self, *args, **options):
        places = {}
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), []).append((module._parameters, name))
        moved_module = original(self, *args, **options)
        for (first, first_name), *others in places.values():
            for parameters, name in others:
                parameters[name] = first[first_name]
        return moved_module

    return apply


def made_from(original):
    """torch.tensor and torch.as_tensor: made on the CPU, and copied. There is no device to pin it
    for.
    """

    def make(data, *args, device=None, pin_memory=False, **options):
        # of an empty tensor, because `with torch.device(...)` may say where new ones lie
        device = torch.empty(0).device if device is None else torch.device(device)
        if isinstance(data, PretendedTensor):
            made = data.to(options.get("dtype") or data.dtype)
            return made if original is AS_TENSOR else made.clone()
        with torch.device("cpu"):
            made = original(data, *args, device="cpu", **options)
        return made.to(device)

    return make


def whole(func, original):
    """An operation that makes tensors in C++, on the device that it believes its arguments are on:
    the CPU. On the hosts it is right.
    """

    def call(*args, **kwargs):
        is_ours = any_pretended((args, kwargs))
        return operate(func, args, kwargs) if is_ours else original(*args, **kwargs)

    return call


AS_TENSOR = torch.as_tensor
_REGISTRATIONS = []  # kept, because PyTorch forgets those of a library that is deleted


def install() -> None:
    """Pretend a GPU in this process, for good."""
    for name, value in ANSWERS.items():
        setattr(torch.cuda, name, lambda *args, _value=value, **options: _value)
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args: Stream()
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, capture
    torch.cuda.stream = torch.cuda.device = lambda *args: contextlib.nullcontext()
    torch.version.cuda = "pretended"
    for name in ABSENT:
        sys.modules[name] = None
    torch.cuda._sleep = sleep
    torch.compile = refuse_compile
    torch.tensor, torch.as_tensor = made_from(torch.tensor), made_from(torch.as_tensor)
    nn, aten = torch.nn, torch.ops.aten
    nn.functional.scaled_dot_product_attention = whole(
        aten.scaled_dot_product_attention.default, nn.functional.scaled_dot_product_attention
    )
    nn.functional.one_hot = whole(aten.one_hot.default, nn.functional.one_hot)
    nn.utils.rnn.pad_sequence = whole(aten.pad_sequence.default, nn.utils.rnn.pad_sequence)
    torch.Tensor.to = moved(torch.Tensor.to)
    torch.Tensor.type_as = lambda self, other: self.to(other)
    torch.Tensor.pin_memory = lambda self, *args: self  # there is no device to pin it for
    torch.Tensor.cuda = lambda self, *args, **options: self.to(DEVICE)
    # A module that moves gets new parameters, because the old ones cannot become pretended.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    nn.Module._apply = keeping_ties(nn.Module._apply)
    register_factories()


def register_factories() -> None:
    """Have PyTorch call `operate` for a new tensor on "cuda": there is no pretended tensor among
    its arguments that would bring it here.
    """
    library = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        with warnings.catch_warnings():  # a PyTorch with CUDA has kernels of its own for some
            warnings.simplefilter("ignore")
            library.impl(name, partial(run_factory, func), "CUDA")
    _REGISTRATIONS.append(library)


def run_factory(func, *args, **kwargs):
    """A new tensor as `func` makes it: [...]."""
    return operate(func, args, kwargs)
