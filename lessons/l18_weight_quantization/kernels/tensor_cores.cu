// x · Wᵀ for 1 to 16 rows of x and codes of 4 bits, by tensor cores. The matrix is stored in the order in which the lanes of a warp want
// it (fragments.py packs it), so that no code passes through shared memory and no lane ever waits for another one's bytes.
//
// Who multiplies what. mma.sync multiplies 16 × 16 by 16 × 8 numbers (PTX ISA, m16n8k16). The 16 rows are outputs, that is rows of W; the
// 8 columns are rows of x. With g = lane / 4 and t = lane % 4 a lane needs, for each product, 8 codes: 4 inputs of output g and the same
// 4 of output g + 8. That is one word of 32 bits. Which inputs they are is free, as long as x is read in the same order. So lane t takes
// inputs 16t to 16t + 15 of each 64, 4 for each of 4 products. Of x these are 32 neighbouring bytes, of W four words, the widest load.
//
//     bits of a word    0-3        4-7          8-11       12-15        16-19      20-23        24-27      28-31
//     output            g          g + 8        g          g + 8        g          g + 8        g          g + 8
//     input 4s +        0          0            2          2            1          1            3          3
//
// Shifted by 0, 4, 8 or 12 and masked, a word is two codes 16 bits apart: the pair that a register of mma.sync holds. lop3 masks them and
// puts the exponent of 128 (bfloat16) or 1024 (float16) above them in one instruction, which makes 128 + code; one addition leaves
// code - zero. So 8 codes cost 3 shifts, 4 lop3 and 4 additions, 1.4 instructions a weight, and all else is shared by many weights.
//
// Who adds. A block is wk warps in x and wn in y. A warp owns 16 outputs and a piece of the inputs: every so many-th stretch of 256. So a
// matrix of few outputs has enough warps as well. The pieces of a tile are wk warps of a block, or one warp in each of gridDim.x blocks;
// one of the two numbers is 1. In a block each warp hands its sums to the first. Between blocks they go through memory, and the last warp
// that comes adds up. Either way they are added in the order of the pieces, so the bits are the same.
//
// A warp loads the codes of its next stretch before it multiplies this one. x passes through shared memory in two buffers, because all
// warps read it. Sums are float32, a group's scale multiplies the sum of 64 inputs. cuda_tensor_cores.py launches it. No header is included.

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int LANES = 32, MOST_WARPS = 28, MOST_PIECES = 8, OUTPUTS = 16, SUMS_BYTES = 16 * LANES;  // of four sums of each lane
constexpr int UNIT = 64, UNITS = 4, STRETCH = UNIT * UNITS;  // inputs of a 16-byte load of codes, and of a warp's stretch
constexpr int CHUNK = 8;                                     // numbers of 16 bytes, which cp.async copies
constexpr int ROW = STRETCH + CHUNK;  // numbers of a row of x in shared memory: 16 bytes more than a stretch, so no bank is met twice

