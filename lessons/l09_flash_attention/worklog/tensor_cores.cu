// Versions 3 to 5: FlashAttention on tensor cores. One kernel, whose tiles differ in their layout and in the number of their buffers:
//
//   flash_rows_D         rows one after the other; a tile is copied, waited for, computed
//   flash_swizzled_D     the same tiles, swizzled: ldmatrix meets no bank twice
//   flash_pipelined_D    swizzled, in two buffers: the next tile is on its way while this one is computed
//
// A block of 4 warps owns 64 queries of a head, a warp 16 of them, because mma.sync multiplies 16 rows. What a lane holds is said by the
// instruction (PTX ISA, 9.7.14.5.8, m16n8k16): of 16 × 8 sums it has columns 2t and 2t + 1 of rows g and g + 8, with g = lane / 4 and
// t = lane % 4. So 4 neighbouring lanes share a row, and the weights of the first product already lie as the second one wants them.

typedef unsigned short bf16;  // the bits: NVRTC comes without cuda_bf16.h
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int LANES = 32, WARPS = 4, WARP_M = 16, BLOCK_M = WARPS * WARP_M;
constexpr int CHUNK = 8;  // numbers of 16 bytes: what cp.async copies and a row of ldmatrix has
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
__device__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// Where a chunk of a row lies in its tile, counted in chunks.
struct Rows {
    template <int CHUNKS> static __device__ int place(int row, int chunk) { return row * CHUNKS + chunk; }
};
struct Swizzled {  // 8 neighbouring rows of one column of chunks are in 8 different groups of 4 banks
    template <int CHUNKS> static __device__ int place(int row, int chunk) { return row * CHUNKS + (chunk ^ row % 8); }
};

// ------------------------------------------------------------ the instructions

__device__ unsigned shared_address(const void* x) { return static_cast<unsigned>(__cvta_generic_to_shared(x)); }

__device__ void copy_chunk(unsigned to, const bf16* from, bool there) {  // zeros where nothing is there
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
                 : "memory");
}
__device__ void end_of_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int NEWEST> __device__ void wait_for_all_groups_but() { asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory"); }

// Four 8 × 8 matrices from shared memory. Lanes 8i to 8i + 7 name the rows of matrix i; each lane gets 2 numbers of each.
__device__ void load_matrices(unsigned (&x)[4], unsigned row_of_lane) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row_of_lane) : "memory");
}
__device__ void load_transposed(unsigned (&x)[4], unsigned row_of_lane) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row_of_lane) : "memory");
}

// sums [16, 8] += a [16, 16] · b [16, 8]
__device__ void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ unsigned rounded_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ------------------------------------------------------------ tiles

// Rows start ... start + rows - 1 of one head, [count, heads, D], on their way to shared memory; zeros after the last one.
template <int D, class Layout>
__device__ void start_copy(unsigned tile, const bf16* x, long long start, int rows, long long count, long long stride) {
    for (int i = threadIdx.x; i < rows * (D / CHUNK); i += blockDim.x) {
        int row = i / (D / CHUNK), chunk = i % (D / CHUNK);  // neighbouring threads copy neighbouring chunks
        bool there = start + row < count;
        copy_chunk(tile + 16 * Layout::template place<D / CHUNK>(row, chunk), x + (there ? start + row : 0) * stride + chunk * CHUNK, there);
    }
}

// The row that a lane names to ldmatrix, for 16 rows and two chunks of a tile. Its four matrices of 8 rows and one chunk come in one of two
// orders: first both halves of the rows, or first both chunks.
template <int D, class Layout> __device__ unsigned rows_first(unsigned tile, int row, int chunk, int lane) {
    return tile + 16 * Layout::template place<D / CHUNK>(row + lane % 16, chunk + lane / 16);
}
template <int D, class Layout> __device__ unsigned chunks_first(unsigned tile, int row, int chunk, int lane) {
    return tile + 16 * Layout::template place<D / CHUNK>(row + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2);
}

// ------------------------------------------------------------ the kernel

