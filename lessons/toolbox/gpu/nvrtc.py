"""NVRTC, NVIDIA's compiler of CUDA C++ as a library: it needs no GPU, no driver and no nvcc."""

from functools import cache
from pathlib import Path


class CompileError(RuntimeError):
    """NVRTC refuses a file, or is not there."""


@cache
def why_not_here() -> str:
    """Why this machine cannot compile CUDA C++, in one line; "" if it can."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return (
            "needs NVRTC, which Linux and Windows have: pip install cuda-bindings "
            f"nvidia-cuda-nvrtc ({first_line(error)})"
        )
    return ""


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def architecture(capability: int) -> str:
    """90 -> "sm_90a": with the instructions of that generation alone, where there are any."""
    return f"sm_{capability}{'a' if capability >= 90 else ''}"


def ptx_of(source: str, file: str, chip: int) -> str:
    """The PTX of a file's text for a chip, 90 for sm_90a; file: its path, which the lines name.
    Raises CompileError, one line.
    """
    text, _ = translated(source, file, chip, "PTX", "--generate-line-info")
    return text.rstrip(b"\0 ").decode()


def cubin_of(source: str, file: str, chip: int) -> tuple[bytes, str]:
    """The same as machine code, and what ptxas says of it: registers, spills, shared memory."""
    return translated(source, file, chip, "CUBIN", "--ptxas-options=-v")


def translated(source: str, file: str, chip: int, form: str, option: str) -> tuple[bytes, str]:
    """A file's text in the form "PTX" or "CUBIN", and the compiler's log. Raises CompileError."""
    if why := why_not_here():
        raise CompileError(f"{Path(file).name} cannot be compiled: {why}")
    from cuda.bindings import nvrtc

    def done(answer):
        status, *values = answer
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            said = first_error(nvrtc, program) or f"{file}: {status.name}"
            raise CompileError(said.replace(file, Path(file).name))
        return values[0] if values else None

    program = None
    program = done(nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), 0, [], []))
    options = [f"--gpu-architecture={architecture(chip)}", "--std=c++17", option]
    done(nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options]))
    size = done(getattr(nvrtc, f"nvrtcGet{form}Size")(program))
    code = room_for(size)
    done(getattr(nvrtc, f"nvrtcGet{form}")(program, code))
    return code[:size], log_of(nvrtc, program)


def room_for(size: int) -> bytes:
    """Bytes that NVRTC may write into. Two more than it wants, because Python has each single byte
    once: an empty log, of one byte, would be written into every b" " of the process.
    """
    return bytes(size + 2)


def log_of(nvrtc, program) -> str:
    """What the compiler has said."""
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = room_for(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.rstrip(b"\0 ").decode()


def first_error(nvrtc, program) -> str:
    """What the compiler complains of first."""
    if program is None:
        return ""
    lines = [line for line in log_of(nvrtc, program).splitlines() if "error" in line]
    return lines[0].strip() if lines else ""
