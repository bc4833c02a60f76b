"""PTX as a list of instructions: what the compilers hand to the driver, parsed.

PTX is the assembly language of a GPU that has as many registers as one likes. Triton and NVRTC emit
it, and the driver's assembler turns it into machine code. A line of it:

    @%p3 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd7 + 512 ];

is a predicate (only threads whose %p3 holds take part), an operation `ld` with modifiers `global`,
`v4`, `b32`, and operands: the registers to fill, and an address. `.loc` says which line of the
source an instruction belongs to.

Source: NVIDIA, PTX ISA 9.0, chapters 4 (syntax) and 5 (state spaces, types).
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lessons.toolbox.gpu.faults import UnknownInstruction

PARAMETERS = 1 << 62  # where a kernel's parameters lie, 1 KiB apart, out of every buffer's reach
WIDTH = re.compile(r"(?:pred|[a-z]+(\d+))$")  # "b32", "f16", "pred"


@dataclass(frozen=True)
class Address:
    """An operand [base + offset]. base: a register, a variable, or "" for a plain number."""

    base: str
    offset: int = 0


@dataclass(frozen=True)
class Line:
    """A line of the source that was compiled. It is false where the compiler named none."""

    file: str = ""
    number: int = 0

    def __bool__(self) -> bool:
        return bool(self.number)

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}" if self else "no line"


@dataclass(frozen=True)
class Instruction:
    """One instruction. operands: names, numbers, Addresses, or tuples of them for {a, b}."""

    op: str
    modifiers: tuple[str, ...]
    operands: tuple
    predicate: str | None
    negated: bool  # @!%p
    line: Line
    text: str
    source: Line = Line()  # the same, or where the user's own code called a function of Triton's
    location: str = ""  # what the compiler says of its place: line, column, who called the function

    @property
    def type(self) -> str:
        """The type that the operation computes in: its last modifier."""
        return self.modifiers[-1] if self.modifiers else ""

    def has(self, *modifiers: str) -> bool:
        return any(modifier in self.modifiers for modifier in modifiers)


@dataclass
class Kernel:
    """One entry of a PTX file."""

    name: str
    parameters: list[tuple[str, str, int]] = field(default_factory=list)  # name, type, bytes
    threads: int = 0  # of a program, where the code says it (.reqntid)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # -> index of the instruction after it
    tables: dict[str, list[str]] = field(default_factory=dict)  # of brx.idx: labels to choose from
    widths: dict[str, int] = field(default_factory=dict)  # register or its prefix -> bits, 1: pred
    shared: dict[str, int] = field(default_factory=dict)  # variable -> offset in shared memory
    shared_bytes: int = 0  # of the variables above
    local: dict[str, int] = field(default_factory=dict)  # variable -> offset in a thread's memory
    local_bytes: int = 0
    text: str = ""  # of the whole file

    def width(self, register: str) -> int:
        """Bits of a register, 1 for a predicate."""
        found = self.widths.get(register) or self.widths.get(register.rstrip("0123456789"))
        if found is None:
            raise UnknownInstruction(f"{self.name}: register {register} is not declared")
        return found

    def has_parameter(self, name: str) -> bool:
        return any(name == known for known, _, _ in self.parameters)

    def address_of(self, parameter: str) -> int:
        """Where a parameter lies."""
        return PARAMETERS + 1024 * [name for name, _, _ in self.parameters].index(parameter)

    def parameter_at(self, address: int) -> tuple[str, int]:
        """(its name, which of its bytes) of an address."""
        index, offset = divmod(address - PARAMETERS, 1024)
        return self.parameters[index][0], offset

    @cached_property
    def lines(self) -> list[Line]:
        """The lines of the source that have instructions, in order."""
        found = {instruction.line for instruction in self.instructions if instruction.line}
        return sorted(found, key=lambda line: (line.file, line.number))


def parse(text: str) -> dict[str, Kernel]:
    """{name: Kernel} of a PTX file. Raises UnknownInstruction for what it cannot read."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    files = {
        int(number): name
        for number, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE)
    }
    outside = re.sub(r"\{.*?^\}", "", text, flags=re.DOTALL | re.MULTILINE)
    kernels = {}
    for entry in re.finditer(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{;]*)\{", text, re.DOTALL):
        kernel = Kernel(entry[1], parameters_of(entry[2]), text=text)
        if asked := re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3]):
            kernel.threads = int(asked[1])
        declare(outside, kernel)
        Body(kernel, files).read(text[entry.end() :])
        kernels[kernel.name] = kernel
    return kernels


