// One row of x times a matrix of 4-bit codes: the CUDA C++ twin of quantized_matmul_kernel for W4A16 at batch 1.
//
// It says what Triton hides: who loads which 16 bytes, and how a code becomes a number. A block of 4 warps owns 4 outputs. Each warp
// takes stretches of 512 bytes of their rows, one after another: a lane loads 16 bytes of each row, which are 32 codes, and the 32
// numbers of x that belong to them, once for all 4 rows. All of its codes lie in one group, so it adds them up as whole numbers
// times x and multiplies by the group's scale once. Sums are float32: shuffles add up the lanes of a warp, shared memory the warps,
// in an order that never changes. No tensor cores: a single row would leave 15 of a tile's 16 rows empty.
//
// A code becomes a float by bit operations alone. A float whose exponent says 2^(23 - p) counts in steps of 1 at bit p of its
// mantissa, so a code that stands at bit p of a word needs no shift: (word & 15 << p) | exponent = 2^(23 - p) + code, exactly.
// The subtraction that removes 2^(23 - p) removes the zero point as well. cuda_w4a16.py launches it. No header is included.

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int LANES = 32, WARPS = 4, THREADS = WARPS * LANES;
constexpr int OUTPUTS = 4;            // of a block: x is loaded once for so many rows of the matrix
constexpr int BYTES = 16, WORDS = 4;  // of codes that a lane loads at once, the widest load

// ---------------------------------------------------------------- numbers

