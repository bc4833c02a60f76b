"""What two kernels for a few rows and 4-bit codes cost on an H200, counted from compiled code:
Triton's quantized_matmul_kernel, and tensor_cores.cu, whose codes are in a tensor core's order.

    python -m lessons.l18_weight_quantization.lab.tensor_cores

writes results/counted/l18_tensor_cores.json. No GPU is needed, and nothing is timed. The times are
the time model's (lessons/PROFILING.md). It was never held against what NVRTC compiles, because
NVIDIA's assembler reorders that and the model does not: see KNOWN.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch

from lessons.l18_weight_quantization.kernels.cuda_tensor_cores import SOURCE, w4a16_tensor_cores
from lessons.l18_weight_quantization.kernels.cuda_w4a16 import w4a16_cuda
from lessons.l18_weight_quantization.kernels.fragments import Fragments
from lessons.l18_weight_quantization.optimized import matmul
from lessons.l18_weight_quantization.weights import GroupedInt
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.gpu.nvrtc import cubin_of

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l18_tensor_cores.json"
N, K, GROUP = 28672, 4096, 128  # gate and up of Llama-3-8B, as results/h200/l18_batch.json has it
ROWS = (1, 8, 16)
COPY_RATE = 4.3e12  # bytes/s that one may hope to reach of an H200's 4.8e12
STRETCH = 256 * 16 // 32  # weights of a lane in one round of the loop
# An H200 has timed one kernel in CUDA C++ of this lesson, one row by optimized.cu.
KNOWN = "w4a16_bf16, 1 row"


def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Values do not matter here, and the system gives no memory for them."""
    return torch.zeros(shape, dtype=dtype)


def grouped() -> GroupedInt:
    scales = zeros(N, K // GROUP, dtype=torch.float16)
    return GroupedInt(zeros(N, K // 2), scales, None, 4, GROUP)


def fragments(with_zeros: bool = False) -> Fragments:
    shape = N // 16, K // GROUP, 8, 2
    points = zeros(*shape) if with_zeros else None
    codes = zeros(N // 16, K // 64, 32, 4, dtype=torch.int32)
    return Fragments(codes, zeros(*shape, dtype=torch.float16), points, GROUP, (N, K))


CALLS = {
    "Triton": lambda x: matmul(x, grouped()),
    "tensor cores": lambda x: w4a16_tensor_cores(x, fragments()),
    "tensor cores, zeros": lambda x: w4a16_tensor_cores(x, fragments(True)),
    KNOWN: lambda x: w4a16_cuda(x, grouped()),
}


def least_s(rows: int) -> float:
    """Seconds to read the codes, the scales and x and to write the results, at COPY_RATE."""
    return (N * K / 2 + N * K / GROUP * 2 + 2 * rows * (N + K)) / COPY_RATE


def predicted(name: str, rows: int) -> dict:
    """A call's launches on an H200. To be called where kernels are compiled."""
    from lessons.toolbox.profile.points import profiled_sample
    from lessons.toolbox.profile.time_model import predict

    x = zeros(rows, K, dtype=torch.bfloat16)
    profiles = profiled_sample(lambda: CALLS[name](x))
    times = [float(predict(profile).seconds) for profile in profiles]
    issued = sum(p.total["issued"] * 32 * p.programs / p.first.ran for p in profiles)
    return {
        "launches": len(profiles),
        "predicted_s": sum(times),
        "floor_share": least_s(rows) / sum(times),
        "ptx_a_weight": issued / (N * K),
        "registers": profiles[0].assembled.get("registers"),
        "spill_bytes": profiles[0].assembled.get("spill_bytes"),
    }


def loops(chip: int = 90) -> dict[str, float]:
    """{kernel of tensor_cores.cu: machine instructions a weight of its loop over K}. All of the
    loop is counted once, also what not every warp runs.
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
        longest = max((r for r in rounds if any("HMMA" in what for what in r)), key=len)
        found[text.split()[0]] = len(longest) / STRETCH
    return found


def main() -> None:
    asked = [(name, rows) for name in list(CALLS)[:3] for rows in ROWS] + [(KNOWN, 1)]
    record = {
        "shape": [N, K],
        "least_s": {str(rows): least_s(rows) for rows in ROWS},
        "machine_instructions_a_weight": loops(),
        "calls": [
            {"name": name, "rows": rows} | call(f"{__spec__.name}:predicted", name, rows, chip=90)
            for name, rows in asked
        ],
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
