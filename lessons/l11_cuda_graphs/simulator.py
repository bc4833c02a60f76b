"""A stand-in for CUDA graphs where there is no GPU: it records, refuses and goes stale like the
real one.

It is a simulator: it saves no time. Capturing runs nothing, it only notes each operation with the
very tensors that it was given; replaying runs them again on these tensors, in order. So a buffer
that was replaced, a length that Python knew, a branch that was taken stay as they were at capture,
and an output is garbage before the first replay, as on a GPU.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lessons.l03_kv_cache import arguments as checks
from lessons.toolbox.kernels.triton_ import triton
from lessons.toolbox.measure.device import has_triton
from lessons.toolbox.proof.traps import poison_

# Methods that run no operation on a CPU tensor, but copy a GPU's tensor to the CPU.
READS_ON_THE_CPU = {"cpu", "tolist", "numpy", "__array__", "__repr__", "__format__"}


class CaptureError(RuntimeError):
    """What was tried cannot be captured. On a GPU: cudaErrorStreamCaptureUnsupported, or a graph
    that is silently wrong.
    """

    def __init__(self, name: str, why: str):
        super().__init__(f"operation not permitted when stream is capturing: {name} {why}")


@dataclass(frozen=True)
class Launch:
    """One recorded kernel: its name, what it runs, the tensors it was given, and those that it
    makes.
    """

    name: str
    function: Callable
    args: tuple
    kwargs: dict
    outputs: tuple[Tensor, ...]  # fresh memory; an operation in place has none

    @property
    def inputs(self) -> list[Tensor]:
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    def run(self) -> None:
        """Once more, on the same memory."""
        results = tree_leaves(self.function(*self.args, **self.kwargs))
        for output, result in zip(self.outputs, results):
            output.copy_(result)


class SimulatedGraph:
    """Records a function's operations, and replays them. Same life as a torch.cuda.CUDAGraph."""

    def __init__(self):
        self.launches: list[Launch] = []
        self.output = None
        self.is_ready = False

    def record(self, step: Callable[[], Tensor]) -> Tensor:
        """Capture step(). Returns its output, [...], poisoned until the first replay. Raises
        CaptureError.
        """
        noted = mock.patch.object(checks, "KERNELS_RUN", False)
        with noted, _NoReadBack(), _Recorder(self.launches), _kernels_into(self.launches):
            self.output = step()
        self.is_ready = True
        return self.output

    def replay(self) -> None:
        """Run all that was recorded. Raises RuntimeError if nothing was, or if the capture
        failed.
        """
        if not self.is_ready:
            raise RuntimeError(
                "replay: this graph holds nothing; accepted: one whose capture has ended without "
                "an error"
            )
        with torch.inference_mode():  # because a replay knows nothing of autograd
            for launch in self.launches:
                launch.run()


class SimulatedGraphs:
    """Stands in for CudaGraphs. warm_ups: runs before the capture, as there; 0 shows why they are
    needed.
    """

    def __init__(self, warm_ups: int = 2):
        self.warm_ups = warm_ups

    def capture(self, step: Callable[[], Tensor]) -> tuple[SimulatedGraph, Tensor]:
        """Run step() a few times, then record it. Returns the graph and its output, [...], garbage
        until the first replay.
        """
        for _ in range(self.warm_ups):
            step()
        graph = SimulatedGraph()
        return graph, graph.record(step)


# ---------------------------------------------------------------- recording


class _NoReadBack(TorchFunctionMode):
    """Refuses the methods that copy to the CPU, which on a CPU tensor would go unseen."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READS_ON_THE_CPU:
            raise CaptureError(f"Tensor.{name}", "waits for the GPU")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Appends every operation to `launches` instead of running it, and returns memory of the shape
    that it would have made.
    """

    def __init__(self, launches: list[Launch]):
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        _refuse(func, name, args, kwargs)
        with self:  # a compound operation is captured as its parts, which are what a GPU launches
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func.is_view:
            return func(*args, **kwargs)
        written = [
            _argument(func, i, args, kwargs)
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            self.launches.append(Launch(name, func, args, kwargs, ()))
            return written[0] if len(func._schema.returns) == 1 else tuple(written)
        outputs = _memory_for(func, args, kwargs)
        if not name.startswith(("empty", "new_empty")):  # room alone is no kernel
            self.launches.append(
                Launch(name, func, args, kwargs, tuple(x for x in tree_leaves(outputs)))
            )
        return outputs


def _refuse(func, name: str, args: tuple, kwargs: dict) -> None:
    """Raise CaptureError for what the CPU must wait for, in order to go on."""
    if torch.Tag.data_dependent_output in func.tags or name in ("item", "is_nonzero", "equal"):
        raise CaptureError(name, "waits for the GPU: Python wants to know a value")
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    masked = any(x is not None and x.dtype == torch.bool for x in indices)
    if masked or (torch.Tag.dynamic_output_shape in func.tags and name != "index"):
        raise CaptureError(name, "waits for the GPU: its values decide a shape")
    if name == "lift_fresh" and args[0].ndim:
        raise CaptureError("torch.tensor", "copies from memory of the CPU that is not pinned")
    if kwargs.get("generator") is not None:
        raise CaptureError(name, "draws from a generator that is not registered with the graph")


def _argument(func, index: int, args: tuple, kwargs: dict):
    return args[index] if index < len(args) else kwargs[func._schema.arguments[index].name]


def _memory_for(func, args: tuple, kwargs: dict):
    """Poisoned tensors of the shapes, strides and dtypes that func(*args, **kwargs) would return;
    computes nothing.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    device = kwargs.get("device") or (tensors[0].device if tensors else "cpu")
    shapes = {**kwargs, "device": "meta"} if "device" in kwargs or not tensors else kwargs
    args, shapes = tree_map_only(
        Tensor,
        lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"),
        (args, shapes),
    )
    return tree_map_only(
        Tensor,
        lambda x: poison_(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)),
        func(*args, **shapes),
    )


@contextlib.contextmanager
def _kernels_into(launches: list[Launch]) -> Iterator[None]:
    """Triton kernels launched inside are recorded as well."""

    def launcher(kernel, grid):
        def launch(*args, **kwargs):
            launches.append(
                Launch(
                    kernel.fn.__name__,
                    kernel.run,
                    args,
                    {**kwargs, "grid": grid, "warmup": False},
                    (),
                )
            )

        return launch

    with (
        mock.patch.object(triton.runtime.KernelInterface, "__getitem__", launcher)
        if has_triton()
        else contextlib.nullcontext()
    ):
        yield
