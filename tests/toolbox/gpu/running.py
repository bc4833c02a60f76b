"""A few lines of PTX as a kernel: what tests of the machine run."""

import numpy as np

from lessons.toolbox.gpu.global_memory import Buffer, GlobalMemory
from lessons.toolbox.gpu.machine import Launch, launch
from lessons.toolbox.gpu.ptx import Kernel, parse
from lessons.toolbox.gpu.written import written_parameters
from lessons.toolbox.kernels.cuda_cpp import three

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.file 1 "kernel.py"
{outside}
.visible .entry tried(
	{parameters}
)
{{
	.reg .pred %p<40>;
	.reg .b16 %rs<40>;
	.reg .b32 %r<80>;
	.reg .b64 %rd<40>;
	.reg .f32 %f<40>;
	.loc 1 7 1
	mov.u32 %r70, %tid.x;
	mov.u32 %r71, %ctaid.x;
	{pointers}
{body}
	ret;
}}
"""


def kernel_of(body: str, buffers: int, outside: str = "") -> Kernel:
    """A kernel whose body finds its thread in %r70, its program in %r71, and the addresses of its
    buffers in %rd30, %rd31, ... Each line of the body is a line of "kernel.py", from 8 on, but one
    after a `.loc` of its own.
    """
    names = [f"tried_param_{i}" for i in range(buffers)]
    given = body.strip().splitlines()
    placed = {i + 1 for i, line in enumerate(given) if line.startswith(".loc")}
    lines = [line if i in placed else f".loc 1 {8 + i} 1\n{line}" for i, line in enumerate(given)]
    text = HEAD.format(
        outside=outside,
        parameters=",\n".join(f".param .u64 {name}" for name in names),
        pointers="\n".join(f"ld.param.u64 %rd{30 + i}, [{name}];" for i, name in enumerate(names)),
        body="\n".join(lines),
    )
    return parse(text)["tried"]


def run(
    body: str, arrays: list[np.ndarray], grid=1, threads: int = 32, shared: int = 0, **options
) -> Launch:
    """Run it over arrays, which it changes. options: seed, outside."""
    kernel = kernel_of(body, len(arrays), options.pop("outside", ""))
    written = written_parameters(kernel)
    buffers = [
        Buffer(x.reshape(-1).view(np.uint8), f"x{i}", f"tried_param_{i}" in written)
        for i, x in enumerate(arrays)
    ]
    parameters = {
        name: GlobalMemory.address(i).to_bytes(8, "little")
        for i, (name, _, _) in enumerate(kernel.parameters)
    }
    total = kernel.shared_bytes + shared
    return launch(kernel, three(grid), (threads, 1, 1), buffers, parameters, total, **options)


def computed(instructions: str, inputs: list, result: str, type_: str) -> np.ndarray:
    """What a register holds after some instructions: [32], one for each thread. inputs: arrays [32]
    of 2, 4 or 8 bytes, found in %rs, %r or %rd 1, 2, 3 ...; result: the register, type_: b32, b64,
    b16.
    """
    registers = {2: "%rs", 4: "%r", 8: "%rd"}
    body = []
    for i, x in enumerate(inputs):
        size = x.dtype.itemsize
        body += [f"mul.wide.u32 %rd20, %r70, {size}; add.u64 %rd20, %rd20, %rd{30 + i};"]
        body += [f"ld.global.b{8 * size} {registers[size]}{i + 1}, [%rd20];"]
    size = int(type_[1:]) // 8
    body += instructions.strip().splitlines()
    body += [f"mul.wide.u32 %rd20, %r70, {size}; add.u64 %rd20, %rd20, %rd{30 + len(inputs)};"]
    body += [f"st.global.{type_} [%rd20], {result};"]
    out = np.zeros(32, dtype=f"u{size}")
    run("\n".join(body), [*(np.ascontiguousarray(x) for x in inputs), out])
    return out
