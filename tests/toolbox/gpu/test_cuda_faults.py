"""CUDA C++ that is wrong: a fault names the line and the thread."""

import re

import pytest
import torch

from lessons.toolbox.gpu import nvrtc
from lessons.toolbox.gpu.faults import Fault
from tests.toolbox.gpu.small_cuda_kernels import BLOCK_SUM, WARP_SUM

pytestmark = pytest.mark.skipif(
    bool(nvrtc.why_not_here()), reason=f"NOT RUN: {nvrtc.why_not_here()}"
)

THREE = (
    'extern "C" __global__ void k(float* x, float* y, long long n) {\n    int i = threadIdx.x;\n'
)
WRONG = {  # name: (the kernel's third line and on, what the message says)
    "store after the end": (
        "x[i + 1] = 1.0f;",
        r"^fault: k, small.cu:3, program \(0, 0, 0\), thread 63: 4 bytes at 256 of argument 0, "
        r"which has 256 bytes \[st.global",
    ),
    "load before the start": (
        "y[i] = x[i - 1];",
        "small.cu:3, .* thread 0: 4 bytes, 4 before the first of argument 0",
    ),
    "far away": ("y[i] = x[i + (1ll << 40)];", "4 bytes at address .*, in no buffer"),
    "null": ("if (i == 7) *(float*)nullptr = 0;", "thread 7: the kernel stops itself"),
    "index beyond shared memory": (
        "__shared__ float a[64]; a[i + 1] = x[i]; __shared__ float b[64]; b[i] = a[1];",
        "thread 63: shared memory at 256, 4 bytes: the kernel has 256",
    ),
    "misaligned": (
        "float4 v = reinterpret_cast<float4*>(x + 1)[i % 4]; y[i] = v.x + v.y + v.z + v.w;",
        "thread (0|32): byte 4 of argument 0 is not a multiple of",  # the warp that comes first
    ),
    "race in shared memory": (
        "__shared__ float a[64];\n    a[i] = x[i];\n    y[i] = a[63 - i];",
        r"race in shared memory: it (reads|writes) what warp \d (wrote|reads) at small.cu:[45], "
        r"with no",
    ),
    "barrier for a part of a warp": (
        "if (i < 40)\n        __syncthreads();",
        "small.cu:4, .* thread 32: 8 threads of a warp come to the barrier, 24 of it do not",
    ),
    "lanes missing": (
        "if (i < 40)\n        x[i] = __shfl_xor_sync(~0u, x[i], 1);",
        "small.cu:4, .* threads of the warp that must take part are elsewhere",
    ),
    "mask without the caller": (
        "y[i] = __shfl_sync(0xffu, x[i], 0);",
        "small.cu:3, .* thread (8|40): a thread takes part that the mask does not name",
    ),
    "two shuffles of one warp": (
        "x[i] = i % 2 ? __shfl_sync(~0u, x[i], 0)\n                 : __shfl_sync(~0u, x[i], 1);",
        "threads of the warp that must take part are elsewhere",
    ),
}


@pytest.mark.parametrize("bug", WRONG)
@pytest.mark.sample(7)
def test_a_bug_is_named_with_thread_and_line(bug, run):
    body, message = WRONG[bug]
    x, y = torch.zeros(64), torch.zeros(64)
    with pytest.raises(Fault) as error:
        run(f"{THREE}    {body}\n}}\n", x, y, 64, block=64)
    assert re.search(message, str(error.value)), error.value
    # and Python goes on as before
    run(WARP_SUM, torch.ones(32), y)
    assert y[0] == 32


@pytest.mark.parametrize(
    "right, slip, caught",
    [
        ("__syncthreads();", "", Fault),
        ("__syncthreads();", "__syncwarp();", Fault),
        ("threadIdx.x < step", "threadIdx.x <= step", Fault),
        ("threadIdx.x < n", "threadIdx.x <= n", Fault),
        ("step > 0", "step > 1", AssertionError),
        ("blockDim.x / 2", "blockDim.x / 4", AssertionError),
        ("step /= 2", "step /= 4", AssertionError),
    ],
)
def test_slips_in_the_sum_of_a_block(right, slip, caught, run, seed):
    """Caught by a fault, or by the number."""
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
    with pytest.raises((Fault, AssertionError)):
        check()
