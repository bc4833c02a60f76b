"""What a kernel is compiled as, and what the compiler said of it."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Chip:
    name: str
    shared_limit_bytes: int  # what one block may have


# Shared memory per block: CUDA C++ Programming Guide, table "Technical Specifications per Compute
# Capability".
CHIPS = {
    75: Chip("T4", 64 * 1024),
    80: Chip("A100", 163 * 1024),
    89: Chip("RTX 4090, L40S", 99 * 1024),
    90: Chip("H100, H200", 227 * 1024),
    100: Chip("B200", 227 * 1024),
}
MATRIX_INSTRUCTIONS = (
    "UTCHMMA",
    "UTCQMMA",
    "UTCIMMA",
    "UTCOMMA",
    "HGMMA",
    "QGMMA",
    "IGMMA",
    "HMMA",
    "QMMA",
    "IMMA",
    "DMMA",
)
TMA_INSTRUCTIONS = ("UTMALDG", "UTMASTG", "UBLKCP")


@dataclass(frozen=True)
class KernelSpec:
    """One kernel as it is launched: types of the arguments, values of the constexprs, launch
    options.
    """

    kernel: str  # "package.module:function"
    # argument -> Triton type, or a tuple of them; pointers are taken as 16-byte aligned
    signature: dict[str, str | tuple[str, ...]]
    constexprs: dict[str, object] = field(default_factory=dict)
    # where one kernel is listed twice; else the function's name
    name: str = ""
    num_warps: int = 4
    num_stages: int = 3
    # integer arguments known to be, as launches find out for themselves
    divisible_by_16: tuple[str, ...] = ()
    # further compiler options: maxnreg, num_ctas
    options: dict[str, object] = field(default_factory=dict)
    # the compute capabilities that the kernel is written for
    chips: tuple[int, ...] = tuple(CHIPS)

    @property
    def label(self) -> str:
        return self.name or self.kernel.rpartition(":")[2]


@dataclass(frozen=True)
class Job:
    """One source for one chip. source: a KernelSpec as a dict that JSON can hold, or CUDA C++."""

    name: str
    chip: int  # compute capability: 75, 80, 89, 90 or 100
    source: dict | str
    kernel_hash: str
    compiler: str  # "triton 3.7.1" or "nvrtc 13.5"

    @property
    def key(self) -> str:
        """24 hex digits of what decides the machine code, but for the compiler: the kernel's
        source, its arguments and the chip. Names and files may change.
        """
        arguments = {}
        if isinstance(self.source, dict):
            unimportant = ("kernel", "name", "chips")
            arguments = {k: v for k, v in self.source.items() if k not in unimportant}
        text = json.dumps([self.kernel_hash, arguments, self.chip], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def report(self, **facts) -> "Report":
        """A Report of this job with the given facts filled in."""
        return Report(self.name, self.chip, self.key, self.compiler, self.kernel_hash, **facts)


@dataclass(frozen=True)
class Report:
    """What the compiler said of one kernel on one chip. Everything is None, 0 or empty where
    `error` is set.
    """

    name: str
    chip: int
    key: str = ""  # of the job
    compiler: str = ""
    kernel_hash: str = ""
    error: str | None = None  # one line; "not run: ..." where there was no compiler
    registers: int | None = None  # per thread
    spill_bytes: int = 0  # per thread, stores and loads
    stack_bytes: int = 0  # per thread
    shared_bytes: int = 0  # per block
    # machine instruction -> how often it stands in the code
    census: dict[str, int] = field(default_factory=dict)
    loads_128bit: int = 0  # global loads of 16 bytes a thread, LDGSTS included
    # exps that stand where a WGMMA may be in flight: a softmax that overlaps with a product
    exp_beside_wgmma: int = 0
    serialized_wgmma: bool = False  # ptxas warning C7515 and its neighbours
    warp_specialized: bool = False

    @property
    def was_run(self) -> bool:
        """Whether there was a compiler to ask."""
        return not (self.error or "").startswith("not run")

    @property
    def shared_limit_bytes(self) -> int:
        return CHIPS[self.chip].shared_limit_bytes

    @property
    def fits(self) -> bool:
        """Compiled, without spills, within the chip's shared memory, WGMMA not serialised."""
        return (
            self.error is None
            and not self.spill_bytes
            and not self.serialized_wgmma
            and self.shared_bytes <= self.shared_limit_bytes
        )

    @property
    def matrix_instruction(self) -> str | None:
        """The tensor-core instruction that the kernel uses, or None."""
        return next((name for name in MATRIX_INSTRUCTIONS if name in self.census), None)

    @property
    def tma_instructions(self) -> int:
        counts = self.census.items()
        return sum(count for name, count in counts if name.startswith(TMA_INSTRUCTIONS))

    @property
    def local_memory_instructions(self) -> int:
        return self.census.get("LDL", 0) + self.census.get("STL", 0)

    def to_json(self) -> str:
        """One line, without the fields that say nothing."""
        return json.dumps({k: v for k, v in dataclasses.asdict(self).items() if v})


def from_json(line: str) -> Report:
    """The report that `to_json` wrote."""
    return Report(**json.loads(line))
