"""An instruction of PTX in plain words, for a reader who has never seen assembly.

    in_words(instruction)    "%rd9 = %rd6 or %rd8, bit by bit: a sum, where no bit is on in both."

Only the instructions that a simple kernel is made of have words. Of any other one they name the
manual.

Source: NVIDIA, PTX ISA 9.0, chapter 9.7 (instruction set).
"""

from lessons.toolbox.gpu.ptx import Address, Instruction

COMPARED = {
    "lt": "is below",
    "le": "is at most",
    "gt": "is above",
    "ge": "is at least",
    "eq": "equals",
    "ne": "differs from",
}
SPECIAL = {
    "%tid": "the number of this thread in its program. It differs from lane to lane",
    "%ctaid": "the number of this program: what tl.program_id gives",
    "%nctaid": "the number of programs of the grid",
    "%ntid": "the number of threads of a program",
    "%laneid": "the number of this lane in its warp",
}
SIGNS = {"add": "+", "sub": "−", "mul": "·", "div": "/", "min": "min", "max": "max"}


def in_words(instruction: Instruction) -> str:
    """One or two sentences."""
    explain = WORDS.get(instruction.op)
    said = explain(instruction) if explain else None
    return said or f"{instruction.op}: NVIDIA's PTX manual, chapter 9.7, says what it does."


def bits(instruction: Instruction) -> int:
    return int("".join(letter for letter in instruction.type if letter.isdigit()) or 1)


def a_move(instruction: Instruction) -> str:
    target, source = instruction.operands[:2]
    if isinstance(target, tuple) or isinstance(source, tuple):
        return "Puts the parts of a register together, or takes it apart. No bit changes."
    special = SPECIAL.get(source.split(".")[0])
    if special:
        return f"{target} = {special}."
    if source.startswith("%"):
        return f"{target} = {source}, a copy."
    is_zero = not source.startswith("0f") and int(source, 0) == 0
    return f"{target} = {0 if is_zero else source}, a constant, in every lane."


def a_calculation(instruction: Instruction) -> str | None:
    target, a, b, *rest = instruction.operands
    sign = SIGNS[instruction.op]
    if rest or instruction.has("hi"):
        return None
    if sign in ("min", "max"):
        return f"{target} = the {'smaller' if sign == 'min' else 'larger'} one of {a} and {b}."
    wide = ", with a result of twice as many bits" if instruction.has("wide") else ""
    return f"{target} = {a} {sign} {b}{wide}."


def a_product_and_sum(instruction: Instruction) -> str:
    target, a, b, c = instruction.operands
    return f"{target} = {a} · {b} + {c}, in one instruction."


def a_shift(instruction: Instruction) -> str:
    target, a, by = instruction.operands
    if not by.isdigit():
        return f"{target} = the bits of {a}, moved by {by} places."
    if instruction.op == "shl":
        return f"{target} = {a} · {2 ** int(by)}: the bits of {a}, moved {by} to the left."
    return f"{target} = {a} / {2 ** int(by)}, rounded down: its bits, moved {by} to the right."


def bit_by_bit(instruction: Instruction) -> str:
    target, a, b = instruction.operands
    word = instruction.op
    if instruction.type == "pred":
        when = {"and": "both are", "or": "one of them is", "xor": "exactly one of them is"}[word]
        return f"{target} is on where of {a} and {b} {when} on."
    if word == "or":
        return f"{target} = {a} or {b}, bit by bit: a sum, where no bit is on in both."
    if word == "and" and b.isdigit() and (int(b) & (int(b) + 1)) == 0:
        return f"{target} = what is left of {a} after a division by {int(b) + 1}: its lowest bits."
    return f"{target} = {a} {word} {b}, bit by bit."


def a_comparison(instruction: Instruction) -> str | None:
    how = COMPARED.get(instruction.modifiers[0])
    if how is None or len(instruction.operands) > 3:
        return None
    target, a, b = instruction.operands
    return f"{target} is on in each lane where {a} {how} {b}. Such a register is a mask."


def a_choice(instruction: Instruction) -> str:
    target, a, b, condition = instruction.operands
    return f"{target} = {a} where {condition} is on, else {b}."


def a_conversion(instruction: Instruction) -> str:
    target, source = instruction.operands[:2]
    to, of = instruction.modifiers[-2:]
    if to[0] in "us" and of[0] in "us" and int(to[1:]) > int(of[1:]):
        return f"{target} = {source} with {to[1:]} bits. The number stays the same."
    return f"{target} = {source}, turned from {of} into {to}."


def an_address(instruction: Instruction) -> str:
    target, source = instruction.operands[:2]
    return f"{target} = the address {source}, said as one of global memory. No bit changes."


def asking(instruction: Instruction) -> tuple[str, str]:
    """(who takes part, what the others do). Of shared memory the words are many already."""
    if not instruction.predicate:
        return "Every lane", ""
    state = "off" if instruction.negated else "on"
    others = "" if space(instruction) else " The others do nothing."
    return f"Each lane where {instruction.predicate} is {state}", others


def size_of(operand, instruction: Instruction) -> int:
    """Bytes of a lane."""
    return (len(operand) if isinstance(operand, tuple) else 1) * bits(instruction) // 8


def at(address: Address) -> str:
    return f"{address.base} + {address.offset}" if address.offset else address.base


def space(instruction: Instruction) -> str:
    return " of shared memory" if instruction.has("shared", "shared_cta") else ""


def a_load(instruction: Instruction) -> str:
    target, source = instruction.operands
    if instruction.has("param"):
        return f"{name_of(target)} = an argument of the launch, the same in every lane."
    who, others = asking(instruction)
    size = size_of(target, instruction)
    return (
        f"{who} loads {size} bytes from its own address {at(source)}{space(instruction)} into "
        f"{name_of(target)}.{others}"
    )


def a_store(instruction: Instruction) -> str:
    target, source = instruction.operands
    who, others = asking(instruction)
    size = size_of(source, instruction)
    return (
        f"{who} stores {size} bytes of {name_of(source)} at its own address "
        f"{at(target)}{space(instruction)}.{others}"
    )


def name_of(operand) -> str:
    """%r1, or %r1 to %r4."""
    if not isinstance(operand, tuple):
        return operand
    return operand[0] if len(operand) == 1 else f"{operand[0]} to {operand[-1]}"


def a_branch(instruction: Instruction) -> str:
    who, _ = asking(instruction)
    return f"{who} goes on at {instruction.operands[0]}, the others at the next line."


WORDS = {
    "mov": a_move,
    "ld": a_load,
    "st": a_store,
    **dict.fromkeys(SIGNS, a_calculation),
    "mad": a_product_and_sum,
    "fma": a_product_and_sum,
    "shl": a_shift,
    "shr": a_shift,
    **dict.fromkeys(("and", "or", "xor"), bit_by_bit),
    "setp": a_comparison,
    "selp": a_choice,
    "cvt": a_conversion,
    "cvta": an_address,
    "bra": a_branch,
    "bar": lambda instruction: "A barrier: each warp waits here for all warps of the program.",
    "ret": lambda instruction: "The threads have ended.",
}
