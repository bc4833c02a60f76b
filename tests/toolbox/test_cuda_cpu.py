"""The emulator for CUDA C++: it runs small kernels right, names the bug, the thread and the line of
wrong ones, and counts what a GPU's memory would see.
"""

import re

import numpy as np
import pytest
import torch

from lessons.toolbox.cuda_cpu import compiling
from lessons.toolbox.cuda_cpu.compiling import CompileError
from lessons.toolbox.cuda_cpu.emulator import CudaError, counting, seeded
from lessons.toolbox.kernels.cuda_cpp import CudaKernel

pytestmark = pytest.mark.skipif(
    bool(compiling.why_not_here()), reason=f"NOT RUN: {compiling.why_not_here()}"
)


@pytest.fixture
def run(tmp_path):
    """run(code, *arguments, grid=1, block=32, shared=0): the kernel `k` of a .cu file."""

    def launch(code, *arguments, grid=1, block=32, shared=0):
        file = tmp_path / "small.cu"
        file.write_text(code)
        CudaKernel(file, "k")[grid, block, shared](*arguments)

    return launch


BLOCK_SUM = """\
extern "C" __global__ void k(const float* x, float* out, long long n) {
    __shared__ float part[256];
    part[threadIdx.x] = threadIdx.x < n ? x[threadIdx.x] : 0.0f;
    for (int step = blockDim.x / 2; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
    }
    if (threadIdx.x == 0) *out = part[0];
}
"""
WARP_SUM = """\
extern "C" __global__ void __launch_bounds__(32) k(const float* x, float* out) {
    float sum = x[threadIdx.x];
    #pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(0xffffffffu, sum, d);
    if (threadIdx.x == 0) *out = sum;
}
"""


# ---------------------------------------------------------------- right kernels


def test_a_block_sums_with_a_barrier(run, seed):
    x, out = torch.randn(200), torch.full((1,), torch.nan)
    run(BLOCK_SUM, x, out, 200, block=256)
    torch.testing.assert_close(out[0], x.sum())


def test_a_warp_sums_by_shuffles(run, seed):
    x, out = torch.randn(32), torch.full((1,), torch.nan)
    run(WARP_SUM, x, out)
    torch.testing.assert_close(out[0], x.sum())