struct bf16 {
    unsigned short bits;
    static constexpr unsigned EXPONENT = 0x43004300u;  // 128, twice; its last bit counts 1
    static constexpr unsigned MINUS = 0xc300c300u;     // -128
    static __device__ unsigned add(unsigned a, unsigned b) {  // by a fused product with 1.0, which an A100 has as well
        unsigned sum;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3f803f80u), "r"(b));
        return sum;
    }
    static __device__ void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ bf16 of(float x) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
    __device__ float wide() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
};
struct fp16 {
    unsigned short bits;
    static constexpr unsigned EXPONENT = 0x64006400u;  // 1024, twice
    static constexpr unsigned MINUS = 0xe400e400u;     // -1024
    static __device__ unsigned add(unsigned a, unsigned b) {
        unsigned sum;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
        return sum;
    }
    static __device__ void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    static __device__ fp16 of(float x) {
        fp16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
    __device__ float wide() const {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
};

// ---------------------------------------------------------------- the instructions

struct alignas(16) Words {
    unsigned word[4];
};
using Address = decltype(__cvta_generic_to_global(nullptr));  // in global memory
__device__ Words load_codes(const Words* from) {  // volatile, so that the compiler leaves it ahead of the products
    Words to;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
                 : "l"(__cvta_generic_to_global(from)));
    return to;
}
__device__ unsigned load_word(const unsigned* from) {
    unsigned to;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(to) : "l"(__cvta_generic_to_global(from)));
    return to;
}
__device__ unsigned load_word(const unsigned short* from) {
    unsigned to;  // wider than what is loaded: a conversion would wait for the load
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(to) : "l"(__cvta_generic_to_global(from)));
    return to;
}
__device__ void copy_chunk(unsigned to, const void* from, int bytes) {  // 16, or zeros in their place if bytes is 0
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes) : "memory");
}
__device__ void two_floats(float (&to)[2], unsigned pair) {  // of two float16
    unsigned short low, high;
    asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(pair));
    to[0] = fp16{low}.wide();
    to[1] = fp16{high}.wide();
}
__device__ void store_shared(unsigned to, const float (&from)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]) : "memory");
}
__device__ void load_shared(float (&to)[4], unsigned from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(from) : "memory");
}
__device__ void store_sums(Address to, const float (&from)[4]) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]) : "memory");
}
__device__ void load_sums(float (&to)[4], Address from) {  // from the L2 cache, where other SMs have written them
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "l"(from) : "memory");
}
__device__ bool is_last(unsigned* arrived, int many, int lane) {  // of many warps; the last leaves a 0 for the next launch
    __syncwarp();  // all lanes have stored theirs
    unsigned before = 0;
    if (lane == 0)
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before)
                     : "l"(__cvta_generic_to_global(arrived)), "r"(many - 1)
                     : "memory");
    before = __shfl_sync(ALL_LANES, before, 0);
    __syncwarp();  // a shuffle orders no memory: what lane 0 has acquired holds for all lanes from here on
    return before == many - 1;
}
template <int TILES, typename Load>
__device__ void add_pieces(float (&sums)[TILES][4], int pieces, const Load& load) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        float found[MOST_PIECES][4];  // all loads are on their way before the first sum is needed
#pragma unroll
        for (int k = 0; k < MOST_PIECES; k++)
            if (k < pieces) load(found[k], k, i);
#pragma unroll
        for (int k = 0; k < MOST_PIECES; k++)
            for (int j = 0; j < 4; j++)
                if (k < pieces) sums[i][j] = k ? sums[i][j] + found[k][j] : found[0][j];
    }
}
__device__ unsigned masked_or(unsigned a, unsigned mask, unsigned c) {  // a & mask | c
    unsigned to;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(to) : "r"(a), "r"(mask), "r"(c));
    return to;
}

// ---------------------------------------------------------------- the kernel

