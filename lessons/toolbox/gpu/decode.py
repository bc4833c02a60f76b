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
    tensor_cores,
    tma,
    warps,
    wgmma,
)
from lessons.toolbox.gpu.ptx import Address, Instruction, Kernel

FAMILIES = (
    arithmetic,
    atomics,
    bits,
    control,
    conversions,
    copies,
    mbarrier,
    memory,
    moves,
    tensor_cores,
    tma,
    warps,
    wgmma,
)
# Their first operand is no register that they fill.
WITHOUT_RESULT = ("st", "red", "bar", "barrier", "bra", "cp", "stmatrix", "fence", "mbarrier")


@dataclass(frozen=True)
class Step:
    """run(threads, mask) for what only computes; control(run, taking, leaving) for what decides
    where threads go on. reads: the registers that it needs.
    """

    run: Callable | None
    control: Callable | None
    predicate: str | None
    negated: bool
    reads: frozenset[str]


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
        if family in (control, mbarrier):
            return Step(None, built, instruction.predicate, instruction.negated, reads(instruction))
        return Step(built, None, instruction.predicate, instruction.negated, reads(instruction))
    raise UnknownInstruction(
        f"{kernel.name}, {instruction.line}: the machine does not know {instruction.text!r}"
    )


def reads(instruction: Instruction) -> frozenset[str]:
    """The registers that an instruction needs, its predicate among them."""
    first = 0 if instruction.op in WITHOUT_RESULT else 1
    found = set(names(instruction.operands[first:]))
    for operand in instruction.operands[:first]:
        if isinstance(operand, Address):
            found |= set(names(operand))
    if instruction.predicate:
        found.add(instruction.predicate)
    return frozenset(found)


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