template <int D, class Layout, int BUFFERS>
__device__ void flash_forward(const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse, long long num_queries, long long num_keys,
                              long long num_kv_heads, float softmax_scale, long long causal) {
    constexpr int BLOCK_N = 4096 / D;  // keys: K and V of a tile together have room for the queries of a block, which come first
    __shared__ __align__(128) bf16 memory[BUFFERS][2][BLOCK_N * D];
    long long num_heads = gridDim.x, head = blockIdx.x, kv_head = head / (num_heads / num_kv_heads);
    long long start_m = static_cast<long long>(gridDim.y - 1 - blockIdx.y) * BLOCK_M;  // backwards: the heaviest first
    int lane = threadIdx.x % LANES, my_row = threadIdx.x / LANES * WARP_M;

    unsigned q_tile = shared_address(memory), q_of[D / 16][4];
    start_copy<D, Layout>(q_tile, q + head * D, start_m, BLOCK_M, num_queries, num_heads * D);
    end_of_group();
    wait_for_all_groups_but<0>();
    __syncthreads();
    for (int d = 0; d < D / 16; d++) load_matrices(q_of[d], rows_first<D, Layout>(q_tile, my_row, 2 * d, lane));
    __syncthreads();  // K and V take its place

    float m_i[2], l_i[2], acc[D / 8][4];  // of rows g and g + 8; l_i: of this lane's columns alone
    for (int r = 0; r < 2; r++) {
        m_i[r] = minus_infinity();
        l_i[r] = 0.0f;
    }
    for (int d = 0; d < D / 8; d++)
        for (int i = 0; i < 4; i++) acc[d][i] = 0.0f;
    long long first = start_m + num_keys - num_queries;  // the key at which the first query stands: bottom-right aligned
    long long end = causal && first + BLOCK_M < num_keys ? first + BLOCK_M : num_keys;
    long long full_end = causal && first + 1 < num_keys ? first + 1 : num_keys;  // every query of the block sees the keys in front of it
    int num_tiles = end > 0 ? (end + BLOCK_N - 1) / BLOCK_N : 0;
    float qk_scale = softmax_scale * LOG2_E;

    auto fetch = [&](int n) {  // a group for each tile, an empty one after the last
        if (n < num_tiles) {
            long long start_n = static_cast<long long>(n) * BLOCK_N;
            start_copy<D, Layout>(shared_address(memory[n % BUFFERS][0]), k + kv_head * D, start_n, BLOCK_N, num_keys, num_kv_heads * D);
            start_copy<D, Layout>(shared_address(memory[n % BUFFERS][1]), v + kv_head * D, start_n, BLOCK_N, num_keys, num_kv_heads * D);
        }
        end_of_group();
    };
    for (int n = 0; n < BUFFERS - 1; n++) fetch(n);
    for (int n = 0; n < num_tiles; n++) {
        fetch(n + BUFFERS - 1);
        wait_for_all_groups_but<BUFFERS - 1>();
        __syncthreads();  // every thread's part of tile n has arrived
        unsigned k_tile = shared_address(memory[n % BUFFERS][0]), v_tile = shared_address(memory[n % BUFFERS][1]);

        float scores[BLOCK_N / 8][4];  // [16, BLOCK_N] a warp
        for (int j = 0; j < BLOCK_N / 8; j++)
            for (int i = 0; i < 4; i++) scores[j][i] = 0.0f;
        for (int d = 0; d < D / 16; d++)
            for (int j = 0; j < BLOCK_N / 16; j++) {
                unsigned keys[4];
                load_matrices(keys, chunks_first<D, Layout>(k_tile, 16 * j, 2 * d, lane));
                multiply(scores[2 * j], q_of[d], keys[0], keys[1]);
                multiply(scores[2 * j + 1], q_of[d], keys[2], keys[3]);
            }
        long long start_n = static_cast<long long>(n) * BLOCK_N;
        if (start_n + BLOCK_N > full_end)  // the diagonal, or the ragged end
            for (int j = 0; j < BLOCK_N / 8; j++)
                for (int i = 0; i < 4; i++) {
                    long long key = start_n + 8 * j + lane % 4 * 2 + i % 2, query = first + my_row + lane / 4 + i / 2 * 8;
                    if (key >= num_keys || (causal && key > query)) scores[j][i] = minus_infinity();
                }
        for (int r = 0; r < 2; r++) {
            float m_new = minus_infinity();
            for (int j = 0; j < BLOCK_N / 8; j++) m_new = fmaxf(m_new, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
            for (int distance = 1; distance < 4; distance *= 2) m_new = fmaxf(m_new, __shfl_xor_sync(ALL_LANES, m_new, distance));
            m_new = fmaxf(m_i[r], m_new * qk_scale);
            float m_safe = m_new == minus_infinity() ? 0.0f : m_new;  // -inf - -inf is NaN: no key seen yet
            float alpha = power_of_two(m_i[r] - m_safe);
            l_i[r] *= alpha;
            for (int d = 0; d < D / 8; d++) {
                acc[d][2 * r] *= alpha;
                acc[d][2 * r + 1] *= alpha;
            }
            for (int j = 0; j < BLOCK_N / 8; j++)
                for (int i = 2 * r; i < 2 * r + 2; i++) {
                    scores[j][i] = power_of_two(scores[j][i] * qk_scale - m_safe);
                    l_i[r] += scores[j][i];
                }
            m_i[r] = m_new;
        }
        for (int j = 0; j < BLOCK_N / 16; j++) {
            unsigned p[4] = {rounded_pair(scores[2 * j][0], scores[2 * j][1]), rounded_pair(scores[2 * j][2], scores[2 * j][3]),
                             rounded_pair(scores[2 * j + 1][0], scores[2 * j + 1][1]), rounded_pair(scores[2 * j + 1][2], scores[2 * j + 1][3])};
            for (int d = 0; d < D / 16; d++) {
                unsigned values[4];
                load_transposed(values, rows_first<D, Layout>(v_tile, 16 * j, 2 * d, lane));
                multiply(acc[2 * d], p, values[0], values[1]);
                multiply(acc[2 * d + 1], p, values[2], values[3]);
            }
        }
        __syncthreads();  // no warp reads tile n any more
    }
    for (int r = 0; r < 2; r++)
        for (int distance = 1; distance < 4; distance *= 2) l_i[r] += __shfl_xor_sync(ALL_LANES, l_i[r], distance);
    for (int r = 0; r < 2; r++) {
        long long row = start_m + my_row + lane / 4 + 8 * r;
        if (row >= num_queries) continue;
        float share = 1.0f / (l_i[r] == 0.0f ? 1.0f : l_i[r]);  // late division; a query without a key gives 0
        bf16* cell = out + (row * num_heads + head) * D + lane % 4 * 2;
        for (int d = 0; d < D / 8; d++)
            *reinterpret_cast<unsigned*>(cell + 8 * d) = rounded_pair(acc[d][2 * r] * share, acc[d][2 * r + 1] * share);
        if (lane % 4 == 0) lse[row * num_heads + head] = m_i[r] * LN_2 + __logf(l_i[r]);
    }
}

// Called by name from Python, so each layout and head size has a name of its own.
#define FLASH(NAME, D, LAYOUT, BUFFERS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARPS * LANES) NAME(                                                          \
        const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse, long long num_queries, long long num_keys,         \
        long long num_kv_heads, float softmax_scale, long long causal) {                                                       \
        flash_forward<D, LAYOUT, BUFFERS>(q, k, v, out, lse, num_queries, num_keys, num_kv_heads, softmax_scale, causal);      \
    }
FLASH(flash_rows_64, 64, Rows, 1)
FLASH(flash_rows_128, 128, Rows, 1)
FLASH(flash_swizzled_64, 64, Swizzled, 1)
FLASH(flash_swizzled_128, 128, Swizzled, 1)
FLASH(flash_pipelined_64, 64, Swizzled, 2)
FLASH(flash_pipelined_128, 128, Swizzled, 2)
