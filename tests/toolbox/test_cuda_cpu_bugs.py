"""The emulator names the bug, the thread and the line of wrong kernels."""

import re

import pytest
import torch

from lessons.toolbox.cuda_cpu import compiling
from lessons.toolbox.cuda_cpu.emulator import CudaError
from tests.toolbox.small_cuda_kernels import BLOCK_SUM, WARP_SUM

pytestmark = pytest.mark.skipif(
    bool(compiling.why_not_here()), reason=f"NOT RUN: {compiling.why_not_here()}"
)

THREE = (
    'extern "C" __global__ void k(float* x, float* y, long long n) {\n    int i = threadIdx.x;\n'
)
WRONG = {  # name: (the kernel's third line and on, what the message says)
    "store behind the end": (
        "x[i + 1] = 1.0f;",
        r"small.cu:3: out of bounds: block \(0, 0, 0\), thread \(63, 0, 0\) writes 4 bytes, 0 bytes "
        r"behind the end of argument 0 \(float32 \[64\]\) \(seed \d+\)$",
    ),
    "load before the start": (
        "y[i] = x[i - 1];",
        r"small.cu:3: out of bounds: .*thread \(0, 0, 0\) reads 4 bytes, 4 bytes before the start of",
    ),
    "far away": (
        "y[i] = x[i + (1ll << 40)];",
        "small.cu:3: out of bounds: .* at an address in no tensor",
    ),
    "null": ("if (i == 7) *(float*)nullptr = 0;", r"out of bounds: .*thread \(7, 0, 0\) writes"),
    "index beyond shared memory": (
        "__shared__ float a[64]; a[i + 1] = x[i]; __shared__ float b[64]; b[i] = a[1];",
        r"small.cu:3: out of bounds: .*thread \(63, 0, 0\) uses index 64 of an array",
    ),
    "pointer beyond shared memory": (
        "__shared__ float a[64]; float* p = a; for (int j = i; j < 9999; j++) p[j] = 0;",
        r"small.cu:3: (out of bounds: .*behind the end of a|data race)",
    ),
    "misaligned": (
        "y[i] = reinterpret_cast<float4*>(x + 1)[i % 4].x;",
        "small.cu:3: misaligned: .* no multiple of what it loads or stores",
    ),
    "read before it is written": (
        "__shared__ float a[64]; if (i < 63) a[i] = x[i];\n    __syncthreads();\n    y[i] = a[i];",
        r"small.cu:5: uninitialised: .*thread \(63, 0, 0\) reads byte 252 of a, which no thread",
    ),
    "race in shared memory": (
        "__shared__ float a[64];\n    a[i] = x[i];\n    y[i] = a[63 - i];",
        r"small.cu:[45]: (data race: .*; thread \(\d+, 0, 0\) (wrote|reads) it at small.cu:[45], with no "
        r"barrier|uninitialised)",
    ),
    "race between two stores": (
        "y[i / 2] = x[i];",
        "small.cu:3: data race: .*wrote it at small.cu:3",
    ),
    "race with an atomic": (
        "if (i) atomicAdd(y, 1);\n    else *y = 0;",
        r"small.cu:[34]: data race: .*(atomically changed|wrote) it at small.cu:[34]",
    ),
    "race of a warp without __syncwarp": (
        "__shared__ float a[64];\n    a[i] = i;\n    float t = __shfl_xor_sync(~0u, 1.0f, 1);\n"
        "    y[i] = a[i ^ 1] + t;",
        "small.cu:6: data race",
    ),
    "divergent barrier": (
        "if (i < 32)\n        __syncthreads();\n    else\n        __syncthreads();",
        r"divergent barrier: .*threads 0-31 wait at __syncthreads \(line 4\); threads 32-63 wait at "
        r"__syncthreads \(line 6\)",
    ),
    "returned before the barrier": (
        "if (i >= 40) return;\n    __syncthreads();",
        r"divergent barrier: .*threads 40-63 have returned; threads 0-39 wait at __syncthreads",
    ),
    "lanes missing": (
        "if (i < 40)\n        x[i] = __shfl_xor_sync(~0u, x[i], 1);",
        r"deadlock, lanes of the mask are missing: .*threads 40-63 have returned; threads 32-39 wait "
        r"at __shfl_xor_sync with mask ffffffff \(line 4\)",
    ),
    "barrier against shuffle": (
        "if (i == 5) __syncthreads();\n    __syncwarp();",
        "deadlock, .*threads? 5 wait at __syncthreads .line 3.",
    ),
    "mask without the caller": (
        "__shfl_sync(0xffu, 1.0f, 0);",
        r"small.cu:3: wrong mask: .* calls __shfl_sync with mask 000000ff, which lacks its lane",
    ),
    "shuffle from outside the mask": (
        "if (i < 8) x[i] = __shfl_xor_sync(0xffu, x[i], 8);",
        r"small.cu:3: shuffle from a missing lane: .* reads lane \d+ in __shfl_xor_sync",
    ),
    "two shuffles of one warp": (
        "x[i] = i % 2 ? __shfl_sync(~0u, x[i], 0)\n                 : __shfl_sync(~0u, x[i], 1);",
        "divergent warp: ",
    ),
    "division by 0": ("y[i] = 5 / (i - 3 * static_cast<int>(n) / 64);", "small.cu:3: division: "),
    "a lock that nobody opens": (
        "while (atomicAdd(y, 0) < 5) {}",
        "small.cu:.*: endless loop: ",
    ),
}