struct bf16 {  // the upper half of a float
    unsigned short bits;
};
struct fp16 {  // 1 bit for the sign, 5 for the exponent, 10 for the mantissa
    unsigned short bits;
};
__device__ float to_float(float x) { return x; }
__device__ float to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ float to_float(fp16 x) {
    // Infinity and NaN have all bits of the exponent set, there as here. All else is moved into place, and then 2^112 times too
    // small, because exponents count from 15 in float16 and from 127 in float.
    unsigned special = (x.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    return __uint_as_float((x.bits & 0x8000u) << 16 | (x.bits & 0x7fffu) << 13 | special) * 0x1p112f;
}
__device__ void store(float* to, float x) { *to = x; }
__device__ void store(bf16* to, float x) {  // to nearest, ties to even; NaN stays one
    unsigned bits = __float_as_uint(x);
    to->bits = x != x ? 0x7fffu : static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
__device__ void store(fp16* to, float x) {
    unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        to->bits = static_cast<unsigned short>(sign | 0x7e00u);  // NaN
    } else if (magnitude >= 0x477ff000u) {                       // from 65520 on it rounds to infinity
        to->bits = static_cast<unsigned short>(sign | 0x7c00u);
    } else if (magnitude < 0x38800000u) {  // below 2^-14: steps of 2^-24, and adding 0.5 rounds to them
        float steps = __fadd_rn(__uint_as_float(magnitude), 0.5f);
        to->bits = static_cast<unsigned short>(sign | (__float_as_uint(steps) - 0x3f000000u));
    } else {
        to->bits = static_cast<unsigned short>(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
    }
}

template <int N>
struct alignas(16) Pack {  // what is loaded 16 bytes at a time
    unsigned word[N];
};
template <typename T>
__device__ void load_16(float (&numbers)[16], const T* from) {  // 16 neighbours, 16-byte aligned
    constexpr int EACH = 16 / sizeof(T);
    struct alignas(16) Few {
        T value[EACH];
    };
#pragma unroll
    for (int i = 0; i < 16; i += EACH) {
        Few few = *reinterpret_cast<const Few*>(from + i);
#pragma unroll
        for (int j = 0; j < EACH; j++) numbers[i + j] = to_float(few.value[j]);
    }
}

// Code PLACE / 4 of a word, minus the zero point. The mantissa ends at bit 22, and a code at bit 20 would reach beyond it. So the
// upper three codes are shifted down first.
template <int PLACE>
__device__ float number(unsigned word, float zero) {
    constexpr int p = PLACE <= 16 ? PLACE : PLACE - 12;
    constexpr unsigned exponent = (127u + 23u - p) << 23;
    unsigned code = (PLACE <= 16 ? word : word >> 12) & 15u << p;
    return __uint_as_float(code | exponent) - (__uint_as_float(exponent) + zero);
}

// ---------------------------------------------------------------- the kernel

// x: [M, K]; codes: [N, row_bytes], as GroupedInt packs them; scales, zeros: [N, groups]. grid: ceil(N / OUTPUTS), M.
template <typename T>
__device__ void w4a16(const T* x, const unsigned char* codes, const fp16* scales, const unsigned char* zeros, const T* bias, T* out,
                      int num_outputs, int row_bytes, int group_bytes, int has_zeros, int has_bias, long long stride_x,
                      long long stride_codes, long long stride_scales, long long stride_zeros) {
    __shared__ float sum_of[WARPS][OUTPUTS];
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, first = blockIdx.x * OUTPUTS;
    x += blockIdx.y * stride_x;
    float sums[OUTPUTS] = {};
    for (int byte = threadIdx.x * BYTES; byte < row_bytes; byte += THREADS * BYTES) {
        int group = byte / group_bytes;
        const T* columns = x + byte + group * group_bytes;  // of the low halves; the high ones lie group_bytes further
        float x_low[16], x_high[16];
        load_16(x_low, columns);
        load_16(x_high, columns + group_bytes);
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) {
            int n = min(first + o, num_outputs - 1);  // behind the last output: the last one again, not stored
            auto pack = *reinterpret_cast<const Pack<WORDS>*>(codes + n * stride_codes + byte);
            float zero = has_zeros ? static_cast<float>(zeros[n * stride_zeros + group]) : 8.0f;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                unsigned word = pack.word[w];  // byte b of it: column 4 w + b in its low half, and in its high half
                sum += x_low[4 * w] * number<0>(word, zero) + x_high[4 * w] * number<4>(word, zero);
                sum += x_low[4 * w + 1] * number<8>(word, zero) + x_high[4 * w + 1] * number<12>(word, zero);
                sum += x_low[4 * w + 2] * number<16>(word, zero) + x_high[4 * w + 2] * number<20>(word, zero);
                sum += x_low[4 * w + 3] * number<24>(word, zero) + x_high[4 * w + 3] * number<28>(word, zero);
            }
            sums[o] += sum * to_float(scales[n * stride_scales + group]);
        }
    }
    for (int o = 0; o < OUTPUTS; o++) {
        for (int distance = LANES / 2; distance > 0; distance /= 2) sums[o] += __shfl_xor_sync(ALL_LANES, sums[o], distance);
        if (lane == 0) sum_of[warp][o] = sums[o];
    }
    __syncthreads();  // the warps' sums are complete
    int n = first + static_cast<int>(threadIdx.x);
    if (threadIdx.x < OUTPUTS && n < num_outputs) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; w++) sum += sum_of[w][threadIdx.x];
        store(out + static_cast<long long>(blockIdx.y) * num_outputs + n, sum + (has_bias ? to_float(bias[n]) : 0.0f));
    }
}

// Called by name from Python, so each type has a name of its own. Strides count numbers, not bytes.
#define W4A16(NAME, T)                                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                         \
        NAME(const T* x, const unsigned char* codes, const fp16* scales, const unsigned char* zeros, const T* bias, T* out,       \
             int num_outputs, int row_bytes, int group_bytes, int has_zeros, int has_bias, long long stride_x,                    \
             long long stride_codes, long long stride_scales, long long stride_zeros) {                                           \
        w4a16<T>(x, codes, scales, zeros, bias, out, num_outputs, row_bytes, group_bytes, has_zeros, has_bias, stride_x,          \
                 stride_codes, stride_scales, stride_zeros);                                                                      \
    }
W4A16(w4a16_bf16, bf16)
W4A16(w4a16_fp16, fp16)
W4A16(w4a16_fp32, float)
