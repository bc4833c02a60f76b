"""What the compiler makes of the flags: the atomics and the accesses of a kernel, as its PTX has
them.

    accesses = call("lessons.l20_parallelism.lab.flags:accesses_of", "one_shot", chip=90)

The machine of toolbox.gpu keeps the order of all accesses anyway, so it cannot show that an order
is missing. The text can: which atomics release and acquire, and in which scope.
"""

import tempfile
from pathlib import Path

import torch

from lessons.l20_parallelism.processes import symmetric_kernels
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.symmetric import shared_on_cpu
from lessons.toolbox.gpu.arguments import WATCHERS
from lessons.toolbox.gpu.ptx import Instruction
from lessons.toolbox.proof.planted import with_bug

ORDERS, SCOPES = ("acquire", "release", "acq_rel", "relaxed"), ("sys", "gpu", "cta")


def accesses_of(way: str, bug: tuple[str, str] | None = None) -> list[str]:
    """Of a kernel for one rank, in the order of its text: "load", "store", "wait" for a barrier of
    a program's threads, and atomics such as "release.sys". way: one_shot or two_shot; bug: (old,
    new) in the source. To be called where kernels are compiled.
    """
    kernels = []
    with tempfile.TemporaryDirectory() as folder:
        module = with_bug(symmetric_kernels, Path(folder), *bug) if bug else symmetric_kernels
        WATCHERS.append(lambda done: kernels.append(done.kernel))
        getattr(module, way)(torch.ones(1024), shared_on_cpu(Group.alone(), 4096))
        WATCHERS.pop()
    found = [access_of(instruction) for instruction in kernels[0].instructions]
    return [access for access in found if access]


def access_of(instruction: Instruction) -> str | None:
    """One instruction in a word, or None for one that touches no other thread's memory."""
    if instruction.op == "bar":
        return "wait"
    if instruction.op == "atom":
        order = next((word for word in ORDERS if instruction.has(word)), "relaxed")
        scope = next((word for word in SCOPES if instruction.has(word)), "gpu")
        return f"{order}.{scope}"
    if instruction.op in ("ld", "st") and instruction.has("global"):
        kind = "load" if instruction.op == "ld" else "store"
        return f"{kind}.nc" if instruction.has("nc") else kind
    return None
