"""The process in which `compile_check` compiles: Triton without its interpreter, ptxas, the
disassembler.

    python -m lessons.toolbox.kernels.compile_worker RESULTS.jsonl  < jobs.json

Writes a line for each job as soon as it is done, because a compiler that crashes takes the process
with it.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lessons.toolbox.gpu import nvrtc


def compile_triton(spec: dict, chip: int, stderr: Path) -> dict:
    """The fields of a Report that the compiler fills, for a KernelSpec as a dict. A compiler's
    error is a field too.

    stderr: the file that receives what the compiler's native code writes, readable even after it
    crashed.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from lessons.toolbox.kernels.kernel_hash import resolve

    kernel = resolve(spec["kernel"])
    # under @triton.autotune or @triton.heuristics
    while not isinstance(kernel, triton.runtime.JITFunction):
        kernel = kernel.fn
    source = _source_of(kernel, spec)
    options = {"num_warps": spec["num_warps"], "num_stages": spec["num_stages"], **spec["options"]}
    log = io.StringIO()
    # TRITON_DUMP_PTXAS_LOG prints what ptxas said
    with contextlib.redirect_stdout(log), _captured_stderr(stderr):
        try:
            compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
        except Exception as error:
            return {"error": _one_line(error, stderr.read_text("utf-8", errors="replace"))}
    facts = measure(log.getvalue(), compiled.asm["cubin"])
    return facts | {
        "shared_bytes": compiled.metadata.shared,
        # the operation: tt.warp_specialize is what a loop has asked for
        "warp_specialized": "ttg.warp_specialize" in compiled.asm.get("ttgir", ""),
    }


def _source_of(kernel, spec: dict):
    """What triton.compile takes: types by argument, constexprs and alignment by position."""
    from triton.compiler import ASTSource

    names = kernel.arg_names
    values = {
        name: p.default
        for name, p in kernel.signature.parameters.items()
        if p.default is not p.empty
    }
    values |= {name: _constexpr(value) for name, value in spec["constexprs"].items()}
    values = {name: value for name, value in values.items() if name not in spec["signature"]}
    signature = {name: spec["signature"].get(name, "constexpr") for name in names}
    # a tuple of pointers came through JSON as a list
    signature = {name: tuple(t) if isinstance(t, list) else t for name, t in signature.items()}
    aligned = []
    for index, (name, type_) in enumerate(signature.items()):
        if isinstance(type_, tuple):
            aligned += [(index, place) for place in range(len(type_))]
        elif type_.startswith("*") or name in spec["divisible_by_16"]:
            aligned.append((index,))
    if getattr(kernel, "is_gluon", bool)():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    return ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in values.items()},
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )


def _constexpr(value: object) -> object:
    """What compile_check._as_json made of a constexpr, as it was."""
    import triton.language as tl

    from lessons.toolbox.kernels.kernel_hash import resolve

    if not isinstance(value, dict):
        return value
    return tl.dtype(value["dtype"]) if "dtype" in value else resolve(value["function"])


def nvrtc_version() -> str:
    """ "nvrtc 13.5", or "nvrtc" where it cannot be used."""
    if nvrtc.why_not_here():
        return "nvrtc"
    from cuda.bindings import nvrtc as bindings

    _, major, minor = bindings.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def compile_cuda(source: str, chip: int) -> dict:
    """The same for CUDA C++, through NVRTC."""
    if why := nvrtc.why_not_here():
        return {"error": f"not run: {why}"}
    try:
        cubin, log = nvrtc.cubin_of(source, "kernel.cu", chip)
    except nvrtc.CompileError as error:
        return {"error": _one_line(error, "")}
    # a file may hold several kernels
    shared = [int(n) for n in re.findall(r"(\d+) bytes smem", log)]
    return measure(log, cubin) | {"shared_bytes": max(shared, default=0)}


def measure(ptxas_log: str, cubin: bytes) -> dict:
    """Registers, stack, spills and warnings from `ptxas -v`; the census from the machine code."""

    def total(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, ptxas_log)))

    instructions = disassemble(cubin)
    names = [instruction.split()[0] for instruction in instructions]
    census = Counter(name.split(".")[0] for name in names)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", ptxas_log)]
    return {
        "registers": max(registers, default=None),
        "stack_bytes": total(r"(\d+) bytes stack frame"),
        "spill_bytes": total(r"(\d+) bytes spill stores") + total(r"(\d+) bytes spill loads"),
        "census": dict(sorted(census.items())),
        "loads_128bit": sum(name.startswith(("LDG", "LDGSTS")) and "128" in name for name in names),
        "exp_beside_wgmma": exp_beside_wgmma(instructions),
        "serialized_wgmma": "wgmma.mma_async instructions are serialized" in ptxas_log,
    }


def exp_beside_wgmma(instructions: list[str]) -> int:
    """How many exps stand in the code behind a wait that leaves a matrix product in flight
    (WARPGROUP.DEPBAR ..., 0x1) and before the wait for it (0x0).
    """
    count, in_flight = 0, False
    for instruction in instructions:
        if instruction.startswith("WARPGROUP.DEPBAR"):
            in_flight = not instruction.rstrip().endswith(" 0x0")
        count += in_flight and instruction.startswith("MUFU.EX2")
    return count


def disassemble(cubin: bytes) -> list[str]:
    """The machine instructions of a cubin with modifiers and operands, in order: ["S2R R0,
    SR_TID.X", "LDG.E.128 R4, desc[UR4][R2.64]", ...].
    """
    import triton

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "--print-code", str(file)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # "/*0a10*/ @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;": address, predicate, instruction
    return re.findall(
        r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*[^;\n]*)", listing, re.MULTILINE
    )


@contextlib.contextmanager
def _captured_stderr(path: Path) -> Iterator[None]:
    """Send what native code writes to file descriptor 2 into a file."""
    sys.stderr.flush()
    kept = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _one_line(error: BaseException, messages: str) -> str:
    """The cause of a compiler's failure: the first line that says "error", else the last line of
    the exception.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    text = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    said = [line.strip() for line in messages.splitlines() + text if re.search(r"\berror\b", line)]
    # no paths in a record
    line = re.sub(r"^\S*?:\d+:\d+: |^\S*\(\d+\): ", "", said[0] if said else text[-1])
    return line if len(line) <= 300 else line[:297] + "..."


def main(results: Path) -> None:
    with results.open("w", encoding="utf-8") as lines:
        for job in json.load(sys.stdin):
            facts = compile_triton(job["spec"], job["chip"], results.with_suffix(".stderr"))
            print(json.dumps(facts), file=lines, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
