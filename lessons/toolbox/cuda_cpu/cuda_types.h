// CUDA's small vectors, which a thread loads in one instruction, and its 16-bit floats.
#pragma once

#define CUDA_CPU_VECTORS(T, NAME)                                                      \
    struct alignas(2 * sizeof(T)) NAME##2 {                                            \
        T x, y;                                                                        \
    };                                                                                 \
    struct NAME##3 {                                                                   \
        T x, y, z;                                                                     \
    };                                                                                 \
    struct alignas(4 * sizeof(T)) NAME##4 {                                            \
        T x, y, z, w;                                                                  \
    };                                                                                 \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                         \
    inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                 \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_CPU_VECTORS(float, float)
CUDA_CPU_VECTORS(int, int)
CUDA_CPU_VECTORS(unsigned short, ushort)
CUDA_CPU_VECTORS(signed char, char)
CUDA_CPU_VECTORS(unsigned char, uchar)
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct alignas(16) double2 {
    double x, y;
};

// bfloat16: the upper half of a float; rounded to nearest, ties to even, and NaN stays NaN.
struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) {
        unsigned wide = __float_as_uint(x);
        bits = x == x ? (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16 : 0x7fffu;
    }
    operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
};

// half: 1 sign, 5 exponent and 10 mantissa bits, as IEEE 754 has it.
struct __half {
    unsigned short bits;
    __half() = default;
    __half(float x) {
        unsigned sign = __float_as_uint(x) >> 16 & 0x8000u;
        float size = fabsf(x);
        unsigned value;
        if (!(size == size)) {
            value = 0x7fffu;
        } else if (size >= 65520.0f) {  // halfway from the largest half, 65504, to the next
            value = 0x7c00u;
        } else if (size < 0x1p-14f) {  // subnormal: a whole number of steps of 2^-24
            value = static_cast<unsigned>(rintf(size * 0x1p24f));
        } else {  // drop 13 bits of the mantissa, and 127 - 15 from the exponent
            unsigned wide = __float_as_uint(size);
            value = (wide + 0xfffu + ((wide >> 13) & 1u) - (112u << 23)) >> 13;
        }
        bits = sign | value;
    }
    operator float() const {
        unsigned sign = (bits & 0x8000u) << 16, size = bits & 0x7fffu;
        if (size >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (size & 0x3ffu) << 13);
        if (size < 0x400u) return __uint_as_float(sign | __float_as_uint(size * 0x1p-24f));
        return __uint_as_float(sign | ((size << 13) + (112u << 23)));
    }
};
using half = __half;
using nv_bfloat16 = __nv_bfloat16;
struct alignas(4) __half2 {
    __half x, y;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
using half2 = __half2;
using nv_bfloat162 = __nv_bfloat162;

inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline float __half2float(__half x) { return x; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
