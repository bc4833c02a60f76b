// Version 1: a thread owns a query. It walks over the keys with an online softmax, as naive.py's tiled_attention does, but a key at a time.
//
// Nothing is shared: each thread reads its query, every key and every value from global memory by itself, number by number.

typedef unsigned short bf16;  // the bits: NVRTC comes without cuda_bf16.h
__device__ float minus_infinity() { return __uint_as_float(0xff800000u); }
__device__ float to_float(bf16 bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
__device__ bf16 rounded(float x) {  // to the nearest, ties to even; NaN stays NaN
    unsigned wide = __float_as_uint(x);
    return x == x ? (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16 : 0x7fffu;
}

constexpr int BLOCK_M = 64;  // threads of a block: a query each

template <int D>
__device__ void flash_forward(const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse, long long num_queries,
                              long long num_keys, long long num_kv_heads, float softmax_scale, long long causal) {
    long long num_heads = gridDim.x, head = blockIdx.x, kv_head = head / (num_heads / num_kv_heads);
    long long query = static_cast<long long>(blockIdx.y) * BLOCK_M + threadIdx.x;
    if (query >= num_queries) return;
    const bf16* my_q = q + (query * num_heads + head) * D;
    long long stands_at = query + num_keys - num_queries;  // its key: bottom-right aligned
    long long end = causal && stands_at + 1 < num_keys ? stands_at + 1 : num_keys;

    float m_i = minus_infinity(), l_i = 0.0f, acc[D];
    for (int d = 0; d < D; d++) acc[d] = 0.0f;
    for (long long key = 0; key < end; key++) {
        const bf16* its_k = k + (key * num_kv_heads + kv_head) * D;
        const bf16* its_v = v + (key * num_kv_heads + kv_head) * D;
        float score = 0.0f;
        for (int d = 0; d < D; d++) score += to_float(my_q[d]) * to_float(its_k[d]);
        score *= softmax_scale;
        float m_new = fmaxf(m_i, score);
        float m_safe = m_new == minus_infinity() ? 0.0f : m_new;  // -inf - -inf is NaN
        float alpha = __expf(m_i - m_safe), p = __expf(score - m_safe);
        l_i = l_i * alpha + p;
        for (int d = 0; d < D; d++) acc[d] = acc[d] * alpha + p * to_float(its_v[d]);
        m_i = m_new;
    }
    float share = 1.0f / (l_i == 0.0f ? 1.0f : l_i);  // late division; a query without a key gives 0
    for (int d = 0; d < D; d++) out[(query * num_heads + head) * D + d] = rounded(acc[d] * share);
    lse[query * num_heads + head] = m_i + __logf(l_i);
}

// Called by name from Python, so each head size has a name of its own.
#define FLASH(D)                                                                                                               \
    extern "C" __global__ void __launch_bounds__(BLOCK_M) flash_naive_##D(                                                     \
        const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse, long long num_queries, long long num_keys,         \
        long long num_kv_heads, float softmax_scale, long long causal) {                                                       \
        flash_forward<D>(q, k, v, out, lse, num_queries, num_keys, num_kv_heads, softmax_scale, causal);                       \
    }
FLASH(64)
FLASH(128)