// x: [M, K]; codes: [tiles, K / 64, 32, 4] words; scales, zeros: [tiles, groups, 8, 2]; out: [M, N]. groups: of 64 << group_shift inputs.
// partials: [tiles, pieces, TILES, 32, 4] float32, and arrived: [tiles], all 0 before and after, are used by pieces of several blocks alone.
template <typename T, int TILES, bool ZEROS>
__device__ void w4a16_tensor_cores(const T* x, const Words* codes, const unsigned* scales, const unsigned short* zeros, const T* bias, T* out,
                                   float* partials, unsigned* arrived, int num_rows, int num_outputs, int size, int num_stretches,
                                   int num_groups, int group_shift, int has_bias, int stride_x) {
    constexpr int ROWS = 8 * TILES;     // of x
    constexpr int BUFFER = ROWS * ROW;  // numbers
    extern __shared__ Words memory[];  // T[wk][2][ROWS][ROW], later the sums that warps hand over
    int wk = blockDim.x / LANES, wn = blockDim.y, pieces = wk * gridDim.x;
    int lane = threadIdx.x % LANES, split = threadIdx.x / LANES, warp = threadIdx.y, g = lane / 4, t = lane % 4;
    int first = blockIdx.x * wk, piece = first + split;  // the block's first, and the warp's
    int num_tiles = (num_outputs + OUTPUTS - 1) / OUTPUTS;
    int tile = blockIdx.y * wn + warp, own = min(tile, num_tiles - 1);  // after the last tile: the last one again, not stored
    unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(memory));

    // A warp copies rows of x for its own split: a row's stretch is 512 bytes. Rows after the last one are left as they are. They would be
    // columns of the product, and nothing is stored of those.
    unsigned from = warp * stride_x + piece * STRETCH + lane * CHUNK;
    unsigned to = shared + sizeof(T) * (split * 2 * BUFFER + warp * ROW + lane * CHUNK);
    auto start_copy = [&](int stretch, int buffer) {
        int bytes = stretch * STRETCH + lane * CHUNK < size ? 16 : 0;
        unsigned row_from = from;
        unsigned row_to = to + buffer * (sizeof(T) * BUFFER);
        for (int row = warp; row < num_rows; row += wn) {
            copy_chunk(row_to, x + row_from, bytes);
            row_from += wn * stride_x;
            row_to += wn * sizeof(T) * ROW;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        from += pieces * STRETCH;
    };
    start_copy(piece, 0);
    __syncthreads();  // because a copy that queues up after all codes would hold up all warps
    codes += (static_cast<long long>(own) * num_stretches + piece) * (UNITS * LANES) + lane;
    unsigned own_groups = own * num_groups * 8 + g;
    auto group_of = [&](int stretch) { return own_groups + ((stretch * UNITS + t) >> group_shift) * 8; };  // for unit t, output g and g + 8
    float sums[TILES][4] = {};
    Words words[UNITS];
    unsigned scale_words = 0, zero_words = 0;
    if (piece < num_stretches) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) words[u] = load_codes(codes + u * LANES);
        scale_words = load_word(scales + group_of(piece));
        if (ZEROS) zero_words = load_word(zeros + group_of(piece));
    }
    const T* my_columns = reinterpret_cast<T*>(memory) + split * 2 * BUFFER + g * ROW + 16 * t;
    for (int stretch = piece, buffer = 0; first < num_stretches; first += pieces, stretch += pieces, buffer ^= 1) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();  // x of these stretches has arrived, and no warp reads the other buffer any more
        if (first + pieces < num_stretches) start_copy(stretch + pieces, buffer ^ 1);
        if (stretch >= num_stretches) continue;
        bool more = stretch + pieces < num_stretches;
        codes += pieces * (UNITS * LANES);
        unsigned my_scales = scale_words, my_zeros = zero_words;
        if (more) {
            scale_words = load_word(scales + group_of(stretch + pieces));
            if (ZEROS) zero_words = load_word(zeros + group_of(stretch + pieces));
        }
        const T* columns = my_columns + buffer * BUFFER;
        float part[TILES][4] = {};
        unsigned minus[2] = {T::MINUS | 0x00080008u, T::MINUS | 0x00080008u};  // of output g, and of g + 8
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            if (ZEROS && (u % 2 == 0 || group_shift == 0)) {
                unsigned pair = __shfl_sync(ALL_LANES, my_zeros, u, 4);  // from lane 4g + u
                minus[0] = (pair & 0xffu) * 0x10001u | T::MINUS;
                minus[1] = (pair >> 8) * 0x10001u | T::MINUS;
            }
            Words numbers[TILES];
