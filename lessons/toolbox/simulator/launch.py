"""Gluon kernels for Hopper on a CPU: `simulate(kernel)[grid](*arguments)` in the place of
`kernel[grid](*arguments)`.

The kernel's own Python code runs, unchanged, with stand-ins for `gl`, `mbarrier`, `tma`,
`warpgroup_mma`, `warpgroup_mma_wait` and `fence_async_shared`. It computes the numbers, and it
finds what the interpreter cannot: copies and products that are used before they have ended, buffers
that are filled too early, wrong phases, wrong byte counts, deadlocks. It says nothing of speed, and
nothing of what the compiler checks: layouts, registers, how much shared memory there is.

    with schedule(seed=3, ends="latest"):
        simulate(kernel)[grid](...)

repeats one order of events. Without it every launch draws one (Python's `random`), and a Hazard
names it. Programs run one after another, in a drawn order.
"""

import contextlib
import inspect
import random
import threading
import types
from collections.abc import Iterator

import torch

from lessons.toolbox.simulator import language, mbarrier, tma
from lessons.toolbox.simulator.machine import ENDS, Hazard, Program, run_program
from lessons.toolbox.simulator.memory import fence_async_shared
from lessons.toolbox.simulator.wgmma import warpgroup_mma, warpgroup_mma_wait

STAND_INS = {
    "gl": language,
    "mbarrier": mbarrier,
    "tma": tma,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
    "fence_async_shared": fence_async_shared,
    "range": language.range_,
}
_chosen: list[tuple[int, str]] = []  # what `schedule` asks for
_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def schedule(seed: int, ends: str = "random") -> Iterator[None]:
    """Every launch inside has this order of events. ends: "random" or "latest"."""
    if ends not in ENDS:
        raise ValueError(f"ends: got {ends!r}; accepted: {', '.join(ENDS)}")
    _chosen.append((seed, ends))
    try:
        yield
    finally:
        _chosen.pop()


def simulate(kernel):
    """A @gluon.jit kernel as something to launch on tensors of a CPU."""
    return Simulated(kernel)


class Simulated:
    """A kernel that waits for its grid and its arguments."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        grid = (*grid, 1, 1)[:3]
        return lambda *args, **options: self.launch(grid, args, options)

    def launch(self, grid: tuple[int, int, int], args: tuple, options: dict) -> None:
        """Raises Hazard, whatever the kernel's own code raises, TypeError for wrong arguments."""
        seed, ends = _chosen[-1] if _chosen else (random.getrandbits(32), random.choice(ENDS))
        generator = random.Random(seed)
        function, given = translated(self.kernel.fn), arguments(self.kernel.fn, args, options)
        indices = [
            (x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])
        ]
        generator.shuffle(indices)
        with _one_at_a_time, _one_thread_each():
            for index in indices:
                program = Program(index, grid, generator, ends)
                try:
                    run_program(program, lambda: function(**given))
                except Hazard as hazard:
                    where = f"program {index}, schedule(seed={seed}, ends={ends!r})"
                    raise Hazard(f"{hazard}. In {where}") from hazard


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Torch's own threads cost more than they give on operations as small as a tile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def arguments(function, args: tuple, options: dict) -> dict:
    """The arguments as a kernel sees them: pointers, descriptors, 32-bit numbers; constexprs as
    they are. Options of the launch that are no parameters are left out.
    """
    signature = inspect.signature(function)
    options = {name: value for name, value in options.items() if name in signature.parameters}
    bound = signature.bind(*args, **options)
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        if "constexpr" not in str(signature.parameters[name].annotation):
            bound.arguments[name] = _as_seen(value)
    return dict(bound.arguments)


def _as_seen(value):
    if isinstance(value, torch.Tensor):
        return language.pointer_to(value)
    if hasattr(value, "block_shape"):  # a TensorDescriptor of the host's
        return tma.Descriptor(value)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32).item()
    return language.Int(value) if isinstance(value, int) else value


def translated(function: types.FunctionType, worlds: dict | None = None) -> types.FunctionType:
    """A kernel's function with stand-ins for Gluon in its globals, and the jit functions that it
    calls likewise. worlds: the globals made so far, by module.
    """
    worlds = {} if worlds is None else worlds
    source = function.__globals__
    if id(source) not in worlds:
        world = worlds[id(source)] = source | STAND_INS
        for name, value in source.items():
            inner = getattr(value, "fn", None)
            if name not in STAND_INS and isinstance(inner, types.FunctionType):
                world[name] = translated(inner, worlds)
    world = worlds[id(source)]
    return types.FunctionType(
        function.__code__, world, function.__name__, function.__defaults__, function.__closure__
    )
