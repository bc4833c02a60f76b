// One new token of each sequence attends to keys and values in blocks: the CUDA C++ twin of decode_kernel.
//
// It says what Triton hides: who loads which 16 bytes, and how the parts become one. A block of 4 warps owns one split of the keys
// of a sequence and a KV head. A team of neighbouring lanes owns a key: each loads 16 bytes of its row, 8 lanes for 64 numbers of
// 2 bytes, so that a team's load is one stretch of memory. The lanes of a team add up a score by shuffles; then each adds to its
// own columns of the output. What the teams have seen is merged once, at the end: by shuffles in a warp, through shared memory
// between the warps. Lesson 10's combine merges the splits. cuda_paged.py launches it. No header is included: NVRTC comes without
// cuda_bf16.h. No tensor cores either, because 4 rows of queries would leave most of a tile of 16 empty.

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int LANES = 32, WARPS = 4, THREADS = WARPS * LANES;
constexpr int HEADS = 4;  // query heads of a block; they share its KV head, so each key that is loaded is used 4 times
constexpr int KEYS = 2;   // keys of a team that are on their way at once, because a load takes hundreds of cycles
__device__ float minus_infinity() { return __uint_as_float(0xff800000u); }

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

// What a lane loads at once: 16 bytes, the widest load.
template <typename T>
struct alignas(16) Pack {
    T value[16 / sizeof(T)];
};
template <typename T>
__device__ Pack<T> load(const T* from) {
    return *reinterpret_cast<const Pack<T>*>(from);
}

// ---------------------------------------------------------------- what a lane has seen, of one query head

template <int COLUMNS>
struct Seen {
    float m = minus_infinity();  // the largest score, in base 2
    float l = 0.0f;              // the sum of 2^(score - m)
    float acc[COLUMNS] = {};     // its columns of the sum of 2^(score - m) * v
};

__device__ float weight(float m_old, float m_new) {
    return exp2f(m_old - (m_new == minus_infinity() ? 0.0f : m_new));  // -inf - -inf is NaN: no key seen yet
}

// The teams of a warp trade with each other: lane i with lane i xor TEAM, which holds the same columns for another team's keys.
template <int TEAM, int COLUMNS>
__device__ void merge_teams(Seen<COLUMNS>& seen) {
    for (int distance = TEAM; distance < LANES; distance *= 2) {
        float m_other = __shfl_xor_sync(ALL_LANES, seen.m, distance), m_new = fmaxf(seen.m, m_other);
        float mine = weight(seen.m, m_new), theirs = weight(m_other, m_new);
        seen.l = seen.l * mine + __shfl_xor_sync(ALL_LANES, seen.l, distance) * theirs;
        for (int c = 0; c < COLUMNS; c++) {
            seen.acc[c] = seen.acc[c] * mine + __shfl_xor_sync(ALL_LANES, seen.acc[c], distance) * theirs;
        }
        seen.m = m_new;
    }
}

// ---------------------------------------------------------------- the kernel

template <typename T>
struct Cache {  // K or V: [num_blocks, block_size, Hkv, D]
    const T* start;
    long long stride_block, stride_row, stride_head;
};

// The keys of this block's split, as `split_bounds` of lesson 10 defines them; none if begin is end.
struct Split {
    int begin, end;
};
__device__ Split keys_of_split(int length, int window, int split_size, int keys_a_round) {
    int splits = gridDim.y, first = max(length - window, 0), count = length - first;
    int rounds = (count + splits * keys_a_round - 1) / (splits * keys_a_round);
    int size = static_cast<long long>(split_size) * splits >= count ? split_size : rounds * keys_a_round;
    int begin = min(first + static_cast<int>(blockIdx.y) * size, length);
    return {begin, min(begin + size, length)};
}