#pragma unroll
            for (int s = 0; s < 4; s++) {
                unsigned word = words[u].word[s], weights[4];
#pragma unroll
                for (int i = 0; i < 4; i++) weights[i] = T::add(masked_or(word >> 4 * i, 0x000f000fu, T::EXPONENT), minus[i % 2]);
#pragma unroll
                for (int i = 0; i < TILES; i++) {  // 16 bytes of x serve two products
                    if (s % 2 == 0) numbers[i] = *reinterpret_cast<const Words*>(columns + 8 * i * ROW + u * UNIT + s / 2 * CHUNK);
                    T::multiply(part[i], weights, numbers[i].word[s % 2 * 2], numbers[i].word[s % 2 * 2 + 1]);
                }
            }
            if (more) words[u] = load_codes(codes + u * LANES);  // into the registers that are free now
            if (u % 2 == 1 || group_shift == 0) {                // the end of a group, or of half a longer one
                float scale[2];
                two_floats(scale, __shfl_sync(ALL_LANES, my_scales, u, 4));
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        sums[i][j] += part[i][j] * scale[j / 2];
                        part[i][j] = 0.0f;
                    }
            }
        }
    }

    // The first warp, or the last that comes, adds up all pieces of a tile. It takes them in their order, whoever it is.
    if (wk > 1) {  // pieces are warps of this block
        unsigned handed = shared + (split * wn + warp) * (TILES * SUMS_BYTES) + lane * 16;
        __syncthreads();
        for (int i = 0; i < TILES; i++) store_shared(handed + i * SUMS_BYTES, sums[i]);
        __syncthreads();
        if (split) return;
        add_pieces<TILES>(sums, pieces, [&](float(&to)[4], int k, int i) { load_shared(to, handed + (k * wn * TILES + i) * SUMS_BYTES); });
    }
    if (tile >= num_tiles) return;
    if (gridDim.x > 1) {  // pieces are warps of other blocks
        Address of_tile = __cvta_generic_to_global(partials + (tile * pieces * (TILES * LANES) + lane) * 4);
        for (int i = 0; i < TILES; i++) store_sums(of_tile + (piece * TILES + i) * SUMS_BYTES, sums[i]);
        if (!is_last(arrived + tile, pieces, lane)) return;
        add_pieces<TILES>(sums, pieces, [&](float(&to)[4], int k, int i) { load_sums(to, of_tile + (k * TILES + i) * SUMS_BYTES); });
    }
#pragma unroll
    for (int lower = 0; lower < 2; lower++) {
        int n = tile * OUTPUTS + g + 8 * lower;
        if (n >= num_outputs) break;
        float added = has_bias ? bias[n].wide() : 0.0f;
#pragma unroll
        for (int i = 0; i < TILES * 2; i++) {
            int row = i / 2 * 8 + 2 * t + i % 2;
            if (row < num_rows) out[row * num_outputs + n] = T::of(sums[i / 2][2 * lower + i % 2] + added);
        }
    }
}

// Called by name from Python, so each type, each number of rows, and zeros have names of their own. Strides count numbers, not bytes.
#define W4A16(NAME, T, TILES, ZEROS)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(MOST_WARPS * LANES)                                                                  \
        NAME(const T* x, const Words* codes, const unsigned* scales, const unsigned short* zeros, const T* bias, T* out, float* partials,  \
             unsigned* arrived, int num_rows, int num_outputs, int size, int num_stretches, int num_groups, int group_shift,          \
             int has_bias, int stride_x) {                                                                                            \
        w4a16_tensor_cores<T, TILES, ZEROS>(x, codes, scales, zeros, bias, out, partials, arrived, num_rows, num_outputs, size,       \
                                            num_stretches, num_groups, group_shift, has_bias, stride_x);                              \
    }
W4A16(w4a16_bf16_8, bf16, 1, false)
W4A16(w4a16_bf16_16, bf16, 2, false)
W4A16(w4a16_fp16_8, fp16, 1, false)
W4A16(w4a16_fp16_16, fp16, 2, false)
W4A16(w4a16_bf16_8_zeros, bf16, 1, true)
W4A16(w4a16_bf16_16_zeros, bf16, 2, true)
W4A16(w4a16_fp16_8_zeros, fp16, 1, true)
W4A16(w4a16_fp16_16_zeros, fp16, 2, true)
