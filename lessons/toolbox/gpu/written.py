"""Which of its parameters a kernel may write to, told from its code.

The address of a store is followed back through the registers that it was made from, to the
parameters at their beginning. Reads of all other buffers need no watching, because nothing in the
launch can change them.
"""

from lessons.toolbox.gpu.decode import names
from lessons.toolbox.gpu.ptx import Address, Instruction, Kernel

WRITES = ("st", "atom", "red")


def written_parameters(kernel: Kernel) -> set[str]:
    """The names of parameters whose value may be a part of a written address. A pointer that was
    itself loaded from memory may be any: then all are named.
    """
    if hasattr(kernel, "written"):
        return kernel.written
    made_of: dict[str, list[Instruction]] = {}
    for instruction in kernel.instructions:
        for target in names(instruction.operands[0]) if instruction.operands else []:
            made_of.setdefault(target, []).append(instruction)
    waiting = [base for i in kernel.instructions if (base := written_to(i))]
    seen: set[str] = set()
    everything = {name for name, _, _ in kernel.parameters}
    found = {base for base in waiting if base in everything}
    while waiting:
        register = waiting.pop()
        if register in seen:
            continue
        seen.add(register)
        for instruction in made_of.get(register, []):
            if instruction.op == "ld" and instruction.has("param"):
                base = instruction.operands[1].base
                (found.add if base in everything else waiting.append)(base)
            elif instruction.op == "ld" and kernel.width(register) == 64:
                found = everything
            elif instruction.op != "ld":
                sources = instruction.operands[1:]
                waiting += [name for operand in sources for name in names(operand)]
                found |= everything & {o for o in sources if isinstance(o, str)}
    kernel.written = found
    return found


def written_to(instruction: Instruction) -> str:
    """The register with the address that an instruction writes to in global memory, else ""."""
    if instruction.op == "cp" and instruction.has("bulk") and "global" in instruction.modifiers:
        map_, *_ = instruction.operands
        is_store = isinstance(map_, tuple)
        return map_[0].base if is_store else ""
    if instruction.op == "tensormap" and instruction.has("global_address"):
        return instruction.operands[-1]  # of a tensor that the copy engine may write
    if instruction.op == "tensormap" and instruction.has("cp_fenceproxy"):
        return instruction.operands[0].base
    if instruction.op not in WRITES or instruction.has("shared", "shared_cta", "local"):
        return ""
    target = next(operand for operand in instruction.operands if isinstance(operand, Address))
    return target.base
