// Softmax over rows of any length and its log-sum-exp, one block a row: the CUDA C++ twin of online_softmax_kernel.
//
// It says what Triton hides: which thread holds which part of the row, and how 1024 parts become one. Each thread keeps m and l of
// the scores that it has seen; 32 threads merge theirs through their registers (warp_merge), 32 warps through shared memory
// (block_merge). cuda_softmax.py launches it. No header is included: NVRTC comes without cuda_bf16.h.

constexpr unsigned ALL_LANES = 0xffffffffu;              // one bit for each of a warp's 32 threads, its lanes
constexpr float LOWEST = -3.4028234663852886e38f;        // below every score, and finite: -inf - LOWEST is no NaN

// ---------------------------------------------------------------- numbers

using bf16 = unsigned short;  // its 16 bits, the upper half of a float's

__device__ float to_float(bf16 bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
__device__ float to_float(float x) { return x; }

__device__ void from_float(float x, bf16& bits) {
    // To the nearest, ties to even: add just less than half of the lowest bit that stays, and its parity. NaN stays NaN,
    // because adding could carry it into an infinity.
    unsigned wide = __float_as_uint(x);
    bits = x == x ? (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16 : 0x7fffu;
}
__device__ void from_float(float x, float& y) { y = x; }

// COUNT numbers that a thread loads or stores at once: one instruction of 16 bytes where sizeof(T) * COUNT is 16.
template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT) Pack {
    T value[COUNT];
};

// ---------------------------------------------------------------- what a thread has seen

struct Seen {
    float m;  // the largest score
    float l;  // the sum of exp(score - m)
};

__device__ Seen merge(Seen a, Seen b) {
    float m = fmaxf(a.m, b.m);
    // Each operation rounded by itself: the compiler would fuse one product into the sum (an FMA rounds it differently from the
    // other), and then merge(a, b) and merge(b, a) differ in the last bit, and so would the lanes of a warp.
    float from_a = __fmul_rn(a.l, __expf(a.m - m));
    float from_b = __fmul_rn(b.l, __expf(b.m - m));
    return {m, __fadd_rn(from_a, from_b)};
}

// The butterfly. In each round a lane trades with the lane whose number differs in one bit: 16, then 8, 4, 2, 1. After five rounds
// every lane holds the merge of all 32, without shared memory and without a barrier.
__device__ Seen warp_merge(Seen mine) {
    for (int distance = 16; distance > 0; distance /= 2) {
        // Lane i gets the register of lane i xor distance. The mask names the lanes that take part; all of them must arrive here.
        Seen other = {__shfl_xor_sync(ALL_LANES, mine.m, distance), __shfl_xor_sync(ALL_LANES, mine.l, distance)};
        mine = merge(mine, other);
    }
    return mine;
}

// One Seen for each warp through shared memory, and the butterfly once more. Every thread returns with the same bits.
__device__ Seen block_merge(Seen mine) {
    __shared__ Seen of_warp[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    mine = warp_merge(mine);
    if (lane == 0) of_warp[warp] = mine;
    __syncthreads();
    return warp_merge(lane < num_warps ? of_warp[lane] : Seen{LOWEST, 0.0f});
}

// ---------------------------------------------------------------- the kernel

template <typename T, int COUNT>
__device__ void softmax_row(const T* scores, T* probs, float* lse, long long num_columns, long long stride_row) {
    scores += blockIdx.x * stride_row;
    probs += blockIdx.x * num_columns;
    auto packs = reinterpret_cast<const Pack<T, COUNT>*>(scores);
    long long num_packs = num_columns / COUNT;  // exactly: cuda_softmax.py takes COUNT 1 where it would not be

    // Pass 1. Neighbouring threads read neighbouring packs, so that a warp's load is one stretch of memory.
    Seen seen = {LOWEST, 0.0f};
    for (long long i = threadIdx.x; i < num_packs; i += blockDim.x) {
        Pack<T, COUNT> pack = packs[i];
        float m = seen.m;
        for (int j = 0; j < COUNT; j++) m = fmaxf(m, to_float(pack.value[j]));
        seen.l *= __expf(seen.m - m);
        for (int j = 0; j < COUNT; j++) seen.l += __expf(to_float(pack.value[j]) - m);
        seen.m = m;
    }
    seen = block_merge(seen);
    if (threadIdx.x == 0) lse[blockIdx.x] = seen.m + __logf(seen.l);

    // Pass 2, backwards, because what pass 1 read last is still in the cache.
    float share = 1.0f / (seen.l == 0.0f ? 1.0f : seen.l);  // a row of -inf alone: 0 * 1 instead of 0 / 0
    for (long long i = num_packs - 1 - threadIdx.x; i >= 0; i -= blockDim.x) {
        Pack<T, COUNT> pack = packs[i];
        for (int j = 0; j < COUNT; j++) from_float(__expf(to_float(pack.value[j]) - seen.m) * share, pack.value[j]);
        reinterpret_cast<Pack<T, COUNT>*>(probs)[i] = pack;
    }
}

// Called by name from Python, so each type and width has a name of its own: x8 and x4 are 16 bytes at once, x1 fits any row.
// scores: [R, num_columns], rows stride_row apart; probs: [R, num_columns], dense; lse: [R].
extern "C" __global__ void __launch_bounds__(1024) softmax_bf16x8(
    const bf16* scores, bf16* probs, float* lse, long long num_columns, long long stride_row) {
    softmax_row<bf16, 8>(scores, probs, lse, num_columns, stride_row);
}
extern "C" __global__ void __launch_bounds__(1024) softmax_bf16x1(
    const bf16* scores, bf16* probs, float* lse, long long num_columns, long long stride_row) {
    softmax_row<bf16, 1>(scores, probs, lse, num_columns, stride_row);
}
extern "C" __global__ void __launch_bounds__(1024) softmax_fp32x4(
    const float* scores, float* probs, float* lse, long long num_columns, long long stride_row) {
    softmax_row<float, 4>(scores, probs, lse, num_columns, stride_row);
}
extern "C" __global__ void __launch_bounds__(1024) softmax_fp32x1(
    const float* scores, float* probs, float* lse, long long num_columns, long long stride_row) {
    softmax_row<float, 1>(scores, probs, lse, num_columns, stride_row);
}
