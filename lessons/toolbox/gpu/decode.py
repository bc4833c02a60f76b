"""From an instruction to what runs it: the family that knows its name builds a function once, and
the machine calls it each time that the instruction is reached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from lessons.toolbox.gpu.faults import UnknownInstruction
from lessons.toolbox.gpu.instructions import (
    arithmetic,
    atomics,
    bits,
    control,
    conversions,
    copies,
    mbarrier,
    memory,
    moves,
    tcgen05,
    tensor_cores,
    tensormap,
    tma,
    warps,
    wgmma,
)
from lessons.toolbox.gpu.ptx import Address, Instruction, Kernel

FAMILIES = (
    arithmetic,
    tensormap,  # before atomics, which knows the other fences
    atomics,
    bits,
    control,
    conversions,
    copies,
    mbarrier,
    memory,
    moves,
    tcgen05,
    tensor_cores,
    tma,
    warps,
    wgmma,
)
# Their first operand is no register that they fill.
WITHOUT_RESULT = (
    *("st", "red", "bar", "barrier", "bra", "cp", "stmatrix", "fence", "mbarrier"),
    "tensormap",
)


@dataclass(frozen=True)
class Step:
    """run(threads, mask) for what only computes; control(run, taking, leaving) for what decides
    where threads go on. reads, writes: the registers that it needs, that it fills at once. packs:
    it makes one wide register of narrow ones.
    """

    run: Callable | None
    control: Callable | None
    predicate: str | None
    negated: bool
    reads: frozenset[str]
    writes: frozenset[str]
    packs: bool = False


def decode(instruction: Instruction, kernel: Kernel) -> Step:
    """Raises UnknownInstruction, one line, for what no family knows."""
    for family in FAMILIES:
        build = family.KNOWN.get(instruction.op)
        if build is None:
            continue
        try:
            built = build(instruction, kernel)
        except (KeyError, ValueError, IndexError, StopIteration):
            continue  # the name is known, this form of it is not: another family may know it
        run, steers = (None, built) if family in (control, mbarrier) else (built, None)
        when = instruction.predicate, instruction.negated
        packs = instruction.op == "mov" and isinstance(instruction.operands[-1], tuple)
        return Step(run, steers, *when, reads(instruction), writes(instruction), packs)
    raise UnknownInstruction(
        f"{kernel.name}, {instruction.line}: the machine does not know {instruction.text!r}"
    )


def reads(instruction: Instruction) -> frozenset[str]:
    """The registers that an instruction needs, its predicate among them."""
    first = int(has_result(instruction))
    found = set(names(instruction.operands[first:]))
    for operand in instruction.operands[:first]:
        if isinstance(operand, Address):
            found |= set(names(operand))
    if instruction.predicate:
        found.add(instruction.predicate)
    return frozenset(found)


def writes(instruction: Instruction) -> frozenset[str]:
    """The registers that an instruction fills. A product of a warpgroup fills them later."""
    if instruction.op == "wgmma" or not has_result(instruction):
        return frozenset()
    return frozenset(names(instruction.operands[:1]))


def has_result(instruction: Instruction) -> bool:
    """Whether the first operand is what it fills. Of tcgen05 only a load from tensor memory
    does.
    """
    if instruction.op == "tcgen05":
        return instruction.has("ld")
    return instruction.op not in WITHOUT_RESULT


@cache
def names(operand) -> tuple[str, ...]:
    """The registers in an operand."""
    if isinstance(operand, tuple):
        return tuple(name for part in operand for name in names(part))
    text = operand.base if isinstance(operand, Address) else operand
    text = text.lstrip("!")
    return (text,) if not_a_number(text) else ()


def not_a_number(text: str) -> bool:
    return bool(text) and not (text[0].isdigit() or text[0] == "-")


def compiled_steps(kernel: Kernel) -> list[Step]:
    """What each instruction does, found once for a kernel. Raises UnknownInstruction."""
    if not hasattr(kernel, "steps"):
        kernel.steps = [decode(instruction, kernel) for instruction in kernel.instructions]
        kernel.undefined = undefined_registers(kernel)
        kernel.read = sorted(declared(kernel, frozenset().union(*(s.reads for s in kernel.steps))))
    return kernel.steps


def declared(kernel: Kernel, registers: frozenset[str]) -> set[str]:
    """Those of the names that the kernel declares as registers."""
    prefixes = kernel.widths.keys()
    return {name for name in registers if name.rstrip("0123456789") in prefixes or name in prefixes}


def undefined_registers(kernel: Kernel) -> list[str]:
    """Those that some step reads and no instruction writes."""
    read = frozenset().union(*(step.reads for step in kernel.steps))
    written = {name for i in kernel.instructions if i.operands for name in names(i.operands[0])}
    return sorted((read - written) & declared(kernel, read))