@pytest.mark.parametrize("bug", WRONG)
@pytest.mark.sample(7)
def test_a_bug_is_named_with_thread_and_line(bug, run):
    body, message = WRONG[bug]
    x, y = torch.zeros(64), torch.zeros(64)
    with pytest.raises(CudaError) as error:
        run(f"{THREE}    {body}\n}}\n", x, y, 64, block=64)
    assert re.search(message, str(error.value)), error.value
    # and Python goes on as before
    run(WARP_SUM, torch.ones(32), y)
    assert y[0] == 32


@pytest.mark.parametrize(
    "right, slip, caught",
    [
        ("__syncthreads();", "", CudaError),
        ("__syncthreads();", "__syncwarp();", CudaError),
        ("threadIdx.x < step", "threadIdx.x <= step", CudaError),
        ("threadIdx.x < n", "threadIdx.x <= n", CudaError),
        ("step > 0", "step > 1", AssertionError),
        ("blockDim.x / 2", "blockDim.x / 4", AssertionError),
        ("step /= 2", "step /= 4", AssertionError),
    ],
)
def test_slips_in_the_sum_of_a_block(right, slip, caught, run, seed):
    """Caught by the emulator, or by the number."""
    x, out = torch.randn(200), torch.full((1,), torch.nan)
    with pytest.raises(caught):
        run(BLOCK_SUM.replace(right, slip), x, out, 200, block=256)
        torch.testing.assert_close(out[0], x.sum())


PIPELINE = """\
extern "C" __global__ void k(const float* x, float* out, long long tiles) {
    __shared__ float tile[2][64];
    float sum = 0.0f;
    tile[0][threadIdx.x] = x[threadIdx.x];
    for (int t = 0; t < tiles; t++) {
        __syncthreads();
        int next = t + 1;
        if (next < tiles) tile[next % 2][threadIdx.x] = x[64 * next + threadIdx.x];
        sum += tile[t % 2][63 - threadIdx.x];
    }
    out[63 - threadIdx.x] = sum;
}
"""


@pytest.mark.parametrize(
    "right, slip",
    [
        ("", ""),
        ("tile[t % 2]", "tile[next % 2]"),
        ("tile[next % 2][threadIdx.x]", "tile[t % 2][threadIdx.x]"),
        ("tile[t % 2]", "tile[0]"),
        ("next % 2", "0"),
        ("next < tiles", "next <= tiles"),
        ("__syncthreads();", "if (t % 2) __syncthreads();"),
    ],
)
def test_two_buffers_in_turns_and_slips_in_their_index(right, slip, run, seed):
    x, out = torch.randn(5, 64), torch.full((64,), torch.nan)

    def check():
        run(PIPELINE.replace(right, slip) if right else PIPELINE, x, out, 5, block=64)
        torch.testing.assert_close(out, x.sum(0))

    if not right:
        return check()
    with pytest.raises((CudaError, AssertionError)):
        check()
