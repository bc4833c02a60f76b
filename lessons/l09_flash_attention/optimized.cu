// FlashAttention forward, one sequence, full or causal, grouped heads: the CUDA C++ twin of flash_kernel without its options.
//
// It says what Triton hides: who computes what. A block of 8 warps owns 16 queries of a head, a warp 2 of them. A tile of 32 keys
// lies in shared memory, one key for each lane of a warp: the lane computes its key's score, the warp takes maximum and sum by
// shuffles, and then each lane adds up its own columns of the output. Ordinary arithmetic, no tensor cores: read it, do not race it.
// cuda_flash.py launches it. No header is included: NVRTC comes without cuda_bf16.h.

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int LANES = 32, WARPS = 8, ROWS = 2;             // ROWS queries a warp
constexpr int BLOCK_M = WARPS * ROWS, BLOCK_N = LANES;     // a key for each lane
__device__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// bfloat16 is the upper half of a float; rounded to the nearest, ties to even, and NaN stays NaN.
__device__ float to_float(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
__device__ float to_float(float x) { return x; }
__device__ void from_float(float x, float& y) { y = x; }
__device__ void from_float(float x, unsigned short& bits) {
    unsigned wide = __float_as_uint(x);
    bits = x == x ? (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16 : 0x7fffu;
}

__device__ float warp_max(float x) {
    for (int distance = LANES / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, distance));
    return x;
}

__device__ float warp_sum(float x) {
    for (int distance = LANES / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
    return x;
}

// Rows start ... start + rows - 1 of one head, [count, heads, D], into shared memory as float; zeros behind the last one.
template <typename T, int D, int WIDTH>
__device__ void load_rows(float (*tile)[WIDTH], const T* x, long long start, int rows, long long count, long long stride) {
    for (int i = threadIdx.x; i < rows * D; i += blockDim.x) {
        int row = i / D, column = i % D;  // neighbouring threads read neighbouring columns
        tile[row][column] = start + row < count ? to_float(x[(start + row) * stride + column]) : 0.0f;
    }
}

template <typename T, int D>
__device__ void flash_forward(const T* q, const T* k, const T* v, T* out, float* lse, long long num_queries, long long num_keys,
                              long long num_kv_heads, float softmax_scale, long long causal) {
    __shared__ float q_tile[BLOCK_M][D];
    __shared__ float k_tile[BLOCK_N][D + 1];  // + 1, because the lanes read a column at once: each row starts in another bank
    __shared__ float v_tile[BLOCK_N][D];
    long long num_heads = gridDim.x, head = blockIdx.x, kv_head = head / (num_heads / num_kv_heads);
    long long start_m = static_cast<long long>(gridDim.y - 1 - blockIdx.y) * BLOCK_M;  // backwards: the heaviest first
    int lane = threadIdx.x % LANES, my_row = threadIdx.x / LANES * ROWS;

    load_rows<T, D, D>(q_tile, q + head * D, start_m, BLOCK_M, num_queries, num_heads * D);
    float m_i[ROWS], l_i[ROWS], acc[ROWS][D / LANES];  // acc[r][c]: column lane + 32 c of query my_row + r
    for (int r = 0; r < ROWS; r++) {
        m_i[r] = minus_infinity();
        l_i[r] = 0.0f;
        for (int c = 0; c < D / LANES; c++) acc[r][c] = 0.0f;
    }
    long long first = start_m + num_keys - num_queries;  // the key at which the first query stands: bottom-right aligned
    long long end = causal && first + BLOCK_M < num_keys ? first + BLOCK_M : num_keys;
    for (long long start_n = 0; start_n < end; start_n += BLOCK_N) {
        __syncthreads();  // no warp reads the old tile any more
        load_rows<T, D, D + 1>(k_tile, k + kv_head * D, start_n, BLOCK_N, num_keys, num_kv_heads * D);
        load_rows<T, D, D>(v_tile, v + kv_head * D, start_n, BLOCK_N, num_keys, num_kv_heads * D);
        __syncthreads();  // the new tile is complete
        long long key = start_n + lane;
        for (int r = 0; r < ROWS; r++) {
            float score = 0.0f;
            for (int d = 0; d < D; d++) score += q_tile[my_row + r][d] * k_tile[lane][d];
            bool sees = key < num_keys && (!causal || key <= first + my_row + r);
            score = sees ? score * softmax_scale : minus_infinity();
            float m_new = fmaxf(m_i[r], warp_max(score));
            float m_safe = m_new == minus_infinity() ? 0.0f : m_new;  // -inf - -inf is NaN: no key seen yet
            float alpha = __expf(m_i[r] - m_safe), p = __expf(score - m_safe);
            l_i[r] = l_i[r] * alpha + warp_sum(p);
            m_i[r] = m_new;
            for (int c = 0; c < D / LANES; c++) acc[r][c] *= alpha;
            for (int j = 0; j < BLOCK_N; j++) {
                float weight = __shfl_sync(ALL_LANES, p, j);  // lane j's weight, to all lanes
                for (int c = 0; c < D / LANES; c++) acc[r][c] += weight * v_tile[j][lane + LANES * c];
            }
        }
    }
    for (int r = 0; r < ROWS; r++) {
        long long row = start_m + my_row + r;
        if (row >= num_queries) continue;
        float share = 1.0f / (l_i[r] == 0.0f ? 1.0f : l_i[r]);  // late division; a query without a key gives 0
        T* cell = out + (row * num_heads + head) * D;
        for (int c = 0; c < D / LANES; c++) from_float(acc[r][c] * share, cell[lane + LANES * c]);
        if (lane == 0) lse[row * num_heads + head] = m_i[r] + __logf(l_i[r]);
    }
}

// Called by name from Python, so each type and head size has a name of its own.
#define FLASH(NAME, T, D)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(WARPS * LANES) NAME(                                                         \
        const T* q, const T* k, const T* v, T* out, float* lse, long long num_queries, long long num_keys,                    \
        long long num_kv_heads, float softmax_scale, long long causal) {                                                      \
        flash_forward<T, D>(q, k, v, out, lse, num_queries, num_keys, num_kv_heads, softmax_scale, causal);                   \
    }
FLASH(flash_bf16_64, unsigned short, 64)
FLASH(flash_bf16_128, unsigned short, 128)
FLASH(flash_fp32_64, float, 64)
FLASH(flash_fp32_128, float, 128)