def test_votes_shuffles_and_widths(run):
    out = torch.full((8, 32), -1, dtype=torch.int32)
    run(
        """
        extern "C" __global__ void k(int* out) {
            int lane = threadIdx.x;
            unsigned all = ~0u;
            out[lane] = __ballot_sync(all, lane % 2);
            out[32 + lane] = __any_sync(all, lane == 40) * 2 + __all_sync(all, lane < 32);
            out[64 + lane] = __shfl_sync(all, lane, 5);
            out[96 + lane] = __shfl_up_sync(all, lane, 3);
            out[128 + lane] = __shfl_down_sync(all, lane, 3);
            out[160 + lane] = __shfl_xor_sync(all, lane, 16, 16);
            if (lane < 4) out[192 + lane] = __shfl_xor_sync(0xfu, lane, 1);
            out[224 + lane] = __shfl_sync(all, lane, 1, 8);
            __syncwarp();
        }
        """,
        out,
    )
    lane = torch.arange(32, dtype=torch.int32)
    assert (out[0] == -0x55555556).all() and (out[1] == 1).all() and (out[2] == 5).all()
    assert torch.equal(out[3], torch.where(lane < 3, lane, lane - 3))
    assert torch.equal(out[4], torch.where(lane > 28, lane, lane + 3))
    # a lane of the upper half may read the lower half, the other way it gets its own value
    assert torch.equal(out[5], torch.where(lane < 16, lane, lane - 16))
    assert out[6, :5].tolist() == [1, 0, 3, 2, -1]
    assert torch.equal(out[7], lane // 8 * 8 + 1)


def test_indices_of_threads_and_blocks(run):
    out = torch.full((3, 2, 4, 2, 8), -1, dtype=torch.int64)
    run(
        """
        extern "C" __global__ void k(long long* out) {
            int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
            int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
            out[block * (blockDim.x * blockDim.y * blockDim.z) + thread] = block * 100 + thread;
        }
        """,
        out,
        grid=(2, 3, 1),
        block=(8, 2, 4),
    )
    assert torch.equal(out.view(6, 64), torch.arange(6)[:, None] * 100 + torch.arange(64))


def test_dynamic_shared_memory_and_atomics(run):
    """A histogram: counts in shared memory, added up over blocks in global memory."""
    x = torch.randint(0, 10, (3, 64), dtype=torch.int32)
    counts, largest = torch.zeros(10, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    run(
        """
        __device__ int visits;
        extern "C" __global__ void k(const int* x, int* counts, int* largest, float* sum) {
            extern __shared__ int mine[];
            if (threadIdx.x < 10) mine[threadIdx.x] = 0;
            __syncthreads();
            int value = x[blockIdx.x * blockDim.x + threadIdx.x];
            atomicAdd(&mine[value], 1);
            atomicMax(largest, value);
            atomicAdd(sum, 1);
            atomicAdd(&visits, 1);
            __syncthreads();
            if (threadIdx.x < 10) atomicAdd(&counts[threadIdx.x], mine[threadIdx.x]);
        }
        """,
        x,
        counts,
        largest,
        sum_ := torch.zeros(1),
        grid=3,
        block=64,
        shared=40,
    )
    assert torch.equal(counts.long(), x.view(-1).bincount(minlength=10))
    assert largest == x.max() and sum_ == 192


def test_sixteen_bit_floats_and_vectors(run, seed):
    """half and bfloat16 as PyTorch rounds them, every one of the 65536 back to a float; loads of
    four floats.
    """
    x = torch.cat(
        [
            torch.randn(1020) * 10.0 ** torch.randint(-9, 6, (1020,)),
            torch.tensor([torch.inf, -torch.inf, torch.nan, 65520.0]),
        ]
    )
    every = torch.arange(-32768, 32768, dtype=torch.int16)
    as_half, as_bf16 = torch.empty(1024, dtype=torch.half), torch.empty(1024, dtype=torch.bfloat16)
    back = torch.empty(2, 65536)
    run(
        """
        extern "C" __global__ void k(const float4* x, half2* h, __nv_bfloat162* b,
                                     const __half* bits, const __nv_bfloat16* bits2, float* back) {
            int i = threadIdx.x;
            float4 v = x[i];
            h[2 * i] = __floats2half2_rn(v.x, v.y);
            h[2 * i + 1] = {__float2half(v.z), __float2half(v.w)};
            b[2 * i] = __floats2bfloat162_rn(v.x, v.y);
            b[2 * i + 1] = {__float2bfloat16(v.z), __float2bfloat16(v.w)};
            for (int n = i; n < 65536; n += blockDim.x) {
                back[n] = __half2float(bits[n]);
                back[65536 + n] = __bfloat162float(bits2[n]);
            }
        }
        """,
        x,
        as_half,
        as_bf16,
        every.view(torch.half),
        every.view(torch.bfloat16),
        back,
        block=256,
    )
    torch.testing.assert_close(as_half, x.half(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(as_bf16, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    for got, dtype in zip(back, (torch.half, torch.bfloat16)):
        torch.testing.assert_close(got, every.view(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_a_warp_may_order_its_own_memory(run):
    """__syncwarp is enough between lanes of a warp, and no barrier is needed."""
    out = torch.empty(64)
    run(
        """
        extern "C" __global__ void k(float* out) {
            __shared__ float x[64];
            x[threadIdx.x] = threadIdx.x;
            __syncwarp();
            out[threadIdx.x] = x[threadIdx.x ^ 1];
        }
        """,
        out,
        block=64,
    )
    assert torch.equal(out, torch.arange(64.0).view(32, 2).flip(1).reshape(-1))


def test_the_last_block_may_read_what_all_wrote_behind_a_fence(run):
    code = """
        extern "C" __global__ void k(const float* x, float* part, int* done, float* out) {
            part[blockIdx.x] = x[blockIdx.x];
            __threadfence();
            if (atomicAdd(done, 1) == gridDim.x - 1) {
                float sum = 0;
                for (int i = 0; i < gridDim.x; i++) sum += part[i];
                *out = sum;
            }
        }
        """
    x, out = torch.randn(5), torch.empty(1)
    given = (x, torch.empty(5), torch.zeros(1, dtype=torch.int32), out)
    run(code, *given, grid=5, block=1)
    torch.testing.assert_close(out[0], x.sum())
    with pytest.raises(
        CudaError, match=r"small.cu:7: data race: .* of block \(\d, 0, 0\) wrote it at small.cu:3"
    ):
        run(
            code.replace("__threadfence();", ""),
            *given[:2],
            torch.zeros(1, dtype=torch.int32),
            out,
            grid=5,
            block=1,
        )


def test_tensors_may_share_memory(run):
    """A matrix and two of its columns, as keys and values of one cache do."""
    x = torch.arange(12.0).view(6, 2)
    run(
        """
        extern "C" __global__ void k(float* x, const float* first, const float* last) {
            int i = threadIdx.x;
            x[2 * i + 1] = first[2 * i] + last[2 * i];
        }
        """,
        x,
        x[:, 0],
        x[:, 1],
        block=6,
    )
    assert x[:, 1].tolist() == [1.0, 5.0, 9.0, 13.0, 17.0, 21.0]


def test_the_order_of_threads_is_drawn_and_can_be_repeated(run):
    code = """
        extern "C" __global__ void k(int* turn, int* order) {
            order[atomicAdd(turn, 1)] = threadIdx.x;
        }
        """

    def order(seed):
        found = torch.empty(64, dtype=torch.int32)
        with seeded(seed):
            run(code, torch.zeros(1, dtype=torch.int32), found, block=64)
        return found.tolist()

    assert order(1) == order(1) != order(2) and sorted(order(2)) == list(range(64))


# ---------------------------------------------------------------- wrong kernels

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


# ---------------------------------------------------------------- counts


def sites_of(run, body, *arguments, block=32, **options):
    code = 'extern "C" __global__ void k(const float* x, float* y) {\n    int i = threadIdx.x;\n'
    with counting() as sites:
        run(f"{code}    {body}\n}}\n", *arguments, block=block, **options)
    return sites


@pytest.mark.parametrize("stride, sectors", [(0, 1), (1, 4), (2, 8), (4, 16), (8, 32), (9, 32)])
def test_sectors_of_coalesced_and_strided_loads(stride, sectors, run):
    """A warp of 4-byte loads: 128 bytes in a row are 4 sectors, a stride of 8 a sector each."""
    x, y = torch.zeros(64 * 9 + 1), torch.zeros(64)
    load, store = sites_of(run, f"y[i] = x[{stride} * i];", x, y, block=64)
    assert (load.access, load.memory, load.line, load.size_bytes) == ("load", "global", 3, 4)
    want = {0: 2, 9: 64}.get(stride, 2 * sectors)
    assert load.requests == 2 and load.sectors == want and store.sectors == 8


def test_sectors_of_wide_loads(run):
    x, y = torch.zeros(128), torch.zeros(32)
    load, _ = sites_of(run, "y[i] = reinterpret_cast<const float4*>(x)[i].y;", x, y)
    assert load.requests == 1 and load.size_bytes in (4, 16) and load.sectors == 16


@pytest.mark.parametrize("padding, conflicts", [(0, 31), (1, 0), (2, 1), (16, 15)])
def test_bank_conflicts_of_a_column_of_a_tile(padding, conflicts, run):
    """32 lanes read a column: all of one bank without padding, each of its own with one word."""
    x, y = torch.zeros(1024), torch.zeros(32)
    _, store, load, _ = sites_of(
        run,
        f"__shared__ float tile[32][32 + {padding}];\n"
        "    for (int j = 0; j < 32; j++) tile[j][i] = x[32 * j + i];\n"
        "    __syncwarp();\n    y[i] = tile[i][5];",
        x,
        y,
    )
    assert (load.name, load.memory, load.line) == ("tile", "shared", 6)
    assert load.conflicts == conflicts and load.turns == 1 + conflicts
    assert store.conflicts == 0 and store.requests == 32


def test_a_word_for_all_lanes_and_wide_words_conflict_with_nobody(run):
    x, y = torch.zeros(128), torch.zeros(32)
    body = (
        "__shared__ float4 a[32];\n    a[i] = reinterpret_cast<const float4*>(x)[i];\n"
        "    __syncwarp();\n    y[i] = a[3].x;"
    )
    loaded, stored, one, _ = sites_of(run, body, x, y)
    assert (stored.size_bytes, stored.turns, stored.conflicts) == (16, 4, 0)
    assert one.turns == 1 and one.conflicts == 0 and loaded.sectors == 16


# ---------------------------------------------------------------- what is refused


def test_arguments_are_held_against_the_parameters(run):
    out = torch.zeros(1)
    for given, message in (
        ((out,), "k: got 1 arguments; accepted: 3"),
        ((out, out, 1.0), "k: argument 2 is a float of 4 bytes; accepted: an int of 8 bytes"),
        ((out, out, np.int32(1)), "an int of 4 bytes; accepted: an int of 8 bytes"),
        ((out, 5, 5), "argument 1 is an int of 8 bytes; accepted: a tensor of 8 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            run(BLOCK_SUM, *given)


@pytest.mark.parametrize("grid, block", [(1, 0), (1, 1025), ((0, 1), 32), (1, (32, 33))])
def test_launches_that_no_gpu_takes_are_refused(grid, block, run):
    with pytest.raises(ValueError, match="accepted: 1 to 1024 threads a block"):
        run(WARP_SUM, torch.zeros(32), torch.zeros(1), grid=grid, block=block)


def test_an_error_of_the_compiler_names_the_line(run):
    for wrong, message in (
        (WARP_SUM.replace("d /= 2", "d /= two"), r"^small.cu:4:\d+: error: .*two"),
        (WARP_SUM.replace(" k(", " other("), r"^small.cu:\d+:\d+: error: .*k"),
        (f"void two(float&);\n{WARP_SUM.replace('if', 'two(sum); if')}", "^undefined .*two"),
    ):
        with pytest.raises(CompileError, match=message):
            run(wrong, torch.zeros(32), torch.zeros(1))


def test_without_a_compiler_one_line(run, monkeypatch):
    monkeypatch.setattr(compiling, "compiler", lambda: None)
    assert "no C++ compiler is installed" in compiling.why_not_here()
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler is installed"):
        run(WARP_SUM, torch.zeros(32), torch.zeros(1))
