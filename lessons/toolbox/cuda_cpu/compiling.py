"""A .cu file made into a library of this machine by its C++ compiler, once; the library's symbols.

The library holds the kernel and the emulator (block.cpp, memory.cpp, counts.cpp). Both are kept in
build/cuda_cpu/ under a hash of the source, the emulator, the compiler and its flags.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[2] / "build" / "cuda_cpu"
EMULATOR = ("block.cpp", "memory.cpp", "counts.cpp")
COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-U_FORTIFY_SOURCE", f"-I{HERE}"]
KERNEL = [
    "-O1",  # enough to keep variables in registers, and no load or store is put together yet
    "-g1",  # lines
    "-fno-strict-aliasing",  # as nvcc: reinterpret_cast<float4*>
    "-ffp-contract=off",  # each operation rounded by itself
]
# `extern __shared__ float tile[];`, whose size the launch gives
DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:(?:alignas|__align__)\s*\([^)]*\)\s*)?"
    r"([\w:<>, ]+?)\s+(\w+)\s*\[\s*\]\s*;"
)


class CompileError(RuntimeError):
    """The host's compiler refuses the .cu file; the first error, with its line."""


@cache
def compiler() -> str | None:
    """The path of this machine's C++ compiler, or None."""
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def why_not_here() -> str:
    """What keeps the emulator from running here, in one line; "" if nothing does."""
    if compiler() is None:
        return "no C++ compiler is installed (g++ or clang++), so no CUDA C++ runs on this CPU"
    missing = [tool for tool in ("nm", "addr2line") if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed (binutils)" if missing else ""


@cache
def flags() -> tuple[str, list[str]]:
    """(the compiler's version, the flags for a kernel).

    -fsanitize=thread calls a function of memory.cpp before each load and store; the others call
    one for an index outside its array, for a misaligned pointer and for a division by 0.
    """
    command = [compiler(), "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bounds = "array-bounds" if "clang" in version else "bounds"
    watched = [f"-fsanitize=thread,{bounds},alignment,integer-divide-by-zero"]
    return version, [*COMMON, *KERNEL, *watched]


def library(source: str, file_name: str, kernel: str) -> Path:
    """The library of one `extern "C" __global__` function of a .cu file. Raises CompileError."""
    source = DYNAMIC_SHARED.sub(r"CUDA_CPU_DYNAMIC_SHARED(\1, \2);", source)
    text = f"{source}\nCUDA_CPU_KERNEL({kernel})\n"
    version, options = flags()
    sources = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])
    emulator = [version, *options, *(file.read_text(encoding="utf-8") for file in sources)]
    folder = BUILD / _hash(*emulator)
    target = folder / f"{_hash(text)}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # made elsewhere and then moved, because several processes may compile the same
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # under its own name, because messages and lines name it
            (Path(scratch) / file_name).write_text(text, encoding="utf-8")
            given = ["-include", str(HERE / "cuda.h"), "-x", "c++", file_name]
            _compile([*options, *given, "-c", "-o", "kernel.o"], scratch)
            parts = ["kernel.o", *_emulator(folder)]
            _compile(["-shared", "-Wl,--no-undefined", *parts, "-o", "kernel.so"], scratch)
            for made in ("kernel.o", "kernel.so"):  # the library last: it says that both are there
                os.replace(Path(scratch) / made, target.with_suffix(Path(made).suffix))
    return target


def _emulator(folder: Path) -> list[str]:
    """The emulator's object files, without the kernel's flags: the watcher is not watched
    itself.
    """
    for name in EMULATOR:
        if not (target := folder / f"{name}.o").exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                _compile([*COMMON, "-O2", "-c", str(HERE / name), "-o", "part.o"], scratch)
                os.replace(Path(scratch) / "part.o", target)
    return [str(folder / f"{name}.o") for name in EMULATOR]


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _compile(arguments: list[str], folder: str) -> None:
    command = [compiler(), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = re.search(r"\S+: (fatal )?error: .*|undefined reference to .*", done.stderr)
        raise CompileError(said[0] if said else done.stderr.strip() or "no message")


# ---------------------------------------------------------------- symbols and lines


@dataclass(frozen=True)
class Variable:
    """A static variable of the .cu file. offset: in the library."""

    name: str
    offset: int
    size_bytes: int
    kind: str  # "shared", "global" or "constant"


def symbols(path: Path) -> tuple[list[Variable], dict[str, int]]:
    """The kernel's variables, and the offset of each function that the library exports."""
    of_kernel = {line[-1] for line in _names(path.with_suffix(".o"))}
    variables, functions = [], {}
    for line in _names(path):
        match line:
            case [offset, _, "T", name]:
                functions[name] = int(offset, 16)
            # data: b, d; weak in a template: u, v; constant: r
            case [offset, size, letter, name] if name in of_kernel and letter in "bBdDuUvVrR":
                if found := _variable(name, int(offset, 16), int(size, 16), letter):
                    variables.append(found)
    return variables, functions


def _names(path: Path) -> list[list[str]]:
    """[offset, size, letter, name] of each symbol, or less where nm knows less."""
    command = ["nm", "--print-size", "--defined-only", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split() for line in listing.splitlines()]


def _variable(mangled: str, offset: int, size_bytes: int, letter: str) -> Variable | None:
    """None for what cuda.h and the compiler put beside the kernel."""
    if "cuda_cpu" in mangled or mangled.startswith(("_ZT", "_ZGV", "DW.", ".L")):
        return None
    # "_ZZ12block_mergeE7of_warp": the variable of_warp inside a function
    local = re.fullmatch(r"_ZZ.*E(\d+)(\w+)", mangled)
    name = local[2][: int(local[1])] if local else re.sub(r"^_ZL?\d+", "", mangled)
    kind = "constant" if letter in "rR" else "shared" if local else "global"
    return Variable(name, offset, size_bytes, kind)


@cache
def line_of(path: Path, place: int, file_name: str) -> int:
    """The line of the .cu file that an instruction at an offset comes from; 0 if none is known."""
    if place >> 31:  # Place of emulator.h: the line itself
        return place & 0x7FFFFFFF
    # --inlines, because an instruction of a header may be there for a line of the kernel
    command = ["addr2line", "--inlines", "--exe", str(path), hex(place)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"(?:^|/){re.escape(file_name)}:(\d+)", lines, re.MULTILINE)
    return int(found[1]) if found else 0