def parameters_of(text: str) -> list[tuple[str, str, int]]:
    """(name, type, bytes) of a kernel's parameters."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        type_, name, count = re.fullmatch(
            r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+.*?([\w$]+)(?:\[(\d+)\])?", part, re.DOTALL
        ).groups()
        found.append((name, type_, int(count or 1) * (int(WIDTH.match(type_)[1]) // 8)))
    return found


def declare(text: str, kernel: Kernel) -> None:
    """Give the variables of shared and of a thread's own memory their places."""
    pattern = r"\.(shared|local)\s+(?:\.align\s+(\d+)\s+)?\.[a-z]+(\d+)\s+([\w$]+)((?:\[\d*\])*)"
    for space, align, bits, name, counts in re.findall(pattern, text):
        size = int(bits) // 8
        for count in re.findall(r"\[(\d*)\]", counts):
            size *= int(count or 0)  # extern: as much as the launch gives
        places = getattr(kernel, space)
        if name in places:
            continue
        used = getattr(kernel, f"{space}_bytes")
        start = -(-used // int(align or 1)) * int(align or 1)
        places[name] = start
        setattr(kernel, f"{space}_bytes", start + size)


class Body:
    """The reader of a kernel's braces. `{ }` inside may declare registers and labels of its own:
    they get the number of their scope behind their name.
    """

    def __init__(self, kernel: Kernel, files: dict[int, str]):
        self.kernel, self.files = kernel, files
        self.line, self.source, self.label, self.location = Line(), Line(), "", ""
        self.scopes: list[dict[str, str]] = [{}]  # innermost last: name -> unique name
        self.opened = 0

    def read(self, text: str) -> None:
        """Read up to the brace that closes the kernel."""
        at = 0
        while True:
            at = re.compile(r"(?:\s|//[^\n]*)*").match(text, at).end()
            if text[at] == "}":
                self.scopes.pop()
                at += 1
                if not self.scopes:
                    return
            elif text[at] == "{":
                self.opened += 1
                self.scopes.append({})
                self.name_inner(text[at : text.index("}", at)])
                at += 1
            elif directive := re.compile(r"\.(loc|section|file)\b([^\n]*)").match(text, at):
                if directive[1] == "loc":
                    self.locate(directive[2])
                at = directive.end()
            elif label := re.compile(r"([\w$]+):(?!:)").match(text, at):
                self.label = self.renamed(label[1])
                self.kernel.labels[self.label] = len(self.kernel.instructions)
                at = label.end()
            else:
                end = text.index(";", at)
                self.statement(" ".join(re.sub(r"//[^\n]*", "", text[at:end]).split()))
                at = end + 1

    def name_inner(self, text: str) -> None:
        """Note the registers and labels that a scope declares. Scopes are short, of inline code."""
        names = re.findall(r"(?:^|[;{\s])([A-Za-z_$][\w$]*):", text)
        for declared in re.findall(r"\.reg\s+\.\w+\s+([^;]*);", text):
            names += [name.strip() for name in declared.split(",") if "<" not in name]
        self.scopes[-1] |= {name: f"{name}.{self.opened}" for name in names}

    def renamed(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def locate(self, text: str) -> None:
        """`.loc 1 46 26, function_name ..., inlined_at 1 90 4`: the line itself, not its caller.

        A comment behind it may tell the callers: `// standard.py:191:40 @[ mine.py:140:37 ]`.
        """
        self.location = text
        file, number = text.split()[:2]
        self.line = Line(self.files.get(int(file), ""), int(number))
        chain = re.findall(r"([^\s:\[\]]+):(\d+):\d+", text.partition("//")[2])
        by_name = {Path(path).name: path for path in self.files.values()}
        lines = [self.line, *(Line(by_name.get(name, ""), int(n)) for name, n in chain[1:])]
        own = [line for line in lines if line and line.file and "/triton/" not in line.file]
        if self.line:
            self.source = own[0] if own else self.line

    def statement(self, text: str) -> None:
        if text.startswith(".reg"):
            type_, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text).groups()
            bits = 1 if type_ == "pred" else int(WIDTH.match(type_)[1])
            for name in names.split(","):
                name = name.strip()
                self.kernel.widths[self.renamed(re.sub(r"<\d+>$", "", name))] = bits
        elif text.startswith((".shared", ".local")):
            declare(text, self.kernel)
        elif text.startswith(".branchtargets"):
            names = text.removeprefix(".branchtargets").split(",")
            self.kernel.tables[self.label] = [self.renamed(name.strip()) for name in names]
        elif text and not text.startswith("."):  # .pragma says nothing to us
            self.kernel.instructions.append(self.instruction(text))

    def instruction(self, text: str) -> Instruction:
        match = re.fullmatch(r"(?:@(!?)([%\w$]+)\s+)?([\w.:]+)\s*(.*)", text)
        if match is None:
            raise UnknownInstruction(f"{self.kernel.name}: cannot read {text!r}")
        negated, predicate, name, rest = match.groups()
        op, *modifiers = name.replace("::", "_").split(".")
        operands = tuple(map(self.operand, split_operands(rest)))
        predicate = self.renamed(predicate) if predicate else None
        place = self.line, text, self.source, self.location
        return Instruction(op, tuple(modifiers), operands, predicate, bool(negated), *place)

    def operand(self, text: str):
        """A name, a number's text, an Address, or a tuple."""
        text = text.strip()
        if text.startswith("{"):
            return tuple(map(self.operand, split_operands(text[1:-1])))
        if not text.startswith("["):
            return self.renamed(text)
        if "," in text:  # a tensor map and its coordinates: [%rd1, {%r1, %r2}]
            return tuple(
                self.operand(part if part.startswith("{") else f"[{part}]")
                for part in split_operands(text[1:-1])
            )
        base, _, offset = re.sub(r"\s", "", text[1:-1]).partition("+")
        if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", base):
            return Address("", int(base, 0))
        return Address(self.renamed(base), int(offset or "0", 0))


def split_operands(text: str) -> list[str]:
    """Split at the commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
