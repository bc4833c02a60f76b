"""Bugs to plant in a kernel's compiled code. Each changes one instruction of its PTX, as a slip of
a compiler's author or of a kernel's would.

    bugs_of(kernel, places)    every bug of every kind that fits at one of these instructions
    with_bug(kernel, bug)      the kernel with this bug in it

An instruction that is left out becomes a hint that does nothing, so that no label moves.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace

from lessons.toolbox.gpu.decode import compiled_steps, decode, names, undefined_registers
from lessons.toolbox.gpu.ptx import Address, Instruction, Kernel
from lessons.toolbox.gpu.values import DTYPES

SECTOR = 32  # bytes
MEMORY = ("ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix")
ZEROS = ("0", "0f00000000")
GARBAGE = "0fCDCDCDCD"
Change = tuple[str, Instruction]  # what is wrong with it, in words; the instruction


@dataclass(frozen=True)
class Bug:
    """One instruction, at `place`, and what it is replaced by."""

    kind: str
    what: str
    place: int
    instruction: Instruction


def left_out(instruction: Instruction) -> Instruction:
    """A hint in its place."""
    return replace(
        instruction,
        op="nanosleep",
        modifiers=("u32",),
        operands=(),
        predicate=None,
        negated=False,
        text=f"left out: {instruction.text}",
    )


def with_operand(instruction: Instruction, index: int, operand) -> Instruction:
    """The same with another operand at `index`."""
    operands = list(instruction.operands)
    operands[index] = operand
    return replace(instruction, operands=tuple(operands))


# ---------------------------------------------------------------- order


def barriers(instruction: Instruction, kernel: Kernel) -> Iterator[Change]:
    """bar.sync, barrier.sync."""
    is_barrier = instruction.op in ("bar", "barrier") and instruction.has("sync")
    if is_barrier and not instruction.has("warp"):
        yield "the barrier is left out", left_out(instruction)


def copy_waits(instruction: Instruction, kernel: Kernel) -> Iterator[Change]:
    """The groups of cp.async and of the copy engine."""
    if instruction.op != "cp":
        return
    if instruction.has("commit_group"):
        yield "the group of copies is never closed", left_out(instruction)
    if instruction.has("wait_group", "wait_all"):
        if instruction.operands and not instruction.has("bulk"):
            left = int(instruction.operands[0]) + 1
            yield "one more group may be in flight", with_operand(instruction, 0, str(left))
        else:
            yield "copies are not waited for", left_out(instruction)


def mbarriers(instruction: Instruction, kernel: Kernel) -> Iterator[Change]:
    """Waits, their parity, arrivals, announced bytes."""
    if instruction.op != "mbarrier":
        return
    if instruction.has("try_wait"):
        target, _, parity = instruction.operands[:3]
        done = replace(instruction, op="mov", modifiers=("pred",), operands=(target, "1"))
        yield "the mbarrier is not waited for", done
        if parity.isdigit():
            yield "the other parity", with_operand(instruction, 2, str(int(parity) ^ 1))
        else:
            for wrong in "01":
                yield f"always parity {wrong}", with_operand(instruction, 2, wrong)
    elif instruction.has("expect_tx"):
        count = instruction.operands[-1]
        if count.isdigit():
            half = str(int(count) // 2)
            yield "half of the bytes are announced", with_operand(instruction, -1, half)
    elif instruction.has("arrive"):
        yield "the arrival is left out", left_out(instruction)


def fences(instruction: Instruction, kernel: Kernel) -> Iterator[Change]:
    """fence, membar, wgmma.fence."""
    is_fence = instruction.op in ("fence", "membar")
    if is_fence or (instruction.op == "wgmma" and instruction.has("fence")):
        yield "the fence is left out", left_out(instruction)


def product_waits(instruction: Instruction, kernel: Kernel) -> Iterator[Change]:
    """The groups of wgmma."""
    if instruction.op != "wgmma":
        return
    if instruction.has("commit_group"):
        yield "the group of products is never closed", left_out(instruction)
    if instruction.has("wait_group"):
        left = int(instruction.operands[0]) + 1
        yield "one more group may be in flight", with_operand(instruction, 0, str(left))


# ---------------------------------------------------------------- who, and where


def touches_memory(instruction: Instruction) -> bool:
    """Whether it moves data, by an address that the kernel has computed."""
    is_group = instruction.has("commit_group", "wait_group", "wait_all")
    return instruction.op in MEMORY and not is_group and not instruction.has("param")


def predicates(instruction: Instruction, kernel: Kernel) -> Iterator[Change]:
    """Of loads, stores, copies and atomics."""
    if instruction.predicate and touches_memory(instruction):
        opposite = replace(instruction, negated=not instruction.negated)
        yield "the predicate is inverted", opposite
        yield "the predicate is dropped", replace(instruction, predicate=None, negated=False)


def access_bytes(instruction: Instruction) -> int:
    """Bytes that one thread moves."""
    if instruction.op in ("ldmatrix", "stmatrix"):
        return 16
    if instruction.op == "cp":
        sizes = [o for o in instruction.operands if isinstance(o, str) and o.isdigit()]
        return int(sizes[0]) if sizes else 16
    vectors = [len(o) for o in instruction.operands if isinstance(o, tuple)]
    return DTYPES[instruction.type].itemsize * max([1, *vectors])


def addresses(instruction: Instruction, kernel: Kernel) -> Iterator[Change]:
    """One access further, one back, one sector further."""
    if not touches_memory(instruction):
        return
    step = access_bytes(instruction)
    for index, operand in enumerate(instruction.operands):
        if isinstance(operand, Address):
            for by, what in ((step, "an element further"), (-step, "an element back")):
                moved = Address(operand.base, operand.offset + by)
                yield what, with_operand(instruction, index, moved)
            if step != SECTOR:
                moved = Address(operand.base, operand.offset + SECTOR)
                yield "a sector further", with_operand(instruction, index, moved)


def rows(instruction: Instruction, kernel: Kernel) -> Iterator[Change]:
    """i · stride becomes (i + 1) · stride."""
    if instruction.op == "mul" and instruction.has("lo", "wide") and instruction.type[0] in "su":
        target, index, stride = instruction.operands
        if instruction.has("lo") or stride.isdigit():
            one_more = (target, index, stride, stride)
            yield "a row further", replace(instruction, op="mad", operands=one_more)
    elif instruction.op == "shl" and str(instruction.operands[-1]).isdigit():
        target, index, bits = instruction.operands
        if instruction.type == "b32" and int(bits) < 31:
            stride = str(1 << int(bits))
            one_more = (target, index, stride, stride)
            changed = replace(instruction, op="mad", modifiers=("lo", "s32"), operands=one_more)
            yield "a row further", changed


# ---------------------------------------------------------------- values


def shuffles(instruction: Instruction, kernel: Kernel) -> Iterator[Change]:
    """Another lane, half of the warp named."""
    if instruction.op == "shfl":
        lane = instruction.operands[2]
        if lane.isdigit():
            other = int(lane) // 2 if int(lane) > 1 else int(lane) + 1
            yield f"lane {other} for {lane}", with_operand(instruction, 2, str(other))
    if instruction.op in ("shfl", "vote", "redux") and instruction.has("sync"):
        yield "half of the warp is named", with_operand(instruction, -1, "65535")


NEIGHBOURS = {"lt": "le", "gt": "ge", "lo": "ls", "hi": "hs", "ltu": "leu", "gtu": "geu"}
NEIGHBOURS |= {other: one for one, other in NEIGHBOURS.items()}


def comparisons(instruction: Instruction, kernel: Kernel) -> Iterator[Change]:
    """lt for le, and so on."""
    if instruction.op == "setp" and instruction.modifiers[0] in NEIGHBOURS:
        first, *rest = instruction.modifiers
        other = NEIGHBOURS[first]
        yield f"{other} for {first}", replace(instruction, modifiers=(other, *rest))


def accumulators(instruction: Instruction, kernel: Kernel) -> Iterator[Change]:
    """A sum that does not begin at zero."""
    is_zero = instruction.op == "mov" and instruction.operands[1] in ZEROS
    if is_zero and instruction.type == "b32" and instruction.operands[0] in sums_of(kernel):
        yield "the sum is not set to zero", with_operand(instruction, 1, GARBAGE)
    is_product = instruction.op == "wgmma" and len(instruction.operands) > 3
    if is_product and instruction.operands[3] != "1":
        yield "the old sum is kept", with_operand(instruction, 3, "1")


def sums_of(kernel: Kernel) -> set[str]:
    """The registers that a product or an addition adds to, and those that are copied to them."""
    if hasattr(kernel, "sums"):
        return kernel.sums
    found: set[str] = set()
    for instruction in kernel.instructions:
        if instruction.op in ("mma", "fma"):
            found |= set(names(instruction.operands[3]))
        elif instruction.op == "wgmma" and len(instruction.operands) > 3:
            found |= set(names(instruction.operands[0]))
    for _ in range(3):  # copies of copies
        for instruction in kernel.instructions:
            if instruction.op == "mov" and set(names(instruction.operands[0])) & found:
                found |= set(names(instruction.operands[1]))
    kernel.sums = found
    return found


def register_order(instruction: Instruction, kernel: Kernel) -> Iterator[Change]:
    """Of a vector's load or store, the first two change places."""
    if not touches_memory(instruction):
        return
    for index, operand in enumerate(instruction.operands):
        if isinstance(operand, tuple) and len(operand) > 1 and isinstance(operand[0], str):
            swapped = (operand[1], operand[0], *operand[2:])
            if swapped != operand:
                yield "two registers change places", with_operand(instruction, index, swapped)