template <typename T, int D>
__device__ void paged_decode(const T* q, Cache<T> k_cache, Cache<T> v_cache, float* partial_out, float* partial_lse,
                             const int* context_lens, const int* block_table, float scale_log2e, int window, int split_size,
                             int page_size, int group, long long stride_qb, long long stride_qh, long long stride_table) {
    constexpr int COLUMNS = 16 / sizeof(T), TEAM = D / COLUMNS, TEAMS = THREADS / TEAM;
    __shared__ float m_of[WARPS][HEADS], l_of[WARPS][HEADS], acc_of[WARPS][HEADS][D];
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, team = threadIdx.x / TEAM;
    int column = threadIdx.x % TEAM * COLUMNS;
    int blocks_a_group = (group + HEADS - 1) / HEADS;
    int kv_head = blockIdx.x / blocks_a_group, first_head = blockIdx.x % blocks_a_group * HEADS;
    int heads = min(HEADS, group - first_head);  // the heads behind the group belong to the next KV head
    long long sequence = blockIdx.z, num_heads = gridDim.x / blocks_a_group * group, head_0 = kv_head * group + first_head;

    Pack<T> q_row[HEADS] = {};
    Seen<COLUMNS> seen[HEADS];
    for (int h = 0; h < HEADS; h++) {
        if (h < heads) q_row[h] = load(q + sequence * stride_qb + (head_0 + h) * stride_qh + column);
    }
    const T* k = k_cache.start + kv_head * k_cache.stride_head + column;
    const T* v = v_cache.start + kv_head * v_cache.stride_head + column;
    const int* table = block_table + sequence * stride_table;
    Split split = keys_of_split(context_lens[sequence], window, split_size, KEYS * TEAMS);

    for (int start = split.begin; start < split.end; start += KEYS * TEAMS) {
        Pack<T> k_row[KEYS] = {}, v_row[KEYS] = {};  // 0 behind the split: what lies there is never read, and may be NaN
        for (int j = 0; j < KEYS; j++) {
            int key = start + j * TEAMS + team;  // neighbouring teams load neighbouring rows
            if (key < split.end) {
                long long block = table[key / page_size], row = key % page_size;
                k_row[j] = load(k + block * k_cache.stride_block + row * k_cache.stride_row);
                v_row[j] = load(v + block * v_cache.stride_block + row * v_cache.stride_row);
            }
        }
#pragma unroll  // because registers have no index: `seen` and `q_row` would lie in memory
        for (int h = 0; h < HEADS; h++) {
            float scores[KEYS], m_new = seen[h].m;
            for (int j = 0; j < KEYS; j++) {
                float score = 0.0f;
                for (int c = 0; c < COLUMNS; c++) score += to_float(q_row[h].value[c]) * to_float(k_row[j].value[c]);
                for (int distance = TEAM / 2; distance > 0; distance /= 2) score += __shfl_xor_sync(ALL_LANES, score, distance);
                scores[j] = start + j * TEAMS + team < split.end ? score * scale_log2e : minus_infinity();
                m_new = fmaxf(m_new, scores[j]);
            }
            float alpha = weight(seen[h].m, m_new);
            seen[h].m = m_new;
            seen[h].l *= alpha;
            for (int c = 0; c < COLUMNS; c++) seen[h].acc[c] *= alpha;
            for (int j = 0; j < KEYS; j++) {
                float p = weight(scores[j], m_new);
                seen[h].l += p;
                for (int c = 0; c < COLUMNS; c++) seen[h].acc[c] += p * to_float(v_row[j].value[c]);
            }
        }
    }

    for (int h = 0; h < HEADS; h++) {
        merge_teams<TEAM>(seen[h]);
        if (lane == 0) m_of[warp][h] = seen[h].m, l_of[warp][h] = seen[h].l;
        if (lane < TEAM) {  // the first team of each warp has what all of them have seen
            for (int c = 0; c < COLUMNS; c++) acc_of[warp][h][column + c] = seen[h].acc[c];
        }
    }
    __syncthreads();  // the warps' parts are complete
    for (int i = threadIdx.x; i < heads * D; i += THREADS) {
        int h = i / D, d = i % D;
        float m = minus_infinity(), l = 0.0f, acc = 0.0f;
        for (int w = 0; w < WARPS; w++) m = fmaxf(m, m_of[w][h]);
        for (int w = 0; w < WARPS; w++) {
            l += l_of[w][h] * weight(m_of[w][h], m);
            acc += acc_of[w][h][d] * weight(m_of[w][h], m);
        }
        // A split without a key writes 0, and by log2(0) the weight -inf, because combine reads every partial.
        long long partial = (sequence * num_heads + head_0 + h) * gridDim.y + blockIdx.y;
        partial_out[partial * D + d] = acc / (l == 0.0f ? 1.0f : l);
        if (d == 0) partial_lse[partial] = (m + log2f(l)) * 0.6931471805599453f;  // ln 2: combine expects base e
    }
}

// Called by name from Python, so each type and head size has a name of its own. Strides count numbers, not bytes.
#define PAGED_DECODE(NAME, T, D)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(                                                                \
        const T* q, const T* k_cache, const T* v_cache, float* partial_out, float* partial_lse, const int* context_lens,       \
        const int* block_table, float scale_log2e, int window, int split_size, int page_size, int group, long long stride_qb,  \
        long long stride_qh, long long stride_kblock, long long stride_kn, long long stride_kh, long long stride_vblock,       \
        long long stride_vn, long long stride_vh, long long stride_table) {                                                    \
        paged_decode<T, D>(q, {k_cache, stride_kblock, stride_kn, stride_kh}, {v_cache, stride_vblock, stride_vn, stride_vh},  \
                           partial_out, partial_lse, context_lens, block_table, scale_log2e, window, split_size, page_size,    \
                           group, stride_qb, stride_qh, stride_table);                                                         \
    }
PAGED_DECODE(paged_decode_bf16_64, bf16, 64)
PAGED_DECODE(paged_decode_bf16_128, bf16, 128)
PAGED_DECODE(paged_decode_fp16_64, fp16, 64)
PAGED_DECODE(paged_decode_fp16_128, fp16, 128)
PAGED_DECODE(paged_decode_fp32_64, float, 64)
PAGED_DECODE(paged_decode_fp32_128, float, 128)
