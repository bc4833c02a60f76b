"""Two sums: of a block with barriers, of a warp by shuffles."""

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