KINDS: dict[str, Callable[[Instruction, Kernel], Iterator[Change]]] = {
    "barrier": barriers,
    "wait for copies": copy_waits,
    "mbarrier": mbarriers,
    "fence": fences,
    "wait for products": product_waits,
    "predicate": predicates,
    "address": addresses,
    "row": rows,
    "shuffle": shuffles,
    "comparison": comparisons,
    "accumulator": accumulators,
    "register order": register_order,
}


def bugs_of(kernel: Kernel, places: Iterable[int]) -> list[Bug]:
    """Every bug that fits at one of the instructions."""
    return [
        Bug(kind, what, place, changed)
        for place in places
        for kind, changes in KINDS.items()
        for what, changed in changes(kernel.instructions[place], kernel)
    ]


def with_bug(kernel: Kernel, bug: Bug) -> Kernel:
    """A copy with the one instruction changed. Raises UnknownInstruction where the changed one has
    no meaning.
    """
    steps = compiled_steps(kernel)
    wrong = copy(kernel)
    wrong.instructions, wrong.steps = list(kernel.instructions), list(steps)
    wrong.instructions[bug.place] = bug.instruction
    wrong.steps[bug.place] = decode(bug.instruction, kernel)
    wrong.undefined = undefined_registers(wrong)
    return wrong
