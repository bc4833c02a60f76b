"""Small kernels of CUDA C++ give the right numbers; launches that no GPU takes are refused."""

import numpy as np
import pytest
import torch

from lessons.toolbox.gpu import machine, nvrtc
from lessons.toolbox.gpu.arguments import ORDER
from lessons.toolbox.gpu.nvrtc import CompileError
from tests.toolbox.gpu.small_cuda_kernels import BLOCK_SUM, WARP_SUM

pytestmark = pytest.mark.skipif(
    bool(nvrtc.why_not_here()), reason=f"NOT RUN: {nvrtc.why_not_here()}"
)


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
        extern "C" __global__ void k(const int* x, int* counts, int* largest, float* sum) {
            extern __shared__ int mine[];
            if (threadIdx.x < 10) mine[threadIdx.x] = 0;
            __syncthreads();
            int value = x[blockIdx.x * blockDim.x + threadIdx.x];
            atomicAdd(&mine[value], 1);
            atomicMax(largest, value);
            atomicAdd(sum, 1);
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


def test_the_order_of_programs_is_drawn_and_can_be_repeated(run, monkeypatch):
    monkeypatch.setattr(machine, "BYTES_OF_REGISTERS", 1)  # one program at a time
    code = """
        extern "C" __global__ void k(int* turn, int* order) {
            order[atomicAdd(turn, 1)] = blockIdx.x;
        }
        """

    def order(seed):
        found = torch.empty(64, dtype=torch.int32)
        ORDER.seed(seed)
        run(code, torch.zeros(1, dtype=torch.int32), found, grid=64, block=1)
        return found.tolist()

    assert order(1) == order(1) != order(2) and sorted(order(2)) == list(range(64))


# ---------------------------------------------------------------- what is refused


def test_arguments_are_held_against_the_parameters(run):
    out = torch.zeros(1)
    for given, message in (
        ((out,), "k: got 1 arguments; accepted: 3"),
        ((out, out, 1.0), "k: argument 2 is float32; accepted: .u64, 8 bytes"),
        ((out, out, np.int32(1)), "k: argument 2 is int32; accepted: .u64, 8 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            run(BLOCK_SUM, *given)


@pytest.mark.parametrize("grid, block", [(1, 0), (1, 1025), ((0, 1), 32), (1, (32, 33))])
def test_launches_that_no_gpu_takes_are_refused(grid, block, run):
    with pytest.raises(ValueError, match="accepted: 1 to 1024 threads a block"):
        run(WARP_SUM, torch.zeros(32), torch.zeros(1), grid=grid, block=block)


def test_an_error_of_the_compiler_names_the_line(run):
    for wrong, error, message in (
        (WARP_SUM.replace("d /= 2", "d /= two"), CompileError, r"small.cu\(4\): error: .*two"),
        (WARP_SUM.replace(" k(", " other("), ValueError, "name: got 'k'; accepted: other"),
    ):
        with pytest.raises(error, match=message):
            run(wrong, torch.zeros(32), torch.zeros(1))


def test_without_a_compiler_one_line(run, monkeypatch):
    monkeypatch.setattr(nvrtc, "why_not_here", lambda: "needs NVRTC")
    with pytest.raises(CompileError, match=r"^small.cu cannot be compiled: needs NVRTC$"):
        run(WARP_SUM + "// another text", torch.zeros(32), torch.zeros(1))
