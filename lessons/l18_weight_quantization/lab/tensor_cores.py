"""What two kernels for a few rows and 4-bit codes cost on an H200, counted from compiled code:
Triton's quantized_matmul_kernel, and tensor_cores.cu, whose codes are in a tensor core's order.

    python -m lessons.l18_weight_quantization.lab.tensor_cores

writes results/counted/l18_tensor_cores.json. No GPU is needed, and nothing is timed. The times are
the time model's (lessons/PROFILING.md). It was never held against what NVRTC compiles, because
NVIDIA's assembler reorders that and the model does not: see KNOWN.
"""

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

from lessons.l18_weight_quantization.kernels.cuda_tensor_cores import (
    SOURCE,
    w4a16_tensor_cores,
    warps_for,
)
from lessons.l18_weight_quantization.kernels.cuda_w4a16 import w4a16_cuda
from lessons.l18_weight_quantization.kernels.fragments import Fragments
from lessons.l18_weight_quantization.optimized import matmul
from lessons.l18_weight_quantization.weights import GroupedInt
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.gpu.nvrtc import cubin_of

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l18_tensor_cores.json"
# [N, K] of Llama-3-8B's matrices; gate and up as results/h200/l18_batch.json has them
SHAPES = {
    "gate, up": (28672, 4096),
    "down": (4096, 14336),
    "q, k, v": (6144, 4096),
    "o": (4096, 4096),
    "Qwen3-32B: gate, up": (51200, 5120),
    "Qwen3-32B: down": (5120, 25600),
    "Qwen3-32B: q, k, v": (10240, 5120),
    "Qwen3-32B: o": (5120, 8192),
}
LARGEST, GROUP = "gate, up", 128
ROWS = (1, 4, 8, 16)
SMS = 132
COPY_RATE = 4.3e12  # bytes/s that one may hope to reach of an H200's 4.8e12
STRETCH = 256 * 16 // 32  # weights of a lane in one round of the loop
# An H200 has timed one kernel in CUDA C++ of this lesson, one row by optimized.cu.
KNOWN = "w4a16_bf16, 1 row"


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Values do not matter here, and the system gives no memory for them."""
    return torch.zeros(shape, dtype=dtype)


def grouped(n: int, k: int) -> GroupedInt:
    scales = zeros(n, k // GROUP, dtype=torch.float16)
    return GroupedInt(zeros(n, k // 2), scales, None, 4, GROUP)


def fragments(n: int, k: int, with_zeros: bool = False) -> Fragments:
    shape = n // 16, k // GROUP, 8, 2
    points = zeros(*shape) if with_zeros else None
    codes = zeros(n // 16, k // 64, 32, 4, dtype=torch.int32)
    arrived = zeros(n // 16, dtype=torch.int32)
    return Fragments(codes, zeros(*shape, dtype=torch.float16), points, GROUP, (n, k), arrived)


CALLS = {
    "Triton": lambda x, *shape: matmul(x, grouped(*shape)),
    "tensor cores": lambda x, *shape: w4a16_tensor_cores(x, fragments(*shape)),
    "tensor cores, zeros": lambda x, *shape: w4a16_tensor_cores(x, fragments(*shape, True)),
    KNOWN: lambda x, *shape: w4a16_cuda(x, grouped(*shape)),
}
CALLS_OF_FRAGMENTS = ("tensor cores", "tensor cores, zeros")


def least_bytes(rows: int, n: int, k: int) -> float:
    """The codes, the scales, x and the results."""
    return n * k / 2 + n * k / GROUP * 2 + 2 * rows * (n + k)


def granted_s(rows: int, n: int, k: int) -> float:
    """What the time model gives any launch that moves so many bytes: the launch, the first
    instructions of its blocks, one latency of the memory, and the bytes at the rate of a copy.
    """
    from lessons.toolbox.measure.hardware import lookup
    from lessons.toolbox.profile.replay import CONSTANTS as c

    chip = lookup("h200")
    rate = c.memory_share * chip.memory_bytes_per_s
    return (c.launch + c.start + c.memory) / chip.clock_hz + least_bytes(rows, n, k) / rate


def predicted(name: str, matrix: str, rows: int) -> dict:
    """A call's launches on an H200. To be called where kernels are compiled, in a process of its
    own.
    """
    from lessons.toolbox.gpu.arguments import VARIABLE
    from lessons.toolbox.profile.points import profiled_sample
    from lessons.toolbox.profile.time_model import predict

    os.environ[VARIABLE] = "1"  # always the same order, which decides what warp adds up
    n, k = SHAPES[matrix]
    x = zeros(rows, k, dtype=torch.bfloat16)
    # blocks that share a tile's inputs run together, because the last of them adds up
    together = warps_for(rows, n, k, SMS).blocks if name in CALLS_OF_FRAGMENTS else 1
    profiles = profiled_sample(lambda: CALLS[name](x, n, k), together=together)
    times = [float(predict(profile).seconds) for profile in profiles]
    issued = sum(p.total["issued"] * 32 * p.programs / p.first.ran for p in profiles)
    return {
        "launches": len(profiles),
        "predicted_s": sum(times),
        "floor_share": least_bytes(rows, n, k) / COPY_RATE / sum(times),
        "granted_share": granted_s(rows, n, k) / sum(times),
        "ptx_a_weight": issued / (n * k),
        "registers": profiles[0].assembled.get("registers"),
        "spill_bytes": profiles[0].assembled.get("spill_bytes"),
    }


def loops(chip: int = 90) -> dict[str, float]:
    """{kernel of tensor_cores.cu: machine instructions a weight of its loop over K}. All of the
    loop is counted once, also what not every warp runs. Code that lies after the kernel and jumps
    back into the loop is not.
    """
    import triton

    code, _ = cubin_of(SOURCE.read_text(encoding="utf-8"), SOURCE.name, chip)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(code)
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(file)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for text in listing.split("Function : ")[1:]:
        pattern = r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);"
        code = [(int(address, 16), what) for address, what in re.findall(pattern, text)]
        jumps = [(at, re.search(r"BRA.* 0x([0-9a-f]+)", what)) for at, what in code]
        rounds = [
            [what for at, what in code if int(target[1], 16) <= at <= end]
            for end, target in jumps
            if target and int(target[1], 16) < end
        ]
        products = [sum("HMMA" in what for what in each) for each in rounds]
        loop = min(len(r) for r, many in zip(rounds, products) if many == max(products))
        found[text.split()[0]] = loop / STRETCH
    return found


def main() -> None:
    asked = [("tensor cores", matrix, rows) for matrix in SHAPES for rows in ROWS]
    asked += [("tensor cores, zeros", LARGEST, rows) for rows in ROWS]
    asked += [("Triton", matrix, rows) for matrix in list(SHAPES)[:4] for rows in (1, 8, 16)]
    asked += [(KNOWN, LARGEST, 1)]
    record = {
        "machine_instructions_a_weight": loops(),
        "calls": [
            {"name": asked[0], "matrix": asked[1], "rows": asked[2]}
            | call(f"{__spec__.name}:predicted", *asked, chip=90)
            for asked in tqdm(asked)
        ],
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
